"""Arguments as written become typed values of known arguments, each with its source.

A name is one of our arguments, or an alias of compat/ that is renamed, ignored or refused, or it is an error that
suggests the nearest known name. All errors of one stage are reported together: the command line is parsed before
values and combinations are checked.
"""

import difflib
import json
import re
import types
from collections.abc import Mapping, Sequence
from dataclasses import MISSING, Field, dataclass, field, fields, replace
from functools import cache
from typing import Any, TypeVar, Union, get_args, get_origin, get_type_hints

from gptlm.config.field import LARGEST
from gptlm.config.files import Argument, CheckTree, ReadSections, canonical, read_arguments
from gptlm.config.origin import DEFAULT, Origin, Source
from gptlm.config.problem import Problem
from gptlm.errors import UsageError, with_flags_shown
from gptlm.secret import Secret

TRUE = ("1", "true", "t", "yes", "y", "on")
FALSE = ("0", "false", "f", "no", "n", "off")
ALWAYS_ON = "always on here: "  # begins the reason why a switch has no effect
SURROGATE = re.compile("[\ud800-\udfff]")  # how Python reads bytes of the command line that are not UTF-8
Group = TypeVar("Group")


@dataclass(frozen=True)
class Vocabulary:
    """The arguments that one command takes.

    Attributes:
        groups: dataclasses whose fields are the arguments.
        renamed: alias -> argument.
        ignored: alias -> why it has no effect.
        refused: alias -> (values that ask for nothing, why any other value is refused).
        alias_values: alias -> {value there: value here}.
        settings: alias -> {value there, in small letters: our arguments, as "--device cpu", or ""}; a bare switch is
            "true".
        defaults: argument -> its default in this command, for --help, where it is not the field's.
        fixed: argument -> why it cannot be changed in this command, for --help.
        sections: reads a FleetX configuration for this command; None: the command takes none.
        check_tree: refuses YAML files of other libraries.
    """

    groups: tuple[type, ...]
    renamed: Mapping[str, str] = field(default_factory=dict)
    ignored: Mapping[str, str] = field(default_factory=dict)
    refused: Mapping[str, tuple[tuple[str, ...], str]] = field(default_factory=dict)
    alias_values: Mapping[str, Mapping[str, str]] = field(default_factory=dict)
    settings: Mapping[str, Mapping[str, str]] = field(default_factory=dict)
    defaults: Mapping[str, str] = field(default_factory=dict)
    fixed: Mapping[str, str] = field(default_factory=dict)
    sections: ReadSections | None = None
    check_tree: CheckTree | None = None

    def flags(self) -> dict[str, tuple[Field, Any]]:
        """Name -> (field, type) of every argument."""
        return _flags_of(self.groups)

    def names(self) -> set[str]:
        """Every name that is known, aliases included."""
        return {*self.effective(), *self.ignored, *self.refused}

    def effective(self) -> set[str]:
        """Every name that has an effect."""
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
    """The groups of arguments, the source of each value, and lines for the log. Resolving fills in what follows.

    `parsed[ModelArguments]` is a group; `parsed.put(replace(group, ...), source)` changes it.

    Attributes:
        notes: lines for the log.
        aliases: argument that was given -> the name that gave it, perhaps an alias.
        typed: argument -> how messages call it: as the user typed it, or one that is not given as its original does.
        bare: arguments that were given as switches beside an alias with their value, see `args.training.arg`.
        used: every known name that was given.
        replaced: argument -> its value in the file, where the command gives another one.
        refusals: why the run can be shown but not started.
        missing: with --print_config: what the command lacks to be started.
        from_sections: a FleetX configuration was read.
    """

    groups: dict[type, Any]
    sources: dict[str, Source]
    notes: list[str] = field(default_factory=list)
    aliases: dict[str, str] = field(default_factory=dict)
    typed: dict[str, str] = field(default_factory=dict)
    bare: dict[str, str] = field(default_factory=dict)
    used: set[str] = field(default_factory=set)
    replaced: dict[str, Any] = field(default_factory=dict)
    refusals: list[str] = field(default_factory=list)
    missing: list[str] = field(default_factory=list)
    from_sections: bool = False

    def __getitem__(self, kind: type[Group]) -> Group:
        return self.groups[kind]

    def put(self, group: Group, source: Source | None = None) -> Group:
        """Replace a group; values that differ from before have `source` (None: they keep theirs)."""
        before: Any = self.groups[type(group)]
        self.groups[type(group)] = group
        if source is not None:
            pairs = {f.name: (getattr(before, f.name), getattr(group, f.name)) for f in fields(before)}
            # `is not`: an unchanged NaN differs from itself
            self.sources |= {name: source for name, (old, new) in pairs.items() if old is not new and old != new}
        return group

    def set(self, name: str, value: Any, source: Source) -> None:
        """Set one argument by its name, for tables of arguments. Elsewhere use `put`, which mypy can check."""
        kind = next(kind for kind in self.groups if name in _flags_of((kind,)))
        self.groups[kind] = replace(self.groups[kind], **{name: value})
        self.sources[name] = source

    def value(self, name: str) -> Any:
        """One value by the name of its argument, for tables of arguments."""
        return getattr(next(group for kind, group in self.groups.items() if name in _flags_of((kind,))), name)

    def is_default(self, name: str) -> bool:
        """Whether nothing has set the argument: neither the user, nor a compat mode, nor a rule."""
        return self.sources[name].origin is Origin.DEFAULT

    def given(self, name: str) -> bool:
        """Whether the user gave the argument, by any name, on the command line or in a file."""
        return name in self.aliases

    def typed_as(self, name: str) -> str:
        """The argument as the user wrote it, or its name."""
        return self.typed.get(name, f"--{name}")

    def note(self, line: str) -> None:
        """Add a line for the log, once; arguments that it refers to by `gptlm.errors.named` are shown as typed."""
        line = with_flags_shown(line, self.typed)
        if line not in self.notes:
            self.notes.append(line)

    def note_missing(self, problem: Problem) -> None:
        """With --print_config: add a line for the log about something that the command lacks to be started."""
        self.note(problem.marked)
        self.missing.append(with_flags_shown(problem.marked, self.typed))

    def as_json(self) -> str:
        """Values, the source of each, and the lines for the log."""
        values = {f.name: getattr(group, f.name) for group in self.groups.values() for f in fields(group)}
        sources = {name: source.text for name, source in self.sources.items()}
        refusals = [f"this version refuses to run it: {line}" for line in self.refusals]
        return json.dumps({"run": values, "from": sources, "notes": [*self.notes, *refusals]}, indent=1, default=str)


