"""A process that imports what commands need, once, and forks a process for each command: see processes.py.

    python -m tests.fork_server CONTROL PARENT

CONTROL is the number of a connected Unix socket. A request is the length of its JSON text (4 bytes), which brings four
files: standard input, output and error of the new process, and the report, into which the server writes the process id
and, when it has ended, the exit code. A request with "modules" makes the new process a server that has imported them,
too; its standard input is its socket.

A server starts no thread and runs no command itself, so that a new process has what the imports leave behind and
nothing else. It ends with all its processes when the other end of the socket is closed or PARENT ends.

New processes end as the interpreter does - threads, functions of `atexit`, buffers - except that no object is freed.
"""

import atexit
import ctypes
import gc
import json
import os
import runpy
import select
import signal
import socket
import sys
import tempfile
import threading
from contextlib import suppress
from importlib import import_module
from pathlib import Path
from typing import Any, NoReturn

from tests.huge_pages import collapse_memory

PR_SET_PDEATHSIG = 1  # <linux/prctl.h>
RECIPES = (
    "pretrain.run", "sft.run", "predict", "evaluate", "merge_lora", "convert", "preprocess", "train_tokenizer",
    "data_tools", "report.run", "demo",
)  # fmt: skip


def import_commands() -> None:
    """Import what the commands import, in the way in which they do."""
    os.environ["JE_ARROW_MALLOC_CONF"] = "background_thread:false"  # pyarrow starts one when it is imported
    from gptlm.quiet import quiet_libraries

    quiet_libraries()
    from gptlm.cli import COMMANDS  # noqa: F401 - as a command would
    from gptlm.entry_points import importing

    with importing(trainer=True):
        for recipe in RECIPES:
            import_module(f"gptlm.recipes.{recipe}")


def measure_coverage() -> None:
    """Start coverage where pytest measures it; processes that this one forks go on with it, and save at their end.

    Not all environments run the .pth file with which coverage starts in new interpreters.
    """
    if "COVERAGE_PROCESS_CONFIG" in os.environ:
        import coverage

        coverage.process_startup()


def serve(control: socket.socket) -> dict[str, Any] | None:
    """Fork a process for each request; returns the request in the new process, None when no more will come."""
    assert len(os.listdir("/proc/self/task")) == 1, "a library has started a thread"
    gc.collect()
    collapse_memory()
    gc.freeze()  # collections of a new process do not visit what it shares with this one
    waiting = select.poll()
    waiting.register(control, select.POLLIN)
    reports: dict[int, tuple[int, int]] = {}  # the file that tells of the end of a process: its id, its report
    while True:
        for file, _ in waiting.poll():
            if file != control.fileno():
                process, report = reports.pop(file)
                code = os.waitstatus_to_exitcode(os.waitpid(process, 0)[1])
                waiting.unregister(file)
                os.close(file)
                _tell(report, code)
                os.close(report)
                continue
            size, files, _, _ = socket.recv_fds(control, 4, 4, socket.MSG_WAITALL)
            if not size:
                for process, _ in reports.values():
                    os.kill(process, signal.SIGKILL)
                    os.waitpid(process, 0)
                return None
            request = json.loads(control.recv(int.from_bytes(size), socket.MSG_WAITALL))
            *streams, report = files
            server = os.getpid()
            process = os.fork()
            if process == 0:
                control.detach()
                _open_only(streams, server)
                return request
            _tell(report, process)
            for stream in streams:
                os.close(stream)
            ended = os.pidfd_open(process)
            reports[ended] = (process, report)
            waiting.register(ended, select.POLLIN)


def die_with(parent: int) -> None:
    """This process is killed when `parent` ends."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent:
        os._exit(1)


def _tell(report: int, number: int) -> None:
    with suppress(BrokenPipeError):  # the test does not wait for it
        os.write(report, b"%d\n" % number)


def _open_only(streams: list[int], server: int) -> None:
    """Standard input, output and error of a new process, which has no other open files."""
    die_with(server)
    for number, file in enumerate(streams):
        os.dup2(file, number)
    os.closerange(3, os.sysconf("SC_OPEN_MAX"))


def become(request: dict[str, Any]) -> None:
    """Run the request's script or module as `python` would have started it."""
    import numpy as np

    if request["session"]:
        os.setsid()
    os.chdir(request["cwd"])
    inherited = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    os.environ.clear()
    os.environ.update(request["environment"])
    tempfile.tempdir = None
    np.random.seed()  # Python's generator does it itself, torch's begins with a constant
    words = request["words"]
    is_module = words[0] == "-m"
    first = os.getcwd() if is_module else str(Path(words[0]).resolve().parent)
    given = os.environ.get("PYTHONPATH", "")
    sys.path[:] = [first, *given.split(os.pathsep)] if given else [first]
    sys.path += [place for place in FIRST_PATH[1:] if place not in inherited]
    sys.orig_argv[:] = [sys.executable, *words]
    sys.argv[:] = words[1:] if is_module else words
    if is_module:
        runpy.run_module(words[1], run_name="__main__", alter_sys=True)
    else:
        runpy.run_path(words[0], run_name="__main__")


def serve_more(request: dict[str, Any]) -> dict[str, Any] | None:
    """Serve with more modules, on standard input; returns as `serve` does."""
    control = socket.socket(fileno=os.dup(0))
    os.dup2(1, 0)
    for name in request["modules"]:
        import_module(name)
    return serve(control)


def ended(request: dict[str, Any]) -> int:
    """Run the request; returns the exit code that the interpreter would have."""
    try:
        become(request)
    except SystemExit as error:
        if error.code is None or isinstance(error.code, int):
            return (error.code or 0) & 255
        print(error.code, file=sys.stderr)
        return 1
    except BaseException as error:
        sys.excepthook(type(error), error, error.__traceback__)
        if isinstance(error, KeyboardInterrupt):
            sys.stdout.flush()
            signal.signal(signal.SIGINT, signal.SIG_DFL)
            os.kill(os.getpid(), signal.SIGINT)
        return 1
    return 0


def leave(code: int) -> NoReturn:
    """End this process as the interpreter does, without the half second that freeing all modules takes."""
    threading._shutdown()
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except OSError as error:  # as the interpreter does
            sys.stderr.write(f"Exception ignored in: {stream!r}\n{type(error).__name__}: {error}\n")
            code = 120
    os._exit(code)


FIRST_PATH = list(sys.path)

if __name__ == "__main__":
    die_with(int(sys.argv[2]))
    measure_coverage()
    import_commands()
    asked = serve(socket.socket(fileno=int(sys.argv[1])))
    while asked is not None and "modules" in asked:
        asked = serve_more(asked)
    if asked is None:
        os._exit(0)
    leave(ended(asked))
