"""Pickled weights read without running anything: arrays, tensors and plain values, and nothing else.

A pickle is a program for a stack machine. Python's own machine calls what the program names, and sets attributes of
what it made; numpy and torch trust such calls, so that a file could make them read or write memory that is not theirs.
The machine here executes the instructions one by one (`pickletools.genops` decodes them): a name is looked up in a
short table of our own functions, which check their arguments, and nothing else is called or changed. A name that is not
in the table is refused with its file. Objects of training packages (arguments, enums, loss scalers) become stand-ins.
"""

import collections
import math
import mmap
import pickletools
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from gptlm.errors import GptlmError, reason_of

STAND_INS = ("megatron", "deepspeed", "fp16", "apex")  # packages whose objects are kept as stand-ins
NUMBERS = re.compile(r"[<>=|]?(b1|[iu][1248]|f[248]|c(8|16))")  # numpy's dtypes of plain numbers
MAX_DIMENSIONS = 32
KEYS = (str, bytes, int, float, bool, type(None))  # types of keys; a tuple nested a million times crashes its hash
OLD_MODULES = {"__builtin__": "builtins", "copy_reg": "copyreg"}
VALUES = frozenset(
    "INT BININT BININT1 BININT2 LONG LONG1 LONG4 FLOAT BINFLOAT UNICODE BINUNICODE SHORT_BINUNICODE BINUNICODE8 "
    "BINBYTES SHORT_BINBYTES BINBYTES8 BYTEARRAY8".split()
)
CONSTANTS: dict[str, Any] = {"NONE": None, "NEWTRUE": True, "NEWFALSE": False}
EMPTY: dict[str, Callable[[], Any]] = {"EMPTY_TUPLE": tuple, "EMPTY_LIST": list, "EMPTY_DICT": dict, "EMPTY_SET": set}
FIXED_TUPLES = {"TUPLE1": 1, "TUPLE2": 2, "TUPLE3": 3}


class Arguments:
    """`argparse.Namespace` of a checkpoint: its attributes, no behaviour."""


class StandIn:
    """An object of a package of `STAND_INS`: `arguments` it was made of, and its `state`."""

    def __init__(self, *arguments: Any):
        self.arguments, self.state = arguments, None


@dataclass(frozen=True, eq=False)
class Maker:
    """What a name of a pickle stands for if the pickle may call it."""

    function: Callable[..., Any]


class Dtype:
    """numpy's dtype of plain numbers, as a pickle makes it: a name, later perhaps a byte order."""

    def __init__(self, name: Any, align: Any = False, copy: Any = True):
        if type(name) is not str or not NUMBERS.fullmatch(name):
            raise ValueError(f"an array of {str(name)[:20]!r}, which is no type of plain numbers")
        self.numpy: np.dtype = np.dtype(name)

    def set_state(self, state: Any) -> None:
        """`state` is (version, byte order, subarray, names, fields, size, alignment, flags): the last six are void."""
        void = (None, None, None, -1, -1, 0)
        if type(state) is not tuple or len(state) < 8 or state[1] not in ("<", ">", "=", "|"):
            raise ValueError("a dtype without a byte order")
        if any(type(found) is not type(none) or found != none for found, none in zip(state[2:8], void, strict=True)):
            raise ValueError("a dtype of something else than plain numbers")
        self.numpy = self.numpy.newbyteorder(state[1])


def size_of(shape: Any) -> int:
    """Number of elements of an array of `shape`. Raises ValueError unless it is a tuple of sizes."""
    if type(shape) is not tuple or len(shape) > MAX_DIMENSIONS:
        raise ValueError("a shape that is no tuple of sizes")
    if any(type(length) is not int or length < 0 for length in shape):
        raise ValueError("a size that is not a number of elements")
    return math.prod(shape)


