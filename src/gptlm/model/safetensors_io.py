"""Read and write safetensors files, one tensor in memory at a time.

File format (https://huggingface.co/docs/safetensors): 8 bytes with the length of the header, the header in JSON, then
the tensors. Nothing here imports torch before tensors are read or written: the command line checks files, too.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from safetensors import SafetensorError, safe_open

from gptlm.disk import apply_umask
from gptlm.errors import GptlmError, reason_of
from gptlm.json_text import parse_json
from gptlm.model.files import WEIGHTS, WEIGHTS_INDEX
from gptlm.model.shards_index import is_sharded, read_index

if TYPE_CHECKING:
    from torch import Tensor

SHARD_BYTES = 1 << 30  # of a model's files


@dataclass(frozen=True)
class StoredTensor:
    """A tensor in a file: its bytes from `start` to `stop`; `dtype` is safetensors' name."""

    dtype: str
    shape: list[int]
    start: int
    stop: int


@dataclass(frozen=True)
class Header:
    """What the header of a safetensors file says."""

    tensors: dict[str, StoredTensor]
    metadata: dict[str, str]


def weight_files(folder: Path) -> list[Path]:
    """The safetensors files of the model in `folder`; empty if its weights have another format.

    Raises:
        GptlmError: if the index is damaged.
    """
    index = folder / WEIGHTS_INDEX
    if (folder / WEIGHTS).is_file():
        return [folder / WEIGHTS]
    if not index.is_file():
        return [folder / name for name in read_index(folder).weight_files] if is_sharded(folder) else []
    try:
        names = set(parse_json(index.read_text(encoding="utf-8"))["weight_map"].values())
        if other := [name for name in names if not name or Path(name).name != name]:
            raise ValueError(f"{other[0]!r:.99} is no file of the folder")
        return [folder / name for name in sorted(names)]
    except (OSError, ValueError, LookupError, TypeError, AttributeError) as error:
        raise GptlmError(f"{index} is damaged ({error!r}); copy the folder again") from error


def check_weights(folder: Path) -> None:
    """Raises GptlmError, which names the file, if a safetensors file of the model in `folder` is missing or damaged."""
    for path in weight_files(folder):
        tensor_shapes(path)


def tensor_shapes(path: Path) -> dict[str, list[int]]:
    """The shapes of the tensors in `path` by name. Raises GptlmError as `read_header`."""
    return {name: tensor.shape for name, tensor in read_header(path).tensors.items()}


def read_header(path: Path) -> Header:
    """The header of the safetensors file `path`.

    Raises:
        GptlmError: if the file cannot be read, or does not have the size that its header gives.
    """
    if path.exists() and not path.is_file() and not path.is_dir():
        raise GptlmError(f"cannot read {path}: it is a pipe, a device or a socket, not a file")  # would wait forever
    try:
        with path.open("rb") as file:
            length = struct.unpack("<Q", file.read(8))[0]
            size = path.stat().st_size
            header = parse_json(file.read(length)) if length < size else {}
        metadata = dict(header.pop("__metadata__", None) or {})
        tensors = {name: _stored(entry, 8 + length) for name, entry in header.items()}
        expected = max((tensor.stop for tensor in tensors.values()), default=8 + length)
    except OSError as error:
        raise GptlmError(f"cannot read {path}: {error.strerror}; copy or download it again") from error
    except (ValueError, LookupError, TypeError, AttributeError, struct.error) as error:
        raise GptlmError(
            f"{path} is damaged: its header is not a list of tensors; copy or download it again"
        ) from error
    if size != expected:
        raise GptlmError(
            f"{path} is damaged: it has {size:,} bytes, its header says {expected:,}; copy or download it again"
        )
    return Header(tensors, metadata)


def _stored(entry: dict[str, Any], first: int) -> StoredTensor:
    """An entry of a header; `first` is the first byte after the header."""
    start, stop = entry["data_offsets"]
    if type(start) is not int or type(stop) is not int or not 0 <= start <= stop:
        raise ValueError(f"the bytes of a tensor are {start!r} to {stop!r}")
    return StoredTensor(str(entry["dtype"]), list(entry["shape"]), first + start, first + stop)


