"""The decode step of a single row, in five kernels per block instead of eleven."""

from typing import Any

from torch import Tensor, nn

from gptlm.inference.slots import Slots
from gptlm.kernels.compiling import compile_obstacle

WIDEST = 16384  # columns of a matrix that a program can hold


def supports_single_row(network: Any) -> bool:
    """Whether the blocks are plain ones (no adapters, no float8), on a GPU with Triton."""
    if network.device.type != "cuda" or compile_obstacle("cuda"):
        return False
    linears = [linear for block in network.transformer.h for linear in _linears(block)]
    return all(
        type(linear) is nn.Linear and linear.weight.is_contiguous() and linear.in_features <= WIDEST
        for linear in linears
    )


def _linears(block: Any) -> list[Any]:
    return [block.attn.c_attn, block.attn.c_proj, block.mlp.c_fc, block.mlp.c_proj]


def single_row(transformer: Any, ids: Tensor, places: Tensor, cache: Slots) -> Tensor:
    """What `transformer` computes in evaluation mode: (1, 1) ids at `places` -> (1, 1, width)."""
    from gptlm.kernels.vector_linear import vector_linear  # imports Triton

    x = (transformer.wte(ids) + transformer.wpe(places))[0]  # (1, width)
    for block in transformer.h:
        attn, mlp = block.attn, block.mlp
        parts = vector_linear(x, attn.c_attn, norm=block.ln_1).chunk(3, dim=-1)
        q, k, v = (part.unflatten(-1, (1, -1, attn.head_dim)).transpose(1, 2) for part in parts)
        seen = cache.attend(q, k, v, attn.layer).transpose(1, 2).flatten(1)
        x = vector_linear(seen, attn.c_proj, residual=x)
        x = vector_linear(vector_linear(x, mlp.c_fc, norm=block.ln_2, gelu=True), mlp.c_proj, residual=x)
    return transformer.ln_f(x)[None]
