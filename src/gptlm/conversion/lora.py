"""Convert LoRA adapters between PaddleNLP's and PEFT's formats, both ways, exactly.

PaddleNLP (peft/lora) stores lora_A as (in, r) and lora_B as (r, out), PEFT their transposes. The rank-r adapters of
separate q, k and v become one of rank 3 r on c_attn: A = [A_q; A_k; A_v], B = blockdiag(B_q, B_k, B_v). A file has one
rank, so the other adapters are padded with zeros, and alpha grows with the rank: alpha / r stays.
"""

import json
import pickle
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from gptlm.conversion.detect import PADDLE_ADAPTERS, holds_paddle_adapters
from gptlm.conversion.gpt2_names import layer_and_part
from gptlm.conversion.paddle.layout import SPLIT_QKV, WRITTEN, gpt2_name, qkv_by_head, qkv_by_kind, to_array
from gptlm.conversion.paddle.read import configuration, read_tensors
from gptlm.errors import GptlmError, named
from gptlm.model.adapter_files import read_adapter_config
from gptlm.model.files import ADAPTER_CONFIG, ADAPTER_WEIGHTS, PEFT_PREFIX, read_json
from gptlm.model.safetensors_io import LazyTensors, save_tensors

PADDLE_CONFIG = "lora_config.json"
# PEFT's settings of plain LoRA, and PaddleNLP's switches of variants that compute something else.
PEFT_PLAIN: dict[str, tuple[Any, ...]] = {
    "use_dora": (None, False),
    "use_rslora": (None, False),
    "bias": (None, "none"),
    "rank_pattern": (None, {}),
}
PADDLE_VARIANTS = ("rslora", "pissa", "lorapro", "trainable_bias", "lora_use_mixer", "use_mora", "nola")


@dataclass(frozen=True)
class LowRank:
    """One adapter: `a` (r, in), `b` (r -> out: (out, r)). The weight (in, out) changes by scale * (b a)^T."""

    a: Tensor
    b: Tensor

    def padded(self, rank: int) -> "LowRank":
        """The same adapter with zeros up to `rank`."""
        more = rank - len(self.a)
        a = torch.cat([self.a, self.a.new_zeros(more, self.a.shape[1])])
        return LowRank(a, torch.cat([self.b, self.b.new_zeros(len(self.b), more)], dim=1))


@dataclass(frozen=True)
class Adapters:
    """`modules` by name, such as "transformer.h.0.attn.c_attn"; their common scale alpha / r; their base model."""

    modules: dict[str, LowRank]
    scale: float
    base: str

    def delta(self, module: str) -> Tensor:
        """What the adapter adds to the weight of `module`: (in, out) in float64."""
        adapter = self.modules[module]
        return self.scale * (adapter.b.double() @ adapter.a.double()).t()

    def max_rank(self) -> int:
        return max(len(adapter.a) for adapter in self.modules.values())


def format_of(folder: Path) -> str | None:
    """The format of the adapters in `folder`: "paddle", "peft", or None without adapters."""
    if holds_paddle_adapters(folder) or (folder / PADDLE_CONFIG).is_file():
        return "paddle"
    return "peft" if (folder / ADAPTER_CONFIG).is_file() else None


def read_paddle(folder: Path, heads: int | None) -> Adapters:
    """The adapters that PaddleNLP wrote into `folder`.

    Args:
        heads: of the model, for a fused qkv_proj where `folder` has no config.json.

    Raises:
        GptlmError: if files are missing or damaged, or the adapters are not plain LoRA.
    """
    path = folder / PADDLE_CONFIG
    settings = read_json(path, remedy="copy the adapters again")
    rank, alpha = settings.get("r"), settings.get("lora_alpha")
    if not isinstance(rank, int) or rank < 1 or not isinstance(alpha, int | float) or not alpha > 0:
        raise GptlmError(f"{path} is damaged: r is {rank!r}, lora_alpha {alpha!r}; copy the adapters again")
    _check_plain(settings, dict.fromkeys(PADDLE_VARIANTS, (None, False, "")), folder)
    weights = next((folder / name for name in PADDLE_ADAPTERS if (folder / name).is_file()), None)
    if weights is None:
        raise GptlmError(f"{folder} has no {PADDLE_ADAPTERS[0]}; copy the adapters again")
    stored = {name: tensor.t() for name, tensor in read_tensors(weights).items()}
    modules = _adapters_in(stored, lambda place: gpt2_name(f"{place}.weight"), weights)
    heads = configuration(folder).get("num_attention_heads") or heads
    base = str(settings.get("base_model_name_or_path") or "")
    return Adapters(_merge_qkv(modules, heads, folder), alpha / rank, base)


