"""XXH3 checksums (128 bits), which find damage of files and arrays at the speed of memory. They stop no forger.

The sums of files are those that `xxh128sum` prints.
"""

from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import xxhash

ALGORITHM = "xxh3_128"
THREADS = 8  # files that are read at a time
CHUNK = 8 << 20  # bytes in memory per file

Checksum = xxhash.xxh3_128  # of what comes in parts


def checksum(data: Any) -> str:
    """Of bytes, or of a contiguous array's bytes; 32 hexadecimal digits."""
    return xxhash.xxh3_128_hexdigest(data)


def file_checksum(path: Path) -> str:
    """Raises OSError if the file cannot be read."""
    digest, buffer = Checksum(), memoryview(bytearray(CHUNK))
    with open(path, "rb", buffering=0) as file:
        while size := file.readinto(buffer):
            digest.update(buffer[:size])
    return digest.hexdigest()


@contextmanager
def file_checksums(paths: Sequence[Path]) -> Iterator[Iterator[str]]:
    """The checksum of each path, in order, computed by threads while the block runs."""
    with ThreadPoolExecutor(THREADS) as pool:  # reading and xxhash release the interpreter's lock
        yield pool.map(file_checksum, paths)
