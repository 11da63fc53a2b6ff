"""Smaller micro-batches after the device has run out of memory (--auto_find_batch_size); the global batch stays."""

import gc
import logging
from collections.abc import Iterator
from typing import Any

import torch
from accelerate.utils.memory import should_reduce_batch_size

from gptlm.training.step import Inputs

logger = logging.getLogger(__name__)


class SmallerBatches:
    """Repeats a step that ran out of memory with smaller micro-batches and more accumulation steps.

    For one process without DeepSpeed, whose replicas would have to agree.
    """

    def __init__(self, trainer: Any):
        self.trainer, self.loss = trainer, trainer.train_loss.pending.clone()

    def note(self) -> None:
        """A step is complete: its losses count."""
        self.loss.copy_(self.trainer.train_loss.pending)

    def next_size(self, error: Exception) -> int | None:
        """The largest smaller micro-batch that divides the global batch; None if `error` is another one."""
        size, samples = self.trainer.args.per_device_train_batch_size, self.trainer.samples_per_step
        if not should_reduce_batch_size(error):
            return None
        return next((smaller for smaller in range(size - 1, 0, -1) if samples % smaller == 0), None)

    def restart(self, size: int) -> Iterator[Inputs]:
        """Undo the step; returns the micro-batches of `size` samples from this step on."""
        trainer, args = self.trainer, self.trainer.args
        samples, before = trainer.samples_per_step, args.per_device_train_batch_size
        trainer.train_loss.pending.copy_(self.loss)
        trainer.model.zero_grad(set_to_none=True)
        gc.collect()
        if args.device.type == "cuda":
            torch.cuda.empty_cache()
        args.per_device_train_batch_size, args.gradient_accumulation_steps = size, samples // size
        trainer.runner.accumulation = args.gradient_accumulation_steps
        logger.warning(
            "out of memory with %d samples in a micro-batch: from step %d on %d samples and %d accumulation steps, the "
            "global batch of %d stays", before, trainer.state.global_step + 1, size, samples // size, samples,
        )  # fmt: skip
        progress, accumulation = trainer.progress, args.gradient_accumulation_steps
        start = progress.first_index + trainer.steps_done * samples
        done = trainer.state.global_step * accumulation
        loader = trainer.loader(progress.dataset, start, size, trainer.state.max_steps * accumulation, done)
        trainer.callback_handler.train_dataloader = loader
        return iter(loader)