def read_peft(folder: Path) -> Adapters:
    """The adapters in PEFT's `folder`.

    Raises:
        GptlmError: if files are missing or damaged, or the adapters are not plain LoRA.
    """
    settings = read_adapter_config(folder)
    _check_plain(settings, PEFT_PLAIN, folder)
    weights = folder / ADAPTER_WEIGHTS
    modules = _adapters_in(LazyTensors([weights]), lambda place: f"{place.removeprefix(PEFT_PREFIX)}.weight", weights)
    base = str(settings.get("base_model_name_or_path") or "")
    return Adapters(modules, settings["lora_alpha"] / settings["r"], base)


def write_peft(adapters: Adapters, folder: Path, dtype: torch.dtype | None) -> None:
    """Write a PEFT folder for stock GPT-2, whose matrices are (in, out): `fan_in_fan_out`."""
    rank = adapters.max_rank()
    tensors = {}
    for module, adapter in adapters.modules.items():
        for half, tensor in zip("AB", (adapter.padded(rank).a, adapter.padded(rank).b)):
            tensors[f"{PEFT_PREFIX}{module}.lora_{half}.weight"] = tensor.to(dtype or tensor.dtype)
    parts = {layer_and_part(module)[1] for module in adapters.modules}
    # PEFT matches suffixes: "c_proj" means both of attn.c_proj and mlp.c_proj, so one of them needs its full name
    both = {"attn.c_proj", "mlp.c_proj"} <= parts
    targets = {part if part.endswith("c_proj") and not both else part.split(".")[-1] for part in parts}
    config = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": adapters.base,
        "r": rank,
        "lora_alpha": adapters.scale * rank,
        "lora_dropout": 0.0,
        "target_modules": sorted(targets),
        "fan_in_fan_out": True,
        "bias": "none",
        "inference_mode": True,
    }
    (folder / ADAPTER_CONFIG).write_text(json.dumps(config, indent=1) + "\n", encoding="utf-8")
    save_tensors(folder / ADAPTER_WEIGHTS, tensors, {"format": "pt"})


def write_paddle(adapters: Adapters, folder: Path, dtype: torch.dtype | None, heads: int | None) -> None:
    """Write PaddleNLP's format.

    Args:
        heads: given: for a model with a fused qkv_proj; None: with separate q, k and v, which get the same A.
    """
    rank = adapters.max_rank()
    arrays: dict[str, np.ndarray] = {}
    targets = set()
    for module, adapter in adapters.modules.items():
        layer, part = layer_and_part(module)
        a, b = adapter.padded(rank).a, adapter.padded(rank).b
        outputs = {WRITTEN[part]: b}
        if part == "attn.c_attn" and heads is None:
            outputs = {f"self_attn.{name}": rows for name, rows in zip(SPLIT_QKV, b.chunk(3))}
        elif part == "attn.c_attn":
            outputs = {WRITTEN[part]: qkv_by_head(b, heads or 1, 0)}
        for name, rows in outputs.items():
            prefix = f"gpt.decoder.layers.{layer}.{name}"
            arrays[f"{prefix}.lora_A"] = to_array(a.t().to(dtype or a.dtype))
            arrays[f"{prefix}.lora_B"] = to_array(rows.t().to(dtype or rows.dtype))
            targets.add(f".*{name.split('.')[-1]}.*")
    config = {
        "r": rank,
        "lora_alpha": adapters.scale * rank,
        "lora_dropout": 0.0,
        "merge_weights": False,
        "target_modules": sorted(targets),
        "base_model_name_or_path": adapters.base,
        "tensor_parallel_degree": 1,
    }
    (folder / PADDLE_CONFIG).write_text(json.dumps(config, indent=1) + "\n", encoding="utf-8")
    with (folder / PADDLE_ADAPTERS[0]).open("wb") as file:
        pickle.dump(arrays, file, protocol=4)


