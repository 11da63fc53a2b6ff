"""Arguments as they are written: on the command line, in JSON files, and in YAML files with the line of each value."""

import difflib
import itertools
import json
import types
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, field, replace
from importlib import resources
from pathlib import Path
from typing import Any

import yaml

from gptlm.config.origin import Origin, Source
from gptlm.disk import read_file
from gptlm.errors import UsageError, reason_of
from gptlm.json_text import parse_json
from gptlm.secret import hidden

YAML_ENDINGS = (".yaml", ".yml")
NEAR = 0.5  # how alike names are that an error lists first, 1 is equal
MAX_YAML = 1 << 18  # characters of a file, and values in it with each alias as a copy
MAX_NUMBER = 400  # characters, enough for each float without an exponent
SHIPPED = "configs"  # folder of the package with configurations that can be named without a path


@dataclass(frozen=True)
class Argument:
    """An argument and its values as texts.

    Attributes:
        name: with underscores.
        values: none for a bare switch.
        typed: how messages call it: "--seed", "-o Global.seed", "args.json: seed", "Global.seed (configs/x.yaml:12)".
        nested: the value is a list or mapping of such, as JSON in `values`; no argument takes one.
    """

    name: str
    values: tuple[str, ...]
    source: Source
    typed: str
    nested: bool = False

    @property
    def switched(self) -> str:
        """The value of a switch; a bare one on the command line is "true"."""
        bare = not self.values and self.source.origin is Origin.CLI
        return "true" if bare else " ".join(self.values).strip("'\"")


@dataclass
class Arguments:
    """All arguments of a command, lines for the log, problems, and why the run can be shown but not started.

    `from_sections`: they come from a FleetX configuration.
    """

    given: list[Argument] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)
    refusals: list[str] = field(default_factory=list)
    from_sections: bool = False


CheckTree = Callable[[str, dict[str, Any]], None]  # a YAML file and what it holds; raises UsageError to refuse it
ReadSections = Callable[[str, list[str]], Arguments]  # a configuration file with sections, and its -o overrides


@dataclass(frozen=True)
class Leaf:
    """A value of a YAML file and its place."""

    value: Any
    source: Source

    @property
    def place(self) -> str:
        """ "FILE:LINE", or "-o"."""
        return self.source.text


Tree = dict[str, Any]  # key -> Leaf or Tree
OVERRIDE = Source(Origin.OVERRIDE, "-o")


def canonical(name: str) -> str:
    """`name` with underscores."""
    return name.replace("-", "_")


def as_texts(value: object) -> tuple[str, ...]:
    """A value of a file as it would be typed."""
    items = value if isinstance(value, (list, tuple)) else [value]
    return tuple(str(item).lower() if isinstance(item, bool) else str(item) for item in items)


def read_arguments(
    argv: list[str], read_sections: ReadSections | None, known: set[str], check_tree: CheckTree | None = None
) -> Arguments:
    """The arguments of `argv`. Those of the file it names come first, so that the command line takes precedence.

    Args:
        read_sections: reads a FleetX configuration; None: the command takes none.
        known: the arguments of the command; a mapping under one of them is its value, not a section.
        check_tree: refuses YAML files of other libraries.

    Raises:
        UsageError: if the file cannot be used.
    """
    files, overrides, rest = _files_of(argv)
    found = _file_arguments(files, overrides, read_sections, known, check_tree)
    found.given += _split(rest, found.problems)
    return found


def _file_arguments(
    files: list[str],
    overrides: list[str],
    read_sections: ReadSections | None,
    known: set[str],
    check_tree: CheckTree | None,
) -> Arguments:
    if not files:
        if overrides:
            raise UsageError(f"-o {overrides[0]} changes a configuration; name one with -c FILE.yaml")
        return Arguments()
    if len(files) > 1:
        raise UsageError(f"{' and '.join(files)} are given; give one file, flags go after it")
    path = files[0]
    notes: list[str] = []
    if path.endswith(".json"):
        given = list(json_arguments(path))
    else:
        path, note = find(path)
        notes += [note] if note else []
        tree = load_yaml(path)
        if check_tree is not None:
            check_tree(path, tree)
        if has_sections(tree, known):
            if read_sections is None:
                raise UsageError(
                    f"{path} has sections, as a configuration of FleetX, which pretrain, evaluate and predict read; "
                    "this command reads lines of FLAG: VALUE"
                )
            found = read_sections(path, overrides)
            return replace(found, notes=[*notes, *found.notes], from_sections=True)
        given = list(yaml_arguments(tree))
    return Arguments(given + [_override(text) for text in overrides], notes)


