"""Commands on mutated files and arguments end in a result or an error of a few lines, and leave nothing behind."""

from pathlib import Path

import pytest

from tests.fuzz.cases import Case, draw_cases
from tests.fuzz.world import COMMAND_LINES

SEED = 1
MENDED = [Case.from_json(line) for line in (Path(__file__).parent / "mended.jsonl").read_text().splitlines()]
FAILING = {"launch": 1, "demo": 2, "serve": 1}  # made so that nothing is started


def findings(session, cases):
    return [
        f"{'; '.join(ended.faults)}: {ended.stderr[-500:]}\n  python -m tests.fuzz '{case.as_json()}'"
        for case, ended in session.run(cases)
        if ended.faults
    ]


def test_the_commands_themselves_end_well(session):
    cases = [Case(command) for command in COMMAND_LINES]
    for case, ended in session.run(cases):
        assert ended.faults == (), case
        assert ended.code == FAILING.get(case.command, 0), (case, ended.stderr)


def test_mended_cases(session):
    assert findings(session, MENDED) == []


@pytest.mark.parametrize("count", [300, pytest.param(5000, marks=pytest.mark.slow)])
def test_mutated_files_and_arguments(session, count):
    assert findings(session, draw_cases(count, SEED, session.files)) == []
