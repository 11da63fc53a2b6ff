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
        masking: "position" adds `position_ids` (B, T) that restart with each document, "attention" what `documents_in`
            returns.
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
            batch |= documents_in(np.diff(starts, append=len(samples) * length), length)
            if self.masking == "position":
                del batch["cu_seqlens"], batch["max_seqlen"]
        return batch


OFFSETS = 32


def documents_in(sizes: Sequence[int] | np.ndarray, length: int) -> dict[str, Any]:
    """Where documents lie in a batch of rows of `length` positions: what limits attention to tokens of a document.

    Shapes depend little on the documents, so that few of them are captured as a CUDA graph: one in most runs.

    Args:
        sizes: positions of each document, row after row; they fill all rows, and each row begins a document.

    Returns:
        position_ids: (B, T) int64, from 0 in each document.
        cu_seqlens: int32, where documents start in the batch laid end to end, then B x T up to a multiple of `OFFSETS`
            entries: documents without tokens. Each costs about 0.5 microseconds per layer on an H200.
        max_seqlen: T, an upper bound of the lengths.
    """
    offsets = np.cumsum([0, *sizes])
    total = int(offsets[-1])
    positions = np.arange(total) - np.repeat(offsets[:-1], sizes)
    padded = np.full(-(-len(offsets) // OFFSETS) * OFFSETS, total, dtype=np.int32)
    padded[: len(offsets)] = offsets
    return {
        "position_ids": torch.from_numpy(positions).view(-1, length),
        "cu_seqlens": torch.from_numpy(padded),
        "max_seqlen": length,
    }


# Fine-tuning ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class RowCollator:
    """Samples of one row each -> `input_ids` and targets, (B, T), padded on the right.

    There is no mask: causal attention never lets a token see what is on its right, and padding is no target.

    Attributes:
        multiple: T is a multiple of it, but `limit` at most: few lengths mean few shapes to plan and compile for.
        pad_left: PaddleNLP's way, padding is on the left and attended to. Then T is that of the longest row.
    """

    pad: int
    multiple: int = 1
    limit: int | None = None
    pad_left: bool = False

    def __call__(self, samples: Sequence[list[Row]]) -> dict[str, Any]:
        pairs = [_shifted(row) for sample in samples for row in sample]
        width = self.width(max(len(inputs) for inputs, _ in pairs))
        input_ids = np.full((len(pairs), width), self.pad, dtype=np.int64)
        labels = np.full((len(pairs), width), IGNORED, dtype=np.int64)
        for number, (inputs, targets) in enumerate(pairs):
            place = slice(width - len(inputs), width) if self.pad_left else slice(0, len(inputs))
            input_ids[number, place], labels[number, place] = inputs, targets
        return _batch(input_ids, labels)

    @property
    def shapes_repeat(self) -> bool:
        """Whether T has few values."""
        return self.multiple > 1 and not self.pad_left

    def width(self, longest: int) -> int:
        """T of a batch whose longest row has `longest` positions."""
        if self.pad_left:
            return longest
        width = -(-longest // self.multiple) * self.multiple
        return max(longest, width if self.limit is None else min(width, self.limit))


@dataclass(frozen=True)
class PackCollator:
    """Samples of several rows each -> a batch in which every row attends to itself only and has its own positions.

    `input_ids` and targets are (B, length), whatever the rows' lengths. What is left of a sample is a document of its
    own outside the loss. `documents_in` gives the other keys.
    """

    pad: int
    length: int
    shapes_repeat = True

    def __call__(self, samples: Sequence[list[Row]]) -> dict[str, Any]:
        input_ids = np.full((len(samples), self.length), self.pad, dtype=np.int64)
        labels = np.full((len(samples), self.length), IGNORED, dtype=np.int64)
        sizes: list[int] = []
        for number, sample in enumerate(samples):
            pairs = [_shifted(row) for row in sample]
            own = [len(inputs) for inputs, _ in pairs]
            used = sum(own)
            input_ids[number, :used] = np.concatenate([inputs for inputs, _ in pairs])
            labels[number, :used] = np.concatenate([targets for _, targets in pairs])
            sizes += [*own, self.length - used] if used < self.length else own
        return _batch(input_ids, labels) | documents_in(sizes, self.length)


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
    Shorter rows are padded on the right, without a mask, see `RowCollator`.
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
    return {"input_ids": torch.from_numpy(input_ids), "labels": tensor, "shift_labels": tensor}


def shifted(labels: torch.Tensor) -> torch.Tensor:
    """The target of each position, (B, T), from `labels` in HuggingFace's convention."""
    return torch.nn.functional.pad(labels[:, 1:], (0, 1), value=IGNORED)


def mask_is_needless(batch: Mapping[str, Any]) -> bool:
    """Whether `attention_mask` hides only padding on the right that is no target, as causal attention does anyway.

    False on a device, where looking at the mask would wait for it.
    """
    mask, targets = batch.get("attention_mask"), batch.get("shift_labels", batch.get("labels"))
    if mask is None or targets is None or mask.dim() != 2 or mask.is_cuda or targets.is_cuda:
        return False
    is_right = bool((mask[:, 1:] <= mask[:, :-1]).all())
    return is_right and bool((targets[mask == 0] == IGNORED).all())


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
