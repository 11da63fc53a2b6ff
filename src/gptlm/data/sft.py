"""From rows to samples and batches: epochs, packing, padding."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from gptlm.data.rows import Row

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
