"""The architecture page names modules that exist, in the order of the layers."""

import itertools
import re

from tests.conftest import ROOT
from tests.test_layers import LAYERS

PAGE = (ROOT / "docs/architecture.md").read_text(encoding="utf-8")
SOURCE = ROOT / "src/gptlm"


def test_every_named_module_exists():
    named = set(re.findall(r"`([\w/]+(?:\.py|/))`", PAGE)) - {"tests/test_layers.py", "tests/test_upstream.py"}
    assert len(named) > 60
    assert [name for name in sorted(named) if not (SOURCE / name).exists()] == []
    assert [name for name in re.findall(r"`(tests/[\w/.]+)`", PAGE) if not (ROOT / name).exists()] == []


def test_the_layers_are_those_of_the_guard():
    """Each line of the picture is above the next one, or as high."""
    picture = PAGE.partition("```text\n")[2].partition("```")[0].splitlines()
    lines = [[name.removesuffix(".py").rstrip("/") for name in re.findall(r"\w+(?:/|\.py)", line)] for line in picture]
    levels = [[LAYERS[name] for name in names] for names in lines]
    assert len(levels) == 12
    for above, below in itertools.pairwise(levels):
        assert min(above) >= max(below)
    shown = {name for names in lines for name in names}
    hidden = {"__init__", "__main__", "launch", "failures", "owned", "json_text"}
    assert shown | hidden == LAYERS.keys()
