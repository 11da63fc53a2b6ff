"""Stock GPT-2 folders, read tensor by tensor and written as sharded safetensors."""

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from gptlm.conversion.detect import Found
from gptlm.conversion.gpt2_names import WTE, all_names
from gptlm.conversion.safe_pickle import read_torch
from gptlm.conversion.source import GELUS, Asked, Source, check_variants
from gptlm.disk import apply_umask
from gptlm.errors import GptlmError
from gptlm.model.files import WEIGHTS, WEIGHTS_INDEX, check_safetensors, read_config, shape_of_config

SHARD_BYTES = 1 << 30
HEAD = "lm_head.weight"
VARIANTS: dict[str, tuple[tuple[object, ...], str]] = {
    "activation_function": ((None, *GELUS), "another activation"),
    "tie_word_embeddings": ((None, True), "a head that is not the embedding (untied)"),
    "scale_attn_weights": ((None, True), "attention without 1 / sqrt(size)"),
    "scale_attn_by_inverse_layer_idx": ((None, False), "attention scaled by layer"),
    "add_cross_attention": ((None, False), "cross-attention"),
}


class HuggingFaceSource(Source):
    """See the module.

    Raises:
        GptlmError: if files are missing or damaged, or tensors are missing or unknown.
    """

    def __init__(self, found: Found, asked: Asked):
        super().__init__(found)
        config = found.folder / "config.json"
        self.arguments = read_config(config)
        check_variants(self.arguments, VARIANTS, found.folder)
        self.shape = shape_of_config(config)
        self.activation = self.arguments.get("activation_function") or "gelu_new"
        self.epsilon = float(self.arguments.get("layer_norm_epsilon", 1e-5))
        self.dropouts = tuple(float(self.arguments.get(key, 0.1)) for key in ("resid_pdrop", "attn_pdrop"))  # type: ignore[assignment]
        self._files = {name: file for path in found.files[0] for name, file in _opened(path).items()}
        self._check_names()
        if asked.vocab_size:
            self.cut_vocabulary(self.shape.vocab_size, None, asked, "")

    def read(self, name: str) -> Tensor:
        stored = name if name in self._files else name.removeprefix("transformer.")  # the oldest files lack it
        if stored not in self._files:
            raise GptlmError(f"{self.found.folder} lacks {name}; its weights are not whole")
        file = self._files[stored]
        return file[stored] if isinstance(file, dict) else file.get_tensor(stored)

    def _check_names(self) -> None:
        known = set(all_names(self.shape.num_hidden_layers))
        for name in self._files:
            full = name if name.startswith("transformer.") or name == HEAD else f"transformer.{name}"
            if full not in known and name != HEAD and not full.endswith((".attn.bias", ".attn.masked_bias")):
                raise GptlmError(f"{self.found.folder} holds {name}, which GPT-2 of {len(known)} tensors does not have")
        if HEAD in self._files and not torch.equal(self.read(HEAD), self.read(WTE)):
            raise GptlmError(f"{self.found.folder} is of another network than GPT-2: its head is not the embedding")


def _opened(path: Path) -> dict[str, Any]:
    """Tensor names -> the open file that holds them."""
    if path.suffix != ".safetensors":
        content = read_torch(path)
        if not isinstance(content, dict):
            raise GptlmError(f"{path} holds a {type(content).__name__}, expected names and tensors")
        return dict.fromkeys(content, content)
    check_safetensors(path)
    file: Any = safe_open(path, "pt")
    return dict.fromkeys(file.keys(), file)


def config_of(source: Source, dtype: torch.dtype, eos_token_id: int | None) -> dict[str, Any]:
    """The config.json of stock GPT-2 for `source`."""
    shape = source.shape
    hidden, attention = source.dropouts
    return {
        "architectures": ["GPT2LMHeadModel"],
        "model_type": "gpt2",
        "activation_function": source.activation,
        "n_layer": shape.num_hidden_layers,
        "n_embd": shape.hidden_size,
        "n_head": shape.num_attention_heads,
        "n_inner": shape.intermediate_size,
        "vocab_size": shape.vocab_size,
        "n_positions": shape.max_position_embeddings,
        "layer_norm_epsilon": source.epsilon,
        "embd_pdrop": hidden,
        "resid_pdrop": hidden,
        "attn_pdrop": attention,
        "tie_word_embeddings": True,
        "bos_token_id": eos_token_id,
        "eos_token_id": eos_token_id,
        "dtype": str(dtype).removeprefix("torch."),
    }


def write_weights(folder: Path, weights: Iterable[tuple[str, Tensor]], *, form: str = "pt") -> None:
    """`weights` as they come, in safetensors of `SHARD_BYTES` at most (or one tensor), with an index if several.

    Args:
        form: the word for the library in the files' metadata.
    """
    pending: dict[str, Tensor] = {}
    files: list[list[str]] = []
    size = total = 0
    for name, tensor in weights:
        bytes_of = tensor.numel() * tensor.element_size()
        if pending and size + bytes_of > SHARD_BYTES:
            files.append(_save(folder / f".part-{len(files)}", pending, form))
            pending, size = {}, 0
        pending[name] = tensor
        size, total = size + bytes_of, total + bytes_of
    files.append(_save(folder / f".part-{len(files)}", pending, form))
    places = {}
    for number, names in enumerate(files):
        several = f"model-{number + 1:05d}-of-{len(files):05d}.safetensors"
        final = WEIGHTS if len(files) == 1 else several
        (folder / f".part-{number}").rename(folder / final)
        places.update(dict.fromkeys(names, final))
    if len(files) > 1:
        index = {"metadata": {"total_size": total}, "weight_map": places}
        (folder / WEIGHTS_INDEX).write_text(json.dumps(index, indent=1) + "\n", encoding="utf-8")


def _save(path: Path, tensors: dict[str, Tensor], form: str) -> list[str]:
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, path, {"format": form})
    apply_umask(path)
    return list(tensors)
