"""PaddleNLP's log lines, which users' scripts parse, the console handler, and the throughput meter."""

import logging
import sys
import time
from collections.abc import Mapping
from typing import TextIO

from tqdm import tqdm

from gptlm.quiet import hide_trainer_resume_warning


class ConsoleHandler(logging.Handler):
    """`[2026-11-27 10:00:00,123] [    INFO] - text` on stdout or stderr, above a progress bar if there is one.

    A record's `head` selects another prefix: "fleetx" is `[INFO 2026-11-27 10:00:00,123 trainer.py:1] text`, "" is
    no prefix.
    """

    COLOURS = {"DEBUG": "\x1b[35m", "INFO": "\x1b[32m", "WARNING": "\x1b[33m", "ERROR": "\x1b[31m"}

    def __init__(self, *, to_stderr: bool = False):
        super().__init__()
        self.to_stderr = to_stderr

    @property
    def stream(self) -> TextIO:
        """Looked up for each line: either may have been redirected since."""
        return sys.stderr if self.to_stderr else sys.stdout

    def emit(self, record: logging.LogRecord) -> None:
        tqdm.write(self._head(record) + record.getMessage(), file=self.stream)
        self.stream.flush()

    def _head(self, record: logging.LogRecord) -> str:
        wanted = getattr(record, "head", "paddlenlp")
        stamp = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(record.created)) + f",{int(record.msecs):03d}"
        if wanted == "fleetx":
            return f"[{record.levelname} {stamp} {record.filename}:{record.lineno}] "
        if wanted == "":
            return ""
        head = f"[{stamp}] [{record.levelname:>8}]"
        if self.stream.isatty():
            head = f"{self.COLOURS.get(record.levelname, '')}{head}\x1b[0m"
        return f"{head} - "


def start_logging(*, main_process: bool, to_stderr: bool = False) -> None:
    """Send the package's log to stdout, or to stderr. Other processes than the main process log errors only."""
    logger = logging.getLogger("gptlm")
    logger.handlers = [ConsoleHandler(to_stderr=to_stderr)]
    logger.propagate = False
    logger.setLevel(logging.INFO if main_process else logging.ERROR)
    hide_trainer_resume_warning()


def log_line(values: Mapping[str, float]) -> str:
    """`loss: 5.96143436, learning_rate: 0.0009804, global_step: 1, ...` in the order of `values`."""
    return ", ".join(f"{key}: {value}" for key, value in values.items())


def table(title: str, metrics: Mapping[str, float]) -> list[str]:
    """The lines of `***** train metrics *****` and below, keys padded as in HuggingFace's table."""
    shown = {key: f"{value:.4f}" if isinstance(value, float) else str(value) for key, value in sorted(metrics.items())}
    keys = max(map(len, shown), default=0)
    values = max(map(len, shown.values()), default=0)
    return [f"***** {title} metrics *****", *(f"  {k:<{keys}} = {v:>{values}}" for k, v in shown.items())]


class Throughput:
    """Speed between two log lines.

    Args:
        world: processes of the job.
        utilisation: share of the device's peak FLOP/s used by one token per second; None: unknown.

    Attributes:
        mean: samples and tokens of the mean step between the last two log lines.
        seconds, reading: duration of that step, and the part of it spent waiting for data.
    """

    def __init__(self, *, world: int, utilisation: float | None = None):
        self.world = world
        self.utilisation = utilisation
        self.restart(0, (0, 0))

    def restart(self, step: int, trained: tuple[int, int]) -> None:
        """Measure from now on, at `step`, after `trained` samples and tokens."""
        self._step, self._trained, self._time, self._reading = step, trained, time.perf_counter(), 0.0

    def waited(self, seconds: float) -> None:
        """Add time spent waiting for data."""
        self._reading += seconds

    def exclude(self, seconds: float) -> None:
        """Exclude the last `seconds` (evaluation, saving) from the interval."""
        self._time = min(self._time + seconds, time.perf_counter())

    def interval(self, step: int, trained: tuple[int, int]) -> dict[str, float]:
        """PaddleNLP's `interval_*` fields since the last call or `restart`, and `mfu` where the peak is known.

        Args:
            trained: samples and tokens up to `step`: without padding and fill-up rows.
        """
        seconds, steps = max(time.perf_counter() - self._time, 1e-9), step - self._step
        new = [now - before for now, before in zip(trained, self._trained, strict=True)]
        self.seconds, self.reading = seconds / max(steps, 1), self._reading / max(steps, 1)
        self.mean = (new[0] / max(steps, 1), new[1] / max(steps, 1))
        self.restart(step, trained)
        samples, tokens = new[0] / seconds, new[1] / seconds / self.world
        known = {} if self.utilisation is None else {"mfu": round(tokens * self.utilisation, 4)}
        return {
            "interval_runtime": round(seconds, 4),
            "interval_samples_per_second": round(samples, 4),
            "interval_tokens_per_second_per_device": round(tokens, 4),
            "interval_steps_per_second": round(steps / seconds, 4),
            **known,
        }


def train_fields(
    loss: float,
    learning_rate: float,
    step: int,
    progress: float,
    *,
    gpu: Mapping[str, float],
    speed: Mapping[str, float],
    process: Mapping[str, float],
) -> dict[str, float]:
    """The fields of a training log line in PaddleNLP's order; `learning_rate` is that of the next step."""
    return {
        "loss": round(loss, 8),
        "learning_rate": float(f"{learning_rate:.3e}"),
        "global_step": step,
        **gpu,
        **speed,
        **process,
        "progress_or_epoch": round(progress, 4),
    }
