"""Fixed-length training samples over a corpus."""

import numpy as np

from gptlm.data.indexed import IndexedTokens
from gptlm.data.order import SampleOrder


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
        row = int(self.order.shuffle[i])
        (first, offset), (last, end) = self.order.samples[row].tolist(), self.order.samples[row + 1].tolist()
        documents = self.order.documents
        if first == last:
            return self.tokens.get(int(documents[first]), offset, end - offset + 1).astype(np.int64)
        pieces = [self.tokens.get(int(documents[first]), offset)]
        pieces += [self.tokens.get(int(document)) for document in documents[first + 1 : last]]
        pieces.append(self.tokens.get(int(documents[last]), 0, end + 1))
        return np.concatenate(pieces, dtype=np.int64)
