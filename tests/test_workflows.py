"""CI runs what a developer runs: each step of a workflow is a target of the Makefile."""

import re
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

import gptlm

ROOT = Path(__file__).resolve().parents[1]
WORKFLOWS = sorted((ROOT / ".github" / "workflows").glob("*.yml"))
TARGETS = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE))


def commands(path: Path) -> list[str]:
    """The lines of all `run:` steps of a workflow."""
    jobs = yaml.safe_load(path.read_text(encoding="utf-8"))["jobs"].values()
    return [line for job in jobs for step in job["steps"] for line in step.get("run", "").splitlines()]


def test_every_command_of_a_workflow_is_a_target_of_the_makefile():
    found = {command for path in WORKFLOWS for command in commands(path)}
    assert {command for command in found if command.removeprefix("make ") not in TARGETS} == set()
    wanted = "lint types test test-oldest test-newest test-latest test-slow coverage docs package"
    assert found == {f"make {name}" for name in wanted.split()}


def test_the_tests_run_on_every_python_that_the_project_allows_and_names():
    ci = yaml.safe_load((ROOT / ".github" / "workflows" / "ci.yml").read_text(encoding="utf-8"))
    pythons = ci["jobs"]["test"]["strategy"]["matrix"]["python"]
    assert pythons == ["3.11", "3.12", "3.13"]
    assert f'requires-python = ">={pythons[0]}"' in (ROOT / "pyproject.toml").read_text(encoding="utf-8")


@pytest.mark.parametrize(
    ("schema", "files"),
    [
        ("vendor.github-workflows", WORKFLOWS),
        ("vendor.citation-file-format", [ROOT / "CITATION.cff"]),
        ("vendor.github-issue-forms", sorted((ROOT / ".github" / "ISSUE_TEMPLATE").glob("[!c]*.yml"))),
    ],
)
def test_files_follow_the_schema_of_those_who_read_them(schema, files):
    assert files
    checked = subprocess.run(
        [sys.executable, "-m", "check_jsonschema", "--builtin-schema", schema, *map(str, files)],
        capture_output=True,
        text=True,
    )
    assert checked.returncode == 0, checked.stdout + checked.stderr


def test_the_changelog_names_each_thing_once():
    """Merges have put a section back that was replaced."""
    for version in (ROOT / "CHANGELOG.md").read_text(encoding="utf-8").split("\n## ")[1:]:
        blocks = [block for block in version.split("\n\n")[1:] if block]
        assert all(block.strip()[:2] in ("**", "- ") or block.endswith(".") for block in blocks)
        lines = [line.split(".")[0] for line in version.splitlines() if line.startswith(("**", "- "))]
        assert len(lines) == len({*lines})


def test_the_citation_the_changelog_and_the_package_have_one_version():
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text(encoding="utf-8"))
    newest = re.findall(r"^## (\d+\.\d+\.\d+)", (ROOT / "CHANGELOG.md").read_text(encoding="utf-8"), re.MULTILINE)[0]
    assert citation["version"] == newest == gptlm.__version__
