"""Which tokens make sample i: the document, sample and shuffle index of the originals, bit for bit.

One algorithm with small differences by `data_order`:
    paddlenlp, megatron   the same arrays (megatron: Megatron-LM before core, with its last-epoch assertion relaxed)
    megatron-core         split bounds are rounded each on its own
    fleetx                documents stay in file order (FleetX and PaddleFleetX of 2022), only samples are shuffled

Pure numpy, closed forms instead of the originals' C++ loops. Sources of the rules: PaddleNLP 2.8.1
`paddlenlp/data/causal_dataset.py`; Megatron-LM `megatron/data/gpt_dataset.py`, `helpers.cpp`; megatron-core 0.16
`core/datasets`; PaddleFleetX `ppfleetx/data/dataset/gpt_dataset.py` of November 2022.

Worked example, sizes [3, 5], sequence length 2, one epoch, documents in order: the stream is a a a b b b b b
(8 tokens), (8 - 1) // 2 = 3 samples, sample k = stream[2k : 2k + 3], neighbours share one token. Sample index
rows (document position, offset): (0, 0), (0, 2), (1, 1), (1, 3).
"""

from dataclasses import dataclass

import numpy as np

from gptlm.errors import GptlmError, named

DATA_ORDERS = ("paddlenlp", "megatron", "megatron-core", "fleetx")
SEPARATE_BELOW = 0.80  # a last epoch of which a smaller share is used is shuffled separately


@dataclass(frozen=True)
class SampleOrder:
    """The three index arrays of one split.

    Attributes:
        documents: (epochs x sequences,) int32, or int64 from 2^31 sequences on (which the originals refuse): the order
            of the sequences.
        samples: (n + 1, 2) int32 or int64, (position in `documents`, token offset) of the start of sample k.
        shuffle: (n,) uint32 or int64: sample i of the dataset is row shuffle[i] of `samples`.
        epochs: passes over the split for n samples.
        separate_last_epoch: whether the last epoch is shuffled separately.
    """

    documents: np.ndarray
    samples: np.ndarray
    shuffle: np.ndarray
    epochs: int
    separate_last_epoch: bool


def parse_split(split: str) -> tuple[float, float, float]:
    """The three shares in "949,50,1" or "90/5/5" or "100", padded with zeros.

    Raises:
        GptlmError: if a share is not a number, is negative, or all are zero.
    """
    separator = "," if "," in split else "/"
    try:
        shares = [float(word) for word in split.split(separator)]
    except ValueError:
        raise GptlmError(f"{named('split')} {split!r}: expected numbers like 949,50,1 (train, valid, test)") from None
    if len(shares) > 3:
        raise GptlmError(f"{named('split')} {split!r} has {len(shares)} shares; expected train, valid and test")
    shares += [0.0] * (3 - len(shares))
    if min(shares) < 0 or sum(shares) <= 0 or not np.isfinite(sum(shares)):
        raise GptlmError(f"{named('split')} {split!r}: shares must not be negative, and one must be above 0")
    return shares[0], shares[1], shares[2]


def split_bounds(split: str, size: int, data_order: str = "paddlenlp") -> list[int]:
    """Bounds [0, b1, b2, b3] of train, valid and test over `size` sequences, with the originals' rounding."""
    shares = parse_split(split)
    if data_order == "megatron-core":
        parts = np.array(shares) / sum(shares)
        return [round(float(bound) * float(size)) for bound in np.concatenate([[0.0], np.cumsum(parts)])]
    bounds = [0]
    for share in shares:
        bounds.append(bounds[-1] + round(share / sum(shares) * float(size)))
    excess = bounds[-1] - size  # of rounding; the originals shift every bound but the first
    return [0] + [bound - excess for bound in bounds[1:]]


def count_epochs(tokens: int, num_samples: int, seq_length: int) -> int:
    """Smallest E >= 1 with (E x tokens - 1) // seq_length >= num_samples."""
    return max(1, -(-(num_samples * seq_length + 1) // tokens))


def build_order(
    sizes: np.ndarray,
    first: int,
    last: int,
    *,
    num_samples: int,
    seq_length: int,
    seed: int,
    data_order: str = "paddlenlp",
) -> SampleOrder:
    """The order of sequences [first, last) for at least `num_samples` samples of seq_length + 1 tokens.

    Args:
        sizes: (n,) int32, tokens of every sequence of the corpus.

    Raises:
        GptlmError: if the range has no tokens.
    """
    tokens = int(sizes[first:last].sum(dtype=np.int64))
    if tokens == 0:
        raise GptlmError(f"sequences {first} to {last} have no tokens; add text or change the split")
    epochs = count_epochs(tokens, num_samples, seq_length)
    total = (epochs * tokens - 1) // seq_length
    before_last = ((epochs - 1) * tokens - 1) // seq_length if epochs > 1 else total
    wanted_of_last = num_samples - before_last
    separate = epochs > 1 and wanted_of_last < int(SEPARATE_BELOW * ((tokens - 1) // seq_length))
    rng = np.random.RandomState(seed)
    own = np.arange(first, last, dtype=np.int64 if last > np.iinfo(np.int32).max else np.int32)
    documents = np.tile(own, epochs) if data_order == "fleetx" else _document_index(own, epochs, separate, rng)
    samples = _sample_index(sizes, documents, total, seq_length)
    shuffle = _shuffle_index(before_last if separate else total, total, rng)
    return SampleOrder(documents, samples, shuffle, epochs, separate)


def _document_index(documents: np.ndarray, epochs: int, separate: bool, rng: np.random.RandomState) -> np.ndarray:
    together = np.tile(documents, epochs - 1 if separate else epochs)
    rng.shuffle(together)
    if not separate:
        return together
    alone = documents.copy()
    rng.shuffle(alone)
    return np.concatenate([together, alone])


def _sample_index(sizes: np.ndarray, documents: np.ndarray, total: int, seq_length: int) -> np.ndarray:
    """(total + 1, 2): the document position and offset of stream token k x seq_length, k = 0 .. total."""
    ends = np.cumsum(sizes[documents], dtype=np.int64)
    targets = np.arange(total + 1, dtype=np.int64) * seq_length
    positions = np.searchsorted(ends, targets, side="right")  # the sequence of the token; skips empty ones
    offsets = targets - np.where(positions > 0, ends[positions - 1], 0)
    wide = max(len(documents), int(sizes.max())) > np.iinfo(np.int32).max
    samples = np.empty((total + 1, 2), dtype=np.int64 if wide else np.int32)
    samples[:, 0], samples[:, 1] = positions, offsets
    samples[0] = 0  # the originals start at (0, 0) even when the first sequence is empty
    return samples


def _shuffle_index(together: int, total: int, rng: np.random.RandomState) -> np.ndarray:
    dtype = np.int64 if total >= np.iinfo(np.uint32).max - 1 else np.uint32
    first = np.arange(together, dtype=dtype)
    rng.shuffle(first)
    if together == total:
        return first
    rest = np.arange(together, total, dtype=dtype)
    rng.shuffle(rest)
    return np.concatenate([first, rest])
