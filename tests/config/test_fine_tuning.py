"""Fine-tuning's evaluation without training: the trained model, its newest checkpoint, or another one is meant."""

import json
import re
import shutil

import pytest

from gptlm.commands.sft import parse_sft
from gptlm.errors import UsageError


@pytest.fixture
def out(tiny_model, tmp_path):
    """The output of a run that started from `tiny_model` and was stopped: checkpoints 2 and 10, an unfinished 12."""
    folder = tmp_path / "out"
    for name in ("checkpoint-2", "checkpoint-10", "checkpoint-12"):
        shutil.copytree(tiny_model, folder / name)
        (folder / name / "run.json").write_text(json.dumps({"model_name_or_path": str(tiny_model)}))
        (folder / name / "manifest.json").write_text("{}")
    (folder / "checkpoint-12" / "manifest.json").unlink()
    return folder


def evaluated(out, *words):
    return parse_sft(["--dataset_name_or_path", "d", "--output_dir", str(out), "--do_eval", *map(str, words)], {})


@pytest.mark.parametrize(
    ("words", "says"),
    [
        ("--prompt_column q", "--prompt_column is given without --response_column"),
        ("--response_column a", "--response_column is given without --prompt_column"),
        ("--prompt_column q --response_column a --text_column t", "--text_column names plain texts"),
        ("--text_column t --paddle_compat", "does not work with --paddle_compat"),
        ("--val_size 0.1 --eval_dataset_name_or_path e", "leave --eval_dataset_name_or_path out"),
        ("--val_size 1.5", "--val_size 1.5: expected a fraction below 1, or a whole number of examples"),
        ("--max_train_samples 0", "--max_train_samples 0: expected at least 1"),
    ],
)
def test_data_arguments_that_do_not_fit(out, tiny_model, words, says):
    with pytest.raises(UsageError, match=re.escape(says)):
        evaluated(out, "--model_name_or_path", tiny_model, *words.split())


def test_a_run_that_has_not_ended_is_evaluated_as_of_its_newest_checkpoint(out, tiny_model):
    for words in ((), ("--model_name_or_path", tiny_model)):
        run = evaluated(out, *words)
        assert run.model.model_name_or_path == run.source.weights == str(out / "checkpoint-10")
        assert run.evaluated == str(out / "checkpoint-10")
        assert any("has not ended, its newest checkpoint is checkpoint-10" in note for note in run.notes)


def test_the_command_of_a_finished_run_means_its_result(out, tiny_model, tmp_path):
    shutil.copytree(out / "checkpoint-10", out, dirs_exist_ok=True)
    for words in ((), ("--model_name_or_path", tiny_model)):
        run = evaluated(out, *words)
        assert run.source.weights == str(out) and run.evaluated is None
    other = shutil.copytree(tiny_model, tmp_path / "other")
    run = evaluated(out, "--model_name_or_path", other)
    assert run.source.weights == str(other) == run.evaluated
    assert any(f"{other} is evaluated, not the model trained in {out}" in note for note in run.notes)
