"""The loss of an evaluation: the mean over all its targets, however they lie in batches and on ranks."""

from typing import Any

import torch
from transformers import EvalPrediction


@torch.no_grad()
def loss_sum(model: Any, inputs: dict[str, Any]) -> tuple[torch.Tensor, torch.Tensor]:
    """Sum of the losses and number of targets of one batch, (1,) float64 each."""
    count = (inputs["shift_labels"] != -100).sum().double().view(1)
    return model(**inputs, num_items_in_batch=1).loss.double().view(1), count


def mean_loss(prediction: EvalPrediction) -> dict[str, float]:
    """`loss` from the sums (under predictions) and counts (under label_ids) of all batches."""
    return {"loss": float(prediction.predictions.sum() / max(prediction.label_ids.sum(), 1))}  # type: ignore[union-attr]
