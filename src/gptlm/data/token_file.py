"""Arrays in files, read where they are needed: the ids of a token file, and large index arrays.

No file is memory-mapped. A process that reads a mapping whose file has become shorter, or whose disk fails, is killed
by SIGBUS without a message. And the pages around each place that was read would count as memory of the process: 64 KiB
for a number of 4 bytes.
"""

import errno
import os
import resource
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from gptlm.errors import GptlmError, reason_of

BLOCK = 1 << 20  # values in memory at a time


class OpenFile:
    """A file that several arrays can share. In another process, forked or spawned, the same object works.

    Raises:
        OSError: if it cannot be opened.
    """

    def __init__(self, path: Path):
        self.path = path
        try:
            self.number = _open(path)
        except OSError as error:
            if error.errno != errno.EMFILE:
                raise
            _allow_more_files()  # a blend has up to 11 files for each corpus, and the usual limit is 1,024
            self.number = _open(path)

    def __del__(self) -> None:
        if hasattr(self, "number"):
            os.close(self.number)

    def __reduce__(self) -> tuple:
        return OpenFile, (self.path,)

    def read(self, place: int, wanted: int) -> bytes:
        """`wanted` bytes from byte `place` on. Raises GptlmError if the file has become shorter or the disk fails."""
        try:
            content = os.pread(self.number, wanted, place)
            while 0 < len(content) < wanted and (
                more := os.pread(self.number, wanted - len(content), place + len(content))
            ):
                content += more  # the system reads at most 2 GiB at a time
        except OSError as error:
            raise GptlmError(f"{self.path} cannot be read: {reason_of(error)}; check the disk") from error
        if len(content) < wanted:
            raise GptlmError(
                f"{self.path} has become shorter while it was read: it has {os.fstat(self.number).st_size:,} bytes, "
                f"and those up to byte {place + wanted:,} are needed; restore it, and do not change it during a run"
            )
        return content


def _open(path: Path) -> int:
    return os.open(path, os.O_RDONLY | os.O_CLOEXEC)


def _allow_more_files() -> None:
    """Raise the soft limit on open files to the hard one, as every process may."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


class StoredArray:
    """`array[start:stop]` is a new array of the rows [start, stop), `array[places]` of those at an array of places.

    Args:
        file: that contains it.
        dtype: of the values.
        first: byte of the first value.
        shape: (n,) or (n, columns).

    Raises:
        GptlmError: while reading, see `OpenFile.read`.
    """

    def __init__(self, file: OpenFile, dtype: np.dtype, first: int, shape: tuple[int, ...]):
        self.file, self.dtype, self.first, self.shape = file, np.dtype(dtype), first, tuple(shape)
        self._width = self.dtype.itemsize * (self.shape[1] if len(self.shape) > 1 else 1)  # bytes of a row

    @property
    def path(self) -> Path:
        return self.file.path

    def __len__(self) -> int:
        return self.shape[0]

    def __getitem__(self, places: Any) -> Any:
        if isinstance(places, slice):
            start, stop, step = places.indices(len(self))
            return self._read(start, max(stop - start, 0))[::step]
        if isinstance(places, int | np.integer):
            if not -len(self) <= places < len(self):
                raise IndexError(places)
            return self._read(int(places) % len(self), 1)[0]
        if len(places) and not 0 <= min(places) <= max(places) < len(self):
            raise IndexError(places)
        rows = [self._read(int(place), 1) for place in places]
        return np.concatenate(rows) if rows else np.empty((0, *self.shape[1:]), self.dtype)

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        return self[:].astype(dtype or self.dtype, copy=False)

    def part(self, start: int, count: int) -> "StoredArray":
        """The rows [start, start + count), of which nothing is read."""
        return StoredArray(self.file, self.dtype, self.first + start * self._width, (count, *self.shape[1:]))

    def _read(self, start: int, count: int) -> np.ndarray:
        content = self.file.read(self.first + start * self._width, count * self._width)
        array = np.frombuffer(content, self.dtype)
        return array.reshape(count, *self.shape[1:]) if len(self.shape) > 1 else array


class TokenFile(StoredArray):
    """The ids of a token file.

    Args:
        path: the file.
        dtype: of the ids.
        first: byte of the first id.
        count: ids.

    Raises:
        OSError: if the file cannot be opened.
    """

    def __init__(self, path: Path, dtype: np.dtype, first: int, count: int):
        super().__init__(OpenFile(path), dtype, first, (count,))


Numbers = StoredArray | np.ndarray
Ids = StoredArray | np.ndarray  # an array where the file had to be decompressed


def blocks_of(array: Numbers, first: int = 0, last: int | None = None, rows: int = BLOCK) -> Iterator[np.ndarray]:
    """The rows [first, last) of `array`, in parts."""
    last = len(array) if last is None else last
    for start in range(first, last, rows):
        yield array[start : min(start + rows, last)]
