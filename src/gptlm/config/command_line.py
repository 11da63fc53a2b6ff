"""The words of a command: of its command line, and of the file it names."""

from collections.abc import Callable, Iterator
from dataclasses import replace

from gptlm.compat.fleetx.load import Configuration, read_configuration
from gptlm.config.files import YAML_ENDINGS, find, has_sections, json_words, load_yaml, yaml_words
from gptlm.config.word import Translation, Word, canonical
from gptlm.errors import UsageError

Sections = Callable[[Configuration], Translation]  # what a FleetX configuration says to a command


def read_words(argv: list[str], sections: Sections | None, known: set[str]) -> Translation:
    """The words of `argv`, those of the file it names first: flags win over it.

    Args:
        sections: what a FleetX configuration says to the command; None: it reads none.
        known: the words of the command; a mapping under one of them is its value, not a section.

    Raises:
        UsageError: if the file cannot be used.
    """
    files, overrides, rest = _files_of(argv)
    found = _file_words(files, overrides, sections, known)
    found.words += _split(rest, found.problems)
    return found


def _file_words(files: list[str], overrides: list[str], sections: Sections | None, known: set[str]) -> Translation:
    if not files:
        if overrides:
            raise UsageError(f"-o {overrides[0]} changes a configuration; name one with -c FILE.yaml")
        return Translation()
    if len(files) > 1:
        raise UsageError(f"{' and '.join(files)} are given; give one file, flags go after it")
    path = files[0]
    if path.endswith(".json"):
        tree = None
    else:
        path = find(path)
        tree = load_yaml(path)
    if tree is not None and has_sections(tree, known):
        if sections is None:
            raise UsageError(f"{path} is a configuration of FleetX, which pretrain, evaluate and predict read")
        return replace(sections(read_configuration(path, overrides)), from_sections=True)
    words = list(json_words(path) if tree is None else yaml_words(tree))
    return Translation(words + [_override_word(text) for text in overrides])


def _files_of(argv: list[str]) -> tuple[list[str], list[str], list[str]]:
    """The argument files, the -o words, and the rest."""
    files: list[str] = []
    overrides: list[str] = []
    rest: list[str] = []
    if argv and not argv[0].startswith("-") and argv[0].endswith((".json", *YAML_ENDINGS)):
        files.append(argv.pop(0))
    while argv:
        name, equals, value = argv[0].partition("=")
        if name not in ("-c", "--config", "-o", "--override"):
            rest.append(argv.pop(0))
            continue
        argv.pop(0)
        if not equals and (not argv or argv[0].startswith("--")):
            raise UsageError(f"{name} needs a value")
        (files if name in ("-c", "--config") else overrides).append(value if equals else argv.pop(0))
    return files, overrides, rest


def _override_word(text: str) -> Word:
    name, equals, value = text.partition("=")
    if not equals:
        raise UsageError(f"option({text}) should contain a =to distinguish between key and value")
    return Word(canonical(name), (value,), "-o", f"-o {name}")


def _split(rest: list[str], problems: list[str]) -> Iterator[Word]:
    """Words of the command line in order."""
    while rest:
        token = rest.pop(0)
        if not token.startswith("--") or token == "--":
            problems.append(f"unexpected word {token!r}: flags start with --, values with blanks need quotes")
            continue
        name, equals, value = token[2:].partition("=")
        taken = [value] if equals else []
        while not equals and rest and not rest[0].startswith("--"):
            taken.append(rest.pop(0))
        yield Word(canonical(name), tuple(taken), f"--{name}", f"--{name}")
