"""numpy's .npy and .npz files, whose headers are compared with the data before memory is allocated for it."""

import zipfile
from pathlib import Path
from typing import IO

import numpy as np
from numpy.lib import format as npy

from gptlm.errors import GptlmError, reason_of

AGAIN = "preprocess again"
LONGEST_HEADER = 10_000  # bytes, as numpy's own limit, which it applies after it has read the header
LARGE, RATIO = 1 << 28, 100  # bytes of an array, and how many times smaller compression makes one of that size
READERS = {(1, 0): (2, npy.read_array_header_1_0), (2, 0): (4, npy.read_array_header_2_0)}


def check_npy(file: IO[bytes], size: int) -> tuple[int, tuple[int, ...], np.dtype]:
    """Check the header of the .npy file of `size` bytes that `file` is at the start of.

    Returns:
        The place of the first value in bytes, the shape and the dtype.

    Raises:
        ValueError: if it is damaged or its shape does not fit `size`.
    """
    start = file.read(12)
    version = (start[6], start[7]) if len(start) == 12 and start.startswith(npy.MAGIC_PREFIX) else None
    if version not in READERS:
        raise ValueError(
            "it is a .npz file" if start.startswith(b"PK") else "it does not begin as one of version 1 or 2"
        )
    width, read_header = READERS[version]
    if (length := int.from_bytes(start[8 : 8 + width], "little")) > LONGEST_HEADER:
        raise ValueError(f"its header has {length:,} bytes, a header has less than {LONGEST_HEADER:,}")
    file.seek(8)
    try:
        shape, _, dtype = read_header(file)
        values = int(np.prod([int(extent) for extent in shape], dtype=object)) if min(shape, default=0) >= 0 else -1
    except Exception as error:  # numpy evaluates the header with tokenize and ast, which raise many types
        raise ValueError("its header is damaged") from error
    if dtype.hasobject:
        raise ValueError("it holds Python objects")
    if values < 0 or 8 + width + length + values * dtype.itemsize > size:
        raise ValueError(f"it has {size:,} bytes, too few for the shape {shape} of {dtype} in its header")
    return 8 + width + length, shape, dtype


def load_npz(path: Path, first: str, second: str) -> tuple[np.ndarray, np.ndarray]:
    """Two arrays of an .npz file.

    Raises:
        GptlmError: if it is damaged, lacks one, or one is compressed to much less than such data can be.
    """
    try:
        with path.open("rb") as file:
            if file.read(len(npy.MAGIC_PREFIX)) == npy.MAGIC_PREFIX:
                raise ValueError("it is a .npy file")
        with zipfile.ZipFile(path) as archive:
            missing = next((name for name in (first, second) if f"{name}.npy" not in archive.namelist()), None)
            if missing is None:
                return _member(archive, f"{first}.npy"), _member(archive, f"{second}.npy")
    except MemoryError:
        raise
    except Exception as error:  # zipfile and its decompressors raise many types
        raise GptlmError(f"{path} is not a whole .npz file: {reason_of(error)}; {AGAIN}") from error
    raise GptlmError(f"{path} lacks an array: {missing}; it should contain {first!r} and {second!r}")


def _member(archive: zipfile.ZipFile, name: str) -> np.ndarray:
    entry = archive.getinfo(name)
    if entry.file_size > LARGE and entry.file_size > RATIO * entry.compress_size:
        raise ValueError(f"{name} is {entry.file_size:,} bytes compressed to {entry.compress_size:,}")
    with archive.open(entry) as file:
        check_npy(file, entry.file_size)
    with archive.open(entry) as file:
        return npy.read_array(file, allow_pickle=False)
