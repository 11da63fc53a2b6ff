"""Names of files and tensors, and what a model's folder tells without torch."""

import json
from pathlib import Path

from gptlm.errors import GptlmError
from gptlm.model.presets import Shape

# Files of a model folder (transformers), of an adapter folder (PEFT), and of a tokenizer (tokenizers, GPT-2, BERT).
CONFIG, GENERATION_CONFIG = "config.json", "generation_config.json"
WEIGHTS, WEIGHTS_INDEX = "model.safetensors", "model.safetensors.index.json"
WEIGHT_FILES = (WEIGHTS, WEIGHTS_INDEX, "pytorch_model.bin", "pytorch_model.bin.index.json")
ADAPTER_CONFIG, ADAPTER_WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
TOKENIZER, TOKENIZER_CONFIG = "tokenizer.json", "tokenizer_config.json"
VOCABULARY, MERGES, WORD_LIST = "vocab.json", "merges.txt", "vocab.txt"

# Tensors. Stock GPT-2 stores these four matrices of a layer as Conv1D, (in, out); nn.Linear has (out, in).
CONV1D_WEIGHTS = ("attn.c_attn.weight", "attn.c_proj.weight", "mlp.c_fc.weight", "mlp.c_proj.weight")
PEFT_PREFIX = "base_model.model."  # before the model's own names in an adapter file

# Keys of a config.json: HuggingFace's GPT-2 words, then PaddleNLP's.
CONFIG_KEYS = {
    "num_hidden_layers": ("n_layer", "num_hidden_layers"),
    "hidden_size": ("n_embd", "hidden_size"),
    "num_attention_heads": ("n_head", "num_attention_heads"),
    "intermediate_size": ("n_inner", "intermediate_size"),
    "vocab_size": ("vocab_size",),
    "max_position_embeddings": ("n_positions", "max_position_embeddings"),
}


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
