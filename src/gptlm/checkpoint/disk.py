"""What is said of a file that could not be written: why, and what to do about it."""

import errno
import os
import re
import shutil
from contextlib import suppress
from pathlib import Path

from gptlm.errors import reason_of

NEARLY_FULL = 1 << 20  # free bytes below which a failed write is one of space, whatever the library says
SPACE = (errno.ENOSPC, errno.EDQUOT)
TORCH = ("PytorchStreamWriter", "inline_container", "file write")  # in torch.save's RuntimeError about a file


def is_of_writing(error: Exception) -> bool:
    """Whether `error` tells of a file, and not of memory, of another process, or of a library's own checks."""
    return not isinstance(error, RuntimeError) or any(word in str(error) for word in TORCH)


def write_failure(error: Exception, path: Path) -> str:
    """Why `path` could not be written, and what to do: "No space left on device (0 bytes are free there); make room".

    Space is spoken of only where it is short.
    """
    number, free = _errno_of(error), _free(path)
    reason = os.strerror(number) if number else reason_of(error)
    if number in SPACE or free < NEARLY_FULL:
        return f"{reason} ({free:,} bytes are free there); make room"
    return f"{reason}; {_advice(number, path)}"


def _errno_of(error: Exception) -> int | None:
    """safetensors tells the system's number in its text."""
    if isinstance(error, OSError):
        return error.errno
    found = re.search(r"os error (\d+)", str(error))
    return int(found[1]) if found else None


def _free(path: Path) -> int:
    """Bytes that are free where `path` is or would be."""
    for folder in (path, *path.absolute().parents):
        with suppress(OSError):
            return shutil.disk_usage(folder).free
    return NEARLY_FULL


def _advice(number: int | None, path: Path) -> str:
    if number == errno.ENOENT:
        return "does another run write into this folder?"
    if number in (errno.ENOTDIR, errno.EEXIST, errno.EISDIR):
        return _what_is_in_the_way(path)
    if number in (errno.EACCES, errno.EPERM, errno.EROFS):
        return "make the folder writable, or give another one"
    if number == errno.EFBIG:
        return "raise the limit on the size of a file (`ulimit -f`, or the file system's)"
    return "mend the cause"


def _what_is_in_the_way(path: Path) -> str:
    above = next((folder for folder in path.absolute().parents if folder.exists()), None)
    if above is not None and not above.is_dir():
        return f"{above} is a file, not a folder; give another place"
    kind = "folder" if path.is_dir() else "file"
    return f"a {kind} of this name is there; give another place"
