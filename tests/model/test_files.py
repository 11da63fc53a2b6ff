"""Sizes read from config.json and tokenizer files, and files that are damaged."""

import json

import pytest

from gptlm.errors import GptlmError
from gptlm.model.files import shape_of_config, tokenizer_size
from gptlm.model.presets import Shape


def test_a_config_with_paddlenlp_s_keys(tmp_path):
    sizes = {
        "num_hidden_layers": 2, "hidden_size": 8, "num_attention_heads": 2, "vocab_size": 9,
        "max_position_embeddings": 16, "intermediate_size": 20,
    }  # fmt: skip
    (tmp_path / "c.json").write_text(json.dumps(sizes))
    assert shape_of_config(tmp_path / "c.json") == Shape(2, 8, 2, 20, 9, 16)


@pytest.mark.parametrize(
    ("content", "says"),
    [
        ("{", "not valid JSON"),
        ("[1]", "no JSON object"),
        ('{"model_type": "llama"}', "llama"),
        ('{"n_layer": 2, "n_embd": 8}', "n_head"),
        ('{"n_layer": "two"}', "n_layer"),
    ],
)
def test_bad_configs(tmp_path, content, says):
    (tmp_path / "c.json").write_text(content)
    with pytest.raises(GptlmError, match=says):
        shape_of_config(tmp_path / "c.json")


def test_tokenizer_size(tmp_path):
    assert tokenizer_size(tmp_path) is None
    (tmp_path / "vocab.json").write_text('{"a": 0, "b": 7}')
    assert tokenizer_size(tmp_path) == 8
    (tmp_path / "tokenizer.json").write_text('{"model": {"vocab": {"a": 0}}, "added_tokens": [{"id": 3}]}')
    assert tokenizer_size(tmp_path) == 4


@pytest.mark.parametrize("value", [True, 0, -1, 2**31, 10**400, 1.0, "2", [2], None])
@pytest.mark.parametrize("name", ["vocab_size", "n_positions", "n_layer", "n_embd"])
def test_sizes_that_no_model_has(tmp_path, name, value):
    sizes = {"vocab_size": 9, "n_positions": 8, "n_layer": 2, "n_embd": 8, "n_head": 2}
    (tmp_path / "config.json").write_text(json.dumps({**sizes, name: value}))
    with pytest.raises(GptlmError, match=f"has no usable {name}"):
        shape_of_config(tmp_path / "config.json")
