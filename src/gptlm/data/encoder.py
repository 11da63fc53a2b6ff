"""Texts to ids: with `tokenizers`, or with the same result many times faster with gigatoken; long texts in pieces.

A tokenizer first finds its added tokens, normalizes the text between them and splits it into words; then each word
becomes ids by itself. So a cut changes no id if it is between two words, the words on both sides stay as they are, and
it touches no added token.

GPT-2's words are matches of

    's|'t|'re|'ve|'m|'ll|'d| ?\\p{L}+| ?\\p{N}+| ?[^\\s\\p{L}\\p{N}]+|\\s+(?!\\S)|\\s+

No word has white space after another character. So a word begins at white space that follows another character, and
matching continues from there as at the beginning of a text. To the left, only a run of white space looks ahead, and it
sees the same next character in a piece. Likewise no word but a contraction, which begins with its apostrophe, has a
letter or digit before a character that is neither those nor white space.
"""

import json
import logging
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from tokenizers import Tokenizer, models, pre_tokenizers

from gptlm.errors import GptlmError, reason_of
from gptlm.json_text import parse_json

if TYPE_CHECKING:  # worker processes import this module, and transformers takes seconds to import
    from transformers import PreTrainedTokenizerBase

logger = logging.getLogger(__name__)

COMPARED = 1 << 16  # characters of each of the first texts that gigatoken and `tokenizers` both encode
PIECE = 1 << 18  # minimum length of a piece in characters; texts of more than twice that are cut
MAX_CANDIDATES = 64  # places for a cut that are tried before the rest of a text is encoded whole
SEAM = 256  # characters on both sides of a cut that are encoded to test whether it changes their ids
# White space and marks after characters that are the same class in every version of Unicode (U+180E was white space
# once) and for Python, whose \s matches more than Unicode's.
GPT2_SPACE = "(?<=[^\\s\u180e])[ \\t\\r\\n]"
GPT2_MARK = "(?<=[A-Za-z0-9\u4e00-\u9fa5])[.,;:!?\u3001\u3002\uff0c\uff1a\uff1b\uff01\uff1f]"
GPT2 = re.compile(f"{GPT2_SPACE}|{GPT2_MARK}")
SPACE = re.compile("(?<=[^\\s\u180e]) (?=[^\\s\u180e])")

Ids = tuple[np.ndarray, np.ndarray]