def parse(vocabulary: Vocabulary, argv: Sequence[str]) -> Parsed:
    """Parse `argv`. A file (leading, or after -c) gives values; the command line takes precedence.

    Raises:
        UsageError: listing everything that is wrong.
    """
    found = read_arguments(list(argv), vocabulary.sections, vocabulary.names(), vocabulary.check_tree)
    reader = _Reader(vocabulary)
    reader.parsed.notes += found.notes
    problems = [*found.problems]
    for argument in found.given:
        try:
            reader.take(argument)
        except UsageError as error:
            problems.append(str(error))
    if problems:
        raise UsageError("\n".join(problems))
    parsed = reader.parsed
    parsed.refusals += found.refusals
    parsed.from_sections = found.from_sections
    for group in vocabulary.groups:
        parsed.groups[group] = group(**{f.name: reader.values[f.name] for f in fields(group)})
    return parsed


class _Reader:
    """Takes one argument after the other; a later one takes precedence."""

    def __init__(self, vocabulary: Vocabulary):
        self.vocabulary, self.flags = vocabulary, vocabulary.flags()
        self.values = {name: default_of(f) for name, (f, _) in self.flags.items()}
        self.parsed = Parsed({}, dict.fromkeys(self.values, DEFAULT))

    def take(self, given: Argument) -> None:
        """Set what `given` asks for. Raises UsageError."""
        vocabulary, parsed = self.vocabulary, self.parsed
        if any("\0" in value for value in given.values):
            raise UsageError(f"{given.typed}: the value holds a NUL character; remove it")
        if any(map(SURROGATE.search, given.values)):
            raise UsageError(f"{given.typed}: the value is not UTF-8; rename the file, or convert the text")
        known, negated = self._resolve(given)
        name = vocabulary.renamed.get(known, known)
        parsed.used.add(known)
        if name in vocabulary.settings:
            for meant in _settings(given, vocabulary.settings[name]):
                self.take(meant)
        elif name in vocabulary.ignored:
            reason = vocabulary.ignored[name]
            parsed.note(f"{given.typed} {'is' if reason.startswith(ALWAYS_ON) else 'has no effect here:'} {reason}")
        elif name in vocabulary.refused:
            off, reason = vocabulary.refused[name]
            if given.switched.lower() not in off:
                raise UsageError(f"{given.typed} {given.switched}: {reason}")
        else:
            self._set(name, known, given, negated)

    def _set(self, name: str, known: str, given: Argument, negated: bool) -> None:
        parsed = self.parsed
        if given.nested and not self.flags[name][0].metadata["nested"]:
            raise UsageError(f"{given.typed} holds a nested value; expected a string, number, boolean or list")
        values = self.vocabulary.alias_values.get(known, {})
        words = given.values or (("true",) if "true" in values else ())
        given = replace(given, values=tuple(values.get(value.lower(), value) for value in words))
        f, kind = self.flags[name]
        if not given.values and f.metadata["switch"]:
            parsed.bare[name] = given.typed
            return
        value = (not _cast_bool(given)) if negated else _cast(given, f, kind)
        before = parsed.sources[name].origin
        typed = {before, given.source.origin} <= {Origin.CLI, Origin.OVERRIDE}
        if value != self.values[name] and (typed or before is given.source.origin):
            lost, counts = self._with_value(parsed.typed[name], self.values[name]), self._with_value(given.typed, value)
            why = "comes after it" if before is given.source.origin else "takes precedence"
            parsed.note(f"{lost} has no effect: {counts} {why}")
        if before is Origin.FILE and given.source.origin is not Origin.FILE:
            parsed.replaced[name] = self.values[name]
        self.values[name] = value
        parsed.sources[name] = given.source
        parsed.aliases[name] = known
        parsed.typed[name] = given.typed

    def _with_value(self, typed: str, value: Any) -> str:
        """The argument and its value as typed; an alias such as --use_cpu contains the value."""
        return typed if canonical(typed.lstrip("-")) in self.vocabulary.settings else f"{typed} {shown(value)}"

    def _resolve(self, given: Argument) -> tuple[str, bool]:
        """The known name of `given`, and whether it was negated as in `--no_x`. Unique prefixes are accepted."""
        known, effective, name = self.vocabulary.names(), self.vocabulary.effective(), given.name
        if name in known:
            return name, False
        if name.startswith("no_") and name[3:] in self.flags:
            if not _is_bool(self.flags[name[3:]][1]):
                raise UsageError(f"{given.typed}: {name[3:]} is not a boolean flag")
            return name[3:], True
        longer = sorted(candidate for candidate in known if candidate.startswith(name))
        matches = [candidate for candidate in longer if candidate in effective] or longer
        meant = {self.vocabulary.renamed.get(candidate, candidate) for candidate in matches}
        if not matches or (len(meant) > 1 and not effective.intersection(matches)):
            # An argument without effect is never suggested.
            near = difflib.get_close_matches(name, sorted(effective), n=1, cutoff=0.75)
            near += sorted(other for other in effective if name in other.split("_", 1)[-1] and other not in near)
            hint = f"; did you mean --{', --'.join(near[:3])}?" if near else "; --help lists all flags"
            raise UsageError(f"{given.typed} is unknown{hint}")
        if len(meant) > 1:
            raise UsageError(f"{given.typed} is ambiguous, it may mean {', '.join('--' + m for m in matches)}")
        self.parsed.note(f"{given.typed} is taken as --{matches[0]}")
        return matches[0], False


