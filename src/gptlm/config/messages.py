"""Messages in the words of the user."""

import re

from gptlm.config.parser import Parsed


def in_user_words(problem: str, parsed: Parsed) -> str:
    """`problem` with each flag called as the user typed it.

    The first line of a message of several lines stays: it is an original's text, which people search for.
    """
    first, line_break, rest = problem.partition("\n")
    if line_break:
        return first + line_break + _renamed(rest, parsed)
    return _renamed(problem, parsed)


def _renamed(text: str, parsed: Parsed) -> str:
    for name, typed in parsed.typed.items():
        again = typed.partition(" (")[0]  # the place is said once
        shown, again = (word.replace("\\", r"\\") for word in (typed, again))
        pattern = re.compile(rf"(?<![\w.\[-])(--)?{name}(?![\w\]])")
        if "_" not in name:  # an English word, too
            pattern = re.compile(rf"\A{name}(?!\w)|(?<![\w.-])--{name}(?!\w)")
        text = pattern.sub(again, pattern.sub(shown, text, count=1))
    return text
