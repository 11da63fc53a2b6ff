"""Log lines of training and evaluation: their fields, their format, and the speed between two of them."""

import logging
from collections.abc import Callable
from typing import Any

from gptlm.compat.log_lines import FORMATS, Evaluation, Step
from gptlm.training.metrics.memory import gpu_fields, process_fields
from gptlm.training.metrics.throughput import Throughput, log_line, train_fields

logger = logging.getLogger(__name__)

CALLER = 3  # FleetX's line head names the source file: that of the Trainer, two calls up
HIDDEN = ("model_preparation_time", "total_flos")


class RunLog:
    """Turns what the Trainer logs into fields and a printed line.

    Args:
        log_format: whose lines are printed, see compat/log_lines.py.
        process_memory: add the process's memory to the line.
        flops_per_sample: floating-point operations of one sample, for formats that print them.
        utilisation: share of a device's peak that one token per second is; None: not known.
    """

    def __init__(
        self,
        *,
        log_format: str = "paddlenlp",
        process_memory: bool = False,
        flops_per_sample: float = 0.0,
        utilisation: float | None = None,
    ):
        self.format, self._is_title_due = FORMATS[log_format], True
        self.process_memory, self.flops_per_sample, self.utilisation = process_memory, flops_per_sample, utilisation
        self.skipped = 0  # steps without an update between the last two lines
        self.evaluated_batches = 0  # of the last evaluation, per process

    def start_clock(self, world: int) -> Throughput:
        """The clock of a run on `world` processes."""
        self.throughput = Throughput(world=world, utilisation=self.utilisation)
        return self.throughput

    def fields(self, trainer: Any, logs: dict[str, float]) -> dict[str, float]:
        """The fields of a log line, in PaddleNLP's order."""
        progress = trainer.state.epoch or 0.0
        if "loss" not in logs:
            shown = {key: value for key, value in logs.items() if not key.endswith(HIDDEN)}
            return shown | {"progress_or_epoch": round(progress, 4)}
        has_gpu = trainer.args.device.type == "cuda"
        scale = trainer.loss_scale
        if scale:
            self.skipped, scale.skipped = scale.skipped, 0
        shown = train_fields(
            logs["loss"],
            trainer.learning_rate,
            trainer.state.global_step,
            progress,
            gpu=gpu_fields() if has_gpu else {},
            speed=self.throughput.interval(trainer.state.global_step, trainer.trained),
            process=process_fields(gpu=has_gpu) if self.process_memory else {},
        )
        return shown | {key: value for key, value in logs.items() if key not in shown}  # fields of the caller's own

    def unprinted(self, trainer: Any, shown: dict[str, float]) -> dict[str, float]:
        """Fields of a training line that are noted beside those `shown`: what plots of a run need.

        `skipped_steps` are those without an update since the last line, because of an overflow.
        """
        scale = trainer.loss_scale
        memory = {} if trainer.args.device.type == "cuda" else process_fields(gpu=False)
        found = {"consumed_tokens": trainer.consumed.tokens, **memory}
        if scale:
            found |= {"loss_scale": scale.value, "skipped_steps": self.skipped}
        return {key: value for key, value in found.items() if key not in shown}

    def print(self, trainer: Any, shown: dict[str, float], loss: float | None, grad_norm: float | None) -> None:
        """Print `shown` in the chosen format; `loss` is that of a training line."""
        if loss is not None and self.format.step is not None:
            self._print_step(self.format.step, trainer, loss, grad_norm)
        elif self.format.evaluation is not None and {"eval_loss", "test_loss"} & shown.keys():
            self._print_evaluation(self.format.evaluation, trainer.state.global_step, shown)
        else:
            logger.info(log_line(shown))

    def _print_step(self, line: Callable[[Step], str], trainer: Any, loss: float, grad_norm: float | None) -> None:
        if self._is_title_due:
            self._is_title_due = False
            for title in self.format.title:
                logger.info(title, extra={"head": self.format.head})
        scale, (samples, tokens) = trainer.loss_scale, self.throughput.mean
        consumed = trainer.consumed
        step = Step(
            number=trainer.state.global_step,
            last=trainer.state.max_steps,
            loss=loss,
            learning_rate=trainer.learning_rate,
            gradient_norm=grad_norm,
            loss_scale=scale.value if scale else None,
            skipped=self.skipped,
            seconds=self.throughput.seconds,
            reading=self.throughput.reading,
            batch=trainer.samples_per_step,
            samples=samples,
            tokens=tokens,
            consumed_samples=consumed.examples,
            consumed_tokens=consumed.tokens,
            accumulation=trainer.args.gradient_accumulation_steps * getattr(trainer.runner, "micro_batches", 1),
            world=trainer.args.world_size,
            flops=samples * self.flops_per_sample,
        )
        logger.info(line(step), extra={"head": self.format.head}, stacklevel=CALLER)

    def _print_evaluation(self, line: Callable[[Evaluation], str], step: int, shown: dict[str, float]) -> None:
        name = "eval" if "eval_loss" in shown else "test"
        seconds = max(shown.get(f"{name}_runtime", 0.0), 1e-9)
        found = Evaluation(name, step, shown[f"{name}_loss"], max(self.evaluated_batches, 1), seconds)
        for text in line(found).splitlines():
            logger.info(text, extra={"head": self.format.head}, stacklevel=CALLER)
