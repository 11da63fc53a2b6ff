"""A file that becomes shorter while it is mapped into memory: one sentence instead of the system's SIGBUS.

safetensors, transformers, Arrow and our reader of pickles map files. A read behind their new end kills the process
without a message. Here it finds zeros, and an exception ends the command in the main thread.
"""

import ctypes
import mmap
import os
import signal
import time
from _thread import interrupt_main, start_new_thread
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from types import FrameType

MAPS = Path("/proc/self/maps")  # of Linux; elsewhere a process is still killed
SIGACTION = 256  # bytes, more than a `struct sigaction` has
MAP_FIXED = 0x10
FAILED = ctypes.c_void_p(-1).value


class FileCutOff(BaseException):
    """A file became shorter while it was read; what was read is not its content."""

    def __init__(self, path: str):
        super().__init__(f"{path} became shorter while it was read; copy or download it again")


class CutFiles:
    """Notes a file that was cut off while it was read, and interrupts the main thread.

    Attributes:
        path: of the file; None: all are whole.
    """

    def __init__(self) -> None:
        self.path: str | None = None
        self._is_raised = False

    def check(self) -> None:
        """Raises FileCutOff if a file was cut off."""
        if self.path is not None:
            self._is_raised = True
            raise FileCutOff(self.path)

    @contextmanager
    def catching(self) -> Iterator[None]:
        """Handle SIGBUS in the block, which the main thread runs."""
        if not MAPS.exists():
            yield
            return
        libc = ctypes.CDLL(None)

        def handle(_: int) -> None:
            """In any thread, as several of them compute with one tensor."""
            path = _replace_missing_pages(libc) or self.path  # another thread may have replaced the page
            if path is None:
                libc.signal(signal.SIGBUS, None)  # the read is repeated and ends the process
                return
            self.path = path
            start_new_thread(_interrupt, ())

        def interrupt(_: int, frame: FrameType | None) -> None:
            while frame is not None:
                if frame.f_code is handle.__code__:  # what is raised in there is printed, and lost
                    start_new_thread(_interrupt, ())
                    return
                frame = frame.f_back
            if not self._is_raised:
                self.check()

        handler = ctypes.CFUNCTYPE(None, ctypes.c_int)(handle)
        before = ctypes.create_string_buffer(SIGACTION)
        libc.sigaction(signal.SIGBUS, None, before)
        signal.signal(signal.SIGBUS, interrupt)  # for `interrupt_main` only: Python's handlers run after the read,
        libc.signal(signal.SIGBUS, handler)  # which never ends
        try:
            yield
            self.check()  # a library may have dropped the exception
        finally:
            signal.signal(signal.SIGBUS, signal.SIG_DFL)
            libc.sigaction(signal.SIGBUS, before, None)


def _interrupt() -> None:
    time.sleep(0.001)
    interrupt_main(signal.SIGBUS)


def _replace_missing_pages(libc: ctypes.CDLL) -> str | None:
    """Put zeros where a mapped file has ended; returns the path of one such file, None if there is none."""
    libc.mmap.restype = ctypes.c_void_p
    found = None
    for line in MAPS.read_text(errors="surrogateescape").splitlines():
        addresses, access, offset, _, inode, *path = line.split(maxsplit=5)
        if inode == "0" or not path or not access.startswith("r"):  # libraries have gaps without access
            continue
        start, end = (int(address, 16) for address in addresses.split("-"))
        with suppress(OSError):
            status = os.stat(path[0])
            pages = max(0, -((int(offset, 16) - status.st_size) // mmap.PAGESIZE))  # with something of the file
            size = end - start - pages * mmap.PAGESIZE
            if status.st_ino != int(inode) or size <= 0:
                continue
            flags = MAP_FIXED | mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
            where = ctypes.c_void_p(end - size)
            made = libc.mmap(
                where, ctypes.c_size_t(size), mmap.PROT_READ | mmap.PROT_WRITE, flags, -1, ctypes.c_long(0)
            )
            found = None if made == FAILED else path[0]
    return found
