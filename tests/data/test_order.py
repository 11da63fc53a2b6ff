"""The sample order is the originals', bit for bit."""

import hashlib
import json
import logging
import subprocess
import sys

import numpy as np
import pytest

from gptlm.data import blend
from gptlm.data.blend import BlendedDataset, _compiled, _loop, blend_order, blend_size, normalise, part_samples
from gptlm.data.blocks import BlockDataset
from gptlm.data.cache import IndexCache
from gptlm.data.indexed import open_tokens
from gptlm.data.order import build_order, count_epochs, parse_split, split_bounds
from gptlm.errors import GptlmError


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
    parts, samples = blend_order(normalise([3, 7]), 1000)
    assert np.bincount(parts).tolist() == [300, 700]
    assert parts[:4].tolist() == [1, 0, 1, 1]  # lag at i=0: .3 < .7; i=1: .3 > -.3; i=2: .6-1 < 1.4-1
    for part in (0, 1):
        assert samples[parts == part].tolist() == list(range(int((parts == part).sum())))
    assert part_samples(301, 0.3) == 91  # ceil(301 x 0.3 x 1.005 = 90.75)


def test_too_many_parts_are_refused():
    with pytest.raises(GptlmError, match="255"):
        blend_order([1 / 255] * 255, 10)


SPLITS = ("train", "valid", "test")


def test_paddlenlp_cases_are_bit_identical(shared, tmp_path):
    """Recorded from PaddleNLP 2.8.1: index arrays, tokens of every sample, lengths."""
    folder = shared / "cases" / "paddlenlp"
    subprocess.run([sys.executable, str(folder / "gen_corpora.py"), str(tmp_path)], check=True)
    expected = json.loads((folder / "expected.json").read_text())
    checks = 0
    for case in json.loads((folder / "cases.json").read_text()):
        files = [name.replace("{R}", str(tmp_path)) for name in case["files"]]
        weights = normalise([float(w) for w in files[::2]]) if len(files) > 1 else [1.0]
        prefixes = files[1::2] if len(files) > 1 else files
        for k, split in enumerate(SPLITS):
            want = expected[case["id"]][split]
            parts = []
            for weight, prefix in zip(weights, prefixes):
                tokens = open_tokens(prefix)
                first, last = split_bounds(case["split"], len(tokens))[k : k + 2]
                asked = part_samples(case["nums"][k], weight) if len(files) > 1 else case["nums"][k]
                if first < last:
                    order = build_order(
                        tokens.sizes, first, last, num_samples=asked, seq_length=case["seq"], seed=case["seed"]
                    )
                    parts.append(BlockDataset(tokens, order))
            if want is None:
                assert len(parts) < len(prefixes)
                continue
            if len(files) == 1:
                for name, array in (
                    ("doc_idx", order.documents),
                    ("sample_idx", order.samples),
                    ("shuffle_idx", order.shuffle),
                ):
                    assert (sha256(array), str(array.dtype)) == (want[name]["sha256"], want[name]["dtype"])
                    checks += 1
                dataset = parts[0]
            else:
                dataset = BlendedDataset(parts, weights, sum(part_samples(case["nums"][k], w) for w in weights))
                assert sha256(dataset.parts) == want["dataset_index"]["sha256"]
                assert sha256(dataset.samples) == want["dataset_sample_index"]["sha256"]
                checks += 2
            assert len(dataset) == want["len"]
            assert sha256(np.concatenate([dataset[i] for i in range(len(dataset))])) == want["tokens_sha256"]
            checks += 2
    assert checks >= 50


