"""Float8 matrix products in the blocks, with scales from bounds: there is no history of values to keep or to save.

A float8 tensor is `values`, and a float32 `scale` with which they are multiplied. Weights and activations are e4m3,
gradients e5m2 (Micikevicius et al. 2022, "FP8 formats for deep learning"). The scale is

    of a weight       the length of its longest row / 448
    of an activation  a bound of its absolute values / 448, which holds for any input (`_scales`)
    of a gradient     its largest absolute value / 57344, or a bound that follows from that of the gradient above it

The bounds of a step cost one pass over the weights, and none over activations. In a small trained model those of
weights and activations are 2 to 8 times the largest value, which loses little: e4m3 is relatively as exact down to
2^-15 of its largest number, e5m2 down to 2^-30.

Weights are rounded once per step. Products need tensors in both orders of memory.
"""

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from gptlm.kernels.float8_operators import (
    LARGEST_WEIGHT,
    WEIGHT,
    activation,
    gelu,
    gelu_gradient,
    gradient,
    product,
    rounded,
    sum_and_norm,
    transpose,
)
from gptlm.kernels.residual_norm import gradients

STEEPEST = 1.13  # the largest derivative of GELU
ALIGNMENT = 16  # bytes, of scales that cuBLAS reads


class Float8Matrix(NamedTuple):
    """The weight of a Linear layer, (N, K).

    Attributes:
        values: (N, K).
        transposed: (K, N).
        scale: float32 scalar.
    """

    values: Tensor
    transposed: Tensor
    scale: Tensor


class Float8Block(NamedTuple):
    """What one block needs: four weights, and float32 scalars.

    Attributes:
        normed_1, attended, normed_2, hidden: scales of the inputs of the four products.
        slope: how many times larger the gradient of GELU's input can be than that of the block's feed-forward result.
    """

    attention: Float8Matrix
    projection: Float8Matrix
    up: Float8Matrix
    down: Float8Matrix
    normed_1: Tensor
    attended: Tensor
    normed_2: Tensor
    hidden: Tensor
    slope: Tensor


