"""How the next token is chosen from the logits."""

from collections.abc import Collection
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import (
    LogitsProcessorList,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

SAMPLING_FIELDS = ("top_k", "top_p", "temperature")
BEAM_FIELDS = ("length_penalty", "early_stopping")


@dataclass(frozen=True)
class Sampling:
    """How the next token is chosen: greedy search by default, beam search with `num_beams`, else sampling.

    Names and meanings are those of `GenerationConfig`; `top_k` 0 and `top_p` 1.0 have no effect.
    """

    do_sample: bool = False
    top_k: int = 50
    top_p: float = 1.0
    temperature: float = 1.0
    repetition_penalty: float = 1.0
    min_new_tokens: int = 0
    num_beams: int = 1
    length_penalty: float = 1.0
    early_stopping: bool = False
    num_return_sequences: int = 1

    def options(self) -> dict[str, Any]:
        """Fields of a GenerationConfig, without those that have no effect: `generate` warns about them."""
        unused = (() if self.do_sample else SAMPLING_FIELDS) + (() if self.num_beams > 1 else BEAM_FIELDS)
        return {name: value for name, value in asdict(self).items() if name not in unused}


GREEDY = Sampling()


class NextToken:
    """Chooses the next token of each row, greedily or by sampling, as transformers' `generate` does.

    It never waits for the device, so it can be part of a CUDA graph. Hence the two masks are made once: transformers'
    processors for `min_new_tokens` and `suppress_tokens` make theirs at each step, and read lengths on the host.

    Args:
        stops: ids that `min_new_tokens` forbids at first.
        never: ids that are never chosen.
        entries: of the model's vocabulary.
    """

    def __init__(
        self, sampling: Sampling, stops: Collection[int], never: Collection[int], entries: int, device: torch.device
    ):
        assert sampling.num_beams == 1
        self.do_sample, self.min_new_tokens = sampling.do_sample, sampling.min_new_tokens
        self._never = _mask(never, entries, device) if never else None
        self._stops = _mask(stops, entries, device) if stops and sampling.min_new_tokens else None
        self._penalty = LogitsProcessorList()
        if sampling.repetition_penalty != 1.0:
            self._penalty.append(RepetitionPenaltyLogitsProcessor(sampling.repetition_penalty))
        self._warpers = LogitsProcessorList()
        if sampling.do_sample:
            if sampling.temperature != 1.0:
                self._warpers.append(TemperatureLogitsWarper(sampling.temperature))
            if sampling.top_k:
                self._warpers.append(TopKLogitsWarper(sampling.top_k))
            if sampling.top_p < 1.0:
                self._warpers.append(TopPLogitsWarper(sampling.top_p))

    def __call__(self, logits: Tensor, ids: Tensor, made: Tensor) -> tuple[Tensor, Tensor]:
        """The chosen ids and the largest logits of all rows, (rows,) each.

        Args:
            logits: (rows, vocabulary) float32.
            ids: (rows, length), all ids of a row so far and any of them again.
            made: (rows,), new ids so far.
        """
        scores: Any = self._penalty(ids, logits)  # type: ignore[arg-type]
        if self._stops is not None:
            scores = scores.masked_fill(self._stops & (made < self.min_new_tokens)[:, None], -torch.inf)
        if self._never is not None:
            scores = scores.masked_fill(self._never, -torch.inf)
        if not self.do_sample:
            largest, chosen = scores.max(-1)
            return chosen, largest if scores is logits else logits.amax(-1)
        scores = self._warpers(ids, scores)  # type: ignore[arg-type]
        return _draw(scores.softmax(-1)), logits.amax(-1)


def _mask(ids: Collection[int], entries: int, device: torch.device) -> Tensor:
    mask = torch.zeros(entries, dtype=torch.bool)
    mask[[number for number in ids if number < entries]] = True
    return mask.to(device)


def _draw(probabilities: Tensor) -> Tensor:
    """(rows, vocabulary) -> (rows,): the formula, and so the result, of `torch.multinomial` for one number of each row.

    torch.multinomial also checks the probabilities, for which it waits for the device, or ends the process.
    """
    return (probabilities / torch.empty_like(probabilities).exponential_()).argmax(-1)
