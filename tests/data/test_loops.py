"""Compiled loops give what Python and numpy give, bit for bit, and are not needed."""

import itertools
import logging

import numpy as np
import pytest

from gptlm.data import blend, shuffle
from gptlm.data.blend import _compiled, _loop, blend_order, normalise
from gptlm.data.loops import compiled_loops
from gptlm.data.order import build_order

DTYPES = (np.int32, np.uint32, np.int64)


@pytest.fixture
def compiled(monkeypatch):
    """Arrays of any size are shuffled by the compiled loop."""
    monkeypatch.setattr(shuffle, "MIN_COMPILED", 0)
    assert compiled_loops() is not None  # CI has a C compiler


def assert_as_numpy(size, dtype, rng, again):
    """`rng` and `again` are in the same state."""
    found, wanted = np.arange(size, dtype=dtype), np.arange(size, dtype=dtype)
    shuffle.shuffle(rng, found)
    again.shuffle(wanted)
    assert found.dtype == dtype and np.array_equal(found, wanted), (size, dtype)
    for ours, numpys in zip(rng.get_state(), again.get_state(), strict=True):
        assert np.array_equal(ours, numpys), (size, dtype)


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_compiled_shuffle_is_that_of_numpy(compiled, dtype):
    """Sizes around powers of two, where the mask changes, and around the places that are drawn ahead."""
    around = {2**power + more for power in range(18) for more in (-1, 0, 1, 2)}
    ahead = {256 * count + more for count in (1, 2, 3, 7) for more in (-1, 0, 1, 2)}
    for seed, size in enumerate(sorted(around | ahead)):
        assert_as_numpy(size, dtype, np.random.RandomState(seed), np.random.RandomState(seed))


def test_shuffles_follow_each_other_as_with_numpy(compiled):
    """From any place in the generator's block of 624 words, and with a second normal number in store."""
    rng, again, sizes = np.random.RandomState(7), np.random.RandomState(7), np.random.RandomState(8)
    for number in range(400):
        assert_as_numpy(int(sizes.randint(0, 2000)), DTYPES[number % 3], rng, again)
        if number % 5 == 0:
            assert rng.randn() == again.randn()
    assert rng.randint(0, 2**31, 9).tolist() == again.randint(0, 2**31, 9).tolist()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size", [2**20, 2**21 + 1, 3_000_003])
def test_large_arrays_are_shuffled_as_by_numpy(size, dtype):
    assert shuffle.MIN_COMPILED <= size <= shuffle.MAX_COMPILED
    assert_as_numpy(size, dtype, np.random.RandomState(size), np.random.RandomState(size))


@pytest.mark.parametrize("limit", ["MIN_COMPILED", "MAX_COMPILED"])
def test_small_arrays_and_those_of_more_than_32_bits_are_left_to_numpy(compiled, limit, monkeypatch):
    monkeypatch.setattr(shuffle, limit, 1000)
    before, beyond = compiled_loops.cache_info(), 999 if limit == "MIN_COMPILED" else 1001
    assert_as_numpy(beyond, np.uint32, np.random.RandomState(1), np.random.RandomState(1))
    assert compiled_loops.cache_info() == before  # not asked for
    assert_as_numpy(1000, np.uint32, np.random.RandomState(1), np.random.RandomState(1))
    assert compiled_loops.cache_info().hits == before.hits + 1


def test_the_compiled_loop_of_a_blend_is_the_loop_of_the_originals():
    """Bit for bit, ties included: weights of few values tie all the time; up to 254 corpora."""
    compiled = _compiled()
    assert compiled is not None  # CI has a C compiler
    rng = np.random.RandomState(0)
    for number, count in enumerate([1, 2, 3, 10, 254, *rng.randint(2, 30, 40)]):
        weights = np.array(normalise((rng.rand(count) ** 3 if number % 2 else rng.randint(1, 5, count)).tolist()))
        found = []
        for loop, cuts in ((compiled, [0, 2000]), (_loop, [0, 2000]), (compiled, [0, 1, 700, 2000])):
            taken = np.zeros(count, np.int64)
            parts = [loop(weights, taken, first, last - first) for first, last in itertools.pairwise(cuts)]
            found.append(np.concatenate(parts))
            assert found[-1].dtype == np.uint8 and np.array_equal(np.bincount(found[-1], minlength=count), taken)
        assert np.array_equal(found[0], found[1]) and np.array_equal(found[0], found[2])
    assert compiled(np.array([0.5, 0.5]), np.zeros(2, np.int64), 0, 0).tolist() == []


def shuffled(seed):
    """Two epochs and a part of the third, which is shuffled on its own."""
    order = build_order(np.full(3000, 5, np.int32), 0, 3000, num_samples=8000, seq_length=4, seed=seed)
    assert order.separate_last_epoch
    return order


@pytest.mark.parametrize("compiler", ["no-such-compiler", "false", "echo"])  # missing, failing, writing nothing
def test_without_a_compiler_an_index_is_the_same(compiler, compiled, monkeypatch, caplog):
    monkeypatch.setattr(logging.getLogger("gptlm"), "propagate", True)
    caplog.set_level(logging.INFO, logger="gptlm")
    monkeypatch.setattr(blend, "MIN_COMPILED", 10)
    wanted = shuffled(1)
    monkeypatch.setenv("CC", compiler)
    compiled_loops.cache_clear()
    try:
        parts = blend_order([0.25, 0.75], 8)
        blend_order([0.25, 0.75], 10)
        blend_order([0.25, 0.75], 10)
        found = shuffled(1)
        assert compiled_loops() is None
    finally:
        compiled_loops.cache_clear()
    # lags at i = 0: 0.25, 0.75 -> 1; 1: 0.25, -0.25 -> 0; 2: -0.5, 0.5 -> 1; 3: -0.25, 0.25 -> 1; 4: 0, 0 -> 0 (tie)
    assert parts.tolist() == [1, 0, 1, 1, 0, 1, 1, 1]
    for name in ("documents", "samples", "shuffle"):
        assert np.array_equal(getattr(found, name), getattr(wanted, name))
    said = {id(record) for record in caplog.records if "without compiled loops" in record.getMessage()}
    assert len(said) == 1  # a record is listed twice where pytest's handler is on two loggers of its path
