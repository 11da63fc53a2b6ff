"""--profile: a trace and a table of some training steps, by torch.profiler."""

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile, schedule
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from gptlm import owned
from gptlm.checkpoint.folder import Checkpoint
from gptlm.config.run import Run
from gptlm.errors import UsageError, named
from gptlm.training.trainer import GPTTrainer

logger = logging.getLogger(__name__)

WARM_UP = 3  # steps of a start before the profiled ones: code is compiled, shapes are captured, the profiler starts
FOLDER = "profile"
ROWS = 40  # of the table


def check_profile(run: Run, resume: Checkpoint | None) -> None:
    """Raises UsageError if the run ends before the last profiled step."""
    steps, training = run.training.profile, run.training
    if steps is None:
        return
    if not training.do_train:
        logger.info("--profile has no effect: nothing is trained")
        return
    left = training.max_steps - (resume.manifest.global_step if resume else 0)
    if left < WARM_UP + steps:
        raise UsageError(
            f"{named('profile')} {steps}: the run has {max(left, 0)} steps to train, {WARM_UP} of warm-up come before "
            f"the {steps} profiled ones; give fewer or train longer"
        )


@contextmanager
def profiled(run: Run, trainer: GPTTrainer) -> Iterator[None]:
    """Profile the steps that --profile asks for, on the main process, while `trainer` trains in the block."""
    if run.training.profile is None or not trainer.args.should_save:
        yield
        return
    callback = StepProfile(run.training.profile, Path(trainer.args.output_dir or ""))
    trainer.add_callback(callback)
    try:
        yield
    finally:
        callback.close()
        trainer.remove_callback(callback)


class StepProfile(TrainerCallback):
    """Profiles `steps` steps after `WARM_UP` ones, and writes the files below `output_dir`."""

    def __init__(self, steps: int, output_dir: Path):
        self.steps, self.output_dir = steps, output_dir
        self._profile: profile | None = None
        self._first = 0

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        self._first = state.global_step + WARM_UP + 1
        on_gpu = [ProfilerActivity.CUDA] if args.device.type == "cuda" else []
        self._profile = profile(
            activities=[ProfilerActivity.CPU, *on_gpu],
            schedule=schedule(wait=WARM_UP - 1, warmup=1, active=self.steps, repeat=1),
            on_trace_ready=self._write,
        )
        self._profile.start()

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        if self._profile is None:
            return
        last = self._first + self.steps - 1
        if state.global_step == last and args.device.type == "cuda":
            torch.cuda.synchronize()  # kernels that still run belong to the step
        self._profile.step()
        if state.global_step >= last:
            self.close()

    def close(self) -> None:
        """Stop, also where the run has ended before the last of the steps."""
        running, self._profile = self._profile, None
        if running is None:
            return
        running.on_trace_ready = None
        running.stop()

    def _write(self, finished: profile) -> None:
        name = f"{FOLDER}/steps-{self._first}-{self._first + self.steps - 1}"
        on_gpu = ProfilerActivity.CUDA in finished.activities
        order = "self_device_time_total" if on_gpu else "self_cpu_time_total"
        try:
            (self.output_dir / FOLDER).mkdir(parents=True, exist_ok=True)
            for ending in ("json", "txt"):
                owned.make_way(self.output_dir, f"{name}.{ending}")
            owned.note(self.output_dir, [f"{name}.json", f"{name}.txt"], owned.RUN)
            finished.export_chrome_trace(str(self.output_dir / f"{name}.json"))
            table = finished.key_averages().table(sort_by=order, row_limit=ROWS)
            (self.output_dir / f"{name}.txt").write_text(table, encoding="utf-8")
        except OSError as error:  # training is worth more than its profile
            path = self.output_dir / name
            logger.warning("cannot write the profile %s: %s; training continues without it", path, error.strerror)
            return
        logger.info(
            "profile of the steps %d to %d: %s.json (chrome://tracing, ui.perfetto.dev) and %s.txt",
            *(self._first, self._first + self.steps - 1, self.output_dir / name, self.output_dir / name),
        )
