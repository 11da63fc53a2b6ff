"""Start commands as processes, forked from one that has imported torch, transformers and gptlm where that is the same.

Importing them takes 4 to 8 seconds of a processor, a fork takes 0.02. `run` and `start` choose it themselves, for
`python SCRIPT.py ...` and `python -m gptlm ...` whose environment differs from that of this session in variables alone
that are read when a command runs (`READ_LATER`). A test about the start itself - imports, the end of the interpreter,
hash seeds, a launcher - uses `subprocess`.

`processes` are what torchrun would start: a process that holds the store, and ranks with its variables; if one fails,
the others are terminated, and the exit code is 1; with `restarts` they are started again before, with the same store.
"""

import functools
import json
import os
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from select import select
from typing import IO

from gptlm.quiet import NO_BARS

ROOT = Path(__file__).parents[1]
LAUNCHED = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK", "MASTER_ADDR", "MASTER_PORT")
READ_LATER = {
    *LAUNCHED, "TORCHELASTIC_USE_AGENT_STORE", "TORCHELASTIC_RUN_ID", "TORCHELASTIC_RESTART_COUNT",
    "TORCHELASTIC_ERROR_FILE", "CUDA_VISIBLE_DEVICES", "PYTEST_CURRENT_TEST",
    "PYTHONPATH", "PATH", "NLTK_DATA", "TMPDIR",
}  # fmt: skip
# what libraries and commands that ran in the tests' own process have left in its environment
LEFT_BEHIND = {
    *NO_BARS, *LAUNCHED, "TOKENIZERS_PARALLELISM", "TORCHINDUCTOR_CACHE_DIR", "_TORCHINDUCTOR_PYOBJECT_TENSOR_DATA_PTR",
    "PYTORCH_NVML_BASED_CUDA_CHECK",
    "PYTHONUNBUFFERED",  # lines of ranks would come in pieces
    "ACCELERATE_USE_DEEPSPEED", "GRADIO_ANALYTICS_ENABLED", "CUDA_LAUNCH_BLOCKING", "CUBLAS_WORKSPACE_CONFIG",
    "FLASH_ATTENTION_DETERMINISTIC", "ASCEND_LAUNCH_BLOCKING", "HCCL_DETERMINISTIC",
}  # fmt: skip
# what runs with DeepSpeed import, too; its optimizers bring the compiler
DEEPSPEED = ("deepspeed", "deepspeed.runtime.zero.muon.muon_optimizer", "datasets")
STORE = ROOT / "tests" / "store.py"
GRACE = 30.0  # seconds between SIGTERM and SIGKILL, as torchrun's
POLL_INTERVAL = 0.05


@functools.cache
def first_environment() -> dict[str, str]:
    """The environment of the servers: that of the session at the first call, before tests change it."""
    return {**clean_environment(), **dict.fromkeys(NO_BARS, "1")}


class Forked:
    """A process that a server has forked, with what `subprocess.Popen` offers."""

    def __init__(self, words: list[str], pid: int, report: IO[bytes]):
        self.args, self.pid = words, pid
        self.stdout: IO[str] | None = None
        self.stderr: IO[str] | None = None
        self.returncode: int | None = None
        self._report = report

    def wait(self, timeout: float | None = None) -> int:
        if self.returncode is None:
            if not select([self._report], [], [], timeout)[0]:
                raise subprocess.TimeoutExpired(self.args, timeout or 0)
            self.returncode = int(self._report.readline())
            self._report.close()
        return self.returncode

    def poll(self) -> int | None:
        try:
            return self.wait(0)
        except subprocess.TimeoutExpired:
            return None

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)

    def terminate(self) -> None:
        self.send_signal(15)

    def kill(self) -> None:
        self.send_signal(9)


