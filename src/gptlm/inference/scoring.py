"""Score given tokens with a model: sliding windows over a long text, log-probabilities, greedy matches.

Logits are computed for the scored targets only, a chunk at a time. On a GPU nothing waits for the results of a batch
until the next ones have been started.
"""

from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import overload

import numpy as np
import torch
from torch import Tensor

from gptlm.data.token_file import Ids
from gptlm.model.build import check_finite
from gptlm.model.gpt import GPTLMHeadModel

BATCH_TOKENS = 16384  # with padding, of a batch without a given number of rows: enough to fill a GPU
IN_FLIGHT = 2  # batches that are started before the results of the first one are read

Tokens = Sequence[int] | Ids


@dataclass(frozen=True)
class Row:
    """Token ids. The last `scored` of them are targets (at least 1, never the first id); the others are context."""

    ids: Tokens
    scored: int


@dataclass(frozen=True)
class Score:
    """The score of a row: summed -log p of its targets, and for each target whether it is the argmax."""

    loss: float
    hits: tuple[bool, ...]


class Windows(Sequence[Row]):
    """Sliding windows over `tokens` in which every target is scored once.

    The first window scores all of its targets, each later one those that follow the window before. The last may be
    shorter. These are the windows of Megatron's `tasks/zeroshot_gpt`, without its last ones that score nothing.

    Args:
        tokens: (n,) ids, n at least 2; all but the first are targets.
        length: inputs of a window, which therefore spans length + 1 tokens.
        step: tokens between the starts of two windows, 1 to `length`.
    """

    def __init__(self, tokens: Tokens, length: int, step: int):
        assert len(tokens) >= 2 and 1 <= step <= length
        self.tokens, self.length, self.step = tokens, length, step
        self.rest = max(len(tokens) - 1 - length, 0)  # targets after the first window

    def __len__(self) -> int:
        return 1 + -(-self.rest // self.step)

    @overload
    def __getitem__(self, number: int) -> Row: ...
    @overload
    def __getitem__(self, number: slice) -> list[Row]: ...
    def __getitem__(self, number: int | slice) -> Row | list[Row]:
        if isinstance(number, slice):
            return [self[i] for i in range(*number.indices(len(self)))]
        if not 0 <= number < len(self):
            raise IndexError(number)
        start = number * self.step
        end = min(start + self.length + 1, len(self.tokens))
        scored = end - 1 if number == 0 else end - (start - self.step + self.length + 1)
        return Row(self.tokens[start:end], scored)


def batches(rows: Sequence[Row], size: int | None) -> list[range]:
    """Consecutive numbers of `rows` for each batch: `size` of them, or as many as have BATCH_TOKENS inputs."""
    if size is not None:
        return [range(start, min(start + size, len(rows))) for start in range(0, len(rows), size)]
    found: list[range] = []
    start = longest = 0
    for number in range(len(rows)):
        longest = max(longest, len(rows[number].ids) - 1)
        if number > start and (number + 1 - start) * longest > BATCH_TOKENS:
            found.append(range(start, number))
            start, longest = number, len(rows[number].ids) - 1
    return [*found, range(start, len(rows))]


def score(model: GPTLMHeadModel, rows: Sequence[Row], batches: Sequence[range]) -> Iterator[list[tuple[int, Score]]]:
    """Yields, for each batch, the pairs (number of a row, its score).

    Args:
        batches: numbers of rows. Rows of similar length belong into one batch, which is padded to the longest.

    Raises:
        GptlmError: if the logits are not finite.
    """
    started: deque[_Started] = deque()
    for numbers in batches:
        started.append(_start(model, [rows[number] for number in numbers], numbers))
        if len(started) > IN_FLIGHT:
            yield _finish(model, started.popleft())
    while started:
        yield _finish(model, started.popleft())


@dataclass(frozen=True)
class _Started:
    """A batch of which the device may still compute.

    Attributes:
        sizes: targets of each row.
        losses, hits: of all targets, in host memory, valid after `ready`.
    """

    numbers: range
    sizes: list[int]
    losses: Tensor
    hits: Tensor
    ready: torch.cuda.Event | None


@torch.inference_mode()
def _start(model: GPTLMHeadModel, rows: Sequence[Row], numbers: range) -> _Started:
    device = model.device
    length = max(len(row.ids) for row in rows) - 1
    inputs = len(rows) * length
    sizes = [row.scored for row in rows]
    # one copy to the device: ids (rows, length), positions of the targets in them, the targets
    given = torch.zeros(inputs + 2 * sum(sizes), dtype=torch.int64, pin_memory=device.type == "cuda")
    ids, places, targets = np.split(given.numpy(), [inputs, inputs + sum(sizes)])
    done = 0
    for i, row in enumerate(rows):
        begin, end = i * length, i * length + len(row.ids) - 1
        ids[begin:end] = row.ids[:-1]  # padding is on the right, where causal attention needs no mask
        places[done : done + row.scored] = range(end - row.scored, end)
        targets[done : done + row.scored] = row.ids[-row.scored :]
        done += row.scored
    on_device = given.to(device, non_blocking=True)
    tokens, kept, wanted = on_device.split([inputs, done, done])
    hidden = model.transformer(input_ids=tokens.view(len(rows), length)).last_hidden_state.flatten(0, 1)
    losses, hits = model.output_scores(hidden[kept], model.lm_head.weight, wanted)
    if device.type != "cuda":
        return _Started(numbers, sizes, losses, hits, None)
    losses, hits = _to_host(losses), _to_host(hits)
    ready = torch.cuda.Event()
    ready.record()
    return _Started(numbers, sizes, losses, hits, ready)


def _to_host(values: Tensor) -> Tensor:
    """A copy in host memory, filled when the device gets there."""
    return torch.empty(values.shape, dtype=values.dtype, pin_memory=True).copy_(values, non_blocking=True)


def _finish(model: GPTLMHeadModel, batch: _Started) -> list[tuple[int, Score]]:
    if batch.ready is not None:
        batch.ready.synchronize()
    check_finite(batch.losses, model)
    losses, hits = batch.losses.tolist(), batch.hits.tolist()
    ends = list(accumulate(batch.sizes))
    parts = [(end - size, end) for end, size in zip(ends, batch.sizes, strict=True)]
    scores = (Score(sum(losses[a:b]), tuple(hits[a:b])) for a, b in parts)  # sums in float64
    return list(zip(batch.numbers, scores, strict=True))
