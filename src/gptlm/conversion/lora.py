"""LoRA adapters of PaddleNLP and of PEFT, both ways, exactly.

PaddleNLP keeps lora_A (in, r) and lora_B (r, out) (peft/lora), PEFT their transposes. Where q, k and v are apart, their
three rank-r adapters become one of rank 3 r on c_attn: A = [A_q; A_k; A_v], B = blockdiag(B_q, B_k, B_v). As files have
one rank, the other adapters are filled up with zeros and alpha grows with the rank, so that alpha / r stays.
"""

import json
import pickle
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from gptlm.conversion.detect import PADDLE_ADAPTERS, holds_paddle_adapters
from gptlm.conversion.gpt2_names import layer_and_part
from gptlm.conversion.paddle import names as words
from gptlm.conversion.paddle.arrays import tensors_of
from gptlm.conversion.paddle.read import configuration, gpt2_name
from gptlm.conversion.paddle.write import THEIRS, as_array
from gptlm.conversion.source import first
from gptlm.errors import GptlmError
from gptlm.model.adapter_files import read_adapter_config
from gptlm.model.files import ADAPTER_CONFIG, ADAPTER_WEIGHTS, PEFT_PREFIX
from gptlm.model.safetensors_io import LazyTensors, save_tensors

PADDLE_CONFIG = "lora_config.json"
PLAIN = {"use_dora": (None, False), "use_rslora": (None, False), "bias": (None, "none"), "rank_pattern": (None, {})}
ODD = ("rslora", "pissa", "lorapro", "trainable_bias", "lora_use_mixer", "use_mora", "nola")  # other maths there
BOTH = ("attn.c_proj", "mlp.c_proj")


@dataclass(frozen=True)
class Pair:
    """One adapter: a (r, in), b (out, r); the weight (in, out) grows by scale x (b a) transposed."""

    a: Tensor
    b: Tensor


@dataclass(frozen=True)
class Adapters:
    """`pairs` by module, such as "transformer.h.0.attn.c_attn"; their common scale; the model they belong to."""

    pairs: dict[str, Pair]
    scale: float
    base: str

    def change(self, module: str) -> Tensor:
        """What the adapter adds to the weight of `module`, (in, out) in float64."""
        pair = self.pairs[module]
        return self.scale * (pair.b.double() @ pair.a.double()).t()

    def of_one_rank(self) -> tuple[int, dict[str, Pair]]:
        """The highest rank, and every pair filled up to it with zeros."""
        rank = max(len(pair.a) for pair in self.pairs.values())
        return rank, {module: _filled(pair, rank) for module, pair in self.pairs.items()}


def kind_of(folder: Path) -> str | None:
    """Whose adapters `folder` holds: paddle, peft, or None."""
    if holds_paddle_adapters(folder) or (folder / PADDLE_CONFIG).is_file():
        return "paddle"
    return "peft" if (folder / ADAPTER_CONFIG).is_file() else None


def read_paddle(folder: Path, heads: int | None) -> Adapters:
    """The adapters that PaddleNLP wrote into `folder`.

    Args:
        heads: of the model, where qkv_proj is one and `folder` has no config.json.

    Raises:
        GptlmError: if files are missing or damaged, or the adapters are of another kind.
    """
    settings = _settings(folder)
    weights = next((folder / name for name in PADDLE_ADAPTERS if (folder / name).is_file()), None)
    if weights is None:
        raise GptlmError(f"{folder} holds no {PADDLE_ADAPTERS[0]}; copy the adapters again")
    heads = first(configuration(folder), words.SIZES["num_attention_heads"]) or heads
    found: dict[str, dict[str, Tensor]] = {}
    for name, tensor in tensors_of(weights).items():
        place, _, kind = name.rpartition(".lora_")
        own = gpt2_name(f"{place}.weight")
        if kind not in ("A", "B") or own is None:
            raise GptlmError(f"{weights} holds {name}, which is no adapter of GPT-2's layers")
        found.setdefault(own.removesuffix(".weight"), {})[kind] = tensor.t()
    lacking = next((module for module, pair in found.items() if len(pair) < 2), None)
    if lacking or not found:
        raise GptlmError(f"{weights} lacks one half of {lacking}" if lacking else f"{weights} holds no adapters")
    pairs = {module: Pair(pair["A"], pair["B"]) for module, pair in found.items()}
    scale = float(settings["lora_alpha"]) / settings["r"]
    return Adapters(_with_c_attn(pairs, heads, folder), scale, str(settings.get("base_model_name_or_path") or ""))


def read_peft(folder: Path) -> Adapters:
    """The adapters in PEFT's `folder`.

    Raises:
        GptlmError: if files are missing or damaged, or the adapters are of another kind.
    """
    settings = read_adapter_config(folder)
    for key, plain in PLAIN.items():
        if settings.get(key) not in plain:
            raise GptlmError(f"the adapters in {folder} have {key} = {settings[key]!r}; only plain ones are converted")
    found: dict[str, dict[str, Tensor]] = {}
    for name, tensor in LazyTensors([folder / ADAPTER_WEIGHTS]).items():
        place, _, kind = name.removeprefix(PEFT_PREFIX).removesuffix(".weight").rpartition(".lora_")
        if kind not in ("A", "B") or layer_and_part(f"{place}.weight")[0] is None:
            raise GptlmError(f"{folder / ADAPTER_WEIGHTS} holds {name}, which is no adapter of GPT-2's layers")
        found.setdefault(place, {})[kind] = tensor
    pairs = {module: Pair(pair["A"], pair["B"]) for module, pair in found.items()}
    scale = settings["lora_alpha"] / settings["r"]
    return Adapters(pairs, scale, str(settings.get("base_model_name_or_path") or ""))


