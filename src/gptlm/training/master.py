"""AdamW for half-precision weights: it keeps and updates float32 copies of them (fp16_opt_level O2)."""

from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import Tensor, nn


class MasterWeightAdamW(torch.optim.AdamW):
    """AdamW whose own parameters are float32 copies ("master weights") of the model's half-precision ones.

    Small updates are lost in half precision; they add up in the copies, from which the model's weights are rounded
    (Micikevicius et al. 2018, section 3.1). Per optimizer step: `take_gradients`, unscale and clip, `step`.

    Args:
        groups: parameter groups of the model's weights, as for AdamW.
    """

    def __init__(self, groups: Iterable[dict[str, Any]], **settings: Any):
        groups = [dict(group) for group in groups]
        self.weights: list[Tensor] = [p for group in groups for p in group["params"]]
        masters = iter([nn.Parameter(p.detach().float()) for p in self.weights])
        for group in groups:
            group["params"] = [next(masters) for _ in group["params"]]
        super().__init__(groups, **settings)
        self.masters: list[Tensor] = [p for group in self.param_groups for p in group["params"]]
        self.added = False  # gradients are being added up in float32

    def pairs(self) -> Iterator[tuple[Tensor, Tensor]]:
        """(weight of the model, its master)."""
        return zip(self.weights, self.masters, strict=True)

    @torch.no_grad()
    def add_gradients(self) -> None:
        """Move the gradients of one micro-batch into float32 sums (amp_master_grad)."""
        for weight, master in self.pairs():
            if weight.grad is None:
                continue
            if master.grad is None or not self.added:
                master.grad = weight.grad.float()
            else:
                master.grad += weight.grad
            weight.grad = None
        self.added = True

    @torch.no_grad()
    def take_gradients(self) -> None:
        """Bring the gradients of the whole step to the masters, as float32."""
        if not self.added:
            for weight, master in self.pairs():
                if weight.grad is None:
                    master.grad = None
                elif master.grad is None:
                    master.grad = torch.empty_like(master)
            half: Any = [w.grad for w in self.weights if w.grad is not None]
            full: Any = [m.grad for m in self.masters if m.grad is not None]
            torch._foreach_copy_(full, half)
        self.added = False

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        super().step()
        self.round_weights()

    @torch.no_grad()
    def round_weights(self) -> None:
        """The model's weights become the masters, rounded."""
        torch._foreach_copy_(self.weights, self.masters)


def clip(optimizer: torch.optim.Optimizer, max_norm: float) -> Tensor:
    """Scale the optimizer's gradients down to the global norm `max_norm`; returns the norm before."""
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    return nn.utils.clip_grad_norm_(parameters, max_norm)
