"""Ends training when evaluations stop improving."""

import logging
from typing import Any

from transformers import EarlyStoppingCallback, TrainerControl, TrainerState, TrainingArguments

logger = logging.getLogger(__name__)

COUNTER = "early_stopping_patience_counter"


class EarlyStopping(EarlyStoppingCallback):
    """transformers' early stopping, whose count of evaluations without improvement continues after a resume.

    The count is noted in trainer_state.json of each checkpoint. Patience and threshold are those of the command.
    """

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        states: Any = state.stateful_callbacks
        noted = states.get(type(self).__name__) or {}
        counted = (noted.get("attributes") or {}).get(COUNTER, 0) if isinstance(noted, dict) else 0
        self.early_stopping_patience_counter = int(counted)
        self._look(args, state, control)

    def on_evaluate(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, metrics: Any = None, **kwargs: Any
    ) -> None:
        super().on_evaluate(args, state, control, metrics or {}, **kwargs)
        states: Any = state.stateful_callbacks
        states[type(self).__name__] = self.state()
        self._look(args, state, control)

    def _look(self, args: TrainingArguments, state: TrainerState, control: TrainerControl) -> None:
        count = self.early_stopping_patience_counter
        if count >= self.early_stopping_patience:
            control.should_training_stop = True
            logger.info(
                "early stopping at step %d: %s is not better than %g (step %s) in the last %d evaluations",
                state.global_step, args.metric_for_best_model, state.best_metric, state.best_global_step, count,
            )  # fmt: skip
