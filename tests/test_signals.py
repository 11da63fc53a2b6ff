"""Signals before a command runs, inside a library, and after the command: no traceback."""

import os
import signal
import subprocess
import sys

import pytest
import torch

from gptlm.cli import main

SENDING = """
import os, sys
class Sender:
    def find_spec(self, name, *rest):
        if name == "{module}":
            os.kill(os.getpid(), {number:d})
sys.meta_path.insert(0, Sender())
"""
RUN = """
import sys
from gptlm.cli import main
sys.exit(main(["tokenizer", "--input_path", "{folder}", "--output_dir", "{folder}/out"]))
"""


def ended(code: str) -> tuple[int, str]:
    """Exit code, as a shell shows it, and stderr of a new process."""
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    return 128 - result.returncode if result.returncode < 0 else result.returncode, result.stderr


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
@pytest.mark.parametrize("module", ["gptlm.config.help", "tokenizers", "transformers"])
def test_a_signal_during_the_imports(module, number, tmp_path):
    (tmp_path / "text.txt").write_text("the cat sat")
    code, error = ended(SENDING.format(module=module, number=number) + RUN.format(folder=tmp_path))
    assert code == 128 + number and error.count("\n") <= 1 and "Traceback" not in error, error
    assert [path.name for path in tmp_path.iterdir()] == ["text.txt"]


def test_ctrl_c_while_libraries_clean_up(tmp_path):
    """What they have registered for the end of the process would print a traceback."""
    late = "import atexit, os, signal; atexit.register(lambda: os.kill(os.getpid(), signal.SIGINT))"
    code, error = ended(f"{late}\nfrom gptlm.cli import main\nmain(['--version'])")
    assert (code, error) == (130, "")


@pytest.mark.parametrize(("number", "says"), [(signal.SIGTERM, "ended by SIGTERM"), (signal.SIGINT, "interrupted")])
def test_an_error_that_a_library_makes_of_the_signal_is_not_reported(monkeypatch, capsys, number, says):
    class Rows(list):
        def __getitem__(self, place):
            os.kill(os.getpid(), number)
            return super().__getitem__(place)

    monkeypatch.setattr("gptlm.recipes.report.run.report", lambda arguments: torch.tensor(Rows([1, 2])))
    with pytest.raises(ValueError, match="could not determine the shape"):  # what torch makes of any error there
        torch.tensor(Failing([1, 2]))
    assert main(["report", "out"]) == 128 + number
    assert capsys.readouterr().err == f"gptlm report: {says}\n"
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


class Failing(list):
    def __getitem__(self, place):
        raise KeyboardInterrupt
