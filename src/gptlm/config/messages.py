"""Messages in the words of the user."""

from collections.abc import Iterable

from gptlm.config.parser import Parsed
from gptlm.errors import with_flags_shown


def in_user_words(problem: str, parsed: Parsed) -> str:
    """`problem` with each flag that it refers to by `gptlm.errors.named` called as the user typed it."""
    return with_flags_shown(problem, parsed.typed)


def all_in_user_words(problems: Iterable[str], parsed: Parsed) -> str:
    """All `problems`, each once, as the text of one error."""
    return "\n".join(dict.fromkeys(in_user_words(problem, parsed) for problem in problems))
