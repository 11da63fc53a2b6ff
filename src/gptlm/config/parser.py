"""The door: words of a command line, a JSON or a YAML file become typed values of known flags, each with its origin.

A word is spelled as one of our flags, or as a foreign word of spellings.py that is renamed, noted or refused, or it
is an error that names the nearest known word. Everything wrong is reported at once.
"""

import difflib
import json
import textwrap
import types
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import MISSING, Field, dataclass, field, fields, replace
from functools import cache
from typing import Any, Union, get_args, get_origin, get_type_hints

from gptlm.config.command_line import Sections, read_words
from gptlm.config.field import LARGEST, range_of
from gptlm.config.word import Word, canonical
from gptlm.errors import UsageError, with_flags_shown

TRUE = ("1", "true", "t", "yes", "y", "on")
FALSE = ("0", "false", "f", "no", "n", "off")


@dataclass(frozen=True)
class Vocabulary:
    """The words one command understands.

    Attributes:
        groups: dataclasses whose fields are the flags.
        renamed: foreign word -> flag.
        ignored: foreign word -> why it has no effect.
        refused: foreign word -> (values that ask for nothing, why anything else is refused).
        respelled: foreign word -> {value there: value here}.
        settings: foreign word -> {value there, in small letters: our words for it, as "--device cpu", or ""}; a bare
            switch is "true".
        defaults: flag -> what its default is in this command, for --help, where it is not the field's.
        fixed: flag -> why it cannot be set otherwise in this command, for --help.
        sections: what a FleetX configuration says to this command; None: it reads none.
    """

    groups: tuple[type, ...]
    renamed: Mapping[str, str] = field(default_factory=dict)
    ignored: Mapping[str, str] = field(default_factory=dict)
    refused: Mapping[str, tuple[tuple[str, ...], str]] = field(default_factory=dict)
    respelled: Mapping[str, Mapping[str, str]] = field(default_factory=dict)
    settings: Mapping[str, Mapping[str, str]] = field(default_factory=dict)
    defaults: Mapping[str, str] = field(default_factory=dict)
    fixed: Mapping[str, str] = field(default_factory=dict)
    sections: Sections | None = None

    def flags(self) -> dict[str, tuple[Field, Any]]:
        """Name -> (field, type) of every flag."""
        return _flags_of(self.groups)

    def words(self) -> set[str]:
        """Every word that is understood, ours and foreign."""
        return {*self.effective(), *self.ignored, *self.refused}

    def effective(self) -> set[str]:
        """Every word that does something."""
        return {*self.flags(), *self.renamed, *self.settings}


@cache
def _flags_of(groups: tuple[type, ...]) -> dict[str, tuple[Field, Any]]:
    found = {}
    for group in groups:
        hints = get_type_hints(group)
        found.update({f.name: (f, hints[f.name]) for f in fields(group)})
    return found


@dataclass
class Parsed:
    """Values by flag, where each came from ("default", the word as typed, a file), and lines for the log.

    Attributes:
        words: for each flag that was given, the known word that gave it, which may be a foreign one.
        typed: for each flag that was given, how it is called in messages.
        bare: the flags that were given as switches beside another word with their value, see `arguments.arg`.
        spoken: every known word that was used.
        refusals: why the run can be shown but not started.
        from_sections: a FleetX configuration was read.
    """

    values: dict[str, Any]
    sources: dict[str, str]
    notes: list[str]
    words: dict[str, str] = field(default_factory=dict)
    typed: dict[str, str] = field(default_factory=dict)
    bare: dict[str, str] = field(default_factory=dict)
    spoken: set[str] = field(default_factory=set)
    refusals: list[str] = field(default_factory=list)
    from_sections: bool = False

    def set(self, name: str, value: Any, source: str) -> None:
        """Fill in what follows from other flags."""
        self.values[name] = value
        self.sources[name] = source

    def typed_as(self, name: str) -> str:
        """The flag as the user wrote it, or its name."""
        return self.typed.get(name, f"--{name}")

    def as_json(self) -> str:
        """Values, the origin of each, and the lines for the log."""
        refusals = [f"this version refuses to run it: {line}" for line in self.refusals]
        notes = [*self.notes, *refusals]
        return json.dumps({"run": self.values, "from": self.sources, "notes": notes}, indent=1)

    def given(self, name: str) -> bool:
        """Whether the user gave the flag, by whatever word, on the command line or in a file."""
        return name in self.words

    def note(self, line: str) -> None:
        """Add a line for the log, once; flags that it refers to by `gptlm.errors.named` are called as typed."""
        line = with_flags_shown(line, self.typed)
        if line not in self.notes:
            self.notes.append(line)


