"""Learning-rate schedules as pure functions of the step.

`linear` and `cosine` are PaddleNLP's LinearAnnealingWithWarmupDecay and CosineAnnealingWithWarmupDecay
(`paddlenlp/transformers/optimization.py`): the first optimizer update is step 1 and warm-up is subtracted. The other
three are the schedules of PaddleNLP's and HuggingFace's Trainer, whose first update is step 0.
"""

import math
from dataclasses import dataclass


@dataclass(frozen=True)
class Schedule:
    """A schedule and its numbers; all counts are optimizer steps.

    Attributes:
        kind: linear, cosine, constant, constant_with_warmup or polynomial.
        maximum, minimum: learning rates; `minimum` serves linear and cosine.
        warmup: steps of linear warm-up, may be fractional.
        decay: step at which `minimum` is reached.
        end, power: last learning rate and exponent of polynomial.
    """

    kind: str
    maximum: float
    minimum: float
    warmup: float
    decay: float
    end: float = 1e-7
    power: float = 1.0

    def rate(self, update: int) -> float:
        """Learning rate of optimizer update number `update` = 1, 2, 3, ..."""
        if self.kind == "linear" or self.kind == "cosine":
            return self._annealing(update)
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

    def _polynomial(self, done: int) -> float:
        if done > self.decay:
            return self.end
        left = 1.0 - (done - self.warmup) / max(1.0, self.decay - self.warmup)
        return self.end + (self.maximum - self.end) * left**self.power
