"""Small things that happen at fixed moments of the Trainer's loop."""

from typing import Any

import torch
from transformers import ProgressCallback, TrainerCallback


class ProgressBar(ProgressCallback):
    """The bar of HuggingFace's Trainer without its printing of log dicts."""

    def on_log(self, args, state, control, logs=None, **kwargs):
        pass


class OwnDropoutPerRank(TrainerCallback):
    """Without this all data-parallel ranks would draw the same dropout masks."""

    def __init__(self, trainer: Any):
        self.trainer = trainer

    def on_train_begin(self, args, state, control, **kwargs):
        torch.manual_seed(self.trainer.dropout_seed)


class Bookkeeping(TrainerCallback):
    """Epoch fraction by consumed samples, and a clock that starts with the training."""

    def __init__(self, trainer: Any):
        self.trainer = trainer

    def on_train_begin(self, args, state, control, **kwargs):
        self.trainer.throughput.restart(state.global_step)

    def on_step_end(self, args, state, control, **kwargs):
        state.epoch = self.trainer.consumed_samples / self.trainer.samples_per_epoch
