"""Mixing corpora by weight, in the order of the originals' `build_blending_indices`."""

import math
from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np

from gptlm.data.cache import Arrangement, IndexCache
from gptlm.data.loops import compiled_loops
from gptlm.data.token_file import BLOCK, Numbers, StoredArray
from gptlm.errors import GptlmError

MIN_COMPILED = 50_000  # samples; the Python loop takes less time for fewer than compiling

MARGIN = 1.005  # each part gives half a percent more samples than its share, as in the originals

STRIDE = 1 << 12  # samples between two rows of counts

Loop = Callable[[np.ndarray, np.ndarray, int, int], np.ndarray]


def normalise(weights: Sequence[float]) -> list[float]:
    """`weights` divided by their sum."""
    total = sum(weights)
    return [weight / total for weight in weights]


def part_samples(num_samples: int, weight: float, data_order: str = "paddlenlp") -> int:
    """Samples of a part with normalised `weight` in a blend of at least `num_samples`."""
    if data_order == "megatron-core":
        return math.ceil(math.ceil(num_samples * weight) * MARGIN)
    return math.ceil(num_samples * weight * MARGIN)


def blend_size(num_samples: int, weights: Sequence[float], data_order: str = "paddlenlp") -> int:
    """Samples of the whole blend: a little more than `num_samples`, as each original rounds up its parts."""
    if data_order == "megatron-core":
        return sum(math.ceil(num_samples * weight) for weight in weights)
    return sum(part_samples(num_samples, weight, data_order) for weight in weights)


def blend_order(weights: Sequence[float], size: int) -> np.ndarray:
    """Which part is sample i of the blend, (size,) uint8.

    Sample i comes from the part that is furthest behind its share, the argmax over parts of w x max(i, 1) - taken, and
    the first such part on a tie (PaddleNLP and Megatron `helpers.cpp`).

    Args:
        weights: normalised, fewer than 255.

    Raises:
        GptlmError: for 255 parts and more, which the originals' uint8 cannot count.
    """
    return np.concatenate([np.empty(0, np.uint8), *_order_in_blocks(weights, size)])


def _order_in_blocks(weights: Sequence[float], size: int) -> Iterator[np.ndarray]:
    if len(weights) >= 255:
        raise GptlmError(f"{len(weights)} corpora in one blend; at most 254 are supported, merge some of them")
    loop = (_compiled() if size >= MIN_COMPILED else None) or _loop
    shares, taken = np.array(weights, np.float64), np.zeros(len(weights), np.int64)
    for first in range(0, size, BLOCK):
        yield loop(shares, taken, first, min(BLOCK, size - first))


def _loop(weights: np.ndarray, taken: np.ndarray, first: int, size: int) -> np.ndarray:
    """The parts of samples first to first + size - 1; `taken` counts those of each part before them, and is updated."""
    parts, counts = np.empty(size, dtype=np.uint8), taken.tolist()
    numbered = list(enumerate(weights.tolist()))
    for i in range(size):
        reach = float(max(first + i, 1))
        chosen, most = 0, -math.inf
        for part, weight in numbered:
            lag = weight * reach - counts[part]
            if lag > most:
                chosen, most = part, lag
        parts[i] = chosen
        counts[chosen] += 1
    taken[:] = counts
    return parts


def _compiled() -> Loop | None:
    """`_loop` in C, about 50 times faster; None where it cannot be compiled."""
    loops = compiled_loops()
    if loops is None:
        return None

    def loop(weights: np.ndarray, taken: np.ndarray, first: int, size: int) -> np.ndarray:
        parts = np.empty(size, np.uint8)
        loops.blend_order(weights, len(weights), first, size, taken, parts)
        return parts

    return loop


