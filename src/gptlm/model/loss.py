"""Cross-entropy of a linear layer without ever holding its logits.

For 16 x 1024 tokens and 50304 entries the fp32 logits are 3.3 GB and their gradient as much again. Here the
tokens go through in chunks: each chunk's logits live until its loss and its gradients are known, then they go.
The price is none: the same three matrix products as the plain formula, in the forward pass.
"""

from collections.abc import Callable

import torch
from torch import Tensor

CHUNK_TOKENS = 1024  # 1024 x 50304 fp32 logits are 206 MB

Reduction = Callable[[Tensor, str], Tensor]  # (per-token values (C,), "max" | "sum") -> the same, over all shards


def _whole_vocabulary(values: Tensor, operation: str) -> Tensor:
    return values


class _LinearCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(ctx, hidden, weight, targets, ignore_index, first_id, reduce):  # type: ignore[override]
        needs_hidden, needs_weight = ctx.needs_input_grad[:2]
        total = torch.zeros((), dtype=torch.float32, device=hidden.device)
        grad_hidden = torch.empty_like(hidden) if needs_hidden else None
        grad_weight = torch.zeros_like(weight, dtype=torch.float32) if needs_weight else None
        for start in range(0, hidden.shape[0], CHUNK_TOKENS):
            rows = slice(start, start + CHUNK_TOKENS)
            loss, grad_logits = _chunk(hidden[rows], weight, targets[rows], ignore_index, first_id, reduce)
            total += loss
            if grad_hidden is not None:
                grad_hidden[rows] = grad_logits @ weight
            if grad_weight is not None:
                grad_weight += grad_logits.T @ hidden[rows]
        ctx.save_for_backward(grad_hidden, grad_weight)
        ctx.weight_dtype = weight.dtype
        return total

    @staticmethod
    def backward(ctx, grad_total):  # type: ignore[override]
        grad_hidden, grad_weight = ctx.saved_tensors
        if grad_hidden is not None:
            grad_hidden = grad_hidden * grad_total.to(grad_hidden.dtype)
        if grad_weight is not None:
            grad_weight = (grad_weight * grad_total).to(ctx.weight_dtype)
        return grad_hidden, grad_weight, None, None, None, None


def _chunk(hidden, weight, targets, ignore_index, first_id, reduce) -> tuple[Tensor, Tensor]:
    """Summed loss of one chunk (C, D) and the gradient of that sum by its logits (C, V), in the logits' dtype."""
    product = hidden @ weight.T  # (C, V)
    logits = product.float()
    highest = reduce(logits.max(dim=-1).values, "max")
    exponentials = (logits - highest[:, None]).exp_()
    normaliser = reduce(exponentials.sum(dim=-1), "sum")
    counted = targets != ignore_index
    column = torch.where(counted, targets - first_id, 0)
    here = counted & (column >= 0) & (column < weight.shape[0])  # this shard owns the target's row
    column = torch.where(here, column, 0)
    own = torch.where(here, logits.gather(1, column[:, None])[:, 0], 0.0)
    target_logit = reduce(own, "sum")
    losses = normaliser.log() + highest - target_logit
    probabilities = exponentials.div_(normaliser[:, None])
    probabilities.scatter_add_(1, column[:, None], -here.to(probabilities.dtype)[:, None])
    probabilities.mul_(counted[:, None])
    return torch.where(counted, losses, 0.0).sum(), probabilities.to(product.dtype)


def linear_cross_entropy(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    *,
    ignore_index: int = -100,
    first_id: int = 0,
    reduce: Reduction = _whole_vocabulary,
) -> Tensor:
    """Sum over tokens of -log softmax(hidden @ weight.T)[target], a float32 scalar.

    Args:
        hidden: (N, D) outputs of the last layer norm.
        weight: (V, D) rows of the output embedding; with a vocabulary split over processes, this process's rows.
        targets: (N,) int64 token ids; entries equal to `ignore_index` count neither in loss nor in gradient.
        first_id: the token id of `weight`'s first row.
        reduce: combines per-token values (N,) over the processes that share the vocabulary by "max" or "sum";
            the identity when one process holds all of it.
    """
    return _LinearCrossEntropy.apply(hidden, weight, targets, ignore_index, first_id, reduce)


def summed_loss(hidden: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
    """`linear_cross_entropy` of a batch: (B, T, D), (V, D), (B, T) -> scalar."""
    return linear_cross_entropy(hidden.flatten(0, 1), weight, targets.flatten())
