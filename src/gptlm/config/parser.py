"""The door: words of a command line or a JSON file become typed values of known flags, each with its origin.

A word is spelled as one of our flags, or as a foreign word of spellings.py that is renamed, noted or refused, or it
is an error that names the nearest known word. Everything wrong is reported at once.
"""

import difflib
import json
import types
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import MISSING, Field, dataclass, field, fields
from pathlib import Path
from typing import Any, Union, get_args, get_origin, get_type_hints

from gptlm.errors import UsageError

TRUE = ("1", "true", "t", "yes", "y", "on")
FALSE = ("0", "false", "f", "no", "n", "off")

LARGEST = 1 << 40  # beyond this a whole number is a slip


@dataclass(frozen=True)
class Vocabulary:
    """The words one command understands.

    Attributes:
        groups: dataclasses whose fields are the flags.
        renamed: foreign word -> flag.
        ignored: foreign word -> why it has no effect.
        refused: foreign word -> (values that ask for nothing, why anything else is refused).
    """

    groups: tuple[type, ...]
    renamed: Mapping[str, str] = field(default_factory=dict)
    ignored: Mapping[str, str] = field(default_factory=dict)
    refused: Mapping[str, tuple[tuple[str, ...], str]] = field(default_factory=dict)

    def flags(self) -> dict[str, tuple[Field, Any]]:
        """Name -> (field, type) of every flag."""
        found = {}
        for group in self.groups:
            hints = get_type_hints(group)
            found.update({f.name: (f, hints[f.name]) for f in fields(group)})
        return found

    def words(self) -> set[str]:
        """Every word that is understood, ours and foreign."""
        return {*self.flags(), *self.renamed, *self.ignored, *self.refused}


@dataclass
class Parsed:
    """Values by flag, where each came from ("default", the word as typed, a file), and lines for the log.

    `words` holds, for each flag that was given, the known word that gave it, which may be a foreign one.
    """

    values: dict[str, Any]
    sources: dict[str, str]
    notes: list[str]
    words: dict[str, str] = field(default_factory=dict)

    def set(self, name: str, value: Any, source: str) -> None:
        """Fill in what follows from other flags."""
        self.values[name] = value
        self.sources[name] = source

    def note(self, line: str) -> None:
        """Add a line for the log, once."""
        if line not in self.notes:
            self.notes.append(line)


@dataclass(frozen=True)
class Word:
    """One flag as written: its name with underscores, its values, and its place for messages."""

    name: str
    values: tuple[str, ...]
    place: str


def parse(vocabulary: Vocabulary, argv: Sequence[str]) -> Parsed:
    """Parse `argv`, which may start with a JSON file.

    Raises:
        UsageError: listing everything that is wrong.
    """
    flags = vocabulary.flags()
    values = {name: _default(f) for name, (f, _) in flags.items()}
    parsed = Parsed(values, dict.fromkeys(values, "default"), [])
    problems: list[str] = []
    for word in _split(argv, problems):
        try:
            _take(word, vocabulary, flags, parsed)
        except UsageError as error:
            problems.append(str(error))
    if problems:
        raise UsageError("\n".join(problems))
    return parsed


def build(group: type, values: Mapping[str, Any]) -> Any:
    """An instance of the dataclass `group` with its share of `values`."""
    return group(**{f.name: values[f.name] for f in fields(group)})


def help_text(program: str, summary: str, vocabulary: Vocabulary) -> str:
    """The text of --help: every flag with its meaning and default."""
    lines = [f"usage: {program} [FILE.json] [--flag value ...]", "", *summary.splitlines()]
    for group in vocabulary.groups:
        lines += ["", (group.__doc__ or "").strip()]
        hints = get_type_hints(group)
        for f in fields(group):
            default = _default(f)
            shown = "" if default in (None, "", []) else f" (default: {_shown(default)})"
            choices = f" {{{','.join(f.metadata['choices'])}}}" if f.metadata["choices"] else ""
            lines.append(f"  --{f.name} <{_type_name(hints[f.name])}>{choices}")
            lines.append(f"      {f.metadata['help']}{shown}")
    if vocabulary.ignored:
        lines += ["", "Accepted without effect (the log says why):", "  " + ", ".join(sorted(vocabulary.ignored))]
    return "\n".join(lines) + "\n"


def _split(argv: Sequence[str], problems: list[str]) -> Iterable[Word]:
    """Words of the command line in order; those of a leading JSON file come first."""
    rest = list(argv)
    if rest and not rest[0].startswith("-") and rest[0].endswith(".json"):
        yield from _json_words(rest.pop(0))
    while rest:
        token = rest.pop(0)
        if not token.startswith("--") or token == "--":
            problems.append(f"unexpected word {token!r}: flags start with --, values with blanks need quotes")
            continue
        name, equals, value = token[2:].partition("=")
        if equals:
            yield Word(_canonical(name), (value,), f"--{name}")
            continue
        taken = []
        while rest and not rest[0].startswith("--"):
            taken.append(rest.pop(0))
        yield Word(_canonical(name), tuple(taken), f"--{name}")


def _json_words(path: str) -> Iterable[Word]:
    try:
        content = json.loads(Path(path).read_text(encoding="utf-8-sig"))
    except OSError as error:
        raise UsageError(f"cannot read the argument file {path}: {error.strerror}") from error
    except ValueError as error:
        raise UsageError(f"the argument file {path} is not valid JSON: {error}") from error
    if not isinstance(content, dict):
        raise UsageError(f"the argument file {path} holds no JSON object of flag -> value")
    for name, value in content.items():
        if value is None:
            continue  # null means: as if the flag were not there
        items = value if isinstance(value, list) else [value]
        if any(isinstance(item, (dict, list)) for item in items):
            raise UsageError(f"{path}: {name!r} holds a nested value; expected a string, number, boolean or list")
        texts = tuple(str(item).lower() if isinstance(item, bool) else str(item) for item in items)
        yield Word(_canonical(name), texts, f"{path}: {name}")