def test_megatron_cases_with_the_relaxed_assertion_are_bit_identical(shared):
    """Recorded from Megatron-DeepSpeed b4d4a0e: the same algorithm under another seed."""
    folder = shared / "cases" / "megatron"
    expected = json.loads((folder / "expected_old_relaxed_assert.json").read_text())["cases"]
    checks = 0
    for case in json.loads((folder / "cases.json").read_text())["cases"]:
        want = expected[case["id"]]
        if "splits" not in want:  # the original aborts on sequence length 1
            continue
        tokens = open_tokens(str(folder / case["prefix"]))
        bounds = split_bounds(case["split"], len(tokens))
        assert bounds == want["split_bounds"]
        for k, split in enumerate(SPLITS):
            record = want["splits"].get(split)
            if bounds[k] == bounds[k + 1]:
                assert record is None
                continue
            order = build_order(
                tokens.sizes,
                *bounds[k : k + 2],
                num_samples=case["sizes"][k],
                seq_length=case["seq_length"],
                seed=case["seed"],
            )
            dataset = BlockDataset(tokens, order)
            assert len(dataset) == record["len"]
            assert sha256(order.documents) == record["document_index"]["sha256"]
            assert sha256(order.samples) == record["sample_index"]["sha256"]
            assert sha256(order.shuffle) == record["shuffle_index"]["sha256"]
            assert sha256(np.concatenate([dataset[i] for i in range(len(dataset))])) == record["samples_sha256"]
            checks += 5
    assert checks >= 60


def test_recorded_hashes_without_the_recordings():
    """PaddleNLP 2.8.1 on 300 documents of RandomState(1): the case `a_small`, so that the order is pinned anywhere."""
    rng = np.random.RandomState(1)
    documents = [rng.randint(0, 50257, size=rng.randint(1, 121)) for _ in range(300)]
    sizes = np.array([len(document) for document in documents], np.int32)
    order = build_order(sizes, 0, 285, num_samples=200, seq_length=32, seed=42)
    assert order.documents[:8].tolist() == [9, 249, 157, 209, 75, 232, 264, 170]
    assert order.shuffle[:8].tolist() == [395, 324, 97, 497, 109, 499, 281, 330]
    assert sha256(order.documents) == "79a386d5168792f85fd290eaf8fe0a1cbe9aa1ab652fb5fa6c7c7ce4ab1e337b"
    assert sha256(order.samples) == "0c89c4d76cfb79ec585df37811086ee39a630dc1c976f16289aa9cc396790dd6"
    assert sha256(order.shuffle) == "20a1a2ebe0fef6c38edeb8deb83ca28234984f70fe19438dfff456f89195fd0c"


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


def test_megatron_core_cases_are_bit_identical(shared):
    """Recorded from megatron-core 0.16.1; where it loops for ever on an empty split, ours is empty."""
    folder = shared / "cases" / "megatron"
    expected = json.loads((folder / "expected_new.json").read_text())["cases"]
    checks = 0
    for case in json.loads((folder / "cases.json").read_text())["cases"]:
        want = expected[case["id"]]
        tokens = open_tokens(str(folder / case["prefix"]))
        bounds = split_bounds(case["split"], len(tokens), "megatron-core")
        if "splits" not in want:
            assert "hang" in want["error"] and any(a == b for a, b in zip(bounds, bounds[1:]))
            checks += 1
            continue
        for k, split in enumerate(SPLITS):
            record = want["splits"].get(split)
            if bounds[k] == bounds[k + 1]:
                assert record is None
                continue
            assert (bounds[k], bounds[k + 1] - bounds[k]) == (record["first_document"], record["num_documents"])
            order = build_order(
                tokens.sizes,
                *bounds[k : k + 2],
                num_samples=case["sizes"][k],
                seq_length=case["seq_length"],
                seed=case["seed"],
                data_order="megatron-core",
            )
            assert (len(order.shuffle), order.epochs) == (record["len"], record["num_epochs"])
            assert sha256(order.documents) == record["document_index"]["sha256"]
            assert sha256(order.samples) == record["sample_index"]["sha256"]
            assert sha256(order.shuffle) == record["shuffle_index"]["sha256"]
            dataset = BlockDataset(tokens, order)
            assert sha256(np.concatenate([dataset[i] for i in range(len(dataset))])) == record["samples_sha256"]
            checks += 6
    assert checks >= 50


