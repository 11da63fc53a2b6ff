"""FleetX's and PaddleFleetX's configurations of every generation, in the keys of one.

file + its bases -> overrides -> literals -> keys of one generation (`keys.py`). The rules are those of the original's
`ppfleetx/utils/config.py`, without its `eval`.
"""

import ast
import difflib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from gptlm.compat.fleetx import keys
from gptlm.config.files import OVERRIDE, Leaf, Tree, load_yaml
from gptlm.errors import UsageError

BASE, INHERITED = "_base_", "_inherited_"
LITERALS = {"true": True, "false": False, "none": None, "null": None}


@dataclass
class Configuration:
    """A file and its overrides, in the keys of one generation.

    Attributes:
        path: the file.
        leaves: key -> value and place, in order.
        original: key -> its name in this file's generation.
        generation: "flat" (`PreTraining:`), "first" (sections of August 2022) or "sections".
        notes: lines for the log.
    """

    path: str
    leaves: dict[str, Leaf]
    original: dict[str, str]
    generation: str
    notes: list[str] = field(default_factory=list)

    def value(self, key: str, default: Any = None) -> Any:
        """The value of `key`; `default` where it is missing or empty."""
        leaf = self.leaves.get(key)
        return default if leaf is None or leaf.value in (None, "") else leaf.value

    def typed(self, key: str) -> str:
        """`key` for messages, with its name and place in the file."""
        original, leaf = self.original.get(key, key), self.leaves.get(key)
        if leaf is None:
            return original
        return f"-o {original}" if leaf.source == OVERRIDE else f"{original} ({leaf.place})"

    def has(self, section: str) -> bool:
        """Whether a key is below `section`."""
        return any(key.startswith(f"{section}.") for key in self.leaves)


def read_configuration(path: str, overrides: Sequence[str]) -> Configuration:
    """The configuration in `path` with `KEY=VALUE` overrides.

    Raises:
        UsageError: listing everything that is wrong with either.
    """
    tree = _with_bases(path, ())
    if isinstance(tree.get(keys.ROOT), dict):
        generation, tree = "flat", tree[keys.ROOT]
    elif _is_flat(tree):
        generation = "flat"
    elif "Engine" in tree and _first_generation(tree):
        generation = "first"
    else:
        generation = "sections"
    notes: list[str] = []
    given = _overrides(tree, overrides, generation, notes)
    configuration = Configuration(path, {}, {}, generation, notes)
    leaves = [*(item for item in _leaves(tree) if item[1].source != OVERRIDE), *given.items()]
    for original, leaf in leaves:
        _place(configuration, original, replace(leaf, value=_literal(leaf.value)))
    return configuration


def _is_flat(tree: Tree) -> bool:
    """Whether this is a file of the first generation without its root key, as its documentation prints it."""
    leaves = {key for key, value in tree.items() if isinstance(value, Leaf)}
    return bool(leaves & {*keys.FLAT}) or any(isinstance(tree.get(key), dict) for key in keys.FLAT_SECTIONS)


def _first_generation(tree: Tree) -> bool:
    optimizer, data = tree.get("Optimizer"), tree.get("Data")
    return (isinstance(optimizer, dict) and "adam_beta1" in optimizer) or (
        isinstance(data, dict) and ("batch_size" in data or "dataset" in data)
    )


# Files -----------------------------------------------------------------------------------------------------------


def _with_bases(path: str, above: tuple[str, ...]) -> Tree:
    """The file over its `_base_`: mappings are merged, everything else, the empty value too, replaces."""
    own = str(Path(path).resolve())
    if own in above:
        raise UsageError(f"the configuration {path} has itself as {BASE}")
    tree = load_yaml(path)
    base = tree.pop(BASE, None)
    if base is None:
        return tree
    if not isinstance(base, Leaf) or not isinstance(base.value, str):
        raise UsageError(f"{path}: {BASE} holds no file name")
    below = Path(path).parent / base.value
    if not below.is_file():
        raise UsageError(
            f"cannot read the configuration {below}, the {BASE} of {path}: there is no such file; copy it there"
        )
    return _merged(_with_bases(str(below), (*above, own)), tree)


def _merged(base: Tree, child: Tree) -> Tree:
    found = dict(base)
    for key, value in child.items():
        below = found.get(key)
        if not isinstance(value, dict):
            found[key] = value
            continue
        inherited = value.pop(INHERITED, None)
        alone = inherited is not None and inherited.value is False
        found[key] = _merged(below, value) if isinstance(below, dict) and not alone else value
    return found


def _leaves(tree: Tree, above: str = "") -> Iterator[tuple[str, Leaf]]:
    for key, value in tree.items():
        path = f"{above}.{key}" if above else key
        if isinstance(value, dict):
            yield from _leaves(value, path)
        else:
            yield path, value


def _literal(value: Any) -> Any:
    """The original's second pass: a text that is a Python literal is that value (YAML reads 2e-5 as a text)."""
    if not isinstance(value, str):
        return value
    try:
        return ast.literal_eval(value.strip())
    except (ValueError, SyntaxError, MemoryError, RecursionError):
        return value


# Overrides -------------------------------------------------------------------------------------------------------


