"""From prompts and answers to samples: token ids, and which of them are learnt.

A row is what one example becomes: its ids and, for each, whether it is a target. Masks come from lengths, never from
ids: an end-of-text token is a target where an answer ends, whatever the padding id is.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from gptlm.data.examples import Example

Encode = Callable[[list[str]], list[list[int]]]  # texts -> ids, without special tokens of its own


@dataclass(frozen=True)
class Row:
    """One encoded example.

    Attributes:
        ids: (n,) int32.
        learnt: (n,) bool; whether the id is a target.
        prompt: ids before the last answer, all of them given: what generation continues.
        left_out: turns at the end of the conversation that had no room.
        answer: text of the last answer, whole.
        cut_prompts, cut_answers: how many were longer than their limit.
    """

    ids: np.ndarray
    learnt: np.ndarray
    prompt: int
    left_out: int = 0
    answer: str = ""
    cut_prompts: int = 0
    cut_answers: int = 0


@dataclass(frozen=True)
class Lengths:
    """Limits in tokens: of a prompt, of an answer with its end, of a row."""

    source: int
    target: int
    total: int


@dataclass(frozen=True)
class Encoder:
    """Rows from examples.

    Attributes:
        encode: texts -> ids.
        end: the end-of-text id, which every whole answer ends with.
        learn_prompts: prompts are targets, too.
        end_text: text put behind prompt and answer instead of the id (PaddleNLP's " </s>"); None puts the id.
    """

    encode: Encode
    end: int
    lengths: Lengths
    learn_prompts: bool = False
    end_text: str | None = None

    def rows(self, examples: Sequence[Example]) -> list[Row]:
        """A row for each example, in order; one without any target has none left and is still there."""
        end = self.end_text or ""
        turns = [turn for example in examples for turn in example]
        prompts = self.encode([turn.prompt + turn.cue + end for turn in turns])
        answers = self.encode([turn.answer + end for turn in turns])
        names = sorted({turn.cue for turn in turns})
        cues = dict(zip(names, self.encode(names), strict=True))
        encoded = zip((cues[turn.cue] for turn in turns), prompts, answers, strict=True)
        return [self._row(example, [next(encoded) for _ in example]) for example in examples]

    def _row(self, example: Example, turns: list[tuple[list[int], list[int], list[int]]]) -> Row:
        """Of (cue, prompt with cue, answer) each; turns that do not fit whole are left out, but for the first."""
        ids: list[int] = []
        learnt: list[bool] = []
        prompt_end = left_out = cut_prompts = cut_answers = 0
        last = ""
        for number, (cue, prompt, answer) in enumerate(turns):
            source, target = self._cut(cue, prompt or [self.end], answer)
            if not target or (ids and len(source) + len(target) > self.lengths.total - len(ids)):
                left_out = len(turns) - number
                break
            prompt_end, last = len(ids) + len(source), example[number].answer
            cut_prompts += len(source) < len(prompt)
            cut_answers += len(target) < len(answer) + (self.end_text is None)
            ids += source + target
            learnt += [self.learn_prompts] * len(source) + [True] * len(target)
        if learnt:
            learnt[0] = False  # nothing foretells the first token
        cut = (cut_prompts, cut_answers)
        return Row(np.array(ids, dtype=np.int32), np.array(learnt, dtype=bool), prompt_end, left_out, last, *cut)

    def _cut(self, cue: list[int], prompt: list[int], answer: list[int]) -> tuple[list[int], list[int]]:
        """The prompt gives way to the answer; an answer that is cut does not end."""
        whole = answer if self.end_text is not None else [*answer, self.end]
        limit = min(self.lengths.target, self.lengths.total - 1)
        target = whole if len(whole) <= limit else answer[:limit]
        budget = min(self.lengths.source, max(self.lengths.total - len(target), 1))
        if len(prompt) <= budget:
            return prompt, target
        kept = cue[-budget:] if cue else []
        return prompt[: budget - len(kept)] + kept, target


def with_targets(rows: Iterable[Row]) -> list[Row]:
    """Those from which something can be learnt."""
    return [row for row in rows if row.learnt.any()]


NO_TARGETS = [Row(np.zeros(3, dtype=np.int32), np.zeros(3, dtype=bool), 1)]  # a sample that adds nothing to a sum


def packed(rows: Sequence[Row], length: int) -> list[list[Row]]:
    """Consecutive rows together, as many as have room in `length` tokens."""
    packs: list[list[Row]] = []
    used = length
    for row in rows:
        size = len(row.ids) - 1  # the last id is only a target
        if used + size > length:
            packs.append([])
            used = 0
        packs[-1].append(row)
        used += size
    return packs


@dataclass(frozen=True)
class RowCollator:
    """Samples (one row each) -> `input_ids`, `attention_mask`, and targets under `labels` and `shift_labels`, (B, T).

    Padding stands on the right and is -100 among the targets. `pad_left` is PaddleNLP's way: it stands on the left,
    and without a mask it is attended to.
    """

    pad: int
    pad_left: bool = False

    def __call__(self, samples: Sequence[list[Row]]) -> dict[str, Any]:
        pairs = [_shifted(row) for sample in samples for row in sample]
        width = max(len(inputs) for inputs, _ in pairs)
        input_ids = np.full((len(pairs), width), self.pad, dtype=np.int64)
        labels = np.full((len(pairs), width), -100, dtype=np.int64)
        mask = np.zeros((len(pairs), width), dtype=np.int64)
        for number, (inputs, targets) in enumerate(pairs):
            place = slice(width - len(inputs), width) if self.pad_left else slice(0, len(inputs))
            input_ids[number, place], labels[number, place], mask[number, place] = inputs, targets, 1
        batch = _batch(input_ids, labels)
        return batch if self.pad_left else batch | {"attention_mask": torch.from_numpy(mask)}


@dataclass(frozen=True)
class PackCollator:
    """Samples (several rows each) -> a batch in which every row attends to itself only and counts its own positions.

    Adds `position_ids` (B, T), `cu_seqlens` (n + 1,), where rows begin in the batch laid end to end, and `max_seqlen`.
    """

    pad: int

    def __call__(self, samples: Sequence[list[Row]]) -> dict[str, Any]:
        pairs = [[_shifted(row) for row in sample] for sample in samples]
        width = max(sum(len(inputs) for inputs, _ in sample) for sample in pairs)
        input_ids, labels, positions, sizes = [], [], [], []
        for sample in pairs:
            rest = width - sum(len(inputs) for inputs, _ in sample)
            if rest:
                sample = [*sample, (np.full(rest, self.pad), np.full(rest, -100))]
            input_ids.append(np.concatenate([inputs for inputs, _ in sample]).astype(np.int64))
            labels.append(np.concatenate([targets for _, targets in sample]).astype(np.int64))
            positions.append(np.concatenate([np.arange(len(inputs)) for inputs, _ in sample]))
            sizes += [len(inputs) for inputs, _ in sample]
        batch = _batch(np.stack(input_ids), np.stack(labels))
        batch["position_ids"] = torch.from_numpy(np.stack(positions))
        return batch | {"cu_seqlens": torch.from_numpy(np.cumsum([0, *sizes])), "max_seqlen": max(sizes)}


def _shifted(row: Row) -> tuple[np.ndarray, np.ndarray]:
    """Inputs and the target of each, n - 1 of both: the one place where targets are shifted."""
    return row.ids[:-1], np.where(row.learnt[1:], row.ids[1:], -100)


def _batch(input_ids: np.ndarray, labels: np.ndarray) -> dict[str, Any]:
    targets = torch.from_numpy(labels)
    return {"input_ids": torch.from_numpy(input_ids), "labels": targets, "shift_labels": targets}
