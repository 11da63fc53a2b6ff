"""`gptlm pretrain` with a timer, for train.py (see `Timer`). With GPTLM_PROFILE=FILE it writes a profile."""

import json
import os
import sys
import time
from pathlib import Path
from typing import Any

import torch
from transformers import TrainerCallback

from gptlm.cli import main
from gptlm.ranks import is_main_process
from gptlm.training.trainer import GPTTrainer


class Timer(TrainerCallback):
    """Writes seconds per step (means of ten), seconds to the end of the first, and peak memory to $GPTLM_STEP_TIMES."""

    def __init__(self) -> None:
        self.start = time.perf_counter()
        self.first = 0.0
        self.marks: list[float] = []

    def on_step_end(self, arguments: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step == 1 or state.global_step % 10 == 0:
            if torch.cuda.is_available():
                torch.cuda.synchronize()
            self.marks.append(time.perf_counter())

    def on_train_end(self, *args: Any, **kwargs: Any) -> None:
        if is_main_process() and "GPTLM_STEP_TIMES" in os.environ:
            seconds = [(b - a) / 10 for a, b in zip(self.marks[1:], self.marks[2:], strict=False)]
            memory = torch.cuda.max_memory_allocated() / 2**30 if torch.cuda.is_available() else 0.0
            found = {"seconds": seconds, "first": self.marks[0] - self.start, "memory": memory}
            Path(os.environ["GPTLM_STEP_TIMES"]).write_text(json.dumps(found))


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


if __name__ == "__main__":
    timer = Timer()
    init = GPTTrainer.__init__

    def with_timer(self: Any, *args: Any, **kwargs: Any) -> None:
        init(self, *args, **kwargs)
        self.add_callback(timer)
        if "GPTLM_PROFILE" in os.environ:
            self.add_callback(Profile(os.environ["GPTLM_PROFILE"]))

    GPTTrainer.__init__ = with_timer  # type: ignore[method-assign]
    sys.exit(main(["pretrain", *sys.argv[1:]]))
