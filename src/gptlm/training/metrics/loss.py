"""Losses: the mean over the steps of a run, and the mean over all targets of an evaluation."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from transformers import EvalPrediction

from gptlm.checkpoint.manifest import Manifest


class TrainLoss:
    """Sums of the losses of steps, kept on the device until a log line or a checkpoint needs them.

    Attributes:
        pending: sum since the last log line; every step adds to it.
        steps_without_loss: earlier steps that are not in the sum, because another library made them.
    """

    def __init__(self, device: torch.device, manifest: Manifest | None):
        self.pending = torch.zeros((), device=device)
        self._before = float(manifest.loss_sum) if manifest else 0.0
        self.steps_without_loss = manifest.steps_without_loss if manifest else 0
        self._logged = 0.0  # sum of this start, up to the last log line
        self.run_sum = self._before  # of the whole run, as of the last `look`

    def look(self, pending: float) -> None:
        """Note the value of `pending`, a mean over processes."""
        self.run_sum = self._before + self._logged + pending

    def drain(self, pending: float) -> None:
        """A log line has used `pending`."""
        self._logged += pending
        self.pending.zero_()

    def run_mean(self, pending: float, global_step: int) -> float:
        """Mean over all steps of the run, earlier starts included."""
        return (self._before + self._logged + pending) / max(global_step - self.steps_without_loss, 1)


class LossMetrics:
    """What an evaluation computes: the mean loss over all its targets, however they are batched and distributed.

    Args:
        evaluated: the evaluated model, where it is not the one trained in the output folder.
    """

    def __init__(self, evaluated: str | None = None):
        self.evaluated = evaluated

    @torch.no_grad()
    def batch_sums(self, model: Any, inputs: dict[str, Any]) -> tuple[Tensor, Tensor]:
        """Sums over the targets of a batch, (1, ...) float64, and their number, (1,) float64."""
        count = (inputs["shift_labels"] != -100).sum().double().view(1)
        return model(**inputs, num_items_in_batch=1).loss.double().view(1), count

    def means(self, prediction: EvalPrediction) -> dict[str, float]:
        """Metrics from the sums (under predictions) and counts (under label_ids) of all batches."""
        return {"loss": float(prediction.predictions.sum() / max(prediction.label_ids.sum(), 1))}  # type: ignore[union-attr]

    def after_loop(self, trainer: Any, metrics: dict[str, float], prefix: str) -> dict[str, float]:
        """More metrics of a finished evaluation."""
        return {}

    def log_fields(self, logs: Mapping[str, float]) -> dict[str, float]:
        """Fields added to a log line."""
        return {}
