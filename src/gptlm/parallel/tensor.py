"""The network's modules with weights that are split over tensor-parallel processes.

With `sequence`, activations between them are split along the sequence as well, (B, T / n, D). Layer norms, dropouts
and residual sums then see a part of the sequence, and the gradients of their weights are all-reduced.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from gptlm.parallel.collectives import (
    all_reduce,
    copy_to_group,
    gather_linear,
    gather_sequence,
    local_part,
    reduce_from_group,
    reduce_scatter_sequence,
)
from gptlm.parallel.sharding import vocab_range
from gptlm.upstream.torch import all_gather_into


class SplitLinear(nn.Linear):
    """This process's part of a Linear.

    Args:
        weight, bias: the part.
        inputs, outputs: features of the whole layer, which PEFT makes adapters for.
    """

    def __init__(self, weight: Tensor, bias: Tensor, inputs: int, outputs: int, group: Any, sequence: bool):
        super().__init__(inputs, outputs, device="meta")
        self.weight, self.bias = nn.Parameter(weight), nn.Parameter(bias)
        self.group, self.sequence = group, sequence


class ColumnLinear(SplitLinear):
    """A Linear whose outputs are split: (B, T, in) or, with `sequence`, (B, T / n, in) -> (B, T, out / n).

    weight: (out / n, in); bias: (out / n,).
    """

    def forward(self, x: Tensor) -> Tensor:
        if self.sequence:
            return gather_linear(x, self.weight, self.bias, self.group)
        return F.linear(copy_to_group(x, self.group), self.weight, self.bias)


class RowLinear(SplitLinear):
    """A Linear whose inputs are split: (B, T, in / n) -> (B, T, out) or, with `sequence`, (B, T / n, out).

    weight: (out, in / n); bias: (out,), the same everywhere, added after the reduction.
    """

    def forward(self, x: Tensor) -> Tensor:
        x = F.linear(x, self.weight)
        if self.sequence:
            return reduce_scatter_sequence(x, self.group) + copy_to_group(self.bias, self.group).to(x.dtype)
        return reduce_from_group(x, self.group) + self.bias.to(x.dtype)


class SequenceLayerNorm(nn.LayerNorm):
    """Layer norm of a part of the sequence."""

    def __init__(self, weight: Tensor, bias: Tensor, eps: float, group: Any):
        super().__init__(weight.shape[0], eps=eps)
        self.weight, self.bias = nn.Parameter(weight), nn.Parameter(bias)
        self.group = group

    def forward(self, x: Tensor) -> Tensor:
        weight, bias = copy_to_group(self.weight, self.group), copy_to_group(self.bias, self.group)
        return F.layer_norm(x, self.normalized_shape, weight, bias, self.eps)


class VocabularyEmbedding(nn.Module):
    """Token embedding split by ids: (B, T) ids -> (B, T, D) or, with `sequence`, (B, T / n, D).

    Args:
        weight: (V / n, D), the rows of this process's ids, which begin at `first`.
    """

    def __init__(self, weight: Tensor, group: Any, sequence: bool, first: int):
        super().__init__()
        self.weight = nn.Parameter(weight)
        self.group, self.sequence, self.first = group, sequence, first

    def forward(self, ids: Tensor) -> Tensor:
        rows = ids - self.first
        elsewhere = (rows < 0) | (rows >= self.weight.shape[0])
        x = F.embedding(rows.masked_fill(elsewhere, 0), self.weight)
        x = x.masked_fill(elsewhere[..., None], 0.0)
        return reduce_scatter_sequence(x, self.group) if self.sequence else reduce_from_group(x, self.group)


class SequencePositions(nn.Module):
    """Position embedding of a part of the sequence: (1 or B, T) positions -> (1 or B, T / n, D)."""

    def __init__(self, weight: Tensor, group: Any):
        super().__init__()
        self.weight = nn.Parameter(weight)
        self.group, self.sequence = group, True

    def forward(self, positions: Tensor) -> Tensor:
        own = local_part(positions, self.group, 1) if self.sequence else positions
        return F.embedding(own, copy_to_group(self.weight, self.group))


class VocabularyLoss:
    """The summed cross-entropy of a vocabulary-parallel output layer, in place of `GPTLMHeadModel.output_loss`.

    Args:
        loss: `kernels.linear_cross_entropy.linear_cross_entropy`.
        first: the first token id of this process.
    """

    def __init__(self, loss: Any, group: Any, sequence: bool, first: int):
        self.loss, self.group, self.sequence, self.first = loss, group, sequence, first

    def __call__(self, hidden: Tensor, weight: Tensor, targets: Tensor, **how: Any) -> Tensor:
        """(B, T, D) or (B, T / n, D), (V / n, D), (B, T) -> scalar, the same on every process; `how`: for `loss`."""
        hidden = gather_sequence(hidden, self.group) if self.sequence else copy_to_group(hidden, self.group)
        how |= {"first_id": self.first, "reduce": self._reduce}
        return self.loss(hidden.flatten(0, 1), weight, targets.flatten(), **how)

    def _reduce(self, values: Tensor, operation: str) -> Tensor:
        return all_reduce(values, operation, self.group)


class VocabularyScores:
    """The scores of tokens by a vocabulary-parallel output layer, in place of `GPTLMHeadModel.output_scores`.

    Args:
        scores: `kernels.linear_cross_entropy.token_scores`.
        first: the first token id of this process.
    """

    def __init__(self, scores: Any, group: Any, first: int):
        self.scores, self.group, self.first = scores, group, first

    def __call__(self, hidden: Tensor, weight: Tensor, targets: Tensor, **how: Any) -> tuple[Tensor, Tensor]:
        """(N, D), (V / n, D), (N,) -> both (N,), the same on every process; `how`: for `scores`."""
        return self.scores(hidden, weight, targets, **how | {"first_id": self.first, "reduce": self._reduce})

    def _reduce(self, values: Tensor, operation: str) -> Tensor:
        return all_reduce(values, operation, self.group)


class VocabularyLogits(nn.Module):
    """An output layer split by ids: (..., D) -> (..., V) logits on every process, without a backward.

    Args:
        weight: (V / n, D), the embedding's.
        vocabulary: V.
    """

    def __init__(self, weight: nn.Parameter, group: Any, vocabulary: int):
        super().__init__()
        self.weight, self.group, self.vocabulary = weight, group, vocabulary

    @torch.no_grad()
    def forward(self, x: Tensor) -> Tensor:
        logits = F.linear(x, self.weight)
        processes = dist.get_world_size(self.group)
        longest = -(-self.vocabulary // processes)
        logits = F.pad(logits, (0, longest - logits.shape[-1])).flatten(0, -2)
        parts = logits.new_empty(processes * len(logits), longest)
        all_gather_into(parts, logits.contiguous(), self.group)
        sizes = [len(vocab_range(rank, processes, self.vocabulary)) for rank in range(processes)]
        rows = [part[:, :size] for part, size in zip(parts.chunk(processes), sizes, strict=True)]
        return torch.cat(rows, -1).view(*x.shape[:-1], self.vocabulary)


@contextmanager
def whole_sequences(model: nn.Module) -> Iterator[None]:
    """Inside, `model` computes without sequence parallelism and without gradients, for sequences of any length."""
    split: list[Any] = [module for module in model.modules() if getattr(module, "sequence", False)]
    for module in split:
        module.sequence = False
    try:
        with torch.no_grad():
            yield
    finally:
        for module in split:
            module.sequence = True


@contextmanager
def own_random_numbers(rank: int, device: torch.device) -> Iterator[None]:
    """Inside, each process of a tensor-parallel group draws different random numbers; outside, all draw the same.

    The state follows from the outer generator, so recomputing a block, which restores that one, repeats the numbers.

    Args:
        rank: in the group.
        device: whose generator is used.
    """
    if device.type == "cuda":  # Philox: another seed at the same offset, without a copy of the generator's state
        generator = torch.cuda.default_generators[torch.cuda.current_device() if device.index is None else device.index]
        seed = generator.initial_seed()
        _reseed(generator, (seed + (rank + 1) * 2**32) % 2**63)
        try:
            yield
        finally:
            _reseed(generator, seed)
        return
    inner = int(torch.randint(2**62, (1,)).item()) + rank + 1
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(inner)
        yield


def _reseed(generator: torch.Generator, seed: int) -> None:
    """Set the seed and keep the offset, which `manual_seed` resets."""
    offset = generator.get_offset()
    generator.manual_seed(seed)
    generator.set_offset(offset)
