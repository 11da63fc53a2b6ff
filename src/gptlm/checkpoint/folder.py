"""Checkpoint folders that are complete or absent.

A checkpoint is written into `.checkpoint-N.incomplete`, gets a manifest with size and checksum of every file, and is
renamed to `checkpoint-N`. One whose manifest does not match its files is skipped, with a log line. A checkpoint holds:

    model.safetensors, config.json, generation_config.json   the model, a GPT-2 folder; with LoRA PEFT's files instead
    the tokenizer's files
    README.md                    the model card
    run.json                     the run as an argument file
    optimizer-*.safetensors      the optimizer state (optimizer_state.py); not with save_only_model
    weights-*.safetensors, shards.json   a sharded one: the parts of each process (shards.py), not model.safetensors
    rng_state*.json              random states of each process; not with save_only_model
    trainer_state.json           the log history and the state of transformers' Trainer
    manifest.json                manifest.py: step, samples, order and settings; files, their sizes and checksums
"""

import logging
import os
import pickle
import re
import shutil
import stat
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors import SafetensorError

from gptlm import owned
from gptlm.checkpoint.manifest import MANIFEST, SHARDED, Manifest, manifest_text, parse_manifest
from gptlm.checksums import file_checksums
from gptlm.disk import is_write_error, replacing, sync_folder, sync_tree, write_failure
from gptlm.errors import GptlmError, doing, is_out_of_memory, reason_of
from gptlm.json_text import parse_json
from gptlm.signals import Terminated, held

HISTORY = "trainer_state.json"
RUN_FILE = owned.RUN_FILE
PATTERN = re.compile(r"^checkpoint-(\d+)$")
RANDOM_STATES = "rng_state*.json"
logger = logging.getLogger(__name__)

STAGING = re.compile(r"\.checkpoint-\d+\.incomplete")


@dataclass(frozen=True)
class Checkpoint:
    """A complete checkpoint: its folder and its manifest."""

    path: Path
    manifest: Manifest


def staging_folder(output_dir: Path, step: int) -> Path:
    """Where the checkpoint of `step` is written until it is complete."""
    return output_dir / f".checkpoint-{step}.incomplete"


def commit(
    staging: Path, fields: Mapping[str, Any], read: Collection[str] = (), known: Mapping[str, str] | None = None
) -> Path:
    """Give the finished folder `staging` its manifest and its final name.

    An older checkpoint of that name is replaced; what gptlm did not write is renamed to `left-NAME`.

    Args:
        read: names of checkpoints that the run reads its model from; they are renamed, too.
        known: checksums of files whose writers have computed them.
    """
    files = {str(f.relative_to(staging)): f.stat().st_size for f in sorted(staging.rglob("*")) if f.is_file()}
    others = [name for name in files if name not in (known or {})]
    with file_checksums([staging / name for name in others]) as sums:  # from the page cache, while the disk is written
        sync_tree(staging)
        checksums = {**(known or {}), **dict(zip(others, sums, strict=True))}
    with replacing(staging / MANIFEST) as manifest:
        manifest.write(manifest_text(fields, files, checksums).encode())
    final = staging.with_name(staging.name.removeprefix(".").removesuffix(".incomplete"))
    is_own = final.name in {path.name for path in own_folders(final.parent)}
    if is_own and final.name in read:
        aside = owned.rename_aside(final.parent, final.name)
        logger.warning("%s, the model of this run, is renamed to %s", final, aside)
        os.rename(staging, final)
    elif is_own:
        before = _move_away(final)
        os.rename(staging, final)
        if not owned.remove(before.parent, before.name):  # files of others were in it
            owned.rename_aside(before.parent, before.name)
    else:
        owned.make_way(final.parent, final.name)
        os.rename(staging, final)
    sync_folder(final.parent)
    return final


def _move_away(path: Path) -> Path:
    """Rename an own checkpoint, which is to be removed when another one is in its place."""
    before = path.with_name(f".{path.name}.before")
    owned.make_way(before.parent, before.name)
    own = [name.removeprefix(path.name) for name in owned.listing(path.parent) if name.startswith(f"{path.name}/")]
    os.rename(path, before)
    owned.note(before.parent, [f"{before.name}{name}" for name in own], owned.RUN)
    return before


def read(path: Path) -> Checkpoint:
    """The checkpoint in `path`, whose files have the sizes in its manifest; `check_content` looks into them.

    Raises:
        GptlmError: saying why it is not complete.
    """
    if not path.is_dir():
        raise GptlmError(f"the checkpoint {path} does not exist; --resume_from_checkpoint takes a checkpoint-N folder")
    found = Checkpoint(path, read_manifest(path))
    for name, size in found.manifest.files.items():
        try:
            state = (path / name).stat()
            problem = f"{state.st_size} bytes long" if stat.S_ISREG(state.st_mode) else "not a file"
            is_whole = stat.S_ISREG(state.st_mode) and state.st_size == size
        except OSError as error:
            problem, is_whole = "missing" if isinstance(error, FileNotFoundError) else reason_of(error), False
        if not is_whole:
            raise GptlmError(f"the checkpoint {path} is damaged: {name} is {problem}, expected {size} bytes")
    return found


