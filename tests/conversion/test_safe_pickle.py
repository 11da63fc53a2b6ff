"""Files that try to run code are refused, and none of it runs."""

import argparse
import io
import os
import pathlib
import pickle
import random
import signal
import zipfile

import numpy as np
import pytest
import torch

from gptlm.conversion.safe_pickle import INERT, NUMPY, PLAIN, TORCH, StandIn, read_pickle, read_torch
from gptlm.errors import GptlmError


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
    with pytest.raises(GptlmError, match="a scalar of objects"):
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
def test_a_pickle_cannot_change_shared_objects(tmp_path, name):
    """For every name that a file may use: objects of other code have no new attribute afterwards."""
    with_attribute_set(name, tmp_path / "x")
    try:
        assert read_torch(tmp_path / "x").marked == 1  # on an object of its own
    except GptlmError as error:
        assert "is damaged or cut off" in str(error)
    shared = (NUMPY | PLAIN | INERT | TORCH)[name]
    assert not hasattr(shared, "marked") and not hasattr(torch.UntypedStorage, "marked")


@pytest.mark.filterwarnings("ignore")
def test_a_torchscript_program_is_refused(tmp_path):
    torch.jit.trace(torch.nn.Linear(2, 2), torch.ones(1, 2)).save(str(tmp_path / "p.pt"))
    with pytest.raises(GptlmError, match="p.pt is refused: it is a TorchScript program"):
        read_torch(tmp_path / "p.pt")
