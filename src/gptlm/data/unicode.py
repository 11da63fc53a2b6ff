"""Half a surrogate pair: JSON can spell one (`"\\ud83d"`), no encoding has it, and tokenizers fail on it."""

import re
from typing import Any

from gptlm.errors import GptlmError

ESCAPED = re.compile(r"\\u[dD][89a-fA-F]")  # how JSON spells surrogates, halves or whole pairs


def check_text(text: str, place: str) -> str:
    """`text`, if it is valid Unicode.

    Raises:
        GptlmError: naming `place` and the character, counted from 1.
    """
    if text.isascii():
        return text
    try:
        text.encode()
    except UnicodeEncodeError as error:  # half of a pair of UTF-16, bytes of another encoding
        raise GptlmError(f"{place} is not valid Unicode (character {error.start + 1}); mend it there") from error
    return text


def check_record(record: Any, place: str) -> Any:
    """`record`, a value of JSON, if all of its texts are valid Unicode.

    Raises:
        GptlmError: naming `place`, the key and the character in the text under it.
    """
    if isinstance(record, str):
        return check_text(record, place)
    if isinstance(record, dict):
        for key, value in record.items():
            check_text(key, f"{place}, a key")
            check_record(value, f"{place.partition(', under ')[0]}, under {key!r}")
    if isinstance(record, list):
        for value in record:
            check_record(value, place)
    return record
