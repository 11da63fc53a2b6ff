"""Files that try to run code are refused, and none of it runs."""

import argparse
import io
import os
import pathlib
import pickle
import random
import signal
import struct
import tracemalloc
import zipfile
from collections import OrderedDict

import numpy as np
import pytest
import torch

from gptlm.errors import GptlmError
from gptlm.pickles.safe_pickle import NUMPY, PLAIN, StandIn, read_pickle
from gptlm.pickles.torch_file import DTYPES, INERT, TORCH, read_torch


class Poison:
    """Runs a command when it is unpickled."""

    def __init__(self, function, *arguments):
        self.what = (function, arguments)

    def __reduce__(self):
        return self.what


POISONS = [
    (os.system, "posix.system"),
    (eval, "builtins.eval"),
    (exec, "builtins.exec"),
    (getattr, "builtins.getattr"),
    (torch.load, "torch.serialization.load"),
    (torch.storage._load_from_bytes, "torch.storage._load_from_bytes"),
    (np.load, "numpy.load"),
    (__import__, "builtins.__import__"),
]


@pytest.mark.parametrize(("function", "name"), POISONS)
@pytest.mark.parametrize("form", ["pdparams", "zip", "legacy"])
def test_code_is_refused(tmp_path, monkeypatch, function, name, form):
    monkeypatch.chdir(tmp_path)
    content = {"model": {"w": torch.ones(2).numpy()}, "args": Poison(function, "touch pwned")}
    path = tmp_path / "x"
    if form == "pdparams":
        path.write_bytes(pickle.dumps(content))
    else:
        torch.save(content, path, _use_new_zipfile_serialization=form == "zip")
    with pytest.raises(GptlmError, match=f"{path} is refused: it asks for {name}"):
        (read_pickle if form == "pdparams" else read_torch)(path)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["x"]


@pytest.mark.parametrize("protocol", [2, 3, 4, 5])
def test_arrays_of_every_protocol(tmp_path, protocol):
    content = {
        "rows": np.arange(6, dtype=np.float32).reshape(2, 3),
        "columns": np.arange(6, dtype=np.float64).reshape(2, 3).T,
        "bits": np.array([0x3F80, 0xC000], dtype=np.uint16),
        "scalar": np.float32(2.5),
        "named": ("linear_0.w_0", np.ones(2, dtype=np.float16)),
    }
    (tmp_path / "x").write_bytes(pickle.dumps(content, protocol=protocol))
    found = read_pickle(tmp_path / "x")
    assert found["rows"].dtype == np.float32 and found["rows"].tolist() == [[0, 1, 2], [3, 4, 5]]
    assert found["columns"].tolist() == [[0, 3], [1, 4], [2, 5]]
    assert found["bits"].tolist() == [0x3F80, 0xC000] and found["scalar"] == 2.5
    assert found["named"][0] == "linear_0.w_0" and found["named"][1].tolist() == [1, 1]


def test_scalars_of_objects_are_refused(tmp_path):
    scalar = np._core.multiarray.scalar
    (tmp_path / "x").write_bytes(pickle.dumps(Poison(scalar, np.dtype("O"), pickle.dumps(1))))
    with pytest.raises(GptlmError, match="an array of 'O8', which is no type of plain numbers"):
        read_pickle(tmp_path / "x")


@pytest.mark.parametrize("new", [True, False])
def test_tensors_arguments_and_rng_states(tmp_path, new):
    content = {
        "args": argparse.Namespace(layers=3, params_dtype=torch.bfloat16),
        "rng": [random.getstate(), np.random.get_state(), torch.get_rng_state()],
        "weights": {"half": torch.tensor([1.5], dtype=torch.bfloat16), "turned": torch.arange(6).reshape(2, 3).t()},
        "parameter": torch.nn.Parameter(torch.ones(2)),
    }
    torch.save(content, tmp_path / "x", _use_new_zipfile_serialization=new)
    found = read_torch(tmp_path / "x")
    assert vars(found["args"]) == {"layers": 3, "params_dtype": torch.bfloat16}
    assert type(found["args"]) is not argparse.Namespace
    assert found["weights"]["half"].item() == 1.5 and found["weights"]["turned"].tolist() == [[0, 3], [1, 4], [2, 5]]
    assert torch.equal(found["parameter"], torch.ones(2)) and torch.equal(found["rng"][2], content["rng"][2])


