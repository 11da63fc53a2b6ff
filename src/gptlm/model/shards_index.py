"""The index of a sharded checkpoint, whose tensors lie in safetensors files of each process.

Each process writes the parts of the tensors that it holds, as they lie in its memory: one-dimensional tensors in
safetensors files. `shards.json` says where the parts belong:

    {"version": 1, "step": 500, "files": ["weights-00001-of-00002.safetensors", ...],
     "tensors": {"transformer.wte.weight": {"shape": [50304, 768], "dtype": "F32", "parts": [
         [0, "transformer.wte.weight", [0, 25152, 0, 768], [0, 19316736]], ...]}}}

A part is the number of its file, its name there, a box of the tensor (first row and end, first column and end), and
which elements of that box it holds, in row order. A tensor of other than two dimensions is a matrix whose rows are its
first dimension. The parts of a tensor fill it, and do not overlap.

Names and shapes are the network's; those of the optimizer's state are `parameter|kind`, as in
checkpoint/optimizer_state.py. This module does not import torch.
"""

import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

from gptlm.errors import GptlmError, reason_of
from gptlm.json_text import parse_json
from gptlm.model.files import SHARDS_INDEX, WEIGHTS, WEIGHTS_INDEX

VERSION = 1
STEP = "step"  # in the metadata of each file
LARGEST = 2**63 - 1  # elements of a tensor
LONGEST_NAME = 255  # of a file
DTYPES = {  # safetensors' names -> torch's
    "F64": "float64",
    "F32": "float32",
    "F16": "float16",
    "BF16": "bfloat16",
    "F8_E4M3": "float8_e4m3fn",
    "F8_E5M2": "float8_e5m2",
    "I64": "int64",
    "I32": "int32",
    "I16": "int16",
    "I8": "int8",
    "U8": "uint8",
    "BOOL": "bool",
}

Box = tuple[int, int, int, int]  # first row, end of the rows, first column, end of the columns


@dataclass(frozen=True)
class Part:
    """Elements `start` to `stop` of a box of a tensor: the tensor `key` in `file`."""

    file: str
    key: str
    box: Box
    start: int
    stop: int


@dataclass(frozen=True)
class Entry:
    """A tensor of the index; `dtype` is safetensors' name."""

    shape: tuple[int, ...]
    dtype: str
    parts: tuple[Part, ...]


@dataclass(frozen=True)
class Index:
    """What `shards.json` says."""

    step: int
    tensors: dict[str, Entry]

    @property
    def files(self) -> list[str]:
        """The names of all files with tensors."""
        return sorted({part.file for entry in self.tensors.values() for part in entry.parts})

    @property
    def weight_files(self) -> list[str]:
        """The names of the files with weights."""
        weights = (entry for name, entry in self.tensors.items() if is_weight(name))
        return sorted({part.file for entry in weights for part in entry.parts})


def is_weight(name: str) -> bool:
    """Whether `name` is that of a weight; those of the optimizer's state have a kind."""
    return "|" not in name


def is_sharded(folder: Path) -> bool:
    """Whether the weights in `folder` are those of a sharded checkpoint."""
    has_others = (folder / WEIGHTS).is_file() or (folder / WEIGHTS_INDEX).is_file()
    return not has_others and (folder / SHARDS_INDEX).is_file()


def matrix_of(shape: Sequence[int]) -> tuple[int, int]:
    """Rows and columns of a tensor of `shape`."""
    return (shape[0], prod(shape[1:])) if shape else (1, 1)


def whole_box(shape: Sequence[int]) -> Box:
    """The box of a whole tensor."""
    rows, columns = matrix_of(shape)
    return 0, rows, 0, columns


def size_of(box: Box) -> int:
    """Elements in `box`."""
    return (box[1] - box[0]) * (box[3] - box[2])


def rectangles(part: Part) -> Iterator[tuple[Box, int]]:
    """The boxes that a part fills, at most three, and the place of each one's first element in the part."""
    top, _, left, right = part.box
    width, place = right - left, part.start
    while place < part.stop:
        row, column = divmod(place, width)
        if column == 0 and part.stop - place >= width:
            rows = (part.stop - place) // width
            box = top + row, top + row + rows, left, right
        else:  # a row that begins or ends in another part
            box = top + row, top + row + 1, left + column, left + min(width, column + part.stop - place)
        yield box, place - part.start
        place += size_of(box)