class Server:
    """The other end of fork_server.py. With `modules` it is forked from the first one and imports them, too."""

    def __init__(self, *modules: str):
        self._control, theirs = socket.socketpair()
        self._errors = tempfile.TemporaryFile("w+")
        with theirs, open(os.devnull, "r+b") as null:
            if modules:
                files = (theirs.fileno(), null.fileno(), self._errors.fileno())
                self._process: Forked | subprocess.Popen = server().fork({"modules": modules}, files)
                return
            words = [sys.executable, "-m", "tests.fork_server", str(theirs.fileno()), str(os.getpid())]
            self._process = subprocess.Popen(
                words,
                cwd=ROOT,
                env=first_environment(),
                pass_fds=[theirs.fileno()],
                stdin=null,
                stdout=null,
                stderr=self._errors,
                start_new_session=True,
            )

    def fork(self, request: dict, files: Sequence[int]) -> Forked:
        """A new process with the three standard `files`."""
        reading, writing = os.pipe()
        text = json.dumps(request).encode()
        report = os.fdopen(reading, "rb", buffering=0)
        try:
            socket.send_fds(self._control, [len(text).to_bytes(4)], [*files, writing])
            self._control.sendall(text)
        finally:
            os.close(writing)
        pid = report.readline()
        if not pid:
            self._errors.seek(0)
            raise RuntimeError(f"the fork server has ended: {self._errors.read()[-3000:]}")
        return Forked(request.get("words", []), int(pid), report)

    def close(self) -> None:
        """End the server and all its processes."""
        self._control.close()
        self._process.wait()


_servers: dict[tuple[str, ...], Server] = {}


def server(*modules: str) -> Server:
    """The server of this session that has imported `modules`, too."""
    if modules not in _servers:
        _servers[modules] = Server(*modules)
    return _servers[modules]


def close_servers() -> None:
    while _servers:  # those that were forked from the first one before it
        _servers.popitem()[1].close()


def starts_alike(command: Sequence[str], environment: dict[str, str], *streams: object) -> bool:
    """Whether a forked process does what a new interpreter would."""
    if sys.platform != "linux" or command[0] != sys.executable:
        return False
    if not command[1].endswith(".py") and list(command[1:3]) != ["-m", "gptlm"]:
        return False
    if any(hasattr(stream, "fileno") and os.isatty(stream.fileno()) for stream in streams):
        return False
    first = first_environment()
    asked = {**dict.fromkeys(NO_BARS, "1"), **environment}  # every command sets them itself
    return all(asked.get(name) == first.get(name) for name in {*asked, *first} - READ_LATER)


def clean_environment(**more: object) -> dict[str, str]:
    """The environment of a new process: one thread, without what other runs have left behind, and with `more`."""
    kept = {name: value for name, value in os.environ.items() if name not in LEFT_BEHIND}
    return {**kept, "OMP_NUM_THREADS": "1", **{name: str(value) for name, value in more.items()}}


def start(
    command: Sequence[object],
    *,
    cwd: Path | None = None,
    env: dict[str, str] | None = None,
    stdout: int | IO | None = None,
    stderr: int | IO | None = None,
    start_new_session: bool = False,
    modules: Sequence[str] = (),
) -> "Forked | subprocess.Popen":
    """As `subprocess.Popen` with text, without standard input. `env` is `clean_environment()` if not given."""
    words = [str(word) for word in command]
    environment = clean_environment() if env is None else env
    if not starts_alike(words, environment, stdout, stderr):
        return subprocess.Popen(
            words,
            cwd=cwd,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=stdout,
            stderr=stderr,
            start_new_session=start_new_session,
            text=True,
        )
    null = os.open(os.devnull, os.O_RDWR)
    files, opened, read = [null], [null], []
    for stream, usual in ((stdout, 1), (stderr, 2)):
        reading = None
        if stream == subprocess.PIPE:
            source, stream = os.pipe()
            opened.append(stream)
            reading = os.fdopen(source, encoding="utf-8")
        elif stream == subprocess.DEVNULL:
            stream = null
        elif stream == subprocess.STDOUT:
            stream = files[1]
        elif stream is None:
            stream = usual
        files.append(stream if isinstance(stream, int) else stream.fileno())
        read.append(reading)
    where = str(Path(cwd or ".").absolute())
    request = {"words": words[1:], "cwd": where, "environment": environment, "session": start_new_session}
    try:
        process = server(*modules).fork(request, files)
    finally:
        for file in opened:
            os.close(file)
    process.stdout, process.stderr = read
    return process


