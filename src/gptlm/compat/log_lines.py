"""Log lines of training and evaluation in the format of the originals, because scripts grep them.

    paddlenlp     PaddleNLP's Trainer
    fleetx-2022   FleetX, August 2022 (examples/gpt)
    fleetx        PaddleFleetX's tools/auto.py
    megatron      Megatron-DeepSpeed's training.py
    oneflow       OneFlow-Benchmark's GPT as a table; oneflow-normal is its other format

Learning rates are those of the next update, as in the originals.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass


@dataclass(frozen=True)
class Step:
    """Values of a logged step; means are over the steps since the last line.

    Attributes:
        number, last: this step, and the last of the run.
        loss: mean.
        learning_rate: of the next update.
        gradient_norm: of this step; None if it is not known.
        loss_scale: of float16; None in other precisions.
        skipped: steps without an update because of overflow.
        seconds, reading: mean time of a step, and the part of it spent waiting for data.
        batch: the global batch in samples.
        samples, tokens: trained in the mean step.
        consumed_samples, consumed_tokens: trained in the whole run.
        accumulation: micro-batches of a step.
        world: processes.
        flops: of a step over all processes, recomputation included.
    """

    number: int
    last: int
    loss: float
    learning_rate: float
    gradient_norm: float | None
    loss_scale: float | None
    skipped: int
    seconds: float
    reading: float
    batch: int
    samples: float
    tokens: float
    consumed_samples: int
    consumed_tokens: int
    accumulation: int
    world: int
    flops: float


@dataclass(frozen=True)
class Evaluation:
    """`name` is "eval" or "test"; `seconds` all batches took together."""

    name: str
    step: int
    loss: float
    batches: int
    seconds: float


@dataclass(frozen=True)
class LogFormat:
    """The format of lines.

    Attributes:
        head: before a line, "paddlenlp" `[date] [ INFO] - `, "fleetx" `[INFO date file:line] ` or "" for nothing.
        title: lines before the first step.
        step, evaluation: functions that make the line; None: PaddleNLP's format.
    """

    head: str
    step: Callable[[Step], str] | None = None
    evaluation: Callable[[Evaluation], str] | None = None
    title: tuple[str, ...] = ()


def flops_per_sample(*, layers: int, hidden: int, vocabulary: int, length: int, recompute: bool) -> float:
    """Floating-point operations of one training sample: Megatron-LM's formula (arXiv 2104.04473, appendix).

    24 f S L h^2 (1 + S / (6 h) + V / (16 L h)), f = 4 with recomputation, else 3.
    """
    factor = 4 if recompute else 3
    share = 1 + length / (6 * hidden) + vocabulary / (16 * layers * hidden)
    return 24.0 * factor * length * layers * hidden**2 * share


def perplexity(loss: float) -> float:
    """exp(min(20, loss)), as in Megatron-LM."""
    return math.exp(min(20.0, loss))


def _fleetx_2022(step: Step) -> str:
    speed = 1 / step.seconds
    return (
        f"global step {step.number}, epoch: 0, batch: {step.number - 1}, loss: {step.loss:.9f}, "
        f"avg_reader_cost: {step.reading:.5f} sec, avg_batch_cost: {step.seconds:.5f} sec, speed: {speed:.2f} step/s, "
        f"ips_total: {step.tokens * speed:.0f} tokens/s, ips: {step.tokens * speed / step.world:.0f} tokens/s, "
        f"learning rate: {step.learning_rate:.5e}"
    )


def _fleetx_2022_evaluation(found: Evaluation) -> str:
    cost = found.seconds / found.batches
    return (
        f"[{found.name}] step {found.step}, epoch: 0, batch: {found.batches - 1}, loss: {found.loss:.9f}, "
        f"avg_eval_cost: {cost:.5f} sec, speed: {1 / cost:.2f} step/s"
    )


def _fleetx(step: Step) -> str:
    return f"[train] epoch: 0 step: {step.number - 1} lr: {step.learning_rate:e} loss: {step.loss:f}"


def _fleetx_evaluation(found: Evaluation) -> str:
    return f"[{found.name}] epoch: 0 step: {found.step - 1} loss: {found.loss:f}"


def _megatron(step: Step) -> str:
    scale = 1.0 if step.loss_scale is None else step.loss_scale
    fields = [
        f"iteration {step.number:8d}/{step.last:8d}",
        f"consumed samples: {step.consumed_samples:12d}",
        f"consumed tokens: {step.consumed_tokens:12d}",
        f"elapsed time per iteration (ms): {step.seconds * 1000:.1f}",
        f"learning rate: {step.learning_rate:.3E}",
        f"global batch size: {step.batch:5d}",
        f"lm loss: {step.loss:.6E}",
        f"loss scale: {scale:.1f}",
        f"grad norm: {step.gradient_norm:.3f}" if step.gradient_norm is not None else "",
        f"number of skipped iterations: {step.skipped:3d}",
        "number of nan iterations:   0",  # a NaN or infinite loss stops the run
        f"samples per second: {step.samples / step.seconds:.3f}",
        f"TFLOPs: {step.flops / step.seconds / step.world / 1e12:.2f}",
    ]
    return " " + " | ".join(field for field in fields if field) + " |"


def _megatron_evaluation(found: Evaluation) -> str:
    where = f"at iteration {found.step}" if found.name == "eval" else "at the end of training for test data"
    line = f" validation loss {where} | lm loss value: {found.loss:.6E} | lm loss PPL: {perplexity(found.loss):.6E} | "
    return "\n".join(("-" * len(line), line, "-" * len(line)))


ONEFLOW_WIDTHS = {"step": 8, "micro_batches": 15, "samples": 15, "throughput": 10, "latency": 10, "loss": 8}


def _oneflow_fields(step: Step) -> dict[str, str]:
    return {
        "step": str(step.number),
        "micro_batches": str(step.number * step.accumulation),
        "samples": str(step.consumed_samples),
        "throughput": f"{step.samples / step.seconds:.5f}",
        "latency": f"{step.seconds:.5f}",
        "loss": f"{step.loss:.5f}",
    }


def _row(fields: Mapping[str, str]) -> str:
    return "| " + " | ".join(f"{value:<{ONEFLOW_WIDTHS[name]}}" for name, value in fields.items()) + " |"


def _oneflow(step: Step) -> str:
    return _row(_oneflow_fields(step))


def _oneflow_normal(step: Step) -> str:
    return "".join(f"{name}={value}," for name, value in _oneflow_fields(step).items())


FORMATS = {
    "paddlenlp": LogFormat("paddlenlp"),
    "fleetx-2022": LogFormat("paddlenlp", _fleetx_2022, _fleetx_2022_evaluation),
    "fleetx": LogFormat("fleetx", _fleetx, _fleetx_evaluation),
    "megatron": LogFormat("", _megatron, _megatron_evaluation),
    "oneflow": LogFormat(
        "",
        _oneflow,
        title=(_row({name: name for name in ONEFLOW_WIDTHS}), _row({n: "-" * w for n, w in ONEFLOW_WIDTHS.items()})),
    ),
    "oneflow-normal": LogFormat("", _oneflow_normal),
}
