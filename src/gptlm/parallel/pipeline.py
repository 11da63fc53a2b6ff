"""Forward and backward of an optimizer step, or of an evaluation batch, through the stages of a pipeline.

torch.distributed.pipelining sends activations and runs the schedule. This module cuts the model into stages, chooses
the schedule and sums the losses of the micro-batches. With several chunks, process p has the stages p, p + P, p + 2P,
... of P processes (interleaved schedule, arXiv 2104.04473, section 2.2).
"""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining.schedules import (
    Schedule1F1B,
    ScheduleGPipe,
    ScheduleInterleaved1F1B,
    ScheduleLoopedBFS,
)

from gptlm.parallel.process_groups import Mesh
from gptlm.parallel.sharding import stage_layers
from gptlm.upstream.torch import keep_random_state

MakeDocuments = Callable[[Tensor, int], Any]


class Stage(nn.Module):
    """Consecutive layers of the model, with the embeddings before the first and the layer norm after the last."""

    def __init__(
        self,
        model: Any,
        layers: range,
        *,
        first: bool,
        last: bool,
        context: Callable[[], Any],
        documents: MakeDocuments,
    ):
        super().__init__()
        body = model.transformer
        self.layers = nn.ModuleList(body.h[layer] for layer in layers)
        self.embeddings = nn.ModuleList((body.wte, body.wpe, body.drop)) if first else None
        self.norm = body.ln_f if last else None
        self.context, self.documents = context, documents

    def forward(self, x: Tensor, positions: Tensor | None = None, offsets: Tensor | None = None) -> Tensor:
        """Ids (b, T) on the first stage, else hidden states (b, T, D) -> hidden states.

        Args:
            positions: (b, T), where they are not 0 to T - 1.
            offsets: (1, n + 1), limits attention to tokens of the same document; needs `positions`.
        """
        documents = None
        if offsets is not None and positions is not None:
            documents = self.documents(offsets[0], positions.shape[1])
        with self.context():
            if self.embeddings is not None:
                tokens, embedded, dropout = self.embeddings
                if positions is None:
                    positions = torch.arange(x.shape[1], device=x.device)[None]
                x = dropout(tokens(x) + embedded(positions))
            for layer in self.layers:
                x = layer(x, None, None, documents)
            return x if self.norm is None else self.norm(x)


