"""Metrics and the loss of an evaluation that code of the caller computes from logits, beside gptlm's own."""

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from transformers import EvalPrediction

from gptlm.data.collate import IGNORED
from gptlm.training.metrics.loss import LossMetrics


class CallerMetrics(LossMetrics):
    """`own` metrics, with functions of the caller.

    Args:
        compute_metrics: gets logits and labels of all samples with targets; its metrics come beside those of `own`.
        preprocess: makes what is kept of the logits of a batch; None: all of them.
        loss: (outputs, labels, num_items_in_batch) -> mean over the targets of a batch, in place of the loss of `own`.
    """

    def __init__(
        self,
        own: LossMetrics,
        compute_metrics: Callable[[EvalPrediction], dict[str, float]] | None,
        preprocess: Callable[[Any, Any], Any] | None,
        loss: Callable[..., Any] | None,
    ):
        super().__init__(own.evaluated)
        self.own, self.compute_metrics, self.preprocess, self.loss = own, compute_metrics, preprocess, loss

    @torch.no_grad()
    def batch_sums(self, model: Any, inputs: dict[str, Any]) -> tuple[Any, Any]:
        """The sums of `own`; with `compute_metrics` pairs of them and logits, of the counts and labels.

        Args:
            inputs: with `labels` as the caller's functions get them, and `shift_labels` for `own`.
        """
        inputs = dict(inputs)
        labels = inputs.pop("labels")
        sums, counts = self.own.batch_sums(model, inputs)
        inputs.pop("shift_labels")
        outputs = model(**inputs)
        if self.loss is not None:
            items = counts[0].long()
            loss = self.loss(outputs, labels, num_items_in_batch=items)
            sums = sums.clone()
            sums.view(-1)[0] = loss.double() * items if items else 0.0
        if self.compute_metrics is None:
            return sums, counts
        logits = self.preprocess(outputs.logits, labels) if self.preprocess else outputs.logits
        return (sums, logits), (counts, labels)

    def means(self, prediction: EvalPrediction) -> dict[str, float]:
        if self.compute_metrics is None:
            return self.own.means(prediction)
        pairs: Any = prediction.predictions, prediction.label_ids
        (sums, logits), (counts, labels) = pairs
        found = self.own.means(EvalPrediction(predictions=sums, label_ids=counts))
        kept = (labels != IGNORED).any(axis=-1)  # the others only fill batches up
        logits = _rows(logits, kept)
        return found | self.compute_metrics(EvalPrediction(predictions=logits, label_ids=_rows(labels, kept)))

    def after_loop(self, trainer: Any, metrics: dict[str, float], prefix: str) -> dict[str, float]:
        return self.own.after_loop(trainer, metrics, prefix)

    def log_fields(self, logs: Any) -> dict[str, float]:
        return self.own.log_fields(logs)


def _rows(values: Any, kept: np.ndarray) -> Any:
    """The `kept` rows of an array, or of each array of a tuple."""
    if isinstance(values, (tuple, list)):
        return tuple(_rows(value, kept) for value in values)
    return values if kept.all() else values[kept]