def _files_of(argv: list[str]) -> tuple[list[str], list[str], list[str]]:
    """The argument files, the -o overrides, and the rest."""
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


def _override(text: str) -> Argument:
    name, equals, value = text.partition("=")
    if not equals:
        raise UsageError(f"option({text}) should contain a =to distinguish between key and value")
    return Argument(canonical(name), (value,), OVERRIDE, f"-o {name}")


def _split(rest: list[str], problems: list[str]) -> Iterator[Argument]:
    """The arguments of the command line in order."""
    while rest:
        token = rest.pop(0)
        if not token.startswith("--") or token == "--":
            (shown,) = hidden([token])
            problems.append(f"unexpected word {shown!r}: flags start with --, values with blanks need quotes")
            continue
        name, equals, value = token[2:].partition("=")
        taken = [value] if equals else []
        while not equals and rest and not rest[0].startswith("--"):
            taken.append(rest.pop(0))
        yield Argument(canonical(name), tuple(taken), Source(Origin.CLI, f"--{name}"), f"--{name}")


def read_json(path: str, what: str) -> dict[str, Any]:
    """The JSON object in the file `path`, which messages call `what`. Raises UsageError."""
    try:
        content = parse_json(read_file(path).decode("utf-8-sig"))
    except OSError as error:
        raise UsageError(f"{what} cannot be read: {error.strerror}") from error
    except ValueError as error:
        raise UsageError(f"{what} is not valid JSON: {error}") from error
    if not isinstance(content, dict):
        raise UsageError(f"{what} holds no JSON object")
    return content


def json_arguments(path: str) -> Iterator[Argument]:
    """The arguments in a JSON file; null is as if the key were not there. Raises UsageError."""
    for name, value in read_json(path, f"the argument file {path}").items():
        if value is not None:
            yield _argument(name, value, Source(Origin.FILE, path), f"{path}: {name}")


def yaml_arguments(tree: Tree) -> Iterator[Argument]:
    """The arguments in a YAML file without sections."""
    for name, node in tree.items():
        if isinstance(node, dict):
            unknown = Source(Origin.FILE, name)  # of an empty mapping
            source = next((leaf.source for leaf in node.values() if isinstance(leaf, Leaf)), unknown)
            yield _argument(name, _plain(node), source, f"{name} ({source.text})")
        elif node.value is not None:
            yield _argument(name, node.value, node.source, f"{name} ({node.place})")


def has_sections(tree: Tree, known: Collection[str]) -> bool:
    """Whether the file is more than a list of arguments; a mapping under a `known` name is its value."""
    sections = (key for key, value in tree.items() if isinstance(value, dict) and canonical(key) not in known)
    return any(sections) or "_base_" in tree


