"""The files of `tests/golden` hold the recorded numbers."""

import pytest

from tests.golden import GOLDEN, recorded
from tests.originals.extract import FILES, text_of


@pytest.mark.parametrize("name", FILES)
def test_golden_files_are_copies(name):
    assert recorded(name) == FILES[name]()
    assert (GOLDEN / name).read_text() == text_of(recorded(name)) + "\n"


def test_nothing_else_is_called_golden():
    assert {str(file.relative_to(GOLDEN)) for file in GOLDEN.rglob("*.json")} == FILES.keys()
