"""The fingerprint of a model's weights: the same for copies in any form, another after one small update."""

import pytest
import torch
from transformers import AutoModelForCausalLM

from gptlm.model.lora import fingerprint_of


@pytest.fixture
def stock(tiny_model):
    return AutoModelForCausalLM.from_pretrained(tiny_model)


def test_copies_are_the_same_model(tiny_model, stock, tmp_path):
    own = fingerprint_of(tiny_model)
    stock.save_pretrained(tmp_path / "shards", max_shard_size="50KB")
    assert (tmp_path / "shards" / "model.safetensors.index.json").is_file()
    stock.transformer.save_pretrained(tmp_path / "body")  # names without "transformer."
    stock.resize_token_embeddings(600)
    stock.save_pretrained(tmp_path / "rows")
    stock.to(torch.bfloat16).save_pretrained(tmp_path / "half")
    assert own and {fingerprint_of(tmp_path / name) for name in ("shards", "body", "rows", "half")} == {own}


def test_an_update_makes_another(tiny_model, stock, tmp_path):
    """Each weight by a thousandth of itself: a short fine-tuning."""
    with torch.no_grad():
        for weight in stock.parameters():
            weight.mul_(1.001)
    stock.save_pretrained(tmp_path)
    assert fingerprint_of(tmp_path) != fingerprint_of(tiny_model)


def test_no_weights_in_safetensors_have_none(tmp_path):
    assert fingerprint_of(tmp_path) is None
    (tmp_path / "model.safetensors").write_bytes(b"nonsense")
    assert fingerprint_of(tmp_path) is None
