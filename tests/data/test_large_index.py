"""An index of any size: the same order, in little memory, and read only where it is needed."""

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from gptlm.commands.pretrain import parse_pretrain
from gptlm.data import cache as cache_module
from gptlm.data import indexed, shuffle
from gptlm.data import order as order_module
from gptlm.data.blocks import BlocksWithDocuments, build_split
from gptlm.data.cache import IndexCache
from gptlm.data.corpora import missing_eos, open_corpora
from gptlm.data.indexed import open_tokens
from gptlm.data.order import build_order
from gptlm.data.writer import IndexedTokensWriter
from gptlm.errors import GptlmError
from gptlm.recipes.pretrain.data import build_datasets
from tests.conftest import write_tokens

ROOT = Path(__file__).parents[2]


@pytest.fixture
def large(monkeypatch):
    """Makes every array one that is written in blocks and stays on disk."""
    monkeypatch.setattr(order_module, "BLOCK_OF_DOCUMENTS", 3)
    monkeypatch.setattr(cache_module, "IN_MEMORY", 0)
    monkeypatch.setattr(cache_module, "ALWAYS_VERIFIED", 0)
    monkeypatch.setattr(indexed, "INDEX_IN_MEMORY", 0)
    monkeypatch.setattr(indexed, "BLOCK", 4)


