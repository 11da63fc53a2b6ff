"""BLEU and ROUGE against arithmetic by hand, by word and by character."""

import math

import pytest

from gptlm.training.metrics.text import text_scores


def test_words_by_hand():
    """4 of 5 words, 3 of 4 pairs, 2 of 3 triples, 1 of 2 quadruples match; the longest common run of words is 4."""
    found = text_scores(["the cat sat on mats"], ["the cat sat on rugs"], "word")
    bleu = (4 / 5 * 3 / 4 * 2 / 3 * 1 / 2) ** 0.25
    assert found == {"bleu4": round(bleu, 4), "rouge1": 0.8, "rouge2": 0.75, "rougel": 0.8}


def test_too_short_a_prediction_is_punished():
    found = text_scores(["a b c d"], ["a b c d e f"], "word")
    assert found["bleu4"] == pytest.approx(math.exp(1 - 6 / 4), abs=1e-4)
    assert found["rouge1"] == pytest.approx(2 * 1 * (4 / 6) / (1 + 4 / 6), abs=1e-4)


def test_characters_count_where_words_do_not():
    word, char = (text_scores(["今天天气好"], ["今天天气很好"], level) for level in ("word", "char"))
    assert word["rouge1"] == 0 and char["rouge1"] == pytest.approx(2 * 1 * (5 / 6) / (1 + 5 / 6), abs=1e-4)
    assert char["rougel"] == char["rouge1"] and char["bleu4"] > 0.4


def test_equal_and_empty_texts():
    assert text_scores(["one two"], ["one two"], "word") == {"bleu4": 1.0, "rouge1": 1.0, "rouge2": 1.0, "rougel": 1.0}
    assert text_scores([""], ["one two"], "word") == {"bleu4": 0.0, "rouge1": 0.0, "rouge2": 0.0, "rougel": 0.0}
