"""Pickled weights read without running anything: arrays, tensors and plain values, and nothing else.

A pickle may name any Python function and have it called. Here a name is looked up in a short list; one that is not on
it is refused with its name and file. Objects of training packages (arguments, enums, loss scalers) become inert
stand-ins whatever their class does.
"""

import collections
import pickle
import zipfile
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import FunctionType, SimpleNamespace
from typing import Any

import numpy as np
import torch

from gptlm.errors import GptlmError, reason_of
from gptlm.upstream.torch import tensor_builders

STAND_INS = ("megatron", "deepspeed", "fp16", "apex")  # packages whose objects are kept as stand-ins


class Arguments:
    """`argparse.Namespace` of a checkpoint: its attributes, no behaviour."""


class StandIn:
    """An object of a package of `STAND_INS`: `arguments` it was made of, and its `state`."""

    arguments: tuple[Any, ...]
    state: Any = None

    def __new__(cls, *arguments: Any, **more: Any) -> "StandIn":
        made = super().__new__(cls)
        made.arguments = arguments
        return made

    def __init__(self, *arguments: Any, **more: Any):
        pass

    def __setstate__(self, state: Any) -> None:
        self.state = state


def _array(kind: type, shape: tuple[int, ...], code: Any) -> np.ndarray:
    """numpy's `_reconstruct`: an empty array whose content follows."""
    return np.ndarray(shape, np.int8)


def _scalar(dtype: np.dtype, content: Any = b"") -> Any:
    if dtype.hasobject:
        raise ValueError("a scalar of objects")
    return np.frombuffer(content, dtype)[0]


def _encode(text: str, encoding: str = "latin1") -> bytes:
    """Bytes as Python 3 writes them with pickle protocol 2."""
    if encoding not in ("latin1", "latin-1"):
        raise ValueError(f"bytes as {encoding}")
    return text.encode("latin1")


def _frombuffer(content: Any, dtype: np.dtype, shape: tuple[int, ...], order: str) -> np.ndarray:
    """numpy's way with pickle protocol 5."""
    return np.frombuffer(content, dtype).reshape(shape, order="F" if order == "F" else "C")


def _bare(kind: type, base: type, state: Any) -> Any:
    """`copyreg._reconstructor` for stand-ins."""
    if not (isinstance(kind, type) and issubclass(kind, (StandIn, Arguments))):
        raise ValueError(f"an object of {kind}")
    return kind()


NUMPY: dict[tuple[str, str], Any] = {
    ("numpy", "ndarray"): np.ndarray,
    ("numpy", "dtype"): np.dtype,
    ("_codecs", "encode"): _encode,
    **{(f"numpy.{core}.multiarray", "_reconstruct"): _array for core in ("core", "_core")},
    **{(f"numpy.{core}.multiarray", "scalar"): _scalar for core in ("core", "_core")},
    **{(f"numpy.{core}.numeric", "_frombuffer"): _frombuffer for core in ("core", "_core")},
}
PLAIN: dict[tuple[str, str], Any] = {
    ("collections", "OrderedDict"): collections.OrderedDict,
    ("builtins", "tuple"): tuple,
    ("builtins", "set"): set,
    ("builtins", "object"): object,
    ("argparse", "Namespace"): Arguments,
    ("copyreg", "_reconstructor"): _bare,
}
INERT: dict[tuple[str, str], Any] = {  # seen among arguments and buffers; kept as stand-ins
    ("_io", "BytesIO"): StandIn,
    ("pathlib", "PosixPath"): StandIn,
    ("signal", "Signals"): StandIn,
}
DTYPES = ("float64", "float32", "float16", "bfloat16", "int64", "int32", "int16", "int8", "uint8", "bool")
TORCH: dict[tuple[str, str], Any] = {
    **{("torch._utils", name): function for name, function in tensor_builders().items()},
    ("torch", "Size"): torch.Size,
    ("torch", "device"): torch.device,
    ("torch.storage", "UntypedStorage"): torch.UntypedStorage,
    **{("torch", name): getattr(torch, name) for name in DTYPES},
}
OLD_MODULES = {"__builtin__": "builtins", "copy_reg": "copyreg"}


def read_pickle(path: Path) -> Any:
    """The numpy arrays and plain values pickled in `path` (`.pdparams`, `.pdopt`).

    Raises:
        GptlmError: if the file is missing, damaged, or names anything but arrays and plain values.
    """

    def load() -> Any:
        with path.open("rb") as file:
            return _unpickler(path, NUMPY | PLAIN)(file, encoding="latin1").load()

    return _guarded(path, load)


def read_torch(path: Path) -> Any:
    """What `torch.save` wrote into `path`, tensors on the CPU; those of the zip format stay on disk until used.

    torch finds the tensors, the pickle inside is read by the restricted unpickler.

    Raises:
        GptlmError: as `read_pickle`.
    """
    if _is_program(path):
        raise GptlmError(f"{path} is refused: it is a TorchScript program, not weights; save its state_dict instead")
    restricted = _unpickler(path, NUMPY | PLAIN | INERT | TORCH)
    module: Any = SimpleNamespace(
        __name__="gptlm.conversion.safe_pickle",
        Unpickler=restricted,
        load=lambda file, **more: restricted(file, **more).load(),
    )
    return _guarded(
        path,
        lambda: torch.load(
            path, map_location="cpu", pickle_module=module, weights_only=False, mmap=zipfile.is_zipfile(path)
        ),
    )


def _is_program(path: Path) -> bool:
    """Whether torch would hand the file on to `torch.jit.load`, which runs what is in it."""

    def names() -> list[str]:
        with zipfile.ZipFile(path) as archive:
            return archive.namelist()

    found = _guarded(path, names) if path.is_file() and zipfile.is_zipfile(path) else []
    return any(name.rpartition("/")[2] == "constants.pkl" for name in found)


def _unpickler(path: Path, allowed: dict[tuple[str, str], Any]) -> type[pickle.Unpickler]:
    class Restricted(pickle.Unpickler):
        def find_class(self, module: str, name: str) -> Any:
            module = OLD_MODULES.get(module, module)
            known = allowed.get((module, name))
            if isinstance(known, FunctionType):
                return partial(known)  # what a pickle sets on it ends with it
            if known is torch.UntypedStorage:  # a class that anyone can change; torch.load asks it for its dtype only
                return SimpleNamespace(dtype=torch.uint8)
            if known is not None:
                return type(name, (Arguments,), {}) if known is Arguments else known
            if module.split(".")[0] in STAND_INS:
                return type(name, (StandIn,), {"__module__": module})
            raise GptlmError(
                f"{path} is refused: it asks for {module}.{name}, which is not part of weights and could run code; "
                "nothing of it was run; get the file from a source you trust"
            )

    return Restricted


def _guarded(path: Path, load: Callable[[], Any]) -> Any:
    try:
        return load()
    except (GptlmError, MemoryError):
        raise
    except (FileNotFoundError, PermissionError, IsADirectoryError) as error:
        raise GptlmError(f"cannot read {path}: {error.strerror}") from error
    except Exception as error:  # bytes that are not a pickle make it raise nearly anything
        reason = reason_of(error)
        reason = "its zip is not whole" if "zip archive" in reason else reason
        raise GptlmError(f"{path} is damaged or cut off ({reason}); copy or download it again") from error
