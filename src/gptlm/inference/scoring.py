"""Score given tokens with a model: sliding windows over a long text, log-probabilities, greedy matches.

Logits are computed for the scored targets only, a chunk at a time.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import overload

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from gptlm.kernels.linear_cross_entropy import CHUNK_TOKENS
from gptlm.model.build import check_finite
from gptlm.model.gpt import GPTLMHeadModel

Tokens = Sequence[int] | np.ndarray


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


def score(
    model: GPTLMHeadModel, rows: Sequence[Row], batch_size: int, share: tuple[int, int] = (0, 1)
) -> Iterator[list[tuple[int, Score]]]:
    """Yields, for each batch, the pairs (index of a row, its score).

    Args:
        share: (i, n) scores every n-th batch from the i-th on, so that n processes score all rows once.

    Raises:
        GptlmError: if the logits are not finite.
    """
    for start in range(share[0] * batch_size, len(rows), share[1] * batch_size):
        batch = [rows[i] for i in range(start, min(start + batch_size, len(rows)))]
        yield list(enumerate(_score_batch(model, batch), start=start))


@torch.inference_mode()
def _score_batch(model: GPTLMHeadModel, rows: Sequence[Row]) -> list[Score]:
    hidden = model.transformer(input_ids=_padded(rows).to(model.device)).last_hidden_state
    ends = [len(row.ids) - 1 for row in rows]
    # (targets of all rows, width)
    kept = torch.cat([hidden[i, end - row.scored : end] for i, (row, end) in enumerate(zip(rows, ends, strict=True))])
    targets = np.concatenate([np.asarray(row.ids[-row.scored :], dtype=np.int64) for row in rows])
    losses, hits = _losses(model, kept, torch.from_numpy(targets).to(kept.device))
    check_finite(losses, model)
    sizes = [row.scored for row in rows]
    parts = zip(losses.split(sizes), hits.split(sizes), strict=True)
    return [Score(loss.sum().item(), tuple(hit.tolist())) for loss, hit in parts]


def _padded(rows: Sequence[Row]) -> Tensor:
    """Inputs (rows, longest) int64. Padding is on the right, where causal attention needs no mask."""
    ids = np.zeros((len(rows), max(len(row.ids) for row in rows) - 1), dtype=np.int64)
    for i, row in enumerate(rows):
        ids[i, : len(row.ids) - 1] = row.ids[:-1]
    return torch.from_numpy(ids)


def _losses(model: GPTLMHeadModel, hidden: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    """-log p (targets,) in float64 from float32 logits, and whether the target is the argmax (targets,).

    Args:
        hidden: (targets, width).
        targets: (targets,) ids.
    """
    losses, hits = [], []
    for part, target in zip(hidden.split(CHUNK_TOKENS), targets.split(CHUNK_TOKENS), strict=True):
        logits = model.lm_head(part).float()
        losses.append(F.cross_entropy(logits, target, reduction="none").double().cpu())
        hits.append((logits.argmax(dim=-1) == target).cpu())
    return torch.cat(losses), torch.cat(hits)
