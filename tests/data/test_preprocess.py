"""Encoding: ids, end-of-text, order, and equality with the original tools' files."""

import itertools
import json
import os
import signal
import subprocess
import sys
import time
from hashlib import sha256
from pathlib import Path

import numpy as np
import psutil
import pytest
from tokenizers import Tokenizer, models, pre_tokenizers

from gptlm.data.documents import read_batches
from gptlm.data.encoder import TextEncoder
from gptlm.data.indexed import open_tokens
from gptlm.data.preprocess import EncodeSettings, write_corpus
from gptlm.data.sentences import ENGLISH_RULES, LINES, available_rules, sentence_splitter
from gptlm.data.text_files import list_files
from gptlm.data.writer import IndexedTokensWriter
from gptlm.errors import GptlmError
from gptlm.model.tokenizer import EOS, train_tokenizer
from tests.conftest import ROOT, run_script, write_sentence_data
from tests.golden import recorded

TEXTS = [f"document {i} says {'word ' * (i % 7)}" for i in range(300)] + ["", "   ", f"before {EOS} after"]


@pytest.fixture(scope="module")
def tokenizer():
    return train_tokenizer(TEXTS, 300)


@pytest.fixture
def corpus(tmp_path, tokenizer):
    (tmp_path / "t.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in TEXTS))
    tokenizer.backend_tokenizer.save(str(tmp_path / "tok.json"))

    def encode(name, *, workers=1, eos=None, strip=True, allow=False, limit=None, on_part=print, **more):
        settings = EncodeSettings(str(tmp_path / "tok.json"), ("text",), eos, strip, allow, **more)
        writer = IndexedTokensWriter(str(tmp_path / name), len(tokenizer))
        batches = read_batches(list_files(str(tmp_path / "t.jsonl")))
        progress = write_corpus(batches, settings, [writer], workers=workers, max_documents=limit, on_part=on_part)
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


@pytest.mark.parametrize("backend", ["tokenizers", "gigatoken"])
def test_a_text_that_ends_in_end_of_text_gets_no_second_one(corpus, tmp_path, tokenizer, backend):
    texts = [f"one{EOS}", f"{EOS}two", EOS, f"three{EOS}{EOS}", f"four{EOS} "]
    (tmp_path / "t.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    _, tokens = corpus("a", eos=0, strip=False, allow=True, backend=backend)
    ids = [tokenizer(text)["input_ids"] for text in texts]
    assert [list(map(int, tokens.get(i))) for i in range(5)] == [ids[0], ids[1] + [0], ids[2], ids[3], ids[4] + [0]]
    _, tokens = corpus("b", eos=0, strip=False, allow=False, backend=backend)
    assert [(tokens.get(i) == 0).sum() for i in range(5)] == [1] * 5  # spelled out, and one end each


def test_white_space_is_kept_in_megatron_s_way(corpus, tokenizer):
    _, tokens = corpus("a", strip=False)
    assert len(tokens) == 302  # only the empty text is left out
    assert tokenizer.decode(tokens.get(300)) == "   "


def test_two_workers_write_the_same_bytes(corpus, tmp_path):
    corpus("one", eos=0)
    corpus("two", eos=0, workers=2)
    for suffix in (".bin", ".idx"):
        assert (tmp_path / f"one{suffix}").read_bytes() == (tmp_path / f"two{suffix}").read_bytes()


def test_many_small_files(corpus, tmp_path):
    """They travel to the workers together; nothing is lost and the order stays."""
    (tmp_path / "t.jsonl").unlink()
    for i in range(700):
        (tmp_path / f"{i:03d}.jsonl").write_text(json.dumps({"text": f"document {i}"}) + "\n")
    settings = EncodeSettings(str(tmp_path / "tok.json"), ("text",), None, True, False)
    found = []
    for workers in (1, 2):
        writer = IndexedTokensWriter(str(tmp_path / f"w{workers}"), 300)
        write_corpus(read_batches(list_files(str(tmp_path / "*.jsonl"))), settings, [writer], workers=workers)
        writer.finish({})
        found.append((tmp_path / f"w{workers}.bin").read_bytes())
        assert len(open_tokens(str(tmp_path / f"w{workers}"))) == 700
    assert found[0] == found[1]


def test_max_documents(corpus):
    progress, tokens = corpus("a", limit=5)
    assert (progress.documents, len(tokens)) == (5, 5)


def test_an_error_in_a_worker_keeps_file_and_line(corpus, tmp_path):
    (tmp_path / "t.jsonl").write_text('{"text": "a"}\n{"text": \n')
    for workers in (1, 2):
        with pytest.raises(GptlmError, match="t.jsonl, line 2"):
            corpus("a", workers=workers)


def sums(prefix):
    return {name: sha256(Path(f"{prefix}.{name}").read_bytes()).hexdigest() for name in ("bin", "idx")}


FORMATS = [
    ("old_eod", 50256, "mmap"),
    ("old_noeod", None, "mmap"),
    ("old_lazy", 50256, "lazy"),
    ("old_lazy", 50256, "cached"),
]


@pytest.mark.parametrize(("name", "eos", "layout"), FORMATS)
def test_bytes_equal_megatron_s_own_files(tmp_path, name, eos, layout):
    """Recorded from Megatron-DeepSpeed b4d4a0e. The texts name the ids, so GPT-2's vocabulary is not needed."""
    golden = recorded("megatron/preprocess.json")
    texts = [" ".join(f"t{number}" for number in ids) for ids in golden["documents"]]
    (tmp_path / "corpus.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    words = Tokenizer(models.WordLevel({f"t{number}": number for number in range(50257)}, unk_token="t0"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    words.save(str(tmp_path / "tok.json"))
    writer = IndexedTokensWriter(str(tmp_path / "a"), 50257, layout)
    settings = EncodeSettings(str(tmp_path / "tok.json"), ("text",), eos, False, False)
    write_corpus(read_batches([tmp_path / "corpus.jsonl"]), settings, [writer], workers=1)
    writer.finish({})
    assert sums(tmp_path / "a") == golden["files"][name]


@pytest.mark.parametrize("name", ["a", "c"])
def test_bytes_equal_the_corpora_that_megatron_read(golden_corpora, name):
    golden = recorded("megatron/orders.json")["corpora"][name]
    assert sums(golden_corpora / "megatron" / name) == {"bin": golden["bin"], "idx": golden["idx"]}


def test_memory_is_flat(tmp_path, tokenizer):
    """60,000 documents in flight would be 30 MB and more; the writer keeps 12 bytes of each."""
    import tracemalloc

    tokenizer.backend_tokenizer.save(str(tmp_path / "tok.json"))
    (tmp_path / "t.jsonl").write_text('{"text": "document says word"}\n' * 60_000)
    writer = IndexedTokensWriter(str(tmp_path / "a"), len(tokenizer))
    settings = EncodeSettings(str(tmp_path / "tok.json"), ("text",), 0, True, False)
    tracemalloc.start()
    write_corpus(read_batches([tmp_path / "t.jsonl"]), settings, [writer], workers=1)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    writer.abandon()
    assert len(writer.sizes) == 60_000 and peak < 12e6


@pytest.mark.parametrize("allow", [False, True])
@pytest.mark.parametrize("eos", [None, 0])
def test_gigatoken_writes_the_same_bytes(corpus, tmp_path, allow, eos):
    corpus("slow", eos=eos, allow=allow)
    corpus("fast", eos=eos, allow=allow, backend="gigatoken", workers=2)
    for suffix in (".bin", ".idx"):
        assert (tmp_path / f"slow{suffix}").read_bytes() == (tmp_path / f"fast{suffix}").read_bytes()


def odd_texts():
    """Random characters of every plane, contractions, white space of all kinds, digits of other scripts."""
    rng = np.random.RandomState(0)
    pieces = [
        " ",
        "  ",
        "\n",
        "\r\n",
        "\t",
        "'s",
        "'LL",
        "word",
        "1234",
        "٣",
        "é",
        "e\u0301",
        EOS,
        "...",
        "中文",
        "\u3000",
    ]
    texts = ["".join(rng.choice(pieces, rng.randint(40))) for _ in range(2000)]
    characters = np.delete(np.arange(0x110000), np.arange(0xD800, 0xE000))
    texts += ["".join(map(chr, rng.choice(characters, rng.randint(40)))) for _ in range(2000)]
    return texts


def test_gigatoken_gives_the_same_ids_on_odd_text(tmp_path):
    texts = odd_texts()
    tokenizer = train_tokenizer(texts[:2000], 600)  # merges of the common characters, as GPT-2's
    tokenizer.backend_tokenizer.save(str(tmp_path / "tok.json"))
    assert_gigatoken_agrees(tmp_path / "tok.json", texts)


def assert_gigatoken_agrees(file, texts):
    slow, fast = (TextEncoder(str(file), backend) for backend in ("tokenizers", "gigatoken"))
    for mine, wanted in zip(fast(texts), slow(texts)):
        assert mine.dtype == wanted.dtype and np.array_equal(mine, wanted)


def test_other_ids_are_noticed(tokenizer, tmp_path):
    tokenizer.backend_tokenizer.save(str(tmp_path / "tok.json"))
    encoder = TextEncoder(str(tmp_path / "tok.json"), "gigatoken")
    encoder.tokenizer = train_tokenizer(["something else altogether"] * 9, 270).backend_tokenizer
    with pytest.raises(GptlmError, match="other ids"):
        encoder(["word word"])


PROSE = (
    "Dr. Smith went home. He was tired, i.e. he slept!  Was it late? Yes.\n\nA new paragraph begins. It ends here.",
    "One sentence only",
    "   ",
    "Mr. Brown met Dr. Smith at 5 p.m. in St. Louis. They talked.\n",
)


@pytest.fixture
def punkt(tmp_path, monkeypatch):
    import nltk

    monkeypatch.setattr(nltk.data, "path", [str(tmp_path / "nltk_data")])  # nltk writes and reads nowhere else
    return write_sentence_data(tmp_path / "nltk_data", "\n".join(PROSE) * 50)


@pytest.mark.parametrize("keep_newlines", [False, True])
@pytest.mark.parametrize("level", ["document", "sentence"])
@pytest.mark.parametrize("language", ["english", "lines"])
def test_sentences(corpus, tmp_path, tokenizer, punkt, keep_newlines, level, language):
    """Each sentence is encoded by itself, end-of-text follows a document's last one, documents keep their marks."""
    (tmp_path / "t.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in PROSE))
    progress, tokens = corpus("s", eos=0, strip=False, sentences=language, keep_newlines=keep_newlines, level=level)
    documents = []
    for text in PROSE:
        cut = text.splitlines(keep_newlines) if language == "lines" else punkt.tokenize(text)
        if language == "english" and keep_newlines and cut:
            begins = [0, *(start for start, _ in list(punkt.span_tokenize(text))[1:]), len(text)]
            cut = [text[a:b] for a, b in itertools.pairwise(begins)]
        encoded = [ids for ids in (tokenizer(part)["input_ids"] for part in cut) if ids]
        if encoded:
            encoded[-1].append(0)
            documents.append(encoded)
    assert progress.documents == 4 and progress.empty == 4 - len(documents)
    if level == "document":
        assert [tokens.get(i).tolist() for i in range(len(tokens))] == [
            list(itertools.chain.from_iterable(d)) for d in documents
        ]
        assert tokens.document_starts.tolist() == list(range(len(documents) + 1))
    else:
        assert [tokens.get(i).tolist() for i in range(len(tokens))] == [s for d in documents for s in d]
        assert tokens.document_starts.tolist() == np.cumsum([0, *map(len, documents)]).tolist()
    if keep_newlines and level == "document":
        assert tokenizer.decode(tokens.get(0)[:-1]) == PROSE[0]


def test_missing_sentence_data_says_where_to_get_it(tmp_path, monkeypatch):
    import nltk

    monkeypatch.setattr(nltk.data, "path", [str(tmp_path)])
    assert available_rules("english") == ENGLISH_RULES and available_rules(LINES) == LINES
    with pytest.raises(GptlmError, match="no data for 'german'; python -m nltk.downloader punkt_tab"):
        available_rules("german")
    write_sentence_data(tmp_path, "Dr. Smith came. He left.")
    assert available_rules("english") == "english"


@pytest.mark.parametrize(
    "sentences",
    [
        ["Dr. Smith went home.", "He was tired, i.e. he slept!", "Was it late?", "Yes."],
        ["Mr. Brown met Dr. Smith at 5 p.m. in St. Louis.", "They talked."],
        ["He lives in the U.S.", "The U.S. Army left at 5 p.m.", "It was J. R. R. Tolkien (born 3 Jan. 1892)."],
        ["Smith & Co. rose 3.5 percent.", "In 1900, it fell... and rose again.", "Yes or no.", "That is all"],
        ['She said "Go."', "He went."],
    ],
)
@pytest.mark.parametrize("between", [" ", "\n\n"])
def test_english_without_data(sentences, between):
    """Sentences as a person marks them."""
    text = between.join(sentences)
    assert sentence_splitter(ENGLISH_RULES, False)(text) == sentences
    assert "".join(sentence_splitter(ENGLISH_RULES, True)(f" {text}\n")) == f" {text}\n"


@pytest.mark.parametrize("workers", [1, 2])
def test_a_document_of_40_megabytes(corpus, tmp_path, tokenizer, workers):
    """Its progress is told every 4 MiB."""
    (tmp_path / "t.jsonl").write_text(json.dumps({"text": "word document says " * 2_100_000}) + "\n")
    parts = []
    progress, tokens = corpus("long", backend="gigatoken", workers=workers, on_part=parts.append)
    assert len(parts) == 9 and {part.size for part in parts} == {progress.read}
    assert all(number <= part.done / (1 << 22) < number + 0.2 for number, part in enumerate(parts, start=1))
    once = tokenizer("word document says word document says")["input_ids"]
    again = len(once) - len(tokenizer("word document says")["input_ids"])
    assert progress.read > 39e6 and len(tokens) == 1
    assert len(tokens.get(0)) == len(once) + again * (2_100_000 - 2)
    assert tokens.get(0)[: len(once)].tolist() == once


@pytest.mark.parametrize("signals", [[signal.SIGINT], [signal.SIGINT, signal.SIGINT], [signal.SIGTERM]])
def test_an_interrupted_run_cleans_up(tmp_path, tokenizer, signals):
    """Ctrl-C (to the whole group, as terminals do), twice, and what batch systems send: gone at once, nothing left."""
    tokenizer.save_pretrained(tmp_path / "tok")
    (tmp_path / "t.jsonl").write_text('{"text": "document says word"}\n' * 400_000)
    words = ["--input_path", "t.jsonl", "--model_name_or_path", "tok", "--workers", "2", "--output_prefix", "d/c"]
    (tmp_path / "tmp").mkdir()
    process = subprocess.Popen(
        [sys.executable, str(ROOT / "scripts" / "preprocess_data.py"), *words],
        cwd=tmp_path, env={**os.environ, "TMPDIR": str(tmp_path / "tmp")}, stderr=subprocess.PIPE,
        stdout=subprocess.DEVNULL, text=True, start_new_session=True,
    )  # fmt: skip
    temporary = tmp_path / "d" / "c.bin.incomplete"
    deadline = time.monotonic() + 60
    while not (temporary.exists() and temporary.stat().st_size) and time.monotonic() < deadline:
        time.sleep(0.01)
    family = psutil.Process(process.pid).children(recursive=True)
    for number in signals:
        os.killpg(process.pid, number) if number == signal.SIGINT else process.send_signal(number)
        time.sleep(0.2)
    try:
        assert process.wait(timeout=20) != 0
    finally:
        process.kill()
    assert "Traceback" not in process.stderr.read()
    assert not psutil.wait_procs(family, timeout=20)[1]
    assert not (tmp_path / "d").exists() and not list((tmp_path / "tmp").glob("gptlm-*"))


def test_workers_end_with_their_parent(tmp_path, tokenizer):
    """A killed run leaves no process and nothing that looks like token files; the same command then does it all."""
    tokenizer.save_pretrained(tmp_path / "tok")
    (tmp_path / "t.jsonl").write_text('{"text": "document says word"}\n' * 100_000)
    words = ["--input_path", tmp_path / "t.jsonl", "--model_name_or_path", tmp_path / "tok", "--workers", 2]
    words += ["--output_prefix", tmp_path / "d" / "c"]
    command = [sys.executable, str(ROOT / "scripts" / "preprocess_data.py"), *map(str, words)]
    process = subprocess.Popen(command, stderr=subprocess.DEVNULL, stdout=subprocess.DEVNULL)
    temporary = tmp_path / "d" / "c.bin.incomplete"
    deadline = time.monotonic() + 60
    while not (temporary.exists() and temporary.stat().st_size) and time.monotonic() < deadline:
        time.sleep(0.01)
    family = psutil.Process(process.pid).children(recursive=True)
    process.kill()
    assert process.wait() < 0 and len(family) >= 2
    _gone, alive = psutil.wait_procs(family, timeout=20)
    assert not alive
    assert sorted(path.name for path in (tmp_path / "d").iterdir()) == [".gptlm-files", "c.bin.incomplete"]
    with pytest.raises(GptlmError, match="does not exist|no token files|not found"):
        open_tokens(str(tmp_path / "d" / "c"))
    result = run_script("preprocess_data", *words)
    assert result.returncode == 0, result.stderr
    assert len(open_tokens(str(tmp_path / "d" / "c"))) == 100_000
    assert not list((tmp_path / "d").glob("*.incomplete"))
