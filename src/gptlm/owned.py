"""Which files in a folder gptlm wrote: nothing else is ever replaced or deleted.

A folder that a command writes into has a listing, `.gptlm-files`, of JSON lines:

    {"command": "run", "key": null, "files": {"config.json": null, "checkpoint-10/model.safetensors": null}}
    {"command": "predict", "key": "5e0c41d2a7b90f13", "files": {"texts.jsonl": 1234}}
    {"removed": ["checkpoint-10/model.safetensors"]}

Names are relative to the folder; one that ends in "/" is a folder with everything in it. The key stands for the
arguments and the input of a command that writes a result; files of a run have none, and a file that a command writes
now has the key "temporary". The number is the size in bytes: a
file that has another one now was changed by others, and is theirs. Of several lines about a file the last one counts.
A line is one write to the end of the file: commands that use the folder at the same time lose no line of each other.

A line {"started": {...}} is about the start of the run that writes into the folder; the last one counts.

In addition, the files that the manifest.json of a `checkpoint-N` names count. A folder of a version without listings
has `run.json` and such a checkpoint; in it, all names that those versions wrote count.
"""

import fcntl
import json
import logging
import os
import re
import shutil
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from gptlm.json_text import parse_json
from gptlm.locks import is_at

logger = logging.getLogger(__name__)

LISTING = ".gptlm-files"
MANIFEST, RUN_FILE = "manifest.json", "run.json"
CARD = "README.md"  # of a model; one that is there already stays
CARD_MARK = "<!-- Written by gptlm when the model is saved; without this line the file is left as it is. -->"
CHECKPOINT = re.compile(r"checkpoint-\d+")
TOKENIZER = (
    r"tokenizer\.json|tokenizer_config\.json|special_tokens_map\.json|added_tokens\.json|vocab\.json|merges\.txt"
    r"|chat_template\.jinja"
)
MODEL = (
    rf"(config|generation_config|adapter_config)\.json|(adapter_)?model\.safetensors|model\.safetensors\.index\.json"
    rf"|model-\d{{5}}-of-\d{{5}}\.safetensors|{TOKENIZER}"
)
TOKENIZER_FILE, MODEL_FILE = re.compile(TOKENIZER), re.compile(MODEL)
EARLIER_RUN_FILES = (
    rf"run\.json|trainer_state\.json|results_of\.json|(train|eval|test|all)_results\.json|(merged/)?({MODEL})"
)
RUN_LOG, REPORT = "run_log.jsonl", "report.html"
RUN_FILES = re.compile(  # a run writes them under these names only
    rf"{EARLIER_RUN_FILES}|run_log\.jsonl|report\.html"
)
EARLIER_FILES = re.compile(
    rf"{EARLIER_RUN_FILES}|training_args\.bin|rng_state.*\.pth|(train|eval|test|all)_results-\d+\.json"
    r"|gptlm-error-\d+\.log|\.checkpoint-\d+\.incomplete/"
    r"|runs/.*(events\.out\.tfevents\.|vdlrecords\.).*|predictions(-\d+)?/\w+-step-\d+\.jsonl"
)
TEMPORARY = "temporary"  # the key of a file that a command writes now
RUN = "run"  # the command of all files of a training run


@dataclass(frozen=True)
class Entry:
    """A file in a listing: the command that wrote it, the key of its input, and its size; None where not noted."""

    command: str
    key: str | None = None
    size: int | None = None


@dataclass(frozen=True)
class Started:
    """The start of the run that writes into a folder.

    Attributes:
        launchers: names of the torchrun processes.
        step: that it started from.
    """

    launchers: list[str]
    step: int
    global_batch_size: int


def listing(folder: Path) -> dict[str, Entry]:
    """The files in `folder` that gptlm wrote, by their names; also names of files that are not there (any more)."""
    found = _noted(folder)
    if found is None:
        found = {name: Entry("") for name in _earlier_names(folder)}
    for path in folder.iterdir() if folder.is_dir() else ():
        if CHECKPOINT.fullmatch(path.name) and not path.is_symlink():
            found |= {f"{path.name}/{name}": Entry("") for name in files_of_checkpoint(path)}
    return found


def entry_of(folder: Path, name: str, files: dict[str, Entry] | None = None) -> Entry | None:
    """The entry of the file `name` in `folder`; None where gptlm did not write it, or it was changed since.

    A link is never gptlm's, nor is what lies behind one.

    Args:
        files: the listing of `folder`, where several names are looked up.
    """
    files = listing(folder) if files is None else files
    path = folder / name
    if any(part.is_symlink() for part in (path, *path.parents[: len(Path(name).parts) - 1])):
        return None
    if path.name == CARD and path.is_file() and not is_own_card(path):
        return None
    entry = files.get(name) or next((files[above] for above in _above(name) if above in files), None)
    if entry is None or (entry.size is not None and path.is_file() and path.stat().st_size != entry.size):
        return None
    return entry