class Float8Weights:
    """The weights of `blocks` in float8, rounded anew by `refresh`; each block's are its attribute `float8`."""

    def __init__(self, blocks: Sequence[Any]):
        self._blocks = blocks
        self._scales: Tensor | None = None

    @torch.no_grad()
    def refresh(self) -> None:
        """Round the weights as they are now. Addresses stay: CUDA graphs read them."""
        if self._scales is None:
            place = torch.empty(len(self._blocks), 9, ALIGNMENT // 4, device=self._blocks[0].ln_1.weight.device)
            self._scales = place[:, :, 0]
            for block, scales in zip(self._blocks, self._scales, strict=True):
                matrices = [
                    _empty_matrix(linear, scale) for linear, scale in zip(_linears(block), scales, strict=False)
                ]
                block.float8 = Float8Block(*matrices, *scales[4:])  # type: ignore[arg-type]
        self._scales.copy_(_scales(self._blocks))
        for block in self._blocks:
            for linear, matrix in zip(_linears(block), block.float8, strict=False):
                _round_weight(linear.weight, matrix)


def _linears(block: Any) -> tuple[nn.Linear, nn.Linear, nn.Linear, nn.Linear]:
    return block.attn.c_attn, block.attn.c_proj, block.mlp.c_fc, block.mlp.c_proj


def _empty_matrix(linear: nn.Linear, scale: Tensor) -> Float8Matrix:
    values = torch.empty_like(linear.weight, dtype=WEIGHT, requires_grad=False)
    return Float8Matrix(values, values.new_empty(values.shape[::-1]), scale)


def _round_weight(weight: Tensor, matrix: Float8Matrix) -> None:
    if weight.is_cuda:
        from gptlm.kernels.float8_kernels import cast  # imports Triton

        cast(weight, matrix.scale, matrix.values, matrix.transposed)
        return
    matrix.values.copy_(rounded(weight, matrix.scale, WEIGHT))
    matrix.transposed.copy_(matrix.values.T)


def _scales(blocks: Sequence[Any]) -> Tensor:
    """(blocks, 9): the scales of the weights and of the inputs of the four products, and `slope`, of each block.

    A layer norm's result n has |n| <= sqrt(width) max |weight| + |bias| in the Euclidean norm, and so a product with a
    row w of a matrix has |w n| <= |w| |n| (Cauchy-Schwarz). Attention averages values, dropout divides by 1 - p, and
    GELU makes no value larger. In a product g W each number is at most max |g| times the sum of the lengths of rows.
    """

    def norms(tensors: list[Tensor], order: float) -> Tensor:
        return torch.stack(torch._foreach_norm(tensors, order, dtype=torch.float32))

    width = blocks[0].ln_1.weight.shape[0]
    lengths = [  # of the rows: for each matrix of a block (blocks, rows)
        torch.stack([torch.linalg.vector_norm(linear.weight, dim=1, dtype=torch.float32) for linear in linears])
        for linears in zip(*map(_linears, blocks), strict=True)
    ]
    reach_1, reach_2 = (
        math.sqrt(width) * norms([norm.weight for norm in layer], math.inf) + norms([norm.bias for norm in layer], 2)
        for layer in ([block.ln_1 for block in blocks], [block.ln_2 for block in blocks])
    )
    value_biases = norms([block.attn.c_attn.bias[2 * width :] for block in blocks], math.inf)
    attended = (reach_1 * lengths[0][:, 2 * width :].amax(1) + value_biases) / (1 - blocks[0].attn.dropout)
    hidden = reach_2 * lengths[2].amax(1) + norms([block.mlp.c_fc.bias for block in blocks], math.inf)
    bounds = [*(length.amax(1) for length in lengths), reach_1, attended, reach_2, hidden]
    return torch.stack([*(bound / LARGEST_WEIGHT for bound in bounds), STEEPEST * lengths[3].sum(1)], dim=1)


def normed_linear(
    x: Tensor,
    branch: Tensor,
    branch_bias: Tensor | None,
    norm: nn.LayerNorm,
    linear: nn.Linear,
    matrix: Float8Matrix,
    scale: Tensor,
) -> tuple[Tensor, Tensor]:
    """(..., D), (..., D), (D,) -> x + branch + branch_bias (..., D), and `linear` of its `norm` (..., N).

    Args:
        matrix: the weight of `linear`.
        scale: of the norm's result.
    """
    flat = x.reshape(-1, x.shape[-1]), branch.reshape(-1, x.shape[-1])
    total, out = _NormedLinear.apply(
        *flat, branch_bias, norm.weight, norm.bias, norm.eps, linear.weight, linear.bias, scale, *matrix
    )
    return total.view(x.shape), out.view(*x.shape[:-1], -1)


def linear_without_bias(x: Tensor, weight: Tensor, matrix: Float8Matrix, scale: Tensor) -> Tensor:
    """(..., K) -> x weight^T, (..., N); `scale` is that of `x`."""
    return _Linear.apply(x.reshape(-1, x.shape[-1]), weight, scale, *matrix).view(*x.shape[:-1], -1)


def normed_feed_forward(
    x: Tensor,
    branch: Tensor,
    branch_bias: Tensor | None,
    norm: nn.LayerNorm,
    up: nn.Linear,
    down: nn.Linear,
    block: Float8Block,
) -> tuple[Tensor, Tensor]:
    """(..., D), (..., D), (D,) -> y = x + branch + branch_bias, and GELU(up(norm(y))) times the weight of `down`."""
    flat = x.reshape(-1, x.shape[-1]), branch.reshape(-1, x.shape[-1])
    scales = block.normed_2, block.hidden, block.slope
    total, out = _NormedFeedForward.apply(
        *(*flat, branch_bias, norm.weight, norm.bias, norm.eps, up.weight, up.bias, down.weight),
        *(*scales, *block.up, *block.down),
    )
    return total.view(x.shape), out.view(x.shape)


class _NormedLinear(torch.autograd.Function):
    @staticmethod
    def forward(  # type: ignore[override]
        ctx: Any,
        x: Tensor,
        branch: Tensor,
        branch_bias: Tensor | None,
        norm_weight: Tensor,
        norm_bias: Tensor,
        eps: float,
        weight: Tensor,
        bias: Tensor,
        scale: Tensor,
        values: Tensor,
        transposed: Tensor,
        weight_scale: Tensor,
    ) -> tuple[Tensor, Tensor]:
        total, normed, mean, deviation = sum_and_norm(x, branch, branch_bias, norm_weight, norm_bias, eps, scale)
        out = product(normed, values, scale, weight_scale, bias, _result_type(x), fast=True)
        ctx.with_bias, ctx.weight_type = branch_bias is not None, weight.dtype
        ctx.save_for_backward(
            *(total, norm_weight, mean, deviation, transpose(normed), scale, transposed, weight_scale)
        )
        return total, out

    @staticmethod
    def backward(  # type: ignore[override]
        ctx: Any, total_gradient: Tensor, out_gradient: Tensor
    ) -> tuple[Tensor | None, ...]:
        total, norm_weight, mean, deviation, normed, scale, transposed, weight_scale = ctx.saved_tensors
        outer, outer_transposed, sums, outer_scale = gradient(out_gradient, True)
        dtype = out_gradient.dtype
        inner = product(outer, transposed, outer_scale, weight_scale, None, dtype)
        weight = product(outer_transposed, normed, outer_scale, scale, None, dtype).to(ctx.weight_type)
        before = _before_product(inner, total_gradient, (total, norm_weight, mean, deviation), ctx.with_bias)
        return (*before, weight, sums.to(ctx.weight_type), None, None, None, None)


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(  # type: ignore[override]
        ctx: Any, x: Tensor, weight: Tensor, scale: Tensor, values: Tensor, transposed: Tensor, weight_scale: Tensor
    ) -> Tensor:
        rows, columns = activation(x, scale)
        ctx.weight_type = weight.dtype
        ctx.save_for_backward(columns, scale, transposed, weight_scale)
        return product(rows, values, scale, weight_scale, None, x.dtype, fast=True)

    @staticmethod
    def backward(ctx: Any, out_gradient: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        columns, scale, transposed, weight_scale = ctx.saved_tensors
        outer, outer_transposed, _, outer_scale = gradient(out_gradient, False)
        dtype = out_gradient.dtype
        into = product(outer, transposed, outer_scale, weight_scale, None, dtype)
        weight = product(outer_transposed, columns, outer_scale, scale, None, dtype).to(ctx.weight_type)
        return into, weight, None, None, None, None


class _NormedFeedForward(torch.autograd.Function):
    @staticmethod
    def forward(  # type: ignore[override]
        ctx: Any,
        x: Tensor,
        branch: Tensor,
        branch_bias: Tensor | None,
        norm_weight: Tensor,
        norm_bias: Tensor,
        eps: float,
        up: Tensor,
        up_bias: Tensor,
        down: Tensor,
        scale: Tensor,
        hidden_scale: Tensor,
        slope: Tensor,
        up_values: Tensor,
        up_transposed: Tensor,
        up_scale: Tensor,
        down_values: Tensor,
        down_transposed: Tensor,
        down_scale: Tensor,
    ) -> tuple[Tensor, Tensor]:
        total, normed, mean, deviation = sum_and_norm(x, branch, branch_bias, norm_weight, norm_bias, eps, scale)
        before = product(normed, up_values, scale, up_scale, up_bias, _result_type(x), fast=True)
        hidden, hidden_transposed = gelu(before, hidden_scale)
        out = product(hidden, down_values, hidden_scale, down_scale, None, before.dtype, fast=True)
        ctx.with_bias, ctx.weight_type = branch_bias is not None, up.dtype
        ctx.save_for_backward(
            *(total, norm_weight, mean, deviation, transpose(normed), before, hidden_transposed),
            *(scale, hidden_scale, slope, up_transposed, up_scale, down_transposed, down_scale),
        )
        return total, out

    @staticmethod
    def backward(  # type: ignore[override]
        ctx: Any, total_gradient: Tensor, out_gradient: Tensor
    ) -> tuple[Tensor | None, ...]:
        saved = ctx.saved_tensors  # once: a second access would recompute again
        total, norm_weight, mean, deviation, normed, before, hidden = saved[:7]
        scale, hidden_scale, slope, up_transposed, up_scale, down_transposed, down_scale = saved[7:]
        dtype = out_gradient.dtype
        outer, outer_transposed, _, outer_scale = gradient(out_gradient, False)
        middle = product(outer, down_transposed, outer_scale, down_scale, None, dtype)
        down = product(outer_transposed, hidden, outer_scale, hidden_scale, None, dtype).to(ctx.weight_type)
        middle_scale = outer_scale * slope
        inner, inner_transposed, sums = gelu_gradient(middle, before, middle_scale)
        up = product(inner_transposed, normed, middle_scale, scale, None, dtype).to(ctx.weight_type)
        deepest = product(inner, up_transposed, middle_scale, up_scale, None, dtype)
        found = _before_product(deepest, total_gradient, (total, norm_weight, mean, deviation), ctx.with_bias)
        return (*found, up, sums.to(ctx.weight_type), down, *[None] * 9)


def _before_product(
    normed_gradient: Tensor, total_gradient: Tensor, saved: tuple[Tensor, Tensor, Tensor, Tensor], with_bias: bool
) -> tuple[Tensor | None, ...]:
    """Gradients of `sum_and_norm`'s x, branch, branch_bias, weight and bias of the norm, and None for eps.

    Args:
        saved: total, weight, mean and deviation, as `gradients` takes them.
    """
    into, norms = gradients(normed_gradient, total_gradient, *saved, with_bias)
    return into, into, norms[2] if with_bias else None, norms[0], norms[1], None


def _result_type(x: Tensor) -> torch.dtype:
    """Of a product: half precision on a GPU, also with float32 weights, as under autocast."""
    return torch.bfloat16 if x.is_cuda else x.dtype
