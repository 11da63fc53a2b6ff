"""The sample order is the originals', bit for bit."""

import hashlib
import itertools

import numpy as np
import pytest

from gptlm.data import blend
from gptlm.data.blend import BlendedDataset, blend_order, blend_size, normalise, part_samples
from gptlm.data.blocks import BlockDataset
from gptlm.data.cache import IndexCache
from gptlm.data.indexed import open_tokens
from gptlm.data.order import _ranges, build_order, count_epochs, parse_split, split_bounds
from gptlm.errors import GptlmError
from tests.golden import recorded


def sha256(array) -> str:
    return hashlib.sha256(np.ascontiguousarray(array).tobytes()).hexdigest()


def test_worked_example_by_hand():
    """Sizes [3, 5], length 2: stream of 8 tokens, (8 - 1) // 2 = 3 samples at tokens 0, 2, 4 and the end at 6."""
    order = build_order(np.array([3, 5], np.int32), 0, 2, num_samples=3, seq_length=2, seed=0)
    documents = order.documents.tolist()
    sizes = [[3, 5][d] for d in documents]
    stream = [(position, offset) for position, size in enumerate(sizes) for offset in range(size)]
    assert [tuple(row) for row in order.samples.tolist()] == [stream[0], stream[2], stream[4], stream[6]]
    assert sorted(order.shuffle.tolist()) == [0, 1, 2]
    assert (order.epochs, order.separate_last_epoch) == (1, False)


@pytest.mark.parametrize(
    ("split", "size", "bounds"),
    [
        ("949,50,1", 100000, [0, 94900, 99900, 100000]),  # PaddleNLP's own example
        ("949,50,1", 10, [0, 10, 10, 10]),  # rounds to [0, 9, 9, 9]; the missing one is added to every later bound
        ("90/5/5", 80, [0, 72, 76, 80]),
        ("100", 7, [0, 7, 7, 7]),
        ("1,1,1", 1000, [0, 334, 667, 1000]),  # Megatron's old rounding: the excess leaves every later bound
    ],
)
def test_split_bounds(split, size, bounds):
    assert split_bounds(split, size) == bounds


@pytest.mark.parametrize("split", ["", "a,b", "-1,2,3", "0,0,0", "nan,1,1", "1;2;3", "1,1,1,1"])
def test_a_malformed_split_is_refused_with_its_value(split):
    with pytest.raises(GptlmError, match="split"):
        parse_split(split)


def test_epochs_are_the_smallest_that_suffice():
    for tokens in (7, 64, 65, 1000):
        for wanted in (1, 15, 16, 999):
            epochs = count_epochs(tokens, wanted, 8)
            assert (epochs * tokens - 1) // 8 >= wanted
            assert epochs == 1 or ((epochs - 1) * tokens - 1) // 8 < wanted


def test_every_token_of_an_epoch_is_a_target_once_and_neighbours_share_one_token():
    sizes = np.array([4, 0, 7, 1, 9], np.int32)
    order = build_order(sizes, 0, 5, num_samples=1, seq_length=3, seed=3)
    assert len(order.shuffle) == (21 - 1) // 3
    starts = order.samples[:, 0].astype(int), order.samples[:, 1].astype(int)
    before = np.concatenate([[0], np.cumsum(sizes[order.documents])])
    assert (before[starts[0]] + starts[1]).tolist() == [0, 3, 6, 9, 12, 15, 18]


def test_empty_first_sequence_starts_at_zero_zero():
    for seed in range(20):
        order = build_order(np.array([0, 5, 5], np.int32), 0, 3, num_samples=1, seq_length=2, seed=seed)
        assert order.samples[0].tolist() == [0, 0]


def test_a_range_without_tokens_is_refused():
    with pytest.raises(GptlmError, match="no tokens"):
        build_order(np.array([5, 0], np.int32), 1, 2, num_samples=1, seq_length=2, seed=0)


def test_positions_beyond_int32_get_int64():
    sizes = np.broadcast_to(np.int32(2**31 - 1), (3,))
    order = build_order(sizes, 0, 3, num_samples=1, seq_length=2**30, seed=0)
    assert order.samples.dtype == np.int32 and len(order.shuffle) == (3 * (2**31 - 1) - 1) // 2**30


def test_a_blend_ends_where_a_part_does():
    """Whatever its size says, every sample of a blend can be read, and none of the requested ones is lost."""
    rng = np.random.RandomState(0)
    cut = 0
    for _ in range(300):
        weights = normalise(rng.rand(rng.randint(2, 6)))
        wanted = int(rng.randint(1, 200))
        parts = [np.arange(part_samples(wanted, weight)) for weight in weights]
        mixed = BlendedDataset(parts, weights, blend_size(wanted, weights))
        assert wanted <= len(mixed) <= blend_size(wanted, weights)
        cut += len(mixed) < blend_size(wanted, weights)
        assert [mixed[i] for i in range(len(mixed))]
    assert cut


