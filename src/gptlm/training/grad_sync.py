"""How gradients of several processes become one: nothing, DDP, one flat all-reduce, or ZeRO through DeepSpeed."""

import json
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from gptlm.errors import GptlmError, reason_of
from gptlm.parallel.copies import Copies
from gptlm.parallel.deepspeed import ZeroLossScale
from gptlm.parallel.flat_grad_sync import FlatGradSync
from gptlm.upstream.deepspeed import initialized_with

OFFLOAD = (
    "offloading needs DeepSpeed's CPU optimizer, which could not be compiled or loaded: {reason}; install a C++ "
    "compiler (and, on a GPU machine, the CUDA toolkit of torch's version), or leave offload out"
)


class GradSync:
    """One process: there is nothing to reduce. Base class of the others.

    Attributes:
        model: with its wrapper.
        forward_model: whose forward is called.
        flat_target: see `FlatZero`; None where gradients are reduced in place.
    """

    model: Any
    forward_model: Any
    weights: Any
    flat_target: Any = None

    def wrap(self, accelerator: Any, model: Any, optimizer: Any, weights: Any) -> tuple[Any, Any]:
        """Called when training starts; returns the wrapped model and optimizer."""
        self.weights = weights
        self.model = self.forward_model = accelerator.prepare_model(model)  # also applies O1's autocast, and DDP
        return self.model, optimizer

    def micro_batch(self, is_last: bool) -> AbstractContextManager[Any]:
        """The context of forward and backward of one micro-batch."""
        return nullcontext()

    def backward(self, loss: Tensor) -> None:
        self.weights.scale(loss).backward()

    def reduce(self) -> None:
        """Called after all backward passes of a step."""

    def zero_grad(self) -> None:
        self.model.zero_grad()

    def gradient(self, weight: Any) -> Tensor:
        """The gradient of one weight before `reduce`, to be changed in place."""
        return weight.grad


class DataParallel(GradSync):
    """torch's DistributedDataParallel: buckets are all-reduced during the backward pass."""

    def micro_batch(self, is_last: bool) -> AbstractContextManager[Any]:
        # float32 sums take the gradients away after each micro-batch, so each has to be reduced
        return nullcontext() if is_last or self.weights.float32_sums else self.model.no_sync()


class FlatAllReduce(GradSync):
    """One all-reduce of all gradients after backward; needs `MasterWeights`, whose gradients are one tensor."""

    def wrap(self, accelerator: Any, model: Any, optimizer: Any, weights: Any) -> tuple[Any, Any]:
        for parameter in model.parameters():  # as DDP does, all replicas start from the weights of rank 0
            dist.broadcast(parameter.data, 0)
        self.model = self.forward_model = accelerator.prepare_model(model, evaluation_mode=True)  # without DDP
        self.weights, self.optimizer = weights, optimizer
        return self.model, optimizer

    def reduce(self) -> None:
        self.optimizer.average_gradients()


class DeepSpeedSync(GradSync):
    """ZeRO: DeepSpeed's hooks reduce gradients during the backward passes.

    Args:
        groups: a `Mesh`, where several processes share a replica or fewer replicas than all share one optimizer state;
            None: all processes are replicas that do.
        has_pipeline: a pipeline runs the backward passes, so DeepSpeed has to be told when they are done.
    """

    def __init__(self, *, groups: Any = None, has_pipeline: bool = False):
        self.groups, self.has_pipeline = groups, has_pipeline

    def wrap(self, accelerator: Any, model: Any, optimizer: Any, weights: Any) -> tuple[Any, Any]:
        copies = Copies(self.groups) if self.groups and self.groups.copies > 1 else None
        if copies:
            copies.broadcast_weights(model)
        with initialized_with(self.groups):
            self.engine, optimizer = accelerator.prepare(model, optimizer)
        self.model, self.forward_model, self.weights = self.engine, self.engine, weights
        if copies:
            copies.attach(self.engine)
        if weights.loss_scale is not None:
            ZeroLossScale(weights.loss_scale).attach(self.engine.optimizer)
        return self.engine, optimizer

    def micro_batch(self, is_last: bool) -> AbstractContextManager[Any]:
        self.engine.set_gradient_accumulation_boundary(is_last)
        return nullcontext()

    def backward(self, loss: Tensor) -> None:
        self.engine.backward(loss, scale_wrt_gas=False)  # the loss is divided by the targets of the whole step already

    def reduce(self) -> None:
        if self.has_pipeline:
            self.engine.optimizer.reduce_gradients(pipeline_parallel=True)


class FlatZero(DeepSpeedSync):
    """ZeRO stage 1 or 2 with one reduce-scatter per parameter group after backward, in place of DeepSpeed's hooks.

    Attributes:
        flat_target: this object; the step runner writes flattened gradients to its `flat`.
        flat: gradients that the step runner has flattened already.
    """

    def __init__(self, *, float32_sums: bool = False, **more: Any):
        super().__init__(**more)
        self.float32_sums = float32_sums
        self.flat_target, self.flat = self, None

    def wrap(self, accelerator: Any, model: Any, optimizer: Any, weights: Any) -> tuple[Any, Any]:
        wrapped = super().wrap(accelerator, model, optimizer, weights)
        self.zero = FlatGradSync(self.engine, in_float32=self.float32_sums)
        self.forward_model = model  # the engine's forward and backward expect the hooks that are removed
        return wrapped

    @property
    def parameters(self) -> list[Any]:
        return self.zero.weights

    @property
    def views(self) -> list[Tensor]:
        return self.zero.gradient_views

    def flatten(self, into: list[Tensor] | None = None) -> list[Tensor]:
        return self.zero.flat_gradients(into)

    def micro_batch(self, is_last: bool) -> AbstractContextManager[Any]:
        return nullcontext()

    def backward(self, loss: Tensor) -> None:
        self.weights.scale(loss).backward()

    def reduce(self) -> None:
        self.zero.reduce(self.flat)
        self.flat = None

    def zero_grad(self) -> None:
        super().zero_grad()
        self.zero.clear()

    def gradient(self, weight: Any) -> Tensor:
        return self.zero.gradient(weight)


def offload_error(error: Exception, config: Any) -> GptlmError | None:
    """The error of a run whose DeepSpeed configuration offloads; None where `error` has another reason."""
    if "offload" not in json.dumps(config or ""):
        return None
    return GptlmError(OFFLOAD.format(reason=reason_of(error)))


def default_grad_sync(world_size: int) -> GradSync:
    """DDP where there are several processes."""
    return DataParallel() if world_size > 1 and torch.distributed.is_initialized() else GradSync()
