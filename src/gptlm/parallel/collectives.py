"""What tensor-parallel processes tell each other, each with its backward.

Megatron-LM's conjugate pairs (arXiv 1909.08053, section 3; sequence parallelism: arXiv 2205.05198, section 4.2.2).
Sequences lie in dimension 1: (B, T, D).
"""

from typing import Any

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional  # can be compiled; slow where nothing is
import torch.nn.functional as F
from torch import Tensor

SEQUENCE = 1

# torch 2.13 has new names for the two
_all_gather = getattr(functional, "all_gather_single", functional.all_gather_tensor)
_reduce_scatter = getattr(functional, "reduce_scatter_single", functional.reduce_scatter_tensor)


class _Copy(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x: Tensor, group: Any) -> Tensor:  # type: ignore[override]
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    def backward(ctx, gradient: Tensor):  # type: ignore[override]
        return _sum(gradient, ctx.group), None


class _Sum(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x: Tensor, group: Any) -> Tensor:  # type: ignore[override]
        return _sum(x, group)

    @staticmethod
    def backward(ctx, gradient: Tensor):  # type: ignore[override]
        return gradient, None


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x: Tensor, group: Any) -> Tensor:  # type: ignore[override]
        ctx.group = group
        return _joined(x, group)

    @staticmethod
    def backward(ctx, gradient: Tensor):  # type: ignore[override]
        return _sum_and_part(gradient, ctx.group), None


class _SumAndScatter(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x: Tensor, group: Any) -> Tensor:  # type: ignore[override]
        ctx.group = group
        return _sum_and_part(x, group)

    @staticmethod
    def backward(ctx, gradient: Tensor):  # type: ignore[override]
        return _joined(gradient, ctx.group), None


@torch.library.custom_op("gptlm::gathered_product", mutates_args=())
def _gathered_product(rows: Tensor, x: Tensor, group_name: str) -> Tensor:
    """The gradient of a weight, (BT, out) and (B, T / n, in) -> (out, in), of a Linear of joined parts.

    One operation to the compiler, which would take a second gathering of `x` for the first one's, and keep that.
    """
    group = dist.distributed_c10d._resolve_process_group(group_name)  # type: ignore[arg-type]
    return rows.t() @ _joined(x, group).flatten(0, 1)


@_gathered_product.register_fake
def _(rows: Tensor, x: Tensor, group_name: str) -> Tensor:
    return rows.new_empty(rows.shape[1], x.shape[2])


class _GatheredLinear(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x: Tensor, weight: Tensor, bias: Tensor, group: Any) -> Tensor:  # type: ignore[override]
        ctx.group = group
        ctx.save_for_backward(x, weight)
        return F.linear(_joined(x, group), weight, bias)

    @staticmethod
    def backward(ctx, gradient: Tensor):  # type: ignore[override]
        x, weight = ctx.saved_tensors
        rows = gradient.flatten(0, 1)
        of_weight = _gathered_product(rows, x, ctx.group.group_name)
        return _sum_and_part(gradient @ weight, ctx.group), of_weight, rows.sum(0), None


def copy(x: Tensor, group: Any) -> Tensor:
    """`x` for work that is split over `group`; backward: the sum of the gradients."""
    return _Copy.apply(x, group)


def summed(x: Tensor, group: Any) -> Tensor:
    """The sum of `x` over `group`; backward: the gradient as it is."""
    return _Sum.apply(x, group)


def gathered(x: Tensor, group: Any) -> Tensor:
    """Parts of a sequence (B, T / n, D) joined to (B, T, D) for split work; backward: a part of the summed gradient."""
    return _Gather.apply(x, group)


def gathered_linear(x: Tensor, weight: Tensor, bias: Tensor, group: Any) -> Tensor:
    """`F.linear` of the joined parts of a sequence, (B, T / n, in) -> (B, T, out / n).

    The parts are kept for the backward pass and joined again there: a share of the memory for one more exchange.
    """
    kind = x.device.type
    if torch.is_autocast_enabled(kind):
        half = torch.get_autocast_dtype(kind)
        x, weight, bias = x.to(half), weight.to(half), bias.to(half)
    return _GatheredLinear.apply(x, weight, bias, group)


def summed_and_scattered(x: Tensor, group: Any) -> Tensor:
    """This process's part of the sequence, (B, T / n, D), of the sum over `group` of (B, T, D); backward: joined."""
    return _SumAndScatter.apply(x, group)


def part(x: Tensor, group: Any, dim: int) -> Tensor:
    """This process's of n equal parts of `x` along `dim`."""
    return x.chunk(dist.get_world_size(group), dim)[dist.get_rank(group)].contiguous()


def combined(x: Tensor, operation: str, group: Any) -> Tensor:
    """The "sum" or "max" over `group`, without a backward."""
    if torch.compiler.is_compiling():
        return functional.wait_tensor(functional.all_reduce(x.contiguous(), operation, group))
    x = x.clone(memory_format=torch.contiguous_format)
    dist.all_reduce(x, op=dist.ReduceOp.MAX if operation == "max" else dist.ReduceOp.SUM, group=group)
    return x


def _sum(x: Tensor, group: Any) -> Tensor:
    return combined(x, "sum", group)


def _joined(x: Tensor, group: Any) -> Tensor:
    """(B, T / n, D) -> (B, T, D)."""
    if torch.compiler.is_compiling():
        parts = _all_gather(x.contiguous(), 0, group)
    else:
        parts = x.new_empty(dist.get_world_size(group) * x.shape[0], *x.shape[1:])
        dist.all_gather_into_tensor(parts, x.contiguous(), group=group)
    return parts.unflatten(0, (-1, len(x))).transpose(0, 1).flatten(1, 2)


def _sum_and_part(x: Tensor, group: Any) -> Tensor:
    """(B, T, D) -> (B, T / n, D)."""
    parts = x.unflatten(SEQUENCE, (dist.get_world_size(group), -1)).transpose(0, 1).flatten(0, 1).contiguous()
    if torch.compiler.is_compiling():
        return _reduce_scatter(parts, "sum", 0, group)
    own = parts.new_empty(x.shape[0], *parts.shape[1:])
    dist.reduce_scatter_tensor(own, parts, group=group)
    return own
