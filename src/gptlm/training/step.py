"""What happens to a global batch: one optimizer step.

The same sequence holds for every precision, ZeRO stage and step runner. What each line does depends on the parts:

    forward_backward   `EagerStep` below, `CudaGraphStep` (cuda_graphs.py) or `PipelineStep` (pipeline_step.py)
    grad_sync          nothing, DDP, one flat all-reduce, DeepSpeed or flat ZeRO (grad_sync.py)
    weights            float32 weights, float32 masters of half-precision ones, or DeepSpeed's (precision/weights.py)
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

Inputs = dict[str, Any]


@dataclass
class TrainingStep:
    """One optimizer step.

    Attributes:
        model: with its wrappers (DDP, DeepSpeed engine).
        to_device: copies a micro-batch to the device.
        max_grad_norm: 0 or less never clips.
        event: fires a callback event of the Trainer by name.
    """

    model: torch.nn.Module
    forward_backward: Callable[[Inputs, Tensor | None], Tensor]
    grad_sync: Any
    weights: Any
    scheduler: Any
    to_device: Callable[[Inputs], Inputs]
    max_grad_norm: float
    event: Callable[[str], None]

    def __call__(self, micro_batches: list[Inputs], num_items: Tensor | None, loss_sum: Tensor) -> None:
        """Train on `micro_batches`; `num_items` is the number of targets in the global batch.

        The loss of the step, a mean over its targets, is added to `loss_sum`; nothing here waits for the device.
        """
        self.model.train()
        self.event("on_step_begin")
        for number, micro_batch in enumerate(micro_batches):
            is_last = number == len(micro_batches) - 1
            with self.grad_sync.micro_batch(is_last):  # DDP and DeepSpeed reduce during the last backward
                loss_sum += self.forward_backward(self.to_device(micro_batch), num_items)
            self.weights.accumulate_gradients()  # float32 sums (amp_master_grad); else autograd adds to `.grad`
            if not is_last:
                self.event("on_substep_end")

        self.weights.flatten_gradients()  # master weights: all gradients as one tensor
        self.grad_sync.reduce()  # flat: one all-reduce or reduce-scatter, after all backward passes
        self.weights.unscale_gradients()  # fp16: divides by the loss scale, looks for an overflow
        self.weights.clip_gradients(self.max_grad_norm if self.max_grad_norm > 0 else float("inf"))

        self.event("on_pre_optimizer_step")
        is_applied = self.weights.update()  # an overflow skips it; DeepSpeed unscales, clips and updates here
        self.event("on_optimizer_step")
        if is_applied:
            self.scheduler.step()  # counts updates, so a skipped one does not advance the schedule
        self.grad_sync.zero_grad()


class EagerStep:
    """Forward and backward pass of a micro-batch, kernel by kernel."""

    def prepare(
        self,
        *,
        model: torch.nn.Module,
        network: torch.nn.Module,
        world_size: int,
        compute_loss: Callable[[Any, Inputs, Tensor | None], Tensor],
        grad_sync: Any,
        weights: Any,
        accumulation: int,
    ) -> None:
        """Called when training starts.

        Args:
            model: whose forward is called; `network` is the same without wrappers.
            compute_loss: (model, inputs, num_items) -> loss.
            accumulation: micro-batches of a step.
        """
        self.model, self.network, self.world_size, self.accumulation = model, network, world_size, accumulation
        self.compute_loss, self.grad_sync, self.weights = compute_loss, grad_sync, weights

    def __call__(self, inputs: Inputs, num_items: Tensor | None) -> Tensor:
        """The loss, detached; gradients are added to `.grad`."""
        loss = self.compute_loss(self.model, inputs, num_items)
        self.grad_sync.backward(loss)
        return loss.detach()

    def close(self) -> None:
        """Called when training ends."""


def to_device(inputs: Inputs, device: torch.device, unused: Iterable[str] = ()) -> Inputs:
    """`inputs` without the `unused` keys, tensors on `device`; no copy waits for the device."""
    kept = {name: value for name, value in inputs.items() if name not in unused}
    return {k: v.to(device, non_blocking=True) if isinstance(v, Tensor) else v for k, v in kept.items()}
