"""The Chinese pages have the commands, flags and links of the English ones."""

import re
from pathlib import Path

import pytest

from tests.conftest import ROOT

READMES = ("README.md", "README.zh-CN.md")
PAIRS = [
    READMES,
    *(
        (f"docs/migration/{name}.md", f"docs/zh/{name}.md")
        for name in ("paddlenlp", "paddlefleetx", "megatron", "oneflow")
    ),
]


def blocks(path: Path) -> list[str]:
    """The code blocks of a page."""
    return re.findall(r"^ *```\w*\n(.*?)^ *```", path.read_text(encoding="utf-8"), flags=re.S | re.M)


def prose(path: Path) -> str:
    """A page without its code blocks."""
    return re.sub(r"^ *```.*?^ *```", "", path.read_text(encoding="utf-8"), flags=re.S | re.M)


def rows(path: Path) -> list[int]:
    """The number of columns of each table row."""
    return [line.count("|") for line in prose(path).splitlines() if line.startswith("|")]


@pytest.mark.parametrize(("english", "chinese"), PAIRS)
def test_the_chinese_page_has_the_code_of_the_english_one(english, chinese):
    own, other = ROOT / english, ROOT / chinese
    assert blocks(own) == blocks(other)
    assert len(blocks(own)) >= 3
    quoted, translated = (set(re.findall(r"`([^`\n]+)`", prose(path))) for path in (own, other))
    assert quoted == translated
    assert rows(own) == rows(other)


@pytest.mark.parametrize(("english", "chinese"), PAIRS)
def test_the_chinese_page_has_the_sections_and_links_of_the_english_one(english, chinese):
    headings, links = (r"^(#+) ", r"\]\(([^)#\s]+)")
    for pattern in (headings, links):
        found = [re.findall(pattern, prose(ROOT / page), flags=re.M) for page in (english, chinese)]
        # each README begins with a link to the other one
        names = [[Path(text).name for text in texts if text not in READMES] for texts in found]
        assert names[0] == names[1]
