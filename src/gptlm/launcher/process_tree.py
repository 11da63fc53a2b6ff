"""Signals that wait until they are looked at, and processes of which none is left behind."""

import ctypes
import os
import signal
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

PR_SET_PDEATHSIG, PR_SET_CHILD_SUBREAPER = 1, 36  # of <linux/prctl.h>
PATIENCE = 5.0  # seconds between SIGTERM and SIGKILL


@contextmanager
def signals_noted() -> Iterator[list[int]]:
    """The signals that ask to end, in the order they come. One that was ignored before (nohup) stays ignored."""
    caught: list[int] = []
    asking = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    before = {number: signal.getsignal(number) for number in asking}
    taken = [number for number in asking if before[number] != signal.SIG_IGN]
    for number in taken:
        signal.signal(number, lambda which, frame: caught.append(which))
    try:
        yield caught
    finally:
        for number in taken:
            signal.signal(number, before[number])


@contextmanager
def no_process_left() -> Iterator[None]:
    """What starts inside, at any depth, and is still there at the end is ended (on Linux).

    Whoever loses its parent becomes our child, so none gets out of sight.
    """
    before = _children()
    _prctl(PR_SET_CHILD_SUBREAPER, 1)
    try:
        yield
    finally:
        for number in (signal.SIGTERM, signal.SIGKILL):
            _end(before, number)
        _prctl(PR_SET_CHILD_SUBREAPER, 0)


def end_with_parent() -> None:
    """In a child that is about to start: SIGTERM when its parent dies, even of SIGKILL."""
    _prctl(PR_SET_PDEATHSIG, signal.SIGTERM)


def _prctl(option: int, value: int) -> None:
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(option, value, 0, 0, 0)


def _end(spared: set[int], number: int) -> None:
    """Send `number` to each living child once, and to those who then become children; wait for their end."""
    told = set(spared)
    deadline = time.monotonic() + PATIENCE
    while (left := _children() - spared) and time.monotonic() < deadline:
        for process in left - told:
            with suppress(ProcessLookupError):
                os.kill(process, number)
        told |= left
        time.sleep(0.02)


def _children() -> set[int]:
    """Our living children, zombies left out."""
    found = set()
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):  # it has just ended
            state, parent = stat.read_text(errors="replace").rpartition(")")[2].split()[:2]
            if int(parent) == os.getpid() and state != "Z":
                found.add(int(stat.parent.name))
    return found