@pytest.mark.parametrize("data_order", ["paddlenlp", "fleetx"])
def test_more_sequences_than_int32_counts(data_order):
    """Numbers past 2^31 are kept whole; the sizes are one number seen 2^31 + 9 times."""
    count = 2**31 + 9
    sizes = np.broadcast_to(np.int32(7), (count,))
    found = {}
    for first, last in ((count - 6, count), (0, 6)):
        order = build_order(sizes, first, last, num_samples=5, seq_length=4, seed=3, data_order=data_order)
        assert order.documents.dtype == (np.int64 if first else np.int32)
        assert order.documents.min() == first and order.documents.max() == last - 1
        found[first] = order
    far, near = found.values()
    assert np.array_equal(far.documents - (count - 6), near.documents)
    assert np.array_equal(far.samples, near.samples) and np.array_equal(far.shuffle, near.shuffle)
    assert split_bounds("90,9,1", count)[-1] == count


def test_blend_follows_its_weights():
    blend = BlendedDataset([range(301), range(701)], normalise([3, 7]), 1000)
    parts, samples = blend_order(normalise([3, 7]), 1000), np.asarray(blend.samples)
    assert np.bincount(parts).tolist() == [300, 700]
    assert parts[:4].tolist() == [1, 0, 1, 1]  # lag at i=0: .3 < .7; i=1: .3 > -.3; i=2: .6-1 < 1.4-1
    for part in (0, 1):
        assert samples[parts == part].tolist() == list(range(int((parts == part).sum())))
    assert part_samples(301, 0.3) == 91  # ceil(301 x 0.3 x 1.005 = 90.75)


def test_too_many_parts_are_refused():
    with pytest.raises(GptlmError, match="255"):
        blend_order([1 / 255] * 255, 10)


SPLITS = ("train", "valid", "test")


def assert_index(array, record):
    """An index array is the recorded one. The first numbers are written out to show where a difference begins."""
    assert array[: len(record["head"])].tolist() == record["head"]
    assert (str(array.dtype), sha256(array)) == (record["dtype"], record["sha256"])


def assert_order(order, record):
    assert_index(order.documents, record["documents"])
    assert_index(order.samples, record["samples"])
    assert_index(order.shuffle, record["shuffle"])


def assert_samples(dataset, record):
    assert len(dataset) == record["len"]
    assert sha256(np.concatenate([dataset[i] for i in range(len(dataset))])) == record["tokens_sha256"]


@pytest.mark.parametrize("case", recorded("paddlenlp/orders.json"), ids=lambda case: case["id"])
def test_paddlenlp_cases_are_bit_identical(golden_corpora, case):
    """Recorded from PaddleNLP 2.8.1: index arrays, tokens of every sample, lengths."""
    blended = len(case["input"]) > 1
    prefixes = case["input"][1::2] if blended else case["input"]
    weights = normalise([float(weight) for weight in case["input"][::2]]) if blended else [1.0]
    for k, split in enumerate(SPLITS):
        record, wanted = case[split], case["num_samples"][k]
        asked = [part_samples(wanted, weight) if blended else wanted for weight in weights]
        parts, orders = [], []
        for number, prefix in zip(asked, prefixes):
            tokens = open_tokens(str(golden_corpora / "paddlenlp" / prefix))
            bounds = split_bounds(case["split"], len(tokens))[k : k + 2]
            if bounds[0] < bounds[1]:
                options = dict(num_samples=number, seq_length=case["seq_length"], seed=case["seed"])
                orders.append(build_order(tokens.sizes, *bounds, **options))
                parts.append(BlockDataset(tokens, orders[-1]))
        if record is None:
            assert len(parts) < len(prefixes)
        elif blended:
            dataset = BlendedDataset(parts, weights, sum(asked))
            assert_index(dataset.parts, record["parts"])
            ours = np.asarray(dataset.samples)
            assert (str(ours.dtype), sha256(ours)) == tuple(record["part_samples"].values())
            assert_samples(dataset, record)
        else:
            assert_order(orders[0], record)
            assert_samples(parts[0], record)


MEGATRON = recorded("megatron/orders.json")["cases"]