class TextEncoder:
    """`encoder(texts)` gives the ids of all texts back to back (int32) and the length of each text (int64).

    The first texts that gigatoken encodes are also encoded by `tokenizers` and must give the same ids.

    Args:
        tokenizer_file: a tokenizer.json.
        backend: "tokenizers" or "gigatoken".
        allow_special_tokens: a special token in a text, such as <|endoftext|>, becomes its id.

    Raises:
        GptlmError: if gigatoken is not installed, cannot read the tokenizer, or gives other ids.
    """

    def __init__(self, tokenizer_file: str, backend: str = "tokenizers", allow_special_tokens: bool = False):
        self.tokenizer = Tokenizer.from_file(tokenizer_file)
        self.tokenizer.encode_special_tokens = not allow_special_tokens
        self.tokenizer.no_truncation()
        self.tokenizer.no_padding()
        self.gigatoken = _load_gigatoken(tokenizer_file, allow_special_tokens) if backend == "gigatoken" else None
        self.compared = False
        self.cutter = Cutter(self.tokenizer, allow_special_tokens, self._encode_to_lists)

    def __call__(self, texts: Sequence[str], report: Callable[[int], None] = lambda characters: None) -> Ids:
        """The ids of `texts`. `report` is called with the number of characters of each encoded group."""
        found: list[np.ndarray] = []
        lengths = np.zeros(len(texts), np.int64)
        for owners, pieces in self._groups(texts):
            ids, sizes = self._encode_group(pieces)
            found.append(ids)
            np.add.at(lengths, owners, sizes)
            report(sum(map(len, pieces)))
        return np.concatenate(found) if found else np.empty(0, np.int32), lengths

    def _groups(self, texts: Sequence[str]) -> Iterator[tuple[list[int], list[str]]]:
        """Groups of about `PIECE` characters: the text that each piece belongs to, and the pieces."""
        owners: list[int] = []
        pieces: list[str] = []
        size = 0
        for number, text in enumerate(texts):
            # long texts in pieces, because results of `tokenizers` take 140 bytes per character
            for piece in self.cutter.pieces(text) if len(text) > 2 * PIECE else (text,):
                owners.append(number)
                pieces.append(piece)
                size += len(piece)
                if size >= PIECE:
                    yield owners, pieces
                    owners, pieces, size = [], [], 0
        if pieces:
            yield owners, pieces

    def _encode_group(self, texts: Sequence[str]) -> Ids:
        if self.gigatoken is None:
            return self._encode(texts)
        if not self.compared and texts:
            self._compare([text[:COMPARED] for text in texts])
        return self._encode_gigatoken(texts)

    def _encode(self, texts: Sequence[str]) -> Ids:
        ids = [encoding.ids for encoding in self.tokenizer.encode_batch_fast(list(texts), add_special_tokens=False)]
        lengths = np.fromiter(map(len, ids), np.int64, len(ids))
        return np.fromiter(chain.from_iterable(ids), np.int32, int(lengths.sum())), lengths

    def _encode_to_lists(self, texts: list[str]) -> list[list[int]]:
        ids, lengths = self._encode(texts)
        return [part.tolist() for part in np.split(ids, np.cumsum(lengths)[:-1])]

    def _encode_gigatoken(self, texts: Sequence[str]) -> Ids:
        import awkward

        encoded = self.gigatoken.encode_batch(list(texts), parallel=False)  # type: ignore[union-attr]
        lengths = np.asarray(awkward.num(encoded), np.int64)
        return np.asarray(awkward.flatten(encoded)).astype(np.int32), lengths

    def _compare(self, texts: Sequence[str]) -> None:
        for found, expected in zip(self._encode_gigatoken(texts), self._encode(texts), strict=True):
            if not np.array_equal(found, expected):
                raise GptlmError("gigatoken gives other ids than tokenizers here; leave out --tokenizer_backend")
        self.compared = True


def _load_gigatoken(tokenizer_file: str, allow_special_tokens: bool) -> Any:
    try:
        import gigatoken
    except ImportError as error:
        raise GptlmError(
            "--tokenizer_backend gigatoken needs the package: pip install -c requirements/constraints.txt 'gptlm[fast]'"
        ) from error
    content = parse_json(Path(tokenizer_file).read_text(encoding="utf-8"))
    if not allow_special_tokens:
        added = content.get("added_tokens") or []
        content["added_tokens"] = [token for token in added if not token.get("special")]
    try:
        return gigatoken.Tokenizer.from_json(json.dumps(content))
    except Exception as error:  # its Rust errors have no common class
        raise GptlmError(
            f"gigatoken cannot read this tokenizer ({reason_of(error)}); leave out --tokenizer_backend gigatoken"
        ) from error


