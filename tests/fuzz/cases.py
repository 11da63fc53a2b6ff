"""Cases: a command, changes of its files, and more words on its command line."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cache

from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis import strategies as st

from tests.fuzz.mutations import Edit, ways_of
from tests.fuzz.world import COMMAND_LINES

VALUES = [
    "", " ", "0", "-1", "1", "1.5", "-0.0", "1e9", "1e400", "nan", "-inf", str(2**31), str(2**63), str(-(2**63)),
    "1" + "0" * 400, "1" * 5000, "x" * 300, "true", "false", "none", "é花", "\udcff", "a b", "a\nb", "[1,2]", "{}",
    ",", "/", ".", "..", "/dev/null", "model", "text", "sft", "tokens", "out", "run.json", "adapters", "1_000",
    "١٢", " 1 ", "=", "%s{0}", "\x1b[31m", "-", "0x10", "1,1,1", "1/1", "stage2 offload", "model/config.json",
    "script.py", "./", "~", "$HOME", "*", "[", "gpt2", "cpu", "no", "all", "1;2", "é" * 200,
]  # fmt: skip


@dataclass(frozen=True)
class Case:
    """A key of `COMMAND_LINES`, mutations of its files, and words that are added."""

    command: str
    edits: tuple[Edit, ...] = ()
    words: tuple[str, ...] = ()

    def as_json(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> "Case":
        found = json.loads(text)
        return cls(found["command"], tuple(Edit(**edit) for edit in found["edits"]), tuple(found["words"]))

    @property
    def targets(self) -> tuple[object, ...]:
        """What is changed, and how."""
        return (self.command, *((edit.file, edit.how) for edit in self.edits), *(self.words[:1]))

    @property
    def line(self) -> list[str]:
        return [*COMMAND_LINES[self.command].words, *self.words]


@cache
def flags_of(command: str) -> list[str]:
    """Every flag and alias but those that stay."""
    vocabulary, fixed = COMMAND_LINES[command].vocabulary, COMMAND_LINES[command].fixed
    return sorted(name for name in vocabulary.names() if vocabulary.renamed.get(name, name) not in fixed)


@st.composite
def flags(draw, command: str) -> tuple[str, ...]:
    """One flag with a value, or in a form that is wrong."""
    vocabulary = COMMAND_LINES[command].vocabulary
    name = draw(st.sampled_from(flags_of(command)))
    own = vocabulary.renamed.get(name, name)
    choices = vocabulary.flags()[own][0].metadata["choices"] if own in vocabulary.flags() else None
    values = st.sampled_from(VALUES)
    value = draw(st.one_of(values, st.sampled_from(choices or VALUES)))
    match draw(st.integers(0, 11)):
        case 0:
            return (f"--{name}",)
        case 1:
            return (f"--{name}={value}",)
        case 2:
            return (f"--{name}", value, f"--{name}", draw(values))
        case 3:
            return (f"--{name}", value, draw(values))
        case 4:
            return (f"--no_{name}",)
        case 5:
            return (f"--{name[: len(name) // 2]}", value)
        case 6:
            return ("-o", f"{name}={value}")
    return (f"--{name.replace('_', '-')}" if draw(st.booleans()) else f"--{name}", value)


@st.composite
def edits(draw, files: Sequence[str]) -> Edit:
    """One mutation of one file."""
    file = draw(st.sampled_from(files))
    how = draw(st.sampled_from(ways_of(file)))
    return Edit(file, how, draw(st.integers(0, 2**20)), draw(st.integers(0, 2**12)))


@st.composite
def cases(draw, files: Mapping[str, Sequence[str]]) -> Case:
    """Mostly one change, sometimes two. `files`: of commands of `COMMAND_LINES`, those to change."""
    command = draw(st.sampled_from(sorted(files)))
    on_line = not files[command] or (draw(st.integers(0, 9)) < 4 and bool(flags_of(command)))
    count = draw(st.sampled_from((1, 1, 1, 2)))
    if on_line:
        words = tuple(word for _ in range(count) for word in draw(flags(command)))
        return Case(command, (), words)
    return Case(command, tuple(draw(edits(files[command])) for _ in range(count)), ())


def draw_cases(count: int, number: int, files: Mapping[str, Sequence[str]]) -> list[Case]:
    """`count` different cases; the same ones for the same seed `number`.

    Hypothesis repeats parts of earlier examples, so it draws twice as many, and those with new targets are taken first.
    """
    found: dict[tuple, Case] = {}

    @seed(number)
    @settings(
        max_examples=2 * count,
        database=None,
        deadline=None,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    @given(cases(files))
    def collect(case: Case) -> None:
        found.setdefault((0, *case.targets), case)
        found.setdefault((1, case), case)

    collect()
    first = [case for key, case in found.items() if key[0] == 0]
    return list(dict.fromkeys([*first, *found.values()]))[:count]