def read_manifest(path: Path) -> Manifest:
    """The manifest of the checkpoint in `path`.

    Raises:
        GptlmError: if there is none, or it is damaged or of another step than its folder.
    """
    try:
        manifest = parse_manifest((path / MANIFEST).read_text(encoding="utf-8"))
        if PATTERN.match(path.name) and manifest.global_step != step_of(path):
            raise ValueError(f"it is of step {manifest.global_step}")
    except FileNotFoundError:
        raise GptlmError(f"the checkpoint {path} has no {MANIFEST}: it was not finished, or is not of gptlm") from None
    except (OSError, ValueError) as error:
        raise GptlmError(f"the checkpoint {path} has a damaged {MANIFEST}: {reason_of(error)}") from error
    return manifest


def check_content(found: Checkpoint, *, weights: bool = False) -> None:
    """Compare the files with their checksums, several at a time, and read those in JSON that a run resumes with.

    Args:
        weights: leave out optimizer and random states.

    Raises:
        GptlmError: naming the damaged files.
    """
    path, sums = found.path, found.manifest.checksums or {}
    names = [name for name in sums if not (weights and name.startswith(("optimizer-", "rng_state")))]
    damaged = []
    try:
        with file_checksums([path / name for name in names]) as current:
            damaged = [name for name, now in zip(names, current, strict=True) if now != sums[name]]
    except OSError as error:
        raise GptlmError(f"the checkpoint {path} cannot be read: {error.filename}: {reason_of(error)}") from error
    if damaged:
        raise GptlmError(
            f"the checkpoint {path} is damaged: the content of {', '.join(damaged)} is not what was written (the "
            f"checksum{'s differ' if len(damaged) > 1 else ' differs'})"
        )
    if found.manifest.checkpoint_format == SHARDED:
        _check_shards(path)
    _check_history(path, found.manifest.global_step)
    if found.manifest.checksums is None and not weights:
        _check_random_states(path)


def _check_shards(path: Path) -> None:
    """Raises GptlmError if the index of a sharded checkpoint is damaged, or does not fit its files."""
    from gptlm.model.shards import ShardedTensors  # takes a second: the command line reads manifests without it

    try:
        ShardedTensors(path).check()
    except GptlmError as error:
        raise GptlmError(f"the checkpoint {path} is damaged: {error.marked}") from error


def _check_history(path: Path, step: int) -> None:
    """Raises GptlmError if the log of the run that the Trainer reads is damaged; a converted checkpoint has none."""
    from transformers import TrainerState  # takes seconds: the command line reads manifests without it

    try:
        state = TrainerState(**parse_json((path / HISTORY).read_text(encoding="utf-8")))
        lines = state.log_history
        if not isinstance(lines, list) or not all(isinstance(line, dict) for line in lines):
            raise ValueError("log_history is not a list of objects")
        if not isinstance(state.best_model_checkpoint, str | None):
            raise ValueError(f"best_model_checkpoint is {state.best_model_checkpoint!r}")
        if type(state.best_global_step) not in (int, type(None)):
            raise ValueError(f"best_global_step is {state.best_global_step!r}")
        if state.global_step != step or type(state.global_step) is not int:
            raise ValueError(f"global_step is {state.global_step!r} instead of {step}")
    except FileNotFoundError:
        pass
    except (OSError, ValueError, TypeError) as error:
        raise GptlmError(f"the checkpoint {path} is damaged: {HISTORY} cannot be read ({reason_of(error)})") from error


def _check_random_states(path: Path) -> None:
    """Raises GptlmError if random states are no JSON object."""
    for file in sorted(path.glob(RANDOM_STATES)):
        try:
            if not isinstance(parse_json(file.read_text(encoding="utf-8")), dict):
                raise ValueError("it is not an object")
        except (OSError, ValueError) as error:
            reason = reason_of(error)
            raise GptlmError(f"the checkpoint {path} is damaged: {file.name} cannot be read ({reason})") from error


def log_lines_in(path: Path) -> int:
    """Log lines that the checkpoint in `path` hands to a run that resumes from it; a converted one has none."""
    history = path / HISTORY
    return len(parse_json(history.read_text(encoding="utf-8"))["log_history"]) if history.is_file() else 0


def newest(output_dir: Path, read_from: Collection[str] = ()) -> tuple[Checkpoint | None, list[str]]:
    """The undamaged checkpoint of the highest step in `output_dir`, and why newer ones were skipped.

    Args:
        read_from: names of checkpoints that the run reads its model from. One that is older than the others is of the
            run before this one, and counts for nothing.
    """
    skipped: list[str] = []
    times = {path: _written_at(path) for path in folders(output_dir)}
    for path, time in reversed(times.items()):
        if path.name in read_from and time < max(times.values()):
            continue
        try:
            found = read(path)
            check_content(found)
            return found, skipped
        except GptlmError as error:
            skipped.append(str(error))
    return None, skipped


