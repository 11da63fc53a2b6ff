import numpy as np
import pytest
import torch

from gptlm.data.collate import DocumentCollator, collate_blocks


def test_the_one_shift():
    batch = collate_blocks([np.array([1, 2, 3, 4]), np.array([5, 6, 7, 8])])
    assert batch["input_ids"].tolist() == [[1, 2, 3], [5, 6, 7]]
    assert batch["shift_labels"].tolist() == [[2, 3, 4], [6, 7, 8]]
    assert batch["labels"] is batch["shift_labels"] and batch["labels"].dtype == torch.int64


@pytest.mark.parametrize("masking", ["none", "position", "attention"])
@pytest.mark.parametrize("eod_mask_loss", [False, True])
def test_documents_on_twelve_tokens(masking, eod_mask_loss):
    """Documents of 4, 5 and 3 tokens; and a row with a new document as its last target."""
    rows = [(np.arange(12), [4, 5, 3]), (np.arange(12) + 20, [11, 1])]
    batch = DocumentCollator(masking, eod_mask_loss)(rows)
    first, second = list(range(1, 12)), list(range(21, 32))
    if eod_mask_loss:  # the inputs at 3 and 8 are last tokens: what follows belongs to another document
        first[3] = first[8] = second[10] = -100
    assert batch["labels"].tolist() == batch["shift_labels"].tolist() == [first, second]
    assert batch["input_ids"].tolist() == [list(range(11)), list(range(20, 31))]
    assert ("position_ids" in batch) == (masking != "none") and ("cu_seqlens" in batch) == (masking == "attention")
    if masking != "none":
        assert batch["position_ids"].tolist() == [[0, 1, 2, 3, 0, 1, 2, 3, 4, 0, 1], list(range(11))]
    if masking == "attention":
        assert batch["cu_seqlens"].tolist() == [0, 4, 9, 11, 22] and batch["max_seqlen"] == 11
