"""`gptlm COMMAND` with a timer, for the other benchmarks: `timed.py COMMAND [flags]`.

$GPTLM_STEP_TIMES names the file for the times: see `Timer` for training, `timed_scores` for `evaluate`. With
GPTLM_PROFILE=FILE training writes a profile. With GPTLM_GATE=FILE training creates FILE.ready after step 15 and waits
until FILE.go exists, so that several runs start together and are measured one after the other.
"""

import itertools
import json
import os
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from transformers import TrainerCallback

from gptlm.cli import main
from gptlm.ranks import is_main_process

START = time.perf_counter()
GATE = 15  # step


class Timer(TrainerCallback):
    """Notes seconds per step (means of ten), seconds to the end of the first, and our log's tokens per second."""

    def __init__(self) -> None:
        self.marks: list[float] = []
        self.waited = False
        self.tokens_per_second: list[float] = []

    def on_step_end(self, arguments: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step == 1 or state.global_step % 10 == 0:
            if torch.cuda.is_available():
                torch.cuda.synchronize()
            self.marks.append(time.perf_counter())
        if state.global_step == GATE and "GPTLM_GATE" in os.environ:
            wait_at(os.environ["GPTLM_GATE"])
            self.tokens_per_second = []
            self.waited = True

    def on_log(self, arguments: Any, state: Any, control: Any, logs: dict[str, float], **kwargs: Any) -> None:
        if self.waited:  # within this interval
            self.waited = False
        elif "interval_tokens_per_second_per_device" in logs:
            self.tokens_per_second.append(logs["interval_tokens_per_second_per_device"])

    def on_train_end(self, *args: Any, **kwargs: Any) -> None:
        seconds = [(b - a) / 10 for a, b in zip(self.marks[1:], self.marks[2:], strict=False)]
        first = self.marks[0] - START if self.marks else 0.0
        write({"seconds": seconds, "first": first, "tokens_per_second": self.tokens_per_second})
        if "GPTLM_GATE" in os.environ:
            os._exit(0)  # without saving the model


def wait_at(gate: str) -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    Path(f"{gate}.ready").touch()
    while not Path(f"{gate}.go").exists():
        time.sleep(0.02)


class Profile(TrainerCallback):
    """Writes the operators that took most time in steps 21 to 24."""

    def __init__(self, path: str) -> None:
        self.path = path
        self.profiler = torch.profiler.profile()

    def on_step_end(self, arguments: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step == 20:
            self.profiler.start()
        if state.global_step == 24:
            torch.cuda.synchronize()
            self.profiler.stop()
            averages = self.profiler.key_averages()
            by_device = averages.table(sort_by="self_device_time_total", row_limit=45, max_name_column_width=70)
            by_host = averages.table(sort_by="self_cpu_time_total", row_limit=25, max_name_column_width=50)
            Path(self.path).write_text(f"{by_device}\n{by_host}")


def write(found: dict[str, Any]) -> None:
    """Write `found` and the peak memory in GiB to $GPTLM_STEP_TIMES."""
    if is_main_process() and "GPTLM_STEP_TIMES" in os.environ:
        memory = torch.cuda.max_memory_allocated() / 2**30 if torch.cuda.is_available() else 0.0
        Path(os.environ["GPTLM_STEP_TIMES"]).write_text(json.dumps({**found, "memory": memory}))


def time_training() -> None:
    from gptlm.training.trainer import GPTTrainer

    timer, init = Timer(), GPTTrainer.__init__

    def with_timer(self: Any, *args: Any, **kwargs: Any) -> None:
        init(self, *args, **kwargs)
        self.add_callback(timer)
        if "GPTLM_PROFILE" in os.environ:
            self.add_callback(Profile(os.environ["GPTLM_PROFILE"]))

    GPTTrainer.__init__ = with_timer  # type: ignore[method-assign]


def time_scoring() -> None:
    """Note for each batch its inputs (tokens without padding) and its seconds."""
    from gptlm.inference.scoring import score
    from gptlm.recipes import evaluate

    def timed_scores(model: Any, rows: Any, *args: Any, **kwargs: Any) -> Iterator[Any]:
        tokens: list[int] = []
        marks = [time.perf_counter()]
        for scores in score(model, rows, *args, **kwargs):  # Python numbers: the device has finished
            marks.append(time.perf_counter())
            tokens.append(sum(len(rows[number].ids) - 1 for number, _ in scores))
            yield scores
        seconds = [b - a for a, b in itertools.pairwise(marks)]
        write({"seconds": seconds, "tokens": tokens, "first": marks[min(1, len(tokens))] - START})

    evaluate.score = timed_scores  # type: ignore[attr-defined]


def time_command(command: str, words: list[str]) -> int:
    """Run it; the timers of training and scoring write their own times."""
    if command in ("pretrain", "sft"):
        time_training()
    elif command == "evaluate":
        time_scoring()
    code = main([command, *words])
    if command == "predict":
        write({"seconds": []})
    return code


if __name__ == "__main__":
    sys.exit(time_command(sys.argv[1], sys.argv[2:]))
