"""Float8 operators: rounding in both orders of memory, products, and what comes before and after them.

On a GPU the passes over memory are the Triton kernels of `float8_kernels`, products are cuBLAS's. On a CPU plain
operators round to float8 and multiply in float32. All are custom operators, which torch.compile does not look into.
"""

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from gptlm.kernels.residual_norm import statistics_type, sum_and_statistics
from gptlm.upstream.torch import float8_product

WEIGHT, GRADIENT = torch.float8_e4m3fn, torch.float8_e5m2
LARGEST_WEIGHT, LARGEST_GRADIENT = torch.finfo(WEIGHT).max, torch.finfo(GRADIENT).max
MULTIPLE = 16  # cuBLAS wants rows of as many bytes
SMALLEST = 1e-30  # a scale of 0 would make 0 / 0


def rounded(x: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    """x / scale in the float8 type `dtype`; what is beyond its range becomes its largest number."""
    largest = torch.finfo(dtype).max
    return (x.float() / scale.clamp(min=SMALLEST)).clamp(-largest, largest).to(dtype)


@torch.library.custom_op("gptlm::float8_product", mutates_args=())
def product(
    a: Tensor, b: Tensor, a_scale: Tensor, b_scale: Tensor, bias: Tensor | None, dtype: torch.dtype, fast: bool = False
) -> Tensor:
    """Float8 (M, K), (N, K) -> a b^T + bias, (M, N).

    Args:
        fast: add in the 14 bits of Hopper's tensor cores; else partial sums are added in float32 (2 % of a step),
            as gradients need it, which are sums over thousands of tokens.
    """
    if a.is_cuda:
        bias = None if bias is None else bias.to(dtype)
        return float8_product(a, b, a_scale, b_scale, bias, dtype, fast=fast)
    total = (a.float() @ b.float().T) * (a_scale * b_scale)
    return (total if bias is None else total + bias).to(dtype)


@product.register_fake
def _(
    a: Tensor, b: Tensor, a_scale: Tensor, b_scale: Tensor, bias: Tensor | None, dtype: torch.dtype, fast: bool = False
) -> Tensor:
    return a.new_empty(a.shape[0], b.shape[0], dtype=dtype)


def _padded(rows: Any) -> Any:
    return (rows + MULTIPLE - 1) // MULTIPLE * MULTIPLE


def _new_pair(x: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Empty float8 tensors of x, (M, N): (M, N) and (N, padded M)."""
    return x.new_empty(x.shape, dtype=dtype), x.new_empty(x.shape[1], _padded(x.shape[0]), dtype=dtype)


def _transposed(values: Tensor) -> Tensor:
    return F.pad(values.view(torch.uint8).T, (0, _padded(len(values)) - len(values))).contiguous().view(values.dtype)


@torch.library.custom_op("gptlm::float8_sum_and_norm", mutates_args=())
def sum_and_norm(
    x: Tensor, branch: Tensor, branch_bias: Tensor | None, weight: Tensor, bias: Tensor, eps: float, scale: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """As `residual_norm.summed_and_normed`, with the norm in float8."""
    if x.is_cuda:
        from gptlm.kernels.residual_norm_kernels import float8_forward  # imports Triton

        return float8_forward(x.contiguous(), branch.contiguous(), branch_bias, weight, bias, eps, scale)
    total, mean, deviation = sum_and_statistics(x, branch, branch_bias, eps)
    normed = (total - mean[:, None]) * deviation[:, None] * weight + bias
    return total, rounded(normed, scale, WEIGHT), mean, deviation


@sum_and_norm.register_fake
def _(
    x: Tensor, branch: Tensor, branch_bias: Tensor | None, weight: Tensor, bias: Tensor, eps: float, scale: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    mean, deviation = (x.new_empty(x.shape[0], dtype=statistics_type(x)) for _ in range(2))
    return x.new_empty(x.shape), x.new_empty(x.shape, dtype=WEIGHT), mean, deviation


@torch.library.custom_op("gptlm::float8_activation", mutates_args=())
def activation(x: Tensor, scale: Tensor) -> tuple[Tensor, Tensor]:
    """(M, N) -> e4m3 (M, N) and (N, padded M)."""
    if x.is_cuda:
        from gptlm.kernels.float8_kernels import cast  # imports Triton

        pair = _new_pair(x, WEIGHT)
        cast(x.contiguous(), scale, *pair)
        return pair
    values = rounded(x, scale, WEIGHT)
    return values, _transposed(values)


@activation.register_fake
def _(x: Tensor, scale: Tensor) -> tuple[Tensor, Tensor]:
    return _new_pair(x, WEIGHT)


@torch.library.custom_op("gptlm::float8_gradient", mutates_args=())
def gradient(x: Tensor, with_sums: bool) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """(M, N) -> e5m2 (M, N) and (N, padded M), the sums of columns (N,) or (0,), the scale."""
    scale = torch.linalg.vector_norm(x, math.inf, dtype=torch.float32) / LARGEST_GRADIENT
    if x.is_cuda:
        from gptlm.kernels.float8_kernels import cast, cast_and_sum  # imports Triton

        pair = _new_pair(x, GRADIENT)
        if with_sums:
            return *pair, cast_and_sum(x.contiguous(), scale, *pair), scale
        cast(x.contiguous(), scale, *pair)
        return *pair, scale.new_empty(0), scale
    values = rounded(x, scale, GRADIENT)
    return values, _transposed(values), x.float().sum(0) if with_sums else scale.new_empty(0), scale


@gradient.register_fake
def _(x: Tensor, with_sums: bool) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    scale = x.new_empty((), dtype=torch.float32)
    return *_new_pair(x, GRADIENT), scale.new_empty(x.shape[1] if with_sums else 0), scale


@torch.library.custom_op("gptlm::float8_gelu", mutates_args=())
def gelu(x: Tensor, scale: Tensor) -> tuple[Tensor, Tensor]:
    """GELU of (M, N) as `activation`."""
    if x.is_cuda:
        from gptlm.kernels import float8_kernels  # imports Triton

        pair = _new_pair(x, WEIGHT)
        float8_kernels.gelu(x.contiguous(), scale, *pair)
        return pair
    values = rounded(F.gelu(x.float(), approximate="tanh"), scale, WEIGHT)
    return values, _transposed(values)


@gelu.register_fake
def _(x: Tensor, scale: Tensor) -> tuple[Tensor, Tensor]:
    return _new_pair(x, WEIGHT)


@torch.library.custom_op("gptlm::float8_gelu_gradient", mutates_args=())
def gelu_gradient(outer: Tensor, x: Tensor, scale: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """outer GELU'(x), all (M, N): e5m2 (M, N) and (N, padded M), and the sums of columns (N,)."""
    if x.is_cuda:
        from gptlm.kernels import float8_kernels  # imports Triton

        pair = _new_pair(x, GRADIENT)
        return *pair, float8_kernels.gelu_gradient(outer.contiguous(), x, scale, *pair)
    found = torch.ops.aten.gelu_backward(outer.float(), x.float(), approximate="tanh")
    values = rounded(found, scale, GRADIENT)
    return values, _transposed(values), found.sum(0)


@gelu_gradient.register_fake
def _(outer: Tensor, x: Tensor, scale: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    return *_new_pair(x, GRADIENT), x.new_empty(x.shape[1], dtype=torch.float32)


@torch.library.custom_op("gptlm::float8_transpose", mutates_args=())
def transpose(values: Tensor) -> Tensor:
    """Float8 (M, N) -> (N, padded M)."""
    if values.is_cuda:
        from gptlm.kernels import float8_kernels  # imports Triton

        out = _new_pair(values, values.dtype)[1]
        float8_kernels.transpose(values, out)
        return out
    return _transposed(values)


@transpose.register_fake
def _(values: Tensor) -> Tensor:
    return _new_pair(values, values.dtype)[1]