def _settings(given: Argument, meanings: Mapping[str, str]) -> list[Argument]:
    """Our arguments for an alias of `Vocabulary.settings`."""
    if not given.values and "true" not in meanings:
        raise UsageError(f"{given.typed} needs a value: one of {', '.join(meanings)}")
    asked = given.switched.lower().removeprefix("torch.")
    if asked not in meanings and "true" in meanings:
        asked = "true" if asked in TRUE else "false" if asked in FALSE else asked
    if asked not in meanings:
        raise UsageError(f"{given.typed} {asked!r}: expected one of {', '.join(meanings)}")
    pairs = meanings[asked].split()
    return [Argument(name[2:], (value,), given.source, given.typed) for name, value in zip(pairs[::2], pairs[1::2])]


def _cast(given: Argument, f: Field, kind: Any) -> Any:
    """The value of `given` as the type of its field."""
    if get_origin(kind) is list:
        return _cast_list(given, f, get_args(kind)[0])
    if _is_bool(kind):
        return _cast_bool(given)
    if not given.values:
        raise UsageError(f"{given.typed} needs a value ({f.metadata['help']})")
    if len(given.values) > 1 and _base(kind)[0] is Secret:
        raise UsageError(f"{given.typed} has {len(given.values)} words; expected one")
    if len(given.values) > 1 and not f.metadata["words"]:
        raise UsageError(
            f"{given.typed}: unexpected word {given.values[1]!r} after {given.values[0]!r}; quote values with blanks"
        )
    value = _cast_scalar(" ".join(given.values), kind, given.typed)
    choices = f.metadata["choices"]
    if choices and value is not None:
        text = str(value).strip("'\"")
        value = next((choice for choice in choices if choice.lower() == text.lower()), None)
        if value is None:
            raise UsageError(f"{given.typed} {text!r}: expected one of {', '.join(choices)}")
    return value


