"""Values of a DeepSpeed configuration file that arguments also set: they hold where the argument was not given."""

from collections.abc import Iterator
from typing import Any

from gptlm.config.args.training import ParallelArguments, TrainingArguments
from gptlm.config.field import LARGEST
from gptlm.config.files import read_json
from gptlm.config.origin import Origin, Source
from gptlm.config.parser import Parsed, shown
from gptlm.config.problem import Problem
from gptlm.errors import named
from gptlm.parallel.zero_config import superseded_blocks

SIZES = {  # keys of the file -> arguments
    "train_batch_size": "global_batch_size",
    "train_micro_batch_size_per_gpu": "per_device_train_batch_size",
    "gradient_accumulation_steps": "gradient_accumulation_steps",
    "gradient_clipping": "max_grad_norm",
}
WHOLE = tuple(SIZES)[:3]
SCALE = ("loss_scale_window", "hysteresis", "min_loss_scale", "loss_scale")  # of the fp16 block, and arguments
LEVEL = "fp16_opt_level"


def read_deepspeed(file: str) -> dict[str, Any]:
    """The JSON object in `file`. Raises UsageError."""
    return read_json(file, f"{named('deepspeed')} {file}")


def take_deepspeed(parsed: Parsed) -> Iterator[Problem]:
    """Fill in the values of the --deepspeed file; yields what contradicts a given argument.

    Raises:
        UsageError: if the file cannot be read.
    """
    file = parsed[ParallelArguments].deepspeed
    if "deepspeed" in parsed.bare and not file:
        yield Problem("", f"{parsed.bare['deepspeed']} needs a configuration file: give {named('deepspeed')} FILE")
    if not file or not parsed[TrainingArguments].do_train:
        return
    config = read_deepspeed(file)
    yield from (Problem("", text) for text in superseded_blocks(config, file))
    for key, flag in SIZES.items():
        yield from _take(parsed, file, key, flag, config.get(key, "auto"))
    block = config.get("fp16")
    fp16 = block if isinstance(block, dict) else {}
    for key in SCALE:
        value = fp16.get(key, "auto")
        if key != "loss_scale" or value != 0:  # DeepSpeed's 0 is the dynamic loss scale
            yield from _take(parsed, file, f"fp16.{key}", key, value)
    yield from _precision(parsed, file, config)


def _take(parsed: Parsed, file: str, key: str, flag: str, value: Any) -> Iterator[Problem]:
    if value == "auto":
        return
    number = isinstance(value, (int, float)) and not isinstance(value, bool) and abs(value) <= LARGEST
    if not number or (key in WHOLE and value != int(value)):
        kind = "whole number" if key in WHOLE else "number"
        yield Problem("", f'{file}: {key} is {value!r}; expected a {kind} or "auto"')
    elif not parsed.given(flag):
        parsed.set(flag, int(value) if key in WHOLE else value, Source(Origin.FILE, f"{file}: {key}"))
        parsed.typed.setdefault(flag, f"{key} ({file})")
    elif parsed.value(flag) != value:
        yield Problem(
            "",
            f"{file} sets {key} to {value}, {named(flag)} is {shown(parsed.value(flag))}; give one of them or make "
            "them equal",
        )


def _precision(parsed: Parsed, file: str, config: dict[str, Any]) -> Iterator[Problem]:
    """DeepSpeed's own half precision keeps half-precision weights: level O2."""
    for kind in ("fp16", "bf16"):
        block, on = config.get(kind), parsed.value(kind)
        enabled = block.get("enabled", "auto") if isinstance(block, dict) else "auto"
        source = Source(Origin.FILE, f"{file}: {kind}.enabled")
        if enabled is True and not on and parsed.given(kind):
            yield Problem(
                "",
                f"{file} sets {kind}.enabled to true, {named(kind)} is false; give one of them or make them equal",
            )
        elif enabled is True:
            if not on:
                parsed.set(kind, True, source)
            if not parsed.given(LEVEL):
                parsed.set(LEVEL, "O2", source)
        elif enabled is False and on and not parsed.given(LEVEL):
            parsed.set(LEVEL, "O1", source)
