"""Long-lived processes that run gptlm commands, each in a child with limits of its own, and judge how it ends."""

import atexit
import contextlib
import ctypes
import gc
import multiprocessing
import os
import re
import resource
import select
import shutil
import signal
import sys
import tempfile
import time
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from tests.huge_pages import collapse_memory

EXTRA_MEMORY = 1 << 30
CPU_SECONDS, SECONDS = 10, 60  # seconds of computation do not depend on what else the machine does
LARGEST_FILE = 1 << 28
WAITS = 10.0  # seconds without computation after which a command waits, as for a worker
GRACE = 3.0  # seconds in which processes end after the command
ENDS = (0, 1, 2, 129, 130, 141, 143)
MOST_LINES = 3  # of errors on stderr
LOG_LINE = re.compile(r"\[[\d-]+ [\d:,]+\] \[ *(INFO|WARNING)\]")
SUBREAPER = 36  # PR_SET_CHILD_SUBREAPER of prctl


def limit_memory() -> None:
    """An allocation beyond what this process has and `EXTRA_MEMORY` fails."""
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    most = pages * resource.getpagesize() + EXTRA_MEMORY
    resource.setrlimit(resource.RLIMIT_AS, (most, most))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))


def start_workers(count: int, initializer) -> ProcessPoolExecutor:
    """Processes that import everything anew and have no threads, so that they can fork."""
    return ProcessPoolExecutor(count, mp_context=multiprocessing.get_context("spawn"), initializer=initializer)


def prepare() -> None:
    """Called in each worker: import what commands import, once."""
    os.environ |= {
        "OMP_NUM_THREADS": "1",
        "HF_HUB_OFFLINE": "1",
        "DS_ACCELERATOR": "cpu",
        "TOKENIZERS_PARALLELISM": "false",
    }
    os.environ["ARROW_DEFAULT_MEMORY_POOL"] = "system"  # jemalloc starts a thread
    ctypes.CDLL(None).prctl(SUBREAPER, 1, 0, 0, 0)
    from gptlm.quiet import quiet_libraries

    quiet_libraries()
    import datasets  # noqa: F401
    import deepspeed  # noqa: F401
    import gguf  # noqa: F401
    import pandas  # noqa: F401
    import pyarrow.dataset
    import pyarrow.parquet  # noqa: F401
    import torch

    from gptlm.entry_points import importing

    with importing(trainer=True):
        import gptlm.api.inference
        import gptlm.api.training
        import gptlm.recipes.chat
        import gptlm.recipes.convert
        import gptlm.recipes.data_tools
        import gptlm.recipes.evaluate
        import gptlm.recipes.merge_lora
        import gptlm.recipes.openai_server
        import gptlm.recipes.predict
        import gptlm.recipes.preprocess
        import gptlm.recipes.pretrain.run
        import gptlm.recipes.pretrain.text_source
        import gptlm.recipes.report.run
        import gptlm.recipes.sft.run
        import gptlm.recipes.train_tokenizer  # noqa: F401
    torch.set_num_threads(1)
    gc.collect()
    collapse_memory()
    gc.freeze()  # a command's collections do not visit, and thereby copy, what it shares with this process


@dataclass(frozen=True)
class Sending:
    """Signals to a command, `gap` seconds apart, when it has computed for `after` seconds or waits."""

    after: float
    numbers: tuple[int, ...]
    gap: float = 0.0


@dataclass(frozen=True)
class Ended:
    """How a command ended.

    Attributes:
        code: its exit code, or minus the signal.
        faults: what should not be, empty if all is well.
        log: the traceback that gptlm wrote.
        computed: seconds.
    """

    code: int
    faults: tuple[str, ...]
    stdout: str
    stderr: str
    log: str
    seconds: float
    computed: float


def run_command(words: list[str], folder: Path, sending: Sending | None = None) -> Ended:
    """Run `gptlm WORDS` in `folder`, in a child process, which may get signals."""
    home = Path(tempfile.mkdtemp(prefix="fuzz-home-"))
    temporary, out, err = home / "tmp", home / "stdout", home / "stderr"
    temporary.mkdir()
    start = time.monotonic()
    child = os.fork()
    if child == 0:
        _run_in_child(words, folder, home)
    if sending is not None:
        _send(child, sending)
    status, computed = _wait(child, SECONDS)
    seconds = time.monotonic() - start
    faults = []
    if status is None:
        faults.append(f"did not end within {SECONDS} s")
        os.killpg(child, signal.SIGKILL)
        status = os.waitpid(child, 0)[1]
    code = os.waitstatus_to_exitcode(status)
    if sending is not None and -code in sending.numbers:
        code = 128 - code  # as a shell shows it
    if code == -signal.SIGXCPU:
        faults.append(f"computed for more than {CPU_SECONDS} s")
    elif code not in ENDS:
        faults.append(f"exit code {code}")
    faults += [f"left the process {line}" for line in _left_processes()]
    left = sorted(str(path.relative_to(temporary)) for path in temporary.rglob("*"))
    left = [name for name in left if not name.startswith(("gptlm-error-", "torchinductor_"))]  # torch keeps its cache
    left += [
        str(path.relative_to(folder)) for ending in ("incomplete*", "lock") for path in folder.rglob(f"*.{ending}")
    ]
    faults += [f"left {name}" for name in left]
    texts = [path.read_text(errors="replace") for path in (out, err)]
    logs = [path.read_text() for place in (folder, home) for path in place.rglob("gptlm-error-*.log")]
    if logs:
        faults.append("wrote a traceback")
    if any("Traceback (most recent call last)" in text for text in texts):
        faults.append("printed a traceback")
    lines = [line for line in texts[1].splitlines() if not LOG_LINE.match(line)]  # stdout has the results of predict
    if code and len(lines) > MOST_LINES:
        faults.append(f"more than {MOST_LINES} lines on stderr")
    shutil.rmtree(home, ignore_errors=True)
    return Ended(code, tuple(faults), *texts, "\n".join(logs), seconds, computed)


