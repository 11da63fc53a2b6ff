"""From --input_dir to datasets: the cache, blends, and everything refused before a model exists."""

import json
import logging
import os

import numpy as np
import pytest

from gptlm.data import cache as cache_module
from gptlm.data.blocks import build_split
from gptlm.data.cache import IndexCache
from gptlm.data.corpora import check_ids, default_cache_folders, missing_eos, open_corpora, refuse_short
from gptlm.data.indexed import open_tokens
from gptlm.data.writer import IndexedTokensWriter
from gptlm.errors import GptlmError
from tests.conftest import write_tokens

EOS = 50256


def build(corpora, cache, split="train", num_samples=50, seq_length=16):
    return build_split(corpora, split, num_samples=num_samples, seq_length=seq_length, seed=42, cache=cache)


def all_samples(dataset):
    return np.stack([dataset[i] for i in range(len(dataset))])


def test_both_formats_give_the_same_samples(corpus_folder, tmp_path):
    samples = []
    for layout in ("mmap", "npy"):
        corpora = open_corpora(str(corpus_folder / layout), "90,5,5")
        samples.append(all_samples(build(corpora, IndexCache([tmp_path]))))
    assert samples[0].shape[1] == 17 and samples[0].dtype == np.int64
    assert (samples[0] == samples[1]).all()


def test_the_cache_is_used_and_is_keyed_by_every_parameter(corpus_folder, tmp_path, monkeypatch):
    corpora = open_corpora(str(corpus_folder / "mmap"), "90,5,5")
    cache = IndexCache([tmp_path])
    first = all_samples(build(corpora, cache))
    assert not [p for p in tmp_path.iterdir() if "incomplete" in p.name]
    built, store = [], cache_module._store
    monkeypatch.setattr(
        cache_module, "_store", lambda folder, name, *rest: built.append(name) or store(folder, name, *rest)
    )
    assert (all_samples(build(corpora, cache)) == first).all() and built == []
    for change in ({"num_samples": 51}, {"seq_length": 15}, {"split": "valid"}):
        build(corpora, cache, **change)
    build_split(corpora, "train", num_samples=50, seq_length=16, seed=43, cache=cache)
    build(open_corpora(str(corpus_folder / "mmap"), "80,10,10"), cache)
    assert len(set(built)) == 5


def test_a_damaged_cache_entry_is_built_again(corpus_folder, tmp_path):
    corpora = open_corpora(str(corpus_folder / "mmap"), "90,5,5")
    cache = IndexCache([tmp_path])
    first = all_samples(build(corpora, cache))
    for file in tmp_path.glob("*_samples.npy"):
        file.write_bytes(file.read_bytes()[:50])
    assert (all_samples(build(corpora, cache)) == first).all()
    for file in tmp_path.glob("*.json"):
        file.write_text("{")
    assert (all_samples(build(corpora, cache)) == first).all()


@pytest.mark.parametrize(
    "content", [b"", b"nonsense", b"PK\x03\x04", b"[]", b"null", b'{"of": 1, "arrays": 5}', b"\x93NUMPY"]
)
def test_a_damaged_cache_is_rebuilt_with_one_warning(corpus_folder, tmp_path, content, monkeypatch):
    lines = list[str]()
    monkeypatch.setattr(cache_module.logger, "warning", lambda text, *values: lines.append(text % values))
    corpora = open_corpora(str(corpus_folder / "mmap"), "90,5,5")
    cache = IndexCache([tmp_path])
    first = all_samples(build(corpora, cache))
    good = {file: file.read_bytes() for file in tmp_path.iterdir()}
    assert len(good) == 5
    for file in good:
        lines.clear()
        file.write_bytes(content)
        assert (all_samples(build(corpora, cache)) == first).all()
        assert sum("is damaged" in line for line in lines) == 1, file
        assert {file: file.read_bytes() for file in tmp_path.iterdir()} == good


def test_an_array_of_another_entry_is_noticed(corpus_folder, tmp_path):
    corpora = open_corpora(str(corpus_folder / "mmap"), "90,5,5")
    first = all_samples(build(corpora, IndexCache([tmp_path / "a"])))
    build(corpora, IndexCache([tmp_path / "b"]), num_samples=9000)
    (mine,) = (tmp_path / "a").glob("*_shuffle.npy")
    (other,) = (tmp_path / "b").glob("*_shuffle.npy")
    mine.write_bytes(other.read_bytes())
    assert (all_samples(build(corpora, IndexCache([tmp_path / "a"]))) == first).all()


def test_changed_entries_of_an_index_are_built_again(corpus_folder, tmp_path, monkeypatch):
    """One changed value in each array, form and size kept."""
    lines = list[str]()
    monkeypatch.setattr(cache_module.logger, "warning", lambda text, *values: lines.append(text % values))
    corpora = open_corpora(str(corpus_folder / "mmap"), "90,5,5")
    cache = IndexCache([tmp_path])
    first = all_samples(build(corpora, cache))
    files = sorted(tmp_path.glob("*.npy"))
    assert len(files) == 4
    for file in files:
        lines.clear()
        good = file.read_bytes()
        array = np.load(file)
        array.flat[-1] += 1
        np.save(file, array)
        assert file.stat().st_size == len(good) and file.read_bytes() != good
        assert (all_samples(build(corpora, cache)) == first).all()
        assert len(lines) == 1 and f"the content of {file.name} is not what was written" in lines[0], lines
        assert file.read_bytes() == good


