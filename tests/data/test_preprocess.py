"""Encoding: ids, end-of-text, order, and equality with the original tools' files."""

import json

import numpy as np
import pytest

from gptlm.data.corpus import list_files, read_batches
from gptlm.data.indexed import open_tokens
from gptlm.data.preprocess import EncodeSettings, write_corpus
from gptlm.data.writer import IndexedTokensWriter
from gptlm.errors import GptlmError
from gptlm.model.tokenizer import EOS, load_gpt2_files, train_tokenizer

TEXTS = [f"document {i} says {'word ' * (i % 7)}" for i in range(300)] + ["", "   ", f"before {EOS} after"]


@pytest.fixture(scope="module")
def tokenizer():
    return train_tokenizer(TEXTS, 300)


@pytest.fixture
def corpus(tmp_path, tokenizer):
    (tmp_path / "t.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in TEXTS))
    tokenizer.backend_tokenizer.save(str(tmp_path / "tok.json"))

    def encode(name, *, workers=1, eos=None, strip=True, allow=False, limit=None):
        settings = EncodeSettings(str(tmp_path / "tok.json"), ("text",), eos, strip, allow)
        writer = IndexedTokensWriter(str(tmp_path / name), len(tokenizer))
        batches = read_batches(list_files(str(tmp_path / "t.jsonl")))
        progress = write_corpus(batches, settings, [writer], workers=workers, max_documents=limit)
        writer.finish({})
        return progress, open_tokens(str(tmp_path / name))

    return encode


def test_ids_are_the_tokenizer_s_and_empty_documents_are_left_out(corpus, tokenizer):
    progress, tokens = corpus("a", eos=0)
    assert (progress.documents, progress.empty, len(tokens)) == (303, 2, 301)
    for i in (0, 150, 299):
        want = tokenizer(TEXTS[i].strip())["input_ids"] + [0]
        assert tokens.get(i).tolist() == want


def test_a_text_cannot_write_an_end_of_text_id(corpus, tokenizer):
    for allow, count in ((False, 0), (True, 1)):
        _, tokens = corpus(f"a{allow}", allow=allow)
        last = tokens.get(len(tokens) - 1)
        assert (last == tokenizer.eos_token_id).sum() == count
        assert tokenizer.decode(last) == f"before {EOS} after"


def test_white_space_is_kept_in_megatron_s_way(corpus, tokenizer):
    _, tokens = corpus("a", strip=False)
    assert len(tokens) == 302  # only the empty text is left out
    assert tokenizer.decode(tokens.get(300)) == "   "


def test_two_workers_write_the_same_bytes(corpus, tmp_path):
    corpus("one", eos=0)
    corpus("two", eos=0, workers=2)
    for suffix in (".bin", ".idx"):
        assert (tmp_path / f"one{suffix}").read_bytes() == (tmp_path / f"two{suffix}").read_bytes()


def test_max_documents(corpus):
    progress, tokens = corpus("a", limit=5)
    assert (progress.documents, len(tokens)) == (5, 5)


def test_an_error_in_a_worker_keeps_file_and_line(corpus, tmp_path):
    (tmp_path / "t.jsonl").write_text('{"text": "a"}\n{"text": \n')
    for workers in (1, 2):
        with pytest.raises(GptlmError, match="t.jsonl, line 2"):
            corpus("a", workers=workers)


@pytest.mark.parametrize(
    ("name", "eos", "layout"),
    [
        ("old_eod", 50256, "mmap"),
        ("old_noeod", None, "mmap"),
        ("old_lazy", 50256, "lazy"),
        ("old_lazy", 50256, "cached"),
    ],
)
def test_bytes_equal_megatron_s_own_files(shared, tmp_path, name, eos, layout):
    vocabulary = shared / "data" / "gpt2-tokenizer"
    tokenizer = load_gpt2_files(str(vocabulary / "vocab.json"), str(vocabulary / "merges.txt"))
    tokenizer.backend_tokenizer.save(str(tmp_path / "tok.json"))
    folder = shared / "cases" / "megatron" / "preprocess"
    writer = IndexedTokensWriter(str(tmp_path / "a"), len(tokenizer), layout)
    settings = EncodeSettings(str(tmp_path / "tok.json"), ("text",), eos, False, False)
    write_corpus(read_batches([folder / "corpus.jsonl"]), settings, [writer], workers=1)
    writer.finish({})
    for suffix in (".bin", ".idx"):
        assert (tmp_path / f"a{suffix}").read_bytes() == (folder / f"{name}_text_document{suffix}").read_bytes()


def test_memory_is_flat(tmp_path, tokenizer):
    """200,000 documents in flight would be 100 MB and more; the writer keeps 12 bytes of each."""
    import tracemalloc

    tokenizer.backend_tokenizer.save(str(tmp_path / "tok.json"))
    (tmp_path / "t.jsonl").write_text('{"text": "document says word"}\n' * 200_000)
    writer = IndexedTokensWriter(str(tmp_path / "a"), len(tokenizer))
    settings = EncodeSettings(str(tmp_path / "tok.json"), ("text",), 0, True, False)
    tracemalloc.start()
    write_corpus(read_batches([tmp_path / "t.jsonl"]), settings, [writer], workers=1)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    writer.abandon()
    assert len(writer.sizes) == 200_000 and np.prod(peak) < 30e6
