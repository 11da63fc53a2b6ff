"""Fields of the argument groups: each is one flag with its help, unit, choices and range."""

import math
import operator
from collections.abc import Callable, Mapping
from dataclasses import Field, field, fields
from typing import Any

from gptlm.config.problem import Problem

LARGEST = 1 << 40  # larger whole numbers are typing errors
LARGEST_SEED = 2**32 - 1  # numpy's limit
LARGEST_PORT = 2**16 - 1
LONGEST_WAIT = 1_000_000_000  # seconds; torch counts nanoseconds, and far larger numbers overflow to a hang
COMPARE = {"ge": operator.ge, "gt": operator.gt, "le": operator.le, "lt": operator.lt}


def arg(
    default: Any,
    help: str,
    *,
    choices: tuple[str, ...] | None = None,
    words: bool = False,
    switch: bool = False,
    ge: float | None = None,
    gt: float | None = None,
    le: float | None = None,
    lt: float | None = None,
    also: Mapping[float, str] | None = None,
    unit: str = "",
    check: Callable[[Any], str | None] | None = None,
    nested: bool = False,
) -> Any:
    """A dataclass field that is a flag.

    Args:
        choices: accepted values in any case; the parser checks them.
        words: the value may be several blank-separated words.
        switch: the flag may stand without a value, which another flag gives (`--deepspeed --deepspeed_config FILE`).
        ge, gt, le, lt: range of a number. None as a value is always accepted.
        also: accepted values outside the range -> their meaning.
        unit: of the number, for --help and messages.
        nested: the value may be a mapping in a file; it becomes JSON text.
        check: returns what is wrong with a value, as `Problem.text`, or None.
    """
    metadata = {
        "help": help, "choices": choices, "words": words, "switch": switch, "ge": ge, "gt": gt, "le": le, "lt": lt,
        "also": also or {}, "unit": unit, "check": check, "nested": nested,
    }  # fmt: skip
    if isinstance(default, list):
        return field(default_factory=lambda: list(default), metadata=metadata)
    return field(default=default, metadata=metadata)


def check_fields(*groups: Any) -> list[Problem]:
    """Every value of the dataclass instances `groups` that is out of its range, NaN or infinite."""
    found = []
    for group in groups:
        for f in fields(group):
            text = _wrong(f, getattr(group, f.name))
            found += [Problem(f.name, text)] if text else []
    return found


def range_of(f: Field) -> str:
    """The range of a field in words ("1 to 65535", "at least 1 step"), or ""."""
    ge, gt, le, lt = (f.metadata[bound] for bound in COMPARE)
    if ge is not None and le is not None:
        text = f"{_shown(ge)} {'or' if f.type is int and le == ge + 1 else 'to'} {_shown(le)}"
    else:
        bounds = {"at least": ge, "more than": gt, "at most": le, "less than": lt}
        text = " and ".join(f"{word} {_shown(bound)}" for word, bound in bounds.items() if bound is not None)
    if text and f.metadata["unit"]:
        text += f" {f.metadata['unit'].removesuffix('s') if text.endswith(' 1') else f.metadata['unit']}"
    return ", or ".join([text, *(f"{_shown(value)} ({meaning})" for value, meaning in f.metadata["also"].items())])


def _wrong(f: Field, value: Any) -> str | None:
    known = f.metadata
    if value is None:
        return None
    if known["check"] is not None:
        return known["check"](value)
    if isinstance(value, bool) or not isinstance(value, (int, float)) or value in known["also"]:
        return None
    finite = math.isfinite(value)
    if finite and all(known[name] is None or inside(value, known[name]) for name, inside in COMPARE.items()):
        return None
    expected = filter(None, ("" if finite else "a finite number", range_of(f)))
    return f"{_shown(value)}: expected {', '.join(expected)}"


def _shown(number: float) -> str:
    return f"{number:g}" if isinstance(number, float) else str(number)