def test_entries_of_older_versions_are_still_read(corpus_folder, tmp_path, caplog, monkeypatch):
    monkeypatch.setattr(logging.getLogger("gptlm"), "propagate", True)
    corpora = open_corpora(str(corpus_folder / "mmap"), "90,5,5")
    build(corpora, IndexCache([tmp_path]))
    (description,) = tmp_path.glob("*.json")
    noted = json.loads(description.read_text())
    assert noted.pop("xxh3_128").keys() == noted["arrays"].keys()
    monkeypatch.setattr(cache_module, "_store", None)
    for arrays in (noted["arrays"], list(noted["arrays"])):
        description.write_text(json.dumps({**noted, "arrays": arrays}))
        build(corpora, IndexCache([tmp_path]))
    assert "damaged" not in caplog.text


def test_files_reach_the_disk_before_their_names(tmp_path, monkeypatch):
    """Else a crash of the machine leaves an empty file under a good name."""
    calls = []
    sync, replace = os.fsync, os.replace
    monkeypatch.setattr(
        os, "fsync", lambda handle: (calls.append(os.readlink(f"/proc/self/fd/{handle}")), sync(handle))
    )
    monkeypatch.setattr(os, "replace", lambda a, b: (calls.append(f"-> {b}"), replace(a, b)))
    IndexCache([tmp_path]).load_or_build({"a": 1}, lambda: {"x": np.arange(3)})
    assert [name.startswith("->") for name in calls] == [False, True, False] * 2
    assert calls[2] == str(tmp_path) and calls[0].endswith(".incomplete")
    calls.clear()
    writer = IndexedTokensWriter(str(tmp_path / "a"), 100)
    writer.add(np.array([1]), [1])
    for path in writer.finish({}):
        assert calls.index(f"{path}.incomplete") < calls.index(f"-> {path}") < len(calls) - 1
    assert calls[-1] == str(tmp_path)


def test_a_folder_that_cannot_be_written_is_passed_over(corpus_folder, tmp_path):
    (tmp_path / "file").write_text("not a folder")
    corpora = open_corpora(str(corpus_folder / "mmap"), "90,5,5")
    dataset = build(corpora, IndexCache([tmp_path / "file" / "cache", tmp_path / "out"]))
    assert len(dataset) >= 50 and list((tmp_path / "out").glob("*.json"))
    assert len(build(corpora, IndexCache([tmp_path / "file" / "cache"]))) == len(dataset)


def test_where_the_cache_lies(corpus_folder):
    prefix = str(corpus_folder / "mmap")
    assert [str(f) for f in default_cache_folders(prefix, "mine", "out")] == ["mine"]
    beside, fallback = default_cache_folders(prefix, None, "out")
    assert (str(beside), str(fallback)) == (f"{prefix}/index-cache", os.path.join("out", "index-cache"))


def test_blends_leave_out_parts_without_that_split(tmp_path):
    write_tokens(tmp_path / "large", documents=200)
    write_tokens(tmp_path / "small", documents=5, seed=1)
    corpora = open_corpora(f"1 {tmp_path}/large 1 {tmp_path}/small", "90,9,1")
    assert [corpus.weight for corpus in corpora] == [0.5, 0.5]
    train = build(corpora, IndexCache([tmp_path / "c"]), num_samples=100)
    assert np.bincount(train.parts).tolist() == [51, 51]  # ceil(100 x 0.5 x 1.005) each
    test = build(corpora, IndexCache([tmp_path / "c"]), split="test", num_samples=10)
    assert len(test.datasets) == 1


def test_fleetx_order_reaches_the_datasets_and_their_cache(corpus_folder, tmp_path):
    corpora = open_corpora(str(corpus_folder / "mmap"), "90,5,5", "fleetx")
    settings = {"num_samples": 50, "seq_length": 16, "seed": 42, "cache": IndexCache([tmp_path])}
    for _ in range(2):  # built, then from the cache
        ours = build_split(corpora, "train", data_order="fleetx", **settings)
        assert ours.order.documents.tolist() == list(range(108))
    assert build_split(corpora, "train", **settings).order.documents.tolist() != list(range(108))


def test_an_empty_split_is_none(tmp_path):
    write_tokens(tmp_path / "a", documents=9)
    corpora = open_corpora(str(tmp_path / "a"), "949,50,1")
    assert corpora[0].bounds == [0, 9, 9, 9]
    assert build(corpora, IndexCache([tmp_path]), split="valid") is None


def test_fewer_tokens_than_one_block(tmp_path):
    write_tokens(tmp_path / "a", documents=2)
    corpora = open_corpora(str(tmp_path / "a"), "1,0,0")
    refuse_short(corpora, "train", 10)
    refuse_short(corpora, "valid", 1000)
    with pytest.raises(GptlmError, match=r"train split.*one sample takes 1001"):
        refuse_short(corpora, "train", 1000)
    assert len(build(corpora, IndexCache([]), seq_length=1000, num_samples=3)) == 3  # the originals repeat it


