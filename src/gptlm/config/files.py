"""Files of flags: JSON objects and YAML mappings, with the line of each value."""

import json
import types
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import Any

import yaml

from gptlm.config.word import Word, as_texts, canonical
from gptlm.errors import UsageError

YAML_ENDINGS = (".yaml", ".yml")
SHIPPED = "configs"  # folder of the package with configurations that can be named without a path


@dataclass(frozen=True)
class Leaf:
    """A value of a YAML file and its place, "FILE:LINE"."""

    value: Any
    place: str


Tree = dict[str, Any]  # key -> Leaf or Tree


def json_words(path: str) -> Iterator[Word]:
    """The flags in a JSON file. Raises UsageError."""
    try:
        content = json.loads(Path(path).read_text(encoding="utf-8-sig"))
    except OSError as error:
        raise UsageError(f"cannot read the argument file {path}: {error.strerror}") from error
    except (ValueError, RecursionError) as error:
        raise UsageError(f"the argument file {path} is not valid JSON: {error}") from error
    if not isinstance(content, dict):
        raise UsageError(f"the argument file {path} holds no JSON object of flag -> value")
    for name, value in content.items():
        if value is None:
            continue  # null means: as if the flag were not there
        yield _word(name, value, path, f"{path}: {name}")


def yaml_words(tree: Tree) -> Iterator[Word]:
    """The flags in a YAML file without sections."""
    for name, node in tree.items():
        if isinstance(node, dict):
            place = next((leaf.place for leaf in node.values() if isinstance(leaf, Leaf)), name)
            yield _word(name, _plain(node), place, f"{name} ({place})")
        elif node.value is not None:
            yield _word(name, node.value, node.place, f"{name} ({node.place})")


def has_sections(tree: Tree, known: Collection[str]) -> bool:
    """Whether the file is more than a list of flags; a mapping under a `known` word is its value."""
    sections = (key for key, value in tree.items() if isinstance(value, dict) and canonical(key) not in known)
    return any(sections) or "_base_" in tree


def load_yaml(path: str) -> Tree:
    """The mapping in a YAML file, each value with its line.

    Raises:
        UsageError: if it cannot be read, or is no mapping.
    """
    shown = str(path).removeprefix(f"{resources.files('gptlm')}/")
    try:
        text = Path(path).read_text(encoding="utf-8-sig")
    except OSError as error:
        raise UsageError(f"cannot read the configuration {path}: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise UsageError(f"the configuration {path} is not UTF-8 (byte {error.start})") from error
    try:
        root = yaml.compose(text, Loader=yaml.SafeLoader)
        if not isinstance(root, yaml.MappingNode):
            raise UsageError(f"the configuration {path} holds no mapping of key -> value")
        return _tree(root, shown, yaml.SafeLoader(text))
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        where = f", line {mark.line + 1}" if mark else ""
        raise UsageError(
            f"the configuration {path}{where} is not valid YAML: {getattr(error, 'problem', error)}"
        ) from error


def find(path: str) -> str:
    """`path`, or the configuration of that name that gptlm ships.

    Raises:
        UsageError: if there is neither.
    """
    if Path(path).is_file():
        return path
    folder = resources.files("gptlm") / SHIPPED
    shipped = {Path(str(file)).stem: str(file) for group in folder.iterdir() for file in _files(group)}
    if path in shipped:
        return shipped[path]
    names = ", ".join(sorted(name for name in shipped if not name.endswith("_base")))
    raise UsageError(f"there is no configuration {path}; give a file, or one of {names}")


def _files(group: Any) -> list[Any]:
    return [file for file in group.iterdir() if file.name.endswith(YAML_ENDINGS)] if group.is_dir() else []


def _tree(node: yaml.MappingNode, path: str, loader: yaml.SafeLoader) -> Tree:
    found: Tree = {}
    for key_node, value_node in node.value:
        key = str(loader.construct_object(key_node, deep=True))
        place = f"{path}:{key_node.start_mark.line + 1}"
        if key in found:
            raise UsageError(f"{place}: {key} occurs twice; remove one")
        if isinstance(value_node, yaml.MappingNode):
            found[key] = _tree(value_node, path, loader)
        else:
            found[key] = Leaf(loader.construct_object(value_node, deep=True), place)
    return found


def _word(name: str, value: Any, place: str, typed: str) -> Word:
    items = value if isinstance(value, list) else [value]
    if any(isinstance(item, (dict, list, types.NoneType)) for item in items):
        return Word(canonical(name), (json.dumps(value),), place, typed, nested=True)
    return Word(canonical(name), as_texts(value), place, typed)


def _plain(tree: Tree) -> dict[str, Any]:
    return {key: _plain(node) if isinstance(node, dict) else node.value for key, node in tree.items()}
