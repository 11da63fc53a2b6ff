"""Flat gradient sync: one reduce-scatter per parameter group after backward, for ZeRO stage 1 and 2."""

from functools import cached_property
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from gptlm.upstream.deepspeed import remove_gradient_hooks, replace_norm, sum_over_model_parallel
from gptlm.upstream.torch import reduce_scatter_into


class FlatGradSync:
    """Reduces the gradients of a step after backward, in place of DeepSpeed's hooks during it.

    DeepSpeed runs a hook, copies, a check and a norm for each parameter: 90 ms a step on two H200 at 345M, more than
    forward and backward. Here the gradients of a parameter group are one flat tensor, and one reduce-scatter gives
    each process its shard. DeepSpeed updates the shard and gathers the weights as before.

    Memory: 2 bytes per parameter for all gradients, twice that while they are flattened after backward, when no
    activations are left. DeepSpeed's stage 2 holds a shard of them only.

    Args:
        engine: DeepSpeed's, of stage 1 or 2 with half-precision weights.
        in_float32: accumulate the gradients of the micro-batches in float32.

    Attributes:
        weights: of all parameter groups, in DeepSpeed's order.
    """

    def __init__(self, engine: Any, *, in_float32: bool = False):
        self.engine, self.optimizer = engine, engine.optimizer
        self.weights = [weight for group in self.optimizer.bit16_groups for weight in group]
        remove_gradient_hooks(self.optimizer, self.weights)
        replace_norm(self.optimizer, self._norm)
        self._buffers: list[Tensor] | None = None  # what `gradient_views` are views of
        self._sums: list[Tensor] | None = None  # float32 sums over micro-batches
        if in_float32:
            self._sums = [torch.zeros_like(flat, dtype=torch.float32) for flat in self.optimizer.bit16_groups_flat]
            self._sum_of = dict(zip(self.weights, self._views(self._sums), strict=True))
            for weight in self.weights:
                weight.register_post_accumulate_grad_hook(self._add)

    @torch.no_grad()
    def _add(self, weight: Tensor) -> None:
        """Move the gradient of one micro-batch into the float32 sum."""
        self._sum_of[weight] += weight.grad  # type: ignore[operator]
        weight.grad = None

    def gradient(self, weight: Tensor) -> Tensor:
        """The gradient of one weight so far, to be changed in place."""
        found = weight.grad if self._sums is None else self._sum_of[weight]
        assert found is not None
        return found

    @cached_property
    def gradient_views(self) -> list[Tensor]:
        """Views of the flat gradients, one per weight. Gradients accumulated in them are flat already."""
        self._buffers = self._zeros()
        return self._views(self._buffers)

    @torch.no_grad()
    def flat_gradients(self, into: list[Tensor] | None = None) -> list[Tensor]:
        """The gradients of each parameter group as one tensor; the weights have none afterwards.

        The tensors are the float32 sums or accumulation buffers if there are any, else `into`, the result of an
        earlier call, or new ones.
        """
        if self._sums is not None:
            return self._sums
        given = into if self._buffers is None else self._buffers
        flats = self._zeros() if given is None else given
        views = self.gradient_views if flats is self._buffers else self._views(flats)
        flatten_gradients(views, self.weights, zero=given is None)
        return flats

    @torch.no_grad()
    def reduce(self, gathered: list[Tensor] | None = None) -> None:
        """Hand DeepSpeed this process's share of the mean of the weights' gradients, or of `gathered` ones."""
        groups = self.optimizer.real_dp_process_group
        for number, flat in enumerate(self.flat_gradients() if gathered is None else gathered):
            self.optimizer.averaged_gradients[number] = [_mean_share(flat, groups[number])]
        self.engine.set_gradient_accumulation_boundary(True)

    @torch.no_grad()
    def clear(self) -> None:
        """Set float32 sums to zero; after the engine's step, which may use them in place."""
        if self._sums is not None:
            torch._foreach_zero_(self._sums)

    def _norm(self) -> Tensor:
        """The global norm of the reduced gradients, float32; -1, as in DeepSpeed, where it is NaN or infinite."""
        shares = [self.optimizer.averaged_gradients[number][0] for number in range(len(self._counted))]
        counted = [share[run] for share, runs in zip(shares, self._counted, strict=True) for run in runs]
        total = shares[0].new_zeros((), dtype=torch.float32)
        if counted:
            total += torch.stack(torch._foreach_norm(counted, 2, dtype=torch.float32)).square().sum()
        dist.all_reduce(total, group=self.optimizer.dp_process_group)
        sum_over_model_parallel(self.optimizer, total)
        return torch.where(total.isfinite(), total.sqrt(), -1.0)

    @cached_property
    def _counted(self) -> list[list[slice]]:
        """Of each group, the parts of this process's shard that count for the norm.

        Tensor-parallel processes and tied embeddings hold some weights several times: `model_parallel` (see
        `parallel.parallelize`) is set on one of the copies.
        """
        optimizer = self.optimizer
        groups = zip(optimizer.bit16_groups_flat, optimizer.bit16_groups, optimizer.real_dp_process_group, strict=True)
        return [_runs(flat, group, dist.get_world_size(ranks), dist.get_rank(ranks)) for flat, group, ranks in groups]

    def _zeros(self) -> list[Tensor]:
        return [torch.zeros_like(flat) for flat in self.optimizer.bit16_groups_flat]

    def _views(self, flats: list[Tensor]) -> list[Tensor]:
        groups = zip(flats, self.optimizer.bit16_groups_flat, self.optimizer.bit16_groups, strict=True)
        return [_view_like(weight, flat_weights, flat) for flat, flat_weights, group in groups for weight in group]


