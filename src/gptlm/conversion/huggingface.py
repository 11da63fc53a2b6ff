"""Stock GPT-2 folders, read tensor by tensor and written as sharded safetensors."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from gptlm.conversion.detect import Found
from gptlm.conversion.gpt2_names import WTE, all_names
from gptlm.conversion.safe_pickle import read_torch
from gptlm.conversion.source import GELUS, Asked, Source, check_variants
from gptlm.errors import GptlmError
from gptlm.model.files import read_config, shape_of_config
from gptlm.model.safetensors_io import LazyTensors

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
        self._tensors = _opened(found.files[0])
        self._check_names()
        if asked.vocab_size:
            self.cut_vocabulary(self.shape.vocab_size, None, asked, "")

    def read(self, name: str) -> Tensor:
        stored = name if name in self._tensors else name.removeprefix("transformer.")  # the oldest files lack it
        if stored not in self._tensors:
            raise GptlmError(f"{self.found.folder} lacks {name}; its weights are not whole")
        return self._tensors[stored]

    def _check_names(self) -> None:
        known = set(all_names(self.shape.num_hidden_layers))
        for name in self._tensors:
            full = name if name.startswith("transformer.") or name == HEAD else f"transformer.{name}"
            if full not in known and name != HEAD and not full.endswith((".attn.bias", ".attn.masked_bias")):
                raise GptlmError(f"{self.found.folder} holds {name}, which GPT-2 of {len(known)} tensors does not have")
        if HEAD in self._tensors and not torch.equal(self.read(HEAD), self.read(WTE)):
            raise GptlmError(f"{self.found.folder} is of another network than GPT-2: its head is not the embedding")


def _opened(paths: Sequence[Path]) -> Mapping[str, Tensor]:
    if paths[0].suffix == ".safetensors":
        return LazyTensors(paths)
    tensors: dict[str, Tensor] = {}
    for path in paths:
        content = read_torch(path)
        if not isinstance(content, dict):
            raise GptlmError(f"{path} holds a {type(content).__name__}, expected names and tensors")
        tensors |= content
    return tensors


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