def run(
    command: Sequence[object],
    *,
    cwd: Path | None = None,
    env: dict[str, str] | None = None,
    processes: int = 0,
    restarts: int = 0,
    grace: float = GRACE,
    modules: Sequence[str] = (),
    timeout: float = 300,
) -> subprocess.CompletedProcess:
    """As `subprocess.run` with text and the output captured; `processes` as torchrun would start them.

    Args:
        grace: seconds between SIGTERM and SIGKILL for ranks that outlive a failed one.
    """
    with tempfile.TemporaryFile("w+", encoding="utf-8") as out, tempfile.TemporaryFile("w+", encoding="utf-8") as err:
        begin = functools.partial(start, command, cwd=cwd, stdout=out, stderr=err, modules=modules)
        if processes:
            environment = clean_environment() if env is None else env
            with store_server() as port:
                for count in range(restarts + 1):
                    common = {"MASTER_PORT": port, "TORCHELASTIC_RESTART_COUNT": count}
                    code = run_ranks(begin, {**environment, **common}, processes, timeout, grace)
                    if code == 0:
                        break
        else:
            process = begin(env=env)
            try:
                code = process.wait(timeout)
            finally:
                process.kill()
        for file in (out, err):
            file.seek(0)
        return subprocess.CompletedProcess(list(map(str, command)), code, out.read(), err.read())


@contextmanager
def store_server() -> Iterator[str]:
    """The port of a process that holds the store of ranks."""
    store = start([sys.executable, STORE], stdout=subprocess.PIPE)
    assert store.stdout is not None
    try:
        yield store.stdout.readline().strip()
    finally:
        store.kill()
        store.wait(60)
        store.stdout.close()


@contextmanager
def started_ranks(
    begin: Callable[..., "Forked | subprocess.Popen"], environment: dict, count: int
) -> Iterator[list["Forked | subprocess.Popen"]]:
    """`count` ranks by `begin(env=...)`; those that are left at the end are killed."""
    common = {"WORLD_SIZE": count, "LOCAL_WORLD_SIZE": count, "GROUP_RANK": 0, "MASTER_ADDR": "127.0.0.1"}
    common |= {"TORCHELASTIC_USE_AGENT_STORE": "True", "TORCHELASTIC_RUN_ID": "tests"}
    ranks: list[Forked | subprocess.Popen] = []
    try:
        for rank in range(count):
            own = {**environment, "RANK": rank, "LOCAL_RANK": rank, **common}
            ranks.append(begin(env={name: str(value) for name, value in own.items()}))
        yield ranks
    finally:
        for process in ranks:
            process.kill()
            process.wait(60)


def run_ranks(
    begin: Callable[..., "Forked | subprocess.Popen"], environment: dict, count: int, timeout: float, grace: float
) -> int:
    """Start `count` ranks by `begin(env=...)`; returns 0, or 1 if one of them fails, which ends the others."""
    end = time.monotonic() + timeout
    with started_ranks(begin, environment, count) as ranks:
        while any(rank.poll() is None for rank in ranks):
            if any(rank.poll() for rank in ranks):
                break
            if time.monotonic() > end:
                raise subprocess.TimeoutExpired(ranks[0].args, timeout)
            time.sleep(POLL_INTERVAL)
        for rank in ranks:
            rank.terminate()
        last = time.monotonic() + grace
        while any(rank.poll() is None for rank in ranks) and time.monotonic() < last:
            time.sleep(POLL_INTERVAL)
        return int(any(rank.poll() != 0 for rank in ranks))