def _written_at(path: Path) -> int:
    try:
        return (path / MANIFEST).stat().st_mtime_ns
    except OSError:
        return 0


def folders(output_dir: Path) -> list[Path]:
    """All `checkpoint-N` folders, lowest step first."""
    if not output_dir.is_dir():
        return []
    found = [path for path in output_dir.iterdir() if path.is_dir() and PATTERN.match(path.name)]
    return sorted(found, key=step_of)


def step_of(path: Path) -> int:
    """N of `checkpoint-N`."""
    match = PATTERN.match(path.name)
    assert match, path
    return int(match[1])


def own_folders(output_dir: Path) -> list[Path]:
    """The `checkpoint-N` folders that gptlm wrote, lowest step first; no links."""
    files = owned.listing(output_dir)
    return [path for path in folders(output_dir) if owned.is_own_folder(output_dir, path.name, files)]


def set_aside(output_dir: Path, step: int, read: Collection[str] = ()) -> list[Path]:
    """Rename checkpoints later than `step`, from which a run resumes: they are damaged, or the run before wrote them.

    Args:
        read: names of checkpoints that the run reads its model from; they stay.

    Returns:
        the new folders, `left-checkpoint-N` or `left-checkpoint-N-2` and so on, which nothing resumes from and nothing
        deletes.
    """
    later = [path for path in own_folders(output_dir) if step_of(path) > step and path.name not in read]
    return [owned.rename_aside(output_dir, path.name) for path in later]


def rotate(
    output_dir: Path, limit: int | None, best: Path | None, written: Path, read: Collection[str] = ()
) -> list[Path]:
    """Remove the oldest checkpoints beyond `limit`; `written` and `best` stay. Returns what was removed.

    Args:
        read: names of checkpoints that the run reads its model from; they stay, and do not count.
    """
    everything = [path for path in own_folders(output_dir) if path.name not in read]
    if limit is None or len(everything) <= limit:
        return []
    kept = {written.name} | ({best.name} if best is not None else set())
    removable = [path for path in everything if path.name not in kept]
    removed = removable[: len(everything) - max(limit, len(kept))]
    for path in removed:
        owned.remove(output_dir, path.name)
    return removed


def start(staging: Path) -> None:
    """Make the empty folder `staging`, and list it as gptlm's. What else has its name is renamed to `left-NAME`."""
    staging.parent.mkdir(parents=True, exist_ok=True)
    owned.make_way(staging.parent, staging.name)
    owned.note(staging.parent, [f"{staging.name}/"], owned.RUN)
    staging.mkdir()


def remove_leftovers(output_dir: Path) -> None:
    """Remove folders of checkpoints whose writing was interrupted."""
    for path in output_dir.glob(".checkpoint-*.incomplete"):
        if STAGING.fullmatch(path.name):
            owned.remove(output_dir, path.name)


@contextmanager
def writing(path: Path, what: str, resumes: bool = True) -> Iterator[None]:
    """Turns a failure to write `what` to `path` into a GptlmError and removes partial files.

    Args:
        resumes: the same command resumes from the checkpoints beside `path` or in it.

    Errors that are none of writing (memory, another process, another library's own checks) pass.
    """
    try:
        with held(), doing(f"saving {what}"):
            yield
    except (KeyboardInterrupt, Terminated):  # the second signal
        if STAGING.fullmatch(path.name):
            shutil.rmtree(path, ignore_errors=True)
        raise
    except (OSError, SafetensorError, RuntimeError) as error:
        if not is_write_error(error):
            raise
        reason = write_failure(error, path)
        if STAGING.fullmatch(path.name):
            shutil.rmtree(path, ignore_errors=True)  # what was written of it would fill the disk
        intact = resumes and (folders(path) or folders(path.parent))
        kept = "; earlier checkpoints are intact" if intact else ""
        raise GptlmError(f"cannot write {what} {path}: {reason}{kept}; then start the same command again") from error


@contextmanager
def reading(path: str) -> Iterator[None]:
    """A checkpoint file whose content is damaged although its size is right, as one sentence."""
    try:
        with doing(f"reading the checkpoint {path}"):
            yield
    except (OSError, EOFError, RuntimeError, ValueError, KeyError, pickle.UnpicklingError, SafetensorError) as error:
        if isinstance(error, GptlmError) or is_out_of_memory(error):
            raise
        advice = (
            "fix the cause, or remove that folder to resume from an older one"
            if isinstance(error, OSError)
            else "remove that folder to resume from an older one"
        )
        raise GptlmError(f"the checkpoint {path} cannot be read: {reason_of(error)}; {advice}") from error
