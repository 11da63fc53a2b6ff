"""The ids of a token file, read where they are needed.

The file is not memory-mapped: a process that reads a mapping whose file has become shorter, or whose disk fails, is
killed by SIGBUS without a message.
"""

import os
from pathlib import Path
from typing import Any

import numpy as np

from gptlm.errors import GptlmError, reason_of


class TokenFile:
    """`ids[start:stop]` is a new array of the ids [start, stop), and `ids[places]` of those at an array of places.

    `part` is a view that reads nothing. In another process, forked or spawned, the same object works.

    Args:
        path: the file.
        dtype: of the ids.
        first: byte of the first id.
        count: ids.

    Raises:
        GptlmError: while reading, if the file has become shorter or the disk fails.
        OSError: if the file cannot be opened.
    """

    def __init__(self, path: Path, dtype: np.dtype, first: int, count: int):
        self.path, self.dtype, self.first, self.count = path, np.dtype(dtype), first, count
        self._file = os.open(path, os.O_RDONLY | os.O_CLOEXEC)

    def __del__(self) -> None:
        if hasattr(self, "_file"):
            os.close(self._file)

    def __reduce__(self) -> tuple:
        return TokenFile, (self.path, self.dtype, self.first, self.count)

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, places: slice | np.ndarray) -> np.ndarray:
        if isinstance(places, slice):
            start, stop, step = places.indices(self.count)
            return self._read(start, max(stop - start, 0))[::step]
        return np.array([self._read(int(place), 1)[0] for place in places], self.dtype)

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        return self[:].astype(dtype or self.dtype, copy=False)

    def part(self, start: int, count: int) -> "TokenFile":
        """The ids [start, start + count)."""
        return TokenFile(self.path, self.dtype, self.first + start * self.dtype.itemsize, count)

    def _read(self, start: int, count: int) -> np.ndarray:
        wanted, place = count * self.dtype.itemsize, self.first + start * self.dtype.itemsize
        try:
            content = os.pread(self._file, wanted, place)
            while 0 < len(content) < wanted and (
                more := os.pread(self._file, wanted - len(content), place + len(content))
            ):
                content += more  # the system reads at most 2 GiB at a time
        except OSError as error:
            raise GptlmError(f"{self.path} cannot be read: {reason_of(error)}; check the disk") from error
        if len(content) < wanted:
            raise GptlmError(
                f"{self.path} has become shorter while it was read: it has {os.fstat(self._file).st_size:,} bytes, and "
                f"those up to byte {place + wanted:,} are needed; restore it, and do not change it during a run"
            )
        return np.frombuffer(content, self.dtype)


Ids = TokenFile | np.ndarray  # an array where the file had to be decompressed
