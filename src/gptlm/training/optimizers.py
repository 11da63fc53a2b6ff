"""Optimizers by transformers' names, and Muon, as `optimizer_cls_and_kwargs` of the Trainer."""

import inspect
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor
from transformers import Trainer, TrainingArguments

from gptlm.errors import UsageError, named, reason_of


def optimizer_of(arguments: TrainingArguments, name: str, settings: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
    """The class of the optimizer `name`, or a factory, and its keyword arguments.

    Args:
        arguments: learning rate, betas, epsilon and decay; its `optim` is the one of transformers for `name`.
        settings: of --optim_args; they take precedence.

    Raises:
        UsageError: if its package is missing, or `settings` has what it does not take.
    """
    if name == "muon":
        kind, kwargs = MuonFactory, _adamw_settings(arguments)
        known = {*inspect.signature(torch.optim.Muon).parameters, *inspect.signature(torch.optim.AdamW).parameters}
    else:
        try:
            kind, kwargs = Trainer.get_optimizer_cls_and_kwargs(arguments)
        except (ImportError, ValueError) as error:
            raise UsageError(f"{named('optim')} {name}: {reason_of(error)}") from error
        known = set(inspect.signature(kind).parameters)
    known -= {"params", "lr", "foreach", "fused", "capturable", "differentiable", "maximize", "optim_bits", "is_paged"}
    unknown = sorted(settings.keys() - known)
    if unknown:
        raise UsageError(f"{named('optim_args')} {unknown[0]}: {name} takes {', '.join(sorted(known))}")
    return kind, kwargs | settings


def _adamw_settings(arguments: TrainingArguments) -> dict[str, Any]:
    return {
        "lr": arguments.learning_rate,
        "weight_decay": arguments.weight_decay,
        "betas": (arguments.adam_beta1, arguments.adam_beta2),
        "eps": arguments.adam_epsilon,
    }


class MuonWithAdamW(torch.optim.Optimizer):
    """torch's Muon (Jordan et al. 2024) for `matrices` and AdamW for `others`, as one optimizer.

    Muon's updates have the root mean square of AdamW's (arXiv 2502.16982, section 2.2), so that both share learning
    rate and decay. Biases and layer norms do not decay.
    """

    def __init__(
        self,
        matrices: Iterable[Tensor],
        others: Iterable[Tensor],
        lr: float,
        weight_decay: float,
        betas: tuple[float, float],
        eps: float,
        adjust_lr_fn: str = "match_rms_adamw",
        amsgrad: bool = False,
        **muon: Any,
    ):
        others = list(others)
        decayed = [p for p in others if p.ndim > 1]
        plain = [p for p in others if p.ndim <= 1]
        adam_groups: list[dict[str, Any]] = [{"params": decayed}, {"params": plain, "weight_decay": 0.0}]
        self._parts: list[torch.optim.Optimizer] = [
            torch.optim.Muon(matrices, lr=lr, weight_decay=weight_decay, adjust_lr_fn=adjust_lr_fn, **muon),
            torch.optim.AdamW(adam_groups, lr=lr, weight_decay=weight_decay, betas=betas, eps=eps, amsgrad=amsgrad),
        ]
        groups = [group for part in self._parts for group in part.param_groups if group["params"]]
        super().__init__(groups, {"lr": lr})
        for part in self._parts:  # the schedule changes the groups of this optimizer, checkpoints hold its states
            part.param_groups = [group for group in self.param_groups if group["params"][0] in _members(part)]
            part.state = self.state

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for part in self._parts:
            part.step()


def _members(optimizer: torch.optim.Optimizer) -> set[Tensor]:
    return {parameter for group in optimizer.param_groups for parameter in group["params"]}


class MuonFactory:
    """What transformers calls with the model to get the optimizer."""

    def __call__(self, model: Any, **settings: Any) -> MuonWithAdamW:
        """Muon for the matrices of the blocks, AdamW for embeddings, biases and layer norms."""
        trained = [(name, parameter) for name, parameter in model.named_parameters() if parameter.requires_grad]
        matrices = [p for name, p in trained if p.ndim == 2 and ".h." in name]
        others = [p for name, p in trained if not (p.ndim == 2 and ".h." in name)]
        return MuonWithAdamW(matrices, others, **settings)
