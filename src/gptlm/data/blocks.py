"""Fixed-length training samples over a corpus."""

from typing import Any

import numpy as np

from gptlm.data.indexed import IndexedTokens
from gptlm.data.order import SampleOrder

DOCUMENT_MASKINGS = ("none", "position", "attention")


class BlockDataset:
    """`dataset[i]` is sample i of `order`: (seq_length + 1,) int64 token ids, documents joined without a mark.

    Neighbouring samples of the stream share one token, so that every token is once a target.
    """

    def __init__(self, tokens: IndexedTokens, order: SampleOrder):
        self.tokens = tokens
        self.order = order

    def __len__(self) -> int:
        return len(self.order.shuffle)

    def __getitem__(self, i: int) -> np.ndarray:
        return join(self.pieces(i))

    def documents_of(self, i: int) -> list[int]:
        """The document each of `pieces(i)` belongs to; a document may be several sequences."""
        sequences = [sequence for sequence, _, _ in self.pieces(i)]
        return np.searchsorted(self.tokens.document_starts, sequences, side="right").tolist()

    def pieces(self, i: int) -> list[tuple[int, int, np.ndarray]]:
        """Sample i as views: (sequence, offset of its first token in the sequence, ids) of each document in it."""
        row = int(self.order.shuffle[i])
        (first, offset), (last, end) = self.order.samples[row].tolist(), self.order.samples[row + 1].tolist()
        found = []
        for document in self.order.documents[first : last + 1].tolist():
            found.append((document, offset, self.tokens.get(document, offset)))
            offset = 0
        document, offset, _ = found[-1]
        found[-1] = (document, offset, self.tokens.get(document, offset, end - offset + 1))
        return found


class UnreadBlocks:
    """`dataset` for a process that needs only its shapes: the samples and documents it has, every id 0.

    Their lengths lie in the index; the token file is not read.
    """

    def __init__(self, dataset: Any):
        self.dataset = dataset

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitem__(self, i: int) -> np.ndarray:
        return join(self.pieces(i))

    def documents_of(self, i: int) -> list[int]:
        return self.dataset.documents_of(i)

    def pieces(self, i: int) -> list[tuple[int, int, np.ndarray]]:
        return [(sequence, offset, np.zeros(len(ids), ids.dtype)) for sequence, offset, ids in self.dataset.pieces(i)]


class BlocksWithDocuments:
    """`dataset[i]` is sample i of `dataset` and the lengths (in tokens, summing to seq_length + 1) of its documents."""

    def __init__(self, dataset: Any):
        self.dataset = dataset

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitem__(self, i: int) -> tuple[np.ndarray, list[int]]:
        pieces = self.dataset.pieces(i)
        lengths: list[int] = []
        before = None
        for (sequence, _, ids), document in zip(pieces, self.dataset.documents_of(i), strict=True):
            if before == (sequence - 1, document):  # the next sentence of the same document
                lengths[-1] += len(ids)
            elif len(ids):
                lengths.append(len(ids))
            before = (sequence, document)
        return join(pieces), lengths


def join(pieces: list[tuple[int, int, np.ndarray]]) -> np.ndarray:
    """The ids of `pieces` end to end, int64."""
    return np.concatenate([ids for _, _, ids in pieces], dtype=np.int64)