def originals(sizes, first, last, *, num_samples, seq_length, seed, data_order):
    """The loops of the originals (Megatron's `gpt_dataset.py` and `build_sample_idx`), everything in memory."""
    tokens, rng = int(sizes[first:last].sum()), np.random.RandomState(seed)
    epochs = 1
    while (epochs * tokens - 1) // seq_length < num_samples:
        epochs += 1
    before = ((epochs - 1) * tokens - 1) // seq_length
    separate = epochs > 1 and num_samples - before < int(0.8 * ((tokens - 1) // seq_length))
    documents = []
    for repeats in [epochs - 1, 1] if separate else [epochs]:
        part = np.array(list(range(first, last)) * repeats, np.int32)
        if data_order != "fleetx":
            rng.shuffle(part)
        documents += part.tolist()
    total = (epochs * tokens - 1) // seq_length
    samples, position, offset = [(0, 0)], 0, 0
    for _ in range(total):
        rest = seq_length + 1
        while rest:
            length = int(sizes[documents[position]]) - offset
            rest -= length
            if rest <= 0:
                offset += rest + length - 1
                rest = 0
            else:
                position, offset = position + 1, 0
        samples.append((position, offset))
    shuffle = []
    for start, stop in [(0, before), (before, total)] if separate else [(0, total)]:
        part = np.arange(start, stop, dtype=np.uint32)
        rng.shuffle(part)
        shuffle += part.tolist()
    return documents, samples, shuffle


@pytest.mark.parametrize("data_order", ["paddlenlp", "fleetx"])
@pytest.mark.parametrize("block", [1, 5, 1000])
def test_blocks_on_disk_give_the_arrays_of_the_originals(tmp_path, monkeypatch, data_order, block):
    monkeypatch.setattr(order_module, "BLOCK_OF_DOCUMENTS", block)
    monkeypatch.setattr(cache_module, "IN_MEMORY", 0)
    monkeypatch.setattr(shuffle, "MIN_COMPILED", 0)
    rng, separate = np.random.RandomState(block), 0
    for number in range(25):
        sizes = rng.randint(1, 40, rng.randint(2, 60)).astype(np.int32)
        first = int(rng.randint(0, len(sizes) - 1))
        settings = dict(num_samples=int(rng.randint(1, 300)), seq_length=int(rng.randint(1, 30)), seed=number)
        entry = cache_module._Files(tmp_path, str(number))
        found = build_order(sizes, first, len(sizes), **settings, data_order=data_order, entry=entry)
        wanted = originals(sizes, first, len(sizes), **settings, data_order=data_order)
        assert (found.documents[:].tolist(), found.shuffle[:].tolist()) == (wanted[0], wanted[2])
        assert [tuple(row) for row in found.samples[:].tolist()] == wanted[1]
        separate += found.separate_last_epoch
    assert separate


def samples_of(input_dir, cache):
    corpora = open_corpora(input_dir, "90,5,5", cache=cache)
    train = build_split(corpora, "train", num_samples=300, seq_length=16, seed=42, cache=cache)
    samples = BlocksWithDocuments(train)
    return [(block.tolist(), lengths) for block, lengths in map(samples.__getitem__, range(len(samples)))]


@pytest.mark.parametrize("layout", ["mmap", "lazy", "npy"])
def test_what_stays_on_disk_gives_the_samples_of_what_is_in_memory(tmp_path, request, layout):
    """A blend; one corpus has documents of several sequences, and empty ones."""
    for name, seed in (("a", 1), ("b", 2)):
        rng = np.random.RandomState(seed)
        writer = IndexedTokensWriter(str(tmp_path / name), 500, layout)
        for _ in range(60):
            parts = [0, 4, 7][: rng.randint(1, 4)] if name == "a" else [int(rng.randint(1, 50))]
            writer.add(rng.randint(0, 500, sum(parts)), parts, np.array([len(parts)]))
        writer.finish({})
    words = f"0.3 {tmp_path}/a 0.7 {tmp_path}/b"
    wanted = samples_of(words, IndexCache([tmp_path / "memory"]))
    ends = [missing_eos(open_tokens(str(tmp_path / name)), 7) for name in "ab"]
    request.getfixturevalue("large")
    cache = IndexCache([tmp_path / "disk"])
    for _ in range(2):  # built, then from the cache
        assert samples_of(words, cache) == wanted
    opened = [open_tokens(str(tmp_path / name), cache) for name in "ab"]
    assert not any(isinstance(part, np.ndarray) for tokens in opened for part in (tokens.sizes, tokens.starts))
    assert [missing_eos(tokens, 7) for tokens in opened] == ends


def test_a_large_index_is_read_whole_once(tmp_path, large, monkeypatch):
    """Until it changes: then it is read again, and what is wrong with it is named."""
    write_tokens(tmp_path / "a", documents=400)
    cache, read = IndexCache([tmp_path / "cache"]), []
    settings = {"num_samples": 50, "seq_length": 16, "seed": 1, "cache": cache}
    build_split(open_corpora(str(tmp_path / "a"), "1,0,0", cache=cache), "train", **settings)
    pread = os.pread
    monkeypatch.setattr(os, "pread", lambda file, size, place: read.append(size) or pread(file, size, place))
    corpora = open_corpora(str(tmp_path / "a"), "1,0,0", cache=cache)
    dataset = build_split(corpora, "train", **settings)
    assert corpora[0].token_count("train") == len(corpora[0].tokens.tokens) and sum(read) < 200
    dataset[0]
    assert sum(read) < 600 < (tmp_path / "a.idx").stat().st_size
    content = bytearray((tmp_path / "a.idx").read_bytes())
    content[34 + 4 * 400 + 8 * 7] += 2  # a byte pointer
    (tmp_path / "a.idx").write_bytes(content)
    os.utime(tmp_path / "a.idx", ns=(0, 0))
    with pytest.raises(GptlmError, match="the byte pointers are not the running sum"):
        open_corpora(str(tmp_path / "a"), "1,0,0", cache=cache)


@pytest.mark.parametrize("name", ["samples", "shuffle", "documents"])
def test_damage_of_a_large_index_is_noticed_when_it_is_read(tmp_path, large, name):
    """And `verify`, as of `gptlm data index`, finds all of it and builds the index again."""
    write_tokens(tmp_path / "a", documents=50)
    corpora = open_corpora(str(tmp_path / "a"), "1,0,0")

    def built(verify=False):
        cache = IndexCache([tmp_path / "cache"], verify=verify)
        return build_split(corpora, "train", num_samples=50, seq_length=16, seed=1, cache=cache)

    good = [built()[i].tolist() for i in range(len(built()))]
    (file,) = (tmp_path / "cache").glob(f"*_{name}.npy")
    array = np.load(file)
    array[...] = array.max() + 1000
    np.save(file, array)
    with pytest.raises(GptlmError, match=r"the sample index in the cache is damaged.*gptlm data index"):
        [built()[i] for i in range(len(good))]
    assert [built(verify=True)[i].tolist() for i in range(len(good))] == good


def measured(folder, corpora, documents, *words):
    command = [sys.executable, "benchmarks/index.py", folder, "--corpora", corpora, "--documents", documents, *words]
    lines = subprocess.run(list(map(str, command)), cwd=ROOT, check=True, capture_output=True, text=True).stdout
    return {name: json.loads(rest) for name, rest in (line.split(" ", 1) for line in lines.splitlines())}


def test_memory_for_ten_million_documents(tmp_path):
    """4 bytes for each document of a corpus, and some 15 MB; nothing for those who read."""
    found = measured(tmp_path, 2, 5_000_000)
    assert found["build"]["documents"] == 10_000_000 and found["build"]["samples"] > 4_900_000
    assert found["build"]["peak_mib"] < 80 and found["read"]["peak_mib"] < 20


@pytest.mark.slow  # 10 GB on disk, some 4 minutes
@pytest.mark.parametrize("data_order", ["paddlenlp", "fleetx"])
def test_memory_for_a_trillion_tokens(tmp_path, data_order):
    found = measured(tmp_path, 100, 10_000_000, "--data_order", data_order)
    assert found["build"]["documents"] == 10**9 and found["build"]["tokens"] > 10**12
    assert found["build"]["peak_mib"] < 150 and found["read"]["peak_mib"] < 100


def test_a_run_builds_a_large_index_again_whose_values_were_exchanged(tmp_path, large, tiny_model):
    write_tokens(tmp_path / "data" / "a", documents=50)
    words = ["--model_name_or_path", tiny_model, "--input_dir", tmp_path / "data", "--output_dir", tmp_path / "out"]
    more = "--max_seq_length 16 --max_steps 9 --per_device_train_batch_size 2 --split 90,10,0 --do_train --do_eval 0"
    run = parse_pretrain([*map(str, words), *more.split(), "--data_cache", str(tmp_path / "cache")], {})

    def order():
        dataset = build_datasets(run, open_corpora(str(tmp_path / "data"), "90,10,0"))["train"]
        return [dataset[i].tolist() for i in range(len(dataset))]

    good = order()
    (file,) = (tmp_path / "cache").rglob("*_shuffle.npy")
    array = np.load(file)
    array[:2] = array[1::-1]
    np.save(file, array)
    assert order() == good
