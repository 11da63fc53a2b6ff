"""Logits of a fixed batch before and after a conversion, layer by layer through stock transformers' GPT-2."""

from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import AutoModelForCausalLM
from transformers.models.gpt2.modeling_gpt2 import GPT2Block

from gptlm.conversion.gpt2_names import LAST, PARTS, WPE, WTE
from gptlm.conversion.source import Source
from gptlm.errors import GptlmError
from gptlm.model.build import new_config
from gptlm.upstream.transformers import use_eager_attention

LIMIT = 1e-3
LENGTH = 32


def fixed_batch(vocabulary: int, positions: int) -> Tensor:
    """(2, T) token ids that reach over the whole vocabulary."""
    length = min(LENGTH, positions)
    return (torch.arange(2 * length) * 7919 % vocabulary).reshape(2, length)


@torch.no_grad()
def logits_of(source: Source, ids: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    """Float32 logits (B, T, V), with one layer's weights in memory at a time.

    Args:
        dtype: weights are rounded to it first, as the conversion does; None: they are not.
    """

    def value(name: str) -> Tensor:
        tensor = source.get(name)
        return (tensor if dtype is None else tensor.to(dtype)).float()

    shape = source.shape
    x = F.embedding(ids, value(WTE)) + value(WPE)[: ids.shape[1]]
    block = stock_block(source)
    for layer in range(shape.num_hidden_layers):
        block.load_state_dict({part: value(f"transformer.h.{layer}.{part}") for part in PARTS}, assign=True)
        out = block(x, attention_mask=causal_mask(ids.shape[1]))
        x = out[0] if isinstance(out, tuple) else out
    x = F.layer_norm(x, (shape.hidden_size,), value(LAST[0]), value(LAST[1]), source.epsilon)
    return x @ value(WTE).t()


def stock_block(source: Source) -> nn.Module:
    """A layer of transformers' GPT-2 without weights."""
    config = new_config(source.shape, 0.0, 0.0, None)
    config.activation_function, config.layer_norm_epsilon = source.activation, source.epsilon
    use_eager_attention(config)
    with torch.device("meta"):
        return GPT2Block(config, layer_idx=0).eval()


def causal_mask(length: int) -> Tensor:
    """(1, 1, T, T), to be added to the scores."""
    return torch.full((length, length), torch.finfo(torch.float32).min).triu(1)[None, None]


@torch.no_grad()
def logits_of_folder(folder: Path, ids: Tensor) -> Tensor:
    """Float32 logits of a stock GPT-2 folder as transformers loads it."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    return model(ids).logits


def difference(before: Tensor, after: Tensor) -> float:
    """The largest difference of two batches of logits.

    Raises:
        GptlmError: if it is over `LIMIT`, or no number.
    """
    if not (before.isfinite().all() and after.isfinite().all()):
        raise GptlmError(
            "the logits are not finite: the weights hold NaN or infinity, or --dtype is too narrow for them (try "
            "bfloat16 or float32)"
        )
    largest = float((before - after).abs().max())
    if not largest <= LIMIT:
        raise GptlmError(
            f"the converted model computes other logits: they differ by {largest:.2e} (at most {LIMIT:g} is rounding); "
            "the result is not to be used; please report the checkpoint's kind and version"
        )
    return largest
