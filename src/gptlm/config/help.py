"""The text of --help."""

import textwrap
from collections.abc import Iterator, Mapping
from dataclasses import Field, fields
from typing import Any

from gptlm.config.field import range_of
from gptlm.config.parser import Vocabulary, default_of, shown, type_name


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
        ("Accepted without effect (the log gives the reason):", vocabulary.ignored),
        ("Refused (the error gives the reason):", vocabulary.refused),
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
    if default is None and default_of(f) not in (None, "", []):
        default = shown(default_of(f))
    choices = f" {{{','.join(f.metadata['choices'])}}}" if f.metadata["choices"] else ""
    limits = range_of(f) or f.metadata["unit"]
    yield f"  --{f.name} <{type_name(kind)}>{choices}{f' [{limits}]' if limits else ''}"
    meaning = f.metadata["help"] + (f" (default: {default})" if default is not None else "")
    yield from textwrap.wrap(meaning, 118, initial_indent="      ", subsequent_indent="      ")
    if aliases:
        yield f"      also --{', --'.join(aliases)}"
