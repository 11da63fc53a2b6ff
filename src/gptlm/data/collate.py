"""From samples to a batch: the one place where targets are shifted."""

from collections.abc import Sequence

import numpy as np
import torch


def collate_blocks(blocks: Sequence[np.ndarray]) -> dict[str, torch.Tensor]:
    """Blocks of T + 1 tokens -> `input_ids` (B, T) and their targets (B, T), int64.

    The targets stand under `labels` and `shift_labels`: with both keys the Trainer counts exactly the tokens the loss
    sees, and the model uses them as they are.
    """
    tokens = torch.from_numpy(np.stack(blocks))
    targets = tokens[:, 1:].contiguous()
    return {"input_ids": tokens[:, :-1].contiguous(), "labels": targets, "shift_labels": targets}
