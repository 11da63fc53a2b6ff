"""Cross-entropy of a linear layer without keeping its logits.

For 16 x 1024 tokens and 50304 entries the fp32 logits are 3.3 GB, and so is their gradient. Here tokens are computed
in chunks, and the forward pass turns each chunk's logits into loss and gradients before the next one. The number of
matrix products stays three. They run on the padded rows of `kernels.output_layer`; columns of added rows are -inf
before anything looks at them, so their gradients are zero.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from gptlm.kernels.output_layer import padded_rows

CHUNK_TOKENS = 1024  # 1024 x 50304 fp32 logits are 206 MB

Reduction = Callable[[Tensor, str], Tensor]  # (per-token values (C, 1), "max" | "sum") -> the same, over all shards

ChunkLoss = Callable[[Tensor, Tensor, int, int, int, Reduction, bool], tuple[Tensor, Tensor | None]]

ChunkScores = Callable[[Tensor, Tensor, int, int, Reduction], tuple[Tensor, Tensor]]


def _whole_vocabulary(values: Tensor, operation: str) -> Tensor:
    return values


class _LinearCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(  # type: ignore[override]
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        targets: Tensor,
        ignore_index: int,
        first_id: int,
        reduce: Reduction,
        chunk: ChunkLoss,
        size: int,
    ) -> Tensor:
        needs_hidden, needs_weight = ctx.needs_input_grad[:2]
        inputs, padded = _operands(hidden, weight)
        total = torch.zeros((), dtype=torch.float32, device=hidden.device)
        grad_hidden = torch.empty_like(hidden) if needs_hidden else None
        grad_weight = torch.zeros_like(padded, dtype=torch.float32) if needs_weight else None
        entries = weight.shape[0]
        how = ignore_index, first_id, entries, reduce, needs_hidden or needs_weight
        for start in range(0, hidden.shape[0], size):
            rows = slice(start, start + size)
            loss, grad_logits = chunk(_logits(inputs[rows], padded, entries), targets[rows], *how)
            total += loss
            if grad_hidden is not None and grad_logits is not None:
                grad_hidden[rows] = grad_logits @ padded
            if grad_weight is not None and grad_logits is not None:
                _add_product(grad_weight, grad_logits.T, inputs[rows])
        ctx.save_for_backward(grad_hidden, grad_weight)
        ctx.entries, ctx.weight_dtype = entries, weight.dtype
        return total

    @staticmethod
    def backward(ctx: Any, grad_total: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        grad_hidden, grad_weight = ctx.saved_tensors
        if grad_hidden is not None:
            grad_hidden = grad_hidden * grad_total.to(grad_hidden.dtype)
        if grad_weight is not None:
            grad_weight = (grad_weight[: ctx.entries] * grad_total).to(ctx.weight_dtype)
        return grad_hidden, grad_weight, *(None,) * 6


def _operands(hidden: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    """Both in the dtype of their product, the weight with padded rows: autocast would convert them for each chunk."""
    device = hidden.device.type
    if torch.is_autocast_enabled(device):
        dtype = torch.get_autocast_dtype(device)
        hidden, weight = hidden.to(dtype), weight.to(dtype)
    return hidden, padded_rows(weight)


def _add_product(total: Tensor, left: Tensor, right: Tensor) -> None:
    """total += left @ right in float32; one kernel where the GPU accumulates half-precision products in float32."""
    if left.is_cuda and left.dtype in (torch.bfloat16, torch.float16) and left.dtype == right.dtype:
        torch.addmm(total, left, right, out_dtype=torch.float32, out=total)
    else:
        total += left @ right


def _logits(hidden: Tensor, padded: Tensor, entries: int) -> Tensor:
    """(C, D), (V, D) -> (C, V) with -inf after the first `entries` columns."""
    logits = hidden @ padded.T
    logits[:, entries:] = -torch.inf  # at most 127 columns, less than a condition costs in each pass over all
    return logits


def chunk_loss(
    product: Tensor,
    targets: Tensor,
    ignore_index: int,
    first_id: int,
    entries: int,
    reduce: Reduction,
    with_gradient: bool,
) -> tuple[Tensor, Tensor | None]:
    """Summed loss of one chunk's logits, and its gradient with respect to them, in their dtype.

    Args:
        product: (C, V) logits, -inf in columns of padding.
        entries: the number of other columns.
    """
    logits = product.float()
    # with the dimension kept, torch.compile finds maximum and sum in one pass over memory
    highest = reduce(logits.amax(dim=-1, keepdim=True), "max")
    exponentials = (logits - highest).exp_()
    normaliser = reduce(exponentials.sum(dim=-1, keepdim=True), "sum")
    targets = targets[:, None]
    counted = targets != ignore_index
    column = torch.where(counted, targets - first_id, 0)
    here = counted & (column >= 0) & (column < entries)  # this shard owns the target's row
    column = torch.where(here, column, 0)
    own = torch.where(here, logits.gather(1, column), 0.0)
    target_logit = reduce(own, "sum")
    losses = normaliser.log() + highest - target_logit
    total = torch.where(counted, losses, 0.0).sum()
    if not with_gradient:
        return total, None
    probabilities = exponentials.mul_(torch.where(counted, 1 / normaliser, 0.0))
    if torch.compiler.is_compiling():  # one pass over memory; not compiled it would be five
        targeted = here & (torch.arange(product.shape[1], device=product.device) == column)
        probabilities = probabilities.sub_(targeted.float())
    else:
        probabilities.scatter_add_(1, column, -here.float())
    return total, probabilities.to(product.dtype)


def linear_cross_entropy(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    *,
    ignore_index: int = -100,
    first_id: int = 0,
    reduce: Reduction = _whole_vocabulary,
    chunk: ChunkLoss = chunk_loss,
    chunk_tokens: int = CHUNK_TOKENS,
) -> Tensor:
    """Sum over tokens of -log softmax(hidden @ weight.T)[target], a float32 scalar.

    Args:
        hidden: (N, D) outputs of the last layer norm.
        weight: (V, D) rows of the output embedding; with a vocabulary split over processes, this process's rows.
        targets: (N,) int64 token ids; `ignore_index` marks those without loss and gradient.
        first_id: the token id of `weight`'s first row.
        reduce: all-reduces per-token values (C, 1) by "max" or "sum" over the processes that split the vocabulary;
            the identity by default.
        chunk: `chunk_loss` or its compiled form.
        chunk_tokens: at most this many tokens per chunk; else a quarter of all, but at least CHUNK_TOKENS.
    """
    size = min(chunk_tokens, max(CHUNK_TOKENS, hidden.shape[0] // 4))
    how = (ignore_index, first_id, reduce, chunk, size)
    if not torch.is_grad_enabled():  # a function's context counts a parameter's gradient as needed all the same
        hidden, weight = hidden.detach(), weight.detach()
    return _LinearCrossEntropy.apply(hidden, weight, targets, *how)


def summed_loss(hidden: Tensor, weight: Tensor, targets: Tensor, **how: Any) -> Tensor:
    """`linear_cross_entropy` of a batch: (B, T, D), (V, D), (B, T) -> scalar; `how`: its keyword arguments."""
    return linear_cross_entropy(hidden.flatten(0, 1), weight, targets.flatten(), **how)


def chunk_scores(
    product: Tensor, targets: Tensor, first_id: int, entries: int, reduce: Reduction
) -> tuple[Tensor, Tensor]:
    """-log p of each target (C,) in float32, and whether it is the argmax (C,), from logits (C, V) as in `chunk_loss`.

    Every target is an id. Of equal logits the lowest id is the argmax.
    """
    if reduce is _whole_vocabulary:
        log_p = torch.log_softmax(product, dim=-1, dtype=torch.float32)
        return -log_p.gather(1, targets[:, None])[:, 0], product.argmax(dim=-1) == targets
    logits = product.float()
    own_highest, own_id = logits.max(dim=-1, keepdim=True)
    highest = reduce(own_highest, "max")
    normaliser = reduce((logits - highest).exp_().sum(dim=-1, keepdim=True), "sum")
    column = targets[:, None] - first_id
    here = (column >= 0) & (column < entries)
    own = torch.where(here, logits.gather(1, torch.where(here, column, 0)), 0.0)
    losses = normaliser.log() + highest - reduce(own, "sum")
    # the lowest id is the maximum of the negative ones; float64 holds every id
    lowest = -reduce(torch.where(own_highest == highest, -(own_id + first_id).double(), -torch.inf), "max")
    return losses[:, 0], (lowest == targets[:, None])[:, 0]


@torch.no_grad()
def token_scores(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    *,
    first_id: int = 0,
    reduce: Reduction = _whole_vocabulary,
    chunk: ChunkScores = chunk_scores,
    chunk_tokens: int = CHUNK_TOKENS,
) -> tuple[Tensor, Tensor]:
    """Of each token -log softmax(hidden @ weight.T)[target] in float32 and whether the target is the argmax, both (N,).

    Args:
        hidden: (N, D); `weight`, `first_id`, `reduce`: as in `linear_cross_entropy`; `targets`: (N,) int64 ids.
        chunk: `chunk_scores` or its compiled form.
        chunk_tokens: per chunk.
    """
    inputs, padded = _operands(hidden, weight)
    losses = torch.empty(targets.shape, dtype=torch.float32, device=hidden.device)
    hits = torch.empty(targets.shape, dtype=torch.bool, device=hidden.device)
    how = first_id, weight.shape[0], reduce
    for start in range(0, hidden.shape[0], chunk_tokens):
        rows = slice(start, start + chunk_tokens)
        losses[rows], hits[rows] = chunk(_logits(inputs[rows], padded, weight.shape[0]), targets[rows], *how)
    return losses, hits
