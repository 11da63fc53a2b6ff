"""SIGTERM and SIGHUP, which batch systems and closed terminals send, end a command as Ctrl-C does.

A command installs a `Handler`; code that imports the package installs nothing. A signal raises `Terminated` in the main
thread, so that locks and temporary files are removed on the way out. Inside `held` it waits for the end of the block.
"""

import os
import signal
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from threading import Thread, current_thread, main_thread
from types import FrameType

from gptlm.mapped_files import CutFiles, FileCutOff

NUMBERS = (signal.SIGTERM, signal.SIGHUP)
EXIT_CODES = {128 + number: number for number in NUMBERS}
# A batch system sends a signal to every process, and the launcher sends it again: within these seconds it is one.
TOGETHER = 5.0
PATIENCE = 5.0  # seconds that the main thread has after a second signal


class Terminated(BaseException):
    """A signal ends the command; `detail` continues the sentence "ended by SIGTERM".

    Attributes:
        detail: of a training that has ended in order; empty where the command was broken off.
        is_shown: whether this process prints the sentence.
    """

    def __init__(self, number: int, detail: str = "", *, is_shown: bool = True):
        super().__init__(f"ended by {signal.Signals(number).name}{detail}")
        self.number, self.detail, self.is_shown = number, detail, is_shown

    def reported(self, command: str) -> int:
        """Print it; returns the exit code."""
        if self.is_shown:
            sys.stderr.write(f"gptlm {command}: {self}\n")
        return 128 + self.number


class Handler:
    """Handles `NUMBERS`. The first signal counts; a second one ends the process although the first is held.

    Attributes:
        received: the first signal; None: none yet.
        is_held: whether it is only noted for now.
        is_ending: the process ends already, and further signals have no effect.
        was_raised: Terminated was raised, which a library may have replaced by an error of its own.
        was_interrupted: Ctrl-C has raised KeyboardInterrupt, which a library may have replaced, too.
        cut_files: notes files that become shorter while they are read.
    """

    def __init__(self, together: float) -> None:
        self.received: int | None = None
        self.cut_files = CutFiles()
        self.is_held = self.is_ending = self.was_raised = self.was_interrupted = False
        self._first, self._together = 0.0, together

    def __call__(self, number: int, frame: FrameType | None) -> None:
        is_second = self.received is not None
        if not is_second:
            self.received, self._first = number, time.monotonic()
        elif time.monotonic() - self._first < self._together:
            return
        if is_second or not self.is_held:
            self.end()

    def interrupt(self, number: int, frame: FrameType | None) -> None:
        """The handler of SIGINT: raises KeyboardInterrupt, as Python's own does."""
        self.was_interrupted = True
        raise KeyboardInterrupt

    def end(self) -> None:
        """Raises Terminated, once, if a signal was received."""
        if self.received is not None and not self.is_ending:
            self.is_ending = self.was_raised = True
            raise Terminated(self.received)

    def _handles(self, number: int) -> bool:
        return signal.getsignal(number) is self

    def watch(self, source: int) -> None:
        """In a thread: end the process after a second signal if the main thread does not, as in a hung collective.

        Python calls a handler when the main thread is back from C. Signals are read from the file `source`.
        """
        first: float | None = None
        with os.fdopen(source, "rb", buffering=0) as file:
            while content := file.read(1):
                number = content[0]
                if number not in NUMBERS or not self._handles(number):
                    continue
                if first is None:
                    first = time.monotonic()
                elif time.monotonic() - first >= self._together:
                    time.sleep(PATIENCE)
                    if self._handles(number):
                        os.write(2, f"gptlm: ended by {signal.Signals(number).name}\n".encode())
                        os._exit(128 + number)


