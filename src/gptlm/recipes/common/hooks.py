"""What Python code hands to a training beside its arguments. The commands hand over nothing."""

import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from transformers import TrainerCallback

from gptlm.training.trainer import GPTTrainer

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Hooks:
    """Parts of a training that are the caller's; each has the meaning it has for transformers.Trainer.

    `labels` and `label_ids` are the targets of the positions: `logits[:, t]` predicts `labels[:, t]`, nothing is to be
    shifted.

    Attributes:
        callbacks: instances or classes.
        compute_metrics: of an evaluation, from logits and targets; added to gptlm's own.
        preprocess_logits_for_metrics: (logits, labels) -> what `compute_metrics` gets as predictions.
        compute_loss_func: (outputs, labels, num_items_in_batch) -> loss of a micro-batch as its share of the step's.
        finished: called with the trainer at the end.
    """

    callbacks: tuple[TrainerCallback | type[TrainerCallback], ...] = ()
    compute_metrics: Callable[[Any], dict[str, float]] | None = None
    preprocess_logits_for_metrics: Callable[[Any, Any], Any] | None = None
    compute_loss_func: Callable[..., Any] | None = None
    finished: Callable[[GPTTrainer], None] | None = None

    @property
    def of_trainer(self) -> dict[str, Any]:
        """Arguments of the Trainer; callbacks come beside others."""
        return {
            "compute_metrics": self.compute_metrics,
            "preprocess_logits_for_metrics": self.preprocess_logits_for_metrics,
            "compute_loss_func": self.compute_loss_func,
        }

    @property
    def graph_obstacle(self) -> str | None:
        """Why forward and backward cannot be captured as a CUDA graph: a function of the caller may do anything."""
        return "the loss is that of compute_loss_func" if self.compute_loss_func else None

    def log(self, label_smoothing: float = 0.0) -> None:
        """Log what is not as in a command."""
        if self.compute_loss_func and label_smoothing:
            logger.warning("label_smoothing_factor %g has no effect: compute_loss_func is the loss", label_smoothing)
        if self.compute_loss_func:
            logger.info("the loss is that of compute_loss_func, from logits: without the fused loss and CUDA graphs")

    def end(self, trainer: GPTTrainer) -> None:
        if self.finished is not None:
            self.finished(trainer)


NO_HOOKS = Hooks()
