"""The built package works without the repository."""

import os
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]


@pytest.fixture(scope="module")
def built(tmp_path_factory) -> Path:
    """The folder with the wheel and the sdist, built from a copy of the files that git knows."""
    source, out = tmp_path_factory.mktemp("source"), tmp_path_factory.mktemp("dist")
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True)
    if listed.returncode:
        pytest.skip("not a git clone")
    for name in filter(None, listed.stdout.split("\0")):
        if (ROOT / name).is_file():
            (source / name).parent.mkdir(parents=True, exist_ok=True)
            (source / name).write_bytes((ROOT / name).read_bytes())
    command = [sys.executable, "-m", "build", "--no-isolation", "--outdir", str(out), str(source)]
    subprocess.run(command, check=True, capture_output=True)
    return out


@pytest.mark.slow
def test_the_wheel_and_the_sdist_hold_all_files_of_the_package(built):
    package = ROOT / "src" / "gptlm"
    wanted = {
        path.relative_to(package.parent).as_posix()
        for path in package.rglob("*")
        if path.is_file() and path.suffix != ".pyc"
    }
    with zipfile.ZipFile(next(built.glob("*.whl"))) as wheel:
        assert wanted == {name for name in wheel.namelist() if name.startswith("gptlm/")}
        assert any(name.endswith("licenses/LICENSE") for name in wheel.namelist())
    with tarfile.open(next(built.glob("*.tar.gz"))) as sdist:
        held = {name.partition("/")[2] for name in sdist.getnames()}
    assert {f"src/{name}" for name in wanted} | {"README.md", "LICENSE", "CHANGELOG.md", "pyproject.toml"} <= held
    assert "requirements/constraints.txt" in held  # its README installs with them
    assert not any(name.startswith("tests") for name in held)


@pytest.mark.slow
def test_the_wheel_runs_without_the_repository(built, tmp_path):
    """An installed wheel is its unpacked files: the libraries come from the environment of the tests."""
    with zipfile.ZipFile(next(built.glob("*.whl"))) as wheel:
        wheel.extractall(tmp_path / "installed")
    environment = {**os.environ, "PYTHONPATH": str(tmp_path / "installed")}
    where = [sys.executable, "-c", "import gptlm; print(gptlm.__file__)"]
    found = subprocess.run(where, cwd=tmp_path, env=environment, capture_output=True, text=True, check=True)
    assert Path(found.stdout.strip()).is_relative_to(tmp_path / "installed")
    for arguments in (["--help"], ["demo", "--help"], ["pretrain", "--help"], ["plan", "--help"]):
        command = [sys.executable, "-m", "gptlm.cli", *arguments]
        shown = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True)
        assert shown.returncode == 0 and "usage" in shown.stdout.lower(), shown.stderr
