"""Files of `torch.save`, without torch's own reader: both formats, tensors on the CPU.

The zip format (torch 1.6) has a pickle, `NAME/data.pkl`, and the bytes of each storage in `NAME/data/KEY`. The older
format is a sequence of pickles, then the keys of the storages and their bytes, each after its number of elements.
(torch/serialization.py.) A tensor's offset, size and stride have to lie inside its storage, a storage inside the file.
"""

import mmap
import struct
import zipfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from gptlm.errors import GptlmError
from gptlm.pickles.safe_pickle import NUMPY, PLAIN, Machine, Maker, StandIn, guarded, mapped, size_of

MAGIC, PROTOCOL = 0x1950A86A20F9469CFC6C, 1001  # of the older format
LOCAL_HEADER = 30  # bytes of a zip entry's own header, without name and extra field
DTYPES = ("float64", "float32", "float16", "bfloat16", "int64", "int32", "int16", "int8", "uint8", "bool")
STORAGES = {
    "DoubleStorage": torch.float64,
    "FloatStorage": torch.float32,
    "HalfStorage": torch.float16,
    "BFloat16Storage": torch.bfloat16,
    "LongStorage": torch.int64,
    "IntStorage": torch.int32,
    "ShortStorage": torch.int16,
    "CharStorage": torch.int8,
    "ByteStorage": torch.uint8,
    "BoolStorage": torch.bool,
    "UntypedStorage": torch.uint8,
}


@dataclass(frozen=True)
class Kind:
    """A class of storages: the type of their elements."""

    dtype: torch.dtype


@dataclass(frozen=True, eq=False)
class Storage:
    """The bytes of one or more tensors, `data` (n,) uint8, whose elements are of `dtype`."""

    data: np.ndarray
    dtype: torch.dtype

    def __len__(self) -> int:
        return self.data.nbytes // self.dtype.itemsize

    def __iter__(self) -> Iterator[Any]:
        return iter(self.tensor().tolist())

    def tensor(self) -> Tensor:
        """All elements, (n,)."""
        return torch.from_numpy(self.data).view(self.dtype) if len(self.data) else torch.empty(0, dtype=self.dtype)


def _tensor(storage: Any, offset: Any, size: Any, stride: Any, *more: Any) -> Tensor:
    """`_rebuild_tensor`, `_rebuild_tensor_v2`: a part of `storage` from element `offset` on. `more` is autograd's."""
    if type(storage) is not Storage:
        raise ValueError("a tensor without a storage")
    count, last = size_of(size), size_of((offset,))
    size_of(stride)
    if len(size) != len(stride):
        raise ValueError("a tensor whose size and stride have different lengths")
    last += sum((length - 1) * step for length, step in zip(size, stride, strict=True)) if count else 0
    if count > len(storage) or (last >= len(storage) if count else last > len(storage)):
        raise ValueError(f"a tensor of {count} elements that is not inside its storage of {len(storage)}")
    return storage.tensor().as_strided(size, stride, offset) if count else torch.empty(size, dtype=storage.dtype)


def _parameter(data: Any, *more: Any) -> Tensor:
    if type(data) is not Tensor:
        raise ValueError("a parameter without a tensor")
    return data


def _size(sizes: Any = ()) -> torch.Size:
    size_of(sizes)
    return torch.Size(sizes)


def _device(name: Any, index: Any = None) -> torch.device:
    if type(name) is not str or type(index) not in (int, type(None)):
        raise ValueError("a device without a name")
    return torch.device(name) if index is None else torch.device(name, index)


INERT: dict[tuple[str, str], Any] = {  # seen among arguments and buffers; kept as stand-ins
    ("_io", "BytesIO"): Maker(StandIn),
    ("pathlib", "PosixPath"): Maker(StandIn),
    ("pathlib._local", "PosixPath"): Maker(StandIn),
    ("signal", "Signals"): Maker(StandIn),
}
TORCH: dict[tuple[str, str], Any] = {
    ("torch._utils", "_rebuild_tensor"): Maker(_tensor),
    ("torch._utils", "_rebuild_tensor_v2"): Maker(_tensor),
    ("torch._utils", "_rebuild_parameter"): Maker(_parameter),
    ("torch", "Size"): Maker(_size),
    ("torch", "device"): Maker(_device),
    **{("torch", name): getattr(torch, name) for name in DTYPES},
    **{(module, n): Kind(d) for n, d in STORAGES.items() for module in ("torch", "torch.cuda", "torch.storage")},
}
NAMES = NUMPY | PLAIN | INERT | TORCH