def parse(vocabulary: Vocabulary, argv: Sequence[str]) -> Parsed:
    """Parse `argv`. A file (leading, or after -c) gives values, flags on the command line win over it.

    Raises:
        UsageError: listing everything that is wrong.
    """
    flags = vocabulary.flags()
    values = {name: _default(f) for name, (f, _) in flags.items()}
    parsed = Parsed(values, dict.fromkeys(values, "default"), [])
    problems: list[str] = []
    found = read_words(list(argv), vocabulary.sections, vocabulary.words())
    parsed.notes += found.notes
    parsed.refusals += found.refusals
    parsed.from_sections = found.from_sections
    problems += found.problems
    for word in found.words:
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
    lines = [f"usage: {program} [FILE.json | -c FILE.yaml [-o KEY=VALUE ...]] [--flag value ...]"]
    lines += ["", *summary.splitlines()]
    flags = vocabulary.flags()
    aliases = _by_value(dict(sorted(vocabulary.renamed.items())))
    for group in vocabulary.groups:
        lines += ["", (group.__doc__ or "").strip()] if len(vocabulary.groups) > 1 else [""]
        for name in (f.name for f in fields(group) if f.name not in vocabulary.fixed):
            lines += _help_of(flags[name], aliases.get(name, []), vocabulary.defaults.get(name))
    if vocabulary.fixed:
        lines += ["", "Cannot be changed in this command:"]
        lines += [f"  --{', --'.join(names)}: {reason}" for reason, names in _by_value(vocabulary.fixed).items()]
    if vocabulary.settings:
        lines += ["", "Arguments that set other flags:"]
    for word, meanings in vocabulary.settings.items():
        kept = {meant: values for meant, values in _by_value(meanings).items() if meant}
        lines += [f"  --{word} {' or '.join(values)}: {meant}" for meant, values in kept.items()]
    for title, words in (
        ("Accepted without effect (the log says why):", vocabulary.ignored),
        ("Refused (the error says why):", vocabulary.refused),
    ):
        if words:
            text = ", ".join(sorted(words))
            lines += ["", title, *textwrap.wrap(text, 118, initial_indent="  ", subsequent_indent="  ")]
    return "\n".join(lines) + "\n"


def _by_value(table: Mapping[str, str]) -> dict[str, list[str]]:
    """Value -> the keys that have it."""
    found: dict[str, list[str]] = {}
    for key, value in table.items():
        found.setdefault(value, []).append(key)
    return found


def _help_of(flag: tuple[Field, Any], aliases: list[str], default: str | None) -> Iterator[str]:
    """The lines of --help about one flag; `default` where it is not the field's."""
    f, kind = flag
    if default is None and _default(f) not in (None, "", []):
        default = shown(_default(f))
    choices = f" {{{','.join(f.metadata['choices'])}}}" if f.metadata["choices"] else ""
    limits = range_of(f) or f.metadata["unit"]
    yield f"  --{f.name} <{_type_name(kind)}>{choices}{f' [{limits}]' if limits else ''}"
    yield f"      {f.metadata['help']}{f' (default: {default})' if default is not None else ''}"
    if aliases:
        yield f"      also --{', --'.join(aliases)}"


def _take(word: Word, vocabulary: Vocabulary, flags: dict[str, tuple[Field, Any]], parsed: Parsed) -> None:
    if any("\0" in value for value in word.values):
        raise UsageError(f"{word.typed}: the value holds a NUL character; remove it")
    known, negated = _resolve(word, vocabulary, flags, parsed)
    name = vocabulary.renamed.get(known, known)
    parsed.spoken.add(known)
    if name in vocabulary.settings:
        for meant in _settings(word, vocabulary.settings[name]):
            _take(meant, vocabulary, flags, parsed)
        return
    if name in vocabulary.ignored:
        parsed.note(f"{word.typed} has no effect here: {vocabulary.ignored[name]}")
        return
    if name in vocabulary.refused:
        off, reason = vocabulary.refused[name]
        if word.switched.lower() not in off:
            raise UsageError(f"{word.typed} {word.switched}: {reason}")
        return
    if word.nested:
        raise UsageError(f"{word.typed} holds a nested value; expected a string, number, boolean or list")
    spellings = vocabulary.respelled.get(known, {})
    word = replace(word, values=tuple(spellings.get(value.lower(), value) for value in word.values))
    f, kind = flags[name]
    if not word.values and f.metadata["switch"]:
        parsed.bare[name] = word.typed
        return
    value = (not _cast_bool(word)) if negated else _cast(word, f, kind)
    if parsed.sources[name].startswith("--") and word.place.startswith("--") and value != parsed.values[name]:
        lost = _with_value(parsed.typed[name], parsed.values[name], vocabulary)
        parsed.note(f"{lost} has no effect: {_with_value(word.typed, value, vocabulary)} comes after it")
    parsed.set(name, value, word.place)
    parsed.words[name] = known
    parsed.typed[name] = word.typed


