"""The notebook runs from top to bottom, and shows what its text says."""

import json
import subprocess
import sys

import pytest

from tests.conftest import ROOT

NOTEBOOK = ROOT / "docs/notebooks/python-api.ipynb"
SHOWN = """
assert base.metrics["train_loss"] < 6 and base.metrics["eval_loss"] < 1, base.metrics
assert steps == list(range(1, 81)) and tuned.metrics["eval_hits"] == tuned.metrics["eval_accuracy"], tuned.metrics
right = sum(one.text.strip() == numbers[(n + 1) % 10] for n, one in enumerate(found))
assert right >= 8, found
"""


def test_the_notebook_is_stored_without_outputs():
    cells = json.loads(NOTEBOOK.read_text(encoding="utf-8"))["cells"]
    assert [cell for cell in cells if cell.get("outputs") or cell.get("execution_count")] == []


@pytest.mark.slow
def test_the_notebook_runs(tmp_path):
    cells = json.loads(NOTEBOOK.read_text(encoding="utf-8"))["cells"]
    code = ["".join(cell["source"]) for cell in cells if cell["cell_type"] == "code"]
    program = "\n".join(f"exec(compile({cell!r}, 'cell', 'exec'))" for cell in [*code, SHOWN])
    command = [sys.executable, "-c", program]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr[-3000:]
