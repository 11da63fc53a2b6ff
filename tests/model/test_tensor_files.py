"""Files whose tensors come one at a time are those that safetensors' own writer makes of all of them."""

import pytest
import torch
from safetensors.torch import load_file

from gptlm.checksums import file_checksum
from gptlm.model.tensor_files import save_model_one_by_one, write_file
from tests.model.test_safetensors_io import assert_three_files

TENSORS = {"a": torch.arange(6.0).view(2, 3), "b": torch.tensor([1.5, -2]), "c": torch.zeros(3), "d": torch.ones(1)}
KINDS = {name: (tensor.shape, torch.float32) for name, tensor in TENSORS.items()}


def test_a_model_in_shards_in_any_order(tmp_path, monkeypatch):
    """Tensors of 24, 8, 12 and 4 bytes in files of at most 20: the first is larger and has a file of its own."""
    monkeypatch.setattr("gptlm.model.tensor_files.SHARD_BYTES", 20)
    save_model_one_by_one(tmp_path, KINDS, reversed(TENSORS.items()))
    names = assert_three_files(tmp_path)
    found = {name: tensor for file in names for name, tensor in load_file(tmp_path / file).items()}
    assert all(torch.equal(found[name], tensor) for name, tensor in TENSORS.items())


def test_each_tensor_is_written_before_the_next_one_comes(tmp_path):
    def stream():
        for name, tensor in TENSORS.items():
            before = (tmp_path / "model.safetensors").read_bytes()
            yield name, tensor
            assert (tmp_path / "model.safetensors").read_bytes() != before or not tensor.any()

    save_model_one_by_one(tmp_path, KINDS, stream())
    assert load_file(tmp_path / "model.safetensors").keys() == TENSORS.keys()


@pytest.mark.parametrize(
    ("tensors", "says"),
    [
        ({"a": TENSORS["a"]}, "3 weights of the model are missing .first: b."),
        ({**TENSORS, "e": torch.ones(1)}, "the weight e .1. is not one of the model"),
        ({"a": TENSORS["a"].t()}, "the weight a .3, 2. is not one of the model"),
    ],
)
def test_other_tensors_than_the_model_has(tmp_path, tensors, says):
    with pytest.raises(RuntimeError, match=says):
        save_model_one_by_one(tmp_path, KINDS, tensors.items())


def test_dtypes_lie_in_order_of_their_size_and_the_checksum_is_the_file_s(tmp_path):
    half = torch.tensor([1.0, 2, 3])
    given = {"h": (half, torch.bfloat16), "i": (torch.tensor(7), torch.int64), "a": (TENSORS["a"].t(), torch.float32)}
    digest = write_file(tmp_path / "x", given, {"format": "pt"})
    found = load_file(tmp_path / "x")
    assert digest == file_checksum(tmp_path / "x")
    assert found["h"].dtype == torch.bfloat16 and found["h"].tolist() == [1, 2, 3] and found["i"].item() == 7
    assert torch.equal(found["a"], TENSORS["a"].t())
