"""Mixing corpora by weight, in the order of the originals' `build_blending_indices`."""

import ctypes
import logging
import math
import os
import shlex
import subprocess
import tempfile
from collections.abc import Callable, Sequence
from functools import lru_cache
from pathlib import Path

import numpy as np

from gptlm.data.cache import IndexCache
from gptlm.errors import GptlmError

logger = logging.getLogger(__name__)

SOURCE = Path(__file__).with_name("blend.c")
COMPILER_FLAGS = ("-O2", "-shared", "-fPIC", "-ffp-contract=off")  # no flag that changes how sums are rounded
COMPILE_SECONDS = 60
MIN_COMPILED = 50_000  # samples; the Python loop takes less time for fewer than compiling

MARGIN = 1.005  # each part gives half a percent more samples than its share, as in the originals

Loop = Callable[[np.ndarray, int], tuple[np.ndarray, np.ndarray]]


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


def blend_order(weights: Sequence[float], size: int) -> tuple[np.ndarray, np.ndarray]:
    """Which part, and which of its samples, is sample i of the blend.

    Sample i comes from the part that is furthest behind its share, the argmax over parts of w x max(i, 1) - taken, and
    the first such part on a tie (PaddleNLP and Megatron `helpers.cpp`).

    Args:
        weights: normalised, fewer than 255.

    Returns:
        parts (size,) uint8 and samples (size,) int64.

    Raises:
        GptlmError: for 255 parts and more, which the originals' uint8 cannot count.
    """
    if len(weights) >= 255:
        raise GptlmError(f"{len(weights)} corpora in one blend; at most 254 are supported, merge some of them")
    loop = (_compiled() if size >= MIN_COMPILED else None) or _loop
    return loop(np.asarray(weights, np.float64), size)


def _loop(weights: np.ndarray, size: int) -> tuple[np.ndarray, np.ndarray]:
    parts = np.empty(size, dtype=np.uint8)
    samples = np.empty(size, dtype=np.int64)
    taken = [0] * len(weights)
    numbered = list(enumerate(weights.tolist()))
    for i in range(size):
        reach = float(max(i, 1))
        chosen, most = 0, -math.inf
        for part, weight in numbered:
            lag = weight * reach - taken[part]
            if lag > most:
                chosen, most = part, lag
        parts[i], samples[i] = chosen, taken[chosen]
        taken[chosen] += 1
    return parts, samples


@lru_cache(maxsize=1)
def _compiled() -> Loop | None:
    """`_loop` in C, about 50 times faster; None, with a log message, where it cannot be compiled."""
    compiler = shlex.split(os.environ.get("CC", "")) or ["cc"]
    try:
        with tempfile.TemporaryDirectory(prefix="gptlm-") as folder:  # not shared with other processes
            library = str(Path(folder) / "blend.so")
            command = [*compiler, *COMPILER_FLAGS, "-o", library, str(SOURCE)]
            subprocess.run(command, check=True, capture_output=True, timeout=COMPILE_SECONDS, stdin=subprocess.DEVNULL)
            function = ctypes.CDLL(library).blend_order
    except (OSError, subprocess.SubprocessError, AttributeError) as error:
        logger.info("the order of the blend is computed in Python, 2 s per million samples (%s)", _reason(error))
        return None
    pointer, number = ctypes.c_void_p, ctypes.c_int64
    function.argtypes, function.restype = [pointer, number, number, pointer, pointer, pointer], None

    def loop(weights: np.ndarray, size: int) -> tuple[np.ndarray, np.ndarray]:
        weights, taken = np.ascontiguousarray(weights), np.zeros(len(weights), np.int64)
        parts, samples = np.empty(size, np.uint8), np.empty(size, np.int64)
        arrays = [array.ctypes.data for array in (weights, taken, parts, samples)]
        function(arrays[0], len(weights), size, *arrays[1:])
        return parts, samples

    return loop


def _reason(error: Exception) -> str:
    if isinstance(error, FileNotFoundError):
        return f"no C compiler {error.filename!r}"
    lines = (getattr(error, "stderr", None) or b"").decode(errors="replace").strip().splitlines()
    return lines[0] if lines else str(error) or type(error).__name__


class BlendedDataset:
    """Samples of several datasets in `blend_order`; `dataset[i]` is (seq_length + 1,) int64, as of its parts."""

    def __init__(self, datasets: Sequence, weights: Sequence[float], size: int, cache: IndexCache | None = None):
        self.datasets = datasets

        def build() -> dict[str, np.ndarray]:
            return dict(zip(("parts", "samples"), blend_order(weights, size), strict=True))

        what = {"blend": [float(weight).hex() for weight in weights], "size": size}  # hex: every bit counts
        arrays = (cache or IndexCache([])).load_or_build(what, build)
        parts, samples = arrays["parts"], arrays["samples"]
        # After the requested samples a part can have none left: the blend ends there.
        lengths = np.array([len(dataset) for dataset in datasets])
        exists = samples < lengths[parts]
        end = len(parts) if exists.all() else int(np.argmin(exists))
        self.parts, self.samples = parts[:end], samples[:end]

    def __len__(self) -> int:
        return len(self.parts)

    def __getitem__(self, i: int) -> np.ndarray:
        return self.datasets[self.parts[i]][int(self.samples[i])]

    def pieces(self, i: int) -> list[tuple[int, int, int]]:
        """Sample i as its part's `pieces`."""
        return self.datasets[self.parts[i]].pieces(int(self.samples[i]))

    def documents_of(self, i: int) -> list[int]:
        """The documents of `pieces(i)` in its part."""
        return self.datasets[self.parts[i]].documents_of(int(self.samples[i]))