@pytest.mark.filterwarnings("ignore:TypedStorage is deprecated")
@pytest.mark.parametrize("new", [True, False])
def test_storages_without_a_type(tmp_path, new):
    storage = torch.tensor([3, 1, 2], dtype=torch.uint8).untyped_storage()
    torch.save(storage, tmp_path / "x", _use_new_zipfile_serialization=new)
    assert list(read_torch(tmp_path / "x")) == [3, 1, 2]


@pytest.mark.parametrize("form", ["pdparams", "zip", "legacy"])
@pytest.mark.parametrize("kept", [0, 1, 100, -1])
def test_truncated_files_are_errors(tmp_path, form, kept):
    path = tmp_path / "x"
    content = {"w": np.ones(500)}
    if form == "pdparams":
        path.write_bytes(pickle.dumps(content))
    else:
        tensors = {"w": torch.ones(500)}
        torch.save(tensors, path, _use_new_zipfile_serialization=form == "zip")
    path.write_bytes(path.read_bytes()[:kept])
    with pytest.raises(GptlmError, match=f"{path} is damaged or cut off"):
        (read_pickle if form == "pdparams" else read_torch)(path)


def test_a_missing_file_is_an_error(tmp_path):
    with pytest.raises(GptlmError, match="cannot read .*nowhere: No such file"):
        read_pickle(tmp_path / "nowhere")


def test_buffers_paths_and_signals_are_inert(tmp_path):
    torch.save({"a": io.BytesIO(b"x"), "b": pathlib.PosixPath("/tmp"), "c": signal.SIGTERM}, tmp_path / "x")
    found = read_torch(tmp_path / "x")
    assert {type(value) for value in found.values()} == {StandIn} and found["b"].arguments == ("/", "tmp")


def with_attribute_set(name, path):
    """A torch.save file whose pickle looks up `name`, sets an attribute on the result, and returns it."""
    torch.save(0, path)
    with zipfile.ZipFile(path) as archive:
        content = {entry: archive.read(entry) for entry in archive.namelist()}
    found = pickle.GLOBAL + "\n".join(name).encode() + b"\n"
    attributes = pickle.NONE + pickle.EMPTY_DICT + b"\x8c\x06marked" + pickle.BININT1 + b"\x01" + pickle.SETITEM
    with zipfile.ZipFile(path, "w") as archive:
        for entry, data in content.items():
            pickled = b"\x80\x02" + found + attributes + pickle.TUPLE2 + pickle.BUILD + pickle.STOP
            archive.writestr(entry, pickled if entry.endswith("data.pkl") else data)


@pytest.mark.parametrize("name", NUMPY | PLAIN | INERT | TORCH)
def test_a_pickle_cannot_change_what_a_name_stands_for(tmp_path, name):
    with_attribute_set(name, tmp_path / "x")
    with pytest.raises(GptlmError, match="is damaged or cut off .attributes of a"):
        read_torch(tmp_path / "x")
    assert not hasattr((NUMPY | PLAIN | INERT | TORCH)[name], "marked")


def array_of(dtype, content, *, shape=(4,), state=None, again=None):
    """A pickle of an array: `content` in `shape` of numpy's dtype `dtype`, which gets `state` by BUILD."""
    number = pickle.GLOBAL + b"numpy\ndtype\n" + plain((dtype, False, True)) + pickle.REDUCE
    if state is not None:
        number += plain(state) + pickle.BUILD
    empty = pickle.GLOBAL + b"numpy.core.multiarray\n_reconstruct\n" + pickle.MARK
    empty += pickle.GLOBAL + b"numpy\nndarray\n" + plain((0,)) + plain(b"b") + pickle.TUPLE + pickle.REDUCE
    fill = pickle.MARK + plain(1) + plain(shape) + number + pickle.NEWFALSE + plain(content)
    fill += pickle.TUPLE + pickle.BUILD
    return b"\x80\x04" + empty + fill + (fill if again else b"") + pickle.STOP


