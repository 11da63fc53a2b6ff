"""In which form checkpoints are written."""

from collections.abc import Iterator
from dataclasses import replace

from gptlm.config.args.sft import LoraArguments
from gptlm.config.args.training import TrainingArguments
from gptlm.config.origin import derived
from gptlm.config.parser import Parsed
from gptlm.config.problem import Problem
from gptlm.errors import named
from gptlm.model.presets import Shape
from gptlm.parallel.dims import ParallelDims

LARGE = 10**9  # weights above which several processes write shards


def derive_checkpoint_format(parsed: Parsed, shape: Shape, dims: ParallelDims) -> None:
    """Set `checkpoint_format` where it is not given."""
    training = parsed[TrainingArguments]
    if training.checkpoint_format is not None:
        return
    form, why = ("hf", "adapters") if _trains_adapters(parsed) else default_format(shape, dims.world)
    parsed.put(replace(training, checkpoint_format=form), derived(why, recomputed=True))


def default_format(shape: Shape, processes: int) -> tuple[str, str]:
    """The form for a whole model where none is given, and why."""
    if processes == 1:
        return "hf", "one process"
    is_large = shape.weights > LARGE
    why = f"{processes} processes, {'more than' if is_large else 'up to'} {LARGE:,} weights"
    return "sharded" if is_large else "hf", why


def checkpoint_problems(parsed: Parsed) -> Iterator[Problem]:
    """Forms that do not fit the run."""
    training = parsed[TrainingArguments]
    if not training.do_train:
        return
    if training.checkpoint_format == "sharded" and _trains_adapters(parsed):
        yield Problem(
            "checkpoint_format",
            f"sharded is for whole models; adapters are small and written by one process ({named('lora')}): leave it "
            "out",
        )
    if training.async_save and training.checkpoint_format == "hf":
        yield Problem("async_save", f"needs {named('checkpoint_format')} sharded")


def _trains_adapters(parsed: Parsed) -> bool:
    return LoraArguments in parsed.groups and parsed[LoraArguments].lora
