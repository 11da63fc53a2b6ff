"""Forward and backward of a whole step through the stages of a pipeline."""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor

from gptlm.kernels.attention import Documents
from gptlm.parallel.pipeline import Pipeline
from gptlm.parallel.process_groups import Mesh
from gptlm.training.step import EagerStep, Inputs


class PipelineStep(EagerStep):
    """The batch of a step is one batch here, which the pipeline cuts into micro-batches.

    Args:
        chunks: pipeline stages per process.
        micro_batches: that a step's batch is cut into.
        autocast: what stages and loss are computed in (accelerate wraps a whole model's forward, not stages).
    """

    def __init__(
        self,
        mesh: Mesh,
        *,
        chunks: int = 1,
        micro_batches: int = 1,
        autocast: Callable[[], AbstractContextManager] = nullcontext,
    ):
        self.mesh, self.chunks, self.micro_batches, self.autocast = mesh, chunks, micro_batches, autocast
        self._pipeline: Pipeline | None = None

    def pipeline(self, network: Any, device: torch.device) -> Pipeline:
        """Made when the first batch comes, after the model has been moved to its device."""
        if self._pipeline is None:
            self._pipeline = Pipeline(
                network,
                self.mesh,
                chunks=self.chunks,
                micro_batches=self.micro_batches,
                device=device,
                documents=Documents,
                context=self.autocast,
            )
        return self._pipeline

    def __call__(self, inputs: Inputs, num_items: Tensor | None) -> Tensor:
        assert num_items is not None
        targets = inputs["shift_labels"]
        pipeline = self.pipeline(self.network, targets.device)
        # num_items counts over all processes, so a replica's targets as often as it has processes. The gradients
        # become means over replicas, hence the factor of the world size.
        factor = self.world_size * self.weights.scale_value / num_items
        loss = pipeline.step(inputs["input_ids"], targets, factor, **_documents(inputs))
        pipeline.all_reduce_tied_gradients(self.grad_sync.gradient)
        return loss / self.weights.scale_value

    def summed_loss(self, network: Any, inputs: Inputs) -> tuple[Tensor, Tensor]:
        """Sum of the losses and number of targets of an evaluation batch, (1,) float64 each."""
        network.eval()
        targets = inputs["shift_labels"]
        pipeline = self.pipeline(network, targets.device)
        total = pipeline.evaluate(inputs["input_ids"], targets, **_documents(inputs))
        return total.double().view(1), (targets != -100).sum().double().view(1)


def _documents(inputs: Inputs) -> dict[str, Tensor | None]:
    """Positions and document boundaries of a batch, which every stage reads from its own data."""
    return {"positions": inputs.get("position_ids"), "offsets": inputs.get("cu_seqlens")}