def plain(value):
    """The instructions that put `value` on the stack."""
    return pickle.dumps(value, protocol=3)[2:-1]


SWAPPED = (3, ">", None, None, None, -1, -1, 0)


def test_an_array_by_hand(tmp_path):
    (tmp_path / "x").write_bytes(array_of("f4", np.arange(4, dtype=">f4").tobytes(), state=SWAPPED))
    found = read_pickle(tmp_path / "x")
    assert found.tolist() == [0, 1, 2, 3] and found.dtype == np.float32 and found.dtype.isnative


@pytest.mark.parametrize(
    ("pickled", "reason"),
    [
        (array_of("O8", bytes(32)), "an array of 'O8'"),
        (array_of("f4", bytes(16), state=(3, "|", None, None, None, -1, -1, 63)), "something else than plain numbers"),
        (array_of("f4", bytes(16), state=(3, "<", None, None, None, 8, 8, 0)), "something else than plain numbers"),
        (array_of("f4", bytes(16), state=(3, "<", None, ("a",), {}, -1, -1, 0)), "something else than plain numbers"),
        (array_of("S4", bytes(16)), "an array of 'S4'"),
        (array_of("V9", bytes(36)), "an array of 'V9'"),
        (array_of("f4", bytes(15)), "4 numbers of 4 bytes in 15 bytes"),
        (array_of("f4", bytes(16), shape=(2**60, 2**60)), "numbers of 4 bytes in 16 bytes"),
        (array_of("f4", bytes(16), shape=(-4,)), "a size that is not a number of elements"),
        (array_of("f4", bytes(16), again=True), "an array that is filled twice"),
    ],
)
def test_arrays_that_are_not_what_their_bytes_are(tmp_path, pickled, reason):
    (tmp_path / "x").write_bytes(pickled)
    with pytest.raises(GptlmError, match=reason):
        read_pickle(tmp_path / "x")


@pytest.mark.parametrize(
    "instructions",
    [
        pickle.NONE + pickle.LONG_BINPUT + b"\xff\xff\xff\xff",  # a place in a table of 4 billion entries
        pickle.BINBYTES8 + struct.pack("<Q", 1 << 40),
        pickle.BYTEARRAY8 + struct.pack("<Q", 1 << 40),
        pickle.FRAME + struct.pack("<Q", 1 << 62),
        pickle.EMPTY_DICT + pickle.NONE + pickle.TUPLE1 * 300_000 + pickle.NONE + pickle.SETITEM,  # deep key
        pickle.EMPTY_LIST + pickle.MARK + pickle.TUPLE1 * 9,
        pickle.NONE * 3 + pickle.REDUCE,
        b"".join([pickle.EXT1, b"\x01"]),
    ],
)
def test_instructions_that_ask_for_too_much(tmp_path, instructions):
    (tmp_path / "x").write_bytes(b"\x80\x04" + instructions + pickle.STOP)
    tracemalloc.start()
    try:
        assert read_pickle(tmp_path / "x") is None
    except GptlmError as error:
        assert "is damaged or cut off" in str(error)
    finally:
        most = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
    assert most < 100e6


class Rebuilt:
    """Pickled as a call of a function of torch._utils."""

    def __init__(self, function, *arguments):
        self.what = (function, arguments)

    def __reduce__(self):
        return self.what


