"""Sentences of a text: nltk's Punkt (Kiss and Strunk 2006, Computational Linguistics 32), with or without its data."""

import itertools
from collections.abc import Callable
from functools import partial
from typing import Any

from gptlm.errors import GptlmError

LINES = "lines"  # as a language: each line is a sentence
ENGLISH_RULES = "english-rules"  # as a language: Punkt with the words below instead of nltk's data

# Not every word that can be abbreviated: a missed sentence end keeps the white space of the text, a wrong one loses it.
ABBREVIATIONS = (
    "mr mrs ms messrs dr prof st mt jr sr gen col lt maj capt sgt cmdr adm rev hon sen rep gov pres supt "
    "jan feb mar apr jun jul aug sep sept oct nov dec "
    "e.g i.e cf vs viz al ca approx etc vol vols ch sec fig figs eq pp ed eds trans "
    "dept univ assn bros inc ltd co corp u.s u.k u.n u.s.a d.c a.m p.m b.c a.d ph.d m.d b.a m.a"
).split()
# Capitalized after an abbreviation, they begin a sentence.
STARTERS = (
    "the he she it they we this these those that in on at by for from after during but however although there when "
    "while if as his her its their our"
).split()

Splitter = Callable[[str], list[str]]


def available_rules(language: str) -> str:
    """`language` if nltk has its data, else `ENGLISH_RULES` for English.

    Raises:
        GptlmError: if another language has no data, or nltk is not installed.
    """
    try:
        sentence_splitter(language, False)
    except LookupError as error:
        if language == "english":
            return ENGLISH_RULES
        raise GptlmError(
            f"--split_sentences: nltk has no data for {language!r}; python -m nltk.downloader punkt_tab downloads it "
            "(for a machine without network copy the folder nltk_data/tokenizers/punkt_tab and set NLTK_DATA); "
            "languages have their English names, like english or german"
        ) from error
    return language


def sentence_splitter(language: str, keep_newlines: bool) -> Splitter:
    """A function from a text to its sentences, as the originals' `--split-sentences`.

    Args:
        language: one of nltk's punkt, such as "english"; `ENGLISH_RULES`, or `LINES`.
        keep_newlines: a sentence keeps the white space after it, so that sentences joined are the text.

    Raises:
        GptlmError: if nltk is not installed.
        LookupError: if nltk has no data for `language`.
    """
    if language == LINES:
        return partial(str.splitlines, keepends=keep_newlines)
    return partial(_split_with_punkt, _punkt(language), keep_newlines)


def _split_with_punkt(punkt: Any, keep_newlines: bool, text: str) -> list[str]:
    spans = list(punkt.span_tokenize(text))
    if not keep_newlines or not spans:
        return [text[start:end] for start, end in spans]
    starts = [0, *(start for start, _ in spans[1:]), len(text)]
    return [text[start:end] for start, end in itertools.pairwise(starts)]


def _punkt(language: str) -> Any:
    try:
        from nltk.tokenize.punkt import PunktParameters, PunktSentenceTokenizer, PunktTokenizer
    except ImportError as error:
        raise GptlmError(
            "--split_sentences needs nltk: pip install -c requirements/constraints.txt 'gptlm[sentences]'"
        ) from error
    if language == ENGLISH_RULES:
        parameters = PunktParameters()
        parameters.abbrev_types, parameters.sent_starters = set(ABBREVIATIONS), set(STARTERS)
        return PunktSentenceTokenizer(parameters)
    try:
        return PunktTokenizer(language)
    except (ValueError, OSError) as error:  # an unreadable folder, a name with slashes
        raise LookupError(language) from error
