"""--profile: the files name the steps' operations, belong to the run, and a run too short for them is refused."""

import json

import pytest

from gptlm import owned
from gptlm.commands.pretrain import parse_pretrain
from gptlm.commands.sft import parse_sft
from gptlm.errors import GptlmError, UsageError
from gptlm.model.tokenizer import train_tokenizer
from gptlm.recipes.pretrain.run import pretrain
from gptlm.recipes.sft.run import sft

SHORT = """--max_seq_length 16 --per_device_train_batch_size 1 --max_steps 6 --save_strategy no --logging_steps 1
    --device cpu --report_to none --split 8,1,1 --do_train --continue_training --disable_tqdm"""


@pytest.fixture
def train(corpus_folder, tiny_model, tmp_path):
    def call(*words):
        command = ["--input_dir", corpus_folder / "mmap", "--output_dir", tmp_path, "--model_name_or_path", tiny_model]
        return pretrain(parse_pretrain([str(word) for word in (*command, *SHORT.split(), *words)], {}))

    return call


def steps_in(path):
    """How often the optimizer ran, by the events of a trace."""
    names = [event.get("name", "") for event in json.loads(path.read_text())["traceEvents"]]
    return sum(name.startswith("Optimizer.step#") for name in names)


def test_the_steps_are_in_a_trace_and_a_table(train, tmp_path, capsys):
    train("--profile", "2")
    trace, table = tmp_path / "profile" / "steps-4-5.json", tmp_path / "profile" / "steps-4-5.txt"
    assert steps_in(trace) == 2 and "aten::" in table.read_text() and "Self CPU" in table.read_text()
    assert f"profile of the steps 4 to 5: {trace}" in capsys.readouterr().out
    assert {"profile/steps-4-5.json", "profile/steps-4-5.txt"} <= owned.listing(tmp_path).keys()
    assert "profile" not in json.loads((tmp_path / "run.json").read_text())
    (tmp_path / "profile" / "mine.txt").write_text("kept")
    train("--overwrite_output_dir", "--profile", "1")
    assert sorted(path.name for path in (tmp_path / "profile").iterdir()) == [
        "mine.txt", "steps-4-4.json", "steps-4-4.txt",
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("words", "text"),
    [
        (["--profile", "0"], "--profile 0: expected 1 to 100 steps"),
        (["--profile", "101"], "--profile 101: expected 1 to 100 steps"),
        (["--profile", "4"], "--profile 4: the run has 6 steps to train, 3 of warm-up come before the 4 profiled"),
        (["--profile", "few"], "--profile 'few': expected a whole number"),
    ],
)
def test_values_are_refused_by_name(train, words, text, tmp_path):
    with pytest.raises(UsageError, match=text):
        train(*words)
    assert not (tmp_path / "profile").exists()


def test_a_run_that_fails_leaves_no_profiler_behind(train, tmp_path):
    with pytest.raises(GptlmError, match="the loss is nan"):
        train("--profile", "3", "--learning_rate", "1e30", "--max_grad_norm", "0")
    train("--overwrite_output_dir", "--profile", "1")
    assert steps_in(tmp_path / "profile" / "steps-4-4.json") == 1


def test_fine_tuning_is_profiled(tiny_model, tmp_path):
    train_tokenizer(["the cat sat on the mat " * 9], 300).save_pretrained(tmp_path / "tokenizer")
    (tmp_path / "train.json").write_text(json.dumps([{"src": "the cat", "tgt": "sat on the mat"}] * 8))
    words = f"""--model_name_or_path {tiny_model} --tokenizer_name_or_path {tmp_path}/tokenizer --dataset_name_or_path
        {tmp_path}/train.json --output_dir {tmp_path}/out --num_train_epochs 4 --per_device_train_batch_size 8
        --device cpu --report_to none --save_strategy no --do_train --profile 1"""
    sft(parse_sft(words.split(), {}))
    assert steps_in(tmp_path / "out" / "profile" / "steps-4-4.json") == 1