def is_own_card(path: Path) -> bool:
    """Whether the model card `path` can be written: there is none, or it is one that gptlm wrote, even if changed."""
    if not os.path.lexists(path):
        return True
    return not path.is_symlink() and path.is_file() and CARD_MARK in path.read_text(encoding="utf-8", errors="replace")


def is_own_folder(folder: Path, name: str, files: dict[str, Entry] | None = None) -> bool:
    """Whether gptlm made the folder `name` in `folder`: it is no link, and files in it are listed."""
    files = listing(folder) if files is None else files
    return not (folder / name).is_symlink() and any(file.startswith(f"{name}/") for file in files)


def holds_run(folder: Path) -> bool:
    """Whether a training run wrote into `folder`, or it holds a checkpoint of one."""
    return any(entry.key is None for entry in listing(folder).values())


def note(
    folder: Path,
    names: Iterable[str],
    command: str,
    key: str | None = None,
    staging: Path | None = None,
    sizes: Mapping[str, int] | None = None,
) -> None:
    """Add the files `names` in `folder` to its listing, with a `key` also their sizes.

    Files of a run are noted before they are written, so that those of an interrupted one count; a result afterwards.

    Args:
        staging: where the files are now, if they are moved to `folder` next.
        sizes: of files that get their names next.

    Raises:
        OSError: if the listing cannot be written.
    """
    place = staging or folder
    files: dict[str, int | None] = dict(sizes) if sizes else {}
    for name in () if sizes else names:
        files[name] = (place / name).stat().st_size if key is not None else None
    _list_earlier(folder)
    _append(folder, {"command": command, "key": key, "files": files})


def note_start(folder: Path, started: Started) -> None:
    """Note the start of the run that writes into `folder`. Raises OSError if that cannot be written."""
    _append(folder, {"started": asdict(started)})


def noted_start(folder: Path) -> Started | None:
    """What `note_start` has noted last; None: nothing."""
    found = None
    for line in _lines(folder) or ():
        with suppress(TypeError, KeyError, ValueError):
            noted = line.get("started") or {}
            names, step, batch = noted["launchers"], int(noted["step"]), int(noted["global_batch_size"])
            found = Started([str(name) for name in names], step, batch)
    return found


def begin(folder: Path, names: Iterable[str], command: str) -> None:
    """Note that `command` writes the temporary files `names` in `folder`, of which it makes the first ones now.

    What an interrupted command left there is removed, a file of others is renamed, with a warning.

    Raises:
        OSError: if the listing cannot be written.
    """
    names = list(names)
    for name in names:
        make_way(folder, name)
    try:
        _append(folder, {"command": command, "key": TEMPORARY, "files": dict.fromkeys(names)})
    except OSError:
        end(folder, names)
        raise


def end(folder: Path, names: Iterable[str]) -> None:
    """Remove what is left of the temporary files `names` in `folder`, and forget them."""
    names = list(names)
    for name in names:
        with suppress(OSError):  # such as a name too long for the file system
            (folder / name).unlink(missing_ok=True)
    if not (folder / LISTING).is_file():
        return
    with suppress(OSError):  # a line too many does no harm
        _append(folder, {"removed": names})
    with suppress(OSError), _opened(folder):
        if not _noted(folder):
            (folder / LISTING).unlink()


def remove(folder: Path, name: str) -> bool:
    """Delete the file or folder `name` in `folder`, as far as gptlm wrote it; returns whether nothing of it is left."""
    _list_earlier(folder)
    files, path, removed = listing(folder), folder / name, []
    for file in [path] if path.is_symlink() or not path.is_dir() else files_below(path):
        own = file.relative_to(folder).as_posix()
        is_inside = any(above in files for above in _above(own))  # also a link in a folder that is all gptlm's
        if (is_inside and not path.is_symlink()) or entry_of(folder, own, files) is not None:
            file.unlink(missing_ok=True)
            removed.append(own)
    if path.is_dir() and not path.is_symlink():
        for below, _, _ in os.walk(path, topdown=False):
            if not os.listdir(below):
                os.rmdir(below)
    if f"{name}/" in files:
        removed.append(f"{name}/")
    if removed and folder.is_dir():
        _append(folder, {"removed": removed})
    return not os.path.lexists(path)


def make_way(folder: Path, name: str) -> None:
    """Let nothing be at `name` in `folder`: what gptlm wrote is removed, anything else is renamed, with a warning."""
    if os.path.lexists(folder / name) and not remove(folder, name):
        logger.warning("%s was not written by gptlm; renamed to %s", folder / name, rename_aside(folder, name))


