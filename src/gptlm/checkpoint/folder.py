"""Checkpoint folders that are complete or absent.

A checkpoint is written into `.checkpoint-N.incomplete`, gets a manifest with every file and its size, and is renamed to
`checkpoint-N`. One whose manifest does not match its files is skipped, with a log line. A checkpoint holds:

    model.safetensors, config.json, generation_config.json   the model, a GPT-2 folder; with LoRA PEFT's files instead
    the tokenizer's files
    run.json                     the run as an argument file
    optimizer-*.safetensors      the optimizer state (optimizer_state.py); not with save_only_model
    rng_state*.json              random states of each process; not with save_only_model
    trainer_state.json           the log history and the state of transformers' Trainer
    manifest.json                task, global_step, optimizer_steps, loss_scale, world_size, layout, order, settings,
                                 consumed_samples, epoch_position, loss_sum, files and their sizes
"""

import json
import os
import pickle
import re
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors import SafetensorError

from gptlm.disk import is_write_error, sync_folder, sync_tree, write_failure
from gptlm.errors import GptlmError, doing, is_out_of_memory, reason_of
from gptlm.json_text import parse_json

MANIFEST = "manifest.json"
HISTORY = "trainer_state.json"
RUN_FILE = "run.json"
PATTERN = re.compile(r"^checkpoint-(\d+)$")


@dataclass(frozen=True)
class Checkpoint:
    """A complete checkpoint: its folder and the fields of its manifest (`consumed_samples`, `global_step`, ...)."""

    path: Path
    manifest: dict[str, Any]


def staging_folder(output_dir: Path, step: int) -> Path:
    """Where the checkpoint of `step` is written until it is complete."""
    return output_dir / f".checkpoint-{step}.incomplete"


def commit(staging: Path, fields: Mapping[str, Any]) -> Path:
    """Give the finished folder `staging` its manifest and its final name, replacing an older folder of that name."""
    files = {str(f.relative_to(staging)): f.stat().st_size for f in sorted(staging.rglob("*")) if f.is_file()}
    manifest = staging / MANIFEST
    manifest.write_text(json.dumps({**fields, "files": files}, indent=1) + "\n", encoding="utf-8")
    sync_tree(staging)
    final = staging.with_name(staging.name.removeprefix(".").removesuffix(".incomplete"))
    if final.exists():
        shutil.rmtree(final)
    os.rename(staging, final)
    sync_folder(final.parent)
    return final


def read(path: Path) -> Checkpoint:
    """The checkpoint in `path`.

    Raises:
        GptlmError: saying why it is not complete.
    """
    if not path.is_dir():
        raise GptlmError(f"the checkpoint {path} does not exist; --resume_from_checkpoint takes a checkpoint-N folder")
    try:
        manifest = parse_json((path / MANIFEST).read_text(encoding="utf-8"))
        files = manifest.pop("files")
    except FileNotFoundError:
        raise GptlmError(f"the checkpoint {path} has no {MANIFEST}: it was not finished, or is not of gptlm") from None
    except (ValueError, KeyError, AttributeError) as error:
        raise GptlmError(f"the checkpoint {path} has a damaged {MANIFEST}: {reason_of(error)}") from error
    for name, size in files.items():
        file = path / name
        found = file.stat().st_size if file.is_file() else None
        if found != size:
            raise GptlmError(
                f"the checkpoint {path} is damaged: {name} is {'missing' if found is None else f'{found} bytes long'}, "
                f"expected {size} bytes"
            )
    _check_history(path)
    return Checkpoint(path, manifest)


def _check_history(path: Path) -> None:
    """Raises GptlmError if the log of the run that the Trainer reads is damaged; a converted checkpoint has none."""
    try:
        parse_json((path / HISTORY).read_text(encoding="utf-8"))
    except FileNotFoundError:
        pass
    except (OSError, ValueError) as error:
        raise GptlmError(f"the checkpoint {path} is damaged: {HISTORY} cannot be read ({reason_of(error)})") from error


def log_lines_in(path: Path) -> int:
    """Log lines that the checkpoint in `path` hands to a run that resumes from it; a converted one has none."""
    history = path / HISTORY
    return len(parse_json(history.read_text(encoding="utf-8"))["log_history"]) if history.is_file() else 0


def newest(output_dir: Path) -> tuple[Checkpoint | None, list[str]]:
    """The complete checkpoint of the highest step in `output_dir`, and why newer ones were skipped."""
    skipped: list[str] = []
    for path in reversed(folders(output_dir)):
        try:
            return read(path), skipped
        except GptlmError as error:
            skipped.append(str(error))
    return None, skipped


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


def set_aside(output_dir: Path, step: int) -> list[Path]:
    """Rename checkpoints later than `step`, from which a run resumes: they are damaged, or the run before wrote them.

    Returns the new folders, `left-checkpoint-N`, which nothing resumes from.
    """
    moved = []
    for path in folders(output_dir):
        if step_of(path) > step:
            aside = path.with_name(f"left-{path.name}")
            shutil.rmtree(aside, ignore_errors=True)
            moved.append(path.rename(aside))
    return moved


def rotate(output_dir: Path, limit: int | None, best: Path | None, written: Path) -> list[Path]:
    """Remove the oldest checkpoints beyond `limit`; `written` and `best` stay. Returns what was removed."""
    everything = folders(output_dir)
    if limit is None or len(everything) <= limit:
        return []
    kept = {written.name} | ({best.name} if best is not None else set())
    removable = [path for path in everything if path.name not in kept]
    removed = removable[: len(everything) - max(limit, len(kept))]
    for path in removed:
        shutil.rmtree(path)
    return removed


def remove_leftovers(output_dir: Path) -> None:
    """Remove folders of checkpoints whose writing was interrupted."""
    for path in output_dir.glob(".checkpoint-*.incomplete"):
        shutil.rmtree(path, ignore_errors=True)


@contextmanager
def writing(path: Path, what: str, more: str = "earlier checkpoints are intact") -> Iterator[None]:
    """Turns a failure to write `what` to `path` into a GptlmError and removes partial files.

    Errors that are none of writing (memory, another process, another library's own checks) pass.
    """
    try:
        with doing(f"saving {what}"):
            yield
    except (OSError, SafetensorError, RuntimeError) as error:
        if not is_write_error(error):
            raise
        reason = write_failure(error, path)
        remove_leftovers(path.parent)  # what was written of it would fill the disk
        kept = f"; {more}" if more else ""
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
