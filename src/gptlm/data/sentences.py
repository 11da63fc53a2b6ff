"""Documents to sentences, as the originals' `--split-sentences` does: nltk's punkt, or line by line for Chinese."""

from collections.abc import Callable
from functools import partial
from typing import Any

from gptlm.errors import GptlmError

Splitter = Callable[[str], list[str]]

LINES = "lines"


def sentence_splitter(language: str, keep_newlines: bool) -> Splitter:
    """A function from a text to its sentences.

    Args:
        language: one of punkt's, such as "english"; "lines" makes each line a sentence.
        keep_newlines: a sentence keeps the white space behind it, so that sentences joined are the text.

    Raises:
        GptlmError: if nltk or its data are not installed.
    """
    return partial(_by_line if language == LINES else partial(_by_punkt, _punkt(language)), keep_newlines)


def _by_line(keep_newlines: bool, text: str) -> list[str]:
    return text.splitlines(keepends=keep_newlines)


def _by_punkt(punkt: Any, keep_newlines: bool, text: str) -> list[str]:
    spans = list(punkt.span_tokenize(text))
    if not keep_newlines or not spans:
        return [text[start:end] for start, end in spans]
    starts = [0, *(start for start, _ in spans[1:]), len(text)]
    return [text[start:end] for start, end in zip(starts, starts[1:], strict=False)]


def _punkt(language: str) -> Any:
    try:
        from nltk.tokenize.punkt import PunktTokenizer
    except ImportError as error:
        raise GptlmError(
            "--split_sentences needs nltk: pip install -c requirements/constraints.txt 'gptlm[sentences]', and "
            "python -m nltk.downloader punkt_tab"
        ) from error
    try:
        return PunktTokenizer(language)
    except (LookupError, ValueError, OSError) as error:
        raise GptlmError(
            f"--split_sentences: nltk has no data for {language!r}; python -m nltk.downloader punkt_tab fetches it "
            "(for a machine without network copy the folder nltk_data/tokenizers/punkt_tab and set NLTK_DATA); "
            "languages have their English names, like english or german"
        ) from error
