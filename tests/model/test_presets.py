"""The table of built-in names against PaddleNLP's."""

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
