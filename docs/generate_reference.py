"""Write docs/reference/*.md from the arguments of each command: `python docs/generate_reference.py`."""

import html
import itertools
import re
from collections.abc import Iterator, Mapping
from dataclasses import Field, fields
from pathlib import Path
from typing import Any

from gptlm.cli import COMMANDS, DATA_TOOLS
from gptlm.config.field import range_of
from gptlm.config.parser import Vocabulary, default_of, shown, type_name

FOLDER = Path(__file__).resolve().parent / "reference"
NOTE = "<!-- Written by docs/generate_reference.py; edit the arguments in src/gptlm, not this page. -->"


def pages() -> dict[str, str]:
    """File name in docs/reference -> its text."""
    found = {"index.md": _index()}
    for name, command in COMMANDS.items():
        head = [f"# gptlm {name}", "", command.summary, "", f"The same as `python scripts/{command.script}`."]
        if command.more_help:
            head += _paragraphs(command.more_help)
        body = _data_tools() if name == "data" else _vocabulary(command.vocabulary, "##")
        found[f"{name}.md"] = "\n".join([NOTE, "", *head, *body]) + "\n"
    return found


def _index() -> str:
    rows = [f"| [`gptlm {name}`]({name}.md) | `{c.script}` | {_text(c.summary)} |" for name, c in COMMANDS.items()]
    head = [NOTE, "", "# Command line reference", ""]
    text = (
        "Each page lists every flag of a command, with its type, range, default and aliases. `gptlm COMMAND --help` "
        "prints the same. Dashes and underscores mean the same in a flag. [Configuration](../configuration.md) "
        "explains files, precedence and `--print_config`."
    )
    return "\n".join([*head, text, "", "| command | script in `scripts/` | purpose |", "|---|---|---|", *rows]) + "\n"


def _paragraphs(text: str) -> Iterator[str]:
    """The paragraphs of --help, whose indented lines become lists."""
    for paragraph in text.strip().split("\n\n"):
        lines = [re.sub(r"\{.*?\}", r"`\g<0>`", _with_code(_text(line))) for line in paragraph.splitlines()]
        for is_list, part in itertools.groupby(lines, lambda line: line.startswith("  ")):
            items = [re.sub(r"^(\S+(?: \S+)*)  +", r"\1: ", line.strip()) for line in part]
            yield from ["", *(f"- {item}" for item in items)] if is_list else ["", " ".join(items)]


def _data_tools() -> Iterator[str]:
    for tool, (summary, vocabulary, _) in DATA_TOOLS.items():
        yield from ["", f"## gptlm data {tool}", "", _text(summary)]
        if tool == "index":
            yield from ["", "Its flags are those of [gptlm pretrain](pretrain.md)."]
        else:
            yield from _vocabulary(vocabulary, "###")


def _vocabulary(vocabulary: Vocabulary, level: str) -> Iterator[str]:
    flags, aliases = vocabulary.flags(), _by_value(dict(sorted(vocabulary.renamed.items())))
    for group in vocabulary.groups:
        if len(vocabulary.groups) > 1:
            yield from ["", f"{level} {(group.__doc__ or '').strip().splitlines()[0].rstrip('.')}"]
        yield from ["", "| flag | value | default | meaning |", "|---|---|---|---|"]
        for name in (f.name for f in fields(group) if f.name not in vocabulary.fixed):
            yield _row(*flags[name], aliases.get(name, []), vocabulary.defaults.get(name))
    if vocabulary.fixed:
        yield from ["", f"{level} Cannot be changed in this command", "", *_reasons(vocabulary.fixed)]
    if vocabulary.settings:
        yield from ["", f"{level} Arguments that set other flags", "", "| argument | sets |", "|---|---|"]
    for word, meanings in vocabulary.settings.items():
        for meant, values in _by_value(meanings).items():
            if meant:
                yield f"| `--{word}` {_text(' or '.join(values))} | `{meant}` |"
    if vocabulary.ignored:
        yield from ["", f"{level} Accepted without effect", "", *_reasons(vocabulary.ignored)]
    if vocabulary.refused:
        refused = {word: reason for word, (_, reason) in vocabulary.refused.items()}
        yield from ["", f"{level} Refused", "", "A value that asks for nothing is accepted.", "", *_reasons(refused)]


def _row(f: Field, kind: Any, aliases: list[str], default: str | None) -> str:
    if default is None and default_of(f) not in (None, "", []):
        default = shown(default_of(f))
    value = type_name(kind)
    if f.metadata["choices"]:
        value = " ".join(f"`{choice}`" for choice in f.metadata["choices"])
    elif limits := range_of(f) or f.metadata["unit"]:
        value += f", {_text(limits)}"
    meaning = _with_code(_text(f.metadata["help"]))
    if aliases:
        meaning += f"<br>Also {', '.join(f'`--{alias}`' for alias in aliases)}"
    return f"| `--{f.name}` | {value} | {'' if default is None else f'`{default}`'} | {meaning} |"


def _reasons(reasons: Mapping[str, str]) -> Iterator[str]:
    yield from ["| flags | why |", "|---|---|"]
    for reason, words in _by_value(dict(sorted(reasons.items()))).items():
        yield f"| {', '.join(f'`--{word}`' for word in words)} | {_with_code(_text(reason))} |"


def _by_value(table: Mapping[str, str]) -> dict[str, list[str]]:
    found: dict[str, list[str]] = {}
    for key, value in table.items():
        found.setdefault(value, []).append(key)
    return found


def _with_code(text: str) -> str:
    return re.sub(r"(?<![\w-])--\w[\w-]*", r"`\g<0>`", text)


def _text(text: str) -> str:
    """Plain text for a cell of a Markdown table."""
    text = html.escape(text, quote=False).replace("|", "&#124;")
    return text.replace("*", r"\*").replace("[", r"\[")


if __name__ == "__main__":
    for name, text in pages().items():
        (FOLDER / name).write_text(text, encoding="utf-8")
