"""Runs with --report_to wandb, mlflow, swanlab and trackio, with the real packages and no network.

Slow, and skipped where a package is not installed (`pip install 'gptlm[trackers]'`).
"""

import json
from importlib.util import find_spec

import pytest

from gptlm.commands.pretrain import parse_pretrain
from gptlm.errors import UsageError
from gptlm.recipes.common import trackers
from gptlm.recipes.pretrain.run import pretrain
from tests.conftest import run_script

WORDS = (
    "--max_seq_length 16 --per_device_train_batch_size 2 --max_steps 2 --eval_iters 1 --logging_steps 1 "
    "--split 80,10,10 --do_train --do_eval --eval_steps 1 --device cpu --disable_tqdm --continue_training "
    "--run_name first"
).split()


def with_tracker(name):
    needed = pytest.mark.skipif(find_spec(name) is None, reason=f"{name} is not installed")
    return pytest.param(name, marks=[needed, pytest.mark.slow])


@pytest.fixture
def words(tiny_model, corpus_folder, tmp_path):
    own = ["--model_name_or_path", tiny_model, "--input_dir", corpus_folder / "mmap", "--output_dir", tmp_path / "out"]
    return [*WORDS, *map(str, own)]


def read_wandb(folder):
    """wandb.init writes its parameters and scalars into one file of records."""
    (file,) = folder.glob("wandb/offline-run-*/run-*.wandb")
    content = file.read_bytes()
    assert b"train/loss" in content and b"test/loss" in content and b"max_seq_length" in content


def read_mlflow(folder):
    from mlflow import MlflowClient

    client = MlflowClient(f"sqlite:///{folder / 'mlflow.db'}")
    (run,) = client.search_runs(["0"])
    assert (run.info.run_name, run.info.status) == ("first", "FINISHED")
    assert run.data.params["max_seq_length"] == "16"
    for name in ("loss", "eval_loss", "test_loss"):
        assert [point.step for point in client.get_metric_history(run.info.run_id, name)] == (
            [2] if name == "test_loss" else [1, 2]
        )
    return [point.value for point in client.get_metric_history(run.info.run_id, "loss")]


def read_swanlab(folder):
    (run,) = [path for path in (folder / "swanlog").iterdir() if path.is_dir() and path.name.startswith("run")]
    content = b"".join(path.read_bytes() for path in run.rglob("*") if path.is_file())
    assert b"train/loss" in content and b"max_seq_length" in content


def read_trackio(folder):
    import sqlite3

    (file,) = [path for path in folder.glob("*.db") if path.name.startswith("huggingface")]
    with sqlite3.connect(file) as database:
        rows = database.execute("select run_name, metrics from metrics order by id").fetchall()
    assert {name for name, _ in rows} == {"first"}
    found = [json.loads(metrics) for _, metrics in rows]
    assert any("test/loss" in one for one in found)
    return [one["train/loss"] for one in found if "train/loss" in one]


READ = {"wandb": read_wandb, "mlflow": read_mlflow, "swanlab": read_swanlab, "trackio": read_trackio}


@pytest.mark.parametrize("name", [with_tracker(name) for name in READ])
def test_a_run_is_tracked(name, words, tmp_path):
    environment = {
        "WANDB_MODE": "offline",
        "WANDB_DIR": str(tmp_path),
        "MLFLOW_TRACKING_URI": f"sqlite:///{tmp_path / 'mlflow.db'}",
        "SWANLAB_MODE": "offline",
        "SWANLAB_LOG_DIR": str(tmp_path / "swanlog"),
        "TRACKIO_DIR": str(tmp_path),
        "HF_HUB_OFFLINE": "1",
        "HOME": str(tmp_path),
    }
    result = run_script(
        "run_pretrain", *words, "--report_to", name, "tensorboard", cwd=tmp_path, environment=environment
    )
    assert result.returncode == 0, result.stderr
    assert list((tmp_path / "out" / "runs").rglob("events*"))  # several trackers at once
    losses = READ[name](tmp_path)
    history = json.loads((tmp_path / "out" / "trainer_state.json").read_text())["log_history"]
    if losses is not None:
        assert losses == pytest.approx([entry["loss"] for entry in history if "loss" in entry])


@pytest.mark.parametrize("name", READ)
def test_a_tracker_that_is_not_installed_is_refused(name, words, tmp_path, monkeypatch):
    monkeypatch.setattr(trackers, "find_spec", lambda package: None)
    with pytest.raises(UsageError, match=f"{name} is not installed; pip install {name}"):
        pretrain(parse_pretrain([*words, "--report_to", "tensorboard", name], {}))
    assert not (tmp_path / "out").exists()


def test_an_unknown_tracker_is_refused(words):
    with pytest.raises(UsageError, match="'comet_ml': expected visualdl, tensorboard, wandb, mlflow, swanlab"):
        parse_pretrain([*words, "--report_to", "comet_ml"], {})
