"""The tensors in one file of PaddleNLP or FleetX, by its own names."""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from gptlm.conversion.paddle import names as words
from gptlm.conversion.safe_pickle import read_pickle
from gptlm.errors import GptlmError
from gptlm.model.safetensors_io import LazyTensors


class PaddleTensors(LazyTensors):
    """The tensors of safetensors files that PaddleNLP wrote."""

    def __getitem__(self, name: str) -> Tensor:
        tensor = super().__getitem__(name)
        return tensor.view(torch.bfloat16) if tensor.dtype == torch.uint16 else tensor  # paddle's bits of bfloat16


class Renamed(Mapping[str, Tensor]):
    """`tensors` by other names; `names` maps those to theirs."""

    def __init__(self, tensors: Mapping[str, Tensor], names: Mapping[str, str]):
        self._tensors, self._names = tensors, names

    def __getitem__(self, name: str) -> Tensor:
        return self._tensors[self._names[name]]

    def __contains__(self, name: object) -> bool:
        return name in self._names  # without reading it

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)


def tensors_of(path: Path) -> Mapping[str, Tensor]:
    """The tensors in a `.pdparams` or safetensors file, by its own names.

    Raises:
        GptlmError: if it cannot be read or holds anything else.
    """
    if path.suffix == ".safetensors":
        return PaddleTensors([path])
    content = read_pickle(path)
    if not isinstance(content, dict):
        raise GptlmError(f"{path} holds no weights (a {type(content).__name__})")
    whole = _joined(content, path)
    return {name: as_tensor(value, name, path) for name, value in whole.items()}


def as_tensor(value: Any, name: str, path: Path) -> Tensor:
    """An array, or paddle's (internal name, array), as a tensor; uint16 are the bits of bfloat16."""
    array = value[1] if isinstance(value, tuple) and len(value) == 2 else value
    if not isinstance(array, np.ndarray) or array.dtype.kind not in "fiu":
        raise GptlmError(f"{path}: {name} is no array of numbers (a {type(array).__name__})")
    array = np.require(array, requirements=["C", "W"])
    if array.dtype == np.uint16:
        return torch.from_numpy(array.view(np.int16)).view(torch.bfloat16)
    return torch.from_numpy(array)


def _joined(content: Mapping[str, Any], path: Path) -> dict[str, Any]:
    """Without the table of names; arrays over 1 GiB, which pickle protocols 2 and 3 get in pieces, are put together."""
    arrays = {name: value for name, value in content.items() if name not in (words.NAME_TABLE, words.BIG)}
    for name, facts in content.get(words.BIG, {}).items():
        missing = [piece for piece in facts["slices"] if piece not in arrays]
        if missing:
            raise GptlmError(f"{path} lacks {missing[0]}, a piece of {name}; copy it again")
        pieces = [np.ravel(arrays.pop(piece)) for piece in facts["slices"]]
        arrays[name] = np.concatenate(pieces).reshape(facts["OriginShape"])
    return arrays
