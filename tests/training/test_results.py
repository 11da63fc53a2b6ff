"""Result files: whose they are, and that no model's are replaced by another's."""

import json

from gptlm.training.metrics.results import of_other_models, suffix_of, summary_table, write_results


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
    names = [path.name for path in tmp_path.iterdir()]
    others = {"eval_results-2.json", "all_results-2.json", "results_of.json"}
    assert of_other_models(tmp_path, names) == others and {"eval_results.json", ".gptlm-files"} < {*names}


def test_a_file_of_others_keeps_its_name(tmp_path):
    (tmp_path / "eval_results-2.json").write_text("mine")
    write_results(tmp_path, "eval", {"eval_loss": 1.0})
    write_results(tmp_path, "eval", {"eval_loss": 2.0}, "/models/base")
    assert (tmp_path / "eval_results-2.json").read_text() == "mine"
    assert read(tmp_path, "eval_results-3") == {"eval_loss": 2.0}


def table_of(history, **steps):
    """The last table's row by the names of its columns, and the lines below it."""
    head, _, row, *below = summary_table("8p-GPU", history, parameters=1_500_000, seq_length=8, **steps)
    return dict(zip(*([cell.strip() for cell in line.strip("|").split("|")] for line in (head, row)))), below


def test_the_table_has_the_published_columns_before_ours():
    history = [{"eval_loss": 1.0}, {"interval_samples_per_second": 4.0}, {"eval_loss": 2.0}]
    row, below = table_of(history, first_step=1, last_step=3)
    assert list(row) == ["NAME", "params", "PPL", "samples/s", "seq_len", "Steps", "final PPL", "tokens/s"]
    assert list(row.values()) == ["8p-GPU", "1.5M", "2.718", "4.00", "8", "3", "7.389", "32"]
    assert len(below) == 2


def test_a_run_without_log_lines_has_no_speed():
    row, _ = table_of([{"eval_loss": 2.0}, {"eval_loss": 1.0}], first_step=1, last_step=3)
    assert (row["PPL"], row["final PPL"], row["samples/s"], row["tokens/s"]) == ("2.718", "2.718", "-", "-")


def test_the_table_names_the_steps_that_a_resumed_run_made():
    row, below = table_of([], first_step=4, last_step=6)
    assert row["Steps"] == "4-6" and "steps 4 to 6" in below[-1]
    row, below = table_of([{"eval_loss": 1.0}], first_step=4, last_step=3)
    assert row["Steps"] == "-" and row["PPL"] == "2.718" and "at step 3 already" in below[-1]
