"""Where a long text can be cut so that the ids of its pieces, end to end, are the ids of the whole.

A tokenizer first finds its added tokens, normalizes what lies between them and splits it into words; then each word
becomes ids by itself. So a cut changes nothing if it lies between two words, the words on both sides stay as they
are, and it touches no added token.

GPT-2's words are matches of

    's|'t|'re|'ve|'m|'ll|'d| ?\\p{L}+| ?\\p{N}+| ?[^\\s\\p{L}\\p{N}]+|\\s+(?!\\S)|\\s+

No word has white space behind another character, so a word begins at white space that follows another character,
and matching goes on from there as it does at the beginning of a text. To the left of it, the one thing that looks
ahead is a run of white space, which sees the same next character in a piece. Likewise no word but a contraction,
which begins with its apostrophe, has a letter or digit before a character that is neither those nor white space.
"""

import json
import logging
import re
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from tokenizers import Tokenizer, models, pre_tokenizers

logger = logging.getLogger(__name__)

PIECE = 1 << 18  # characters of a piece, and some; longer texts are cut
TRIES = 64  # places to cut that are tried before a text is taken whole
SEAM = 256  # characters on both sides of a cut that are encoded to see whether it changes their ids
# Behind these characters in every version of Unicode (U+180E was white space once), and in Python's sense of \\s,
# which has more than Unicode's.
SPACE_OF_GPT2 = "(?<=[^\\s\u180e])[ \\t\\r\\n]"
MARK_OF_GPT2 = "(?<=[A-Za-z0-9\u4e00-\u9fa5])[.,;:!?\u3001\u3002\uff0c\uff1a\uff1b\uff01\uff1f]"
GPT2 = re.compile(f"{SPACE_OF_GPT2}|{MARK_OF_GPT2}")
SPACE = re.compile("(?<=[^\\s\u180e]) (?=[^\\s\u180e])")

Encode = Callable[[list[str]], list[list[int]]]


class Cutter:
    """Cuts texts for one tokenizer.

    Args:
        tokenizer: whose ids they are.
        allow_special_tokens: special tokens are found in texts.
        encode: gives the ids of texts. Cuts for tokenizers other than GPT-2's are tried with it.
    """

    def __init__(self, tokenizer: Tokenizer, allow_special_tokens: bool, encode: Encode):
        content = json.loads(tokenizer.to_str())
        added = [token for token in content.get("added_tokens") or [] if allow_special_tokens or not token["special"]]
        self._added = [token["content"] for token in added]
        self._reach = max(map(len, self._added), default=0) + 1
        self._encode = encode
        self._is_proven = content.get("normalizer") is None and _is_gpt2(content.get("pre_tokenizer"))
        self._has_words = _splits_at_spaces(tokenizer)
        self._said = False

    def pieces(self, text: str) -> Iterator[str]:
        """`text` in pieces of `PIECE` characters and some, as far as there are places to cut."""
        begins = 0
        while begins < len(text):
            ends = self._next_cut(text, begins + PIECE)
            yield text[begins:ends]
            begins = ends

    def _next_cut(self, text: str, position: int) -> int:
        """The first safe place to cut at or behind `position`; the end of the text if none is found."""
        if position >= len(text):
            return len(text)
        candidates = (GPT2 if self._is_proven else SPACE).finditer(text, position)
        if self._is_proven or self._has_words:
            for number, candidate in enumerate(candidates):
                if self._is_safe(text, candidate.start()):
                    return candidate.start()
                if number == TRIES and not self._is_proven:
                    break
        if len(text) - position > PIECE and not self._said:
            self._said = True
            logger.warning(
                "a text of %d characters is encoded from character %d on in one piece, which takes much memory: "
                "there is no place to cut it that surely keeps its ids",
                len(text),
                position - PIECE,
            )
        return len(text)

    def _is_safe(self, text: str, cut: int) -> bool:
        near = text[max(0, cut - self._reach) : cut + self._reach]
        if any(content in near for content in self._added):
            return False
        if self._is_proven:
            return True
        reach = max(SEAM, self._reach)
        left, right = text[max(0, cut - reach) : cut], text[cut : cut + reach]
        first, second, both = self._encode([left, right, left + right])
        return first + second == both


def in_pieces(texts: Iterable[str]) -> Iterator[str]:
    """`texts`, long ones in pieces, for the training of a byte-level BPE, which only counts GPT-2's words."""
    splitter = Tokenizer(models.BPE())
    splitter.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    cutter = Cutter(splitter, False, lambda texts: [])
    for text in texts:
        yield from cutter.pieces(text) if len(text) > 2 * PIECE else (text,)


def _splits_at_spaces(tokenizer: Tokenizer) -> bool:
    if tokenizer.pre_tokenizer is None:
        return False
    return any(ends == 2 for _, (_, ends) in tokenizer.pre_tokenizer.pre_tokenize_str("aa bb"))


def _is_gpt2(pre_tokenizer: dict[str, Any] | None) -> bool:
    """Whether words are the matches of GPT-2's expression, without a blank before the first."""
    wanted = {"type": "ByteLevel", "add_prefix_space": False, "use_regex": True}
    found = {"use_regex": True, **(pre_tokenizer or {})}
    return all(found.get(name) == value for name, value in wanted.items())
