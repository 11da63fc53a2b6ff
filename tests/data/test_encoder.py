"""Long texts are encoded in pieces: the same ids, little memory."""

import logging
import subprocess
import sys
from itertools import chain

import numpy as np
import pytest
from tokenizers import AddedToken, Regex, Tokenizer, models, normalizers, pre_tokenizers, trainers

from gptlm.data import encoder
from gptlm.data.encoder import TextEncoder
from gptlm.model.tokenizer import EOS, train_tokenizer
from gptlm.recipes import evaluate
from tests.conftest import ROOT

PIECES = [
    " ", "  ", "   \n", "\n", "\n\n", "\r\n", "\t", "\x0b", "\x1c", "\x85", "\xa0", "\u180e", "\u2003", "\u200b",
    "\u3000", "'s", "'LL", "'ve", "' s", "word", "Wort", "1234", "3.14", "٣", "½", "é", "e\u0301", "\u0301", "...",
    "!?", ",", "。", "，", "中文", "日本語", "😀", "👩\u200d👩", EOS, f" {EOS} ", "<tag>", " <pad> ", "a", "Z.", "9:30",
    "\ufeff",
]  # fmt: skip


def texts(count, longest, seed=0):
    rng = np.random.RandomState(seed)
    # letters of later planes are younger than Unicode 14, which gigatoken and tokenizers read differently
    characters = np.delete(np.arange(1, 0x2EBF0), np.arange(0xD7FF, 0xDFFF))
    for number in range(count):
        words = rng.choice(PIECES, rng.randint(longest)).tolist()
        if number % 4 == 0:
            words += map(chr, rng.choice(characters, rng.randint(longest)).tolist())
            rng.shuffle(words)
        yield "".join(words)


@pytest.fixture
def small_pieces(monkeypatch):
    monkeypatch.setattr(encoder, "PIECE", 5)
    monkeypatch.setattr(encoder, "SEAM", 24)


def assert_same(file, backend="tokenizers", allow=False, least=0.0, count=1500):
    """Ids of pieces are those of the whole text. `least`: pieces per text, on average."""
    whole = Tokenizer.from_file(file)
    whole.encode_special_tokens = not allow
    cut = TextEncoder(file, backend, allow)
    many = list(texts(count, 60))
    ids, lengths = cut(many)
    wanted = [encoding.ids for encoding in whole.encode_batch(many, add_special_tokens=False)]
    assert lengths.tolist() == list(map(len, wanted)) and ids.tolist() == list(chain.from_iterable(wanted))
    pieces = [list(cut.cutter.pieces(text)) for text in many]
    assert ["".join(piece) for piece in pieces] == many
    assert sum(map(len, pieces)) >= least * len(many)


@pytest.mark.parametrize("allow", [False, True])
@pytest.mark.parametrize("backend", ["tokenizers", "gigatoken"])
def test_ids_of_gpt2_s_kind_do_not_change(tmp_path, small_pieces, backend, allow):
    """A byte-level BPE with GPT-2's rule for words, of its own vocabulary."""
    train_tokenizer(list(texts(300, 60, seed=1)), 900).backend_tokenizer.save(str(tmp_path / "t.json"))
    assert_same(str(tmp_path / "t.json"), backend, allow, least=4, count=300)


def test_added_tokens_stay_whole(tmp_path, small_pieces):
    """With blanks inside, that take the white space beside them, that count as single words only."""
    tokenizer = train_tokenizer(list(texts(300, 60)), 400).backend_tokenizer
    tokenizer.add_tokens([AddedToken("word 1234", normalized=False), AddedToken("<tag>", lstrip=True, rstrip=True)])
    tokenizer.add_tokens([AddedToken("a", single_word=True), AddedToken("e\u0301 "), AddedToken("Z.", rstrip=True)])
    tokenizer.add_special_tokens([AddedToken("<pad>", lstrip=True), AddedToken("\n\n")])
    tokenizer.save(str(tmp_path / "t.json"))
    for allow in (False, True):
        assert_same(str(tmp_path / "t.json"), allow=allow, least=2)


CL100K = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|"
    r"\s*[\r\n]+|\s+(?!\S)|\s+"
)


def split_by(pattern):
    words = pre_tokenizers.Split(Regex(pattern), "isolated")
    return pre_tokenizers.Sequence([words, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])


