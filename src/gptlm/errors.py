"""The two kinds of errors a user can cause, and how their messages refer to flags."""

import re
from collections.abc import Mapping

_FLAG = re.compile("(--)?\0(\\w+)\0")


def named(name: str) -> str:
    """A reference to the flag `name` inside a message; it is shown in the user's spelling.

    The mark around it is NUL, which occurs in no path and no argument: values can never be taken for a flag.
    """
    return f"\0{name}\0"


def with_flags_shown(text: str, typed: Mapping[str, str]) -> str:
    """`text` with each reference as the user typed it, else as `name` (or `--name` where dashes stand before it).

    Args:
        typed: flag -> how the user wrote it, perhaps with its place as in "Global.seed (x.yaml:3)", shown once only.
    """
    seen: set[str] = set()

    def shown(match: re.Match[str]) -> str:
        dashes, name = match[1] or "", match[2]
        word = typed.get(name, dashes + name)
        if name in seen:
            word = word.partition(" (")[0]
        seen.add(name)
        return word

    return _FLAG.sub(shown, text)


class GptlmError(ValueError):
    """The run cannot go on for a reason the user can mend. The commands print it and exit with 1.

    The message says what happened, which value, what to do.
    """

    exit_code = 1

    def __str__(self) -> str:
        return with_flags_shown(self.marked, {})

    @property
    def marked(self) -> str:
        """The message with its references to flags, for `with_flags_shown`."""
        return super().__str__()


class UsageError(GptlmError):
    """The command itself is wrong: flags, values, or combinations of them. Exit code 2."""

    exit_code = 2
