"""Small things that happen at fixed moments of the Trainer's loop."""

import logging
import time
from typing import Any

from transformers import ProgressCallback, TrainerCallback, TrainerControl, TrainerState, TrainingArguments

logger = logging.getLogger(__name__)


class ProgressBar(ProgressCallback):
    """The bar of HuggingFace's Trainer without its printing of log dicts."""

    def on_log(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, logs: Any = None, **kwargs: Any
    ) -> None:
        pass


class EndOfTurn(TrainerCallback):
    """Keeps `generation_config.eos_token_id`: the Trainer adds the tokenizer's eos to it when training begins."""

    def __init__(self, ends: int | list[int]):
        self._ends = ends

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, model: Any = None, **kwargs: Any
    ) -> None:
        model.generation_config.eos_token_id = self._ends


class PlainProgress(TrainerCallback):
    """Where there is no bar: a line when nothing was logged for a minute, so that a long wait is no silence."""

    SECONDS = 60.0

    def __init__(self) -> None:
        self._restart()

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        self._restart()

    def on_log(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        self._restart()

    def on_evaluate(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        self._restart()

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        if self._is_due():
            logger.info("step %d of %d", state.global_step, state.max_steps)

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
        due = time.monotonic() - self.said >= self.SECONDS
        if due:
            self.said = time.monotonic()
        return due
