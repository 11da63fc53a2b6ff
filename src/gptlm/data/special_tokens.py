"""Special tokens that texts spell, such as <|endoftext|> in a prompt."""

import logging
import re
from collections.abc import Iterable

from transformers import PreTrainedTokenizerBase

logger = logging.getLogger(__name__)


def special_tokens(tokenizer: PreTrainedTokenizerBase) -> re.Pattern[str]:
    """Matches where a text spells a special token."""
    names = [token.content for token in tokenizer.added_tokens_decoder.values() if token.special]
    return re.compile("|".join(map(re.escape, sorted(names, key=len, reverse=True))) or "(?!)")


def log_spelled(what: str, tokenizer: PreTrainedTokenizerBase, texts: Iterable[str]) -> None:
    """Say that special tokens which `texts` spell stay text, if there are any."""
    spelled = special_tokens(tokenizer)
    found = [match.group() for text in texts if (match := spelled.search(text))]
    if found:
        names = ", ".join(sorted(set(found)))
        logger.warning(
            "%s: %d spell a special token (%s), which stays text; --allow_special_tokens makes it one",
            *(what, len(found), names),
        )
