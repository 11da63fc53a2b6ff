"""`transformers chat` and `transformers serve`, the real commands, on a folder that fine-tuning saved."""

import socket
import subprocess
import sys
import time
from urllib.error import URLError
from urllib.request import urlopen

import pytest

from tests.recipes.test_chat import folder
from tests.recipes.test_sft_templates import ASKED, SAID, model

pytest.importorskip("fastapi", reason="transformers serve needs it")
pytest.importorskip("uvicorn", reason="transformers serve needs it")
__all__ = ["folder", "model"]  # fixtures
COMMAND = "import sys; from transformers.cli.transformers import main; sys.exit(main())"


def command(*words):
    return [sys.executable, "-c", COMMAND, *map(str, words)]


@pytest.fixture
def address(folder, tmp_path):
    """Of a server of transformers with the model in `folder`."""
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = free.getsockname()[1]
    with (tmp_path / "log").open("w") as log:
        server = subprocess.Popen(
            command("serve", folder, "--port", port, "--device", "cpu"), stdout=log, stderr=subprocess.STDOUT
        )
        try:
            for _ in range(300):
                assert server.poll() is None, (tmp_path / "log").read_text()
                try:
                    assert urlopen(f"http://localhost:{port}/health").status == 200
                    break
                except URLError:
                    time.sleep(1)
            yield f"http://localhost:{port}"
        finally:
            server.kill()
            server.wait()


@pytest.mark.slow
def test_transformers_chat_answers_as_trained(folder, address):
    """Two turns: the second answer depends on the first, through the saved chat template."""
    pytest.importorskip("fastapi")
    talk = subprocess.run(
        command("chat", folder, address, "do_sample=False", "max_new_tokens=20"),
        input=f"{ASKED}\ntwo dogs\n!exit\n", capture_output=True, text=True, timeout=300,
    )  # fmt: skip
    assert talk.returncode == 0, talk.stderr
    answers = [line.strip() for line in talk.stdout.splitlines()]
    assert SAID in answers and "ran far" in answers[answers.index(SAID) :]
