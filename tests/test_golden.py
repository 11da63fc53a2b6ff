"""`tests/golden` holds what was recorded, and nothing else."""

from hashlib import sha256

from tests.golden import GOLDEN


def test_no_recorded_number_changes_unnoticed():
    """Also one of an input on which the outcome does not depend."""
    lines = (GOLDEN / "SHA256SUMS").read_text().splitlines()
    files = {file.relative_to(GOLDEN).as_posix(): file.read_bytes() for file in GOLDEN.rglob("*.json")}
    assert lines == [f"{sha256(content).hexdigest()}  {name}" for name, content in sorted(files.items())]