@pytest.mark.parametrize(
    ("pre_tokenizer", "normalizer", "least"),
    [
        (pre_tokenizers.ByteLevel(add_prefix_space=True), None, 1.5),
        (split_by(CL100K), normalizers.NFC(), 1.5),
        (pre_tokenizers.BertPreTokenizer(), normalizers.BertNormalizer(lowercase=True), 1.5),
        (pre_tokenizers.Metaspace(), normalizers.NFKC(), 1.5),
        (pre_tokenizers.ByteLevel(add_prefix_space=False), normalizers.Prepend("x"), 0),  # a piece begins otherwise
        (pre_tokenizers.ByteLevel(add_prefix_space=False), normalizers.Strip(), 0),
        (pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False), None, 0),  # one word
        (None, normalizers.Replace(" ", "_"), 0),
    ],
)
def test_ids_of_other_tokenizers_do_not_change(tmp_path, small_pieces, pre_tokenizer, normalizer, least):
    tokenizer = Tokenizer(models.BPE(unk_token="?", ignore_merges=True))
    if pre_tokenizer is not None:
        tokenizer.pre_tokenizer = pre_tokenizer
    if normalizer is not None:
        tokenizer.normalizer = normalizer
    tokenizer.train_from_iterator(texts(300, 60, seed=1), trainers.BpeTrainer(vocab_size=900, special_tokens=["?"]))
    tokenizer.save(str(tmp_path / "t.json"))
    assert_same(str(tmp_path / "t.json"), least=least, count=300)


def test_a_text_without_a_place_to_cut_is_named_once(tmp_path, small_pieces, caplog, monkeypatch):
    monkeypatch.setattr(logging.getLogger("gptlm"), "propagate", True)
    tokenizer = train_tokenizer(["abc"] * 9, 260)
    tokenizer.backend_tokenizer.save(str(tmp_path / "t.json"))
    encode = TextEncoder(str(tmp_path / "t.json"))
    for _ in range(2):
        ids, _ = encode(["abc def." + "x" * 40])
        assert ids.tolist() == tokenizer("abc def." + "x" * 40)["input_ids"]
    assert caplog.text.count("no place was found where a cut is sure to keep its ids") == 1


MEASURE = """
import resource, sys
from gptlm.data.encoder import TextEncoder
encode = TextEncoder(sys.argv[1])
encode(["warm up"])
text = "So far, so good: the cat isn't on the mat.\\n" * 100_000
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
ids, lengths = encode([text])
print((resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024, len(ids), lengths[0])
"""


def test_a_long_document_takes_little_memory(tmp_path):
    """4.4 million characters: in one piece the results of `tokenizers` take more than 500 MB."""
    tokenizer = train_tokenizer(["So far, so good: the cat isn't on the mat.\n"] * 9, 300)
    tokenizer.backend_tokenizer.save(str(tmp_path / "t.json"))
    result = subprocess.run(
        [sys.executable, "-c", MEASURE, str(tmp_path / "t.json")], capture_output=True, text=True, cwd=ROOT, timeout=300
    )
    assert result.returncode == 0, result.stderr
    peak, ids, length = map(float, result.stdout.split())
    assert peak < 150
    assert ids == length == 100_000 * len(tokenizer("So far, so good: the cat isn't on the mat.\n")["input_ids"])


def test_a_tokenizer_trained_on_pieces_is_the_same(small_pieces):
    many = list(texts(300, 60, seed=2))
    pieces = list(encoder.in_pieces(many))
    assert len(pieces) > 3 * len(many) and "".join(pieces) == "".join(many)
    whole, cut = train_tokenizer(many, 600), train_tokenizer(pieces, 600)
    assert whole.backend_tokenizer.to_str() == cut.backend_tokenizer.to_str()


def test_a_long_text_to_evaluate_has_the_same_ids(small_pieces):
    tokenizer = train_tokenizer(list(texts(100, 60)), 400)
    for allowed in (True, False):  # whether end-of-text tokens in a text become ids
        for text in texts(100, 60, seed=3):
            whole = tokenizer(text, add_special_tokens=False, split_special_tokens=not allowed)["input_ids"]
            assert evaluate._ids(tokenizer, text, allowed) == whole