def test_a_corpus_without_tokens(tmp_path):
    IndexedTokensWriter(str(tmp_path / "a"), 100).finish({})
    with pytest.raises(GptlmError, match="has no tokens"):
        open_corpora(str(tmp_path / "a"), "1,0,0")


@pytest.mark.parametrize("metadata", [True, False])
def test_ids_beyond_the_vocabulary_are_found_before_training(tmp_path, metadata):
    prefix = tmp_path / "a"
    writer = IndexedTokensWriter(str(prefix), 500)
    writer.add(np.array([1, 2, 3, 4, 77, 5]), [3, 3])
    writer.finish({})
    if not metadata:
        (tmp_path / "a.meta.json").unlink()
    cache = IndexCache([tmp_path / "c"])
    corpora = open_corpora(str(prefix), "1,0,0")
    check_ids(corpora, 78, cache)
    with pytest.raises(GptlmError, match=r"sequence 1, token 1 is id 77.*77 entries"):
        check_ids(corpora, 77, cache)
    assert len(list((tmp_path / "c").glob("*_range.npy"))) == (0 if metadata else 1)


def test_tokens_changed_after_preprocessing_are_looked_at_again(tmp_path):
    write_tokens(tmp_path / "a")
    content = np.fromfile(tmp_path / "a.bin", np.uint16)
    content[7] = 60000
    content.tofile(tmp_path / "a.bin")
    later = (tmp_path / "a.meta.json").stat().st_mtime_ns + 1000
    os.utime(tmp_path / "a.bin", ns=(later, later))
    with pytest.raises(GptlmError, match="token 7 is id 60000"):
        check_ids(open_corpora(str(tmp_path / "a"), "1,0,0"), 500, IndexCache([tmp_path / "c"]))


def test_negative_ids_are_found(tmp_path):
    np.save(tmp_path / "a_ids.npy", np.array([5, -1, 3], np.int32))
    np.savez(tmp_path / "a_idx.npz", lens=np.array([3], np.int32), docs=np.array([0, 1]))
    with pytest.raises(GptlmError, match="token 1 is id -1"):
        check_ids(open_corpora(str(tmp_path / "a"), "1,0,0"), 100, IndexCache([tmp_path / "c"]))


def test_damaged_metadata_is_named(tmp_path):
    write_tokens(tmp_path / "a")
    (tmp_path / "a.meta.json").write_text(json.dumps({"tokens": 1})[:-1])
    with pytest.raises(GptlmError, match="a.meta.json is damaged"):
        open_corpora(str(tmp_path / "a"), "1,0,0")


def corpus(tmp_path, lasts, lengths=None):
    """Documents of random ids, each ending in one of `lasts`, each of the `lengths` sequences."""
    rng = np.random.RandomState(0)
    writer = IndexedTokensWriter(str(tmp_path / "a"), 50257)
    for last in lasts:
        writer.add(np.append(rng.randint(5, 50000, 9), last), [4, 0, 6], np.array([3]))
    writer.finish({})
    return open_tokens(str(tmp_path / "a"))


@pytest.mark.parametrize(
    ("lasts", "eos_id", "says"),
    [
        ([EOS] * 300, EOS, None),
        ([EOS] * 300, None, None),
        ([0] * 300, None, None),
        ([EOS] * 9 + [7], EOS, None),  # one was cut
        ([EOS], EOS, None),
        ([7], None, None),  # one document tells nothing
        ([], EOS, None),
        (range(5, 305), EOS, "of 256 documents sampled, 0 end with the tokenizer's end-of-text id 50256"),
        (range(5, 305), None, "of 256 documents sampled, 1 end with id 5 and the others with 255 other ids"),
        ([0] * 300, EOS, "of 256 documents sampled, 256 end with id 0, the tokenizer's end-of-text id is 50256"),
        ([EOS, 7] * 10, EOS, "of 20 documents sampled, 10 end with the tokenizer's end-of-text id 50256"),
        ([7], EOS, "of 1 documents sampled, 1 end with id 7, the tokenizer's"),
    ],
)
def test_ends_of_documents(tmp_path, lasts, eos_id, says):
    found = missing_eos(corpus(tmp_path, lasts), eos_id)
    assert found is None if says is None else f"{tmp_path}/a: {says}" in found, found


def test_texts_that_end_alike_lack_the_id(tmp_path):  # as where each ends with a full stop
    assert "(preprocess with this one and --append_eos)" in (missing_eos(corpus(tmp_path, [13] * 300), EOS) or "")


def test_documents_without_tokens_say_nothing(tmp_path):
    np.save(tmp_path / "a_ids.npy", np.array([1, EOS, 2, EOS], np.int32))
    np.savez(tmp_path / "a_idx.npz", lens=np.array([0, 2, 0, 2], np.int32), docs=np.array([0, 0, 1, 3, 3, 4, 4]))
    assert missing_eos(open_tokens(str(tmp_path / "a")), EOS) is None
