"""A limit on the time and memory of code that a file of others contains, such as a chat template."""

import resource
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType

PAGE = resource.getpagesize()
SIZE = Path("/proc/self/statm")  # of the process, in pages; Linux has it
AGAIN = 0.5  # seconds after which the alarm is repeated: an exception inside a destructor has no effect


class OverBudgetError(Exception):
    """The code takes too long or too much memory."""


@contextmanager
def budget(seconds: float, memory: int) -> Iterator[None]:
    """End the code inside after `seconds`, and where it needs `memory` bytes more than the process has.

    The address space of the whole process is limited meanwhile, on Linux, which tells its size. Time is limited in the
    main thread only, since Python handles signals there.

    Raises:
        OverBudgetError: if a limit is reached.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    limits = [limit for limit in (soft, hard) if limit != resource.RLIM_INFINITY]
    if SIZE.exists():
        limits.append(int(SIZE.read_text(encoding="ascii").split()[0]) * PAGE + memory)
    in_main = threading.current_thread() is threading.main_thread()

    def end(number: int, frame: FrameType | None) -> None:
        raise OverBudgetError(f"it takes more than {seconds:g} s")

    before = signal.signal(signal.SIGALRM, end) if in_main else None
    try:
        resource.setrlimit(resource.RLIMIT_AS, (min(limits, default=soft), hard))
        if in_main:
            signal.setitimer(signal.ITIMER_REAL, seconds, AGAIN)
        yield
    except MemoryError as error:
        raise OverBudgetError(f"it needs more than {memory >> 20} MiB of memory") from error
    finally:
        if in_main:
            signal.setitimer(signal.ITIMER_REAL, 0)
            signal.signal(signal.SIGALRM, before or signal.SIG_DFL)
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))
