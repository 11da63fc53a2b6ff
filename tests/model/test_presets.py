import json

import pytest

from gptlm.errors import GptlmError
from gptlm.model.files import shape_of_config, tokenizer_size
from gptlm.model.presets import PRESETS, Shape


def test_paddlenlp_s_names_and_sizes():
    """Rows of PaddleNLP's table: vocabulary, width, layers, heads, feed-forward width."""
    rows = {
        "gpt2-small-en": (50304, 1024, 4, 4, 4096),
        "gpt2-en": (50257, 768, 12, 12, 3072),
        "gpt2-medium-en": (50304, 1024, 24, 16, 4096),
        "gpt2-large-en": (50257, 1280, 36, 20, 5120),
        "gpt2-xl-en": (50257, 1600, 48, 25, 6400),
        "gpt3-1.3B-en": (50304, 2048, 24, 16, 8192),
        "gpt3-6.7B-en": (50304, 4096, 32, 32, 16384),
        "gpt3-13B-en": (50304, 5120, 40, 40, 20480),
        "gpt3-89B-en": (51200, 12288, 48, 96, 49152),
        "gpt3-175B-en": (51200, 12288, 96, 96, 49152),
        "gpt-cpm-large-cn": (30000, 2560, 32, 32, 10240),
        "gpt-cpm-small-cn-distill": (30000, 768, 12, 12, 3072),
    }
    for name, (vocabulary, width, layers, heads, inner) in rows.items():
        assert PRESETS[name].shape == Shape(layers, width, heads, inner, vocabulary, 1024)
        assert (PRESETS[name].hub_id is None) == (name.startswith("gpt3") or name == "gpt2-small-en")


def test_a_config_in_paddlenlp_s_words(tmp_path):
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