class LazyTensors(Mapping[str, "Tensor"]):
    """The tensors of safetensors files by name; each is read when it is looked up.

    A tensor is a view of its mapped file. The file is opened for it, so that its pages are freed with it.

    Raises:
        GptlmError: if a file is missing, truncated or damaged.
    """

    def __init__(self, paths: Iterable[Path]):
        self._files: dict[str, Path] = {}
        for path in paths:
            tensor_shapes(path)  # safe_open does not name the file in its errors
            with self._opened(path) as file:
                self._files.update(dict.fromkeys(file.keys(), path))

    @staticmethod
    def _opened(path: Path) -> Any:
        try:
            return safe_open(path, "pt")
        except (OSError, SafetensorError) as error:
            raise GptlmError(f"{path} cannot be read: {reason_of(error)}; copy or download it again") from error

    @classmethod
    def of_model(cls, folder: Path) -> LazyTensors:
        """The weights of the model in `folder`, in one file or in the shards of its index."""
        return cls(weight_files(folder) or [folder / WEIGHTS])

    def __getitem__(self, name: str) -> Tensor:
        with self._opened(self._files[name]) as file:
            return file.get_tensor(name)

    def part(self, name: str) -> Any:
        """The tensor as safetensors' slice object: `part(name)[:10]` reads 10 rows only."""
        return self._opened(self._files[name]).get_slice(name)

    def __contains__(self, name: object) -> bool:
        return name in self._files  # Mapping's own would read the tensor

    def __iter__(self) -> Iterator[str]:
        return iter(self._files)

    def __len__(self) -> int:
        return len(self._files)


def save_tensors(path: Path, tensors: Mapping[str, Tensor], metadata: dict[str, str] | None = None) -> None:
    """Write `tensors` into one file, with the permissions of any new file there."""
    from safetensors.torch import save_file

    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, path, metadata)
    apply_umask(path)


def save_shards(
    folder: Path,
    tensors: Iterable[tuple[str, Tensor]],
    file_name: str,
    max_bytes: int,
    metadata: dict[str, str] | None = None,
) -> list[dict[str, int]]:
    """Write `tensors` as they come into files of at most `max_bytes`, or of one tensor that is larger.

    `huggingface_hub.save_torch_state_dict` needs all tensors together; here one file's tensors are in memory.

    Args:
        file_name: format string with the number of the file, which starts at 1.

    Returns:
        For each file the bytes of its tensors by name.
    """
    shards: list[dict[str, int]] = []
    pending: dict[str, Tensor] = {}
    sizes: dict[str, int] = {}

    def save_pending() -> None:
        nonlocal pending, sizes
        shards.append(sizes)
        save_tensors(folder / file_name.format(len(shards)), pending, metadata)
        pending, sizes = {}, {}

    for name, tensor in tensors:
        if pending and sum(sizes.values()) + tensor.nbytes > max_bytes:
            save_pending()
        pending[name], sizes[name] = tensor, tensor.nbytes
    if pending:
        save_pending()
    return shards


def write_weights_index(folder: Path, shards: Sequence[Mapping[str, int]]) -> list[str]:
    """Write the index of a model's files, if there are several; returns their names.

    Args:
        shards: for each file the bytes of its tensors by name.
    """
    if len(shards) < 2:
        return [WEIGHTS] * len(shards)
    names = [f"model-{number:05d}-of-{len(shards):05d}.safetensors" for number in range(1, len(shards) + 1)]
    places = {tensor: name for name, sizes in zip(names, shards, strict=True) for tensor in sizes}
    index = {"metadata": {"total_size": sum(sum(sizes.values()) for sizes in shards)}, "weight_map": places}
    (folder / WEIGHTS_INDEX).write_text(json.dumps(index, indent=1) + "\n", encoding="utf-8")
    return names


def save_model_weights(folder: Path, weights: Iterable[tuple[str, Tensor]], *, library: str = "pt") -> None:
    """Write a model's weights as `save_pretrained` does: one file, or shards of `SHARD_BYTES` with an index.

    Args:
        library: "format" in the files' metadata, which transformers requires ("pt": torch, "np": numpy).
    """
    shards = save_shards(folder, weights, ".shard-{}", SHARD_BYTES, {"format": library})
    for number, name in enumerate(write_weights_index(folder, shards), start=1):
        (folder / f".shard-{number}").rename(folder / name)
