"""Write safetensors files whose tensors come one at a time; safetensors' own writer takes all of them together."""

import json
import os
from collections.abc import Iterable, Mapping, Sequence
from io import FileIO
from math import prod
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from gptlm.checksums import Checksum
from gptlm.model.safetensors_io import SHARD_BYTES, write_weights_index
from gptlm.model.shards_index import DTYPES

NAMES = {getattr(torch, name): short for short, name in DTYPES.items()}  # torch's dtype -> safetensors' name
Kind = tuple[Sequence[int], torch.dtype]  # shape and dtype of a tensor


def header_of(kinds: Mapping[str, Kind], metadata: Mapping[str, str]) -> tuple[bytes, dict[str, int]]:
    """The bytes before the first tensor of a file, and the place of each tensor in it, in order of the elements' size.

    So each begins at a multiple of its elements' size.
    """
    header: dict[str, Any] = {"__metadata__": dict(metadata)}
    end, begins = 0, dict[str, int]()
    for name, (shape, dtype) in sorted(kinds.items(), key=lambda item: -item[1][1].itemsize):
        begins[name], end = end, end + prod(shape) * dtype.itemsize
        header[name] = {"dtype": NAMES[dtype], "shape": list(shape), "data_offsets": [begins[name], end]}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    start = len(text).to_bytes(8, "little") + text
    return start, {name: len(start) + begin for name, begin in begins.items()}


def write_file(path: Path, tensors: Mapping[str, tuple[Tensor, torch.dtype]], metadata: Mapping[str, str]) -> str:
    """Write tensors into a new file, one in host memory at a time, and sync it to disk.

    Args:
        tensors: name -> (tensor on any device, dtype in the file).

    Returns:
        the checksum of the file.

    Raises:
        OSError: if it cannot be written.
    """
    start, places = header_of({name: (tensor.shape, dtype) for name, (tensor, dtype) in tensors.items()}, metadata)
    digest = Checksum()
    with open(path, "xb", buffering=0) as file:
        digest.update(start)
        _write(file, memoryview(start))
        for name in places:
            tensor, dtype = tensors[name]
            data = _bytes_of(tensor, dtype)
            digest.update(data)
            _write(file, data)
        os.fsync(file.fileno())
    return digest.hexdigest()


def save_model_one_by_one(folder: Path, kinds: Mapping[str, Kind], tensors: Iterable[tuple[str, Tensor]]) -> None:
    """Write a model's weights as `save_model_weights` does, with one of them in memory.

    Args:
        kinds: of all weights, in the order of the files.
        tensors: these weights in any order.

    Raises:
        OSError: if a file cannot be written.
        RuntimeError: if a weight is missing, unknown or of another shape.
    """
    files: list[dict[str, Kind]] = [{}]
    size = 0
    for name, (shape, dtype) in kinds.items():
        own = prod(shape) * dtype.itemsize
        if files[-1] and size + own > SHARD_BYTES:
            files.append({})
            size = 0
        files[-1][name], size = (shape, dtype), size + own
    places: dict[str, tuple[Path, int]] = {}
    shards = [{name: prod(shape) * dtype.itemsize for name, (shape, dtype) in part.items()} for part in files]
    for file_name, part in zip(write_weights_index(folder, shards), files, strict=True):
        path = folder / file_name
        start, begins = header_of(part, {"format": "pt"})
        path.write_bytes(start)
        places |= {name: (path, begin) for name, begin in begins.items()}
    missing = set(kinds)
    for name, tensor in tensors:
        if name not in missing or tuple(tensor.shape) != tuple(kinds[name][0]):
            raise RuntimeError(f"the weight {name} {list(tensor.shape)} is not one of the model, or comes twice")
        missing.remove(name)
        path, begin = places[name]
        with open(path, "r+b", buffering=0) as file:
            file.seek(begin)
            _write(file, _bytes_of(tensor, kinds[name][1]))
    if missing:
        raise RuntimeError(f"{len(missing)} weights of the model are missing (first: {min(missing)})")


def _bytes_of(tensor: Tensor, dtype: torch.dtype) -> memoryview:
    return tensor.detach().to("cpu", dtype).contiguous().reshape(-1).view(torch.uint8).numpy().data


def _write(file: FileIO, data: memoryview) -> None:
    while data:
        data = data[file.write(data) :]
