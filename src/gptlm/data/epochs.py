"""Datasets with each sample once per epoch, in whole batches and a partial one at the end."""

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from torch.utils.data import Dataset


class Position(NamedTuple):
    """`place` samples of `epoch` have been trained on, and all epochs before it."""

    epoch: int
    place: int


BEGIN = Position(0, 0)


class Size(NamedTuple):
    """Training examples of a sample (several if they are packed) and its tokens without padding."""

    examples: int
    tokens: int


class Epochs(Dataset):
    """Epochs of `items`, each in its own order; a batch never crosses the end of an epoch.

    `dataset[i]` is sample i % batch of step i // batch after `start`. The last batch of an epoch is partial, as in the
    stock Trainer: `filler` takes the missing places. So every step has the same number of micro-batches on every
    process, which DistributedDataParallel, DeepSpeed and gradient accumulation need, and no sample is repeated.

    Args:
        items: the samples of an epoch.
        sizes: of each, for the counts; an array has a row for each.
        filler: a sample without targets, which adds nothing to a loss that is a sum over targets.
        batch: samples of an optimizer step on all processes.
        steps: optimizer steps from `start` to the end of the run.
        grouped: batches have samples of similar length, see `grouped_by_length`.
        start: where the run resumes. It counts samples, not steps, so that a run resumes exactly where it stopped
            with another batch size or number of processes as well.
    """

    def __init__(
        self,
        items: Sequence[Any],
        *,
        sizes: Sequence[Size] | np.ndarray,
        filler: Any,
        batch: int,
        steps: int,
        seed: int,
        grouped: bool = False,
        start: Position = BEGIN,
    ):
        self.items, self.filler, self.seed = items, filler, seed
        self.batch, self.steps, self.grouped, self.start = batch, steps, grouped, start
        self._sizes = np.asarray(sizes, dtype=np.int64).reshape(-1, 2)
        self.total = Size(*self._sizes.sum(0).tolist())
        self._epoch, self._order = -1, np.empty(0, dtype=np.int64)
        self._counts = np.empty((0, 2), dtype=np.int64)
        self._at_start = self._counted(start)

    def __len__(self) -> int:
        return self.batch * self.steps

    def __getitem__(self, index: int) -> Any:
        step, number = divmod(index, self.batch)
        epoch, place = self.position(step)
        if place + number >= len(self.items):
            return self.filler
        self._enter(epoch)
        return self.items[self._order[place + number]]

    def position(self, steps: int) -> Position:
        """Where the run is `steps` optimizer steps after `start`."""
        return position_after(steps, self.start, len(self.items), self.batch)

    def trained(self, steps: int) -> Size:
        """Examples and tokens of the first `steps` optimizer steps after `start`."""
        now = self.counted(steps)
        return Size(now.examples - self._at_start.examples, now.tokens - self._at_start.tokens)

    def passes(self, steps: int) -> float:
        """Epochs of the whole run `steps` optimizer steps after `start`, in examples."""
        return self.counted(steps).examples / max(self.total.examples, 1)

    def counted(self, steps: int) -> Size:
        """Examples and tokens of all epochs up to `steps` optimizer steps after `start`."""
        return self._counted(self.position(steps))

    def _counted(self, position: Position) -> Size:
        """Examples and tokens of all epochs up to `position`."""
        head = (0, 0)
        if position.place:
            self._enter(position.epoch)
            head = self._counts[position.place - 1].tolist()
        return Size(*(position.epoch * whole + part for whole, part in zip(self.total, head, strict=True)))

    def _enter(self, epoch: int) -> None:
        if epoch != self._epoch:
            self._epoch = epoch
            self._order = np.random.default_rng([self.seed, epoch]).permutation(len(self.items))
            if self.grouped:
                self._order = grouped_by_length(self._order, self._sizes[:, 1], self.batch)
            self._counts = self._sizes[self._order].cumsum(0)


def grouped_by_length(order: np.ndarray, lengths: np.ndarray, batch: int) -> np.ndarray:
    """`order` with samples of similar length together, as transformers' `group_by_length`.

    Each 50 batches (less where there are fewer than 200) are sorted by decreasing length, and the longest sample of all
    comes first, so that a batch that is too large for the memory shows immediately.

    Args:
        order: (n,) a permutation of 0 to n - 1.
        lengths: (n,) of each sample.
        batch: samples of an optimizer step.
    """
    size = batch * max(1, min(len(order) // (4 * batch), 50))
    parts = [order[start : start + size] for start in range(0, len(order), size)]
    parts = [part[np.argsort(-lengths[part], kind="stable")] for part in parts]
    if parts:
        longest = max(range(len(parts)), key=lambda number: lengths[parts[number][0]])
        parts[0][0], parts[longest][0] = parts[longest][0], parts[0][0]
    return np.concatenate(parts) if parts else order


class Filled(Dataset):
    """`samples` and then as many `filler` as the batches of all processes need; sums do not change.

    Args:
        samples: a dataset with a length.
        filler: a sample without targets.
        multiple: samples of a batch over all processes.
        examples: in `samples`; None: one in each.
    """

    def __init__(self, samples: Any, filler: Any, multiple: int, examples: int | None = None):
        self.samples, self.filler = samples, filler
        self.examples = len(samples) if examples is None else examples
        self._length = math.ceil(len(samples) / multiple) * multiple

    def __len__(self) -> int:
        return self._length

    def __getitem__(self, index: int) -> Any:
        return self.samples[index] if index < len(self.samples) else self.filler


def steps_in(samples: int, batch: int) -> int:
    """Optimizer steps of one epoch, at least 1; the last one can be partial."""
    return max(1, math.ceil(samples / batch))


def position_after(steps: int, start: Position, samples: int, batch: int) -> Position:
    """Where a run is `steps` optimizer steps after `start`; the end of an epoch is the start of the next one."""
    rest = math.ceil((samples - start.place) / batch)  # steps to the end of the epoch of `start`
    if steps < rest:
        return Position(start.epoch, start.place + steps * batch)
    epochs, steps = divmod(steps - rest, steps_in(samples, batch))
    return Position(start.epoch + 1 + epochs, steps * batch)


def steps_left(epochs: float, start: Position, samples: int, batch: int) -> int:
    """Optimizer steps from `start` to the end of `epochs`, which is step ceil(epochs x steps), as in the stock Trainer.

    0 if `start` is at or after that end.
    """
    end = position_after(math.ceil(epochs * steps_in(samples, batch)), BEGIN, samples, batch)
    if end <= start:
        return 0
    if end.epoch == start.epoch:
        return math.ceil((end.place - start.place) / batch)
    rest = math.ceil((samples - start.place) / batch)
    return rest + (end.epoch - start.epoch - 1) * steps_in(samples, batch) + math.ceil(end.place / batch)
