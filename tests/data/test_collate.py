"""Batches: the one shift of targets, document boundaries, padding and packing."""

import numpy as np
import pytest
import torch

from gptlm.data.collate import (
    NO_TARGETS,
    DocumentCollator,
    PackCollator,
    RowCollator,
    collate_blocks,
    documents_in,
    mask_is_needless,
)
from gptlm.data.conversations import Turn
from gptlm.data.epochs import Filled
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
        assert batch["cu_seqlens"].tolist() == [0, 4, 9, 11] + [22] * 28 and batch["max_seqlen"] == 11
        assert batch["cu_seqlens"].dtype == torch.int32


@pytest.mark.parametrize(
    ("documents", "entries"), [(1, 32), (31, 32), (32, 64), (63, 64), (64, 96), (95, 96), (96, 128)]
)
def test_offsets_have_few_shapes(documents, entries):
    """n documents have n + 1 offsets; the rest are empty documents at the end."""
    found = documents_in([2] * documents, 2 * documents)
    offsets = found["cu_seqlens"].tolist()
    assert len(offsets) == entries
    assert offsets == [*range(0, 2 * documents, 2)] + [2 * documents] * (entries - documents)
    assert found["position_ids"].tolist() == [[0, 1] * documents] and found["max_seqlen"] == 2 * documents


def codes(text):
    return [END if letter == "." else ord(letter) for letter in text]


def test_targets_come_from_lengths_not_from_ids():
    """The padding id is the end-of-text id, and a prompt holds it, too: only the end of an answer is a target."""
    short, long = rows([Turn("a", "x")], [Turn("abcd", "xy")])
    batch = RowCollator(END)([[short], [long]])
    assert batch["input_ids"].tolist() == [codes("ax...."), codes("abcdxy")]
    assert batch["labels"].tolist() == [[*codes("x."), -100, -100, -100, -100], [-100, -100, -100, *codes("xy.")]]
    assert batch["shift_labels"] is batch["labels"] and "attention_mask" not in batch


@pytest.mark.parametrize(
    ("mask", "targets", "needless"),
    [
        ([[1, 1, 1], [1, 1, 0]], [[5, 6, 7], [5, 6, -100]], True),
        ([[1, 1, 1], [1, 1, 1]], [[5, 6, 7], [5, 6, 7]], True),
        ([[1, 1, 1], [1, 1, 0]], [[5, 6, 7], [5, 6, 7]], False),
        ([[1, 1, 1], [0, 1, 1]], [[5, 6, 7], [-100, 6, 7]], False),
        ([[1, 1, 1], [1, 0, 1]], [[5, 6, 7], [5, -100, 7]], False),
    ],
)
def test_masks_that_hide_what_causal_attention_hides(mask, targets, needless):
    batch = {"attention_mask": torch.tensor(mask), "labels": torch.tensor(targets)}
    assert mask_is_needless(batch) == needless
    assert not mask_is_needless({"labels": batch["labels"]})
    assert not mask_is_needless({"attention_mask": batch["attention_mask"]})


def test_widths_of_padded_batches():
    """A multiple of 4 up to the limit; never shorter than the longest row."""
    short, long = rows([Turn("a", "x")], [Turn("abcd", "xy")])
    for limit, wanted in ((None, (4, 8)), (8, (4, 8)), (7, (4, 7)), (6, (4, 6)), (3, (3, 6))):
        collator = RowCollator(END, 4, limit)
        batches = collator([[short]]), collator([[short], [long]])
        assert tuple(batch["input_ids"].shape[1] for batch in batches) == wanted
        assert batches[1]["input_ids"].tolist()[1][:6] == codes("abcdxy")
        assert (batches[0]["labels"][0, 2:] == -100).all()
    assert RowCollator(END, 4, pad_left=True)([[short], [long]])["input_ids"].shape == (2, 6)


def test_paddlenlp_s_padding_is_on_the_left_and_has_no_mask():
    short, long = rows([Turn("a", "x")], [Turn("abcd", "xy")])
    batch = RowCollator(END, pad_left=True)([[short], [long]])
    assert batch["input_ids"].tolist()[0] == codes("....ax") and "attention_mask" not in batch
    assert batch["labels"].tolist()[0] == [-100] * 4 + codes("x.")


def test_a_packed_batch():
    """Every row has the given length; what is left is a document of its own."""
    one, two, three = rows([Turn("a", "x")], [Turn("bc", "y")], [Turn("defg", "z")])
    batch = PackCollator(END, 5)([[one, two], [three]])
    assert batch["input_ids"].tolist() == [codes("axbcy"), codes("defgz")]
    assert batch["labels"].tolist() == [[*codes("x."), -100, *codes("y.")], [-100, -100, -100, *codes("z.")]]
    assert batch["position_ids"].tolist() == [[0, 1, 0, 1, 2], [0, 1, 2, 3, 4]]
    assert batch["cu_seqlens"].tolist() == [0, 2, 5] + [10] * 29 and batch["max_seqlen"] == 5
    short = PackCollator(END, 7)([[one], [one, three]])
    assert short["cu_seqlens"].tolist() == [0, 2, 7, 9] + [14] * 28 and short["max_seqlen"] == 7
    assert short["position_ids"].tolist() == [[0, 1, 0, 1, 2, 3, 4], [0, 1, 0, 1, 2, 3, 4]]
    assert short["labels"][0].tolist() == [*codes("x."), *[-100] * 5]


def test_samples_that_fill_batches_up_have_no_targets():
    found = rows([Turn("a", "x")], [Turn("b", "y")], [Turn("c", "z")])
    filled = Filled([[row] for row in found], NO_TARGETS, 2, examples=3)
    batch = RowCollator(END)([filled[number] for number in range(len(filled))])
    assert batch["input_ids"].shape == (4, 2) and (batch["labels"][3:] == -100).all() and filled.examples == 3
    assert torch.equal(batch["labels"][:3] == -100, torch.zeros(3, 2, dtype=torch.bool))
    assert len(Filled([[found[0]]], NO_TARGETS, 1)) == 1 and not NO_TARGETS[0].loss_mask.any()
