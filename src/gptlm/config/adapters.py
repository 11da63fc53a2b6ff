"""LoRA adapters of a fine-tuning run: those it starts from, and what can be wrong with the flags."""

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from gptlm.config.args.sft import LoraArguments, wrong_alphas, wrong_ranks
from gptlm.config.args.training import ModelArguments, ParallelArguments, TrainingArguments
from gptlm.config.origin import Origin, Source, derived
from gptlm.config.parser import Parsed, shown
from gptlm.config.problem import Problem
from gptlm.errors import GptlmError, named
from gptlm.json_text import parse_json
from gptlm.model.adapter_files import base_hint, check_fit, matrices_in, read_adapter_config
from gptlm.model.adapter_kinds import (
    ALL_LINEAR,
    MATRICES,
    NOT_TRAINED,
    SAVED,
    matrices_of,
    unknown_targets,
    wrong_initialization,
)
from gptlm.model.files import ADAPTER_CONFIG
from gptlm.model.hub import adapter_folder, is_hub_id
from gptlm.model.presets import PRESETS, Shape

LORA_ONLY = (
    "lora_rank", "lora_alpha", "lora_dropout", "lora_target_modules", "merge_weights", "use_dora", "use_rslora",
    "init_lora_weights", "lora_bias", "modules_to_save", "lora_rank_pattern", "lora_alpha_pattern",
    "bnb_4bit_quant_type", "use_bnb_nested_quant",
)  # fmt: skip
EVERY_MATRIX = ["c_attn", "c_proj", "c_fc"]
NARROWED = ("layers_to_transform", "layers_pattern", "exclude_modules")  # PEFT's: targets are fewer than they name
STAGE3 = "does not work with sharding stage3, which splits the weights; use stage1 or stage2"


def find_adapters(parsed: Parsed, printing: bool) -> Path | None:
    """The folder of the adapters that lora_path names; None without them, or while printing if they are not there.

    Their base becomes the model if the command names none.

    Raises:
        GptlmError: if they cannot be downloaded, or are damaged.
    """
    name = parsed[LoraArguments].lora_path
    if not name:
        return None
    unknown = "rank and scale of its adapters are not known"
    try:
        folder = adapter_folder(name)
    except GptlmError as error:
        if not printing:
            raise
        parsed.note(f"lora_path {name}: {unknown}, {error}")
        return None
    if printing and not folder.is_dir():
        parsed.note(f"lora_path {name} is not there: {unknown}")
        return None
    base = read_adapter_config(folder).get("base_model_name_or_path")
    if base and parsed.is_default("model_name_or_path"):
        if base not in PRESETS and not is_hub_id(base) and not Path(base).exists():
            raise GptlmError(f"{base}, the base model of the adapters {name}, is not here{base_hint(name)}")
        parsed.put(replace(parsed[ModelArguments], model_name_or_path=base), derived(f"the base of {name}"))
    return folder


def derive_adapters(parsed: Parsed, shape: Shape, folder: Path | None) -> list[Problem]:
    """Kind, rank, scale and modules of the adapters in lora_path; returns the arguments that contradict them.

    Args:
        folder: from `find_adapters`.
    """
    lora = parsed[LoraArguments]
    if lora.lora_target_modules == [ALL_LINEAR]:
        source = parsed.sources["lora_target_modules"]
        parsed.set("lora_target_modules", EVERY_MATRIX, source)
    if not lora.lora_path:
        return []
    name = lora.lora_path
    if not lora.lora:
        lora = parsed.put(replace(lora, lora=True), derived("lora_path"))
        parsed.note(f"{parsed.typed_as('lora_path')} {name}: its adapters are trained, {named('lora')} is on")
    if folder is None:
        return []
    settings = read_adapter_config(folder)
    check_fit(folder, shape)
    if odd := next((key for key in NOT_TRAINED if settings.get(key)), None):
        return [
            Problem(
                "lora_path",
                f"{name}: its adapters have {odd} = {settings.get(odd)!r}, which fine-tuning here cannot resume; "
                "merge them with gptlm merge-lora and start from the merged model",
            )
        ]
    problems = []
    if not parsed.is_default("init_lora_weights"):
        text = f"{lora.init_lora_weights}: the adapters in {name} have their values; leave the flag out"
        problems.append(Problem("init_lora_weights", text))
        parsed.put(replace(parsed[LoraArguments], init_lora_weights="true"), derived("lora_path"))
    for flag, value in _stored(folder, settings).items():
        given = parsed.value(flag)
        if parsed.is_default(flag):
            parsed.set(flag, value, Source(Origin.MODEL, str(Path(name) / ADAPTER_CONFIG)))
        elif _comparable(given) != _comparable(value):
            own, other = (f"{v:g}" if isinstance(v, float) else shown(v) for v in (value, given))
            problems.append(Problem(flag, f"{other}: the adapters in {name} have {own}; leave the flag out"))
    return problems


def _stored(folder: Path, settings: Mapping[str, Any]) -> dict[str, Any]:
    """The flags that describe adapters with PEFT's `settings`."""
    targets = settings["target_modules"]
    if isinstance(targets, str) or any(settings.get(key) for key in NARROWED):
        targets = matrices_in(folder)
    patterns = {key: settings.get(key) or None for key in ("rank_pattern", "alpha_pattern")}
    return {
        "lora_rank": settings["r"],
        "lora_alpha": float(settings["lora_alpha"]),
        "lora_target_modules": sorted(targets),
        "use_dora": bool(settings.get("use_dora")),
        "use_rslora": bool(settings.get("use_rslora")),
        "lora_bias": settings.get("bias") or "none",
        "modules_to_save": sorted(settings.get("modules_to_save") or ()),
        **{f"lora_{key}": json.dumps(value) if value else None for key, value in patterns.items()},
    }


