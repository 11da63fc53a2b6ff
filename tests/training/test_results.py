"""Result files: whose they are, and that no model's are replaced by another's."""

import json

from gptlm.training.metrics.results import remove_results, suffix_of, summary_table, write_results


def read(folder, name):
    return json.loads((folder / f"{name}.json").read_text())


def test_results_of_another_model_get_a_number(tmp_path):
    write_results(tmp_path, "eval", {"eval_loss": 1.0})
    for loss in (2.0, 3.0):
        write_results(tmp_path, "eval", {"eval_loss": loss}, "/models/base")
    write_results(tmp_path, "test", {"test_loss": 4.0}, "/models/other")
    write_results(tmp_path, "train", {"train_loss": 0.5})
    assert read(tmp_path, "eval_results") == {"eval_loss": 1.0}
    assert read(tmp_path, "all_results") == {"eval_loss": 1.0, "train_loss": 0.5}
    assert read(tmp_path, "eval_results-2") == read(tmp_path, "all_results-2") == {"eval_loss": 3.0}
    assert read(tmp_path, "test_results-3") == {"test_loss": 4.0}
    assert suffix_of(tmp_path, "/models/base") == "-2" and suffix_of(tmp_path, None) == ""


def test_files_of_an_earlier_version_are_those_of_the_model_trained_there(tmp_path):
    (tmp_path / "eval_results.json").write_text('{"eval_loss": 1.0}')
    write_results(tmp_path, "eval", {"eval_loss": 2.0}, "/models/base")
    assert read(tmp_path, "eval_results") == {"eval_loss": 1.0} and read(tmp_path, "eval_results-2") == {
        "eval_loss": 2.0
    }


def test_the_trained_model_takes_the_plain_names(tmp_path):
    """Where another model was evaluated first, its files make way and stay, also when the run begins anew."""
    write_results(tmp_path, "eval", {"eval_loss": 2.0}, "/models/base")
    assert read(tmp_path, "eval_results") == {"eval_loss": 2.0}
    write_results(tmp_path, "eval", {"eval_loss": 1.0})
    assert read(tmp_path, "eval_results") == {"eval_loss": 1.0}
    assert read(tmp_path, "eval_results-2") == read(tmp_path, "all_results-2") == {"eval_loss": 2.0}
    remove_results(tmp_path)
    assert not (tmp_path / "eval_results.json").exists() and (tmp_path / "eval_results-2.json").exists()


def test_a_run_without_log_lines_has_no_speed():
    history = [{"eval_loss": 2.0}, {"eval_loss": 1.0}]
    row = summary_table("tiny", history, parameters=1_500_000, seq_length=8, steps=3)[2]
    assert row == "| tiny | 1.5M | 2.718 | 2.718 | - | - | 8 | 3 |"
    history.append({"interval_samples_per_second": 4.0})
    assert "| 4.00 | 32 |" in summary_table("tiny", history, parameters=1, seq_length=8, steps=3)[2]