def _cast_list(given: Argument, f: Field, kind: Any) -> list:
    """Each value is an item; with `words` blanks and commas separate items, and quotes and brackets are dropped."""
    items = list(given.values)
    if f.metadata["words"]:
        items = [item.strip("'\"[]") for value in items for item in value.replace(",", " ").split()]
        items = [item for item in items if item]
    return [_cast_scalar(item, kind, given.typed) for item in items]


def _cast_scalar(text: str, kind: Any, typed: str) -> Any:
    base, optional = _base(kind)
    if optional and text.lower() in ("none", "null"):
        return None
    try:
        value = _whole(text) if base is int else base(text)
    except (ValueError, OverflowError):
        wanted = {int: "a whole number", float: "a number"}[base]
        raise UsageError(f"{typed} {text!r}: expected {wanted}") from None
    if base is int and abs(value) > LARGEST:
        raise UsageError(f"{typed} {text}: no count is that large")
    return value


def _whole(text: str) -> int:
    """`text` as an int; 1e4 is 10000, 1.5 is none."""
    if not any(c in text for c in ".eE"):
        return int(text)
    number = float(text)
    if number != int(number):
        raise ValueError(text)
    return int(number)


def _cast_bool(given: Argument) -> bool:
    text = given.switched
    if text.lower() in TRUE:
        return True
    if text.lower() in FALSE:
        return False
    raise UsageError(f"{given.typed} {text!r}: expected true or false (also 1/0, yes/no)")


def _base(kind: Any) -> tuple[Any, bool]:
    """(type, False) of a plain type, (T, True) of T | None."""
    if get_origin(kind) in (Union, types.UnionType):
        return next(a for a in get_args(kind) if a is not type(None)), True
    return kind, False


def _is_bool(kind: Any) -> bool:
    return _base(kind)[0] is bool


def default_of(f: Field) -> Any:
    """The default of a field."""
    if f.default is not MISSING:
        return f.default
    factory: Any = f.default_factory
    return factory()


def type_name(kind: Any) -> str:
    """A type for --help."""
    if get_origin(kind) is list:
        return f"{get_args(kind)[0].__name__} ..."
    return _base(kind)[0].__name__.lower()


def shown(value: Any) -> str:
    """A value as it would be typed."""
    if isinstance(value, list):
        return " ".join(str(item) for item in value)
    return str(value).lower() if isinstance(value, bool) else str(value)
