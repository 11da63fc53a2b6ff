"""One optimizer step in any precision and ZeRO stage: the part of the Trainer that touches gradients.

Overridden, and why:
    create_optimizer                  master weights for half-precision ones (fp16_opt_level O2)
    _wrap_model                       no DistributedDataParallel where gradients are exchanged at once
    _prepare_for_training             DeepSpeed in groups of replicas and with our loss scale
    training_step                     float32 sums of gradients, recorded passes
    _clip_grad_norm, _get_grad_norm   on the master weights
    _prepare_inputs, _prepare_input   nothing waits for copies to the device, and targets go there once
    _get_num_items_in_batch           the same
"""

import json
from contextlib import nullcontext
from functools import cached_property
from typing import Any

import torch
import torch.distributed as dist
from transformers import Trainer

from gptlm.errors import GptlmError, reason_of
from gptlm.parallel.deepspeed import ZeroLossScale
from gptlm.parallel.flat_grad_sync import FlatGradSync
from gptlm.parallel.process_groups import ShardGroups
from gptlm.training.cuda_graphs import RecordedPasses, Tensors
from gptlm.training.precision.loss_scale import LossScale
from gptlm.training.precision.master_adamw import MasterWeightAdamW, clip

OFFLOAD = (
    "offloading needs DeepSpeed's CPU optimizer, which could not be compiled or loaded: {reason}; install a C++ "
    "compiler (and, on a GPU machine, the CUDA toolkit of torch's version), or leave offload out"
)
ADVICE = "try a lower --learning_rate, more --warmup_steps, or --max_grad_norm 1.0"
START_ADVICE = (  # no update came before: no learning rate is to blame
    "it is the loss of the weights that the run starts from: take an earlier checkpoint, or copy their folder again"
)
ITEMS = "num_items_in_batch"
FP16_ADVICE = ", or --bf16 instead of --fp16"


class Replica(torch.nn.Module):
    """A model of which every process has the same copy; who steps it sees to that."""

    def __init__(self, module: Any):
        super().__init__()
        self.module = module
        for weight in module.parameters():
            dist.broadcast(weight.data, 0)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.module(*args, **kwargs)


