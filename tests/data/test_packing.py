"""Best-fit packing: every row once, no pack too long, few packs."""

import numpy as np
import pytest

from gptlm.data.packing import fill, pack


def best_fit_decreasing(lengths, capacity):
    """The textbook's form: each row, from the longest one, goes to the fullest pack that has space."""
    packs = []
    for number in sorted(range(len(lengths)), key=lambda number: -lengths[number]):
        fitting = [one for one in packs if sum(lengths[i] for i in one) + lengths[number] <= capacity]
        if fitting:
            max(fitting, key=lambda one: sum(lengths[i] for i in one)).append(number)
        else:
            packs.append([number])
    return packs


@pytest.mark.parametrize("capacity", [1, 7, 24, 100])
@pytest.mark.parametrize("seed", range(5))
def test_packs_are_those_of_best_fit_decreasing(capacity, seed):
    """Which of several equally full packs takes a row is free, so lengths are compared, not rows."""
    lengths = np.random.default_rng(seed).integers(1, capacity + 1, 200).tolist()
    packs = pack(lengths, capacity)
    assert sorted(number for one in packs for number in one) == list(range(200))
    found, wanted = (
        sorted(sum(lengths[i] for i in one) for one in how) for how in (packs, best_fit_decreasing(lengths, capacity))
    )
    assert found == wanted and max(found) <= capacity
    assert packs == pack(np.array(lengths), capacity)


def test_fill_and_limits():
    assert pack([3, 4, 5, 7], 12) == [[3, 2], [1, 0]]
    assert fill([3, 4, 5, 7], 2, 12) == pytest.approx(100 * 19 / 24)
    assert pack([], 5) == [] and fill([], 0, 5) == 0
    for lengths in ([6], [0]):
        with pytest.raises(ValueError, match=r"rows have . to . tokens, packs have 1 to 5"):
            pack(lengths, 5)


def test_many_rows():
    lengths = np.minimum(np.random.default_rng(0).gamma(2, 150, 100_000).astype(int) + 1, 640)
    packs = pack(lengths, 640)
    assert np.array_equal(np.sort(np.concatenate(packs)), np.arange(100_000))
    assert max(int(lengths[one].sum()) for one in packs) <= 640 and fill(lengths, len(packs), 640) > 99
