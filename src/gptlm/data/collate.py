"""From samples to a batch: the one place where targets are shifted."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

NO_TARGET = -100  # at every place of a block: it fills a batch up and adds nothing to a loss


def collate_blocks(blocks: Sequence[np.ndarray]) -> dict[str, torch.Tensor]:
    """Blocks of T + 1 tokens -> `input_ids` (B, T) and their targets (B, T), int64.

    The targets stand under `labels` and `shift_labels`: with both keys the Trainer counts exactly the tokens the loss
    sees, and the model uses them as they are.
    """
    tokens = torch.from_numpy(np.stack(blocks))
    targets = tokens[:, 1:].clone(memory_format=torch.contiguous_format)  # never a view of the inputs
    return {"input_ids": tokens[:, :-1].clamp(min=0), "labels": targets, "shift_labels": targets}


@dataclass(frozen=True)
class DocumentCollator:
    """As `collate_blocks` for samples that come with the lengths of their documents.

    Attributes:
        masking: "position" adds `position_ids` (B, T) that restart with each document, "attention" also `cu_seqlens`
            (n + 1,), where documents begin in the batch laid end to end, and `max_seqlen`, the longest one.
        eod_mask_loss: the first token of a document is no target: nothing before it foretells it.
    """

    masking: str
    eod_mask_loss: bool

    def __call__(self, samples: Sequence[tuple[np.ndarray, list[int]]]) -> dict[str, Any]:
        batch: dict[str, Any] = collate_blocks([block for block, _ in samples])
        length = batch["input_ids"].shape[1]
        firsts = [np.cumsum([0, *lengths[:-1]]) for _, lengths in samples]  # of each document, in its row
        if self.eod_mask_loss:
            for row, first in enumerate(firsts):
                batch["labels"][row, first[1:] - 1] = -100
        if self.masking != "none":
            starts = np.concatenate([row * length + first[first < length] for row, first in enumerate(firsts)])
            offsets = np.append(starts, len(samples) * length)
            sizes = np.diff(offsets)
            positions = np.arange(len(samples) * length) - np.repeat(starts, sizes)
            batch["position_ids"] = torch.from_numpy(positions).view(len(samples), length)
            if self.masking == "attention":
                batch |= {"cu_seqlens": torch.from_numpy(offsets), "max_seqlen": int(sizes.max())}
        return batch
