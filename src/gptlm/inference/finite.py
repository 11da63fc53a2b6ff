"""What to say where a model computes NaN or infinity: generation and scoring share one check and one sentence."""

from typing import Any

import torch
from torch import Tensor

from gptlm.errors import GptlmError


def check_finite(values: Tensor, model: Any) -> None:
    """Raises GptlmError, which names the model and the likely cause, if a logit or loss in `values` is not finite."""
    if not bool(torch.isfinite(values).all()):
        raise GptlmError(f"the model {model.name_or_path or 'in memory'} computes NaN or infinity: {_cause(model)}")


def _cause(model: Any) -> str:
    weights = dict(model.named_parameters())
    damaged = [name for name, weight in weights.items() if not bool(torch.isfinite(weight).all())]
    if damaged:
        return (
            f"{len(damaged)} of its {len(weights)} weight tensors contain them (first: {damaged[0]}); its training "
            "diverged or its file is damaged, take an earlier checkpoint or copy the folder again"
        )
    if any(weight.dtype == torch.float16 for weight in model.parameters()):
        return "its activations overflow float16; use --bf16, or neither for float32"
    if any(weight.numel() == 0 for weight in weights.values()):  # ZeRO stage 3 keeps them elsewhere
        return "its training diverged or its file is damaged, take an earlier checkpoint or copy the folder again"
    return "its weights are finite but so large that activations overflow; take an earlier checkpoint"
