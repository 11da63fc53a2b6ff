"""Compare the logits of a fixed batch before and after a conversion, one layer in memory at a time."""

from pathlib import Path

import torch
from torch import Tensor
from torch.nn import functional as F
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.models.gpt2.modeling_gpt2 import GPT2Block

from gptlm.conversion.gpt2_names import FINAL_NORM, PARTS, WPE, WTE
from gptlm.conversion.source import Source
from gptlm.errors import GptlmError, named
from gptlm.model.build import new_config
from gptlm.model.pretrained import load_pretrained
from gptlm.model.safetensors_io import tensor_shapes, weight_files
from gptlm.upstream.transformers import use_eager_attention

MAX_DIFFERENCE = 1e-3  # of logits: above rounding in float32, far below a wrong tensor layout
LENGTH = 32
ROWS = 4096  # of the embedding in one product, for which it is copied


def fixed_batch(vocabulary: int, positions: int) -> Tensor:
    """(2, T) token ids spread over the whole vocabulary."""
    length = min(LENGTH, positions)
    return (torch.arange(2 * length) * 7919 % vocabulary).reshape(2, length)


@torch.no_grad()
def logits_of(source: Source, ids: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    """Float32 logits (B, T, V) by transformers' GPT-2 layers.

    Args:
        dtype: weights are rounded to it first, as the conversion does; None: not rounded.
    """

    def weight(name: str) -> Tensor:
        tensor = source.get(name)
        return (tensor if dtype is None else tensor.to(dtype)).float()

    config = new_config(source.shape, 0.0, 0.0, None)
    config.activation_function, config.layer_norm_epsilon = source.activation, source.epsilon
    use_eager_attention(config)
    with torch.device("meta"):
        block = GPT2Block(config, layer_idx=0).eval()
    length = ids.shape[1]
    causal_mask = torch.full((length, length), torch.finfo(torch.float32).min).triu(1)[None, None]  # added to scores
    x = F.embedding(ids, weight(WTE)) + weight(WPE)[:length]
    for layer in range(source.shape.num_hidden_layers):
        block.load_state_dict({part: weight(f"transformer.h.{layer}.{part}") for part in PARTS}, assign=True)
        output = block(x, attention_mask=causal_mask)
        x = output[0] if isinstance(output, tuple) else output
    gain, bias = map(weight, FINAL_NORM)
    x = F.layer_norm(x, (source.shape.hidden_size,), gain, bias, source.epsilon)
    return torch.cat([x @ rows.t() for rows in weight(WTE).split(ROWS)], dim=-1)


def check_stock(folder: Path) -> None:
    """Raises GptlmError if the weights in `folder` are not by name and shape those of stock GPT-2 of its config."""
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(load_pretrained(AutoConfig, str(folder)))
    expected = {name: list(weight.shape) for name, weight in model.named_parameters()}
    found = {name: shape for path in weight_files(folder) for name, shape in tensor_shapes(path).items()}
    if found != expected:
        other = next(name for name in {**expected, **found} if found.get(name) != expected.get(name))
        raise GptlmError(
            f"the converted model does not have the weights of GPT-2: {other} is {found.get(other)} instead of "
            f"{expected.get(other)}; do not use the result, and report the checkpoint's format and version"
        )


def max_difference(before: Tensor, after: Tensor) -> float:
    """The largest difference of two batches of logits.

    Raises:
        GptlmError: if it is above `MAX_DIFFERENCE`, or not finite.
    """
    if not (before.isfinite().all() and after.isfinite().all()):
        raise GptlmError(
            f"the logits are not finite: the weights contain NaN or infinity, or {named('dtype')} is too narrow for "
            "them (try bfloat16 or float32)"
        )
    largest = float((before - after).abs().max())
    if not largest <= MAX_DIFFERENCE:
        raise GptlmError(
            f"the converted model computes other logits: they differ by {largest:.2e} (rounding is at most "
            f"{MAX_DIFFERENCE:g}); do not use the result, and report the checkpoint's format and version"
        )
    return largest
