"""`manifest.json` of a checkpoint: what is read again when a run resumes, each field of the type that readers expect.

The file also has a checksum of each file, and one of itself: of its other fields as JSON with sorted keys.
"""

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import PurePosixPath
from typing import Any

from gptlm.checksums import ALGORITHM, checksum
from gptlm.json_text import parse_json

MANIFEST = "manifest.json"
SUMS, OWN_SUM = ALGORITHM, f"manifest_{ALGORITHM}"
LONGEST_NAME = 255  # of a file, on every file system
LOSS_SCALE = ("value", "good_steps", "overflows_left")
STOCK, SHARDED = FORMATS = ("hf", "sharded")  # of the weights and the optimizer state
MISSING = object()


@dataclass(frozen=True)
class Manifest:
    """The facts of a checkpoint.

    Attributes:
        optimizer_steps: fewer than global_step where float16 skipped some.
        loss_sum: of the losses of all steps of the run, but the first `steps_without_loss`.
        world_size: processes that wrote it; 0: it was converted.
        weights_only: it holds no optimizer state.
        loss_scale: the state of float16's loss scale.
        layout: degrees of tensor and pipeline parallelism, and pipeline chunks.
        order: what fixes the order of the samples.
        settings: of the command, which change later updates.
        task: that wrote it; None: unknown.
        epoch_position: epoch, and samples of it that have been trained; None: not by epochs, or unknown.
        evaluation_is_due: a signal ended the run before the evaluation of this step was finished.
        checkpoint_format: one of FORMATS.
        files: their sizes in bytes, by path in the folder.
        checksums: by the same paths; None: of a version that noted none.
    """

    global_step: int
    optimizer_steps: int
    consumed_samples: int
    loss_sum: float
    world_size: int
    weights_only: bool
    loss_scale: dict[str, float] | None
    layout: list[int]
    order: dict[str, Any]
    settings: dict[str, Any]
    task: str | None
    epoch_position: list[int] | None
    steps_without_loss: int
    evaluation_is_due: bool
    checkpoint_format: str
    files: dict[str, int]
    checksums: dict[str, str] | None


def manifest_text(fields: Mapping[str, Any], files: Mapping[str, int], checksums: Mapping[str, str]) -> str:
    """The text of the file; `fields` are those of `Manifest`, and others to note."""
    written = json.loads(json.dumps({**fields, "files": files, SUMS: checksums}))
    return json.dumps({**written, OWN_SUM: _own_sum(written)}, indent=1) + "\n"


def parse_manifest(text: str) -> Manifest:
    """The manifest of that text.

    Raises:
        ValueError: if it is no JSON object, a field is missing or of another type, or its own checksum differs.
    """
    found = parse_json(text)
    if not isinstance(found, dict):
        raise ValueError(f"it is a {type(found).__name__}, not an object")
    own = found.pop(OWN_SUM, None)
    if own != (_own_sum(found) if SUMS in found else None):
        raise ValueError("its content differs from its checksum")
    values = {}
    for name, (is_valid, expected, default) in FIELDS.items():
        value = found.get(name, default)
        if value is MISSING:
            raise ValueError(f"{name} is missing")
        if not is_valid(value):
            raise ValueError(f"{name} is {_short(value)}, expected {expected}")
        values[name] = value
    sums = found.get(SUMS)
    if sums is not None and (not _are(str, sums) or sums.keys() != values["files"].keys()):
        raise ValueError(f"{SUMS} is {_short(sums)}, expected a text for each of its files")
    return Manifest(**values, checksums=sums)


def _own_sum(fields: Mapping[str, Any]) -> str:
    return checksum(json.dumps(fields, sort_keys=True).encode())


def _short(value: Any) -> str:
    text = json.dumps(value)
    return text if len(text) <= 60 else f"{text[:60]}..."


def _is_count(value: Any) -> bool:
    return type(value) is int and value >= 0


def _is_number(value: Any) -> bool:
    return type(value) in (int, float)


def _is_flag(value: Any) -> bool:
    return isinstance(value, bool)


def _are(kind: type, value: Any) -> bool:
    return isinstance(value, dict) and all(type(entry) is kind for entry in value.values())


def _is_loss_scale(value: Any) -> bool:
    return value is None or (isinstance(value, dict) and all(_is_number(value.get(name)) for name in LOSS_SCALE))


def _are_counts(length: int) -> Callable[[Any], bool]:
    return lambda value: isinstance(value, list) and len(value) == length and all(map(_is_count, value))


def _are_files(value: Any) -> bool:
    return bool(value) and _are(int, value) and all(map(_is_inside, value))


def _is_inside(name: str) -> bool:
    """Whether `name` is a path below the folder that it is joined to."""
    path = PurePosixPath(name)
    is_name = "\0" not in name and all(len(part) <= LONGEST_NAME for part in path.parts)
    return is_name and bool(path.parts) and not path.is_absolute() and ".." not in path.parts


_COUNT, _OBJECT = "a whole number from 0", "an object"
FIELDS: dict[str, tuple[Callable[[Any], bool], str, Any]] = {  # whether it is valid, what is, what is assumed
    "global_step": (_is_count, _COUNT, MISSING),
    "optimizer_steps": (_is_count, _COUNT, MISSING),
    "consumed_samples": (_is_count, _COUNT, MISSING),
    "loss_sum": (_is_number, "a number", MISSING),
    "world_size": (_is_count, _COUNT, MISSING),
    "weights_only": (_is_flag, "true or false", MISSING),
    "loss_scale": (_is_loss_scale, f"null, or an object with the numbers {', '.join(LOSS_SCALE)}", MISSING),
    "layout": (_are_counts(3), "three whole numbers", [1, 1, 1]),
    "order": (lambda value: isinstance(value, dict), _OBJECT, {}),
    "settings": (lambda value: isinstance(value, dict), _OBJECT, {}),
    "task": (lambda value: value is None or isinstance(value, str), "a text", None),
    "epoch_position": (lambda value: value is None or _are_counts(2)(value), "two whole numbers", None),
    "steps_without_loss": (_is_count, _COUNT, 0),
    "evaluation_is_due": (_is_flag, "true or false", False),
    "checkpoint_format": (lambda value: value in FORMATS, " or ".join(FORMATS), STOCK),
    "files": (_are_files, "sizes by paths inside the folder", MISSING),
}