def _content(dtype: Any, content: Any, count: int) -> np.ndarray:
    """`count` numbers of `dtype` in exactly as many bytes; in the byte order of this machine, if need be as a copy."""
    if type(dtype) is not Dtype:
        raise ValueError("an array without a dtype")
    data = content.encode("latin1") if type(content) is str else content  # of Python 2
    if type(data) not in (bytes, bytearray):
        raise ValueError("an array whose content is no bytes")
    if len(data) != count * dtype.numpy.itemsize:
        raise ValueError(f"{count} numbers of {dtype.numpy.itemsize} bytes in {len(data)} bytes")
    return np.frombuffer(data, dtype.numpy).astype(dtype.numpy.newbyteorder("="), copy=False)


def _array(kind: Any, shape: Any, code: Any) -> np.ndarray:
    """numpy's `_reconstruct`: an empty array whose content follows."""
    return np.empty(0, np.int8)


def _filled(array: np.ndarray, state: Any) -> None:
    """Fill an array of `_array`; `state` is (version, shape, dtype, whether in Fortran's order, content)."""
    if type(state) is not tuple or len(state) not in (4, 5):
        raise ValueError("an array without shape and content")
    shape, dtype, fortran, content = state[-4:]
    numbers = _content(dtype, content, size_of(shape))
    data = content if type(content) is bytes and dtype.numpy.isnative else numbers.tobytes()  # numpy takes bytes only
    fill: Any = array.__setstate__
    fill((1, shape, numbers.dtype, bool(fortran), data))


def _scalar(dtype: Any, content: Any = b"") -> Any:
    return _content(dtype, content, 1)[0]


def _from_buffer(content: Any, dtype: Any, shape: Any, order: Any) -> np.ndarray:
    """numpy's way with pickle protocol 5."""
    return _content(dtype, content, size_of(shape)).reshape(shape, order="F" if order == "F" else "C")


def _encode(text: Any, encoding: Any = "latin1") -> bytes:
    """Bytes as Python 3 writes them with pickle protocol 2."""
    if type(text) is not str or encoding not in ("latin1", "latin-1"):
        raise ValueError("bytes that are not in latin1")
    return text.encode("latin1")


def _bare(kind: Any, base: Any, state: Any) -> Any:
    """`copyreg._reconstructor` for stand-ins."""
    if type(kind) is not Maker or kind.function not in (StandIn, Arguments):
        raise ValueError("an object that is no stand-in")
    return kind.function()


def _keys(*keys: Any) -> None:
    """Raises ValueError unless `keys` are plain values, or tuples of them."""
    for key in keys:
        if any(type(part) not in KEYS for part in (key if type(key) is tuple else (key,))):
            raise ValueError("a key that is no text or number")


def _set(items: Any = ()) -> set[Any]:
    if type(items) not in (list, tuple):
        raise ValueError("a set of something else than a list")
    _keys(*items)
    return set(items)


def _tuple(items: Any = ()) -> tuple[Any, ...]:
    if type(items) not in (list, tuple):
        raise ValueError("a tuple of something else than a list")
    return tuple(items)


def _ordered(items: Any = ()) -> dict[Any, Any]:
    """An OrderedDict, whose items mostly follow."""
    if type(items) not in (list, tuple) or any(type(item) not in (list, tuple) or len(item) != 2 for item in items):
        raise ValueError("a dictionary of something else than pairs")
    _keys(*(key for key, _ in items))
    return collections.OrderedDict(items)


NUMPY: dict[tuple[str, str], Any] = {
    ("numpy", "ndarray"): None,  # an argument of `_reconstruct`
    ("numpy", "dtype"): Maker(Dtype),
    ("_codecs", "encode"): Maker(_encode),
    **{(f"numpy.{core}.multiarray", "_reconstruct"): Maker(_array) for core in ("core", "_core")},
    **{(f"numpy.{core}.multiarray", "scalar"): Maker(_scalar) for core in ("core", "_core")},
    **{(f"numpy.{core}.numeric", "_frombuffer"): Maker(_from_buffer) for core in ("core", "_core")},
}
PLAIN: dict[tuple[str, str], Any] = {
    ("collections", "OrderedDict"): Maker(_ordered),
    ("builtins", "tuple"): Maker(_tuple),
    ("builtins", "set"): Maker(_set),
    ("builtins", "object"): None,  # an argument of `_reconstructor`
    ("argparse", "Namespace"): Maker(Arguments),
    ("copyreg", "_reconstructor"): Maker(_bare),
}


