"""Files that are whole under their final name, also after a crash of the machine."""

import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import BinaryIO


@contextmanager
def replacing(final: Path) -> Iterator[BinaryIO]:
    """A file to write into. When the block ends it lies on the disk and gets the name `final`.

    If the block raises, `final` stays what it was and nothing is left behind.
    """
    temporary = final.with_name(f"{final.name}.{os.getpid()}.incomplete")
    try:
        with open(temporary, "wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, final)
    finally:
        temporary.unlink(missing_ok=True)
    flush_folder(final.parent)


def flush_folder(folder: Path) -> None:
    """Write the names in `folder` to the disk; without effect where the file system cannot."""
    with suppress(OSError):
        handle = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)


def flush_tree(folder: Path) -> None:
    """Write all files below `folder`, and their names, to the disk.

    Raises:
        OSError: if a file cannot be written there.
    """
    for path in folder.rglob("*"):
        if path.is_dir():
            flush_folder(path)
        else:
            with open(path, "rb") as file:
                os.fsync(file.fileno())
    flush_folder(folder)