def test_fleetx_cases_are_bit_identical(shared):
    """Recorded from PaddleFleetX: g2nov keeps file order, head shuffles as PaddleNLP does."""
    recorded = json.loads((shared / "cases" / "fleetx" / "dataset_order.json").read_text())
    checks = 0
    for case in recorded["cases"]:
        corpus = recorded["corpora"][case["corpus"]]
        sizes = np.array(corpus["lens"], np.int32)
        bounds = split_bounds(",".join(map(str, case["split"])), len(sizes))
        assert bounds == case["splits"]
        k = {"Train": 0, "Eval": 1, "Test": 2}[case["mode"]]
        order = build_order(
            sizes,
            *bounds[k : k + 2],
            num_samples=case["num_samples"],
            seq_length=case["seq"],
            seed=case["seed"],
            data_order="fleetx" if case["version"] == "g2nov" else "paddlenlp",
        )
        assert order.documents.tolist() == case["doc_idx"], case["version"]
        assert order.samples.tolist() == case["sample_idx"]
        assert order.shuffle.tolist() == case["shuffle_idx"] and len(order.shuffle) == case["length"]
        checks += 4
    assert checks >= 20


def test_the_compiled_loop_of_a_blend_is_the_loop_of_the_originals():
    """Bit for bit, ties included: weights of few values tie all the time; up to 254 corpora."""
    compiled = _compiled()
    assert compiled is not None  # CI has a C compiler
    rng = np.random.RandomState(0)
    for number, count in enumerate([1, 2, 3, 10, 254, *rng.randint(2, 30, 40)]):
        weights = np.array(normalise((rng.rand(count) ** 3 if number % 2 else rng.randint(1, 5, count)).tolist()))
        for mine, wanted in zip(compiled(weights, 2000), _loop(weights, 2000), strict=True):
            assert mine.dtype == wanted.dtype and np.array_equal(mine, wanted)
    assert [array.tolist() for array in compiled(np.array([0.5, 0.5]), 0)] == [[], []]


@pytest.mark.parametrize("compiler", ["no-such-compiler", "false", "echo"])  # missing, failing, writing nothing
def test_without_a_compiler_a_blend_takes_python(compiler, monkeypatch, caplog):
    monkeypatch.setattr(logging.getLogger("gptlm"), "propagate", True)
    caplog.set_level(logging.INFO, logger="gptlm")
    monkeypatch.setenv("CC", compiler)
    monkeypatch.setattr(blend, "MIN_COMPILED", 10)
    _compiled.cache_clear()
    try:
        parts, samples = blend_order([0.25, 0.75], 8)
        blend_order([0.25, 0.75], 8)
        blend_order([0.25, 0.75], 10)
        blend_order([0.25, 0.75], 10)
    finally:
        _compiled.cache_clear()
    # lags at i = 0: 0.25, 0.75 -> 1; 1: 0.25, -0.25 -> 0; 2: -0.5, 0.5 -> 1; 3: -0.25, 0.25 -> 1; 4: 0, 0 -> 0 (tie)
    assert parts.tolist() == [1, 0, 1, 1, 0, 1, 1, 1] and samples.tolist() == [0, 0, 1, 2, 1, 3, 4, 5]
    said = {id(record) for record in caplog.records if "computed in Python" in record.getMessage()}
    assert len(said) == 1  # a record is listed twice where pytest's handler is on two loggers of its path


def test_the_order_of_a_blend_is_kept(tmp_path, monkeypatch):
    parts, weights = [range(700), range(400)], [0.7, 0.3]
    first = BlendedDataset(parts, weights, 1000, IndexCache([tmp_path]))
    monkeypatch.setattr(blend, "blend_order", None)
    again = BlendedDataset(parts, weights, 1000, IndexCache([tmp_path]))
    assert (first.parts == again.parts).all() and (first.samples == again.samples).all()
    monkeypatch.undo()
    BlendedDataset(parts, [0.7 + 1e-16 + 1e-16, 0.3], 1000, IndexCache([tmp_path]))  # other weights, another entry
    BlendedDataset(parts, weights, 999, IndexCache([tmp_path]))
    assert len(list(tmp_path.glob("*.json"))) == 3
