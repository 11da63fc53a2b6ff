"""Read the tensors of a sharded checkpoint (shards_index.py), one part in memory at a time."""

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import torch
from torch import Tensor

from gptlm.errors import GptlmError
from gptlm.model.files import CONV1D_WEIGHTS, SHARDS_INDEX
from gptlm.model.safetensors_io import Header, LazyTensors, read_header
from gptlm.model.shards_index import (
    DTYPES,
    STEP,
    Box,
    Entry,
    Part,
    is_sharded,
    is_weight,
    read_index,
    rectangles,
    size_of,
    whole_box,
)


class ShardedTensors(Mapping[str, Tensor]):
    """The tensors of a sharded checkpoint by name, whole or parts of them; each is read when it is looked up.

    Files are not mapped: tensors are the process's own memory, and nothing else is counted as its memory.

    Raises:
        GptlmError: if the index is damaged; later, if a file is missing, damaged or of another checkpoint.
    """

    def __init__(self, folder: Path):
        self.folder, self.index = folder, read_index(folder)
        self._headers: dict[str, Header] = {}

    def __getitem__(self, name: str) -> Tensor:
        shape = self.index.tensors[name].shape
        return self.box(name, whole_box(shape)).view(shape)

    def box(self, name: str, box: Box) -> Tensor:
        """The elements of `name` in `box`, a matrix; no others stay in memory."""
        return self.elements(name, [box], 0, size_of(box)).view(box[1] - box[0], box[3] - box[2])

    def elements(self, name: str, boxes: Sequence[Box], start: int, stop: int) -> Tensor:
        """Elements `start` to `stop` of `boxes` of `name`, which lie one after the other, in row order; a vector."""
        entry, pieces, first = self.index.tensors[name], list[tuple[Box, int]](), 0
        for box in boxes:
            begin, end = max(start, first), min(stop, first + size_of(box))
            if begin < end:
                inside = rectangles(Part("", "", box, begin - first, end - first))
                pieces += [(rectangle, begin - start + place) for rectangle, place in inside]
            first += size_of(box)
        wanted = [(piece, place, self._parts_in(entry, piece)) for piece, place in pieces]  # before memory is allocated
        found = torch.empty(stop - start, dtype=getattr(torch, DTYPES[entry.dtype]))
        for piece, place, parts in wanted:
            matrix = found[place : place + size_of(piece)].view(piece[1] - piece[0], piece[3] - piece[2])
            for part, own, position in parts:
                self._read(part, own, position, piece, matrix)
        return found

    def _parts_in(self, entry: Entry, box: Box) -> list[tuple[Part, Box, int]]:
        """The parts with elements of `box`: each with a box that it fills, and where that begins in the part."""
        top, bottom, left, right = box
        found = [
            (part, own, place)
            for part in entry.parts
            for own, place in rectangles(part)
            if own[0] < bottom and top < own[1] and own[2] < right and left < own[3]
        ]
        for part, _, _ in found:
            self._check(entry, part)
        return found

    def _read(self, part: Part, own: Box, position: int, box: Box, matrix: Tensor) -> None:
        """Read what the rectangle `own` of `part` has of `box` into `matrix`, the values of `box`."""
        top, bottom, left, right = box
        rows, columns = max(own[0], top), max(own[2], left)
        end, last = min(own[1], bottom), min(own[3], right)
        width = own[3] - own[2]
        target = matrix[rows - top : end - top, columns - left : last - left]
        is_direct = last - columns == width and target.is_contiguous()
        lines = target if is_direct else torch.empty(end - rows, width, dtype=matrix.dtype)
        path, stored = self.folder / part.file, self._opened(part.file).tensors[part.key]
        _read_into(path, stored.start + (position + (rows - own[0]) * width) * matrix.itemsize, lines)
        if not is_direct:
            target.copy_(lines[:, columns - own[2] : last - own[2]])

    def check(self) -> None:
        """Raises GptlmError if a file is missing or damaged, or does not hold the parts that the index names."""
        for entry in self.index.tensors.values():
            for part in entry.parts:
                self._check(entry, part)

    def _check(self, entry: Entry, part: Part) -> None:
        path, stored = self.folder / part.file, self._opened(part.file).tensors.get(part.key)
        if stored is None:
            raise GptlmError(f"{path} lacks {part.key:.99}, which {SHARDS_INDEX} names; copy the folder again")
        if stored.shape != [part.stop - part.start] or stored.dtype != entry.dtype:
            raise GptlmError(
                f"{path}: {part.key:.99} is {stored.dtype:.20} {stored.shape!s:.60}, {SHARDS_INDEX} says "
                f"{entry.dtype} [{part.stop - part.start}]; copy the folder again"
            )
        if stored.stop - stored.start != (part.stop - part.start) * getattr(torch, DTYPES[entry.dtype]).itemsize:
            raise GptlmError(
                f"{path} is damaged: {part.key:.99} has {stored.stop - stored.start:,} bytes; copy the folder again"
            )

    def _opened(self, name: str) -> Header:
        if name not in self._headers:
            path = self.folder / name
            header = read_header(path)
            step = header.metadata.get(STEP)
            if step != str(self.index.step):
                raise GptlmError(
                    f"{path} is of step {step!s:.40}, {SHARDS_INDEX} of step {self.index.step}: they are not of one "
                    "checkpoint; copy the folder again"
                )
            self._headers[name] = header
        return self._headers[name]

    def __contains__(self, name: object) -> bool:
        return name in self.index.tensors  # Mapping's own would read the tensor

    def __iter__(self) -> Iterator[str]:
        return iter(self.index.tensors)

    def __len__(self) -> int:
        return len(self.index.tensors)


def _read_into(path: Path, start: int, tensor: Tensor) -> None:
    """Fill a contiguous `tensor` with the bytes of `path` from `start` on.

    Raises:
        GptlmError: if they cannot be read, or the file has become shorter.
    """
    rest = tensor.reshape(-1).view(torch.uint8).numpy().data
    try:
        with open(path, "rb", buffering=0) as file:  # opened anew: there may be more files than a process can hold open
            file.seek(start)
            while rest:
                size = file.readinto(rest)
                if not size:
                    raise GptlmError(f"{path} has become shorter while it was read; copy the folder again")
                rest = rest[size:]
    except OSError as error:
        raise GptlmError(f"cannot read {path}: {error.strerror}; copy the folder again") from error


class StockWeights(Mapping[str, Tensor]):
    """The weights of a sharded checkpoint in the tensor layout of stock GPT-2, as `LazyTensors` of a model folder."""

    def __init__(self, folder: Path):
        self.tensors = ShardedTensors(folder)
        self._names = [name for name in self.tensors if is_weight(name)]

    def __getitem__(self, name: str) -> Tensor:
        tensor = self.tensors[name]
        return tensor.t() if name.endswith(CONV1D_WEIGHTS) and tensor.ndim == 2 else tensor

    def shape(self, name: str) -> tuple[int, ...]:
        """The shape of a weight in the network, (out, in) for a matrix."""
        return self.tensors.index.tensors[name].shape

    def __contains__(self, name: object) -> bool:
        return isinstance(name, str) and is_weight(name) and name in self.tensors

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)


def model_tensors(folder: Path) -> Mapping[str, Tensor]:
    """The weights of the model in `folder` by name, in the tensor layout of stock GPT-2, whatever their format."""
    return StockWeights(folder) if is_sharded(folder) else LazyTensors.of_model(folder)