def _with_value(typed: str, value: Any, vocabulary: Vocabulary) -> str:
    """The flag as it was typed and its value, but for words such as --use_cpu, which are one already."""
    return typed if canonical(typed.lstrip("-")) in vocabulary.settings else f"{typed} {shown(value)}"


def _resolve(
    word: Word, vocabulary: Vocabulary, flags: dict[str, tuple[Field, Any]], parsed: Parsed
) -> tuple[str, bool]:
    """The known word meant by `word`, and whether it was negated as `--no_x`."""
    known = vocabulary.words()
    name = word.name
    if name not in known and name.startswith("no_") and name[3:] in flags:
        if not _is_bool(flags[name[3:]][1]):
            raise UsageError(f"{word.typed}: {name[3:]} is no switch that can be turned off")
        return name[3:], True
    if name not in known:
        longer = sorted(candidate for candidate in known if candidate.startswith(name))
        matches = [candidate for candidate in longer if candidate in vocabulary.effective()] or longer
        meant = {vocabulary.renamed.get(candidate, candidate) for candidate in matches}
        if not matches or (len(meant) > 1 and not vocabulary.effective().intersection(matches)):
            raise UsageError(_unknown(word, vocabulary))
        if len(meant) > 1:
            raise UsageError(f"{word.typed} is ambiguous, it may mean {', '.join('--' + m for m in matches)}")
        name = matches[0]
        parsed.note(f"{word.typed} is taken as --{name}")
    return name, False


def _settings(word: Word, meanings: Mapping[str, str]) -> list[Word]:
    """Our words for `word`, which is of `Vocabulary.settings`."""
    if not word.values and "true" not in meanings:
        raise UsageError(f"{word.typed} needs a value: one of {', '.join(meanings)}")
    asked = word.switched.lower().removeprefix("torch.")
    if asked not in meanings and "true" in meanings:
        asked = "true" if asked in TRUE else "false" if asked in FALSE else asked
    if asked not in meanings:
        raise UsageError(f"{word.typed} {asked!r}: expected one of {', '.join(meanings)}")
    pairs = meanings[asked].split()
    return [Word(name[2:], (value,), word.place, word.typed) for name, value in zip(pairs[::2], pairs[1::2])]


def _unknown(word: Word, vocabulary: Vocabulary) -> str:
    """That `word` is unknown, with the nearest word that does something."""
    near = difflib.get_close_matches(word.name, sorted(vocabulary.effective()), n=1, cutoff=0.75)
    hint = f"; did you mean --{near[0]}?" if near else "; --help lists all flags"
    return f"{word.typed} is unknown{hint}"


def _cast(word: Word, f: Field, kind: Any) -> Any:
    """The value of `word` as the type of its field."""
    if get_origin(kind) is list:
        return _cast_list(word, f, get_args(kind)[0])
    if _is_bool(kind):
        return _cast_bool(word)
    if not word.values:
        raise UsageError(f"{word.typed} needs a value ({f.metadata['help']})")
    if len(word.values) > 1 and not f.metadata["words"]:
        raise UsageError(
            f"{word.typed}: unexpected word {word.values[1]!r} after {word.values[0]!r}; quote values with blanks"
        )
    value = _cast_scalar(" ".join(word.values), kind, word.typed)
    choices = f.metadata["choices"]
    if choices and value is not None:
        text = str(value).strip("'\"")
        value = next((choice for choice in choices if choice.lower() == text.lower()), None)
        if value is None:
            raise UsageError(f"{word.typed} {text!r}: expected one of {', '.join(choices)}")
    return value


def _cast_list(word: Word, f: Field, kind: Any) -> list:
    """Each value is an item; with `words` blanks and commas part items too, and quotes and brackets are dropped."""
    items = list(word.values)
    if f.metadata["words"]:
        items = [item.strip("'\"[]") for value in items for item in value.replace(",", " ").split()]
        items = [item for item in items if item]
    return [_cast_scalar(item, kind, word.typed) for item in items]


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
    text = word.switched
    if text.lower() in TRUE:
        return True
    if text.lower() in FALSE:
        return False
    raise UsageError(f"{word.typed} {text!r}: expected true or false (also 1/0, yes/no)")


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


def shown(value: Any) -> str:
    """A value as it would be typed."""
    if isinstance(value, list):
        return " ".join(str(item) for item in value)
    return str(value).lower() if isinstance(value, bool) else str(value)