def write_peft(adapters: Adapters, folder: Path, dtype: torch.dtype | None) -> None:
    """A plain PEFT folder for stock GPT-2, whose matrices are (in, out) (`fan_in_fan_out`)."""
    rank, pairs = adapters.of_one_rank()
    tensors = {}
    for module, pair in pairs.items():
        tensors[f"{PEFT_PREFIX}{module}.lora_A.weight"] = pair.a.to(dtype or pair.a.dtype)
        tensors[f"{PEFT_PREFIX}{module}.lora_B.weight"] = pair.b.to(dtype or pair.b.dtype)
    config = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": adapters.base,
        "r": rank,
        "lora_alpha": adapters.scale * rank,
        "lora_dropout": 0.0,
        "target_modules": _targets(pairs),
        "fan_in_fan_out": True,
        "bias": "none",
        "inference_mode": True,
    }
    (folder / ADAPTER_CONFIG).write_text(json.dumps(config, indent=1) + "\n", encoding="utf-8")
    save_tensors(folder / ADAPTER_WEIGHTS, tensors, {"format": "pt"})


def write_paddle(adapters: Adapters, folder: Path, dtype: torch.dtype | None, heads: int | None) -> None:
    """PaddleNLP's form; `heads` given: for a model with one qkv_proj, None: q, k and v apart, which share A."""
    rank, pairs = adapters.of_one_rank()
    arrays: dict[str, np.ndarray] = {}
    targets = set()
    for module, pair in pairs.items():
        layer, part = layer_and_part(module)
        places = {THEIRS[part]: pair.b}
        if part == "attn.c_attn" and heads is None:
            places = dict(zip(words.SEPARATE, pair.b.chunk(3, dim=0)))
        elif part == "attn.c_attn":  # rows [3, heads, size] -> [heads, 3, size]
            places = {words.FUSED: pair.b.unflatten(0, (3, heads or 1, -1)).transpose(0, 1).flatten(0, 2)}
        for place, b in places.items():
            name = f"gpt.decoder.layers.{layer}.{place}"
            arrays[f"{name}.lora_A"] = as_array(pair.a.t().to(dtype or pair.a.dtype))
            arrays[f"{name}.lora_B"] = as_array(b.t().to(dtype or b.dtype))
            targets.add(f".*{place.split('.')[-1]}.*")
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


def largest_difference(one: Adapters, other: Adapters) -> float:
    """Of what the two add to any weight.

    Raises:
        GptlmError: if they are on different modules.
    """
    if one.pairs.keys() != other.pairs.keys():
        raise GptlmError("the converted adapters are on other modules; the result is not to be used")
    return max(float((one.change(module) - other.change(module)).abs().max()) for module in one.pairs)


def _settings(folder: Path) -> dict[str, Any]:
    path = folder / PADDLE_CONFIG
    try:
        settings = json.loads(path.read_text(encoding="utf-8"))
        rank, alpha = settings["r"], float(settings["lora_alpha"])
    except (OSError, ValueError, LookupError, TypeError) as error:
        raise GptlmError(f"{path} cannot be read ({error!r}); copy the adapters again") from error
    if not isinstance(rank, int) or rank < 1 or not alpha > 0:
        raise GptlmError(f"{path} is damaged: r is {rank!r}, lora_alpha {alpha:g}; copy the adapters again")
    odd = next((key for key in ODD if settings.get(key)), None)
    if odd:
        raise GptlmError(f"the adapters in {folder} have {odd} = {settings[odd]!r}; only plain ones are converted")
    return settings


def _with_c_attn(pairs: dict[str, Pair], heads: int | None, folder: Path) -> dict[str, Pair]:
    """q, k and v as blocks of c_attn; a fused adapter with its rows by kind."""
    result = {m: pair for m, pair in pairs.items() if not m.endswith((".attn.c_attn", *words.SPLIT))}
    for module in sorted({m.rpartition(".")[0] for m in pairs if m.endswith((".attn.c_attn", *words.SPLIT))}):
        fused = pairs.get(f"{module}.c_attn")
        if fused is None:
            result[f"{module}.c_attn"] = _blocks([pairs.get(f"{module}.{part}") for part in words.SPLIT])
            continue
        if not heads or len(fused.b) % (3 * heads):
            raise GptlmError(f"{folder} does not say how many heads: give --num_attention_heads")
        rows = fused.b.unflatten(0, (heads, 3, -1)).transpose(0, 1).flatten(0, 2)
        result[f"{module}.c_attn"] = Pair(fused.a, rows)
    return result


def _blocks(parts: list[Pair | None]) -> Pair:
    """Block adapter of q, k and v; one that is not there adds nothing."""
    there = [part for part in parts if part is not None]
    width = len(there[0].b)
    a = torch.cat([part.a for part in there])
    rows, place = [], 0
    for part in parts:
        row = a.new_zeros(width, len(a))
        if part is not None:
            row[:, place : place + len(part.a)] = part.b
            place += len(part.a)
        rows.append(row)
    return Pair(a, torch.cat(rows))


def _filled(pair: Pair, rank: int) -> Pair:
    more = rank - len(pair.a)
    a = torch.cat([pair.a, pair.a.new_zeros(more, pair.a.shape[1])])
    return Pair(a, torch.cat([pair.b, pair.b.new_zeros(len(pair.b), more)], dim=1))


def _targets(pairs: dict[str, Pair]) -> list[str]:
    """Names of modules as PEFT takes them: the shortest that mean these and no others."""
    parts = {layer_and_part(module)[1] for module in pairs}
    both = set(BOTH) <= parts
    return sorted({part.split(".")[-1] if both or part not in BOTH else part for part in parts})
