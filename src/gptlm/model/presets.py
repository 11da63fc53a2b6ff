"""The built-in model names and their sizes. This module does not import torch."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Shape:
    """Sizes of a GPT: layers, width, heads, feed-forward width, vocabulary entries, positions."""

    num_hidden_layers: int
    hidden_size: int
    num_attention_heads: int
    intermediate_size: int
    vocab_size: int
    max_position_embeddings: int = 1024

    @property
    def weights(self) -> int:
        """Weights of the matrices and embeddings, which are nearly all weights."""
        width = self.hidden_size
        layer = 4 * width * width + 2 * width * self.intermediate_size
        return self.num_hidden_layers * layer + (self.vocab_size + self.max_position_embeddings) * width


@dataclass(frozen=True)
class Preset:
    """A named model: its shape and, where weights were published, their HuggingFace hub id."""

    shape: Shape
    hub_id: str | None = None


GPT2_HUB_ID = "openai-community/gpt2"
GPT2 = Preset(Shape(12, 768, 12, 3072, 50257), GPT2_HUB_ID)
GPT2_MEDIUM = Preset(Shape(24, 1024, 16, 4096, 50257), "openai-community/gpt2-medium")
GPT2_LARGE = Preset(Shape(36, 1280, 20, 5120, 50257), "openai-community/gpt2-large")
GPT2_XL = Preset(Shape(48, 1600, 25, 6400, 50257), "openai-community/gpt2-xl")
GPT3_175B = Preset(Shape(96, 12288, 96, 49152, 51200))

# PaddleNLP's names (transformers/gpt/configuration.py), then HuggingFace's.
PRESETS: dict[str, Preset] = {
    "gpt2-small-en": Preset(Shape(4, 1024, 4, 4096, 50304)),
    "gpt2-en": GPT2,
    "gpt2-medium-en": Preset(Shape(24, 1024, 16, 4096, 50304), "openai-community/gpt2-medium"),
    "gpt2-large-en": GPT2_LARGE,
    "gpt2-xl-en": GPT2_XL,
    "gpt3-1.3B-en": Preset(Shape(24, 2048, 16, 8192, 50304)),
    "gpt3-6.7B-en": Preset(Shape(32, 4096, 32, 16384, 50304)),
    "gpt3-13B-en": Preset(Shape(40, 5120, 40, 20480, 50304)),
    "gpt3-89B-en": Preset(Shape(48, 12288, 96, 49152, 51200)),
    "gpt3-175B-en": GPT3_175B,
    "gpt-cpm-large-cn": Preset(Shape(32, 2560, 32, 10240, 30000), "TsinghuaAI/CPM-Generate"),
    "gpt-cpm-small-cn-distill": Preset(Shape(12, 768, 12, 3072, 30000), "mymusise/CPM-Generate-distill"),
    "gpt2": GPT2,
    "gpt2-medium": GPT2_MEDIUM,
    "gpt2-large": GPT2_LARGE,
    "gpt2-xl": GPT2_XL,
    "distilgpt2": Preset(Shape(6, 768, 12, 3072, 50257), "distilbert/distilgpt2"),
    "openai-community/gpt2": GPT2,
    "openai-community/gpt2-medium": GPT2_MEDIUM,
    "openai-community/gpt2-large": GPT2_LARGE,
    "openai-community/gpt2-xl": GPT2_XL,
    "distilbert/distilgpt2": Preset(Shape(6, 768, 12, 3072, 50257), "distilbert/distilgpt2"),
}

CHINESE = ("gpt-cpm-large-cn", "gpt-cpm-small-cn-distill")
GPT2_VOCABULARY = 50257
