"""Epochs of samples in whole batches: each sample once per epoch, and where a run goes on."""

import pytest

from gptlm.data.epochs import BEGIN, Epochs, Position, Size, position_after, steps_in, steps_left


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