@torch.no_grad()
def flatten_gradients(views: list[Tensor], weights: list[Any], *, zero: bool) -> None:
    """Copy the gradients of `weights` into `views` of a flat tensor and set them to None.

    A gradient that is its view already is not copied. The view of a weight without a gradient becomes zero.

    Args:
        zero: the views are zero already.
    """
    pairs = [(view, weight.grad) for view, weight in zip(views, weights, strict=True)]
    missing = [view for view, gradient in pairs if gradient is None]
    if missing and not zero:
        torch._foreach_zero_(missing)
    copied = [(view, gradient) for view, gradient in pairs if gradient is not None and gradient is not view]
    if copied:
        torch._foreach_copy_([view for view, _ in copied], [gradient for _, gradient in copied])
    for weight in weights:
        weight.grad = None


def _view_like(weight: Tensor, flat_weights: Tensor, flat: Tensor) -> Tensor:
    """The part of `flat` at the offset that `weight` has in `flat_weights`."""
    start = weight.storage_offset() - flat_weights.storage_offset()
    return flat[start : start + weight.numel()].view(weight.shape)


def _runs(flat: Tensor, weights: list[Tensor], world: int, rank: int) -> list[slice]:
    """Slices of shard `rank` of `flat` with the weights that count for the norm; adjacent ones are joined."""
    size = flat.numel() // world
    first = flat.storage_offset() + rank * size
    found: list[slice] = []
    for weight in sorted(weights, key=Tensor.storage_offset):
        start = max(weight.storage_offset() - first, 0)
        stop = min(weight.storage_offset() - first + weight.numel(), size)
        if not getattr(weight, "model_parallel", True) or start >= stop:
            continue
        if found and found[-1].stop == start:
            start = found.pop().start
        found.append(slice(start, stop))
    return found


def _mean_share(flat: Tensor, group: Any) -> Tensor:
    """This process's shard of the mean of `flat` over `group`; `flat` is overwritten."""
    world, rank = dist.get_world_size(group), dist.get_rank(group)
    if world == 1:
        return flat
    flat.div_(world)  # before the sum, which might overflow in float16
    if flat.is_cuda:
        share = flat.new_empty(flat.numel() // world)
        reduce_scatter_into(share, flat, group)
        return share
    dist.all_reduce(flat, group=group)
    return flat.chunk(world)[rank].clone()
