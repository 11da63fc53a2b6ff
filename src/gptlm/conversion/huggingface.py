"""Stock GPT-2 folders of transformers: the reader, and config.json for the writer."""

from collections.abc import Iterator, Mapping
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from gptlm.conversion.detect import Found
from gptlm.conversion.gpt2_names import WTE, all_names
from gptlm.conversion.source import Progress, ReadOptions, Source, check_variants
from gptlm.conversion.trainer_checkpoint import TrainerCheckpoint
from gptlm.errors import GptlmError
from gptlm.model.files import CONFIG, read_config, shape_of_config
from gptlm.model.safetensors_io import LazyTensors
from gptlm.model.shards import StockWeights
from gptlm.model.shards_index import is_sharded
from gptlm.pickles.torch_file import read_torch

HEAD = "lm_head.weight"
# Key of config.json -> (values that this package can compute, what any other means). The first three GELUs are equal.
VARIANTS: dict[str, tuple[tuple[object, ...], str]] = {
    "activation_function": (
        (None, "gelu_new", "gelu_pytorch_tanh", "gelu_fast", "gelu"),
        "another activation function",
    ),
    "tie_word_embeddings": ((None, True), "an output head that is not the embedding (untied)"),
    "scale_attn_weights": ((None, True), "attention without 1 / sqrt(head size)"),
    "scale_attn_by_inverse_layer_idx": ((None, False), "attention scaled by layer"),
    "add_cross_attention": ((None, False), "cross-attention"),
}


class HuggingFaceSource(Source):
    """A folder with safetensors or pytorch_model.bin, or a sharded checkpoint of gptlm.

    Raises:
        GptlmError: if files are missing or damaged, or tensors are missing or unknown.
    """

    def __init__(self, found: Found, options: ReadOptions):
        super().__init__(found)
        self.arguments = read_config(found.folder / CONFIG)
        check_variants(self.arguments, VARIANTS, found.folder)
        self.shape = shape_of_config(found.folder / CONFIG)
        self.activation = self.arguments.get("activation_function") or "gelu_new"
        self.epsilon = float(self.arguments.get("layer_norm_epsilon", 1e-5))
        hidden, attention = (float(self.arguments.get(key, 0.1)) for key in ("resid_pdrop", "attn_pdrop"))
        self.dropouts = (hidden, attention)
        self.tensors = StockWeights(found.folder) if is_sharded(found.folder) else _tensors_in(found.files[0])
        self._check_names()
        if options.vocab_size:
            self.set_vocabulary(self.shape.vocab_size, None, options, "")

    def read(self, name: str) -> Tensor:
        stored = name if name in self.tensors else name.removeprefix("transformer.")  # as in the oldest files
        if stored not in self.tensors:
            raise GptlmError(f"{self.found.folder} lacks {name}; copy it again")
        return self.tensors[stored]

    def progress(self) -> Progress:
        return self._trainer.progress()

    def optimizer_state(self) -> Iterator[tuple[str, str, Tensor]]:
        yield from self._trainer.moments()

    @cached_property
    def _trainer(self) -> TrainerCheckpoint:
        return TrainerCheckpoint(self.found.folder, self.shape)

    def _check_names(self) -> None:
        known = {HEAD, *all_names(self.shape.num_hidden_layers)}
        for name in self.tensors:
            full = name if name.startswith("transformer.") or name == HEAD else f"transformer.{name}"
            # causal masks, which older versions saved as buffers
            if full not in known and not full.endswith((".attn.bias", ".attn.masked_bias")):
                raise GptlmError(
                    f"{self.found.folder} contains {name}, which GPT-2 with {self.shape.num_hidden_layers} layers "
                    "does not have"
                )
        if HEAD in self.tensors and not torch.equal(self.read(HEAD), self.read(WTE)):
            raise GptlmError(f"{self.found.folder} is not GPT-2: its output head is not the embedding (untied)")


def _tensors_in(paths: tuple[Path, ...]) -> Mapping[str, Tensor]:
    if paths[0].suffix == ".safetensors":
        return LazyTensors(paths)
    tensors: dict[str, Tensor] = {}
    for path in paths:
        content = read_torch(path)
        if not isinstance(content, dict):
            raise GptlmError(f"{path} contains a {type(content).__name__}, expected names and tensors")
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
