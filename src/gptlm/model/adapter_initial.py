"""PiSSA and OLoRA: adapters that begin with a part of the base weights, saved as LoRA on the unchanged base.

Training computes W' + s B A with W' = W - s B0 A0, where A0 and B0 are the first values. The folder holds
[A; A0] and [B, -B0] of twice the rank: W + s (B A - B0 A0), as PEFT's `path_initial_model_for_weight_conversion` writes
it. Both halves are there, so a checkpoint also gives W' back without a second decomposition.
"""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from gptlm.model.adapter_kinds import double_rank

INITIAL = "initial_values"  # key in the metadata of the adapter file: its second halves are A0 and -B0
A, B = ".lora_A.", ".lora_B."


def initial_values(model: nn.Module) -> dict[str, Tensor]:
    """Copies of the adapters' matrices in float32 on the CPU, by parameter name."""
    pairs = ((name, value) for name, value in model.named_parameters() if A in name or B in name)
    return {name: value.detach().float().cpu().clone() for name, value in pairs}


def whole(state: Mapping[str, Tensor], initial: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """`state` with `initial` values as second halves of the adapters' matrices; both have the file's names."""
    joined = dict(state)
    for name, first in initial.items():
        value, sign = state[name].cpu().float(), -1 if B in name else 1
        joined[name] = torch.cat([value, sign * first], dim=_rank_dimension(name))
    return joined


def trained_half(name: str, value: Tensor) -> Tensor:
    """What a run trains of a matrix in the file."""
    return value.chunk(2, _rank_dimension(name))[0].contiguous() if A in name or B in name else value


def initial_half(name: str, value: Tensor) -> Tensor:
    """A0 or B0 of a matrix in the file."""
    half = value.chunk(2, _rank_dimension(name))[1].contiguous()
    return -half if B in name else half


@torch.no_grad()
def take_from_base(model: nn.Module, initial: Mapping[str, Tensor], adapter: str) -> None:
    """W' = W - s B0 A0 for each matrix of `model` with adapters, in the order of operations of PEFT."""
    for name, module in model.named_modules():
        layer: Any = module
        if f"{name}{A}{adapter}.weight" not in initial:
            continue
        weight = layer.get_base_layer().weight
        a, b = (initial[f"{name}{part}{adapter}.weight"] for part in (A, B))
        weight.copy_(weight.float() - layer.scaling[adapter] * b @ a)


def converted(settings: dict[str, Any]) -> dict[str, Any]:
    """PEFT's configuration of the folder, made of that of the run."""
    double_rank(settings)
    return settings | {"init_lora_weights": True}


def _rank_dimension(name: str) -> int:
    return 0 if A in name else 1
