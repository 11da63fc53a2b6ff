"""Tensor and pipeline parallelism in the Trainer's loop.

Overridden, and why:
    training_step    a pipeline takes all micro-batches of a step at once, forward and backward
"""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from functools import cached_property
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor

from gptlm.parallel.deepspeed import gathered_parameters
from gptlm.parallel.process_groups import Mesh
from gptlm.parallel.sharding import checkpoint_name, gather_tensors, local_shard
from gptlm.training.step import SteppingTrainer


class LayoutTrainer(SteppingTrainer):
    """Trainer whose processes may share a replica of the model.

    Args:
        mesh: who does what; None: every process is a replica.
        chunks: pipeline stages per process.
        micro_batches: that a pipeline cuts a step's batch into.
        autocast: what a pipeline computes in.
    """

    def __init__(
        self,
        *args: Any,
        mesh: Mesh | None = None,
        chunks: int = 1,
        micro_batches: int = 1,
        autocast: Callable[[], AbstractContextManager] = nullcontext,
        **kwargs: Any,
    ):
        self.mesh = mesh
        self.chunks, self.micro_batches, self.autocast = chunks, micro_batches, autocast
        super().__init__(*args, groups=mesh, **kwargs)

    @property
    def replicas(self) -> int:
        """Copies of the model, each of which reads its own samples."""
        return self.mesh.dims.data if self.mesh else self.args.world_size

    @property
    def replica(self) -> int:
        """Which of them this process belongs to."""
        return self.mesh.data_rank if self.mesh else self.args.process_index

    @property
    def has_pipeline(self) -> bool:
        return self.mesh is not None and self.mesh.dims.pipeline > 1

    @property
    def dropout_seed(self) -> int:
        """The same for all that split a layer (what they split has numbers of its own), else different."""
        if self.mesh is None:
            return self.args.seed + self.args.process_index
        return self.args.seed + self.mesh.pipeline_rank * self.mesh.dims.data + self.mesh.data_rank

    @cached_property
    def pipeline(self) -> Any:
        """Made when the first batch comes, after the model has been put into its place."""
        from gptlm.parallel.pipeline import Pipeline

        assert self.mesh is not None
        return Pipeline(
            self.network,
            self.mesh,
            chunks=self.chunks,
            micro_batches=self.micro_batches,
            device=self.args.device,
            context=self.autocast,
        )

    def training_step(self, model, inputs, num_items_in_batch=None):
        if not self.has_pipeline:
            return super().training_step(model, inputs, num_items_in_batch)
        self.network.train()
        inputs = self._prepare_inputs(inputs)
        scale = self.loss_scale.value if self.loss_scale is not None else 1.0
        # the count is over all processes, each replica's targets as often as it has processes; DeepSpeed takes the
        # mean over the replicas
        factor = self.args.world_size * scale / num_items_in_batch
        loss = self.pipeline.step(inputs["input_ids"], inputs["shift_labels"], factor)
        if self.zero_at_once:
            self.pipeline.all_reduce_tied_gradients(self.zero_at_once.gradient)
            self.zero_at_once.step()
        else:
            self.pipeline.all_reduce_tied_gradients(attrgetter("grad"))
            engine: Any = self.model_wrapped
            engine.set_gradient_accumulation_boundary(True)
            engine.optimizer.reduce_gradients(pipeline_parallel=True)
            engine.step()
        return loss / scale

    def summed_loss(self, inputs: dict[str, Any]) -> tuple[Tensor, Tensor]:
        """Sum of the losses and number of targets of an evaluation batch of a pipeline, (1,) float64 each."""
        self.network.eval()
        inputs = self._prepare_inputs(inputs)
        targets = inputs["shift_labels"]
        total = self.pipeline.evaluate(inputs["input_ids"], targets)
        return total.double().view(1), (targets != -100).sum().double().view(1)

    def whole_tensors(self, tensors: Iterator[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
        """Shares of the model's tensors as whole ones, on every process."""
        return tensors if self.mesh is None else gather_tensors(self.mesh, tensors)

    @torch.no_grad()
    def put(self, parameters: list[tuple[str, torch.nn.Parameter]], get: Callable[[str], Tensor]) -> None:
        """Give `parameters` the values that `get` has under the whole model's names."""
        for name, parameter in parameters:
            with gathered_parameters([parameter], write=True):
                parameter.copy_(local_shard(self.mesh, name, get(checkpoint_name(name))))
