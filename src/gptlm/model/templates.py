"""The chat template and the end-of-text token that a command gives a tokenizer."""

import logging
import re
from pathlib import Path

from transformers import PreTrainedTokenizerBase

from gptlm.data.templates import CHATML, CHATML_TEMPLATE, CHATML_TOKENS, PLAIN, bad_template
from gptlm.data.text_files import read_text
from gptlm.errors import GptlmError, named

logger = logging.getLogger(__name__)

TOKEN = re.compile(r"<\|[^|<>\s]{1,60}\|>")  # how templates name their tokens


def use_template(tokenizer: PreTrainedTokenizerBase, name: str | None) -> list[str]:
    """Give `tokenizer` the chat template `name`; returns the tokens that it needs and the vocabulary may lack.

    Args:
        name: chatml, plain (none), or a file with Jinja; None: the tokenizer keeps its own.

    Raises:
        GptlmError: if the file cannot be read, or is empty.
    """
    if name is None:
        return []
    if name.lower() == CHATML:
        tokenizer.chat_template = CHATML_TEMPLATE
        return list(CHATML_TOKENS)
    if name.lower() == PLAIN:
        tokenizer.chat_template = None
        return []
    path = Path(name)
    if wrong := bad_template(name):
        raise GptlmError(f"{named('chat_template')} {wrong}")
    template = read_text(path, f"the chat template {path}")
    if not template.strip():
        raise GptlmError(f"{named('chat_template')} {name}: the file is empty")
    tokenizer.chat_template = template
    return []


def use_eos(tokenizer: PreTrainedTokenizerBase, token: str | None) -> None:
    """Make `token` the end of text. Raises GptlmError if it is not in the vocabulary."""
    if token is None:
        return
    if token not in tokenizer.get_vocab():
        raise GptlmError(f"{named('eos_token')} {token!r} is not in the vocabulary of {tokenizer.name_or_path}")
    tokenizer.eos_token = token


def warn_of_text_tokens(tokenizer: PreTrainedTokenizerBase) -> None:
    """Warn if the chat template writes what looks like a token, and the vocabulary does not have it."""
    known = tokenizer.get_vocab()
    unknown = sorted({token for token in TOKEN.findall(str(tokenizer.chat_template or "")) if token not in known})
    if unknown:
        logger.warning(
            "the chat template writes %s, which the vocabulary does not have: it is encoded as text of several tokens",
            " ".join(unknown),
        )