def _comparable(value: Any) -> Any:
    if isinstance(value, str) and value.startswith("{"):
        return parse_json(value)
    return sorted(value) if isinstance(value, list) else value


def adapter_problems(parsed: Parsed, shape: Shape | None) -> Iterator[Problem]:
    """What can be wrong with the flags of adapters."""
    lora, training = parsed[LoraArguments], parsed[TrainingArguments]
    if lora.merge_weights and lora.lora and not training.do_train:
        output = training.output_dir or "OUTPUT_DIR"
        yield Problem(
            "merge_weights",
            f"merges the adapters that a run trains, this one trains none: add {named('do_train')}, or merge those "
            f"in {output} with gptlm merge-lora --lora_path {output} --output_path {output}/merged",
        )
    width, layers = (shape.hidden_size, shape.num_hidden_layers) if shape else (0, 1)
    if width and lora.lora and lora.lora_rank > width:
        yield Problem("lora_rank", f"{lora.lora_rank}: the matrices have rank {width}; give less")
    if not lora.lora_target_modules or (shape and unknown_targets(lora.lora_target_modules, layers)):
        yield Problem(
            "lora_target_modules",
            f"{shown(lora.lora_target_modules)}: expected {ALL_LINEAR}, or some of c_attn, c_proj, c_fc, "
            "h.N.attn.c_proj and the like",
        )
    if not lora.lora:
        yield from _quantization_problems(parsed, lora)
        return
    if wrong := wrong_initialization(lora.init_lora_weights.lower(), lora.lora_rank):
        yield Problem("init_lora_weights", wrong)
    for name in lora.modules_to_save:
        if name.rpartition(".")[2] not in SAVED:
            yield Problem(
                "modules_to_save",
                f"{name}: expected some of {', '.join(SAVED)}; matrices get adapters ({named('lora_target_modules')})",
            )
    if training.fp8:
        yield Problem("fp8", f"does not work with {named('lora')}: adapters are small, and so are their products")
    if any(
        text and wrong(text)
        for text, wrong in ((lora.lora_rank_pattern, wrong_ranks), (lora.lora_alpha_pattern, wrong_alphas))
    ):
        return  # each field's check says it
    yield from _quantization_problems(parsed, lora)
    yield from _pattern_problems(lora, layers, width)
    flags, degree = whole_weight_flags(lora), parsed[ParallelArguments].tensor_parallel_degree
    if "stage3" in parsed[ParallelArguments].sharding:
        yield from (Problem(flag, STAGE3) for flag in flags)
    elif degree > 1:
        text = (
            f"does not work with {named('tensor_parallel_degree')} {degree}, which splits the weights; use "
            f"{named('sharding')} stage2 with {named('tensor_parallel_degree')} 1"
        )
        yield from (Problem(flag, text) for flag in flags)


def _quantization_problems(parsed: Parsed, lora: LoraArguments) -> Iterator[Problem]:
    if lora.bits is None:
        return
    flag, parallel = f"load_in_{lora.bits}bit", parsed[ParallelArguments]
    if lora.load_in_4bit and lora.load_in_8bit:
        yield Problem("load_in_8bit", f"excludes {named('load_in_4bit')}; use one")
    if not lora.lora:
        yield Problem(flag, f"needs {named('lora')}: quantized matrices cannot be trained themselves")
    if parallel.sharding or parallel.deepspeed:
        yield Problem(
            flag,
            f"does not work with {named('sharding')} or {named('deepspeed')}: ZeRO cannot split quantized matrices, "
            "and adapters are small; leave it out",
        )
    if parallel.tensor_parallel_degree > 1 or parallel.pipeline_parallel_degree > 1:
        yield Problem(
            flag,
            f"does not work with {named('tensor_parallel_degree')}: quantized matrices cannot be split; leave one of "
            "them out",
        )
    if lora.lora and lora.kind.changes_base:
        yield Problem(
            "init_lora_weights",
            f"{lora.init_lora_weights}: with {named(flag)} the folder could not describe the trained model on its "
            "unchanged base; use gaussian",
        )


def whole_weight_flags(lora: LoraArguments) -> list[str]:
    """The flags given in `lora` that need each weight whole on every process."""
    kind = lora.kind
    wanted = {
        "use_dora": kind.dora,
        "init_lora_weights": kind.changes_base,
        "lora_bias": kind.bias != "none",
        "modules_to_save": bool(kind.modules_to_save),
    }
    return [flag for flag, is_given in wanted.items() if lora.lora and is_given]


def _pattern_problems(lora: LoraArguments, layers: int, width: int) -> Iterator[Problem]:
    names = [name for name in matrices_of(layers) if not unknown_targets(lora.lora_target_modules, layers)]
    for flag, patterns in (
        ("lora_rank_pattern", lora.kind.rank_pattern),
        ("lora_alpha_pattern", lora.kind.alpha_pattern),
    ):
        for pattern, value in patterns.items():
            try:
                matches = any(re.match(rf"(.*\.)?({pattern})$", name) for name in names)
            except re.error as error:
                yield Problem(flag, f"{pattern!r} is not a regular expression: {error}")
                continue
            if not matches:
                yield Problem(flag, f"{pattern}: no matrix has this name; they are h.N. and then {', '.join(MATRICES)}")
            if flag == "lora_rank_pattern" and width and value > width:
                yield Problem(flag, f"{pattern}: {value}: the matrices have rank {width}; give less")