def load_yaml(path: str) -> Tree:
    """The mapping in a YAML file, each value with its line.

    Raises:
        UsageError: if it cannot be read, is not a mapping, or is larger than any configuration.
    """
    shown = str(path).removeprefix(f"{resources.files('gptlm')}/")
    try:
        text = read_file(path).decode("utf-8-sig")
    except OSError as error:
        raise UsageError(f"cannot read the configuration {path}: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise UsageError(f"the configuration {path} is not UTF-8 (byte {error.start})") from error
    if len(text) > MAX_YAML:
        raise UsageError(f"the configuration {path} has {len(text):,} characters, at most {MAX_YAML:,} are read")
    try:
        root = yaml.compose(text, Loader=yaml.SafeLoader)
        if not isinstance(root, yaml.MappingNode):
            raise UsageError(f"the configuration {path} holds no mapping of key -> value")
        _check_nodes(root, path, {})
        return _tree(root, shown, yaml.SafeLoader(text))
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        where = f", line {mark.line + 1}" if mark else ""
        raise UsageError(
            f"the configuration {path}{where} is not valid YAML: {getattr(error, 'problem', error)}"
        ) from error
    except RecursionError as error:
        raise UsageError(f"the configuration {path} is nested too deeply") from error


def _check_nodes(node: yaml.Node, path: str, sizes: dict[int, int]) -> int:
    """The number of nodes under `node`, each alias counted as a copy, because reading makes one of it.

    Args:
        sizes: of the nodes that are done, by `id`; 0 for those that contain `node`.

    Raises:
        UsageError: if there are too many, a node contains itself, or a number is too long.
    """
    place = f"the configuration {path}, line {node.start_mark.line + 1}"
    if id(node) in sizes:
        if not sizes[id(node)]:
            raise UsageError(f"{place}: an alias refers to a value that contains the alias; write the value out")
        return sizes[id(node)]
    sizes[id(node)] = 0
    size = 1
    if isinstance(node, yaml.ScalarNode):
        if node.tag.endswith((":int", ":float")) and len(node.value) > MAX_NUMBER:
            raise UsageError(f"{place}: {node.value[:20]}... is a number of {len(node.value):,} characters")
    else:
        parts = itertools.chain(*node.value) if isinstance(node, yaml.MappingNode) else node.value
        size += sum(_check_nodes(part, path, sizes) for part in parts)
    if size > MAX_YAML:
        raise UsageError(f"{place}: aliases repeat more than {MAX_YAML:,} values; write the values out")
    sizes[id(node)] = size
    return size


def find(path: str) -> tuple[str, str]:
    """`path`, or the shipped configuration of that name, and a line for the log if `path` seems to be another file.

    Of several the one is taken whose folders agree with those of `path`.

    Raises:
        UsageError: if there is neither.
    """
    if Path(path).is_file():
        return path, ""
    name = next((path.removesuffix(ending) for ending in YAML_ENDINGS if path.endswith(ending)), path)
    folder = Path(str(resources.files("gptlm"))) / SHIPPED
    shipped = sorted(folder.rglob(f"*{YAML_ENDINGS[0]}"))
    wanted = Path(name).parts or ("",)
    same = [file for file in shipped if file.stem.lower() == wanted[-1].lower()]
    if same:
        found = max(same, key=lambda file: _agreement(wanted, file.relative_to(folder).parts))
        place = f"{SHIPPED}/{found.relative_to(folder)}"
        return str(found), "" if path == found.stem else f"there is no file {path}: gptlm's own {place} is read"
    names = sorted({file.stem for file in shipped if not file.stem.endswith("_base")})
    near = difflib.get_close_matches(wanted[-1], names, n=len(names), cutoff=NEAR)
    others = [other for other in names if other not in near]
    raise UsageError(f"there is no configuration {path}; give a file, or one of {', '.join([*near, *others])}")


def _agreement(one: Sequence[str], other: Sequence[str]) -> int:
    """How many names before the last one are the same, counted from the end."""
    pairs = zip(reversed(one[:-1]), reversed(other[:-1]), strict=False)
    return sum(1 for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], pairs))


def _tree(node: yaml.MappingNode, path: str, loader: yaml.SafeLoader) -> Tree:
    # Composed nodes keep the line of each key, which yaml.safe_load drops.
    found: Tree = {}
    for key_node, value_node in node.value:
        key = str(_value(key_node, path, loader))
        place = f"{path}:{key_node.start_mark.line + 1}"
        if key in found:
            raise UsageError(f"{place}: {key} occurs twice; remove one")
        if isinstance(value_node, yaml.MappingNode):
            found[key] = _tree(value_node, path, loader)
        else:
            found[key] = Leaf(_value(value_node, path, loader), Source(Origin.FILE, place))
    return found


def _value(node: yaml.Node, path: str, loader: yaml.SafeLoader) -> Any:
    try:
        return loader.construct_object(node, deep=True)
    except (ValueError, LookupError, TypeError, AttributeError) as error:  # PyYAML, of 2026-99-99 or !!int x
        shown = f"{node.value!r:.60}" if isinstance(node, yaml.ScalarNode) else "a value"
        raise UsageError(
            f"{path}:{node.start_mark.line + 1}: {shown} cannot be read ({reason_of(error)}); give another value, or "
            "put it in quotes if it is a text"
        ) from error


def _argument(name: str, value: Any, source: Source, typed: str) -> Argument:
    items = value if isinstance(value, list) else [value]
    if any(isinstance(item, (dict, list, types.NoneType)) for item in items):
        return Argument(canonical(name), (json.dumps(value),), source, typed, nested=True)
    return Argument(canonical(name), as_texts(value), source, typed)


def _plain(tree: Tree) -> dict[str, Any]:
    return {key: _plain(node) if isinstance(node, dict) else node.value for key, node in tree.items()}
