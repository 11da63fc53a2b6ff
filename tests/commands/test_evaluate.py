"""The words of evaluation: ours, Megatron's and FleetX's."""

import json

import pytest

from gptlm.commands.evaluate import parse_evaluate
from gptlm.errors import GptlmError, UsageError


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> str:
    folder = tmp_path_factory.mktemp("model")
    sizes = {"n_layer": 2, "n_embd": 32, "n_head": 2, "vocab_size": 500, "n_positions": 64}
    (folder / "config.json").write_text(json.dumps({"model_type": "gpt2", **sizes}))
    return str(folder)


@pytest.fixture
def parsed(model):
    def run(words: str, **more):
        return parse_evaluate([*words.split(), "--model_name_or_path", model], **more)

    return run


def test_defaults(parsed, model):
    arguments, notes = parsed("--task wikitext103 --eval_path f")
    assert (arguments.task, arguments.detokenizer, arguments.model_name_or_path) == ("WIKITEXT103", "wikitext", model)
    assert (arguments.max_seq_length, arguments.overlapping_eval, arguments.batch_size) == (64, 32, None)
    assert arguments.json is False and arguments.max_examples is None and notes == ()
    for task, detokenizer in (("LAMBADA", "lambada"), ("WIKITEXT2", "wikitext"), ("TEXT", "none")):
        assert parsed(f"--task {task} --eval_path f")[0].detokenizer == detokenizer
    assert parsed("--task TEXT --eval_path f --detokenizer ptb")[0].detokenizer == "ptb"


def test_the_default_length_is_at_most_1024(tmp_path):
    sizes = {"n_layer": 2, "n_embd": 32, "n_head": 2, "vocab_size": 500, "n_positions": 2048}
    (tmp_path / "config.json").write_text(json.dumps(sizes))
    words = ["--task", "TEXT", "--eval_path", "f", "--load", str(tmp_path)]
    assert parse_evaluate(words)[0].max_seq_length == 1024
    assert parse_evaluate([*words, "--seq-length", "2048"])[0].max_seq_length == 2048


def test_the_stride_follows_short_windows_unless_it_was_asked_for(parsed):
    assert parsed("--task TEXT --eval_path f --max_seq_length 16")[0].overlapping_eval == 16
    assert parsed("--task TEXT --eval_path f --overlapping_eval none")[0].overlapping_eval == 64
    with pytest.raises(UsageError, match=r"--overlapping_eval 17: expected 1 to --max_seq_length \(16\)"):
        parsed("--task TEXT --eval_path f --max_seq_length 16 --overlapping_eval 17")


def test_megatron_s_command(model):
    """The words of its script for zero-shot tasks."""
    words = (
        "--task LAMBADA --valid-data l.jsonl --tokenizer-type GPT2BPETokenizer --strict-lambada --vocab-file v "
        f"--merge-file m --load {model} --tensor-model-parallel-size 1 --num-layers 2 --hidden-size 32 "
        "--num-attention-heads 2 --micro-batch-size 4 --checkpoint-activations --seq-length 64 "
        "--max-position-embeddings 64 --log-interval 5 --fp16 --no-load-optim --no-load-rng --overlapping-eval 16"
    )
    arguments, notes = parse_evaluate(words.split())
    assert (arguments.eval_path, arguments.batch_size, arguments.max_seq_length) == ("l.jsonl", 4, 64)
    assert arguments.logging_freq == 5 and arguments.fp16
    said = {note.split()[0] for note in notes}
    assert said == {
        *("--tokenizer-type", "--strict-lambada", "--vocab-file", "--merge-file", "--checkpoint-activations"),
        *("--no-load-optim", "--no-load-rng", "--overlapping-eval"),
    }
    assert "--strict-lambada has no effect here: both LAMBADA metrics are always printed" in notes


