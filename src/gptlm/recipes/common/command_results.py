"""Results of commands: files and folders that are new, or replace what the same command made of the same input."""

import hashlib
import json
import logging
import os
import shutil
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

from safetensors import SafetensorError

from gptlm import owned
from gptlm.disk import is_write_error, new_folders, replacing, sync_folder, sync_tree, write_failure
from gptlm.errors import GptlmError, UsageError, named
from gptlm.locks import locked
from gptlm.recipes.common.output_folder import some_of

logger = logging.getLogger(__name__)

NOT_IN_KEY = ("overwrite", "output", "output_path", "output_dir", "output_file", "output_prefix")


@dataclass(frozen=True)
class Maker:
    """The command that writes a result.

    Attributes:
        command: its name.
        key: of its arguments and its input.
        inputs: files and folders that it reads.
        overwrite: whether it replaces results of other arguments or another input.
    """

    command: str
    key: str
    inputs: tuple[Path, ...]
    overwrite: bool


def maker(command: str, arguments: Mapping[str, Any], inputs: Iterable[Path], *, overwrite: bool) -> Maker:
    """The maker with the key of `arguments`, and of names, sizes and times of change of the files in `inputs`."""
    read = tuple(path for path in inputs if path.exists())
    kept = {name: value for name, value in arguments.items() if name not in NOT_IN_KEY}
    found = (file for path in read for file in (path.iterdir() if path.is_dir() else [path]))
    files = sorted({file.resolve() for file in found if file.is_file()})  # a loop of links is no file
    stats = [(str(file), file.stat()) for file in files if file.name != owned.LISTING]
    marks = [(name, stat.st_size, stat.st_mtime_ns) for name, stat in stats]
    content = json.dumps([command, kept, marks], sort_keys=True, default=str)
    return Maker(command, hashlib.sha256(content.encode()).hexdigest()[:16], read, overwrite)


def check_files(flag: str, files: Sequence[Path], by: Maker) -> None:
    """Check that the command may write `files`.

    Raises:
        UsageError: if one is an input, if gptlm did not write it, or if another command did and `overwrite` is off.
    """
    entries = {}
    for file in files:
        if not os.path.lexists(file) or (file.exists() and not file.is_file()):  # a folder, a pipe, /dev/null
            continue
        for path in by.inputs:
            if file.resolve() == path.resolve() or (file.exists() and path.exists() and file.samefile(path)):
                raise UsageError(f"{named(flag)} {file} is what the command reads; give another {named(flag)}")
            if path.is_dir() and file.resolve().parent == path.resolve():
                raise UsageError(
                    f"{named(flag)} {file} is a file of {path}, which the command reads; give another {named(flag)}"
                )
        entry = owned.entry_of(file.parent, file.name)
        if entry is None:
            raise UsageError(
                f"{named(flag)}: {file} exists, and gptlm did not write it as it is now; move it elsewhere, or give "
                f"another {named(flag)}"
            )
        entries[str(file)] = entry
    if why := _why_replaced(flag, ", ".join(entries), list(entries.values()), by):
        logger.info("replaced, %s: %s", why, ", ".join(entries))


def check_folder(flag: str, folder: Path, by: Maker) -> str | None:
    """Check that the command may make `folder`, or replace what it has made there.

    Returns:
        Why it may replace the folder; None: there is nothing to replace.

    Raises:
        UsageError: if it is the working, root or home folder, holds an input or a file of others, or a result of
            other arguments and `overwrite` is off.
    """
    resolved = folder.resolve()
    for what, special in (("working", Path.cwd()), ("home", Path.home()), ("root", Path(resolved.anchor))):
        if resolved == special.resolve():
            raise UsageError(f"{named(flag)} {folder} is the {what} folder; give a new folder")
    for path in by.inputs:
        if path.resolve().is_relative_to(resolved):
            raise UsageError(f"{named(flag)} {folder} holds {path}, which the command reads; give a new folder")
    if not folder.is_dir():
        return None
    files = owned.listing(folder)
    found = [file.relative_to(folder).as_posix() for file in owned.files_below(folder)]
    entries = {name: owned.entry_of(folder, name, files) for name in found if name != owned.LISTING}
    foreign = [name for name, entry in entries.items() if entry is None or entry.command != by.command]
    if foreign:
        raise UsageError(
            f"{named(flag)} {folder} is not empty: {some_of(foreign)} was not written by gptlm {by.command}; give a "
            "new folder"
        )
    return _why_replaced(flag, str(folder), [entry for entry in entries.values() if entry is not None], by)


