"""Locks between processes. A lock file of others is locked, too, but never changed and never removed."""

import errno
import fcntl
import os
import time
import weakref
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from gptlm.signals import held

CONTENT = b"lock of gptlm\n"  # what tells its files from others, which stay
POLL = 0.1  # seconds


class Lock:
    """An advisory lock on the file `path`, which is there while a process has or wants the lock.

    The system releases the lock of a killed process, also where processes that it forked live on: they do not have the
    lock. On a file system without locks, `acquire` raises OSError.
    """

    def __init__(self, path: Path):
        self.path = path
        self._file: int | None = None
        lock = weakref.ref(self)
        os.register_at_fork(after_in_child=lambda: _close(lock()))

    def acquire(self) -> bool:
        """Returns whether the lock is taken now; it does not wait.

        Raises:
            OSError: if the file cannot be made or locked.
        """
        while True:
            file = _open(self.path)
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                if is_at(file, self.path):  # else the process that had the lock has removed the file
                    self._file, file = file, -1
                    return True
            except BlockingIOError:
                return False
            except OSError:
                self._remove(file)
                raise
            finally:
                if file >= 0:
                    os.close(file)

    def release(self) -> None:
        """Let others take it, and remove the file if gptlm made it; without effect where it is not taken."""
        file, self._file = self._file, None
        if file is not None:
            self._remove(file)
            os.close(file)

    def _remove(self, file: int) -> None:
        with suppress(OSError):
            if os.pread(file, len(CONTENT) + 1, 0) == CONTENT and is_at(file, self.path):
                self.path.unlink()


def _close(lock: Lock | None) -> None:
    """In a forked process: the lock belongs to its parent, and is held while any copy of the file is open."""
    if lock is not None and lock._file is not None:
        os.close(lock._file)
        lock._file = None


def _open(path: Path) -> int:
    flags = os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
    while True:
        with suppress(FileExistsError):
            return _make(path, flags | os.O_RDWR | os.O_CREAT | os.O_EXCL)
        with suppress(FileNotFoundError):  # removed since
            try:
                return os.open(path, flags | os.O_RDWR)
            except PermissionError:
                return os.open(path, flags | os.O_RDONLY)


def _make(path: Path, flags: int) -> int:
    file = os.open(path, flags, 0o666)
    try:
        os.write(file, CONTENT)
    except OSError:
        os.close(file)
        path.unlink()
        raise
    return file


def is_at(file: int, path: Path) -> bool:
    """Whether the open `file` is still the one at `path`."""
    try:
        return os.path.samestat(os.fstat(file), os.stat(path, follow_symlinks=False))
    except FileNotFoundError:
        return False


@contextmanager
def locked(path: Path, *, wait: bool = False) -> Iterator[None]:
    """Hold the lock `path` in the block.

    Args:
        wait: until another process has released it.

    Raises:
        BlockingIOError: if another process has it and `wait` is off.
        OSError: as `Lock.acquire`.
    """
    lock = Lock(path)
    try:
        while True:
            with held():  # a signal does not come between locking and knowing of it
                is_taken = lock.acquire()
            if is_taken:
                break
            if not wait:
                raise BlockingIOError(errno.EWOULDBLOCK, "another process has the lock", str(path))
            time.sleep(POLL)
        yield
    finally:
        lock.release()
