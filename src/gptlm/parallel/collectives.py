"""Collectives of tensor parallelism, each with its backward.

Megatron-LM's conjugate pairs (arXiv 1909.08053, section 3; sequence parallelism: arXiv 2205.05198, section 4.2.2).
Sequences lie in dimension 1: (B, T, D).
"""

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from gptlm.upstream.torch import (
    all_gather_into,
    group_of_name,
    reduce_scatter_into,
    traced_all_gather,
    traced_all_reduce,
    traced_reduce_scatter,
    traces_collectives,
)

SEQUENCE = 1
Operation = Callable[[Tensor, Any], Tensor]


class _Collective(torch.autograd.Function):
    """`forward_op(x, group)`, whose backward is `backward_op(gradient, group)`."""

    @staticmethod
    def forward(  # type: ignore[override]
        ctx: Any, x: Tensor, group: Any, forward_op: Operation, backward_op: Operation
    ) -> Tensor:
        ctx.group, ctx.backward_op = group, backward_op
        return forward_op(x, group)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        return ctx.backward_op(gradient, ctx.group), None, None, None


@torch.library.custom_op("gptlm::gathered_weight_gradient", mutates_args=())
def _gathered_weight_gradient(rows: Tensor, x: Tensor, group_name: str) -> Tensor:
    """The weight's gradient of a Linear on a gathered sequence: (BT, out) and (B, T / n, in) -> (out, in).

    One custom operator, because the compiler would merge this all-gather with that of forward and keep its result.
    """
    return rows.t() @ _all_gather(x, group_of_name(group_name)).flatten(0, 1)


@_gathered_weight_gradient.register_fake
def _(rows: Tensor, x: Tensor, group_name: str) -> Tensor:
    return rows.new_empty(rows.shape[1], x.shape[2])


class _GatheredLinear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor, group: Any) -> Tensor:  # type: ignore[override]
        ctx.group = group
        ctx.save_for_backward(x if ctx.needs_input_grad[1] else None, weight)  # a frozen layer needs no `x`
        return F.linear(_all_gather(x, group), weight, bias)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        x, weight = ctx.saved_tensors
        of_x = _reduce_scatter(gradient @ weight, ctx.group)
        if x is None:
            return of_x, None, None, None
        rows = gradient.flatten(0, 1)
        of_weight = _gathered_weight_gradient(rows, x, ctx.group.group_name)
        return of_x, of_weight, rows.sum(0), None


def copy_to_group(x: Tensor, group: Any) -> Tensor:
    """`x` as the input of work that is split over `group`; backward: all-reduce."""
    return _Collective.apply(x, group, _identity, _sum)


def reduce_from_group(x: Tensor, group: Any) -> Tensor:
    """All-reduce of `x`; backward: the identity."""
    return _Collective.apply(x, group, _sum, _identity)


def gather_sequence(x: Tensor, group: Any) -> Tensor:
    """All-gather of a sequence, (B, T / n, D) -> (B, T, D); backward: reduce-scatter."""
    return _Collective.apply(x, group, _all_gather, _reduce_scatter)


def gather_linear(x: Tensor, weight: Tensor, bias: Tensor, group: Any) -> Tensor:
    """`F.linear` of a gathered sequence, (B, T / n, in) -> (B, T, out / n).

    Backward gathers the sequence again, so only 1 / n of it is kept (arXiv 2205.05198, section 4.2.2).
    """
    device = x.device.type
    if torch.is_autocast_enabled(device):  # custom autograd functions are not autocast
        dtype = torch.get_autocast_dtype(device)
        x, weight, bias = x.to(dtype), weight.to(dtype), bias.to(dtype)
    return _GatheredLinear.apply(x, weight, bias, group)


def reduce_scatter_sequence(x: Tensor, group: Any) -> Tensor:
    """Reduce-scatter of a sequence, (B, T, D) -> (B, T / n, D); backward: all-gather."""
    return _Collective.apply(x, group, _reduce_scatter, _all_gather)


def local_part(x: Tensor, group: Any, dim: int) -> Tensor:
    """This process's of n equal parts of `x` along `dim`."""
    return x.chunk(dist.get_world_size(group), dim)[dist.get_rank(group)].contiguous()


def all_reduce(x: Tensor, operation: str, group: Any) -> Tensor:
    """The "sum" or "max" over `group`, without a backward."""
    if traces_collectives():
        return traced_all_reduce(x.contiguous(), operation, group)
    x = x.clone(memory_format=torch.contiguous_format)
    dist.all_reduce(x, op=dist.ReduceOp.MAX if operation == "max" else dist.ReduceOp.SUM, group=group)
    return x


def _identity(x: Tensor, group: Any) -> Tensor:
    return x.view_as(x)


def _sum(x: Tensor, group: Any) -> Tensor:
    return all_reduce(x, "sum", group)


def _all_gather(x: Tensor, group: Any) -> Tensor:
    """(B, T / n, D) -> (B, T, D)."""
    if traces_collectives():
        parts = traced_all_gather(x.contiguous(), group)
    else:
        parts = x.new_empty(dist.get_world_size(group) * x.shape[0], *x.shape[1:])
        all_gather_into(parts, x.contiguous(), group)
    return parts.unflatten(0, (-1, len(x))).transpose(0, 1).flatten(1, 2)


def _reduce_scatter(x: Tensor, group: Any) -> Tensor:
    """(B, T, D) -> (B, T / n, D)."""
    parts = x.unflatten(SEQUENCE, (dist.get_world_size(group), -1)).transpose(0, 1).flatten(0, 1).contiguous()
    if traces_collectives():
        return traced_reduce_scatter(parts, group)
    own = parts.new_empty(x.shape[0], *parts.shape[1:])
    reduce_scatter_into(own, parts, group)
    return own