@pytest.mark.parametrize(
    ("words", "task"),
    [("--cloze_eval true", "LAMBADA"), ("--cloze_eval False", "WIKITEXT103"), ("--task TEXT --cloze_eval 0", "TEXT")],
)
def test_fleetx_s_words(parsed, words, task):
    arguments, _ = parsed(
        f"{words} --eval_path f --overlapping_eval 16 --batch_size 16 --max_seq_len 32 --logging_freq 3"
    )
    assert (arguments.task, arguments.overlapping_eval, arguments.batch_size) == (task, 16, 16)
    assert (arguments.max_seq_length, arguments.logging_freq) == (32, 3)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("--eval_path f", "--task is missing: one of LAMBADA, WIKITEXT103"),
        ("--task PIQA --eval_path f", "expected one of LAMBADA"),
        ("--task WIKITEXT2 --cloze_eval true --eval_path f", "name different tasks"),
        ("--task LAMBADA --cloze_eval false --eval_path f", "name different tasks"),
        ("--task LAMBADA", "--eval_path is missing"),
        ("--task DATA", "--input_dir is missing"),
        ("--task DATA --input_dir p --eval_path f", "--eval_path is a text"),
        ("--task DATA --input_dir p --split a,b", "expected numbers like 949,50,1"),
        ("--task TEXT --input_dir p --eval_path f", "give --task DATA"),
        ("--task TEXT --eval_path f --overlapping_eval 0", "--overlapping_eval 0: expected at least 1"),
        ("--task TEXT --eval_path f --batch_size 0", "--batch_size 0: expected at least 1"),
        ("--task TEXT --eval_path f --max_examples 0", "--max_examples 0"),
        ("--task TEXT --eval_path f --max_seq_length 65", "has a position table of 64; give 64 or less"),
        ("--task TEXT --eval_path f --max_seq_length 32 --seq-length 16", "differ; give one"),
        ("--task TEXT --eval_path f --fp16 --bf16", "exclude each other"),
        ("--task TEXT --eval_path f --device tpu", "gptlm runs on gpu and cpu"),
        ("--task TEXT --eval_path f --num-layers 24", "--num-layers 24: the model .* has 2"),
        ("--task TEXT --eval_path f --hidden-size 24", "--hidden-size 24: the model .* has 32"),
        ("--task TEXT --eval_path f --num-attention-heads 4", "--num-attention-heads 4: the model .* has 2"),
        ("--task TEXT --eval_path f --max-position-embeddings 9", "--max-position-embeddings 9: the model .* has 64"),
        ("--task TEXT --eval_path f --pipeline-model-parallel-size 2", "use --tensor_parallel_degree"),
        (
            "--task TEXT --eval_path f --tensor-model-parallel-size 2",
            "size 2: this is one process; start 2: torchrun --nproc_per_node 2 -m gptlm evaluate",
        ),
        ("--task TEXT --eval_path f --overlaping_eval 2", "did you mean --overlapping_eval"),
    ],
)
def test_what_is_refused(parsed, words, message):
    with pytest.raises(UsageError, match=message):
        parsed(words)


def test_one_card_is_not_for_several_processes(parsed):
    with pytest.raises(UsageError, match="one GPU for 2 processes"):
        parsed("--task TEXT --eval_path f --device gpu:1", processes=2)
    assert parsed("--task TEXT --eval_path f --device gpu:1")[0].device == "gpu:1"


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("no-such-model", "neither a folder nor a built-in name"),
        ("gpt3-13B-en", "no weights were ever published"),
        (".", "cannot read the model config config.json"),
    ],
)
def test_a_model_that_is_none(name, message, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(GptlmError, match=message):
        parse_evaluate(["--task", "TEXT", "--eval_path", "f", "--model_name_or_path", name])


def test_flags_of_another_task_are_noted(parsed):
    _, notes = parsed("--task TEXT --eval_path f --split_name test --split 1,1,1")
    assert notes == ("--split has no effect with --task TEXT", "--split_name has no effect with --task TEXT")
    arguments, notes = parsed("--task DATA --input_dir p --detokenizer ptb")
    assert notes == ("--detokenizer has no effect with --task DATA",) and arguments.detokenizer == "none"