@pytest.mark.filterwarnings("ignore:TypedStorage is deprecated")
@pytest.mark.parametrize("new", [True, False])
@pytest.mark.parametrize(
    ("offset", "size", "stride"),
    [
        (5, (1,), (1,)),
        (0, (5,), (1,)),
        (0, (2,), (4,)),
        (-1, (2,), (1,)),
        (0, (-1,), (1,)),
        (0, (2,), (-1,)),
        (0, (2, 2), (1,)),
        (0, (1000, 1000), (0, 0)),
        (0, (2**40, 2**40), (1, 1)),
        (0, 4, 1),
        (True, (1,), (1,)),
        (0, (2.0,), (1,)),
    ],
)
def test_tensors_outside_their_storage(tmp_path, new, offset, size, stride):
    storage = torch.ones(4).storage()
    wrong = Rebuilt(torch._utils._rebuild_tensor_v2, storage, offset, size, stride, False, OrderedDict())
    torch.save({"w": wrong}, tmp_path / "x", _use_new_zipfile_serialization=new)
    with pytest.raises(GptlmError, match="is damaged or cut off"):
        read_torch(tmp_path / "x")


@pytest.mark.parametrize("new", [True, False])
def test_tensors_cannot_be_changed_by_a_pickle(tmp_path, new):
    """Tensor.__setstate__ sets storage, offset and size without a check of the caller's."""

    class Changed:
        def __reduce__(self):
            return (
                torch._utils._rebuild_tensor_v2,
                (torch.ones(1).storage(), 0, (1,), (1,), False, OrderedDict()),
                state,
            )

    state = (torch.zeros(1), 0, (1 << 40,), (1,))
    torch.save([Changed()], tmp_path / "x", _use_new_zipfile_serialization=new)
    with pytest.raises(GptlmError, match="attributes of a Tensor"):
        read_torch(tmp_path / "x")


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("new", [True, False])
def test_ours_equals_torch_s_own_reader(tmp_path, dtype, new):
    """Views, shared storages, scalars, empty tensors, and tensors larger than a page, in every type."""
    base = torch.arange(-3000, 3000).to(getattr(torch, dtype)).reshape(60, 100)
    content = {"a": base, "t": base.t(), "part": base[3:9, 5], "none": base[:0], "one": base[2, 3], "p": base[::7]}
    content["list"] = [base.clone(), (1, "x", None, 2.5, True, b"b", {3: {"y"}})]
    torch.save(content, tmp_path / "x", _use_new_zipfile_serialization=new)
    found, theirs = read_torch(tmp_path / "x"), torch.load(tmp_path / "x", weights_only=False)
    assert found.keys() == theirs.keys() and found["list"][1] == theirs["list"][1]
    for name in set(found) - {"list"}:
        assert found[name].dtype == theirs[name].dtype and found[name].stride() == theirs[name].stride()
        assert torch.equal(found[name], theirs[name]), name
    assert torch.equal(found["list"][0], theirs["list"][0])
    assert found["a"].data_ptr() == found["t"].data_ptr()


def test_a_storage_larger_than_its_record(tmp_path):
    torch.save({"w": torch.ones(4)}, tmp_path / "x")
    with zipfile.ZipFile(tmp_path / "x") as archive:
        content = {entry: archive.read(entry) for entry in archive.namelist()}
    with zipfile.ZipFile(tmp_path / "x", "w") as archive:
        for entry, data in content.items():
            archive.writestr(entry, data[:8] if "/data/" in entry else data)
    with pytest.raises(GptlmError, match="a storage of 4 elements in 8 bytes"):
        read_torch(tmp_path / "x")
    with zipfile.ZipFile(tmp_path / "x", "w", zipfile.ZIP_DEFLATED) as archive:
        for entry, data in content.items():
            archive.writestr(entry, data)
    with pytest.raises(GptlmError, match="is compressed or encrypted"):
        read_torch(tmp_path / "x")


@pytest.mark.filterwarnings("ignore")
def test_a_torchscript_program_is_refused(tmp_path):
    torch.jit.trace(torch.nn.Linear(2, 2), torch.ones(1, 2)).save(str(tmp_path / "p.pt"))
    with pytest.raises(GptlmError, match="p.pt is refused: it is a TorchScript program"):
        read_torch(tmp_path / "p.pt")
