"""The tasks of `gptlm evaluate`: LAMBADA and perplexity.

A task has `rows` to score. `tally` turns the score of one row into numbers, which are summed over all rows of all
processes. `report` turns the sums into results, `lines` into lines of the log.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from transformers import PreTrainedTokenizerBase

from gptlm.data import text_files
from gptlm.errors import GptlmError, named
from gptlm.inference.detokenizers import detokenize
from gptlm.inference.scoring import Row, Score, Tokens, Windows
from gptlm.json_text import parse_json
from gptlm.model.tokenizer import encode_texts

ENCODED_TOGETHER = 1000  # documents
MAX_EXPONENT = 20.0  # Megatron's limit for perplexities: exp(20) = 4.9e8
Report = dict[str, Any]


@dataclass(frozen=True)
class ClozeRow(Row):
    """A text of LAMBADA. `strict`: the targets are the last word; `last`: the last target is the text's last token."""

    strict: bool
    last: bool


class Cloze:
    """LAMBADA: the accuracy of the last word (all of its tokens) and of the last token.

    Args:
        length: inputs of a window, in tokens.
        names: of the texts, for messages.

    Attributes:
        cut: names of the texts that were longer than the window and lost their beginning.

    Raises:
        GptlmError: if a last word does not fit into the window.
    """

    def __init__(
        self,
        texts: Sequence[str],
        tokenizer: PreTrainedTokenizerBase,
        length: int,
        names: Sequence[str] | None = None,
        *,
        allow_special_tokens: bool = False,
    ):
        self.examples = len(texts)
        names = names or [f"text {number}" for number in range(1, len(texts) + 1)]
        rows = _cloze_rows(texts, lambda batch: encode_texts(tokenizer, batch, allow_special_tokens))
        strict = list(zip(names, (row for row in rows if row.strict), strict=True))
        for name, row in strict:
            if row.scored > length:
                raise GptlmError(
                    f"{name}: the last word has {row.scored} tokens, {named('max_seq_length')} {length} cannot hold "
                    "it; give more"
                )
        self.cut = [name for name, row in strict if len(row.ids) > length + 1]
        rows = [ClozeRow(row.ids[-(length + 1) :], row.scored, row.strict, row.last) for row in rows]
        self.rows = sorted(rows, key=lambda row: len(row.ids), reverse=True)  # so that a batch has little padding

    def tally(self, number: int, score: Score) -> tuple[float, float, float, float]:
        """Correct words, correct last tokens, -log p of the last words, and their number of tokens."""
        row = self.rows[number]
        word = (all(score.hits), score.loss, row.scored) if row.strict else (0, 0, 0)
        return word[0], row.last and score.hits[-1], word[1], word[2]

    def report(self, sums: Sequence[float]) -> Report:
        strict, last = int(sums[0]), int(sums[1])
        return {
            "num_examples": self.examples,
            "num_correct_strict": strict,
            "accuracy_strict": strict / self.examples,
            "num_correct_last_token": last,
            "accuracy_last_token": last / self.examples,
        }

    def loss(self, sums: Sequence[float]) -> float:
        """Mean -log p of a token of the last words."""
        return sums[2] / sums[3]

    def lines(self, report: Report, sums: Sequence[float]) -> list[str]:
        perplexity = math.exp(min(MAX_EXPONENT, sums[2] / self.examples))
        return [
            _cloze_line(report, "strict", "every token of the whole last word is the likeliest"),
            _cloze_line(report, "last_token", "the last token of the text as it is tokenized is the likeliest"),
            f"perplexity of the last word: {perplexity:.4f} (exp of the mean -log p of whole last words)",
        ]


