from dataclasses import dataclass, fields

import pytest

from gptlm.cli import COMMANDS
from gptlm.config.field import arg, check_fields, range_of
from gptlm.config.problem import Problem, usage_error
from gptlm.errors import named


@dataclass(frozen=True, kw_only=True)
class Group:
    count: int = arg(8, "a count", ge=1)
    steps: int = arg(-1, "steps", ge=1, also={-1: "epochs decide"})
    wait: int = arg(60, "a wait", ge=1, le=100, unit="seconds")
    tokens: int = arg(1, "tokens", ge=1, unit="tokens")
    rate: float = arg(0.1, "a rate", ge=0)
    share: float = arg(0.5, "a share", gt=0, lt=1)
    start: int = arg(1, "first step", ge=0, le=1)
    free: float | None = arg(None, "any number")
    even: int = arg(2, "even", check=lambda value: f"{value} is odd" if value % 2 else None)
    on: bool = arg(False, "a switch", ge=1)


@pytest.mark.parametrize(
    ("field", "value", "text"),
    [
        ("count", 0, "0: expected at least 1"),
        ("steps", 0, "0: expected at least 1, or -1 (epochs decide)"),
        ("steps", -1, None),
        ("tokens", 0, "0: expected at least 1 token"),
        ("wait", 101, "101: expected 1 to 100 seconds"),
        ("wait", 100, None),
        ("rate", -1e-5, "-1e-05: expected at least 0"),
        ("rate", float("inf"), "inf: expected a finite number, at least 0"),
        ("rate", float("nan"), "nan: expected a finite number, at least 0"),
        ("share", 0.0, "0: expected more than 0 and less than 1"),
        ("share", 1.0, "1: expected more than 0 and less than 1"),
        ("start", 2, "2: expected 0 or 1"),
        ("free", float("nan"), "nan: expected a finite number"),
        ("free", None, None),
        ("even", 3, "3 is odd"),
    ],
)
def test_ranges(field, value, text):
    assert check_fields(Group(**{field: value})) == ([Problem(field, text)] if text else [])


def test_all_groups_are_checked():
    found = check_fields(Group(count=0, rate=-1.0), Group(even=1))
    assert [problem.field for problem in found] == ["count", "rate", "even"]


def test_defaults_are_in_range():
    groups = {group for command in COMMANDS.values() for group in command.vocabulary.groups}
    assert len(groups) > 10
    for group in groups:
        assert check_fields(group()) == []


def test_range_in_words():
    shown = {f.name: range_of(f) for f in fields(Group)}
    assert shown["wait"] == "1 to 100 seconds" and shown["free"] == ""
    assert shown["steps"] == "at least 1, or -1 (epochs decide)"


def test_problems_name_flags_as_typed_and_once():
    problems = [Problem("rate", f"-1 with {named('count')} 3"), Problem("", "no field"), Problem("", "no field")]
    typed = {"rate": "--lr", "count": "Global.count (x.yaml:3)"}
    assert str(usage_error(problems, typed)) == "--lr -1 with Global.count (x.yaml:3) 3\nno field"
