"""The documentation: links lead somewhere, and the reference is that of the arguments."""

import re
import unicodedata
from pathlib import Path

import pytest
from docs.generate_reference import FOLDER, pages

from tests.conftest import ROOT

PAGES = sorted(
    [*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md"), *ROOT.glob("benchmarks/*.md"), *ROOT.glob("tests/*/*.md")]
)
LINK = re.compile(r"\[[^\]]*\]\(([^)\s]+)\)")


def prose(path: Path) -> str:
    """A page without its code."""
    text = re.sub(r"^```.*?^```", "", path.read_text(encoding="utf-8"), flags=re.S | re.M)
    return re.sub(r"`[^`\n]*`", "X", text)


def anchors(path: Path) -> set[str]:
    """The anchors of a page's headings, as GitHub and MkDocs make them."""
    text = re.sub(r"^```.*?^```", "", path.read_text(encoding="utf-8"), flags=re.S | re.M)
    found = set()
    for heading in re.findall(r"^#+ (.*)$", text, flags=re.M):
        plain = unicodedata.normalize("NFKD", heading.replace("`", "")).lower()
        found.add(re.sub(r"\s+", "-", re.sub(r"[^\w\s-]", "", plain).strip()))
    return found


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_to_files_and_headings(page):
    broken = []
    for target in LINK.findall(prose(page)):
        if re.match(r"https?://|mailto:", target):
            continue
        name, _, anchor = target.partition("#")
        path = (page.parent / name).resolve() if name else page
        if not path.exists() or (anchor and anchor not in anchors(path)):
            broken.append(target)
    assert broken == []


def test_every_page_is_in_the_navigation():
    navigation = (ROOT / "mkdocs.yml").read_text(encoding="utf-8")
    named = set(re.findall(r"[\w/-]+\.md", navigation.partition("\nnav:")[2]))
    here = {path.relative_to(ROOT / "docs").as_posix() for path in (ROOT / "docs").rglob("*.md")}
    assert here <= named
    assert {name for name in named - here if not name.startswith("project/")} == set()


def test_the_reference_is_that_of_the_arguments():
    """If this fails: python docs/generate_reference.py."""
    here = {path.name: path.read_text(encoding="utf-8") for path in FOLDER.glob("*.md")}
    assert here == pages()
