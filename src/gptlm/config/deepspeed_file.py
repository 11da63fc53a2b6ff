"""What a DeepSpeed configuration file says about things that flags say, too: it holds where no flag was given."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from gptlm.config.parser import LARGEST, Parsed, shown
from gptlm.errors import UsageError, named
from gptlm.parallel.zero_config import superseded_blocks

SIZES = {  # keys of the file -> flags
    "train_batch_size": "global_batch_size",
    "train_micro_batch_size_per_gpu": "per_device_train_batch_size",
    "gradient_accumulation_steps": "gradient_accumulation_steps",
    "gradient_clipping": "max_grad_norm",
}
WHOLE = tuple(SIZES)[:3]
SCALE = {
    "loss_scale_window": "loss_scale_window",
    "hysteresis": "hysteresis",
    "min_loss_scale": "min_loss_scale",
    "loss_scale": "loss_scale",
}
LEVEL = "fp16_opt_level"


def read_deepspeed(file: str) -> dict[str, Any]:
    """The JSON object in `file`. Raises UsageError."""
    try:
        config = json.loads(Path(file).read_text(encoding="utf-8"))
    except OSError as error:
        raise UsageError(f"--{named('deepspeed')} {file}: cannot be read: {error.strerror}") from error
    except (ValueError, RecursionError) as error:
        raise UsageError(f"--{named('deepspeed')} {file}: no valid JSON: {error}") from error
    if not isinstance(config, dict):
        raise UsageError(f"--{named('deepspeed')} {file}: expected a JSON object")
    return config


def take_deepspeed(parsed: Parsed) -> Iterator[str]:
    """Fill flags that were not given with the numbers of the --deepspeed file; what it contradicts is returned.

    Raises:
        UsageError: if the file cannot be read.
    """
    file = parsed.values["deepspeed"]
    if "deepspeed" in parsed.bare and not file:
        yield f"{parsed.bare['deepspeed']} needs a configuration file: give --deepspeed FILE"
    if not file or not parsed.values["do_train"]:
        return
    config = read_deepspeed(file)
    yield from superseded_blocks(config, file)
    for key, flag in SIZES.items():
        yield from _take(parsed, key, flag, config.get(key, "auto"))
    block = config.get("fp16")
    fp16 = block if isinstance(block, dict) else {}
    for key, flag in SCALE.items():
        value = fp16.get(key, "auto")
        if key != "loss_scale" or value != 0:  # 0 is the dynamic one
            yield from _take(parsed, f"fp16.{key}", flag, value)
    yield from _precision(parsed, config)


def _take(parsed: Parsed, key: str, flag: str, value: Any) -> Iterator[str]:
    file = parsed.values["deepspeed"]
    if value == "auto":
        return
    number = isinstance(value, (int, float)) and not isinstance(value, bool) and abs(value) <= LARGEST
    if not number or (key in WHOLE and value != int(value)):
        yield f'{file}: {key} is {value!r}; expected a {"whole " if key in WHOLE else ""}number or "auto"'
    elif not parsed.given(flag):
        parsed.set(flag, int(value) if key in WHOLE else value, f"{file}: {key}")
        parsed.typed.setdefault(flag, f"{key} ({file})")
    elif parsed.values[flag] != value:
        yield (
            f"{file} says {key} {value}, {named(flag)} says {shown(parsed.values[flag])}; give one of them or make "
            "them equal"
        )


def _precision(parsed: Parsed, config: dict[str, Any]) -> Iterator[str]:
    """DeepSpeed's own half precision keeps half-precision weights: level O2."""
    file, values = parsed.values["deepspeed"], parsed.values
    for kind in ("fp16", "bf16"):
        block = config.get(kind)
        enabled = block.get("enabled", "auto") if isinstance(block, dict) else "auto"
        if enabled is True and not values[kind] and parsed.given(kind):
            yield f"{file} says {kind}.enabled true, {named(kind)} says false; give one of them or make them equal"
        elif enabled is True:
            if not values[kind]:
                parsed.set(kind, True, f"{file}: {kind}.enabled")
            if not parsed.given(LEVEL):
                parsed.set(LEVEL, "O2", f"{file}: {kind}.enabled")
        elif enabled is False and values[kind] and not parsed.given(LEVEL):
            parsed.set(LEVEL, "O1", f"{file}: {kind}.enabled")
