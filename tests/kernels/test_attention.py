"""Attention by kernel: values and gradients of the formula, inside documents and with a mask."""

import itertools
import math

import pytest
import torch

from gptlm.kernels.attention import Documents, _same_document, attention

OFFSETS = [0, 0, 1, 9, 16, 23, 23, 32, 32, 32]  # two rows of 16; documents without tokens at both ends and between


def leaves(rows=2, length=16, heads=3, width=8):
    generator = torch.Generator().manual_seed(0)
    shape = rows, heads, length, width
    return [torch.randn(shape, generator=generator, dtype=torch.float64).requires_grad_() for _ in range(3)]


def by_hand(q, k, v, allowed):
    scores = (q @ k.transpose(2, 3) / math.sqrt(q.shape[3])).masked_fill(~allowed, -math.inf)
    return scores.softmax(-1) @ v


def same_document(offsets, rows, length):
    """(rows, 1, length, length) bool: an earlier token of the same document."""
    allowed = torch.zeros(rows * length, rows * length, dtype=torch.bool)
    for start, stop in itertools.pairwise(offsets):
        allowed[start:stop, start:stop] = torch.ones(stop - start, stop - start).tril()
    parts = [slice(row * length, (row + 1) * length) for row in range(rows)]
    return torch.stack([allowed[part, part] for part in parts])[:, None]


def check(found, wanted, inputs):
    torch.testing.assert_close(found, wanted)
    gradient = torch.randn_like(wanted)
    pairs = zip(torch.autograd.grad(found, inputs, gradient), torch.autograd.grad(wanted, inputs, gradient))
    for mine, other in pairs:
        torch.testing.assert_close(mine, other)


@pytest.mark.parametrize("kind", [torch.int32, torch.int64])
def test_documents(kind):
    inputs = leaves()
    found = attention(*inputs, documents=Documents(torch.tensor(OFFSETS, dtype=kind), 16))
    check(found, by_hand(*inputs, same_document(OFFSETS, 2, 16)), inputs)


def test_the_mask_of_documents():
    assert torch.equal(_same_document(torch.tensor(OFFSETS, dtype=torch.int32), 2, 16), same_document(OFFSETS, 2, 16))


@pytest.mark.parametrize("repeat", [False, True])
def test_causal_and_masked(repeat):
    inputs = leaves()
    causal = torch.ones(16, 16, dtype=torch.bool).tril()
    check(attention(*inputs, shapes_repeat=repeat), by_hand(*inputs, causal), inputs)
    mask = (causal & (torch.arange(16) < torch.tensor([16, 9])[:, None, None]))[:, None]
    check(attention(*inputs, mask=mask, shapes_repeat=repeat), by_hand(*inputs, mask), inputs)


def test_one_query_sees_the_whole_cache():
    q, k, v = leaves()
    found = attention(q[:, :, -1:], k, v)
    torch.testing.assert_close(found, by_hand(q[:, :, -1:], k, v, torch.ones(1, 16, dtype=torch.bool)))


def test_dropout_inside_documents():
    """Each weight is dropped or divided by what is kept: with v of ones the mean stays 1. A seed repeats it."""
    q, k, _ = leaves(length=64)
    v = torch.ones_like(q)
    documents = Documents(torch.tensor([0, 30, 64, 128, 128]), 64)
    seen = []
    for seed in (1, 1, 2):
        torch.manual_seed(seed)
        seen.append(attention(q, k, v, documents=documents, dropout=0.25))
    assert torch.equal(seen[0], seen[1]) and not torch.equal(seen[0], seen[2])
    assert seen[0].mean().item() == pytest.approx(1, abs=0.05)
    first = seen[0][:, :, 0]  # a document's first token sees itself alone: 0 or 4 / 3
    assert set(first.flatten().round(decimals=6).tolist()) <= {0.0, 1.333333}
