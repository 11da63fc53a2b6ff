"""Read and write the tensors of a sharded checkpoint (shards_index.py), one part in memory at a time."""

import json
import os
from collections.abc import Iterator, Mapping, Sequence
from io import FileIO
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from gptlm.checksums import Checksum
from gptlm.errors import GptlmError
from gptlm.model.files import CONV1D_WEIGHTS, SHARDS_INDEX
from gptlm.model.safetensors_io import LazyTensors, read_header
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
    whole_box,
)

NAMES = {getattr(torch, name): short for short, name in DTYPES.items()}  # torch's dtype -> safetensors' name


class ShardedTensors(Mapping[str, Tensor]):
    """The tensors of a sharded checkpoint by name, whole or a box of them; each is read when it is looked up.

    Raises:
        GptlmError: if the index is damaged; later, if a file is missing, damaged or of another checkpoint.
    """

    def __init__(self, folder: Path):
        self.folder, self.index = folder, read_index(folder)
        self._files: dict[str, LazyTensors] = {}

    def __getitem__(self, name: str) -> Tensor:
        shape = self.index.tensors[name].shape
        return self.box(name, whole_box(shape)).view(shape)

    def box(self, name: str, box: Box) -> Tensor:
        """The elements of `name` in `box`, a matrix; no other elements are read."""
        entry = self.index.tensors[name]
        top, bottom, left, right = box
        wanted = [
            (part, own, place)
            for part in entry.parts
            for own, place in rectangles(part)
            if own[0] < bottom and top < own[1] and own[2] < right and left < own[3]
        ]
        for part, _, _ in wanted:  # before memory is allocated for what the index says
            self._check(entry, part)
        found = torch.empty(bottom - top, right - left, dtype=getattr(torch, DTYPES[entry.dtype]))
        for part, own, place in wanted:
            rows, columns = max(own[0], top), max(own[2], left)
            end, last = min(own[1], bottom), min(own[3], right)
            width = own[3] - own[2]
            first = place + (rows - own[0]) * width
            values = self._opened(part.file).part(part.key)[first : first + (end - rows) * width]
            lines = values.view(end - rows, width)
            found[rows - top : end - top, columns - left : last - left] = lines[:, columns - own[2] : last - own[2]]
        return found

    def check(self) -> None:
        """Raises GptlmError if a file is missing or damaged, or does not hold the parts that the index names."""
        for entry in self.index.tensors.values():
            for part in entry.parts:
                self._check(entry, part)

    def _check(self, entry: Entry, part: Part) -> None:
        file, path = self._opened(part.file), self.folder / part.file
        if part.key not in file:
            raise GptlmError(f"{path} lacks {part.key:.99}, which {SHARDS_INDEX} names; copy the folder again")
        found = file.part(part.key)
        if found.get_shape() != [part.stop - part.start] or found.get_dtype() != entry.dtype:
            raise GptlmError(
                f"{path}: {part.key:.99} is {found.get_dtype()} {found.get_shape()}, {SHARDS_INDEX} says "
                f"{entry.dtype} [{part.stop - part.start}]; copy the folder again"
            )

    def _opened(self, name: str) -> LazyTensors:
        if name not in self._files:
            path = self.folder / name
            step = read_header(path)[1].get(STEP)
            if step != str(self.index.step):
                raise GptlmError(
                    f"{path} is of step {step!s:.40}, {SHARDS_INDEX} of step {self.index.step}: they are not of one "
                    "checkpoint; copy the folder again"
                )
            self._files[name] = LazyTensors([path])
        return self._files[name]

    def __contains__(self, name: object) -> bool:
        return name in self.index.tensors  # Mapping's own would read the tensor

    def __iter__(self) -> Iterator[str]:
        return iter(self.index.tensors)

    def __len__(self) -> int:
        return len(self.index.tensors)


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


def write_file(path: Path, tensors: Sequence[tuple[str, Tensor, torch.dtype]], step: int) -> str:
    """Write one-dimensional tensors into a new safetensors file, one in host memory at a time, and sync it to disk.

    safetensors' own writer needs all of them in host memory.

    Args:
        tensors: (name, tensor on any device, dtype in the file).

    Returns:
        the checksum of the file.

    Raises:
        OSError: if it cannot be written.
    """
    tensors = sorted(tensors, key=lambda one: -one[2].itemsize)  # each begins at a multiple of its elements' size
    header: dict[str, Any] = {"__metadata__": {"format": "pt", STEP: str(step)}}
    end = 0
    for name, tensor, dtype in tensors:
        begin, end = end, end + tensor.numel() * dtype.itemsize
        header[name] = {"dtype": NAMES[dtype], "shape": list(tensor.shape), "data_offsets": [begin, end]}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    digest = Checksum()
    with open(path, "xb", buffering=0) as file:
        for data in (len(text).to_bytes(8, "little"), text):
            _write(file, digest, memoryview(data))
        for _, tensor, dtype in tensors:
            values = tensor.detach().to("cpu", dtype).contiguous().view(torch.uint8).numpy()
            _write(file, digest, values.data)
        os.fsync(file.fileno())
    return digest.hexdigest()


def _write(file: FileIO, digest: Any, data: memoryview) -> None:
    digest.update(data)
    while data:
        data = data[file.write(data) :]