def read_pickle(path: Path) -> Any:
    """The numpy arrays and plain values pickled in `path` (`.pdparams`, `.pdopt`).

    Raises:
        GptlmError: if the file is missing, damaged, or names anything but arrays and plain values.
    """
    return guarded(path, lambda: Machine(path, mapped(path), NUMPY | PLAIN, "latin1").load())


def mapped(path: Path) -> mmap.mmap:
    """The file in memory, read from disk where it is used. Changes stay in memory."""
    with path.open("rb") as file:
        return mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)


def guarded(path: Path, load: Callable[[], Any]) -> Any:
    """`load()`, which reads `path`. Raises GptlmError for whatever the bytes of a damaged file make it raise."""
    if path.exists() and not path.is_file() and not path.is_dir():
        raise GptlmError(f"cannot read {path}: it is a pipe, a device or a socket, not a file")  # would wait forever
    try:
        return load()
    except (GptlmError, MemoryError):
        raise
    except (FileNotFoundError, PermissionError, IsADirectoryError) as error:
        raise GptlmError(f"cannot read {path}: {error.strerror}") from error
    except Exception as error:  # bytes that are not a pickle make it raise nearly anything
        raise GptlmError(f"{path} is damaged or cut off ({reason_of(error)}); copy or download it again") from error


