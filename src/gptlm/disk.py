"""Writing files: durably, with the usual permissions, and with clear errors where a write fails."""

import errno
import os
import re
import shutil
import stat
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from io import FileIO
from itertools import count
from pathlib import Path
from typing import BinaryIO

from gptlm.errors import reason_of

NEARLY_FULL = (
    1 << 20
)  # free bytes below which a failed write is attributed to a full disk, whatever the library reports
PATIENCE = 5.0  # seconds, for a process that writes to a pipe
NO_SPACE = (errno.ENOSPC, errno.EDQUOT)
TORCH = ("PytorchStreamWriter", "inline_container", "file write")  # in torch.save's RuntimeError about a file


@contextmanager
def replacing(final: Path) -> Iterator[BinaryIO]:
    """A temporary file to write into; when the block ends it is synced to disk and renamed to `final`.

    If the block raises, `final` is unchanged and the temporary file is removed.
    """
    with _new_beside(final) as file:
        temporary = Path(file.name)
        try:
            yield file
            file.flush()
            os.fsync(file.fileno())
            os.replace(temporary, final)
        finally:
            temporary.unlink(missing_ok=True)
    sync_folder(final.parent)


@contextmanager
def new_folders(folder: Path) -> Iterator[None]:
    """Make `folder` and those above it. If the block raises, the new ones are removed, as far as they are empty."""
    made: list[Path] = []
    try:
        made = make_folders(folder)
        yield
    except BaseException:
        remove_empty(made)
        raise


def make_folders(folder: Path) -> list[Path]:
    """Make `folder` and those above it; returns the new ones, the innermost first."""
    missing = [path for path in (folder, *folder.parents) if not path.exists()]
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError:
        remove_empty(missing)
        raise
    return missing


def remove_empty(folders: list[Path]) -> None:
    """Remove those of `folders` that are empty, in this order."""
    for path in folders:
        with suppress(OSError):
            path.rmdir()


def _new_beside(final: Path) -> BinaryIO:
    for number in count(1):
        with suppress(FileExistsError):  # of a killed process with this id, or of others
            return open(final.with_name(f"{final.name}.{os.getpid()}-{number}.incomplete"), "xb")
    raise AssertionError


def read_file(path: str | Path) -> bytes:
    """The content of a file or pipe.

    Raises:
        OSError: if it cannot be read, is a device, most of which have no end, or a pipe that nothing writes to.
    """

    def opener(name: str, flags: int) -> int:
        return os.open(name, flags | os.O_NONBLOCK)  # opening a pipe without a writer would wait forever

    with open(path, "rb", buffering=0, opener=opener) as file:
        mode, is_null = os.fstat(file.fileno()).st_mode, os.path.samefile(path, os.devnull)
        if stat.S_ISBLK(mode) or (stat.S_ISCHR(mode) and not file.isatty() and not is_null):
            raise OSError(errno.EINVAL, "it is a device, not a file", str(path))
        begin = _first_of_pipe(file, path) if stat.S_ISFIFO(mode) else b""
        os.set_blocking(file.fileno(), True)
        return begin + file.readall()


def _first_of_pipe(file: FileIO, path: str | Path) -> bytes:
    """What is in a pipe; b"" as soon as it has a writer that has not written yet."""
    deadline = time.monotonic() + PATIENCE
    while time.monotonic() < deadline:
        content = file.read()
        if content is None:  # there is a writer
            return b""
        if content:
            return content
        time.sleep(0.05)
    raise OSError(errno.EPIPE, f"nothing was written to this pipe within {PATIENCE:.0f} s", str(path))


def sync_folder(folder: Path) -> None:
    """Sync the names in `folder` to disk; no effect on file systems that cannot."""
    with suppress(OSError):
        handle = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)


def sync_tree(folder: Path) -> None:
    """Sync all files below `folder`, and their names, to disk.

    Raises:
        OSError: if a file cannot be synced.
    """
    for path in folder.rglob("*"):
        if path.is_dir():
            sync_folder(path)
        else:
            with open(path, "rb") as file:
                os.fsync(file.fileno())
    sync_folder(folder)


def apply_umask(path: Path) -> None:
    """Give `path` the permissions of a file from `open()`: safetensors creates files that only the owner can read."""
    mask = os.umask(0o077)  # the only way to read it is to set it
    os.umask(mask)
    path.chmod(0o666 & ~mask)


def is_write_error(error: Exception) -> bool:
    """Whether `error` concerns a file, and not memory, another process, or a check of another library."""
    return not isinstance(error, RuntimeError) or any(word in str(error) for word in TORCH)


def is_of_system(error: Exception) -> bool:
    """Whether the operating system reports `error`, perhaps in the text of another library's exception."""
    return _errno_of(error) is not None


def write_reason(error: Exception) -> str:
    """Why a file could not be written, in the words of the operating system where they are known."""
    number = _errno_of(error)
    return os.strerror(number) if number else reason_of(error)


def write_failure(error: Exception, path: Path) -> str:
    """Why `path` could not be written, and what to do: "No space left on device (0 bytes are free there); make room".

    Free space is mentioned only where it is short.
    """
    number, free, reason = _errno_of(error), _free_bytes(path), write_reason(error)
    if number in NO_SPACE or free < NEARLY_FULL:
        return f"{reason} ({free:,} bytes are free there); make room"
    return f"{reason}; {_advice(number, path)}"


def _errno_of(error: BaseException) -> int | None:
    if isinstance(error, OSError):
        return error.errno
    if found := re.search(r"os error (\d+)", str(error)):  # safetensors has the number in its text only
        return int(found[1])
    # torch's zip writer fails again when it closes the file
    before = error.__cause__ or error.__context__
    return _errno_of(before) if before is not None else None


def _free_bytes(path: Path) -> int:
    for folder in (path, *path.absolute().parents):  # `path` itself may not exist yet
        with suppress(OSError):
            return shutil.disk_usage(folder).free
    return NEARLY_FULL


def _advice(number: int | None, path: Path) -> str:
    if number == errno.ENOENT:
        return "does another run write into this folder?"
    if number in (errno.ENOTDIR, errno.EEXIST, errno.EISDIR):
        parent = next((folder for folder in path.absolute().parents if folder.exists()), None)
        if parent is not None and not parent.is_dir():
            return f"{parent} is a file, not a folder; give another path"
        return f"a {'folder' if path.is_dir() else 'file'} of this name exists; give another path"
    if number in (errno.EACCES, errno.EPERM, errno.EROFS):
        return "make the folder writable, or give another one"
    if number == errno.EFBIG:
        return "raise the limit on the size of a file (`ulimit -f`, or the file system's)"
    return "fix the cause"