@pytest.mark.parametrize("data_order", ["megatron", "megatron-core"])
@pytest.mark.parametrize("case", MEGATRON, ids=lambda case: case["id"])
def test_megatron_cases_are_bit_identical(golden_corpora, case, data_order):
    """Recorded from Megatron-DeepSpeed b4d4a0e and megatron-core 0.16.1.

    The first aborts on sequence length 1, where ours has an order; the second loops for ever on an empty split, which
    is empty here.
    """
    tokens = open_tokens(str(golden_corpora / "megatron" / case["input"]))
    bounds = split_bounds(case["split"], len(tokens), data_order)
    records = case[data_order]
    if isinstance(records, str):
        empty = any(first == last for first, last in itertools.pairwise(bounds))
        assert (records == "hang" and empty) or (records == "abort" and case["seq_length"] == 1)
        return
    assert bounds == records.get("bounds", bounds)
    for k, split in enumerate(SPLITS):
        record, (first, last) = records[split], bounds[k : k + 2]
        if first == last:
            assert record is None
            continue
        options = dict(num_samples=case["num_samples"][k], seq_length=case["seq_length"], seed=case["seed"])
        order = build_order(tokens.sizes, first, last, data_order=data_order, **options)
        assert_order(order, record)
        assert_samples(BlockDataset(tokens, order), record)
        if data_order == "megatron-core":
            assert (first, last - first) == (record["first_document"], record["num_documents"])
            assert order.epochs == record["epochs"]


FLEETX = recorded("fleetx/orders.json")


@pytest.mark.parametrize("case", FLEETX["cases"], ids=lambda case: f"{case['version']}-{case['num_samples']}")
def test_fleetx_cases_are_bit_identical(case):
    """Recorded from PaddleFleetX: of November 2022 it keeps file order, the last one shuffles as PaddleNLP does."""
    sizes = np.array(FLEETX["sizes"][case["input"]], np.int32)
    bounds = split_bounds(",".join(map(str, case["split"])), len(sizes))
    assert bounds == case["bounds"]
    k = ("Train", "Eval", "Test").index(case["mode"])
    order = build_order(
        sizes, *bounds[k : k + 2], num_samples=case["num_samples"], seq_length=case["seq_length"], seed=case["seed"],
        data_order="fleetx" if case["version"] == "g2nov" else "paddlenlp",
    )  # fmt: skip
    assert order.documents.tolist() == case["documents"]
    assert order.samples.tolist() == case["samples"]
    assert order.shuffle.tolist() == case["shuffle"]


def test_megatron_core_rounds_each_bound_on_its_own():
    assert split_bounds("1,1,1", 1000, "megatron-core") == [0, 333, 667, 1000]
    assert split_bounds("949,50,1", 10, "megatron-core") == [0, 9, 10, 10]  # 9.49, 9.99, 10


def test_megatron_core_blend_sizes():
    """ceil(301 x 0.3) = 91, ceil(301 x 0.7) = 211: 302 samples; parts are asked for ceil(91 x 1.005), ..."""
    assert [part_samples(301, w, "megatron-core") for w in (0.3, 0.7)] == [92, 213]
    assert blend_size(301, [0.3, 0.7], "megatron-core") == 302
    assert blend_size(301, [0.3, 0.7]) == 91 + 212


def test_fleetx_keeps_documents_in_file_order():
    sizes = np.array([5, 6, 7, 8], np.int32)
    order = build_order(sizes, 1, 4, num_samples=30, seq_length=3, seed=5, data_order="fleetx")
    assert order.documents.tolist() == [1, 2, 3] * order.epochs and order.epochs == 5
    rng = np.random.RandomState(5)
    together = ((order.epochs - 1) * 21 - 1) // 3 if order.separate_last_epoch else len(order.shuffle)
    first = np.arange(together, dtype=np.uint32)
    rng.shuffle(first)
    assert order.shuffle[:together].tolist() == first.tolist()


def test_the_order_of_a_blend_is_kept(tmp_path, monkeypatch):
    parts, weights = [range(700), range(400)], [0.7, 0.3]
    first = BlendedDataset(parts, weights, 1000, IndexCache([tmp_path]))
    monkeypatch.setattr(blend, "_fill", None)
    again = BlendedDataset(parts, weights, 1000, IndexCache([tmp_path]))
    assert (first.parts == again.parts).all() and np.array_equal(first.samples, again.samples)
    monkeypatch.undo()
    BlendedDataset(parts, [0.7 + 1e-16 + 1e-16, 0.3], 1000, IndexCache([tmp_path]))  # other weights, another entry
    BlendedDataset(parts, weights, 999, IndexCache([tmp_path]))
    assert len(list(tmp_path.glob("*.json"))) == 3


@pytest.mark.parametrize("repeat", [1, 8])
def test_an_index_beyond_any_memory_is_refused(repeat):
    """2^50 numbers of 8 bytes are 2^23 GiB, more than a process can address."""
    with pytest.raises(GptlmError, match=rf"needs {8388608 * repeat:,}.0 GiB of memory, more than there is"):
        next(_ranges((0, 1 << 50), [repeat], np.dtype(np.int64), None))
