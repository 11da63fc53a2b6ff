"""What is wrong with a command. A problem names its field; `usage_error` prints the flag as the user typed it."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from gptlm.errors import UsageError, named, with_flags_shown


@dataclass(frozen=True)
class Problem:
    """One reason why a command cannot run.

    Attributes:
        field: the flag at fault; "" if the text stands alone.
        text: follows the flag in the message, as in "-1: expected at least 0". Other flags in it are `named(...)`.
    """

    field: str
    text: str

    @property
    def marked(self) -> str:
        """The message, its flags marked for `errors.with_flags_shown`."""
        return f"{named(self.field)} {self.text}" if self.field else self.text


def usage_error(problems: Iterable[Problem], typed: Mapping[str, str]) -> UsageError:
    """All `problems`, each once, as one error; `typed` maps a field to the word that the user typed for it."""
    lines = (with_flags_shown(problem.marked, typed) for problem in problems)
    return UsageError("\n".join(dict.fromkeys(lines)))


def missing(group: Any, *fields: str) -> list[Problem]:
    """A problem for each of `fields` that is unset or empty."""
    return [Problem(field, "is missing") for field in fields if not getattr(group, field)]


def not_a_folder(field: str, path: str | None) -> list[Problem]:
    text = f"{path}: expected folder/name, this is a folder"
    return [Problem(field, text)] if (path or "").endswith("/") else []