class Cutter:
    """Cuts long texts into pieces whose ids, end to end, are the ids of the whole text.

    Args:
        tokenizer: whose ids they are.
        allow_special_tokens: special tokens are found in texts.
        encode: gives the ids of texts. Cuts for tokenizers other than GPT-2's are tested with it.
    """

    def __init__(
        self, tokenizer: Tokenizer, allow_special_tokens: bool, encode: Callable[[list[str]], list[list[int]]]
    ):
        content = parse_json(tokenizer.to_str())
        added = [token for token in content.get("added_tokens") or [] if allow_special_tokens or not token["special"]]
        self._added = [token["content"] for token in added]
        self._reach = max(map(len, self._added), default=0) + 1
        self._encode = encode
        self._is_gpt2 = content.get("normalizer") is None and _has_gpt2_words(content.get("pre_tokenizer"))
        self._has_words = _splits_at_spaces(tokenizer)
        self._warned = False

    def pieces(self, text: str) -> Iterator[str]:
        """`text` in pieces of at least `PIECE` characters; whole if it is short, or where no cut is safe."""
        start = 0
        while len(text) > 2 * PIECE and start < len(text):
            stop = self._next_cut(text, start + PIECE)
            yield text[start:stop]
            start = stop
        if start == 0:
            yield text

    def _next_cut(self, text: str, position: int) -> int:
        """The first safe cut from `position` on; the end of the text if none is found."""
        if position >= len(text):
            return len(text)
        if self._is_gpt2 or self._has_words:
            for number, candidate in enumerate((GPT2 if self._is_gpt2 else SPACE).finditer(text, position)):
                if self._is_safe(text, candidate.start()):
                    return candidate.start()
                if number == MAX_CANDIDATES and not self._is_gpt2:
                    break
        if len(text) - position > PIECE and not self._warned:
            self._warned = True
            logger.warning(
                "a text of %d characters is encoded from character %d on in one piece, which needs much memory: no "
                "place was found where a cut is sure to keep its ids", len(text), position - PIECE,
            )  # fmt: skip
        return len(text)

    def _is_safe(self, text: str, cut: int) -> bool:
        near = text[max(0, cut - self._reach) : cut + self._reach]
        if any(content in near for content in self._added):
            return False
        if self._is_gpt2:
            return True
        reach = max(SEAM, self._reach)
        left, right = text[max(0, cut - reach) : cut], text[cut : cut + reach]
        left_ids, right_ids, ids = self._encode([left, right, left + right])
        return left_ids + right_ids == ids


def in_pieces(texts: Iterable[str]) -> Iterator[str]:
    """`texts`, long ones in pieces, for the training of a byte-level BPE, which only counts GPT-2's words."""
    splitter = Tokenizer(models.BPE())
    splitter.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    cutter = Cutter(splitter, False, lambda texts: [])
    return chain.from_iterable(map(cutter.pieces, texts))


def _splits_at_spaces(tokenizer: Tokenizer) -> bool:
    if tokenizer.pre_tokenizer is None:
        return False
    return any(stop == 2 for _, (_, stop) in tokenizer.pre_tokenizer.pre_tokenize_str("aa bb"))


def _has_gpt2_words(pre_tokenizer: dict[str, Any] | None) -> bool:
    """Whether words are the matches of GPT-2's expression, without a space before the first."""
    expected = {"type": "ByteLevel", "add_prefix_space": False, "use_regex": True}
    found = {"use_regex": True, **(pre_tokenizer or {})}
    return all(found.get(name) == value for name, value in expected.items())


def special_tokens(tokenizer: "PreTrainedTokenizerBase") -> re.Pattern[str]:
    """Matches the special tokens that are written out in a text."""
    return pattern_of([token.content for token in tokenizer.added_tokens_decoder.values() if token.special])


def pattern_of(tokens: Sequence[str]) -> re.Pattern[str]:
    """Matches any of `tokens`, the longest first; nothing if there are none."""
    return re.compile("|".join(map(re.escape, sorted(tokens, key=len, reverse=True))) or "(?!)")


def log_special_tokens(what: str, tokenizer: "PreTrainedTokenizerBase", texts: Iterable[str]) -> None:
    """Warn if `texts` contain special tokens, which are encoded as text."""
    pattern = special_tokens(tokenizer)
    log_found_tokens(what, [match.group() for text in texts if (match := pattern.search(text))])


def log_found_tokens(what: str, found: Sequence[str]) -> None:
    """The warning of `log_special_tokens`; `found` is the first special token in each text that has one."""
    if found:
        logger.warning(
            "%s: %d contain a special token (%s), which is encoded as text; --allow_special_tokens encodes it as one "
            "token", what, len(found), ", ".join(sorted(set(found))),
        )  # fmt: skip
