"""Recorded outcomes of the originals (README.md), and the corpora that they were recorded on."""

import json
from pathlib import Path

GOLDEN = Path(__file__).parent


def recorded(name: str):
    """The content of `tests/golden/NAME`."""
    return json.loads((GOLDEN / name).read_text())
