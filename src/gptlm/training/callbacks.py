"""Small things that happen at fixed moments of the Trainer's loop."""

import logging
import time
from datetime import timedelta
from typing import Any

from tqdm import tqdm
from transformers import ProgressCallback, TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from gptlm.kernels.float8 import Float8Weights

logger = logging.getLogger(__name__)


class Pace:
    """What a run shows of itself between log lines.

    Args:
        trainer: a weak reference to the GPTTrainer, which would be kept alive by its own callback otherwise.
    """

    def __init__(self, trainer: Any):
        self.trainer = trainer

    def start(self, step: int) -> None:
        """Training begins after `step`."""
        self.first = self.logged = step
        self.mark: tuple[float, int, int] | None = None  # time, step and tokens after the first step, which compiles

    def text(self, step: int, last: int) -> str:
        """Loss, learning rate, speed and remaining time after `step` of `last`; waits for the device.

        The loss is the mean since the last log line. That of several processes is a sum over them: it is left out.
        """
        trainer, now = self.trainer, time.monotonic()
        tokens = trainer.trained.tokens
        parts = []
        if trainer.args.world_size == 1 and step > self.logged:
            parts.append(f"loss {trainer.train_loss.pending.item() / (step - self.logged):.4f}")
        parts.append(f"learning rate {trainer.learning_rate:.3g}")
        if self.mark is None:
            self.mark = now, step, tokens
        elif step > self.mark[1]:
            seconds = max(now - self.mark[0], 1e-9)
            remaining = (last - step) * seconds / (step - self.mark[1])
            parts.append(f"{(tokens - self.mark[2]) / seconds:,.0f} tokens/s")
            parts.append(f"{timedelta(seconds=round(remaining))} left")
        return ", ".join(parts)


class ProgressBar(ProgressCallback):
    """The bar of HuggingFace's Trainer with loss, learning rate and tokens/s, without its printing of log dicts.

    A resumed run begins at its step, so that the remaining time is that of the steps of this start.
    """

    SECONDS = 5.0  # between two looks at the loss, each of which waits for the device

    def __init__(self, trainer: Any):
        super().__init__()
        self.pace, self.shown = Pace(trainer), 0.0

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        self.pace.start(state.global_step)
        self.current_step, self.shown = state.global_step, 0.0
        if state.is_world_process_zero:
            self.training_bar = tqdm(total=state.max_steps, initial=state.global_step, dynamic_ncols=True, unit="step")

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        if self.training_bar is not None and time.monotonic() - self.shown >= self.SECONDS:
            text = self.pace.text(state.global_step, state.max_steps)
            self.training_bar.set_postfix_str(
                text.rpartition(", ")[0] if text.endswith(" left") else text, refresh=False
            )
            self.shown = time.monotonic()
        super().on_step_end(args, state, control, **kwargs)

    def on_log(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, logs: Any = None, **kwargs: Any
    ) -> None:
        self.pace.logged = state.global_step if "loss" in (logs or {}) else self.pace.logged


class EndOfTurn(TrainerCallback):
    """Keeps `generation_config.eos_token_id`: the Trainer adds the tokenizer's eos to it when training begins."""

    def __init__(self, ends: int | list[int]):
        self._ends = ends

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, model: Any = None, **kwargs: Any
    ) -> None:
        model.generation_config.eos_token_id = self._ends


class RoundWeights(TrainerCallback):
    """Rounds the weights of float8 products anew before each step."""

    def __init__(self, weights: Float8Weights):
        self.weights = weights

    def on_step_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        self.weights.refresh()


class PlainProgress(TrainerCallback):
    """Where there is no bar: a line after the first step, and when nothing was logged for a while.

    The while is 10 seconds, then twice as long each time up to a minute, and a minute in the formats of other
    libraries, which have no line after the first step.
    """

    SECONDS, LONGEST = 10.0, 60.0

    def __init__(self, trainer: Any):
        self.pace = Pace(trainer)
        self.is_own_format = trainer.run_log.format.step is None
        self.patience = self.SECONDS if self.is_own_format else self.LONGEST
        self._restart()

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        self.pace.start(state.global_step)
        self._restart()

    def on_log(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, logs: Any = None, **kwargs: Any
    ) -> None:
        if "loss" in (logs or {}):
            self.pace.logged = state.global_step
        self._restart()

    def on_evaluate(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        self._restart()

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        is_first = state.global_step == self.pace.first + 1
        if self._is_due() or (is_first and self.is_own_format):
            self.said = time.monotonic()
            text = self.pace.text(state.global_step, state.max_steps)
            if not control.should_log:  # else the line of this step follows
                logger.info("step %d of %d: %s", state.global_step, state.max_steps, text)

    def on_prediction_step(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        eval_dataloader: Any = None,
        **kwargs: Any,
    ) -> None:
        self.evaluated += 1
        if self._is_due():
            logger.info("evaluation: batch %d of %d", self.evaluated, len(eval_dataloader))

    def _restart(self) -> None:
        self.said, self.evaluated = time.monotonic(), 0

    def _is_due(self) -> bool:
        due = time.monotonic() - self.said >= self.patience
        if due:
            self.said = time.monotonic()
            self.patience = min(2 * self.patience, self.LONGEST)
        return due
