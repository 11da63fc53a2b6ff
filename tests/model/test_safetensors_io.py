"""Reading and writing safetensors: compared with the safetensors library itself and with hand-made headers."""

import json
import os
import struct

import pytest
import torch
from safetensors.torch import load_file, save_file

from gptlm.errors import GptlmError
from gptlm.model.safetensors_io import (
    LazyTensors,
    check_weights,
    read_header,
    save_model_weights,
    save_shards,
    save_tensors,
    tensor_shapes,
    weight_files,
)

TENSORS = {"a": torch.arange(6.0).reshape(2, 3), "b": torch.ones(4, dtype=torch.bfloat16)}


def test_tensors_rows_and_metadata_of_one_file(tmp_path):
    path = tmp_path / "x.safetensors"
    save_file(TENSORS, path, {"note": "n"})
    header = read_header(path)
    assert tensor_shapes(path) == {"a": [2, 3], "b": [4]} and header.metadata == {"note": "n"}
    place = header.tensors["a"]
    assert place.dtype == "F32" and path.read_bytes()[place.start : place.stop] == TENSORS["a"].numpy().tobytes()
    lazy = LazyTensors([path])
    assert set(lazy) == {"a", "b"} and len(lazy) == 2 and "a" in lazy and "c" not in lazy
    assert torch.equal(lazy["a"], TENSORS["a"]) and torch.equal(lazy["b"], TENSORS["b"])
    assert lazy.part("a")[1:2].tolist() == [[3, 4, 5]]
    with pytest.raises(KeyError):
        lazy["c"]


def test_what_is_wrong_with_a_file_is_named(tmp_path):
    path = tmp_path / "model.safetensors"
    with pytest.raises(GptlmError, match=f"cannot read {path}: No such file"):
        LazyTensors.of_model(tmp_path)
    save_file(TENSORS, path)
    whole = path.read_bytes()
    header = json.dumps({"a": {"dtype": "F99", "shape": [1], "data_offsets": [0, 4]}}).encode()
    text = header.replace(b"[0, 4]", b'["0", "4"]')
    for content, reason in (
        (whole[:-1], f"it has {len(whole) - 1} bytes, its header says {len(whole)}"),
        (whole + b"x", f"it has {len(whole) + 1} bytes"),
        (b"", "its header is not a list of tensors"),
        (whole[:12], "it has 12 bytes"),
        (struct.pack("<Q", 4) + b"null", "its header is not a list of tensors"),
        (struct.pack("<Q", len(text)) + text + bytes(4), "its header is not a list of tensors"),
        (struct.pack("<Q", len(header)) + header + bytes(4), "cannot be read: .*header"),
    ):
        path.write_bytes(content)
        with pytest.raises(GptlmError, match=rf"{path} .*{reason}.*; copy or download it again"):
            LazyTensors.of_model(tmp_path)


def assert_three_files(folder):
    """With 24, 20 and 4 bytes; returns their names."""
    names = [f"model-0000{number}-of-00003.safetensors" for number in (1, 2, 3)]
    assert sorted(path.name for path in folder.iterdir()) == [*names, "model.safetensors.index.json"]
    assert [set(load_file(folder / name)) for name in names] == [{"a"}, {"b", "c"}, {"d"}]
    index = json.loads((folder / "model.safetensors.index.json").read_text())
    assert index["metadata"] == {"total_size": 48}
    assert index["weight_map"] == {"a": names[0], "b": names[1], "c": names[1], "d": names[2]}
    return names


def test_a_model_in_shards(tmp_path, monkeypatch):
    """Tensors of 24, 8, 12 and 4 bytes in files of at most 20: the first is larger and has a file of its own."""
    monkeypatch.setattr("gptlm.model.safetensors_io.SHARD_BYTES", 20)
    tensors = {**TENSORS, "c": torch.zeros(3), "d": torch.ones(1)}
    save_model_weights(tmp_path, iter(tensors.items()))
    names = assert_three_files(tmp_path)
    assert read_header(tmp_path / names[1]).metadata == {"format": "pt"}
    found = LazyTensors.of_model(tmp_path)
    assert all(torch.equal(found[name], tensor) for name, tensor in tensors.items()) and len(found) == 4
    (tmp_path / names[1]).unlink()
    for read in (check_weights, LazyTensors.of_model):
        with pytest.raises(GptlmError, match=f"cannot read {tmp_path / names[1]}: No such file"):
            read(tmp_path)


def test_a_small_model_is_one_file_without_index(tmp_path):
    save_model_weights(tmp_path, iter(TENSORS.items()), library="np")
    assert [path.name for path in tmp_path.iterdir()] == ["model.safetensors"]
    assert read_header(tmp_path / "model.safetensors").metadata == {"format": "np"}


def test_one_shard_at_a_time_is_held(tmp_path):
    """When the third tensor comes, the file of the first two is complete."""

    def stream():
        for number in range(3):
            yield f"t{number}", torch.full((2,), float(number))
            assert len(list(tmp_path.iterdir())) == (1 if number == 2 else 0)

    shards = save_shards(tmp_path, stream(), "part-{:02d}.safetensors", 16)
    assert shards == [{"t0": 8, "t1": 8}, {"t2": 8}]
    assert load_file(tmp_path / "part-02.safetensors")["t2"].tolist() == [2, 2]


@pytest.mark.parametrize("mask", [0o022, 0o027, 0o077])
def test_permissions_are_those_of_any_new_file(tmp_path, mask):
    before = os.umask(mask)
    try:
        save_tensors(tmp_path / "x.safetensors", {"t": TENSORS["a"].t()})
    finally:
        os.umask(before)
    assert (tmp_path / "x.safetensors").stat().st_mode & 0o777 == 0o666 & ~mask
    assert torch.equal(load_file(tmp_path / "x.safetensors")["t"], TENSORS["a"].t())


@pytest.mark.parametrize("content", ["[]", "{}", '{"weight_map": {"a": 1}}', "nonsense"])
def test_a_damaged_index_is_named(tmp_path, content):
    (tmp_path / "model.safetensors.index.json").write_text(content)
    with pytest.raises(GptlmError, match="index.json is damaged"):
        weight_files(tmp_path)


@pytest.mark.parametrize("name", ["../../etc/passwd", "/etc/passwd", 5, None, ["x"], "a/b.safetensors", ""])
def test_an_index_names_files_of_its_folder(tmp_path, name):
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"w": name}}))
    with pytest.raises(GptlmError, match="index.json is damaged"):
        weight_files(tmp_path)
