"""Signals that are noted instead of acted on, and child processes of which none is left behind."""

import ctypes
import os
import signal
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

PR_SET_PDEATHSIG, PR_SET_CHILD_SUBREAPER = 1, 36  # <linux/prctl.h>
GRACE_PERIOD = 5.0  # seconds between SIGTERM and SIGKILL


@contextmanager
def signals_noted() -> Iterator[list[int]]:
    """Append SIGINT, SIGTERM and SIGHUP to the list in the order they arrive, instead of ending the process."""
    received: list[int] = []
    previous = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)}
    for number, handler in previous.items():
        if handler != signal.SIG_IGN:  # nohup ignores SIGHUP; it stays ignored
            signal.signal(number, lambda which, frame: received.append(which))
    try:
        yield received
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)


@contextmanager
def no_process_left() -> Iterator[None]:
    """At the end, terminate all processes that were started inside, at any depth (Linux only)."""
    before = children_of(os.getpid())
    _prctl(PR_SET_CHILD_SUBREAPER, 1)  # an orphan becomes our child, so none is missed
    try:
        yield
    finally:
        for number in (signal.SIGTERM, signal.SIGKILL):
            _end_children(number, spared=before)
        _prctl(PR_SET_CHILD_SUBREAPER, 0)


def terminate_with_parent() -> None:
    """For `preexec_fn`: the child gets SIGTERM when its parent dies, even from SIGKILL."""
    _prctl(PR_SET_PDEATHSIG, signal.SIGTERM)


def _prctl(option: int, value: int) -> None:
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(option, value, 0, 0, 0)


def _end_children(number: int, *, spared: set[int]) -> None:
    """Send `number` to each child once, orphans that become ours included; wait until all have ended."""
    signalled = set(spared)
    deadline = time.monotonic() + GRACE_PERIOD
    while (left := children_of(os.getpid()) - spared) and time.monotonic() < deadline:
        for process in left - signalled:
            with suppress(ProcessLookupError):
                os.kill(process, number)
        signalled |= left
        time.sleep(0.02)


def children_of(process: int) -> set[int]:
    """Living children of `process`, without zombies."""
    found = set()
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):  # it has just ended
            # "PID (NAME) STATE PARENT ..."; the name may hold blanks and parentheses
            state, parent = stat.read_text(errors="replace").rpartition(")")[2].split()[:2]
            if int(parent) == process and state != "Z":
                found.add(int(stat.parent.name))
    return found