def max_difference(one: Adapters, other: Adapters) -> float:
    """The largest difference of what the two add to any weight. Raises GptlmError if they have different modules."""
    if one.modules.keys() != other.modules.keys():
        raise GptlmError("the converted adapters have other modules than the original; do not use the result")
    return max(float((one.delta(module) - other.delta(module)).abs().max()) for module in one.modules)


def _check_plain(settings: Mapping[str, Any], plain: Mapping[str, tuple[Any, ...]], folder: Path) -> None:
    for key, values in plain.items():
        if settings.get(key) not in values:
            raise GptlmError(f"the adapters in {folder} have {key} = {settings[key]!r}; only plain LoRA is converted")


def _adapters_in(
    tensors: Mapping[str, Tensor], gpt2_weight: Callable[[str], str | None], path: Path
) -> dict[str, LowRank]:
    """Pairs the tensors `PLACE.lora_A[.weight]` (r, in) and `PLACE.lora_B[.weight]` (out, r).

    Args:
        gpt2_weight: the name of the adapted weight in stock GPT-2 by PLACE.
    """
    halves: dict[str, dict[str, Tensor]] = {}
    for name, tensor in tensors.items():
        place, _, half = name.removesuffix(".weight").rpartition(".lora_")
        weight = gpt2_weight(place)
        if half not in ("A", "B") or weight is None or layer_and_part(weight)[0] is None:
            raise GptlmError(f"{path} contains {name}, which is not a LoRA adapter of GPT-2's layers")
        halves.setdefault(weight.removesuffix(".weight"), {})[half] = tensor
    incomplete = next((module for module, pair in halves.items() if len(pair) < 2), None)
    if incomplete or not halves:
        raise GptlmError(f"{path} lacks one half of {incomplete}" if incomplete else f"{path} contains no adapters")
    return {module: LowRank(pair["A"], pair["B"]) for module, pair in halves.items()}


def _merge_qkv(modules: dict[str, LowRank], heads: int | None, folder: Path) -> dict[str, LowRank]:
    """`modules` with separate q, k and v as blocks of c_attn, and the rows of a fused one in stock GPT-2's order."""
    parts = ("c_attn", *SPLIT_QKV)
    result = {name: adapter for name, adapter in modules.items() if not name.endswith(parts)}
    for attention in sorted({name.rpartition(".")[0] for name in modules if name.endswith(parts)}):
        fused = modules.get(f"{attention}.c_attn")
        if fused is None:
            result[f"{attention}.c_attn"] = _blocks([modules.get(f"{attention}.{part}") for part in SPLIT_QKV])
        elif not heads or len(fused.b) % (3 * heads):
            raise GptlmError(f"{folder} does not contain the number of heads; give {named('num_attention_heads')}")
        else:
            result[f"{attention}.c_attn"] = LowRank(fused.a, qkv_by_kind(fused.b, heads, 0))
    return result


def _blocks(parts: list[LowRank | None]) -> LowRank:
    """The block adapter of q, k and v; a missing one adds nothing."""
    present = [part for part in parts if part is not None]
    a = torch.cat([part.a for part in present])
    b = torch.block_diag(*(part.b for part in present))
    rows = iter(b.split(len(present[0].b)))
    missing = a.new_zeros(len(present[0].b), len(a))
    return LowRank(a, torch.cat([missing if part is None else next(rows) for part in parts]))
