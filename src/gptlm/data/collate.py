"""From samples to a batch: the one place where targets are shifted, padded and packed.

The targets are under `labels` and `shift_labels`, the same tensor: with both keys the Trainer counts exactly the tokens
of the loss, and the model uses them without another shift.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from gptlm.data.rows import Row

IGNORED = -100  # a target that adds nothing to the loss
NO_TARGETS = [Row(np.zeros(3, dtype=np.int32), np.zeros(3, dtype=bool), 1)]  # a sample that adds nothing to a sum


# Pretraining ------------------------------------------------------------------------------------------------------


def collate_blocks(blocks: Sequence[np.ndarray]) -> dict[str, torch.Tensor]:
    """Blocks of T + 1 tokens -> `input_ids` (B, T) and their targets (B, T), int64."""
    tokens = torch.from_numpy(np.stack(blocks))
    targets = tokens[:, 1:].clone(memory_format=torch.contiguous_format)  # never a view of the inputs
    # blocks that only fill a batch are `IGNORED` at every place
    return {"input_ids": tokens[:, :-1].clamp(min=0), "labels": targets, "shift_labels": targets}


@dataclass(frozen=True)
class DocumentCollator:
    """As `collate_blocks` for samples that come with the lengths of their documents.

    Attributes:
        masking: "position" adds `position_ids` (B, T) that restart with each document, "attention" also `cu_seqlens`
            (n + 1,), where documents start in the batch laid end to end, and `max_seqlen`, the longest one.
        eod_mask_loss: the first token of a document is not a target, because nothing before it predicts it.
    """

    masking: str
    eod_mask_loss: bool

    def __call__(self, samples: Sequence[tuple[np.ndarray, list[int]]]) -> dict[str, Any]:
        batch: dict[str, Any] = collate_blocks([block for block, _ in samples])
        length = batch["input_ids"].shape[1]
        firsts = [np.cumsum([0, *lengths[:-1]]) for _, lengths in samples]  # of each document, in its row
        if self.eod_mask_loss:
            for row, first in enumerate(firsts):
                batch["labels"][row, first[1:] - 1] = IGNORED
        if self.masking != "none":
            starts = np.concatenate([row * length + first[first < length] for row, first in enumerate(firsts)])
            offsets = np.append(starts, len(samples) * length)
            sizes = np.diff(offsets)
            positions = np.arange(len(samples) * length) - np.repeat(starts, sizes)
            batch["position_ids"] = torch.from_numpy(positions).view(len(samples), length)
            if self.masking == "attention":
                batch |= {"cu_seqlens": torch.from_numpy(offsets), "max_seqlen": int(sizes.max())}
        return batch


# Fine-tuning ------------------------------------------------------------------------------------------------------


def pack(rows: Sequence[Row], length: int) -> list[list[Row]]:
    """Consecutive rows together, as many as fit into `length` tokens."""
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
    """Samples of one row each -> `input_ids`, `attention_mask` and targets, (B, T), padded on the right.

    `pad_left` is PaddleNLP's way: padding is on the left and, without a mask, is attended to.
    """

    pad: int
    pad_left: bool = False

    def __call__(self, samples: Sequence[list[Row]]) -> dict[str, Any]:
        pairs = [_shifted(row) for sample in samples for row in sample]
        width = max(len(inputs) for inputs, _ in pairs)
        input_ids = np.full((len(pairs), width), self.pad, dtype=np.int64)
        labels = np.full((len(pairs), width), IGNORED, dtype=np.int64)
        mask = np.zeros((len(pairs), width), dtype=np.int64)
        for number, (inputs, targets) in enumerate(pairs):
            place = slice(width - len(inputs), width) if self.pad_left else slice(0, len(inputs))
            input_ids[number, place], labels[number, place], mask[number, place] = inputs, targets, 1
        batch = _batch(input_ids, labels)
        return batch if self.pad_left else batch | {"attention_mask": torch.from_numpy(mask)}


@dataclass(frozen=True)
class PackCollator:
    """Samples of several rows each -> a batch in which every row attends to itself only and has its own positions.

    Adds `position_ids` (B, T), `cu_seqlens` (n + 1,), where rows start in the batch laid end to end, and `max_seqlen`.
    """

    pad: int

    def __call__(self, samples: Sequence[list[Row]]) -> dict[str, Any]:
        pairs = [[_shifted(row) for row in sample] for sample in samples]
        width = max(sum(len(inputs) for inputs, _ in sample) for sample in pairs)
        input_ids, labels, positions, sizes = [], [], [], []
        for sample in pairs:
            rest = width - sum(len(inputs) for inputs, _ in sample)
            if rest:
                sample = [*sample, (np.full(rest, self.pad), np.full(rest, IGNORED))]
            input_ids.append(np.concatenate([inputs for inputs, _ in sample]).astype(np.int64))
            labels.append(np.concatenate([targets for _, targets in sample]).astype(np.int64))
            positions.append(np.concatenate([np.arange(len(inputs)) for inputs, _ in sample]))
            sizes += [len(inputs) for inputs, _ in sample]
        batch = _batch(np.stack(input_ids), np.stack(labels))
        batch["position_ids"] = torch.from_numpy(np.stack(positions))
        return batch | {"cu_seqlens": torch.from_numpy(np.cumsum([0, *sizes])), "max_seqlen": max(sizes)}


def _shifted(row: Row) -> tuple[np.ndarray, np.ndarray]:
    """Inputs and the target of each, n - 1 of both."""
    return row.ids[:-1], np.where(row.loss_mask[1:], row.ids[1:], IGNORED)


def _batch(input_ids: np.ndarray, labels: np.ndarray) -> dict[str, Any]:
    targets = torch.from_numpy(labels)
    return {"input_ids": torch.from_numpy(input_ids), "labels": targets, "shift_labels": targets}


# Datasets from Python ----------------------------------------------------------------------------------------------


def collate_samples(samples: Sequence[Any]) -> dict[str, torch.Tensor]:
    """Blocks (T + 1 token ids), or dicts with `input_ids` and optionally `labels` -> a batch as of `collate_blocks`.

    `labels` of dicts are HuggingFace's, as long as `input_ids` and not shifted; without them each token is a target.
    Shorter rows are padded on the right, and `attention_mask` is added where any is.
    """
    if not isinstance(samples[0], Mapping):
        return collate_blocks([np.asarray(sample, dtype=np.int64) for sample in samples])
    rows = [np.asarray(sample["input_ids"], dtype=np.int64) for sample in samples]
    labels = [np.asarray(sample.get("labels", row), dtype=np.int64) for sample, row in zip(samples, rows, strict=True)]
    shape = len(rows), max(map(len, rows))
    input_ids, targets = np.zeros(shape, dtype=np.int64), np.full(shape, IGNORED, dtype=np.int64)
    for number, (row, label) in enumerate(zip(rows, labels, strict=True)):
        input_ids[number, : len(row)] = row
        targets[number, : len(row) - 1] = label[1:]
    tensor = torch.from_numpy(targets)
    batch = {"input_ids": torch.from_numpy(input_ids), "labels": tensor, "shift_labels": tensor}
    if any(len(row) < shape[1] for row in rows):
        lengths = torch.tensor([len(row) for row in rows])
        batch["attention_mask"] = (torch.arange(shape[1]) < lengths[:, None]).long()
    return batch


@dataclass(frozen=True)
class FilledCollator:
    """`collate` for samples among which are `None`s that fill a batch up: rows without a target.

    A filler takes the tokens of the first of `dataset`, so that any `collate` that makes a row of each sample will do.
    """

    collate: Callable[[list], dict[str, Any]]
    dataset: Any

    def __call__(self, samples: Sequence[Any]) -> dict[str, Any]:
        fillers = [number for number, sample in enumerate(samples) if sample is None]
        if not fillers:
            return self.collate(list(samples))
        batch = self.collate([self.dataset[0] if sample is None else sample for sample in samples])
        for key in ("labels", "shift_labels"):
            if key in batch:
                batch[key][fillers] = IGNORED
        return batch


def tokens_of(sample: Any) -> int:
    """Tokens that a sample trains: of a block (T + 1 ids) T."""
    return len(sample["input_ids"]) if isinstance(sample, Mapping) else len(sample) - 1
