"""Which tokens make sample i: the document, sample and shuffle index of the originals, bit for bit.

One algorithm with small differences by `data_order`:
    paddlenlp, megatron   the same arrays (megatron: Megatron-LM before core, with its last-epoch assertion relaxed)
    megatron-core         split bounds are rounded each on its own
    fleetx                documents stay in file order (FleetX and PaddleFleetX of 2022), only samples are shuffled

Closed forms in numpy instead of the originals' C++ loops. Sources of the rules: PaddleNLP 2.8.1
`paddlenlp/data/causal_dataset.py`; Megatron-LM `megatron/data/gpt_dataset.py`, `helpers.cpp`; megatron-core 0.16
`core/datasets`; PaddleFleetX `ppfleetx/data/dataset/gpt_dataset.py` of November 2022.

Worked example, sizes [3, 5], sequence length 2, one epoch, documents in order: the stream is a a a b b b b b
(8 tokens), (8 - 1) // 2 = 3 samples, sample k = stream[2k : 2k + 3], neighbours share one token. Sample index
rows (document position, offset): (0, 0), (0, 2), (1, 1), (1, 3).
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from gptlm.data.cache import Arrangement
from gptlm.data.shuffle import shuffle
from gptlm.data.token_file import Numbers, blocks_of
from gptlm.errors import GptlmError, named

DATA_ORDERS = ("paddlenlp", "megatron", "megatron-core", "fleetx")
BLOCK_OF_DOCUMENTS = 1 << 18  # whose tokens are counted at a time
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
        seq_length: tokens from the start of a sample to that of the next one.
    """

    documents: Numbers
    samples: Numbers
    shuffle: Numbers
    epochs: int
    separate_last_epoch: bool
    seq_length: int


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
    sizes: Numbers,
    first: int,
    last: int,
    *,
    num_samples: int,
    seq_length: int,
    seed: int,
    data_order: str = "paddlenlp",
    entry: Arrangement | None = None,
) -> SampleOrder:
    """The order of sequences [first, last) for at least `num_samples` samples of seq_length + 1 tokens.

    One array exists in memory at a time, as far as `entry` keeps none there: the originals shuffle all `documents`
    together, and so must we. That takes 4 bytes for each sequence and epoch.

    Args:
        sizes: (n,) int32, tokens of every sequence of the corpus.
        entry: takes the arrays; None: they stay in memory.

    Raises:
        GptlmError: if the range has no tokens.
    """
    entry = entry or Arrangement()
    tokens = sum(int(block.sum(dtype=np.int64)) for block in blocks_of(sizes, first, last))
    if tokens == 0:
        raise GptlmError(f"sequences {first} to {last} have no tokens; add text or change the split")
    epochs = count_epochs(tokens, num_samples, seq_length)
    total = (epochs * tokens - 1) // seq_length
    before_last = ((epochs - 1) * tokens - 1) // seq_length if epochs > 1 else total
    wanted_of_last = num_samples - before_last
    separate = epochs > 1 and wanted_of_last < int(SEPARATE_BELOW * ((tokens - 1) // seq_length))
    rng = np.random.RandomState(seed)

    own, count = (first, last), epochs * (last - first)
    dtype = np.dtype(np.int64 if last > np.iinfo(np.int32).max else np.int32)
    # fleetx: every epoch in file order; else all epochs are shuffled together, or the last one on its own
    together = [1] * epochs if data_order == "fleetx" else [epochs - 1, 1] if separate else [epochs]
    parts = _ranges(own, together, dtype, None if data_order == "fleetx" else rng)
    documents = entry.put("documents", dtype, (count,), parts)
    dtype = np.dtype(np.int64 if count > np.iinfo(np.int32).max else np.int32)
    starts = _sample_starts(sizes, own, documents, total, seq_length, dtype)
    samples = entry.put("samples", dtype, (total + 1, 2), starts)
    dtype = np.dtype(np.int64 if total >= np.iinfo(np.uint32).max - 1 else np.uint32)
    bounds = [0, before_last, total] if separate else [0, total]
    parts = (part for bound in pairwise(bounds) for part in _ranges(bound, [1], dtype, rng))
    shuffle = entry.put("shuffle", dtype, (total,), parts)
    return SampleOrder(documents, samples, shuffle, epochs, separate, seq_length)


def _ranges(
    bounds: tuple[int, int], repeats: Sequence[int], dtype: np.dtype, rng: np.random.RandomState | None
) -> Iterator[np.ndarray]:
    """For each of `repeats`: the numbers from one bound to the other so many times, shuffled together by `rng`."""
    for repeat in repeats:
        try:
            numbers = np.arange(*bounds, dtype=dtype)
            if repeat > 1:
                numbers = np.tile(numbers, repeat)
        except MemoryError as error:
            size = (bounds[1] - bounds[0]) * repeat * dtype.itemsize
            raise GptlmError(
                f"the sample index needs {size / 2**30:,.1f} GiB of memory, more than there is; train for "
                "fewer steps or with a smaller global batch"
            ) from error
        if rng is not None:
            shuffle(rng, numbers)
        yield numbers
        del numbers  # before the next one is made


def _sample_starts(
    sizes: Numbers, own: tuple[int, int], documents: Numbers, total: int, seq_length: int, dtype: np.dtype
) -> Iterator[np.ndarray]:
    """(total + 1, 2) in blocks: the document position and offset of stream token k x seq_length, k = 0 .. total."""
    first, last = own
    lengths = np.asarray(sizes[first:last])  # at any place, so they are in memory
    done, position, token = 0, 0, 0  # rows that are written; sequences and tokens before the block
    for block in blocks_of(documents, rows=BLOCK_OF_DOCUMENTS):
        ends = np.cumsum(lengths[block - first], dtype=np.int64)
        ends += token
        stop = min(total + 1, -(-int(ends[-1]) // seq_length))  # first row that starts after the block
        targets = np.arange(done, stop, dtype=np.int64)
        targets *= seq_length
        places = np.searchsorted(ends, targets, side="right")  # the sequence of the token; skips empty ones
        rows = np.empty((len(targets), 2), dtype=dtype)
        np.add(places, position, out=rows[:, 0], casting="same_kind")
        targets -= np.where(places > 0, ends[places - 1], token)
        rows[:, 1] = targets
        if done == 0 and len(rows):
            rows[0] = 0  # the originals start at (0, 0) even when the first sequence is empty
        yield rows
        done, position, token = stop, position + len(block), int(ends[-1])
