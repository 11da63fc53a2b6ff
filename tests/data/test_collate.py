import numpy as np
import torch

from gptlm.data.collate import collate_blocks


def test_the_one_shift():
    batch = collate_blocks([np.array([1, 2, 3, 4]), np.array([5, 6, 7, 8])])
    assert batch["input_ids"].tolist() == [[1, 2, 3], [5, 6, 7]]
    assert batch["shift_labels"].tolist() == [[2, 3, 4], [6, 7, 8]]
    assert batch["labels"] is batch["shift_labels"] and batch["labels"].dtype == torch.int64
