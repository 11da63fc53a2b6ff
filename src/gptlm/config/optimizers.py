"""Optimizer and schedule of a run: their own settings, and which of them it can have."""

from collections.abc import Iterator
from typing import Any

from gptlm.config.args.choices import ADAMW, ELEMENTWISE, NO_SCHEDULES, NOT_OFFERED, OWN_SCHEDULES, STOCK_SCHEDULES
from gptlm.config.args.training import ParallelArguments, TrainingArguments
from gptlm.config.parser import Parsed
from gptlm.config.problem import Problem
from gptlm.errors import UsageError, named
from gptlm.json_text import parse_json
from gptlm.parallel.dims import ParallelDims


def optimizer_problems(parsed: Parsed, dims: ParallelDims | None) -> Iterator[Problem]:
    """What can be wrong with optimizer and schedule."""
    training = parsed[TrainingArguments]
    name = training.optim
    for flag in ("optim_args", "lr_scheduler_kwargs"):
        try:
            settings_of(getattr(training, flag))
        except UsageError as error:
            yield Problem(flag, error.marked)
    if name in NOT_OFFERED:
        yield Problem("optim", f"{name} {NOT_OFFERED[name]}")
    elif name not in ADAMW and training.do_train:
        yield from _layout_problems(parsed, dims)
    kind = training.lr_scheduler_type
    if kind in NO_SCHEDULES:
        yield Problem("lr_scheduler_type", f"{kind} follows the losses, which no checkpoint restores; use cosine")
    if training.lr_scheduler_kwargs and kind in OWN_SCHEDULES:
        flags = ", ".join(named(flag) for flag in ("min_learning_rate", "decay_steps", "lr_end", "power"))
        yield Problem("lr_scheduler_kwargs", f"with {named('lr_scheduler_type')} {kind}, which has {flags}")
    if kind in STOCK_SCHEDULES and "min_learning_rate" in parsed.typed:
        parsed.note(
            f"{named('min_learning_rate')} has no effect on {named('lr_scheduler_type')} {kind}; see "
            f"{named('lr_scheduler_kwargs')}"
        )
    if name in ADAMW and training.optim_args:
        yield Problem("optim_args", f"with {named('optim')} {name}; give {named('adam_beta1')} and its like")


def _layout_problems(parsed: Parsed, dims: ParallelDims | None) -> Iterator[Problem]:
    training, parallel = parsed[TrainingArguments], parsed[ParallelArguments]
    name = training.optim
    known = f"{', '.join(ELEMENTWISE)} and adamw do"
    if dims is not None and dims.is_model_parallel and name not in ELEMENTWISE:
        yield Problem("optim", f"{name} does not work with tensor and pipeline parallelism ({dims}); {known}")
    elif (parallel.sharding or parallel.deepspeed) and name not in ELEMENTWISE:
        flag = named("sharding" if parallel.sharding else "deepspeed")
        yield Problem("optim", f"{name} does not work with {flag}, which splits its state; {known}")
    elif "offload" in parallel.sharding:
        yield Problem("optim", f"{name} does not work with offload, whose optimizer is DeepSpeed's AdamW")
    is_half = (training.fp16 or training.bf16) and training.fp16_opt_level == "O2"
    if is_half and not parallel.sharding and not parallel.deepspeed and not (dims and dims.is_model_parallel):
        yield Problem(
            "optim",
            f"{name} with {named('fp16_opt_level')} O2: float32 masters of half-precision weights are AdamW's; use "
            f"{named('fp16_opt_level')} O1",
        )


def settings_of(text: str | None) -> dict[str, Any]:
    """Settings as a JSON object or as `name=value,name=value`; values are JSON, or words.

    Raises:
        UsageError: for another form.
    """
    text = (text or "").strip()
    if not text:
        return {}
    if text.startswith("{"):
        try:
            found = parse_json(text)
        except ValueError as error:
            raise UsageError(f"{text}: not a JSON object ({error})") from error
        return dict(found)
    pairs = [pair.partition("=") for pair in text.split(",")]
    if not all(name.strip() and equals for name, equals, _ in pairs):
        raise UsageError(f"{text}: expected name=value,name=value, or a JSON object")
    return {name.strip(): _value(value.strip()) for name, _, value in pairs}


def _value(text: str) -> Any:
    try:
        return parse_json(text.lower() if text in ("True", "False") else text)
    except ValueError:
        return None if text == "None" else text
