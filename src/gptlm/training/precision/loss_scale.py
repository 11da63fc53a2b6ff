"""The loss scale of float16: it keeps small gradients above zero, and gives way when large ones overflow."""

import math

import torch
from torch import Tensor

from gptlm.training.precision.master_adamw import MasterWeightAdamW


class LossScale:
    """A dynamic or fixed loss scale, in the form of `torch.amp.GradScaler` (which accelerate drives).

    After `window` good steps in a row the scale doubles; from the `hysteresis`-th overflow since then on each one
    halves it, and every overflow skips its step. PaddlePaddle: window 2000, hysteresis 1. DeepSpeed and
    Megatron-LM: 1000 and 2.

    Attributes:
        value: what the loss is multiplied with.
        exhausted: an overflow happened although the scale was at `minimum` (or fixed).
    """

    def __init__(
        self,
        first: float = 32768.0,
        *,
        window: int = 2000,
        hysteresis: int = 1,
        minimum: float = 1.0,
        fixed: float | None = None,
    ):
        self.value = float(fixed or first)
        self.window, self.hysteresis, self.minimum, self.is_fixed = window, hysteresis, minimum, fixed is not None
        self.good_steps = 0
        self.overflows_left = hysteresis
        self.exhausted = False
        self.skipped = 0  # steps, since the log took note of them
        self._overflow: bool | None = None  # of this step; None: not looked at yet

    def scale(self, loss: Tensor) -> Tensor:
        return loss * self.value

    def get_scale(self) -> float:
        return self.value

    def unscale_(self, optimizer: torch.optim.Optimizer) -> None:
        """Divide the gradients by the scale and see whether they are finite; once per step."""
        if self._overflow is not None:
            return
        if isinstance(optimizer, MasterWeightAdamW):
            optimizer.scale_gradients(1.0 / self.value)
            self._overflow = not math.isfinite(optimizer.norm().item())
            return
        gradients = [p.grad for group in optimizer.param_groups for p in group["params"] if p.grad is not None]
        torch._foreach_mul_(gradients, 1.0 / self.value)
        self._overflow = bool(gradients) and not math.isfinite(_norm(gradients).item())

    def step(self, optimizer: torch.optim.Optimizer) -> bool:
        """`optimizer.step()` unless the gradients overflowed; whether it was called."""
        self.unscale_(optimizer)
        if not self._overflow:
            optimizer.step()
        return not self._overflow

    def update(self) -> None:
        """Adjust the scale after a step."""
        overflow, self._overflow = bool(self._overflow), None
        self.count(overflow)

    def count(self, overflow: bool) -> None:
        """One more step, of which the gradients overflowed or not."""
        if overflow:
            self._count_overflow()
        else:
            self.good_steps += 1
            if not self.is_fixed and self.good_steps % self.window == 0:
                self.value *= 2
                self.overflows_left = self.hysteresis

    def _count_overflow(self) -> None:
        self.good_steps = 0
        self.skipped += 1
        self.overflows_left = max(self.overflows_left - 1, 0)
        if self.overflows_left > 0:
            return
        self.exhausted = self.is_fixed or self.value <= self.minimum
        if not self.is_fixed:
            self.value = max(self.value / 2, self.minimum)

    def state_dict(self) -> dict[str, float]:
        return {"value": self.value, "good_steps": self.good_steps, "overflows_left": self.overflows_left}

    def load_state_dict(self, state: dict[str, float]) -> None:
        if not self.is_fixed:
            self.value = float(state["value"])
        self.good_steps, self.overflows_left = int(state["good_steps"]), int(state["overflows_left"])


def _norm(gradients: list[Tensor]) -> Tensor:
    return torch.linalg.vector_norm(torch.stack(torch._foreach_norm(gradients)))
