"""Methods of PEFT that are replaced. Tried with 0.21.2."""

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from gptlm.upstream.check import Needed, available

_TOKENS = "peft.tuners.trainable_tokens"
TRAINED_ROWS = (
    Needed(_TOKENS, "TrainableTokensLayer.get_merged_weights", ("active_adapters",), uses=("token_indices",)),
    Needed(_TOKENS, "TrainableTokensLayer.forward_adapters", uses=("get_merged_weights",)),
)
ALL = TRAINED_ROWS


def keep_trained_rows(model: Any, adapter: str) -> None:
    """Let embeddings with trained rows keep the ids of these rows on their device.

    PEFT copies them there in each forward pass. That waits for the GPU, and a CUDA graph cannot contain it.

    Args:
        adapter: the only one of `model`.
    """
    from peft.tuners.trainable_tokens import TrainableTokensLayer

    if not available("peft", TRAINED_ROWS, "added tokens cannot be trained with --cuda_graphs"):
        return
    layers: list[Any] = [module for module in model.modules() if isinstance(module, TrainableTokensLayer)]
    for layer in layers:
        layer.register_buffer("trained_rows", torch.tensor(layer.token_indices[adapter]), persistent=False)
        layer.get_merged_weights = partial(_merged, layer, adapter)


def _merged(layer: Any, adapter: str, active_adapters: Sequence[str]) -> Tensor:
    """The whole embedding with its trained rows: `TrainableTokensLayer.get_merged_weights` for one adapter."""
    weight = layer.base_layer.weight
    return weight.index_copy(0, layer.trained_rows, layer.trainable_tokens_delta[adapter].to(weight))
