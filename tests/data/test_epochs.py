"""Epochs of samples in whole batches: each sample once per epoch, and where a run goes on."""

import numpy as np
import pytest
import torch
from transformers.trainer_pt_utils import get_length_grouped_indices

from gptlm.data.epochs import BEGIN, Epochs, Position, Size, grouped_by_length, position_after, steps_in, steps_left


def epochs(count=9, *, batch=4, steps=9, seed=3, start=BEGIN):
    sizes = [Size(number % 2 + 1, 10 * number) for number in range(count)]
    return Epochs(list(range(count)), sizes=sizes, filler=None, batch=batch, steps=steps, seed=seed, start=start)


def test_every_sample_comes_once_per_epoch_and_the_last_batch_is_partial():
    """9 samples in batches of 4: steps of 4, 4 and 1, and 3 places without a sample."""
    read = [epochs()[i] for i in range(len(epochs()))]
    assert len(read) == 9 * 4
    for first in (0, 12, 24):
        assert sorted(read[first : first + 9]) == list(range(9)) and read[first + 9 : first + 12] == [None] * 3
    assert len({tuple(read[first : first + 9]) for first in (0, 12, 24)}) == 3
    assert [epochs()[i] for i in (24, 3, 17)] == [read[24], read[3], read[17]]
    assert [epochs(seed=4)[i] for i in range(9)] != read[:9]


@pytest.mark.parametrize("batch", [1, 2, 3, 5, 9, 20])
def test_going_on_reads_what_is_left_of_the_epoch_whatever_the_batch(batch):
    whole, rest = epochs(batch=4), epochs(batch=batch, steps=40, start=Position(1, 4))
    wanted = [whole[i] for i in range(12, 21)][4:]
    read = [rest[i] for i in range(-(-5 // batch) * batch)]
    assert [item for item in read if item is not None] == wanted
    following = [rest[i] for i in range(len(read), len(read) + 9)]
    assert following == [whole[i] for i in range(24, 33)]


def test_counts_are_of_examples_and_tokens():
    """Samples of 1 and 2 examples in turn: 9 hold 5 x 1 + 4 x 2 = 13, and 10 x 36 tokens."""
    data = epochs()
    assert data.total == (13, 360) and data.trained(3) == (13, 360) and data.trained(6) == (26, 720)
    first = [data[i] for i in range(4)]
    assert data.trained(1) == (sum(n % 2 + 1 for n in first), 10 * sum(first))
    assert data.trained(4).examples - 13 == sum(data[12 + i] % 2 + 1 for i in range(4))
    rest = epochs(start=Position(0, 4))
    assert rest.trained(0) == (0, 0) and rest.trained(2) == Size(13 - data.trained(1)[0], 360 - data.trained(1)[1])
    assert rest.passes(2) == 1.0 and data.passes(9) == 3.0 and data.passes(1) == data.trained(1)[0] / 13


@pytest.mark.parametrize(("samples", "batch"), [(1, 4), (9, 4), (37, 3), (1000, 2), (1000, 7)])
def test_grouping_is_that_of_transformers(samples, batch):
    """From the same permutation; lengths differ, since among equal ones the order is free."""
    lengths = np.random.default_rng(0).permutation(samples) + 1
    generator = torch.Generator().manual_seed(5)
    wanted = get_length_grouped_indices(lengths.tolist(), batch, generator=generator)
    order = torch.randperm(samples, generator=torch.Generator().manual_seed(5)).numpy()
    assert grouped_by_length(order, lengths, batch).tolist() == wanted


def test_grouped_epochs():
    """Each sample once, another order in each epoch, and batches of samples that are alike."""
    sizes = [Size(1, 1 + number * 7 % 400) for number in range(400)]
    how = {"filler": None, "batch": 4, "steps": 200, "seed": 0}
    data = Epochs(range(400), sizes=sizes, grouped=True, **how)
    read = [data[i] for i in range(len(data))]
    assert sorted(read[:400]) == sorted(read[400:]) == list(range(400)) and read[:400] != read[400:]
    spread = lambda items: np.ptp(np.array([sizes[i].tokens for i in items]).reshape(-1, 4), axis=1).mean()  # noqa: E731
    assert spread(read) < spread([Epochs(range(400), sizes=sizes, **how)[i] for i in range(400)]) / 10
    rest = Epochs(range(400), sizes=sizes, grouped=True, **how, start=Position(1, 8))
    assert [rest[i] for i in range(392)] == read[408:]


def test_the_end_of_an_epoch_is_the_beginning_of_the_next():
    assert [position_after(steps, BEGIN, 9, 4) for steps in range(5)] == [(0, 0), (0, 4), (0, 8), (1, 0), (1, 4)]
    assert [position_after(steps, Position(2, 5), 9, 3) for steps in range(4)] == [(2, 5), (2, 8), (3, 0), (3, 3)]
    assert position_after(7, BEGIN, 8, 4) == (3, 4)


@pytest.mark.parametrize(
    ("passes", "start", "left"),
    [
        (3, (0, 0), 9),
        (1.5, (0, 0), 5),  # ceil(1.5 x 3), as transformers.Trainer
        (0.1, (0, 0), 1),
        (3, (1, 4), 5),
        (1.5, (1, 4), 1),  # the 1.5 passes end after 8 samples of the second one
        (1.5, (1, 8), 0),
        (1, (1, 0), 0),
        (1, (10, 6), 0),
        (2, (1, 1), 2),
    ],
)
def test_steps_to_the_end(passes, start, left):
    assert steps_left(passes, Position(*start), 9, 4) == left


def test_an_epoch_has_a_step_at_least():
    assert [steps_in(samples, 4) for samples in (0, 1, 4, 5, 8, 9)] == [1, 1, 1, 2, 2, 3]
    assert len(epochs(0, steps=0)) == 0