class SteppingTrainer(Trainer):
    """Trainer that steps float32, autocast and half-precision weights alike.

    Args:
        loss_scale: of float16; None in other precisions.
        master_grad: add the gradients of half-precision weights up in float32.
        shard_degree: ranks that share one optimizer state (ZeRO stage 1), where they are fewer than all.
        groups: DeepSpeed's process groups, where processes share a replica.
        exchanged_at_once: half-precision weights' gradients are exchanged in one go after the passes, not during them;
            with DeepSpeed in stage 1 or 2.
        recorded: replay forward and backward passes as a CUDA graph; batches have the same shape.
    """

    def __init__(
        self,
        *args: Any,
        loss_scale: LossScale | None = None,
        master_grad: bool = False,
        shard_degree: int | None = None,
        groups: Any = None,
        exchanged_at_once: bool = False,
        recorded: bool = False,
        **kwargs: Any,
    ):
        super().__init__(*args, **kwargs)
        self.half_weights = not self.is_deepspeed_enabled and self.network.dtype != torch.float32
        self.loss_scale = loss_scale
        if self.loss_scale is not None and (self.half_weights or self.accelerator.scaler is not None):
            self.accelerator.scaler = self.loss_scale
        self.shard_degree, self.groups = shard_degree, groups
        self.in_float32 = master_grad
        self.master_grad = master_grad and self.half_weights  # else DeepSpeed's gradients are meant
        self.exchanged_at_once, self.recorded = exchanged_at_once, recorded
        self.zero_at_once: FlatGradSync | None = None
        self._gathered: Any = None  # gradients of this step that are put together already
        # with master_grad each micro-batch is reduced before it is added up
        self.accelerator.gradient_state.plugin_kwargs["sync_each_batch"] = self.master_grad and not exchanged_at_once

    @property
    def network(self) -> Any:
        """The model without wrappers."""
        return self.model

    @property
    def master_optimizer(self) -> MasterWeightAdamW | None:
        """The optimizer, where it keeps master weights."""
        inner = getattr(self.optimizer, "optimizer", self.optimizer)
        return inner if isinstance(inner, MasterWeightAdamW) else None

    def create_optimizer(self, model=None):
        if not self.half_weights or self.optimizer is not None:
            return super().create_optimizer(model)
        decayed = set(self.get_decay_parameter_names(self.network))
        named = [(name, p) for name, p in self.network.named_parameters() if p.requires_grad]
        groups = [
            {"params": [p for name, p in named if name in decayed], "weight_decay": self.args.weight_decay},
            {"params": [p for name, p in named if name not in decayed], "weight_decay": 0.0},
        ]
        _, settings = self.get_optimizer_cls_and_kwargs(self.args, self.network)
        self.optimizer = MasterWeightAdamW(groups, **settings)
        return self.optimizer

    def _wrap_model(self, model, training=True, dataloader=None):
        if not (training and self.exchanged_at_once) or self.is_deepspeed_enabled or isinstance(model, Replica):
            return super()._wrap_model(model, training, dataloader)
        return Replica(model)

    def _prepare_for_training(self, max_steps, train_dataloader, resume_from_checkpoint):
        shards = ShardGroups(self.shard_degree) if self.shard_degree else None
        groups = shards or self.groups
        with groups.as_mpu() if groups else nullcontext():
            try:
                prepared = super()._prepare_for_training(max_steps, train_dataloader, None)
            except (AttributeError, ImportError, RuntimeError, OSError) as error:
                if "offload" not in json.dumps(self.args.deepspeed or ""):
                    raise
                raise GptlmError(OFFLOAD.format(reason=reason_of(error))) from error
        if shards:
            shards.attach(self.model_wrapped)
        if self.is_deepspeed_enabled and self.loss_scale is not None:
            ZeroLossScale(self.loss_scale).attach(self.model_wrapped.optimizer)
        if self.is_deepspeed_enabled and self.exchanged_at_once:
            self.zero_at_once = FlatGradSync(self.model_wrapped, in_float32=self.in_float32)
        return prepared

    def _prepare_inputs(self, inputs):
        return super()._prepare_inputs(
            {k: v for k, v in inputs.items() if k != "labels" or "shift_labels" not in inputs}
        )

    def _prepare_input(self, data):
        if isinstance(data, torch.Tensor):
            return data.to(self.args.device, non_blocking=True)
        return super()._prepare_input(data)

    def _get_num_items_in_batch(self, batch_samples, device):
        """Targets of the step on all processes, a tensor on the device."""
        count = sum(int((batch["shift_labels"] != -100).sum()) for batch in batch_samples)
        total = torch.full((), count, dtype=torch.int64, device=device)
        if self.args.world_size > 1:
            dist.all_reduce(total)
        return total

    def training_step(self, model, inputs, num_items_in_batch=None):
        if self.recorded or self.zero_at_once:
            given = {**self._prepare_inputs(inputs), ITEMS: num_items_in_batch}
            passes = self.recorded_passes(given, self._scale) if self.recorded else self._passes(given)
            loss, self._gathered = passes
        else:
            loss = super().training_step(model, inputs, num_items_in_batch)
        if self.zero_at_once and self.accelerator.sync_gradients:
            self.zero_at_once.step(self._gathered)
        if self.master_grad and self.master_optimizer is not None:
            self.master_optimizer.add_gradients()
        return loss

    @property
    def _scale(self) -> float:
        """What the loss is multiplied with."""
        return self.loss_scale.value if self.loss_scale is not None else 1.0

    @property
    def _one_pass(self) -> bool:
        """Whether gradients are taken away after each micro-batch."""
        return self.args.gradient_accumulation_steps == 1 or self.master_grad

    def _passes(self, given: Tensors) -> tuple[torch.Tensor, Any]:
        """Forward and backward pass of a micro-batch on the device; the loss, and gradients that were put together."""
        self.network.train()
        inputs = {name: value for name, value in given.items() if name != ITEMS}
        with self.compute_loss_context_manager():
            loss: Any = self.compute_loss(self.network, inputs, num_items_in_batch=given[ITEMS])
        (loss * self._scale if self.loss_scale is not None else loss).backward()
        gatherer = None if self.master_grad or not self._one_pass else self.zero_at_once or self.master_optimizer
        return loss.detach(), gatherer.flat_gradients() if gatherer else None

    @cached_property
    def recorded_passes(self) -> RecordedPasses:
        """Made at the first step, when the optimizer is there."""
        weights = [weight for weight in self.network.parameters() if weight.requires_grad]
        sums = None
        if not self._one_pass:
            if self.zero_at_once:
                weights, sums = self.zero_at_once.weights, self.zero_at_once.gradient_views
            elif self.master_optimizer:
                weights, sums = self.master_optimizer.weights, self.master_optimizer.gradient_views
            else:
                sums = [torch.zeros_like(weight) for weight in weights]
        return RecordedPasses(self._passes, weights, sums)

    def _clip_grad_norm(self, model):
        if self.master_optimizer is None:
            return super()._clip_grad_norm(model)
        return self._clip_masters(self.args.max_grad_norm)

    def _get_grad_norm(self, model, grad_norm=None):
        if grad_norm is None and self.master_optimizer is not None:
            return self._clip_masters(float("inf"))
        return super()._get_grad_norm(model, grad_norm)

    def _clip_masters(self, max_norm: float) -> torch.Tensor:
        optimizer = self.master_optimizer
        assert optimizer is not None
        optimizer.take_gradients(self._gathered)
        self._gathered = None
        if self.exchanged_at_once:
            optimizer.average_gradients()
        if self.loss_scale is not None:
            self.loss_scale.unscale_(optimizer)
        return clip(optimizer, max_norm)

    def trouble(self, what: str) -> str:
        """A sentence on why the run ends."""
        raise NotImplementedError