def _why_replaced(flag: str, what: str, entries: list[owned.Entry], by: Maker) -> str | None:
    """Why the command may replace `what`; None if it is not there. Raises UsageError if the command may not."""
    if not entries:
        return None
    if any(entry.key is None for entry in entries):
        raise UsageError(f"{named(flag)}: {what} is of a training run; give another {named(flag)}")
    if all(entry.command == by.command and entry.key == by.key for entry in entries):
        return "the same command made it of the same input"
    if by.overwrite:
        return "as overwrite asks"
    raise UsageError(
        f"{named(flag)}: {what} exists, of other arguments or another input; {named('overwrite')} replaces it, or "
        f"give another {named(flag)}"
    )


def note_files(files: Iterable[Path], by: Maker) -> None:
    """List `files`, which are complete, as results of the command."""
    for file in files:
        if file.is_file() and not file.is_symlink():
            owned.note(file.parent, [file.name], by.command, by.key)


@contextmanager
def new_file(path: Path, by: Maker) -> Iterator[BinaryIO]:
    """A file that gets the name `path` at the end, when it is listed as a result of the command.

    Raises:
        OSError: if the file or the listing cannot be written; then `path` is as it was before.
    """
    with replacing(path) as file:
        yield file
        file.flush()
        # before it has its name: a full disk must not leave a result that counts as a file of others
        owned.note(path.parent, [path.name], by.command, by.key, sizes={path.name: os.fstat(file.fileno()).st_size})


@contextmanager
def new_folder(flag: str, output: Path, by: Maker) -> Iterator[Path]:
    """A folder that is renamed to `output` at the end; a lock keeps other commands out meanwhile.

    Raises:
        GptlmError: as `check_folder`, if another command holds the lock, or `output` cannot be written.
    """
    output = output.resolve()
    staging = output.with_name(f".{output.name}.incomplete")
    try:
        with _as_sentence(output), new_folders(output.parent), locked(output.with_name(f".{output.name}.lock")):
            made = False
            try:
                with _as_sentence(output):  # it counts the free space before the staging folder is removed
                    if why := check_folder(flag, output, by):  # again: another command may have ended meanwhile
                        logger.info("replaced, %s: %s", why, output)
                    _make_empty(staging)
                    made = True
                    owned.note(staging, [], by.command)
                    yield staging
                    names = [file.relative_to(staging).as_posix() for file in owned.files_below(staging)]
                    owned.note(staging, [name for name in names if name != owned.LISTING], by.command, by.key)
                    sync_tree(staging)  # before the rename: an existing `output` counts as complete
                    _replace(output, staging)
            finally:
                if made:
                    shutil.rmtree(staging, ignore_errors=True)
    except BlockingIOError:
        raise GptlmError(
            f"another command is writing into {output}; wait until it ends, or give another {named(flag)}"
        ) from None


@contextmanager
def _as_sentence(output: Path) -> Iterator[None]:
    """A failure to write `output` as a GptlmError."""
    try:
        yield
    except BlockingIOError:  # of the lock
        raise
    except (OSError, SafetensorError, RuntimeError) as error:
        if not is_write_error(error):
            raise
        raise GptlmError(f"cannot write {output}: {write_failure(error, output)}; nothing of it is left") from error


def _make_empty(staging: Path) -> None:
    """Make the folder `staging`; one that an interrupted command left has a listing and is removed."""
    if (staging / owned.LISTING).is_file() and not staging.is_symlink():
        shutil.rmtree(staging)
    owned.make_way(staging.parent, staging.name)
    staging.mkdir()


def _replace(output: Path, staging: Path) -> None:
    """Rename `staging` to `output`; what the same command left there is removed, when the new one is in its place."""
    before = output.with_name(f".{output.name}.before.incomplete")
    if output.is_dir():
        owned.make_way(before.parent, before.name)
        output.rename(before)
    staging.rename(output)
    sync_folder(output.parent)
    if before.is_dir():
        shutil.rmtree(before)
