"""The launcher on real processes: logs, signals, and a rank that dies."""

import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.conftest import ROOT

GOOD = """
import os
print("rank", os.environ["RANK"], "of", os.environ["WORLD_SIZE"], flush=True)
"""
ONE_DIES = """
import os, sys, time
print("rank", os.environ["RANK"], flush=True)
if os.environ["RANK"] == "1":
    print("the reason", file=sys.stderr, flush=True)
    sys.exit(3)
time.sleep(60)
"""
WAITS = """
import os, signal, sys, time
def ended(number, frame):
    print("told", number, flush=True)
    sys.exit(0)
signal.signal(signal.SIGTERM, ended)
print("pid", os.getpid(), flush=True)
time.sleep(60)
"""


@pytest.fixture
def launch(tmp_path):
    """Start the launcher on a script with two processes."""

    def start(text, *words):
        (tmp_path / "script.py").write_text(text)
        command = [sys.executable, str(ROOT / "scripts" / "launch.py"), "--nproc_per_node", "2", "--log_dir", "logs"]
        return subprocess.Popen(
            [*command, *words, "script.py"],
            cwd=tmp_path,
            env={**os.environ, "CUDA_VISIBLE_DEVICES": "", "PYTHONPATH": str(ROOT / "src")},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    return start


def log(folder: Path, rank: int) -> str:
    return (folder / "logs" / f"workerlog.{rank}").read_text()


def test_each_process_has_its_log(launch, tmp_path):
    started = launch(GOOD)
    out, error = started.communicate(timeout=60)
    assert started.returncode == 0, error
    assert out == "rank 0 of 2\n"  # the first process is also on the terminal
    assert (log(tmp_path, 0), log(tmp_path, 1)) == ("rank 0 of 2\n", "rank 1 of 2\n")
    assert "torchrun --standalone --local_addr 127.0.0.1 --nproc_per_node 2 script.py" in error
    assert sorted(path.name for path in (tmp_path / "logs").iterdir()) == ["workerlog.0", "workerlog.1"]


def test_one_that_dies_ends_all_and_is_named(launch):
    started = launch(ONE_DIES)
    before = time.monotonic()
    _, error = started.communicate(timeout=60)
    assert time.monotonic() - before < 45
    assert started.returncode == 3
    assert "error: rank 1 ended with exit code 3, the other ranks were ended" in error
    assert "workerlog.1" in error and "    the reason" in error


def test_a_signal_reaches_all_and_nothing_is_left(launch, tmp_path):
    started = launch(WAITS)
    deadline = time.monotonic() + 60
    pids: list[str] = []
    while len(pids) < 2 and time.monotonic() < deadline:
        time.sleep(0.2)
        pids = [p for rank in (0, 1) if (tmp_path / f"logs/workerlog.{rank}").exists()
                for p in re.findall(r"pid (\d+)", log(tmp_path, rank))]  # fmt: skip
    assert len(pids) == 2
    started.send_signal(signal.SIGTERM)
    _, error = started.communicate(timeout=60)
    assert started.returncode == 128 + signal.SIGTERM
    assert "ended by SIGTERM, which was passed on to all ranks" in error
    assert all("told 15" in log(tmp_path, rank) for rank in (0, 1))
    assert not any(Path(f"/proc/{pid}").exists() for pid in pids)


def test_oneflow_s_command_starts_its_own_processes(corpus_folder, tmp_path):
    """No launcher: the training command asks for two processes and gets them."""
    sizes = "--num-layers 2 --hidden-size 32 --num-attention-heads 2 --seq-length 16 --vocab-size 512"
    data = next((corpus_folder / "mmap").glob("*.bin")).with_suffix("")
    words = f"{sizes} --micro-batch-size 2 --global-batch-size 8 --num-gpus-per-node 2 --train-iters 2 --log-interval 1"
    words += f" --dataset {data} --save {tmp_path}/out --split 80,10,10 --device cpu"
    done = subprocess.run(
        [sys.executable, str(ROOT / "scripts" / "run_pretrain.py"), *words.split()],
        cwd=tmp_path,
        env={**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    assert "gptlm launch: torchrun --standalone" in done.stderr
    assert "Tokens per step = 128 (2 x 2 x 2 x 16)" in done.stdout
    assert (tmp_path / "out" / "model.safetensors").exists()
