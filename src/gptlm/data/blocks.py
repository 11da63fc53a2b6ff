"""Pretraining samples: blocks of max_seq_length + 1 tokens from the corpora of a split."""

import logging
import time
from collections.abc import Sequence
from typing import Any

import numpy as np

from gptlm.data.blend import BlendedDataset, blend_size, normalise, part_samples
from gptlm.data.cache import Arrangement, IndexCache
from gptlm.data.corpora import Corpus
from gptlm.data.indexed import IndexedTokens
from gptlm.data.order import SampleOrder, build_order
from gptlm.errors import GptlmError

logger = logging.getLogger(__name__)

PROGRESS_SECONDS = 20  # between two messages about a long build
DOCUMENT_MASKINGS = ("none", "position", "attention")

Piece = tuple[int, int, int]  # sequence, offset of its first token in the sequence, tokens


class BlockDataset:
    """`dataset[i]` is sample i of `order`: (seq_length + 1,) int64 token ids, documents joined without a separator.

    Neighbouring samples of the stream share one token, so every token is a target once.
    """

    def __init__(self, tokens: IndexedTokens, order: SampleOrder):
        self.tokens = tokens
        self.order = order

    def __len__(self) -> int:
        return len(self.order.shuffle)

    def __getitem__(self, i: int) -> np.ndarray:
        return np.concatenate([self.tokens.get(*piece) for piece in self.pieces(i)], dtype=np.int64)

    def documents_of(self, i: int) -> list[int]:
        """The document of each of `pieces(i)`; a document can be several sequences."""
        sequences = [sequence for sequence, _, _ in self.pieces(i)]
        return self.tokens.documents_of(sequences)

    def pieces(self, i: int) -> list[Piece]:
        """The parts of sample i, one for each sequence in it; no token is read."""
        try:
            row = int(self.order.shuffle[i])
            (first, offset), (last, end) = self.order.samples[row : row + 2].tolist()
            sequences = self.order.documents[first : last + 1]
            offsets = [offset, *[0] * (last - first)]
            ends = self.tokens.sizes[sequences].tolist()
            ends[-1] = min(end + 1, ends[-1])
            pieces = [(s, o, e - o) for s, o, e in zip(sequences.tolist(), offsets, ends, strict=True)]
            is_right = sum(length for _, _, length in pieces) == self.order.seq_length + 1
        except (IndexError, ValueError):
            if not 0 <= i < len(self):
                raise
            is_right = False
        if is_right:
            return pieces
        # a large index is not compared with its checksums when it is opened
        raise GptlmError(
            f"sample {i} of {self.tokens.prefix}: the sample index in the cache is damaged, or the data was changed; "
            "gptlm data index with the same flags checks the index and builds it again"
        )


PretrainingDataset = BlockDataset | BlendedDataset


class UnreadBlocks:
    """`dataset` for a process that needs only shapes: the same samples and documents, every id 0.

    Lengths come from the index; the token file is not read.
    """

    def __init__(self, dataset: Any):
        self.dataset = dataset

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitem__(self, i: int) -> np.ndarray:
        return np.zeros(sum(length for _, _, length in self.pieces(i)), np.int64)

    def documents_of(self, i: int) -> list[int]:
        return self.dataset.documents_of(i)

    def pieces(self, i: int) -> list[Piece]:
        return self.dataset.pieces(i)


class BlocksWithDocuments:
    """`dataset[i]` is sample i of `dataset` and the lengths (in tokens, summing to seq_length + 1) of its documents."""

    def __init__(self, dataset: Any):
        self.dataset = dataset

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitem__(self, i: int) -> tuple[np.ndarray, list[int]]:
        lengths: list[int] = []
        before = None
        for (sequence, _, length), document in zip(self.dataset.pieces(i), self.dataset.documents_of(i), strict=True):
            if before == (sequence - 1, document):  # the next sentence of the same document
                lengths[-1] += length
            elif length:
                lengths.append(length)
            before = (sequence, document)
        return self.dataset[i], lengths


def build_split(
    corpora: Sequence[Corpus],
    split: str,
    *,
    num_samples: int,
    seq_length: int,
    seed: int,
    cache: IndexCache,
    data_order: str = "paddlenlp",
) -> PretrainingDataset | None:
    """The dataset of one split with at least `num_samples` samples, or None if the split is empty everywhere.

    Parts of a blend whose split is empty are skipped, and the others are weighted up. A split shorter than one sample
    is repeated until it fills one, as in the originals; `refuse_short` refuses such splits.
    """

    def dataset(corpus: Corpus, samples: int) -> BlockDataset:
        order = _cached_order(corpus, split, samples, seq_length, seed, cache, data_order)
        return BlockDataset(corpus.tokens, order)

    present = [corpus for corpus in corpora if corpus.weight > 0 and corpus.token_count(split) > 0]
    if not present:
        return None
    if len(corpora) == 1:
        return dataset(present[0], num_samples)
    weights = normalise([corpus.weight for corpus in present])
    samples = [part_samples(num_samples, weight, data_order) for weight in weights]
    parts, told = [], time.monotonic()
    for corpus, number in zip(present, samples, strict=True):
        parts.append(dataset(corpus, number))
        if time.monotonic() - told > PROGRESS_SECONDS:
            told = time.monotonic()
            logger.info("sample index, %s split: %d of %d corpora", split, len(parts), len(present))
    return BlendedDataset(parts, weights, blend_size(num_samples, weights, data_order), cache)


def _cached_order(
    corpus: Corpus, split: str, num_samples: int, seq_length: int, seed: int, cache: IndexCache, data_order: str
) -> SampleOrder:
    first, last = corpus.sequences(split)
    tokens, settings = corpus.tokens, {"num_samples": num_samples, "seq_length": seq_length, "seed": seed}
    what = {
        "order": "fleetx" if data_order == "fleetx" else "shuffled",  # the others differ in their bounds only
        "sizes": tokens.sizes_hash,
        "sequences": [first, last],
        **settings,
    }

    def fill(entry: Arrangement) -> None:
        order = build_order(tokens.sizes, first, last, **settings, data_order=data_order, entry=entry)
        facts = np.array([order.epochs, order.separate_last_epoch], np.int64)
        entry.put("epochs", facts.dtype, facts.shape, [facts])

    arrays = cache.load_or_fill(what, fill)
    epochs, separate = arrays["epochs"][:].tolist()
    return SampleOrder(arrays["documents"], arrays["samples"], arrays["shuffle"], epochs, bool(separate), seq_length)