def rename_aside(folder: Path, name: str) -> Path:
    """Rename `name` in `folder` to `left-NAME`, or `left-NAME-2` and so on; nothing of it is gptlm's then."""
    path = folder / name
    number, aside = 2, path.with_name(f"left-{path.name}")
    while os.path.lexists(aside):
        number, aside = number + 1, path.with_name(f"left-{path.name}-{number}")
    path.rename(aside)
    if below := [file for file in _noted(folder) or () if file == name or file.startswith(f"{name}/")]:
        _append(folder, {"removed": below})
    return aside


def move_in(staging: Path, folder: Path, command: str, key: str | None = None) -> None:
    """Move all files below `staging` to the same names in `folder`, note them, and remove `staging`.

    A file that gptlm did not write is renamed before, with a warning; a README.md stays.
    """
    names = sorted(file.relative_to(staging).as_posix() for file in files_below(staging))
    files = listing(folder)
    for name in list(names):
        if not os.path.lexists(folder / name) or entry_of(folder, name, files) is not None:
            continue
        if Path(name).name == CARD:
            names.remove(name)
        else:
            make_way(folder, name)
    note(folder, names, command, key, staging)  # before: it fails on a full disk, where moving does not
    for name in names:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        os.replace(staging / name, folder / name)
    shutil.rmtree(staging, ignore_errors=True)


def files_of_checkpoint(path: Path) -> list[str]:
    """The files that the manifest.json of the checkpoint in `path` names, and itself; none where it is no manifest."""
    try:
        manifest = parse_json((path / MANIFEST).read_text(encoding="utf-8"))
        if "global_step" not in manifest:
            return []
        inside = (name for name in manifest["files"] if not Path(name).is_absolute() and ".." not in Path(name).parts)
        return [MANIFEST, *inside]
    except (OSError, ValueError, TypeError, KeyError):
        return []


def _noted(folder: Path) -> dict[str, Entry] | None:
    """The listing of `folder`; None if it has none."""
    lines = _lines(folder)
    if lines is None:
        return None
    found: dict[str, Entry] = {}
    for noted in lines:
        try:
            for name in noted.get("removed", ()):
                found.pop(name, None)
            for name, size in noted.get("files", {}).items():
                found[name] = Entry(noted["command"], noted["key"], size)
        except (ValueError, TypeError, KeyError, AttributeError):
            continue
    return found


def _lines(folder: Path) -> list[dict[str, Any]] | None:
    """The lines of the listing of `folder` that are objects; None if it has none."""
    try:
        lines = (folder / LISTING).read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return None
    found = []
    for line in filter(None, lines):
        with suppress(ValueError):  # cut off where the disk was full
            if isinstance(noted := parse_json(line), dict):
                found.append(noted)
    return found


def _append(folder: Path, content: dict[str, object]) -> None:
    with _opened(folder) as handle:
        rest = f"\n{json.dumps(content)}\n".encode()  # on a line of its own, also after one that was cut off
        while rest:  # a disk that becomes full takes a part of it, and the next write fails
            rest = rest[os.write(handle, rest) :]
        os.fsync(handle)


@contextmanager
def _opened(folder: Path) -> Iterator[int]:
    """The listing of `folder`, to append to; meanwhile no other command removes it."""
    path, is_open = folder / LISTING, False
    while not is_open:
        handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o666)
        try:
            with suppress(OSError):  # a file system without locks
                fcntl.flock(handle, fcntl.LOCK_EX)
            if is_open := is_at(handle, path):
                yield handle
        finally:
            os.close(handle)


def _list_earlier(folder: Path) -> None:
    """Give the folder of a version without listings one with what that version wrote, before it gets other lines."""
    if names := _earlier_names(folder):
        _append(folder, {"command": RUN, "key": None, "files": dict.fromkeys(names)})


def _earlier_names(folder: Path) -> list[str]:
    """Names in `folder` that versions without listings wrote, if such a version trained there."""
    if not _is_earlier_run(folder):
        return []
    found = (path.relative_to(folder).as_posix() for path in files_below(folder))
    names = {name for name in found if EARLIER_FILES.fullmatch(name)}
    parts = {f"{path.name}/" for path in folder.iterdir() if path.is_dir()}
    return sorted(names | {name for name in parts if EARLIER_FILES.fullmatch(name)})


def _is_earlier_run(folder: Path) -> bool:
    if not (folder / RUN_FILE).is_file() or (folder / LISTING).exists():
        return False
    return any(files_of_checkpoint(path) for path in folder.iterdir() if CHECKPOINT.fullmatch(path.name))


def files_below(folder: Path) -> Iterator[Path]:
    """Files and links below `folder`; links are not followed."""
    for below, folders, files in os.walk(folder):
        yield from (Path(below) / name for name in files)
        yield from (path for name in folders if (path := Path(below) / name).is_symlink())


def _above(name: str) -> list[str]:
    """The folders that `name` lies in, as a listing writes them."""
    return [f"{above.as_posix()}/" for above in Path(name).parents if above.name]