class PartSamples:
    """Which of its part's samples is sample i of a blend: how often the part comes before.

    It is counted from the last multiple of `STRIDE` on. The originals store 8 bytes for each sample.

    Args:
        parts: (size,) uint8.
        counts: (1 + size / STRIDE rounded up, number of parts), samples of each part before sample k x STRIDE.
    """

    def __init__(self, parts: Numbers, counts: Numbers):
        self.parts, self.counts = parts, counts

    def __len__(self) -> int:
        return len(self.parts)

    def __getitem__(self, i: int) -> int:
        return self.find(range(len(self))[i])[1]

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        """(size,) int64, as the originals have it."""
        return np.array([self.find(i)[1] for i in range(len(self))], dtype or np.int64)

    def find(self, i: int) -> tuple[int, int]:
        """The part of sample i, and which of its samples it is."""
        row, before = divmod(i, STRIDE)
        parts = self.parts[i - before : i + 1]
        part = int(parts[-1])
        return part, int(self.counts[row][part]) + int(np.count_nonzero(parts[:-1] == part))

    def total(self, end: int | None = None) -> list[int]:
        """Samples of each part among the first `end` of the blend; None: among all."""
        end = len(self) if end is None else min(end, len(self))
        row, rest = divmod(end, STRIDE)
        last = self.parts[end - rest : end]
        return (self.counts[row] + np.bincount(last, minlength=self.counts.shape[1])).tolist()

    def place_of(self, part: int, sample: int) -> int:
        """The i at which `sample` of `part` comes, of which there are that many."""
        row = bisect_right(range(len(self.counts)), sample, key=lambda row: int(self.counts[row][part])) - 1
        missing = sample - int(self.counts[row][part])
        here = self.parts[row * STRIDE : (row + 1) * STRIDE]
        return row * STRIDE + int(np.flatnonzero(here == part)[missing])


def _fill(entry: Arrangement, weights: Sequence[float], size: int) -> None:
    parts = entry.put("parts", np.dtype(np.uint8), (size,), _order_in_blocks(weights, size))
    dtype = np.dtype(np.uint32 if size <= np.iinfo(np.uint32).max else np.int64)
    rows = -(-size // STRIDE) + 1
    entry.put("counts", dtype, (rows, len(weights)), _counts(parts, rows, len(weights), dtype))


def _counts(parts: Numbers, rows: int, count: int, dtype: np.dtype) -> Iterator[np.ndarray]:
    before = np.zeros((1, count), np.int64)
    yield before.astype(dtype)
    for first in range(0, rows - 1, BLOCK // STRIDE):
        block = parts[first * STRIDE : min(first + BLOCK // STRIDE, rows - 1) * STRIDE].astype(np.int64)
        number = -(-len(block) // STRIDE)
        cells = np.repeat(np.arange(number) * count, STRIDE)[: len(block)] + block
        sums = np.bincount(cells, minlength=number * count).reshape(number, count).cumsum(0) + before
        yield sums.astype(dtype)
        before = sums[-1:]


class BlendedDataset:
    """Samples of several datasets in `blend_order`; `dataset[i]` is (seq_length + 1,) int64, as of its parts."""

    def __init__(self, datasets: Sequence, weights: Sequence[float], size: int, cache: IndexCache | None = None):
        self.datasets = datasets
        hexadecimal = [float(weight).hex() for weight in weights]  # every bit counts
        what = {"blend": hexadecimal, "size": size, "counts": STRIDE}
        arrays = (cache or IndexCache([])).load_or_fill(what, lambda entry: _fill(entry, weights, size))
        whole = PartSamples(arrays["parts"], arrays["counts"])
        # After the requested samples a part can have none left: the blend ends there.
        lengths, wanted = [len(dataset) for dataset in datasets], whole.total()
        ends = [whole.place_of(part, length) for part, length in enumerate(lengths) if wanted[part] > length]
        end, parts = min(ends, default=size), arrays["parts"]
        self.parts = parts.part(0, end) if isinstance(parts, StoredArray) else parts[:end]
        self.samples = PartSamples(self.parts, arrays["counts"])

    def __len__(self) -> int:
        return len(self.parts)

    def find(self, i: int) -> tuple[int, int]:
        """The part of sample i, and which of its samples it is."""
        return self.samples.find(range(len(self))[i])

    def __getitem__(self, i: int) -> np.ndarray:
        part, sample = self.find(i)
        return self.datasets[part][sample]

    def pieces(self, i: int) -> list[tuple[int, int, int]]:
        """Sample i as its part's `pieces`."""
        part, sample = self.find(i)
        return self.datasets[part].pieces(sample)

    def documents_of(self, i: int) -> list[int]:
        """The documents of `pieces(i)` in its part."""
        part, sample = self.find(i)
        return self.datasets[part].documents_of(sample)

    def counts(self, samples: int) -> list[int]:
        """Samples of each part among the first `samples`."""
        return self.samples.total(min(samples, len(self)))
