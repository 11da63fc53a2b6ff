"""Ids are those of the file, in every process; a file that becomes shorter is named and ends no process."""

import os
import pickle
import re
import shutil

import numpy as np
import pytest
from torch.utils.data import DataLoader

from gptlm.data.blocks import BlocksWithDocuments, UnreadBlocks, build_split
from gptlm.data.cache import IndexCache
from gptlm.data.corpora import open_corpora
from gptlm.data.indexed import open_tokens
from gptlm.data.token_file import TokenFile
from gptlm.data.writer import IndexedTokensWriter
from gptlm.errors import GptlmError, from_worker

SHORTER = r"c(\.bin|_ids\.npy) has become shorter while it was read: it has 16 bytes"


def test_ids_are_those_of_the_file(tmp_path):
    ids = np.arange(100, dtype=np.uint16)
    (tmp_path / "x").write_bytes(b"head" + ids.tobytes())
    found = TokenFile(tmp_path / "x", ids.dtype, 4, len(ids))
    for places in (slice(3, 9), slice(None), slice(90, 200), slice(7, 3), slice(-5, None), slice(1, 20, 4)):
        assert np.array_equal(found[places], ids[places])
    assert np.array_equal(found[np.array([7, 99, 0])], ids[[7, 99, 0]])
    assert np.array_equal(found.part(10, 20), ids[10:30]) and len(found.part(10, 20)) == 20
    os.rename(tmp_path / "x", tmp_path / "y")
    assert np.array_equal(found, ids)  # a file that is replaced is read to its end
    os.rename(tmp_path / "y", tmp_path / "x")
    assert np.array_equal(pickle.loads(pickle.dumps(found)), ids)


@pytest.mark.parametrize("lengths", [[5000], [3] * 1000 + [2000]])
def test_a_sample_reads_its_tokens_once_and_no_others(tmp_path, monkeypatch, lengths):
    """Also where one document is the whole corpus, and where documents are masked."""
    writer = IndexedTokensWriter(str(tmp_path / "c"), 500)
    writer.add(np.arange(5000) % 500, lengths)
    writer.finish({})
    corpora = open_corpora(str(tmp_path / "c"), "1,0,0")
    dataset = build_split(corpora, "train", num_samples=20, seq_length=16, seed=1, cache=IndexCache([]))
    pread, read = os.pread, []
    monkeypatch.setattr(os, "pread", lambda file, size, place: read.append(size) or pread(file, size, place))
    with_documents = BlocksWithDocuments(dataset)
    for i in range(20):
        read.clear()
        block, _ = with_documents[i]
        assert sum(read) == 17 * 2 and len(block) == 17
    read.clear()
    assert len(BlocksWithDocuments(UnreadBlocks(dataset))[3][0]) == 17 and read == []


@pytest.mark.parametrize("layout", ["mmap", "npy"])
@pytest.mark.parametrize("workers", [0, 1])
def test_files_that_become_shorter_are_named(corpus_folder, tmp_path, layout, workers):
    shutil.copytree(corpus_folder / layout, tmp_path, dirs_exist_ok=True)
    tokens = open_tokens(str(tmp_path / "c"))
    before = tokens.sizes.tolist(), tokens.document_starts.tolist()
    for file in tmp_path.glob("c[._]*"):  # runs of other tests keep a cache beside them
        os.truncate(file, 16)
    assert (tokens.sizes.tolist(), tokens.document_starts.tolist()) == before  # the index is in memory
    loader = DataLoader([len(tokens) - 1], collate_fn=lambda rows: tokens.get(rows[0]), num_workers=workers)
    with pytest.raises(GptlmError) as caught:
        list(loader)
    assert re.search(SHORTER, from_worker(str(caught.value)))


@pytest.mark.parametrize("rows", [10_000, 100_000])  # read whole, and where it is needed
def test_a_stored_order_is_no_mapping(tmp_path, rows):
    cache, what, order = IndexCache([tmp_path]), {"x": 1}, np.arange(2 * rows).reshape(rows, 2)
    assert np.array_equal(cache.load_or_build(what, lambda: {"order": order})["order"], order)
    loaded = cache.load_or_build(what, lambda: {})["order"]
    assert np.array_equal(loaded[7:9], order[7:9]) and loaded[-1].tolist() == order[-1].tolist()
    assert np.array_equal(pickle.loads(pickle.dumps(loaded)), order)
    for file in tmp_path.glob("*.npy"):
        os.truncate(file, 16)
    if isinstance(loaded, np.ndarray):
        assert np.array_equal(loaded, order)
        return
    with pytest.raises(GptlmError, match=r"_order\.npy has become shorter while it was read: it has 16 bytes"):
        loaded[5]
