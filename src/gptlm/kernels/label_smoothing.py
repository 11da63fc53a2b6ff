"""Label smoothing in the chunked loss of `linear_cross_entropy` (Szegedy et al. 2016, section 7)."""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from gptlm.kernels.linear_cross_entropy import CHUNK_TOKENS, Reduction, chunk_loss


def smooth_labels(model: Any, factor: float, compiler: Callable[[Any], Any] | None = None) -> None:
    """Let the loss of a GPTLMHeadModel be `F.cross_entropy(label_smoothing=factor)` where gradients are taken.

    Losses without gradients, those of evaluations, stay as they are.

    Args:
        compiler: `torch.compile`, where the loss is compiled; call this after `compile_model`.
    """
    chunk = partial(smoothed_chunk_loss, factor=factor)
    more: dict[str, Any] = {} if compiler else {"chunk_tokens": CHUNK_TOKENS}
    model.output_loss = partial(model.output_loss, chunk=compiler(chunk) if compiler else chunk, **more)


def smoothed_chunk_loss(
    product: Tensor,
    targets: Tensor,
    ignore_index: int,
    first_id: int,
    entries: int,
    reduce: Reduction,
    with_gradient: bool,
    *,
    factor: float,
) -> tuple[Tensor, Tensor | None]:
    """`chunk_loss` of targets that give `factor` of their weight to all V entries alike.

    loss = chunk_loss + factor x (target's logit - mean logit), gradient = p - (1 - factor) x one-hot - factor / V.
    """
    total, gradient = chunk_loss(product, targets, ignore_index, first_id, entries, reduce, with_gradient)
    if not with_gradient or gradient is None:
        return total, None
    logits, targets = product.float(), targets[:, None]
    counted = targets != ignore_index
    column = torch.where(counted, targets - first_id, 0)
    here = counted & (column >= 0) & (column < entries)
    column = torch.where(here, column, 0)
    own = reduce(torch.where(here, logits.gather(1, column), 0.0), "sum")
    known = torch.arange(product.shape[1], device=product.device) < entries  # the others are padding, -inf
    size = reduce(torch.full_like(own, float(entries)), "sum")
    mean = reduce(torch.where(known, logits, 0.0).sum(dim=-1, keepdim=True), "sum") / size
    total = total + factor * torch.where(counted, own - mean, 0.0).sum()
    targeted = here & (torch.arange(product.shape[1], device=product.device) == column)
    change = factor * (targeted.float() - torch.where(counted & known, 1 / size, 0.0))
    return total, (gradient.float() + change).to(gradient.dtype)
