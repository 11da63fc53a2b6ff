"""Gradients of ZeRO stage 1 and 2 exchanged in one go after the passes, in place of DeepSpeed's way during them."""

from functools import cached_property
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor


class ZeroAtOnce:
    """Brings the gradients of a step to where DeepSpeed's ZeRO optimizer steps them, group by group.

    DeepSpeed has a hook, copies, a check and a norm for each parameter, which took some 90 ms a step on two H200 at
    345M, more than the passes. Here a group's gradients are one tensor, of which each process gets its share by one
    reduce-scatter; DeepSpeed goes on with that share, and shares the optimizer state and gathers weights as ever.
    The price is a tensor for all gradients, 2 bytes per parameter, where stage 2 holds a share of it.

    Args:
        engine: DeepSpeed's, of stage 1 or 2 with half-precision weights.
    """

    def __init__(self, engine: Any):
        self.engine, self.optimizer = engine, engine.optimizer
        for hook in self.optimizer._grad_acc_hooks:
            hook.remove()
        self.optimizer._grad_acc_hooks.clear()
        self.weights = [weight for group in self.optimizer.bit16_groups for weight in group]

    @cached_property
    def places(self) -> list[Tensor]:
        """Where `step` brings the gradient of each weight; what lies there already is not copied."""
        groups = zip(self._flat, self.optimizer.bit16_groups_flat, self.optimizer.bit16_groups, strict=True)
        return [_same_place(weight, whole, flat) for flat, whole, group in groups for weight in group]

    @cached_property
    def _flat(self) -> list[Tensor]:
        return [torch.zeros_like(whole) for whole in self.optimizer.bit16_groups_flat]  # and zero between and behind

    @torch.no_grad()
    def step(self) -> None:
        """One optimizer step with the gradients of the weights."""
        missing = [place for place, weight in zip(self.places, self.weights, strict=True) if weight.grad is None]
        if missing:
            torch._foreach_zero_(missing)
        found = [(place, weight.grad) for place, weight in zip(self.places, self.weights, strict=True)]
        away = [(place, gradient) for place, gradient in found if gradient is not None and gradient is not place]
        if away:
            torch._foreach_copy_([place for place, _ in away], [gradient for _, gradient in away])
        groups = self.optimizer.real_dp_process_group
        for number, (flat, group) in enumerate(zip(self._flat, groups, strict=True)):
            self.optimizer.averaged_gradients[number] = [_mean_share(flat, group)]
        self.engine.set_gradient_accumulation_boundary(True)
        self.engine.step()


def _same_place(weight: Tensor, whole: Tensor, flat: Tensor) -> Tensor:
    """The part of `flat` that is to it what `weight` is to `whole`."""
    start = weight.storage_offset() - whole.storage_offset()
    return flat[start : start + weight.numel()].view(weight.shape)


def _mean_share(flat: Tensor, group: Any) -> Tensor:
    """This process's part of the mean of `flat` over `group`; `flat` is used up."""
    world, rank = dist.get_world_size(group), dist.get_rank(group)
    flat.div_(world)  # before the sum, which might overflow in float16
    if flat.is_cuda:
        share = flat.new_empty(flat.numel() // world)
        dist.reduce_scatter_tensor(share, flat, group=group)
        return share
    dist.all_reduce(flat, group=group)
    return flat.chunk(world)[rank].clone()