def read_torch(path: Path) -> Any:
    """What `torch.save` wrote into `path`, tensors on the CPU; those of the zip format stay on disk until used.

    Raises:
        GptlmError: if the file is missing, damaged, or names anything but arrays, tensors and plain values.
    """
    return guarded(path, lambda: _read_zip(path) if zipfile.is_zipfile(path) else _read_old(path))


def _pickle(path: Path, file: Any, storage: Callable[[str, torch.dtype, int], Storage]) -> Any:
    """One pickle of `file`; `storage` makes a storage of its key, the type and the number of its elements."""

    def persistent(saved: Any) -> Storage:
        if type(saved) is not tuple or len(saved) not in (5, 6) or saved[0] not in ("storage", b"storage"):
            raise ValueError("an object outside the pickle that is no storage")
        kind, key, _, count, *view = saved[1:]
        if type(kind) is not Kind or type(key) is not str or view not in ([], [None]):
            raise ValueError("a storage without type and key, or a view of one")
        return storage(key, kind.dtype, size_of((count,)))

    return Machine(path, file, NAMES, "utf-8", persistent).load()


def _read_zip(path: Path) -> Any:
    content = mapped(path)
    everything = np.frombuffer(content, np.uint8)
    with zipfile.ZipFile(path) as archive:
        entries = archive.infolist()
    if any(entry.filename.rpartition("/")[2] == "constants.pkl" for entry in entries):
        raise GptlmError(f"{path} is refused: it is a TorchScript program, not weights; save its state_dict instead")
    records = _records(entries, content)
    pickles = [name for name in records if name.rpartition("/")[2] == "data.pkl"]
    if len(pickles) != 1:
        raise ValueError("its zip has no data.pkl, or several")
    folder = pickles[0].removesuffix("data.pkl")
    order = records.get(f"{folder}byteorder")
    if order is not None and content[order] != b"little":
        raise GptlmError(f"{path} was written on a big-endian machine; save it again on another one")

    def storage(key: str, dtype: torch.dtype, count: int) -> Storage:
        data = everything[records[f"{folder}data/{key}"]]
        if count * dtype.itemsize > len(data):
            raise ValueError(f"a storage of {count} elements in {len(data)} bytes")
        data = data[: count * dtype.itemsize]
        return Storage(data if data.ctypes.data % dtype.itemsize == 0 else data.copy(), dtype)

    content.seek(records[pickles[0]].start)
    return _pickle(path, content, storage)


def _records(entries: list[zipfile.ZipInfo], content: mmap.mmap) -> dict[str, slice]:
    """Where the bytes of each file in the zip are."""
    found = {}
    for entry in entries:
        if entry.compress_type != zipfile.ZIP_STORED or entry.flag_bits & 1:
            raise ValueError(f"{entry.filename} in its zip is compressed or encrypted, which torch does not write")
        header = content[entry.header_offset : entry.header_offset + LOCAL_HEADER]
        start = entry.header_offset + LOCAL_HEADER + sum(struct.unpack("<HH", header[26:30]))
        if header[:4] != b"PK\3\4" or start + entry.file_size > len(content):
            raise ValueError(f"its zip is not whole: {entry.filename}")
        found[entry.filename] = slice(start, start + entry.file_size)
    return found


def _read_old(path: Path) -> Any:
    content = mapped(path)
    everything = np.frombuffer(content, np.uint8)
    storages: dict[str, Storage] = {}
    planned = 0

    def storage(key: str, dtype: torch.dtype, count: int) -> Storage:
        nonlocal planned
        if key not in storages:
            planned += count * dtype.itemsize
            if planned > len(everything):
                raise ValueError(f"storages of {planned} bytes in a file of {len(everything)}")
            storages[key] = Storage(np.empty(count * dtype.itemsize, np.uint8), dtype)
        made = storages[key]
        if made.dtype != dtype or len(made) != count:
            raise ValueError("a storage with two sizes")
        return made

    magic, protocol, _ = (_pickle(path, content, storage) for _ in range(3))
    if type(magic) is not int or magic != MAGIC or type(protocol) is not int or protocol != PROTOCOL:
        raise ValueError("it is not a file of torch.save")
    made = _pickle(path, content, storage)
    keys = _pickle(path, content, storage)
    if type(keys) is not list or any(type(key) is not str for key in keys) or len(keys) != len(set(keys)):
        raise ValueError("no list of storages")
    if set(keys) != storages.keys():
        raise ValueError("storages without content")
    for key in keys:  # as the file has them
        data = storages[key].data
        start = content.tell() + 8
        if struct.unpack("<q", content.read(8))[0] != len(storages[key]) or start + len(data) > len(everything):
            raise ValueError("a storage whose content is cut off")
        data[:] = everything[start : start + len(data)]
        content.seek(start + len(data))
    return made
