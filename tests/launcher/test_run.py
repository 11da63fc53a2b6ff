"""Launches of two processes of a small script: output, exit code, signals. None needs a GPU."""

import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from tests.conftest import ROOT

pytestmark = pytest.mark.distributed

SCRIPT = """
import os, signal, sys, time
from pathlib import Path

rank = os.environ["RANK"]
print("rank", rank, "of", os.environ["WORLD_SIZE"], "words", sys.argv[1:], os.environ.get("CUDA_VISIBLE_DEVICES"))
print("to stderr", rank, file=sys.stderr)
end = sys.argv[1]
if end == "dies" and rank == "1":
    print("the reason")
    sys.exit(3)
if end == "killed" and rank == "1":
    os.kill(os.getpid(), signal.SIGKILL)
if end != "ends":
    def got(number, frame):
        print("rank", rank, "got", number)
        sys.exit(1)
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, got)
    Path(f"ready{rank}").touch()
    time.sleep(60)
"""


@pytest.fixture(autouse=True)
def here(tmp_path) -> Path:
    (tmp_path / "small.py").write_text(SCRIPT)
    return tmp_path


def start(here: Path, *words: str) -> subprocess.Popen:
    clean = {key: value for key, value in os.environ.items() if key not in ("RANK", "WORLD_SIZE", "LOCAL_RANK")}
    return subprocess.Popen(
        [sys.executable, "-m", "gptlm.launch", *words],
        cwd=here,
        env={**clean, "OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )


def ended(launcher: subprocess.Popen) -> tuple[int, str, str]:
    """Exit code, stdout and stderr."""
    try:
        stdout, stderr = launcher.communicate(timeout=60)
    finally:
        launcher.kill()
    return launcher.returncode, stdout, stderr


def left(here: Path) -> list[list[str]]:
    """Living processes that were started in `here`."""
    found = []
    for process in psutil.process_iter():
        try:
            if process.status() != psutil.STATUS_ZOMBIE and process.cwd() == str(here):
                found.append(process.cmdline())
        except (psutil.NoSuchProcess, psutil.AccessDenied):
            continue
    return found


def wait_for(here: Path, condition) -> None:
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline, left(here)
        time.sleep(0.02)


@pytest.fixture(scope="module")
def runs(tmp_path_factory) -> dict[str, tuple[Path, int, str, str]]:
    """Folder, exit code, stdout and stderr of runs by what their ranks do; all run at the same time."""
    launchers = {}
    for name in ("ends", "dies", "killed"):
        folder = tmp_path_factory.mktemp(name)
        (folder / "small.py").write_text(SCRIPT)
        (folder / "my logs").mkdir()
        (folder / "my logs" / "workerlog.1").write_text("an earlier run\n")
        more = {"ends": ["--gpus", "0,1", "--log_overwrite"], "dies": ["--nproc_per_node", "2"]}
        words = [*more.get(name, more["dies"]), "--log_dir", "my logs", "small.py", name, "a b"]
        launchers[name] = (folder, start(folder, *words))
    return {name: (folder, *ended(launcher)) for name, (folder, launcher) in launchers.items()}


def test_two_ranks_run_to_completion(runs):
    folder, code, stdout, stderr = runs["ends"]
    command = "torchrun --standalone --local_addr 127.0.0.1 --nproc_per_node 2 small.py ends 'a b'"
    assert (code, stdout) == (0, "rank 0 of 2 words ['ends', 'a b'] 0,1\n"), stderr
    assert stderr == f"gptlm launch: CUDA_VISIBLE_DEVICES=0,1 {command}\nto stderr 0\n"
    for rank in (0, 1):
        lines = (folder / "my logs" / f"workerlog.{rank}").read_text().splitlines()
        assert sorted(lines) == [f"rank {rank} of 2 words ['ends', 'a b'] 0,1", f"to stderr {rank}"]
    assert sorted(path.name for path in (folder / "my logs").iterdir()) == ["workerlog.0", "workerlog.1"]
    assert left(folder) == []


def test_the_first_failed_rank_is_named(runs):
    folder, code, _, stderr = runs["dies"]
    assert code == 3 and "error: rank 1 failed with exit code 3" in stderr
    last_lines = stderr.split("its output is in my logs/workerlog.1, the last lines are\n")[1].splitlines()
    assert "    the reason" in last_lines and "    to stderr 1" in last_lines and "    an earlier run" not in last_lines
    assert "the reason" not in stderr.split("error: rank 1")[0]  # only rank 0 writes to the terminal
    log = (folder / "my logs" / "workerlog.1").read_text()
    assert log.startswith("an earlier run\n") and "the reason\n" in log
    assert "Traceback" not in stderr and left(folder) == []


def test_a_rank_that_is_killed(runs):
    folder, code, _, stderr = runs["killed"]
    assert code == 128 + 9 and "error: rank 1 failed with signal SIGKILL" in stderr and left(folder) == []


def test_a_signal_reaches_every_rank(here):
    launchers = {}
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        folder = here / number.name
        folder.mkdir()
        (folder / "small.py").write_text(SCRIPT)
        launchers[number] = (folder, start(folder, "--nproc_per_node", "2", "small.py", "waits"))
    for number, (folder, launcher) in launchers.items():
        wait_for(folder, lambda: all((folder / f"ready{rank}").exists() for rank in (0, 1)))  # noqa: B023
        launcher.send_signal(number)
    for number, (folder, launcher) in launchers.items():
        code, _, stderr = ended(launcher)
        assert code == 128 + number and f"terminated by {number.name}" in stderr
        for rank in (0, 1):
            assert f"rank {rank} got {int(number)}\n" in (folder / "log" / f"workerlog.{rank}").read_text()
        assert left(folder) == []


@pytest.mark.parametrize("waited", [0.0, 0.3, 1.0])
def test_a_signal_during_the_start_leaves_nothing(here, waited):
    launcher = start(here, "--nproc_per_node", "2", "small.py", "waits")
    wait_for(here, lambda: len(left(here)) > 1)  # torchrun has started, or is about to
    time.sleep(waited)
    launcher.terminate()
    assert ended(launcher)[0] == 143 and left(here) == []


def test_killing_the_launcher_ends_the_ranks(here):
    launcher = start(here, "--nproc_per_node", "2", "small.py", "waits")
    wait_for(here, lambda: all((here / f"ready{rank}").exists() for rank in (0, 1)))
    launcher.kill()
    launcher.communicate(timeout=60)
    wait_for(here, lambda: left(here) == [])


def test_torchrun_s_own_error_is_shown(here):
    with socket.create_server(("127.0.0.1", 0)) as busy:
        port = busy.getsockname()[1]
        code, _, stderr = ended(start(here, "--nproc_per_node", "1", "--port", str(port), "small.py", "ends"))
    assert code == 1 and "names no rank; its output ends with" in stderr and "EADDRINUSE" in stderr
    assert left(here) == []


def test_help_before_the_script_belongs_to_the_launcher(here):
    code, stdout, _ = ended(start(here, "--gpus", "0", "--help"))
    assert code == 0 and "--nproc_per_node <int>" in stdout and "FILE.py or -m MODULE" in stdout
    code, _, stderr = ended(start(here, "--gpus", "0,1", "--xpus", "1", "none.py"))
    assert code == 2 and stderr.startswith("gptlm launch: error: the script none.py does not exist")


def test_logs_that_cannot_be_written(here):
    (here / "log").write_text("")
    code, _, stderr = ended(start(here, "--nproc_per_node", "1", "small.py", "ends"))
    assert code == 1 and "--log_dir log cannot be written to" in stderr


@pytest.mark.parametrize(
    ("more", "says"),
    [
        ("", "Tokens per step = 128 (2 x 2 x 2 x 16)"),
        ("--auto_parallel --auto_parallel_memory 0.0009", "sharding stage2, per_device_train_batch_size 1, "),
    ],
)
def test_oneflow_s_command_starts_its_own_processes(corpus_folder, tmp_path, more, says):
    """Without a launcher, the training command starts the two processes it asks for, also with --auto_parallel."""
    sizes = "--num-layers 2 --hidden-size 32 --num-attention-heads 2 --seq-length 16 --vocab-size 512"
    data = next((corpus_folder / "mmap").glob("*.bin")).with_suffix("")
    words = f"{sizes} --micro-batch-size 2 --global-batch-size 8 --num-gpus-per-node 2 --train-iters 2 --log-interval 1"
    words += f" --dataset {data} --save {tmp_path}/out --split 80,10,10 --device cpu {more}"
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
    assert says in done.stdout
    assert (tmp_path / "out" / "model.safetensors").exists()
