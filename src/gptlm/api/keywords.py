"""Keyword arguments as the words of a command line."""

import difflib
from collections.abc import Mapping
from os import PathLike
from typing import Any

from gptlm.config.files import as_texts, canonical
from gptlm.config.parser import Vocabulary
from gptlm.errors import UsageError


def words_of(vocabulary: Vocabulary, flags: Mapping[str, Any], config: str | PathLike[str] | None = None) -> list[str]:
    """The command line that gives `flags`. None is as if a flag was not given.

    Args:
        config: an argument file, whose values the flags replace.

    Raises:
        UsageError: naming every keyword that is no flag, with the nearest one, and values that no flag takes.
    """
    known, problems, words = vocabulary.names(), list[str](), [str(config)] if config is not None else []
    if words and not words[0].endswith((".json", ".yaml", ".yml")):
        problems.append(f"{words[0]!r} is not an argument file: expected .json, .yaml or .yml")
    for name, value in flags.items():
        if canonical(name) not in known:
            near = difflib.get_close_matches(canonical(name), sorted(vocabulary.effective()), n=1, cutoff=0.6)
            problems.append(f"{name} is not an argument" + (f"; did you mean {near[0]}?" if near else ""))
        elif isinstance(value, Mapping):
            problems.append(f"{name} is {type(value).__name__}; expected a string, number, boolean or list")
        elif value is not None:
            texts = as_texts(str(value) if isinstance(value, PathLike) else value)
            if len(texts) == 1:
                words.append(f"--{name}={texts[0]}")
            elif starting := next((text for text in texts if text.startswith("--")), None):
                problems.append(f"{name}: {starting!r} starts with --; leave the dashes out")
            else:
                words += [f"--{name}", *texts]
    if problems:
        raise UsageError("\n".join(problems))
    return words
