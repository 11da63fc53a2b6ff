"""LAMBADA's two measures, the arithmetic of perplexity, detokenizers, and unusable files."""

import math

import pytest

from gptlm.errors import GptlmError
from gptlm.inference.detokenizers import detokenize
from gptlm.inference.scoring import Score
from gptlm.inference.tasks import Cloze, Reading, read_cloze, read_text
from gptlm.model.tokenizer import train_tokenizer
from tests.golden import recorded


@pytest.fixture(scope="module")
def tokenizer():
    return train_tokenizer(["the cat sat on the mat and the dog sat on the log " * 20], 290)


def ids(tokenizer, text):
    return tokenizer(text)["input_ids"]


def test_the_strict_row_is_the_last_word_behind_its_context(tokenizer):
    task = Cloze(["the cat sat on  zebras"], tokenizer, 100)
    strict, last = (next(r for r in task.rows if r.strict), next(r for r in task.rows if r.last))
    label = ids(tokenizer, " zebras")
    assert strict.ids == ids(tokenizer, "the cat sat on") + label and strict.scored == len(label) > 1
    assert last.ids == ids(tokenizer, "the cat sat on  zebras") and last.scored == 1  # two blanks: other tokens


def test_one_row_serves_both_where_the_tokens_are_the_same(tokenizer):
    (row,) = Cloze(["the cat sat on the mat"], tokenizer, 100).rows
    assert row.strict and row.last and row.ids == ids(tokenizer, "the cat sat on the mat")


def test_the_last_occurrence_of_the_word_is_the_target(tokenizer):
    (row,) = Cloze(["the mat and the mat"], tokenizer, 100).rows
    assert row.ids == ids(tokenizer, "the mat and the") + ids(tokenizer, " mat")


def test_a_word_is_correct_if_all_of_its_tokens_are(tokenizer):
    task = Cloze(["the cat sat on  zebras", "the dog sat on the mat"], tokenizer, 100)
    sums = [0.0] * 4
    for number, row in enumerate(task.rows):
        hits = [True] * row.scored
        if row.strict and not row.last:
            hits[0] = False  # the first token of "zebras" is wrong
        sums = [a + b for a, b in zip(sums, task.tally(number, Score(0.5 * row.scored, tuple(hits))), strict=True)]
    report = task.report(sums)
    assert report["num_examples"] == 2
    assert (report["num_correct_strict"], report["accuracy_strict"]) == (1, 0.5)
    assert (report["num_correct_last_token"], report["accuracy_last_token"]) == (2, 1.0)
    assert task.loss(sums) == 0.5


def test_a_long_text_keeps_its_end_and_a_long_word_is_refused(tokenizer):
    text = "the cat sat on the mat and the dog sat on the log"
    task = Cloze([text], tokenizer, 4)
    (row,) = task.rows
    assert task.cut == ["text 1"] and row.ids == ids(tokenizer, text)[-5:]
    with pytest.raises(GptlmError, match="^l, line 2: the last word has 7 tokens, --max_seq_length 4"):
        Cloze(["a b", "the qwzxyv"], train_tokenizer(["ab" * 9], 257), 4, ["l, line 1", "l, line 2"])


def test_perplexities_are_megatron_s():
    for case in recorded("megatron/evaluation.json")["perplexities"]:
        tokens = case["num_tokenized_tokens"]
        report = Reading(range(tokens), 1024, 32, words=case["num_original_tokens"]).report(
            [case["sum_loss"], tokens - 1]
        )
        for ours, theirs in (("loss", "avg_loss"), ("ppl",) * 2, ("token_ratio",) * 2, ("adjusted_ppl",) * 2):
            assert report[ours] == pytest.approx(case[theirs], rel=1e-12), ours


def test_exponents_are_capped_at_20_and_words_may_be_missing():
    report = Reading(range(11), 8, 4, words=6).report([250.0, 10])
    assert report["loss"] == 25 and report["ppl"] == report["adjusted_ppl"] == math.exp(20)
    assert report["token_ratio"] == 10 / 5
    for words in (None, 1):
        report = Reading(range(11), 8, 4, words=words).report([20.0, 10])
        assert report["ppl"] == math.exp(2) and report["token_ratio"] is report["adjusted_ppl"] is None


def test_a_limit_counts_windows():
    task = Reading(range(101), 20, 10, words=50, limit=3)
    assert len(task.rows) == 3 and sum(row.scored for row in task.rows) == 20 + 10 + 10
    assert len(Reading(range(101), 20, 10, words=50, limit=1000).rows) == 1 + 8


WIKITEXT = [
    (" = R. B. = \n \n He won 3 @,@ 000 ( about 2 @.@ 5 ) .\n", " = R. B. =\n\nHe won 3,000 (about 2.5) .\n"),
    ('a well @-@ known " Teddy \'s Story " ; yes ! no ? it', 'a well-known "Teddy\'s Story"; yes! no? it'),
    ("= = = Plot = = = \n [ 1 ] { x } : 5 ° C , the boys ' toys", "=== Plot ===\n[1] {x}: 5°C, the boys' toys"),
    ("there are N of them . There", "there are 1 of them. There"),
]


@pytest.mark.parametrize(("tokenized", "prose"), WIKITEXT)
def test_wikitext(tokenized, prose):
    assert detokenize(tokenized, "wikitext") == prose


def test_ptb_and_the_identity():
    text = "it 's n't worth $ N \n to N"
    assert detokenize("did n't lose $ N in \n he 's # 1 \n", "ptb") == "didn't lose $1 in\nhe's #1\n"
    assert detokenize(text, "lambada") == detokenize(text, "none") == text


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "is empty"),
        (b" \n \n", "is empty"),
        (b'{"text": "a \xff b"}', r"line 1: not UTF-8 \(byte ff at column 13\)"),
        (b'{"text": "a b"}\n{"txt": "a b"}\n', 'line 2: expected an object with a text, like {"text"'),
        (b"plain words\n", "line 1: expected an object with a text"),
        (b'["a b"]', "line 1: expected an object with a text"),
        (b'{"text": "a \\ud83d"}', "line 1 is not valid Unicode .character 3."),
        (b'{"text": ["a b"]}', "line 1: LAMBADA needs a text of two words"),
        (b'\n{"text": "alone"}', "line 2: LAMBADA needs a text of two words or more, found 'alone'"),
    ],
)
def test_files_without_lambada_records_are_refused(tmp_path, content, message):
    (tmp_path / "f").write_bytes(content)
    with pytest.raises(GptlmError, match=message):
        read_cloze(str(tmp_path / "f"), None, "none")


def test_files_are_read_unchanged(tmp_path):
    with pytest.raises(GptlmError, match="cannot read --eval_path .*No such file"):
        read_text(str(tmp_path / "f"))
    (tmp_path / "f").write_bytes(b"\xef\xbb\xbfa\r\n b")
    assert read_text(str(tmp_path / "f")) == "a\r\n b"
    (tmp_path / "f").write_text('{"text": "a b"}\n\n{"text": "c d"}\nnot read')
    assert read_cloze(str(tmp_path / "f"), 2, "none") == [
        (f"{tmp_path}/f, line 1", "a b"),
        (f"{tmp_path}/f, line 3", "c d"),
    ]


def test_json_that_is_nested_too_deeply_is_refused(tmp_path):
    (tmp_path / "l.jsonl").write_text("[" * 100_000)
    with pytest.raises(GptlmError, match=r"l.jsonl, line 1: expected an object with a text"):
        read_cloze(str(tmp_path / "l.jsonl"), None, "none")