def _overrides(tree: Tree, texts: Sequence[str], generation: str, notes: list[str]) -> dict[str, Leaf]:
    """Put `KEY=VALUE` texts into `tree`; returns those that count, in order. Of several for one setting the last does.

    Raises:
        UsageError: listing everything that is wrong.
    """
    problems = []
    found: dict[str, tuple[str, Leaf, str]] = {}  # the key of one generation -> key, value, text
    for text in texts:
        try:
            path, leaf, replaces = _override(tree, text, generation, notes)
        except UsageError as error:
            problems.append(str(error))
            continue
        key = _canonical(path, generation)
        lost = found.pop(key, None)  # so that the order is that of the last ones
        if lost is not None and replaces and lost[1].value != leaf.value:
            notes.append(f"-o {lost[2]} has no effect: -o {text} comes after it")
        found[key] = path, leaf, text
    if problems:
        raise UsageError("\n".join(problems))
    return {path: leaf for path, leaf, _ in found.values()}


def _override(tree: Tree, text: str, generation: str, notes: list[str]) -> tuple[str, Leaf, bool]:
    """Put one into `tree`; returns its key, its value, and whether it replaces all of an earlier one.

    Raises:
        UsageError: if there is no such key.
    """
    path, equals, value = text.partition("=")
    if not equals:
        raise UsageError(
            f"option({text}) should contain a =to distinguish between key and value\n  write -o {text}=VALUE"
        )
    leaf = Leaf(_override_value(path, value, notes), OVERRIDE)
    steps = path.strip().split(".")
    if generation == "flat" and steps[0] == keys.ROOT and len(steps) > 1:
        del steps[0]
    node: Any = tree
    for depth, step in enumerate(steps[:-1]):
        below = node.get(step) if isinstance(node, dict) else None
        if below is None and isinstance(node, dict) and _known(path, generation):
            below = node[step] = {}
        if isinstance(below, Leaf) and isinstance(below.value, list) and depth == len(steps) - 2:
            changed = node[step] = _with_item(below, steps[-1], leaf.value, text)
            return ".".join(steps[:-1]), changed, False
        if not isinstance(below, dict):
            raise UsageError(_unknown(tree, path, generation))
        node = below
    if steps[-1] not in node and not _known(path, generation):
        raise UsageError(_unknown(tree, path, generation))
    if isinstance(node.get(steps[-1]), dict):
        raise UsageError(f"-o {text}: {path} is a section; name a key in it: {', '.join(node[steps[-1]])}")
    node[steps[-1]] = leaf
    return ".".join(steps), leaf, True


def _override_value(path: str, text: str, notes: list[str]) -> Any:
    """A Python literal, or true, false and null in any case, or nothing for the empty value, or the text itself."""
    word = text.strip()
    if not word:
        return None
    if word.lower() in LITERALS:
        value = LITERALS[word.lower()]
        if word not in ("True", "False", "None"):
            notes.append(
                f"-o {path}={word} is taken as {value} (the original takes it as a text, which counts as true)"
            )
        return value
    value = _literal(word)
    return value if value is not word else text


def _with_item(leaf: Leaf, index: str, value: Any, text: str) -> Leaf:
    """`-o Data.Train.dataset.split.0=90` sets one item of a list."""
    items = leaf.value
    if not index.isdigit() or int(index) >= len(items):
        raise UsageError(f"index({index}) out of range({items})\n  -o {text}: expected 0 to {len(items) - 1}")
    return Leaf([*items[: int(index)], value, *items[int(index) + 1 :]], OVERRIDE)


def _known(path: str, generation: str) -> bool:
    """Whether the key is one of ours, though this file does not have it."""
    return _understood(_canonical(path, generation))


def _understood(key: str) -> bool:
    names = (*keys.TRAINING_RENAMED, *keys.SETTLED, *keys.EVALUATION_RENAMED, *keys.GENERATION_RENAMED)
    return key in names or matching(key, keys.TRAINING_IGNORED) is not None


def _unknown(tree: Tree, path: str, generation: str) -> str:
    known = {original for original, _ in _leaves(tree)}
    known |= {*keys.TRAINING_RENAMED, *keys.SETTLED} if generation != "flat" else set(keys.FLAT)
    near = difflib.get_close_matches(path, sorted(known), n=1, cutoff=0.6)
    return f"-o {path}: there is no such key" + (f"; did you mean {near[0]}?" if near else "")


# Keys ------------------------------------------------------------------------------------------------------------


def matching(key: str, table: Mapping[str, str]) -> str | None:
    """The entry of `table` for `key` or for a section it lies in."""
    if key in table:
        return table[key]
    parts = key.split(".")
    sections = (".".join(parts[:count]) + ".*" for count in range(len(parts) - 1, 0, -1))
    return next((table[section] for section in sections if section in table), None)


def _canonical(original: str, generation: str) -> str:
    if generation == "flat":
        return keys.FLAT.get(original.rsplit(".", 1)[-1], original)
    parts = original.split(".")
    if original in keys.VALUES_MOVED:
        return keys.VALUES_MOVED[original]
    for count in range(len(parts), 0, -1):
        head = ".".join(parts[:count])
        if head in keys.MOVED:
            return ".".join([keys.MOVED[head], *parts[count:]])
    return original


def _place(configuration: Configuration, original: str, leaf: Leaf) -> None:
    key = _canonical(original, configuration.generation)
    if original.endswith("dp_degreei"):
        configuration.notes.append(f"{original} ({leaf.place}) is taken as Distributed.dp_degree; did you mistype it?")
    before = configuration.leaves.get(key)
    if before is not None and before.source == OVERRIDE != leaf.source:
        return
    if before is not None and leaf.source != OVERRIDE and before.value not in (None, leaf.value):
        configuration.notes.append(
            f"{configuration.typed(key)} {before.value} and {original} ({leaf.place}) {leaf.value} set the same value; "
            "the last one counts"
        )
    configuration.leaves[key] = leaf
    configuration.original[key] = original