class Reading:
    """Perplexity of a sequence of tokens in sliding windows.

    Args:
        tokens: (n,) ids, n at least 2.
        length, step: of `Windows`.
        words: number of words of the original text for the adjusted perplexity, or None.
        limit: number of windows to score, or None for all.
    """

    def __init__(self, tokens: Tokens, length: int, step: int, *, words: int | None, limit: int | None = None):
        windows = Windows(tokens, length, step)
        self.rows: Sequence[Row] = windows if limit is None or limit >= len(windows) else windows[:limit]
        self.tokens, self.step, self.words = len(tokens), step, words

    def tally(self, number: int, score: Score) -> tuple[float, float]:
        """-log p and number of targets."""
        return score.loss, len(score.hits)

    def report(self, sums: Sequence[float]) -> Report:
        """Megatron's numbers: `tasks/zeroshot_gpt/evaluate.py`."""
        loss = self.loss(sums)
        ratio = (self.tokens - 1) / (self.words - 1) if self.words is not None and self.words > 1 else None
        return {
            "num_examples": len(self.rows),
            "num_original_tokens": self.words,
            "num_tokens": self.tokens,
            "num_scored": int(sums[1]),
            "loss": loss,
            "ppl": math.exp(min(MAX_EXPONENT, loss)),
            "token_ratio": ratio,
            "adjusted_ppl": None if ratio is None else math.exp(min(MAX_EXPONENT, loss * ratio)),
            "overlapping_eval": self.step,
        }

    def loss(self, sums: Sequence[float]) -> float:
        """Mean -log p of a token."""
        return sums[0] / sums[1]

    def lines(self, report: Report, sums: Sequence[float]) -> list[str]:
        lines = [f"avg loss: {report['loss']:.4f} | ppl: {report['ppl']:.4f}, per token"]
        if report["adjusted_ppl"] is not None:
            lines[0] += f" | adjusted ppl: {report['adjusted_ppl']:.4f}, per original token"
            lines[0] += f" | token ratio: {report['token_ratio']:.6f}"
        original = "" if self.words is None else f" from {self.words} original tokens (split on blanks)"
        lines.append(
            f"{report['num_scored']} of {self.tokens - 1} targets scored once each, stride {self.step}; "
            f"{self.tokens} tokens{original}"
        )
        return lines


def read_cloze(path: str, limit: int | None, detokenizer: str) -> list[tuple[str, str]]:
    """The first `limit` texts of a LAMBADA file as pairs (place for messages, text).

    Raises:
        GptlmError: naming a line that is not an object with a `text` of two words.
    """
    lines = read_text(path).split("\n")
    placed = [(f"{path}, line {n}", line) for n, line in enumerate(lines, start=1) if line.strip()]
    return [(place, detokenize(_cloze_text(line, place), detokenizer)) for place, line in placed[:limit]]


def encode_documents(
    texts: Sequence[str], tokenizer: PreTrainedTokenizerBase, allow_special_tokens: bool = False
) -> list[int]:
    """The ids of `texts`, concatenated as by `gptlm preprocess --append_eos`: each ends with one end-of-text token."""
    ids: list[int] = []
    end = [] if tokenizer.eos_token_id is None else [tokenizer.eos_token_id]
    for start in range(0, len(texts), ENCODED_TOGETHER):
        for row in encode_texts(tokenizer, texts[start : start + ENCODED_TOGETHER], allow_special_tokens):
            ids += row if end and row[-1:] == end else [*row, *end]
    return ids


def read_text(path: str) -> str:
    """The content of a text file, with its line ends.

    Raises:
        GptlmError: if it is missing, empty or not UTF-8.
    """
    text = text_files.read_text(path, f"--eval_path {path}")
    if not text.strip():
        raise GptlmError(f"{path} is empty; there is nothing to evaluate")
    return text


def _cloze_text(line: str, place: str) -> str:
    try:
        text = parse_json(line)["text"]
    except (ValueError, KeyError, TypeError) as error:
        raise GptlmError(f'{place}: expected an object with a text, like {{"text": "..."}}') from error
    if not isinstance(text, str) or len(text.split()) < 2:
        raise GptlmError(f"{place}: LAMBADA needs a text of two words or more, found {str(text)[:40]!r}")
    return text_files.check_text(text, place)


def _cloze_rows(texts: Sequence[str], encode: Callable[[list[str]], list[list[int]]]) -> list[ClozeRow]:
    """One row per text for both measures, or two if the text's tokens are not those of its context and last word."""
    words = [text.split()[-1] for text in texts]
    contexts = [text[: text.rfind(word)].strip() for text, word in zip(texts, words, strict=True)]
    labels = encode([f" {word}" for word in words])
    rows = []
    for whole, context, label in zip(encode(list(texts)), encode(contexts), labels, strict=True):
        same = whole == context + label
        rows.append(ClozeRow(context + label, len(label), strict=True, last=same))
        if not same:
            rows.append(ClozeRow(whole, 1, strict=False, last=True))
    return rows


def _cloze_line(report: Report, measure: str, meaning: str) -> str:
    return (
        f"number correct: {report[f'num_correct_{measure}']} | total examples: {report['num_examples']} | "
        f"avg accuracy: {report[f'accuracy_{measure}']:.4f} | {measure}: {meaning}"
    )