class Pipeline:
    """This process's stages and their schedule.

    Args:
        model: the result of `parallelize`.
        chunks: stages per process.
        micro_batches: number of parts of a step's batch.
        context: in which stages and loss are computed, such as autocast.
        documents: `kernels.attention.Documents`.
    """

    def __init__(
        self,
        model: Any,
        mesh: Mesh,
        *,
        chunks: int,
        micro_batches: int,
        device: torch.device,
        documents: MakeDocuments,
        context: Callable[[], AbstractContextManager] = nullcontext,
    ):
        self.model, self.mesh, self.chunks, self.device, self.context = model, mesh, chunks, device, context
        self.documents = documents
        self.micro_batches = micro_batches
        self.factor: Tensor | float = 1.0  # on the summed loss, for its gradient
        self._training = self._schedule(micro_batches, training=True)
        self._evaluations: dict[tuple[int, ...], Any] = {}

    def step(
        self,
        ids: Tensor,
        targets: Tensor,
        factor: Tensor | float,
        *,
        positions: Tensor | None = None,
        offsets: Tensor | None = None,
    ) -> Tensor:
        """Forward and backward of a batch (B, T); gradients accumulate in `.grad`.

        Args:
            factor: multiplies the summed loss before backward.
            positions: (B, T), where they are not 0 to T - 1.
            offsets: (n + 1,), of `kernels.attention.Documents`; needs `positions`.

        Returns:
            the summed loss times `factor`, a float32 scalar, on every stage.
        """
        self.factor = factor
        return self._run(self._training.step, ids, targets, _of_micro_batches(self.micro_batches, positions, offsets))

    @torch.no_grad()
    def evaluate(
        self, ids: Tensor, targets: Tensor, *, positions: Tensor | None = None, offsets: Tensor | None = None
    ) -> Tensor:
        """The summed loss of a batch, on every stage; `positions` and `offsets` as in `step`."""
        self.factor = 1.0
        missing = -len(ids) % self.mesh.dims.pipeline if self.chunks > 1 else 0
        if missing:  # interleaved stages need a micro-batch each, all of one size: rows without targets fill them up
            ids = torch.cat((ids, ids.new_zeros(missing, ids.shape[1])))
            targets = torch.cat((targets, targets.new_full((missing, targets.shape[1]), -100)))
            if positions is not None:
                positions = torch.cat((positions, positions.new_zeros(missing, positions.shape[1])))
            if offsets is not None:  # each of these rows is a document
                offsets = torch.cat((offsets, offsets[-1] + ids.shape[1] * _numbers(missing, offsets, first=1)))
        count = self.mesh.dims.pipeline if self.chunks > 1 else 1
        if tuple(ids.shape) not in self._evaluations:
            self._evaluations[tuple(ids.shape)] = self._schedule(count, training=False)
        more = _of_micro_batches(count, positions, offsets)
        return self._run(self._evaluations[tuple(ids.shape)].eval, ids, targets, more)

    def all_reduce_tied_gradients(self, gradient: Callable[[nn.Parameter], Tensor]) -> None:
        """Sum the embedding's gradients of the first stage (input) and the last one (output layer).

        Args:
            gradient: a weight -> its gradient.
        """
        if self.mesh.dims.pipeline > 1 and (self.mesh.is_first_stage or self.mesh.is_last_stage):
            dist.all_reduce(gradient(self._embedding()), group=self.mesh.tied_group)

    def _embedding(self) -> nn.Parameter:
        model = self.model
        return model.transformer.wte.weight if self.mesh.is_first_stage else model.lm_head.weight

    def _run(self, run: Callable[..., Any], ids: Tensor, targets: Tensor, more: dict[str, Tensor]) -> Tensor:
        losses: list[Tensor] = []
        kwargs: dict[str, Any] = {"target": targets, "losses": losses} if self.mesh.is_last_stage else {}
        run(*((ids,) if self.mesh.is_first_stage else ()), **kwargs, **more)
        total = torch.zeros((), dtype=torch.float32, device=self.device)
        for loss in losses:
            total += loss.detach().float()
        dist.all_reduce(total, group=self.mesh.pipeline_group)
        return total

    def _loss(self, hidden: Tensor, targets: Tensor) -> Tensor:
        with self.context():
            return self.model.output_loss(hidden, self.model.lm_head.weight, targets) * self.factor

    def _stages(self) -> list[PipelineStage]:
        dims = self.mesh.dims
        count = dims.pipeline * self.chunks
        layers = self.model.config.n_layer
        stages: list[PipelineStage] = []
        for number in range(self.mesh.pipeline_rank, count, dims.pipeline):
            first, last = number == 0, number == count - 1
            own = stage_layers(number, count, layers)
            module = Stage(self.model, own, first=first, last=last, context=self.context, documents=self.documents)
            stage = PipelineStage(module, number, count, self.device, group=self.mesh.pipeline_group)
            keep_random_state(stage)
            stages.append(stage)
        return stages

    def _schedule(self, micro_batches: int, *, training: bool) -> Any:
        stages = self._stages()
        settings: dict[str, Any] = {"loss_fn": self._loss, "scale_grads": False}
        if self.chunks > 1:
            kind: Any = ScheduleInterleaved1F1B if training else ScheduleLoopedBFS
            return kind(stages, micro_batches, **settings)
        enough = micro_batches >= self.mesh.dims.pipeline  # 1F1B needs one micro-batch per stage
        return (Schedule1F1B if enough and training else ScheduleGPipe)(stages[0], micro_batches, **settings)


def _of_micro_batches(count: int, positions: Tensor | None, offsets: Tensor | None) -> dict[str, Tensor]:
    """What each stage gets beside hidden states; the schedule gives each micro-batch its part along dimension 0.

    Nothing waits for the device: each micro-batch has the offsets of all documents, and those outside it are empty.
    """
    found = {} if positions is None else {"positions": positions}
    if offsets is not None and positions is not None:
        tokens = positions.numel() // count
        found["offsets"] = (offsets - tokens * _numbers(count, offsets)[:, None]).clamp(0, tokens)
    return found


def _numbers(count: int, like: Tensor, first: int = 0) -> Tensor:
    return torch.arange(first, first + count, dtype=like.dtype, device=like.device)
