"""Batches: the one shift of targets, document boundaries, padding and packing."""

import numpy as np
import pytest
import torch

from gptlm.data.collate import NO_TARGETS, DocumentCollator, PackCollator, RowCollator, collate_blocks, pack
from gptlm.data.conversations import Turn
from gptlm.data.epochs import Filled
from gptlm.data.rows import with_targets
from tests.data.test_rows import END, rows


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


def codes(text):
    return [END if letter == "." else ord(letter) for letter in text]


def test_targets_come_from_lengths_not_from_ids():
    """The padding id is the end-of-text id, and a prompt holds it, too: only the end of an answer is a target."""
    short, long = rows([Turn("a", "x")], [Turn("abcd", "xy")])
    batch = RowCollator(END)([[short], [long]])
    assert batch["input_ids"].tolist() == [codes("ax...."), codes("abcdxy")]
    assert batch["labels"].tolist() == [[*codes("x."), -100, -100, -100, -100], [-100, -100, -100, *codes("xy.")]]
    assert batch["attention_mask"].tolist() == [[1, 1, 0, 0, 0, 0], [1] * 6]
    assert batch["shift_labels"] is batch["labels"]


def test_paddlenlp_s_padding_is_on_the_left_and_has_no_mask():
    short, long = rows([Turn("a", "x")], [Turn("abcd", "xy")])
    batch = RowCollator(END, pad_left=True)([[short], [long]])
    assert batch["input_ids"].tolist()[0] == codes("....ax") and "attention_mask" not in batch
    assert batch["labels"].tolist()[0] == [-100] * 4 + codes("x.")


def test_packs_are_as_full_as_the_order_allows():
    found = rows(*([Turn("a" * n, "x")] for n in (2, 3, 4, 6)))  # inputs of 3, 4, 5 and 7 tokens
    assert [[len(row.ids) - 1 for row in pack] for pack in pack(found, 12)] == [[3, 4, 5], [7]]


def test_a_packed_batch():
    one, two, three = rows([Turn("a", "x")], [Turn("bc", "y")], [Turn("defg", "z")])
    batch = PackCollator(END)([[one, two], [three]])
    assert batch["input_ids"].tolist() == [codes("axbcy"), codes("defgz")]
    assert batch["labels"].tolist() == [[*codes("x."), -100, *codes("y.")], [-100, -100, -100, *codes("z.")]]
    assert batch["position_ids"].tolist() == [[0, 1, 0, 1, 2], [0, 1, 2, 3, 4]]
    assert batch["cu_seqlens"].tolist() == [0, 2, 5, 10] and batch["max_seqlen"] == 5
    short = PackCollator(END)([[one], [three]])
    assert short["cu_seqlens"].tolist() == [0, 2, 5, 10] and short["position_ids"][0].tolist() == [0, 1, 0, 1, 2]
    assert short["labels"][0].tolist() == [*codes("x."), -100, -100, -100]


def test_samples_that_fill_batches_up_have_no_targets():
    found = rows([Turn("a", "x")], [Turn("b", "y")], [Turn("c", "z")])
    filled = Filled([[row] for row in found], NO_TARGETS, 2, examples=3)
    batch = RowCollator(END)([filled[number] for number in range(len(filled))])
    assert batch["input_ids"].shape == (4, 2) and (batch["labels"][3:] == -100).all() and filled.examples == 3
    assert torch.equal(batch["labels"][:3] == -100, torch.zeros(3, 2, dtype=torch.bool))
    assert len(Filled([[found[0]]], NO_TARGETS, 1)) == 1 and with_targets(NO_TARGETS) == []
