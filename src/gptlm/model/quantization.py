"""QLoRA (arXiv:2305.14314): the matrices of the frozen model in 4 or 8 bits, by bitsandbytes."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from gptlm.model.adapter_kinds import MATRICES
from gptlm.model.gpt import GPTLMHeadModel

FOUR_BIT_TYPES = ("nf4", "fp4")


def quantize(
    model: GPTLMHeadModel, *, bits: int, dtype: torch.dtype, device: torch.device, kind: str, nested: bool
) -> None:
    """Replace the matrices of each layer by quantized ones on `device`, which have no gradient.

    Args:
        bits: 4 or 8.
        dtype: of the activations.
        kind: of FOUR_BIT_TYPES.
        nested: quantize the scales of 4-bit blocks, too.
    """
    for block in model.transformer.h:
        for name in MATRICES:
            parent, _, child = name.rpartition(".")
            module = block.get_submodule(parent)
            old: Any = getattr(module, child)
            setattr(module, child, _quantized(old.to(dtype), bits, device, kind, nested))


def _quantized(old: nn.Linear, bits: int, device: torch.device, kind: str, nested: bool) -> nn.Module:
    import bitsandbytes as bnb

    sizes = (old.in_features, old.out_features)
    with torch.device("meta"):
        if bits == 4:
            new: Any = bnb.nn.Linear4bit(
                *sizes, compute_dtype=old.weight.dtype, compress_statistics=nested, quant_type=kind
            )
        else:
            new = bnb.nn.Linear8bitLt(*sizes, has_fp16_weights=False)
    weight = old.weight.data
    if bits == 4:
        new.weight = bnb.nn.Params4bit(
            weight, requires_grad=False, compress_statistics=nested, quant_type=kind, module=new
        )
    else:
        new.weight = bnb.nn.Int8Params(weight, requires_grad=False, has_fp16_weights=False)
    new.bias = nn.Parameter(old.bias.data, requires_grad=False)
    return new.to(device)  # which quantizes the weight


@contextmanager
def known_to_peft(model: GPTLMHeadModel, bits: int | None) -> Iterator[None]:
    """PEFT asks the model which kind of layers it has. Others, such as accelerate, would refuse one that says so."""
    flag = f"is_loaded_in_{bits}bit"
    if bits is None:
        yield
        return
    setattr(model, flag, True)
    try:
        yield
    finally:
        delattr(model, flag)
