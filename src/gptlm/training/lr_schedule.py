"""Learning-rate schedules as pure functions of the step.

`linear` and `cosine` are PaddleNLP's LinearAnnealingWithWarmupDecay and CosineAnnealingWithWarmupDecay
(`paddlenlp/transformers/optimization.py`): the first optimizer update is step 1 and warm-up is subtracted. With
`start` 0 they are Megatron's (`megatron/learning_rates.py`), and PaddleFleetX's with `use_increments`; PaddleFleetX's
of 2022 is the cosine. `oneflow_cosine` (OneFlow-Benchmark's GPT, first update 0) does not subtract the warm-up. The
other three are the schedules of PaddleNLP's and HuggingFace's Trainer, whose first update is step 0. `StockSchedule`
has the other schedules of transformers by name.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
from transformers import get_scheduler


@dataclass(frozen=True)
class Schedule:
    """A schedule and its numbers; all counts are optimizer steps.

    Attributes:
        kind: linear, cosine, oneflow_cosine, constant, constant_with_warmup or polynomial.
        maximum, minimum: learning rates; `minimum` serves linear and cosine.
        warmup: steps of linear warm-up, may be fractional.
        decay: step at which `minimum` is reached.
        end, power: last learning rate and exponent of polynomial.
        start: the step that the first update counts as in linear and the cosines.
    """

    kind: str
    maximum: float
    minimum: float
    warmup: float
    decay: float
    end: float = 1e-7
    power: float = 1.0
    start: int = 1

    def rate(self, update: int) -> float:
        """Learning rate of optimizer update number `update` = 1, 2, 3, ..."""
        if self.kind == "linear" or self.kind == "cosine":
            return self._annealing(update - 1 + self.start)
        if self.kind == "oneflow_cosine":
            return self._from_the_first_step(update - 1 + self.start)
        done = update - 1
        if self.kind != "constant" and done < self.warmup:
            return self.maximum * done / max(1.0, self.warmup)
        if self.kind == "polynomial":
            return self._polynomial(done)
        return self.maximum

    def _annealing(self, step: int) -> float:
        if self.warmup > 0 and step <= self.warmup:
            return self.maximum * step / self.warmup
        if step > self.decay:
            return self.minimum
        progress = (step - self.warmup) / (self.decay - self.warmup) if self.decay > self.warmup else 1.0
        share = 0.5 * (math.cos(math.pi * progress) + 1.0) if self.kind == "cosine" else 1.0 - progress
        return self.minimum + share * (self.maximum - self.minimum)

    def _from_the_first_step(self, step: int) -> float:
        """A cosine that starts at step 0, below the warm-up, so the rate drops slightly when warm-up ends."""
        if step < self.warmup:
            return self.maximum * step / self.warmup
        lowest = self.minimum / self.maximum if self.maximum else 0.0
        share = 0.5 * (math.cos(math.pi * min(step, self.decay) / self.decay) + 1.0)
        return self.maximum * ((1.0 - lowest) * share + lowest)

    def _polynomial(self, done: int) -> float:
        if done > self.decay:
            return self.end
        left = 1.0 - (done - self.warmup) / max(1.0, self.decay - self.warmup)
        return self.end + (self.maximum - self.end) * left**self.power


@dataclass(frozen=True)
class StockSchedule:
    """A schedule of `transformers.get_scheduler`, whose first update is step 0.

    Attributes:
        kind: its name there.
        maximum: the peak rate.
        warmup, steps: of warm-up, and of the whole schedule.
        settings: `scheduler_specific_kwargs`.
    """

    kind: str
    maximum: float
    warmup: float
    steps: float
    settings: dict[str, Any] = field(default_factory=dict)

    def rate(self, update: int) -> float:
        """Learning rate of optimizer update number `update` = 1, 2, 3, ..."""
        return self.maximum * self.factor(update - 1)

    @cached_property
    def factor(self) -> Callable[[int], float]:
        """The factor on the peak rate, by the number of updates done.

        Raises:
            TypeError, ValueError: for settings that the schedule does not take, or lacks.
        """
        optimizer = torch.optim.SGD([torch.zeros(1)], lr=self.maximum or 1.0)  # some read the peak rate from it
        made: Any = get_scheduler(
            self.kind,
            optimizer,
            num_warmup_steps=math.ceil(self.warmup),
            num_training_steps=math.ceil(self.steps),
            scheduler_specific_kwargs=dict(self.settings),
        )
        return made.lr_lambdas[0]