@contextmanager
def ending_on_signals(*, is_launched: bool = False) -> Iterator[Handler]:
    """Install a `Handler` in the block. An ignored signal, as SIGHUP under nohup, stays ignored.

    Args:
        is_launched: whether a launcher passes signals on, which may be those that the process gets anyway.
    """
    handler, outer = Handler(TOGETHER if is_launched else 0.0), installed()
    if outer is not None or current_thread() is not main_thread():
        yield outer or handler
        return
    source, sink = os.pipe()
    os.set_blocking(sink, False)
    Thread(target=handler.watch, args=(source,), name="signals", daemon=True).start()
    wakeup = signal.set_wakeup_fd(sink, warn_on_full_buffer=False)
    before = {number: signal.getsignal(number) for number in NUMBERS}
    try:
        for number, previous in before.items():
            if previous != signal.SIG_IGN:
                signal.signal(number, handler)
        if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
            signal.signal(signal.SIGINT, handler.interrupt)
        with handler.cut_files.catching():
            yield handler
    finally:
        handler.is_ending = True
        for number, previous in before.items():
            signal.signal(number, previous)
        if signal.getsignal(signal.SIGINT) == handler.interrupt:
            signal.signal(signal.SIGINT, signal.default_int_handler)
        signal.set_wakeup_fd(wakeup)
        os.close(sink)  # ends the thread


@contextmanager
def without_traceback() -> Iterator[None]:
    """In the block, as during imports, Ctrl-C ends the process immediately and without a traceback."""
    if current_thread() is not main_thread() or not end_at_once():
        yield
        return
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def end_at_once() -> bool:
    """Let Ctrl-C end the process without KeyboardInterrupt, if that is what it raises now; returns whether it did."""
    if signal.getsignal(signal.SIGINT) is not signal.default_int_handler:  # ignored, or of another program
        return False
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    return True


def ending_in(error: BaseException | None) -> "KeyboardInterrupt | Terminated | FileCutOff | None":
    """The signal during which `error` was raised, as where it comes while a library takes a lock."""
    while error is not None and not isinstance(error, (KeyboardInterrupt, Terminated, FileCutOff)):
        error = error.__cause__ or error.__context__
    return error


def forget_interrupt() -> None:
    """After KeyboardInterrupt was handled: the command continues."""
    if (handler := installed()) is not None:
        handler.was_interrupted = False


def installed() -> Handler | None:
    """The handler of the command that runs in this process."""
    for number in NUMBERS:
        if isinstance(handler := signal.getsignal(number), Handler):
            return handler
    return None


@contextmanager
def held() -> Iterator[None]:
    """A signal ends the command after the block, as where a file is written that has its final name."""
    with _holding(True):
        yield


@contextmanager
def not_held() -> Iterator[None]:
    """Inside a `held` block: a signal ends the command immediately, because nothing would be lost."""
    with _holding(False):
        yield


def finish_unless_signalled(finish: Callable[[], None]) -> None:
    """After `Terminated` was raised, call `finish`, which does not matter much: a second signal leaves it out."""
    handler = installed()
    if handler is None:
        finish()
        return
    handler.is_ending = False
    with suppress(Terminated), held():
        finish()
    handler.is_ending = True


@contextmanager
def _holding(value: bool) -> Iterator[None]:
    handler = installed()
    if handler is None or current_thread() is not main_thread():
        yield
        return
    before, handler.is_held = handler.is_held, value
    try:
        if not value:
            handler.end()
        yield
    finally:
        handler.is_held = before
    if not before:
        handler.end()


def survive_first(worker: int) -> None:
    """In a worker process that the run needs for its last step: the first SIGTERM or SIGHUP has no effect."""
    for number in NUMBERS:
        if signal.getsignal(number) != signal.SIG_IGN:
            signal.signal(number, lambda which, frame: signal.signal(which, signal.SIG_DFL))


def _reset_in_child() -> None:
    """A forked process has the usual handlers: its signals are its own."""
    handler = installed()
    if handler is not None:
        with suppress(ValueError):
            signal.signal(signal.SIGBUS, signal.SIG_DFL)
            signal.set_wakeup_fd(-1)
            if signal.getsignal(signal.SIGINT) == handler.interrupt:
                signal.signal(signal.SIGINT, signal.default_int_handler)
            for number in NUMBERS:
                if signal.getsignal(number) is handler:
                    signal.signal(number, signal.SIG_DFL)


os.register_at_fork(after_in_child=_reset_in_child)
