"""Names of files and tensors, and what the files of a model folder say. This module does not import torch."""

from pathlib import Path
from typing import Any

from gptlm.disk import read_file
from gptlm.errors import GptlmError, named
from gptlm.json_text import parse_json
from gptlm.model.presets import Shape

# Files of a model folder (transformers), of an adapter folder (PEFT), and of a tokenizer (tokenizers, GPT-2, BERT).
CONFIG, GENERATION_CONFIG = "config.json", "generation_config.json"
WEIGHTS, WEIGHTS_INDEX = "model.safetensors", "model.safetensors.index.json"
SHARDS_INDEX = "shards.json"  # of a sharded checkpoint of gptlm
WEIGHT_FILES = (WEIGHTS, WEIGHTS_INDEX, "pytorch_model.bin", "pytorch_model.bin.index.json", SHARDS_INDEX)
ADAPTER_CONFIG, ADAPTER_WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
TOKENIZER, TOKENIZER_CONFIG = "tokenizer.json", "tokenizer_config.json"
VOCABULARY, MERGES, WORD_LIST = "vocab.json", "merges.txt", "vocab.txt"

# Tensors. Stock GPT-2 stores these four matrices of a layer as Conv1D, (in, out); nn.Linear has (out, in).
CONV1D_WEIGHTS = ("attn.c_attn.weight", "attn.c_proj.weight", "mlp.c_fc.weight", "mlp.c_proj.weight")
PEFT_PREFIX = "base_model.model."  # before the model's own names in an adapter file

# Keys of a config.json: HuggingFace's for GPT-2, then PaddleNLP's.
CONFIG_KEYS = {
    "num_hidden_layers": ("n_layer", "num_hidden_layers"),
    "hidden_size": ("n_embd", "hidden_size"),
    "num_attention_heads": ("n_head", "num_attention_heads"),
    "intermediate_size": ("n_inner", "intermediate_size"),
    "vocab_size": ("vocab_size",),
    "max_position_embeddings": ("n_positions", "max_position_embeddings"),
}


LARGEST_SIZE = 2**31 - 1
LARGEST = {"num_hidden_layers": 10_000}  # building a model of more takes hours


def read_json(path: Path, what: str = "", remedy: str = "copy the folder again") -> dict[str, Any]:
    """The JSON object in `path`.

    Args:
        what: begins the description of the file in a message, such as "the vocabulary ".
        remedy: what to do about a damaged file.

    Raises:
        GptlmError: if the file cannot be read or holds no JSON object.
    """
    try:
        content = parse_json(read_file(path).decode("utf-8-sig"))
    except OSError as error:
        raise GptlmError(f"cannot read {what}{path}: {error.strerror}") from error
    except ValueError as error:
        raise GptlmError(f"{what}{path} is damaged: not valid JSON ({error}); {remedy}") from error
    if not isinstance(content, dict):
        raise GptlmError(f"{what}{path} is damaged: it holds no JSON object; {remedy}")
    return content


def read_config(path: Path) -> dict[str, Any]:
    """The config.json in `path`.

    Raises:
        GptlmError: as `read_json`, and if it describes another architecture than GPT-2's.
    """
    if not path.is_file() and (path.parent / ADAPTER_CONFIG).is_file():
        raise GptlmError(adapters_alone(path.parent))
    runs = [folder for folder in path.parent.glob("checkpoint-*") if (folder / CONFIG).is_file()]
    if not path.is_file() and runs:
        newest = max(runs, key=lambda folder: folder.stat().st_mtime_ns)
        raise GptlmError(
            f"{path.parent} holds checkpoints, but no model of its own; give one of them, such as {newest}"
        )
    config = read_json(path, "the model config ")
    kind = config.get("model_type", "gpt2")
    if kind not in ("gpt2", "gpt"):
        raise GptlmError(f"the model config {path} has model_type {kind!r}; gptlm trains GPT-2-shaped models (gpt2)")
    return config


def adapters_alone(name: str | Path) -> str:
    """The message that adapters are given as a model."""
    return (
        f"{name} holds adapters, no model: {named('lora_path')} trains and predicts with them, on their base model, "
        "and `gptlm merge-lora` makes a model of the two"
    )


def shape_of_config(path: Path) -> Shape:
    """The sizes in a config.json with HuggingFace's or PaddleNLP's keys.

    Raises:
        GptlmError: as `read_config`, and if a size is missing or not a positive integer.
    """
    config = read_config(path)
    sizes: dict[str, int] = {}
    for name, keys in CONFIG_KEYS.items():
        value = next((config[key] for key in keys if config.get(key) is not None), None)
        if value is None and name == "intermediate_size" and "hidden_size" in sizes:
            value = 4 * sizes["hidden_size"]  # GPT2Config: n_inner null means 4 x n_embd
        if not isinstance(value, int) or isinstance(value, bool) or not 1 <= value <= LARGEST.get(name, LARGEST_SIZE):
            raise GptlmError(f"the model config {path} has no usable {keys[0]} (found {f'{value!r}':.40})")
        sizes[name] = value
    return Shape(**sizes)


def has_weights(folder: Path) -> bool:
    """Whether `folder` holds model weights that `from_pretrained` reads."""
    return any((folder / name).is_file() for name in WEIGHT_FILES)


def has_tokenizer(folder: Path) -> bool:
    """Whether `folder` holds a tokenizer, complete or not."""
    return any((folder / name).is_file() for name in (TOKENIZER, VOCABULARY, WORD_LIST))


def tokenizer_size(folder: Path) -> int | None:
    """Highest id of the tokenizer in `folder` + 1, or None if it has neither tokenizer.json nor vocab.json.

    Reads the files itself: the command line needs the size before it imports transformers.

    Raises:
        GptlmError: if the file is damaged.
    """
    file = next((path for name in (TOKENIZER, VOCABULARY) if (path := folder / name).is_file()), None)
    if file is None:
        return None
    remedy = "give a folder with a whole tokenizer"
    content = read_json(file, remedy=remedy)
    try:
        if file.name == VOCABULARY:
            return max(content.values(), default=-1) + 1
        vocabulary = content.get("model", {}).get("vocab")
        ids = list(vocabulary.values()) if isinstance(vocabulary, dict) else range(len(vocabulary or ()))
        added = [token["id"] for token in content.get("added_tokens", ())]
        return max([*ids, *added], default=-1) + 1
    except (KeyError, TypeError, AttributeError) as error:
        raise GptlmError(f"{file} is damaged ({error}); {remedy}") from error