def _send(child: int, sending: Sending) -> None:
    """Send the signals, unless the process ends before."""
    handle, used, since = os.pidfd_open(child), -1.0, time.monotonic()
    try:
        while not select.select([handle], [], [], 0.003)[0]:
            now = time.monotonic()
            before, used = used, _computed(child)
            since = now if used != before else since
            if used >= sending.after or now - since > WAITS:
                for number in sending.numbers:
                    os.kill(child, number)
                    time.sleep(sending.gap)
                return
    finally:
        os.close(handle)


def _computed(process: int) -> float:
    """Seconds that a process has computed (/proc/PID/stat: utime, stime)."""
    fields = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def _wait(child: int, seconds: float) -> tuple[int | None, float]:
    """The exit status, or None if the process still runs after `seconds`; and how long it has computed."""
    handle = os.pidfd_open(child)
    try:
        if not select.select([handle], [], [], seconds)[0]:
            return None, 0.0
    finally:
        os.close(handle)
    _, status, usage = os.wait4(child, 0)
    return status, usage.ru_utime + usage.ru_stime


def _children() -> list[int]:
    return [int(word) for word in Path(f"/proc/self/task/{os.getpid()}/children").read_text().split()]


def _left_processes() -> list[str]:
    """Processes that the command has left, which are children of this process now; they are killed."""
    end = time.monotonic() + GRACE
    while True:
        with contextlib.suppress(ChildProcessError):
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
        left = _children()
        if not left:
            return []
        if time.monotonic() > end:
            break
        time.sleep(0.02)
    shown = []
    for process in left:
        with contextlib.suppress(OSError):  # it ends at this moment
            shown.append(Path(f"/proc/{process}/cmdline").read_text().replace("\0", " ")[:100])
            os.kill(process, signal.SIGKILL)
        os.waitpid(process, 0)
    return shown


def _run_in_child(words: list[str], folder: Path, home: Path) -> None:
    """Never returns."""
    code = 99
    try:
        os.setsid()
        for number, path, flags in [
            (0, os.devnull, os.O_RDONLY),
            (1, home / "stdout", os.O_WRONLY | os.O_CREAT | os.O_APPEND),
            (2, home / "stderr", os.O_WRONLY | os.O_CREAT | os.O_APPEND),
        ]:
            os.dup2(os.open(path, flags), number)
        os.chdir(folder)
        os.environ |= {"HOME": str(home), "TMPDIR": str(home / "tmp"), "HF_DATASETS_CACHE": str(home / "datasets")}
        tempfile.tempdir = None
        limit_memory()
        resource.setrlimit(resource.RLIMIT_CPU, (CPU_SECONDS, CPU_SECONDS + 2))
        resource.setrlimit(resource.RLIMIT_FSIZE, (LARGEST_FILE, LARGEST_FILE))
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)  # as Python does
        from gptlm.cli import main as command
        from tests.fuzz.others import OTHERS
        from tests.fuzz.others import main as other

        sys.argv = ["gptlm", *words]
        main = other if words[0] in OTHERS else command
        code = main(words)
    except SystemExit as error:
        code = error.code if isinstance(error.code, int) else 1 if error.code else 0
    except BaseException:
        import traceback

        traceback.print_exc()
    finally:
        try:
            atexit._run_exitfuncs()
            sys.stdout.flush()
            sys.stderr.flush()
        finally:
            os._exit(code)


def kind_of(ended: Ended) -> str:
    """A text that is the same for findings with the same cause."""
    if ended.log:
        frames = re.findall(r'File "[^"]*src/gptlm/([^"]+)", line (\d+), in (\w+)', ended.log)
        places = [":".join(frame) for frame in frames if frame[0] not in ("cli.py", "entry_points.py")]
        last = [line for line in ended.log.splitlines() if re.match(r"[\w.]+(Error|Exception|Exit|Interrupt)\b", line)]
        return f"{places[-1] if places else '?'} {last[-1][:150] if last else ''}"
    return re.sub(r"\d+", "N", "; ".join(ended.faults)) + " | " + re.sub(r"\d+", "N", ended.stderr.strip()[-200:])
