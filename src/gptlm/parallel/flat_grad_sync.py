"""Gradients of ZeRO stage 1 and 2 exchanged in one go after the passes, in place of DeepSpeed's way during them."""

from functools import cached_property
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor


class FlatGradSync:
    """Brings the gradients of a step to where DeepSpeed's ZeRO optimizer steps them, group by group.

    DeepSpeed has a hook, copies, a check and a norm for each parameter, which took some 90 ms a step on two H200 at
    345M, more than the passes. Here a group's gradients are one tensor, of which each process gets its share by one
    reduce-scatter; DeepSpeed goes on with that share, and shares the optimizer state and gathers weights as ever.
    The price is memory for all gradients, 2 bytes per parameter, and as much again while they are put together, at
    the end of the passes, when activations are gone; DeepSpeed's stage 2 holds a share of them.

    Processes that share a replica hold different weights, and some the same: the global norm counts each weight once,
    where its `model_parallel` is set (see `parallel.parallelize`).

    Args:
        engine: DeepSpeed's, of stage 1 or 2 with half-precision weights.
        in_float32: add the gradients of all passes up in float32, as each comes.
    """

    def __init__(self, engine: Any, *, in_float32: bool = False):
        self.engine, self.optimizer = engine, engine.optimizer
        for hook in self.optimizer._grad_acc_hooks:
            hook.remove()
        self.optimizer._grad_acc_hooks.clear()
        self.weights = [weight for group in self.optimizer.bit16_groups for weight in group]
        self._let_go()
        self.optimizer.scaled_global_norm = self._norm
        self._placed: list[Tensor] | None = None  # where gradients are added up
        self._sums: list[Tensor] | None = None  # the same in float32
        if in_float32:
            self._sums = [torch.zeros_like(whole, dtype=torch.float32) for whole in self.optimizer.bit16_groups_flat]
            self._sum_of = dict(zip(self.weights, self._views(self._sums), strict=True))
            for weight in self.weights:
                weight.register_post_accumulate_grad_hook(self._add)

    def _let_go(self) -> None:
        """Free the weights from graphs DeepSpeed keeps by accident: what adds their gradients is bound to a stream,
        while a recording of the passes uses its own."""
        for weight in self.weights:
            mapping = getattr(weight, "_hp_mapping", None)
            if mapping is not None:
                mapping.lp_fragment = mapping.lp_fragment.detach()

    @torch.no_grad()
    def _add(self, weight: Tensor) -> None:
        """Move the gradient of one pass into the float32 sum."""
        self._sum_of[weight] += weight.grad  # type: ignore[operator]
        weight.grad = None

    def gradient(self, weight: Tensor) -> Tensor:
        """That of one weight so far, to be changed in place."""
        found = weight.grad if self._sums is None else self._sum_of[weight]
        assert found is not None
        return found

    @cached_property
    def gradient_views(self) -> list[Tensor]:
        """Where gradients of several passes may be added up, one tensor per weight; from there they are not copied."""
        self._placed = self._empty()
        return self._views(self._placed)

    @torch.no_grad()
    def flat_gradients(self) -> list[Tensor]:
        """The gradients of each parameter group end to end, taken from the weights."""
        if self._sums is not None:
            return self._sums
        flats = self._empty() if self._placed is None else self._placed
        views = self.gradient_views if flats is self._placed else self._views(flats)
        flatten_gradients(views, self.weights, zero=flats is not self._placed)
        return flats

    @torch.no_grad()
    def step(self, gathered: list[Tensor] | None = None) -> None:
        """One optimizer step with the gradients of the weights, or with `gathered` ones."""
        groups = self.optimizer.real_dp_process_group
        for number, flat in enumerate(self.flat_gradients() if gathered is None else gathered):
            self.optimizer.averaged_gradients[number] = [_mean_share(flat, groups[number])]
        self.engine.set_gradient_accumulation_boundary(True)
        self.engine.step()
        if self._sums is not None:
            torch._foreach_zero_(self._sums)

    def _norm(self) -> Tensor:
        """The global norm of the gradients to step with, float32; -1, DeepSpeed's word, where it is no number."""
        shares = [self.optimizer.averaged_gradients[number][0] for number in range(len(self._counted))]
        counted = [share[run] for share, runs in zip(shares, self._counted, strict=True) for run in runs]
        total = shares[0].new_zeros((), dtype=torch.float32)
        if counted:
            total += torch.stack(torch._foreach_norm(counted, 2, dtype=torch.float32)).square().sum()
        dist.all_reduce(total, group=self.optimizer.dp_process_group)
        self.optimizer._model_parallel_all_reduce(tensor=total, op=dist.ReduceOp.SUM)
        return torch.where(total.isfinite(), total.sqrt(), -1.0)

    @cached_property
    def _counted(self) -> list[list[slice]]:
        """Of each group, the parts of this process's share that count for the norm."""
        optimizer = self.optimizer
        groups = zip(optimizer.bit16_groups_flat, optimizer.bit16_groups, optimizer.real_dp_process_group, strict=True)
        return [_runs(whole, group, dist.get_world_size(ranks), dist.get_rank(ranks)) for whole, group, ranks in groups]

    def _empty(self) -> list[Tensor]:
        return [torch.zeros_like(whole) for whole in self.optimizer.bit16_groups_flat]

    def _views(self, flats: list[Tensor]) -> list[Tensor]:
        groups = zip(flats, self.optimizer.bit16_groups_flat, self.optimizer.bit16_groups, strict=True)
        return [_same_place(weight, whole, flat) for flat, whole, group in groups for weight in group]


@torch.no_grad()
def flatten_gradients(places: list[Tensor], weights: list[Any], *, zero: bool) -> None:
    """Bring the gradients of `weights` to their `places` and take them from the weights; what is there is not copied.

    Args:
        zero: the places are zero already, as those of weights without a gradient become.
    """
    pairs = [(place, weight.grad) for place, weight in zip(places, weights, strict=True)]
    missing = [place for place, gradient in pairs if gradient is None]
    if missing and not zero:
        torch._foreach_zero_(missing)
    away = [(place, gradient) for place, gradient in pairs if gradient is not None and gradient is not place]
    if away:
        torch._foreach_copy_([place for place, _ in away], [gradient for _, gradient in away])
    for weight in weights:
        weight.grad = None


def _same_place(weight: Tensor, whole: Tensor, flat: Tensor) -> Tensor:
    """The part of `flat` that is to it what `weight` is to `whole`."""
    start = weight.storage_offset() - whole.storage_offset()
    return flat[start : start + weight.numel()].view(weight.shape)


def _runs(whole: Tensor, weights: list[Tensor], world: int, rank: int) -> list[slice]:
    """Where in share `rank` of `whole` the weights lie that count for the norm, neighbours as one."""
    size = whole.numel() // world
    first = whole.storage_offset() + rank * size
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
    """This process's part of the mean of `flat` over `group`; `flat` is used up."""
    world, rank = dist.get_world_size(group), dist.get_rank(group)
    if world == 1:
        return flat
    flat.div_(world)  # before the sum, which might overflow in float16
    if flat.is_cuda:
        share = flat.new_empty(flat.numel() // world)
        dist.reduce_scatter_tensor(share, flat, group=group)
        return share
    dist.all_reduce(flat, group=group)
    return flat.chunk(world)[rank].clone()