def index_text(index: Index) -> str:
    """The text of `shards.json`."""
    files = index.files
    numbers = {name: number for number, name in enumerate(files)}
    tensors = {
        name: {
            "shape": entry.shape,
            "dtype": entry.dtype,
            "parts": [[numbers[part.file], part.key, part.box, (part.start, part.stop)] for part in entry.parts],
        }
        for name, entry in sorted(index.tensors.items())
    }
    return json.dumps({"version": VERSION, STEP: index.step, "files": files, "tensors": tensors}) + "\n"


def read_index(folder: Path) -> Index:
    """The index of the sharded checkpoint in `folder`.

    Raises:
        GptlmError: if it cannot be read, names files outside the folder, or the parts of a tensor leave gaps or
            overlap.
    """
    path = folder / SHARDS_INDEX
    try:
        return parse_index(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, LookupError, TypeError, AttributeError) as error:
        raise GptlmError(f"{path} is damaged: {reason_of(error)}; copy the folder again") from error


def parse_index(text: str) -> Index:
    """The index of that text. Raises ValueError, or what Python raises for a value of another type."""
    found = parse_json(text)
    if not isinstance(found, dict) or found.get("version") != VERSION:
        raise ValueError(f"it is no index of version {VERSION}")
    step, files = found[STEP], found["files"]
    if type(step) is not int or step < 0:
        raise ValueError(f"the step is {step!r:.40}")
    for name in files if isinstance(files, list) else [files]:
        is_name = isinstance(name, str) and name.endswith(".safetensors") and len(name) <= LONGEST_NAME
        if not is_name or Path(name).name != name or "\0" in name:
            raise ValueError(f"{name!r:.99} is no safetensors file of the folder")
    tensors = {name: _entry(name, entry, files) for name, entry in found["tensors"].items()}
    if not any(map(is_weight, tensors)):
        raise ValueError("it names no weights")
    return Index(step, tensors)


def _entry(name: str, entry: Any, files: list[str]) -> Entry:
    shape, dtype = entry["shape"], entry["dtype"]
    if dtype not in DTYPES:
        raise ValueError(f"the type of {name:.99} is {dtype!r:.40}")
    if not isinstance(shape, list) or not _are_counts(shape) or prod(shape) > LARGEST:
        raise ValueError(f"the shape of {name:.99} is {shape!r:.60}")
    parts = []
    for number, key, box, (start, stop) in entry["parts"]:
        if not _are_counts([number, *box, start, stop]) or len(box) != 4 or not isinstance(key, str):
            raise ValueError(f"a part of {name:.99} is {[number, key, box, start, stop]!r:.99}")
        part = Part(files[number], key, (box[0], box[1], box[2], box[3]), start, stop)
        rows, columns = matrix_of(shape)
        is_inside = box[0] < box[1] <= rows and box[2] < box[3] <= columns
        if not is_inside or not start < stop <= size_of(part.box):
            raise ValueError(f"a part of {name:.99} lies outside of its shape {shape}")
        parts.append(part)
    _check_filled(name, shape, parts)
    return Entry(tuple(shape), dtype, tuple(parts))


def _are_counts(values: Iterable[Any]) -> bool:
    return all(type(value) is int and value >= 0 for value in values)


def _check_filled(name: str, shape: Sequence[int], parts: list[Part]) -> None:
    """Raises ValueError if the parts of a tensor overlap or leave gaps."""
    boxes = sorted(box for part in parts for box, _ in rectangles(part))
    above: list[Box] = []  # those that reach the current row
    for box in boxes:
        above = [other for other in above if other[1] > box[0]]
        if any(other[2] < box[3] and box[2] < other[3] for other in above):
            raise ValueError(f"parts of {name:.99} overlap")
        above.append(box)
    missing = prod(shape) - sum(map(size_of, boxes))
    if missing:
        raise ValueError(f"{missing:,} elements of {name:.99} are in no file")
