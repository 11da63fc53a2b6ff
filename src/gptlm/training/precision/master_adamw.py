"""AdamW for half-precision weights, with float32 master weights (fp16_opt_level O2).

Copies, moments and gradients of all weights lie end to end, so that a step is a handful of passes over memory.
"""

import math
from collections.abc import Callable, Iterable, Iterator
from functools import cached_property
from itertools import accumulate, groupby
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from gptlm.kernels.compiling import compile_obstacle
from gptlm.parallel.flat_grad_sync import flatten_gradients

ALIGNED = 64  # elements; every weight starts at a multiple, so that vectorized kernels apply
EAGER = 1 << 24  # elements per unfused update; bounds the memory of temporaries


class MasterWeightAdamW(torch.optim.Optimizer):
    """AdamW whose own parameters are float32 copies ("master weights") of the model's half-precision ones.

    Half precision loses small updates; the float32 copies accumulate them, and the model's weights are the rounded
    copies (Micikevicius et al. 2018, section 3.1). Per optimizer step: `take_gradients`, unscale and clip, `step`.

    Args:
        groups: parameter groups of the model's weights, as for AdamW.
        fused: update in one compiled pass, if Triton supports the weights' device.

    Attributes:
        weights, masters: of the model, and their float32 copies (views of one tensor), in the same order.
        updates: steps done.
    """

    def __init__(
        self,
        groups: Iterable[dict[str, Any]],
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
        fused: bool = False,
    ):
        groups = [dict(group) for group in groups]
        self.weights: list[Tensor] = [p for group in groups for p in group["params"]]
        sizes = [-(-weight.numel() // ALIGNED) * ALIGNED for weight in self.weights]
        self._starts = [0, *accumulate(sizes)]
        self._flat = {kind: self._zeros(torch.float32) for kind in ("master", "exp_avg", "exp_avg_sq")}
        self.masters: list[Tensor] = [nn.Parameter(view) for view in self._views(self._flat["master"])]
        torch._foreach_copy_(self._views(self._flat["master"]), [weight.detach() for weight in self.weights])
        masters, members = iter(self.masters), iter(range(len(self.weights)))
        self._members = [[next(members) for _ in group["params"]] for group in groups]
        for group in groups:
            group["params"] = [next(masters) for _ in group["params"]]
        super().__init__(groups, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay})
        self.updates = 0
        self.added = False  # gradients are accumulated in float32
        self._placed: Tensor | None = None  # half-precision buffer for gradient accumulation
        self._gradient, self._factor, self._idle = torch.zeros(0), torch.ones(()), set[int]()  # until they are taken
        self._update: Callable[..., None] = _in_pieces
        if fused and self.weights[0].is_cuda and compile_obstacle("cuda") is None:
            self._update = torch.compile(adamw_, dynamic=True)

    @property
    def moments(self) -> list[Tensor]:
        """Of all weights: the flat tensors."""
        return [self._flat["exp_avg"], self._flat["exp_avg_sq"]]

    @property
    def gradient(self) -> Tensor:
        """That of the next step, flat; empty before it is taken."""
        return self._gradient

    def tensors(self, weight: Tensor) -> dict[str, Tensor]:
        """The float32 state of one weight of the model: `master`, `exp_avg`, `exp_avg_sq`."""
        return {kind: self._view(flat, self._index[weight]) for kind, flat in self._flat.items()}

    @torch.no_grad()
    def add_gradients(self) -> None:
        """Move the gradients of one micro-batch into float32 sums (amp_master_grad)."""
        found = [(view, w.grad) for view, w in zip(self._sums, self.weights, strict=True) if w.grad is not None]
        if not self.added:
            torch._foreach_zero_(self._sums)
            self._idle = set(range(len(self.weights)))
        self._idle -= {number for number, weight in enumerate(self.weights) if weight.grad is not None}
        for view, gradient in found:
            view += gradient
        for weight in self.weights:
            weight.grad = None
        self.added = True

    @torch.no_grad()
    def flat_gradients(self, into: Tensor | None = None) -> Tensor:
        """The gradients of all weights in one flat tensor, in their dtype; `.grad` of the weights is cleared.

        The tensor is the accumulation buffer if `gradient_views` was used, else `into`, a result of an earlier call,
        or a new one.
        """
        self._idle = {number for number, weight in enumerate(self.weights) if weight.grad is None}
        given = into if self._placed is None else self._placed
        flat = self._zeros(self.weights[0].dtype) if given is None else given
        views = self.gradient_views if flat is self._placed else self._views(flat)
        flatten_gradients(views, self.weights, zero=given is None)
        return flat

    @torch.no_grad()
    def take_gradients(self, gathered: Tensor | None = None) -> None:
        """Set the gradients of the step: `.grad`, or `gathered`. Weights without one are not updated."""
        if self.added:
            self._gradient, self.added = self._sum, False
        else:
            self._gradient = self.flat_gradients() if gathered is None else gathered
        self._factor = torch.ones((), device=self._gradient.device)

    @torch.no_grad()
    def average_gradients(self) -> None:
        """Average the gradients over all processes with one all-reduce."""
        world = dist.get_world_size()
        if self._gradient.dtype == torch.float16:
            self._gradient.div_(world)  # before the sum, which could overflow in float16
        else:
            self._factor = self._factor / world
        dist.all_reduce(self._gradient)

    @property
    def gradients(self) -> list[Tensor]:
        """The float32 gradient of each weight, as the next step uses it."""
        return [view.float() * self._factor for view in self._views(self._gradient)]

    @torch.no_grad()
    def scale_gradients(self, factor: float | Tensor) -> None:
        """Scale the gradients; applied in `step`, which saves a pass over them."""
        self._factor = self._factor * factor

    @torch.no_grad()
    def norm(self) -> Tensor:
        """The global gradient norm, a float32 scalar tensor; does not synchronize with the device."""
        return torch.linalg.vector_norm(self._gradient, dtype=torch.float32) * self._factor

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        self.updates += 1
        for group, run in self._runs():
            beta1, beta2 = group["betas"]
            correction = 1 - beta1**self.updates, math.sqrt(1 - beta2**self.updates)
            numbers = (beta1, beta2, group["eps"])
            changing = (1 - group["lr"] * group["weight_decay"], group["lr"] / correction[0], correction[1])
            flat = [tensor[run] for tensor in (*self._flat.values(), self._gradient)]
            self._update(*flat, self._factor, *(torch.tensor(value) for value in changing), *numbers)
        self._gradient = torch.zeros(0)
        self.round_weights()

    @torch.no_grad()
    def round_weights(self) -> None:
        """Copy the masters, rounded, into the model's weights."""
        torch._foreach_copy_(self.weights, self.masters)

    def _runs(self) -> Iterator[tuple[dict[str, Any], slice]]:
        """The places of weights that have gradients, as long as they go on in one group."""
        for group, members in zip(self.param_groups, self._members, strict=True):
            for idle, found in groupby(members, self._idle.__contains__):
                run = list(found)
                if not idle:
                    yield group, slice(self._starts[run[0]], self._starts[run[-1] + 1])

    @cached_property
    def _index(self) -> dict[Tensor, int]:
        return {weight: number for number, weight in enumerate(self.weights)}

    @cached_property
    def gradient_views(self) -> list[Tensor]:
        """Views of the flat gradient buffer, one per weight, for accumulation without a copy."""
        self._placed = self._zeros(self.weights[0].dtype)
        return self._views(self._placed)

    @cached_property
    def _sum(self) -> Tensor:
        return self._zeros(torch.float32)

    @cached_property
    def _sums(self) -> list[Tensor]:
        return self._views(self._sum)

    def _zeros(self, dtype: torch.dtype) -> Tensor:
        return torch.zeros(self._starts[-1], dtype=dtype, device=self.weights[0].device)

    def _views(self, flat: Tensor) -> list[Tensor]:
        return [self._view(flat, number) for number in range(len(self.weights))]

    def _view(self, flat: Tensor, number: int) -> Tensor:
        weight, start = self.weights[number], self._starts[number]
        return flat[start : start + weight.numel()].view(weight.shape)


def adamw_(
    master: Tensor,
    exp_avg: Tensor,
    exp_avg_sq: Tensor,
    gradient: Tensor,
    factor: Tensor,
    keep: Tensor,
    size: Tensor,
    root: Tensor,
    beta1: float,
    beta2: float,
    eps: float,
) -> None:
    """One AdamW update in place (Loshchilov and Hutter 2019, algorithm 2) of flat float32 tensors.

    Args:
        gradient: multiplied by `factor` here; any precision.
        keep: 1 - lr x weight_decay; `size`: lr / (1 - beta1^t); `root`: sqrt(1 - beta2^t).
    """
    gradient = gradient.float() * factor
    exp_avg.lerp_(gradient, 1 - beta1)
    exp_avg_sq.mul_(beta2).add_(gradient * gradient * (1 - beta2))
    master.mul_(keep).sub_(exp_avg / (exp_avg_sq.sqrt() / root + eps) * size)


def _in_pieces(master: Tensor, exp_avg: Tensor, exp_avg_sq: Tensor, gradient: Tensor, *rest: Any) -> None:
    """`adamw_` in chunks."""
    flat = (master, exp_avg, exp_avg_sq, gradient)
    for pieces in zip(*(tensor.split(EAGER) for tensor in flat), strict=True):
        adamw_(*pieces, *rest)


def clip(optimizer: MasterWeightAdamW, max_norm: float) -> Tensor:
    """Scale the optimizer's gradients down to the global norm `max_norm`; returns the norm before."""
    norm = optimizer.norm()
    optimizer.scale_gradients((max_norm / (norm + 1e-6)).clamp(max=1.0))  # as torch's clip_grad_norm_
    return norm
