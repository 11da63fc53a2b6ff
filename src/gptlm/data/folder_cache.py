"""Folders of files that are built once and kept between runs.

The name of an entry is the hash of everything that its files depend on. It is built under another name, synced and
renamed, so readers never see half an entry. One process builds; others that need the same entry wait for it.
"""

import hashlib
import json
import logging
import os
import shutil
import tempfile
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, Generic, TypeVar

from gptlm.disk import sync_tree, write_failure
from gptlm.errors import GptlmError, named, reason_of
from gptlm.json_text import parse_json
from gptlm.locks import POLL, Lock
from gptlm.signals import held

logger = logging.getLogger(__name__)

DESCRIPTION = "entry.json"
CHANGING = ".incomplete"
HEAD_START = 60.0  # seconds in which the process that shows its progress gets to build, not one that shows nothing

Build = Callable[[Path], dict[str, Any]]  # writes files into a folder and returns facts about them
Entry = TypeVar("Entry")


def hashes_of(files: Iterable[Path]) -> list[list[str]]:
    """Formats and hashes of all bytes of files and saved datasets. Raises GptlmError if a file cannot be read."""
    found = []
    for file in files:
        parts = sorted(part for part in file.iterdir() if part.is_file()) if file.is_dir() else [file]
        for part in parts:
            try:
                with open(part, "rb") as stream:
                    digest = hashlib.file_digest(stream, "sha256").hexdigest()
            except OSError as error:
                raise GptlmError(f"cannot read {part}: {reason_of(error)}") from error
            found.append(["".join(part.suffixes[-2:]) if part is file else part.name, digest])
    return found


class FolderCache(Generic[Entry]):
    """Looks for entries in all `folders`, builds new ones in the first that can be written.

    Args:
        open_entry: reads the files of an entry; raises OSError or ValueError if they are damaged.
    """

    def __init__(self, folders: Sequence[str | Path], open_entry: Callable[[Path], Entry]):
        self.folders, self.open_entry = [Path(folder) for folder in folders], open_entry

    def load_or_build(self, what: dict[str, Any], build: Build, *, first: bool = True) -> tuple[Entry, dict[str, Any]]:
        """The entry described by `what`, and the facts about it.

        Args:
            first: this process builds, if the entry is missing; others give it a head start.

        Raises:
            GptlmError: if no folder can be written, or the disk is full.
        """
        what = json.loads(json.dumps(what, sort_keys=True))
        name = hashlib.sha256(json.dumps(what, sort_keys=True).encode()).hexdigest()[:32]
        for folder in self.folders:
            if (found := self._load(folder / name, what)) is not None:
                return found
        lock = Lock(self._folder(name) / f"{name}.lock")
        try:
            final = lock.path.with_suffix("")
            locked = _lock(lock, final, first)
            if (found := self._load(final, what, warn=True)) is None:
                self._build(final, what, build, locked=locked)
                found = self._load(final, what, warn=True)
            if found is None:
                raise GptlmError(f"{final} is damaged although it was just written; check the disk")
            return found
        finally:
            lock.release()

    def _folder(self, name: str) -> Path:
        """The first folder that can be written."""
        reasons = []
        for folder in self.folders:
            try:
                folder.mkdir(parents=True, exist_ok=True)
                tempfile.TemporaryFile(dir=folder).close()
                return folder
            except OSError as error:
                reasons.append(f"{folder}: {reason_of(error)}")
        raise GptlmError(
            f"no folder for the encoded data can be written ({'; '.join(reasons)}); name one with {named('data_cache')}"
        )

    def _load(self, folder: Path, what: dict[str, Any], *, warn: bool = False) -> tuple[Entry, dict[str, Any]] | None:
        """The entry and its facts; None if it does not exist or is damaged."""
        try:
            entry = parse_json((folder / DESCRIPTION).read_text(encoding="utf-8"))
            if entry["of"] != what:
                raise ValueError("it describes something else")
            for name, size in entry["files"].items():
                if (found := (folder / name).stat().st_size) != size:
                    raise ValueError(f"{name} has {found:,} bytes instead of {size:,}")
            return self.open_entry(folder), entry["facts"]
        except (OSError, ValueError, LookupError, TypeError) as error:
            if warn and folder.exists():
                logger.warning("%s is damaged (%s) and is built again", folder, reason_of(error))
            return None

    def _build(self, final: Path, what: dict[str, Any], build: Build, *, locked: bool) -> None:
        if locked:
            for left in final.parent.glob(f"{final.name}.*{CHANGING}"):  # of processes that were killed
                shutil.rmtree(left, ignore_errors=True)
        folder = final.with_name(f"{final.name}.{os.uname().nodename}-{os.getpid()}{CHANGING}")
        try:
            folder.mkdir()
            facts = build(folder)
            files = {path.name: path.stat().st_size for path in folder.iterdir()}
            content = json.dumps({"of": what, "files": files, "facts": facts}, indent=1)
            (folder / DESCRIPTION).write_text(content + "\n", encoding="utf-8")
            sync_tree(folder)
            if not locked and self._load(final, what) is not None:
                return  # another process has built the same at the same time
            if final.exists():  # damaged
                shutil.rmtree(final)
            os.replace(folder, final)
        except OSError as error:
            reason = write_failure(error, folder)
            raise GptlmError(
                f"cannot write {folder}: {reason}, or name another folder with {named('data_cache')}"
            ) from error
        finally:
            shutil.rmtree(folder, ignore_errors=True)


def _lock(lock: Lock, final: Path, first: bool) -> bool:
    """Wait for the lock; a process that is not `first` takes it after another has had it, or if the entry exists.

    Returns:
        Whether it is locked: not on a file system without locks, where each process builds under a name of its own.
    """
    started, told, was_held = time.monotonic(), False, first
    while True:
        waited = time.monotonic() - started
        try:
            with held():  # a signal does not come between locking and knowing of it
                is_taken = lock.acquire()
        except OSError:
            return False
        if is_taken:
            if was_held or waited > HEAD_START or final.exists():
                return True
            lock.release()
        else:
            was_held = True
            if not told and waited > 1:
                told = True
                logger.info("another process encodes the same data: waiting for it")
        time.sleep(POLL)
