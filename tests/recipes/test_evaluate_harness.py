"""EleutherAI's lm-evaluation-harness reads our output folder and finds what we find."""

import json
import os
import subprocess
import sys

import pytest

from tests.recipes.test_evaluate import KNOWN, STRANGE, run, work  # noqa: F401 - a fixture

HARNESS_TASK = """
task: last_word
dataset_path: json
dataset_kwargs: {{data_files: {{test: {path}}}}}
test_split: test
output_type: loglikelihood
doc_to_text: "{{{{text.rsplit(' ', 1)[0]}}}}"
doc_to_target: "{{{{' ' + text.rsplit(' ', 1)[1]}}}}"
metric_list:
  - {{metric: acc, aggregation: mean, higher_is_better: true}}
"""


@pytest.mark.slow
def test_it_reads_the_same_folder(work, tmp_path):  # noqa: F811
    """Its accuracy of the last word is our strict one."""
    pytest.importorskip("lm_eval")
    texts = KNOWN + [text.replace("  ", " ") for text in STRANGE]
    data = tmp_path / "data.jsonl"
    data.write_text("\n".join(json.dumps({"text": text}) for text in texts) + "\n")
    (tmp_path / "last_word.yaml").write_text(HARNESS_TASK.format(path=data))
    command = [
        *(
            sys.executable,
            "-m",
            "lm_eval",
            "--model",
            "hf",
            "--model_args",
            f"pretrained={work / 'model'},dtype=float32",
        ),
        *("--tasks", "last_word", "--include_path", str(tmp_path), "--device", "cpu", "--batch_size", "8"),
        *("--output_path", str(tmp_path / "out")),
    ]
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "HF_DATASETS_CACHE": str(tmp_path / "cache")}
    result = subprocess.run(command, capture_output=True, text=True, env=environment, cwd=tmp_path, timeout=300)
    assert result.returncode == 0, result.stderr
    (file,) = (tmp_path / "out").rglob("results_*.json")
    theirs = json.loads(file.read_text())["results"]["last_word"]["acc,none"]
    ours = run(work, "--task", "LAMBADA", "--eval_path", data)
    assert 0 < theirs < 1 and ours["accuracy_strict"] == pytest.approx(theirs, abs=1e-9)