def _canonical(name: str) -> str:
    return name.replace("-", "_")


def _take(word: Word, vocabulary: Vocabulary, flags: dict[str, tuple[Field, Any]], parsed: Parsed) -> None:
    known, negated = _resolve(word, vocabulary, flags, parsed)
    name = vocabulary.renamed.get(known, known)
    if name in vocabulary.ignored:
        parsed.note(f"{word.place} has no effect here: {vocabulary.ignored[name]}")
        return
    if name in vocabulary.refused:
        off, reason = vocabulary.refused[name]
        asked = " ".join(word.values) if word.values else "true"
        if asked.lower() not in off:
            raise UsageError(f"{word.place} {asked}: {reason}")
        return
    f, kind = flags[name]
    value = (not _cast_bool(word)) if negated else _cast(word, f, kind)
    parsed.set(name, value, word.place.split(": ")[0])
    parsed.words[name] = known


def _resolve(
    word: Word, vocabulary: Vocabulary, flags: dict[str, tuple[Field, Any]], parsed: Parsed
) -> tuple[str, bool]:
    """The known word meant by `word`, and whether it was negated as `--no_x`."""
    known = vocabulary.words()
    name = word.name
    if name not in known and name.startswith("no_") and name[3:] in flags:
        if not _is_bool(flags[name[3:]][1]):
            raise UsageError(f"{word.place}: {name[3:]} is no switch that can be turned off")
        return name[3:], True
    if name not in known:
        matches = sorted(candidate for candidate in known if candidate.startswith(name))
        meant = {vocabulary.renamed.get(candidate, candidate) for candidate in matches}
        if not matches:
            raise UsageError(_unknown(word, known))
        if len(meant) > 1:
            raise UsageError(f"{word.place} is ambiguous, it may mean {', '.join('--' + m for m in matches)}")
        name = matches[0]
        parsed.note(f"{word.place} is taken as --{name}")
    return name, False


def _unknown(word: Word, known: set[str]) -> str:
    near = difflib.get_close_matches(word.name, sorted(known), n=1, cutoff=0.75)
    hint = f"; did you mean --{near[0]}?" if near else "; --help lists all flags"
    return f"{word.place} is unknown{hint}"


def _cast(word: Word, f: Field, kind: Any) -> Any:
    """The value of `word` as the type of its field."""
    if get_origin(kind) is list:
        return _cast_list(word, f, get_args(kind)[0])
    if _is_bool(kind):
        return _cast_bool(word)
    if not word.values:
        raise UsageError(f"{word.place} needs a value ({f.metadata['help']})")
    if len(word.values) > 1 and not f.metadata["words"]:
        raise UsageError(
            f"{word.place}: unexpected word {word.values[1]!r} after {word.values[0]!r}; quote values with blanks"
        )
    value = _cast_scalar(" ".join(word.values), kind, word.place)
    choices = f.metadata["choices"]
    if choices and value is not None:
        text = str(value).strip("'\"")
        value = next((choice for choice in choices if choice.lower() == text.lower()), None)
        if value is None:
            raise UsageError(f"{word.place} {text!r}: expected one of {', '.join(choices)}")
    return value


def _cast_list(word: Word, f: Field, kind: Any) -> list:
    """Each value is an item; with `words` blanks and commas part items too, and quotes and brackets are dropped."""
    items = list(word.values)
    if f.metadata["words"]:
        items = [item.strip("'\"[]") for value in items for item in value.replace(",", " ").split()]
        items = [item for item in items if item]
    return [_cast_scalar(item, kind, word.place) for item in items]


def _cast_scalar(text: str, kind: Any, place: str) -> Any:
    base, optional = _base(kind)
    if optional and text.lower() in ("none", "null"):
        return None
    try:
        value = _whole(text) if base is int else base(text)
    except (ValueError, OverflowError):
        wanted = {int: "a whole number", float: "a number"}[base]
        raise UsageError(f"{place} {text!r}: expected {wanted}") from None
    if base is int and abs(value) > LARGEST:
        raise UsageError(f"{place} {text}: no count is that large")
    return value


def _whole(text: str) -> int:
    """`text` as an int; 1e4 is 10000, 1.5 is none."""
    if not any(c in text for c in ".eE"):
        return int(text)
    number = float(text)
    if number != int(number):
        raise ValueError(text)
    return int(number)


def _cast_bool(word: Word) -> bool:
    text = " ".join(word.values).strip("'\"").lower() if word.values else "true"
    if text in TRUE:
        return True
    if text in FALSE:
        return False
    raise UsageError(f"{word.place} {text!r}: expected true or false (also 1/0, yes/no)")


def _base(kind: Any) -> tuple[Any, bool]:
    """(type, False) of a plain type, (T, True) of T | None."""
    if get_origin(kind) in (Union, types.UnionType):
        return next(a for a in get_args(kind) if a is not type(None)), True
    return kind, False


def _is_bool(kind: Any) -> bool:
    return _base(kind)[0] is bool


def _default(f: Field) -> Any:
    if f.default is not MISSING:
        return f.default
    factory: Any = f.default_factory
    return factory()


def _type_name(kind: Any) -> str:
    if get_origin(kind) is list:
        return f"{get_args(kind)[0].__name__} ..."
    return _base(kind)[0].__name__


def _shown(default: Any) -> str:
    return (
        " ".join(default)
        if isinstance(default, list)
        else str(default).lower()
        if isinstance(default, bool)
        else str(default)
    )