class Machine:
    """Executes one pickle of `file`, from its position to the pickle's end.

    Args:
        path: of the file, for messages.
        names: (module, name) -> what it stands for: a `Maker`, or a value.
        encoding: of the strings of Python 2.
        persistent: makes an object of what the pickle calls a persistent id; None: there are none.
    """

    def __init__(
        self,
        path: Path,
        file: Any,
        names: dict[tuple[str, str], Any],
        encoding: str,
        persistent: Callable[[Any], Any] | None = None,
    ):
        self.path, self.file, self.names, self.encoding, self.persistent = path, file, names, encoding, persistent
        self.stack: list[Any] = []
        self.below: list[list[Any]] = []  # stacks below the marks
        self.memo: dict[int, Any] = {}
        self.empty_arrays: dict[int, np.ndarray] = {}

    def load(self) -> Any:
        """The object that the pickle describes.

        Raises:
            GptlmError: if it names anything that is not in `names`.
            ValueError, LookupError, TypeError: if it is damaged, or describes no arrays and plain values.
        """
        for opcode, argument, _ in pickletools.genops(self.file):
            if opcode.name == "STOP":
                break
            self._execute(opcode.name, argument)
        return self.stack.pop()

    def _execute(self, name: str, argument: Any) -> None:
        stack = self.stack
        if name in VALUES:
            stack.append(argument)
        elif name in CONSTANTS:
            stack.append(CONSTANTS[name])
        elif name in EMPTY:
            stack.append(EMPTY[name]())
        elif name in FIXED_TUPLES:
            count = FIXED_TUPLES[name]
            if len(stack) < count:
                raise ValueError("a tuple of more than there is")
            self.stack[-count:] = [tuple(stack[-count:])]
        else:
            self._execute_other(name, argument)

    def _execute_other(self, name: str, argument: Any) -> None:
        match name:
            case "PROTO" | "FRAME":
                pass
            case "STRING" | "BINSTRING" | "SHORT_BINSTRING":
                self.stack.append(argument.encode("latin1").decode(self.encoding))
            case "MARK":
                self.below.append(self.stack)
                self.stack = []
            case "POP_MARK":
                self._marked()
            case "POP":
                self.stack.pop() if self.stack else self._marked()
            case "DUP":
                self.stack.append(self.stack[-1])
            case "MEMOIZE":
                self.memo[len(self.memo)] = self.stack[-1]
            case "PUT" | "BINPUT" | "LONG_BINPUT":
                self.memo[argument] = self.stack[-1]
            case "GET" | "BINGET" | "LONG_BINGET":
                self.stack.append(self.memo[argument])
            case "TUPLE":
                items = self._marked()
                self.stack.append(tuple(items))
            case "LIST":
                items = self._marked()
                self.stack.append(items)
            case "FROZENSET":
                items = self._marked()
                self.stack.append(frozenset(_set(items)))
            case "DICT":
                items = self._marked()
                self.stack.append({})
                self._set_items(items)
            case "SETITEM":
                value, key = self.stack.pop(), self.stack.pop()
                self._set_items([key, value])
            case "SETITEMS":
                self._set_items(self._marked())
            case "APPEND":
                self._extend(list, [self.stack.pop()])
            case "APPENDS":
                self._extend(list, self._marked())
            case "ADDITEMS":
                self._extend(set, self._marked())
            case "GLOBAL":
                self.stack.append(self._named(*argument.split(" ", 1)))
            case "STACK_GLOBAL":
                attribute, module = self.stack.pop(), self.stack.pop()
                self.stack.append(self._named(module, attribute))
            case "REDUCE" | "NEWOBJ":
                arguments, target = self.stack.pop(), self.stack.pop()
                self._call(target, arguments)
            case "NEWOBJ_EX":
                named, arguments, target = self.stack.pop(), self.stack.pop(), self.stack.pop()
                self._call(target, arguments, named)
            case "INST":
                items = self._marked()
                self._call(self._named(*argument.split(" ", 1)), tuple(items))
            case "OBJ":
                target, *items = self._marked()
                self._call(target, tuple(items))
            case "BUILD":
                state = self.stack.pop()
                self._build(self.stack[-1], state)
            case "PERSID" | "BINPERSID":
                saved = argument if name == "PERSID" else self.stack.pop()
                if self.persistent is None:
                    raise ValueError("an object outside the pickle")
                self.stack.append(self.persistent(saved))
            case _:
                raise ValueError(f"the instruction {name}, which weights do not need")

    def _marked(self) -> list[Any]:
        """What was put on the stack since the last mark."""
        items, self.stack = self.stack, self.below.pop()
        return items

    def _set_items(self, items: list[Any]) -> None:
        target = self.stack[-1]
        if not isinstance(target, dict) or len(items) % 2:
            raise ValueError("items of something else than a dictionary")
        _keys(*items[::2])
        target.update(zip(items[::2], items[1::2], strict=True))

    def _extend(self, kind: Any, items: list[Any]) -> None:
        target: Any = self.stack[-1]
        if type(target) is not kind:
            raise ValueError(f"items of something else than a {kind.__name__}")
        if kind is set:
            target.update(_set(items))
        else:
            target.extend(items)

    def _named(self, module: Any, name: Any) -> Any:
        if type(module) is not str or type(name) is not str:
            raise ValueError("a name that is no text")
        module = OLD_MODULES.get(module, module)
        if (module, name) in self.names:
            return self.names[module, name]
        if module.split(".")[0] in STAND_INS:
            return Maker(StandIn)
        raise GptlmError(
            f"{self.path} is refused: it asks for {module}.{name}, which is not part of weights and could run code; "
            "nothing of it was run; get the file from a source you trust"
        )

    def _call(self, target: Any, arguments: Any, named: Any = None) -> None:
        if type(target) is not Maker or type(arguments) is not tuple:
            raise ValueError(f"a call of a {type(target).__name__}")
        if named and target.function is not StandIn:
            raise ValueError("a call with named arguments")
        made = target.function(*arguments)
        if target.function is _array:
            self.empty_arrays[id(made)] = made
        self.stack.append(made)

    def _build(self, target: Any, state: Any) -> None:
        """Give an object its state; it is on the stack and stays there."""
        if type(target) is np.ndarray:
            if self.empty_arrays.pop(id(target), None) is not target:
                raise ValueError("an array that is filled twice")
            _filled(target, state)
        elif type(target) is Dtype:
            target.set_state(state)
        elif type(target) is StandIn:
            target.state = state
        elif type(target) is Arguments:
            if type(state) is not dict or any(type(key) is not str for key in state):
                raise ValueError("arguments without names")
            vars(target).update(state)
        elif type(target) is not collections.OrderedDict:  # the attributes of torch's state_dict are not needed
            raise ValueError(f"attributes of a {type(target).__name__}")
