"""Names a user may give for a model, as a table of sizes; reading the sizes of a folder. No torch here."""

import json
from dataclasses import dataclass
from pathlib import Path

from gptlm.errors import GptlmError


@dataclass(frozen=True)
class Shape:
    """Sizes of a GPT: layers, width, heads, feed-forward width, vocabulary entries, positions."""

    num_hidden_layers: int
    hidden_size: int
    num_attention_heads: int
    intermediate_size: int
    vocab_size: int
    max_position_embeddings: int = 1024


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

# Keys of a config.json: HuggingFace's GPT-2 words, then PaddleNLP's.
CONFIG_KEYS = {
    "num_hidden_layers": ("n_layer", "num_hidden_layers"),
    "hidden_size": ("n_embd", "hidden_size"),
    "num_attention_heads": ("n_head", "num_attention_heads"),
    "intermediate_size": ("n_inner", "intermediate_size"),
    "vocab_size": ("vocab_size",),
    "max_position_embeddings": ("n_positions", "max_position_embeddings"),
}
WEIGHT_FILES = (
    "model.safetensors",
    "model.safetensors.index.json",
    "pytorch_model.bin",
    "pytorch_model.bin.index.json",
)


def read_config(path: Path) -> dict:
    """The JSON object in `path`.

    Raises:
        GptlmError: if the file is missing, is not UTF-8 JSON, or describes another architecture than GPT-2's.
    """
    try:
        config = json.loads(path.read_text(encoding="utf-8-sig"))
    except OSError as error:
        if (path.parent / "adapter_config.json").is_file():
            raise GptlmError(
                f"{path.parent} holds adapters, no model: --lora_path trains and predicts with them, on their base "
                "model, and `gptlm merge-lora` makes a model of the two"
            ) from error
        raise GptlmError(f"cannot read the model config {path}: {error.strerror}") from error
    except (ValueError, RecursionError) as error:
        raise GptlmError(f"the model config {path} is not valid JSON: {error}") from error
    if not isinstance(config, dict):
        raise GptlmError(f"the model config {path} holds no JSON object")
    kind = config.get("model_type", "gpt2")
    if kind not in ("gpt2", "gpt"):
        raise GptlmError(f"the model config {path} has model_type {kind!r}; gptlm trains GPT-2-shaped models (gpt2)")
    return config


def shape_of_config(path: Path) -> Shape:
    """The sizes in a config.json in HuggingFace's or PaddleNLP's words.

    Raises:
        GptlmError: as `read_config`, and if a size is missing or not a positive integer.
    """
    config = read_config(path)
    sizes: dict[str, int] = {}
    for name, keys in CONFIG_KEYS.items():
        value = next((config[key] for key in keys if config.get(key) is not None), None)
        if value is None and name == "intermediate_size" and "hidden_size" in sizes:
            value = 4 * sizes["hidden_size"]  # GPT2Config: n_inner null means 4 x n_embd
        if not isinstance(value, int) or value < 1:
            raise GptlmError(f"the model config {path} has no usable {keys[0]} (found {value!r})")
        sizes[name] = value
    return Shape(**sizes)


def has_weights(folder: Path) -> bool:
    """Whether `folder` holds model weights that `from_pretrained` reads."""
    return any((folder / name).is_file() for name in WEIGHT_FILES)


def tokenizer_size(folder: Path) -> int | None:
    """Number of ids of the tokenizer in `folder` (highest id + 1), or None if its files are not JSON.

    Reads tokenizer.json, else vocab.json, so that the vocabulary is known without importing anything heavy.

    Raises:
        GptlmError: if the file is damaged.
    """
    file = next((path for name in ("tokenizer.json", "vocab.json") if (path := folder / name).is_file()), None)
    if file is None:
        return None
    try:
        content = json.loads(file.read_text(encoding="utf-8-sig"))
        if file.name == "vocab.json":
            return max(content.values(), default=-1) + 1
        vocabulary = content.get("model", {}).get("vocab")
        ids = list(vocabulary.values()) if isinstance(vocabulary, dict) else range(len(vocabulary or ()))
        added = [token["id"] for token in content.get("added_tokens", ())]
        return max([*ids, *added], default=-1) + 1
    except OSError as error:
        raise GptlmError(f"cannot read {file}: {error.strerror}") from error
    except (ValueError, RecursionError, KeyError, TypeError, AttributeError) as error:
        raise GptlmError(f"{file} is damaged ({error}); give a folder with a whole tokenizer") from error
