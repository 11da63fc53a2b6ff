"""The sum of a residual and its layer norm in one pass over memory, and all their gradients in another.

The compiler makes the same pass forward at some widths, but needs three or more for the gradients: one for that of the
sum, and one for each sum over all tokens (the gradients of the norm's weight and bias, and of the branch's bias).
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

WIDEST = 8192  # columns: more do not fit into a program's registers
HALF = (torch.bfloat16, torch.float16)


def residual_norm(x: Tensor, branch: Tensor, branch_bias: Tensor | None, norm: nn.LayerNorm) -> tuple[Tensor, Tensor]:
    """(..., D), (..., D), (D,) -> x + branch + branch_bias, and `norm` of it.

    With half-precision weights on a GPU each direction is one kernel, which rounds the sum once; else plain operators.
    """
    width = x.shape[-1]
    tensors = (x, branch, norm.weight, norm.bias, *(() if branch_bias is None else (branch_bias,)))
    if x.is_cuda and x.dtype in HALF and width <= WIDEST and all(tensor.dtype == x.dtype for tensor in tensors):
        flat = (x.reshape(-1, width), branch.reshape(-1, width))
        total, normed = _ResidualNorm.apply(*flat, branch_bias, norm.weight, norm.bias, norm.eps)
        return total.view(x.shape), normed.view(x.shape)
    total = x + (branch if branch_bias is None else branch + branch_bias)
    return total, norm(total)


class _ResidualNorm(torch.autograd.Function):
    @staticmethod
    def forward(  # type: ignore[override]
        ctx: Any, x: Tensor, branch: Tensor, branch_bias: Tensor | None, weight: Tensor, bias: Tensor, eps: float
    ) -> tuple[Tensor, Tensor]:
        total, normed, mean, scale = summed_and_normed(x, branch, branch_bias, weight, bias, eps)
        ctx.save_for_backward(total, weight, mean, scale)
        ctx.with_bias = branch_bias is not None
        return total, normed

    @staticmethod
    def backward(  # type: ignore[override]
        ctx: Any, total_gradient: Tensor, normed_gradient: Tensor
    ) -> tuple[Tensor | None, ...]:
        gradient, sums = gradients(normed_gradient, total_gradient, *ctx.saved_tensors, ctx.with_bias)
        return gradient, gradient, sums[2] if ctx.with_bias else None, sums[0], sums[1], None


@torch.library.custom_op("gptlm::residual_norm", mutates_args=())
def summed_and_normed(
    x: Tensor, branch: Tensor, branch_bias: Tensor | None, weight: Tensor, bias: Tensor, eps: float
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """(N, D), (N, D), (D,), (D,), (D,) -> the sum and its layer norm (N, D), mean and 1 / deviation of the sum (N,)."""
    if x.is_cuda:
        from gptlm.kernels.residual_norm_kernels import forward  # imports Triton

        return forward(x.contiguous(), branch.contiguous(), branch_bias, weight, bias, eps)
    total, mean, scale = sum_and_statistics(x, branch, branch_bias, eps)
    return total, F.layer_norm(total, weight.shape, weight, bias, eps), mean, scale


def sum_and_statistics(
    x: Tensor, branch: Tensor, branch_bias: Tensor | None, eps: float
) -> tuple[Tensor, Tensor, Tensor]:
    """(N, D), (N, D), (D,) -> the sum (N, D), its mean and 1 / deviation (N,), by plain operators."""
    total = x + (branch if branch_bias is None else branch + branch_bias)
    variance, mean = torch.var_mean(total.to(statistics_type(x)), dim=-1, correction=0)
    return total, mean, torch.rsqrt(variance + eps)


@summed_and_normed.register_fake
def _(
    x: Tensor, branch: Tensor, branch_bias: Tensor | None, weight: Tensor, bias: Tensor, eps: float
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    mean, scale = (x.new_empty(x.shape[0], dtype=statistics_type(x)) for _ in range(2))
    return x.new_empty(x.shape), x.new_empty(x.shape), mean, scale


@torch.library.custom_op("gptlm::residual_norm_gradients", mutates_args=())
def gradients(
    normed_gradient: Tensor,
    total_gradient: Tensor,
    total: Tensor,
    weight: Tensor,
    mean: Tensor,
    scale: Tensor,
    with_bias: bool,
) -> tuple[Tensor, Tensor]:
    """The gradient of the sum's parts (N, D), and those of the norm's weight and bias and of the branch's bias.

    Args:
        normed_gradient, total_gradient: of the two results (N, D).
        total, mean, scale: what `summed_and_normed` returned.

    Returns:
        (N, D) and (3, D), or (2, D) without bias. Ba, Kiros and Hinton 2016, section 3, differentiated.
    """
    if total.is_cuda:
        from gptlm.kernels.residual_norm_kernels import backward  # imports Triton

        return backward(
            normed_gradient.contiguous(), total_gradient.contiguous(), total, weight, mean, scale, with_bias
        )
    outer = normed_gradient.to(scale.dtype)
    normal = (total - mean[:, None]) * scale[:, None]
    inner = outer * weight
    along, constant = ((part).mean(dim=-1, keepdim=True) for part in (inner * normal, inner))
    gradient = ((inner - normal * along - constant) * scale[:, None] + total_gradient).to(total.dtype)
    summed = [outer * normal, outer, *([gradient.to(scale.dtype)] if with_bias else [])]
    return gradient, torch.stack([part.sum(0) for part in summed]).to(weight.dtype)


@gradients.register_fake
def _(
    normed_gradient: Tensor,
    total_gradient: Tensor,
    total: Tensor,
    weight: Tensor,
    mean: Tensor,
    scale: Tensor,
    with_bias: bool,
) -> tuple[Tensor, Tensor]:
    return total.new_empty(total.shape), weight.new_empty(3 if with_bias else 2, *weight.shape)


def statistics_type(x: Tensor) -> torch.dtype:
    """Of mean and deviation: float32, or wider if `x` is."""
    return torch.promote_types(x.dtype, torch.float32)
