"""The troubleshooting page quotes texts that gptlm has."""

import ast
import re
from collections.abc import Iterator

import pytest

from tests.conftest import ROOT

PAGE = (ROOT / "docs/troubleshooting.md").read_text(encoding="utf-8")
GAP = "…"
QUOTES = re.findall(r"^\| `([^`]+)` \|", PAGE, flags=re.M)


def texts(tree: ast.AST) -> Iterator[str]:
    """The texts of a module, values as a gap; those of a Problem begin with its flag."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and getattr(node.func, "id", "") == "Problem" and len(node.args) == 2:
            flag, text = map(text_of, node.args)
            yield f"--{flag} {text}"
        yield text_of(node)


def text_of(node: ast.AST) -> str:
    """The text of an expression, as it is printed."""
    if isinstance(node, ast.Constant):
        return re.sub(r"%[sdg]|%\.\d+f", GAP, node.value) if isinstance(node.value, str) else ""
    if isinstance(node, ast.JoinedStr):
        return "".join(map(text_of, node.values))
    if isinstance(node, ast.FormattedValue):
        return text_of(node.value) if isinstance(node.value, ast.Call) else GAP
    if isinstance(node, ast.Call):
        is_flag = getattr(node.func, "id", "") == "named" and isinstance(node.args[0], ast.Constant)
        return f"--{node.args[0].value}" if is_flag else GAP
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
        return text_of(node.left) + text_of(node.right)
    return ""


@pytest.fixture(scope="module")
def source() -> str:
    """All texts of the package. Gaps next to each other are one."""
    files = sorted((ROOT / "src/gptlm").rglob("*.py"))
    found = (text for file in files for text in texts(ast.parse(file.read_text(encoding="utf-8"))))
    return "\n".join(text.replace(GAP * 2, GAP) for text in found)


def test_there_are_enough():
    assert len(QUOTES) >= 40


@pytest.mark.parametrize("quote", QUOTES)
def test_a_quoted_text_is_in_the_source(source, quote):
    assert len(re.sub(f"{GAP}| ", "", quote)) >= 9
    assert quote.replace(GAP * 2, GAP) in source
