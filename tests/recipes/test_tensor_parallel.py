"""Evaluation and prediction with a model that is split over processes: the results of one process, from each format."""

import json
import re
import shutil
import sys

import numpy as np
import pytest
import torch
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file, save_file
from transformers import GPT2Config, GPT2LMHeadModel

from gptlm.cli import main
from gptlm.commands.evaluate import parse_evaluate
from gptlm.commands.predict import parse_predict, resolve_predict
from gptlm.errors import GptlmError, UsageError
from gptlm.model.tokenizer import train_tokenizer
from tests.processes import run
from tests.recipes.test_sharded import sharded_trainer
from tests.training.test_trainer import stock_trainer

LINE = "the cat sat on the mat and the dog sat on the log"
ENTRIES = 501  # odd: one process has a row of the embedding more
WORDS = ["--device", "cpu", "--model_name_or_path"]


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    """A stock folder and the same weights in shards with an index, in torch's format, and in a sharded checkpoint."""
    folder = tmp_path_factory.mktemp("split")
    torch.manual_seed(0)
    config = GPT2Config(
        vocab_size=ENTRIES, n_positions=64, n_embd=32, n_layer=2, n_head=4, bos_token_id=0, eos_token_id=0
    )
    GPT2LMHeadModel(config).save_pretrained(folder / "start")
    sharded_trainer(folder / "start", folder / "run").train()
    stock_trainer(folder / "start", folder / "whole").train()  # the same steps, saved as one file
    (folder / "run" / "checkpoint-6").rename(folder / "sharded")
    (folder / "whole" / "checkpoint-6").rename(folder / "stock")
    stock = GPT2LMHeadModel.from_pretrained(folder / "stock")
    stock.save_pretrained(folder / "indexed", max_shard_size="50KB")
    stock.save_pretrained(folder / "pickled")
    (folder / "pickled" / "model.safetensors").unlink()
    torch.save(stock.state_dict(), folder / "pickled" / "pytorch_model.bin")
    for name in ("stock", "indexed", "pickled", "sharded"):
        train_tokenizer([LINE * 20], 300).save_pretrained(folder / name)
    (folder / "text.txt").write_text(f"{LINE} " * 20)
    (folder / "lambada.jsonl").write_text("".join(json.dumps({"text": LINE[: 12 + end]}) + "\n" for end in range(37)))
    return folder


def launched(*words, processes=2):
    return run([sys.executable, "-m", "gptlm", *words], processes=processes)


def evaluated(capsys, *words, processes=2):
    """The reports of one process and of several, which split the model in two; and the log of those."""
    assert main(["evaluate", *map(str, words), "--json"]) == 0
    one = json.loads(capsys.readouterr().out)
    split = launched("evaluate", *words, "--json", "--tensor_parallel_degree", "2", processes=processes)
    assert split.returncode == 0, split.stderr
    return one, json.loads(split.stdout), split.stderr


def assert_same_report(one, other):
    assert other.keys() == one.keys() and one["num_examples"] > 5
    for key, value in one.items():
        assert other[key] == (pytest.approx(value, rel=1e-6) if isinstance(value, float) else value), key


@pytest.mark.distributed
@pytest.mark.parametrize("name", ["stock", "indexed", "pickled", "sharded"])
def test_perplexity_of_a_split_model(models, capsys, name):
    task = ["--task", "TEXT", "--eval_path", models / "text.txt", *WORDS]
    one, two, log = evaluated(capsys, *task, models / name)
    assert_same_report(one, two)
    assert log.count("validation results on") == 2  # one process logs
    # 251 rows of the embedding on the first process, 64 positions, 13 vectors, half of what a layer splits
    layer = 4 * 32 + 32 + 32 + (3 * 32 * 33 + 32 * 32 + 4 * 32 * 33 + 4 * 32 * 32) // 2
    whole = (ENTRIES + 64 + 2) * 32 + 2 * (12 * 32 * 32 + 13 * 32)
    assert f"holds {(251 + 64 + 2) * 32 + 2 * layer:,} of {whole:,} weights" in log


@pytest.mark.distributed
@pytest.mark.parametrize("precision", [[], ["--bf16"]])
def test_accuracy_of_a_split_model(models, capsys, precision):
    """In bfloat16 logits are often equal: the argmax is the same entry on all processes."""
    task = ["--task", "LAMBADA", "--eval_path", models / "lambada.jsonl", "--batch_size", "4", *WORDS]
    one, two, _ = evaluated(capsys, *task, models / "stock", *precision)
    assert_same_report(one, two)


@pytest.mark.slow
@pytest.mark.distributed
def test_replicas_of_a_split_model_share_the_examples(models, capsys):
    task = ["--task", "TEXT", "--eval_path", models / "text.txt", "--batch_size", "2", *WORDS]
    one, four, log = evaluated(capsys, *task, models / "stock", processes=4)
    assert_same_report(one, four)
    assert log.count("validation results on") == 2


@pytest.mark.distributed
@pytest.mark.parametrize(
    "how",
    ["--batch_size 2", "--do_sample --seed 5 --num_return_sequences 2", "--num_beams 3 --num_return_sequences 2"],
)
def test_continuations_of_a_split_model(models, capsys, tmp_path, how):
    prompts = tmp_path / "prompts.txt"
    prompts.write_text("the cat\na\nthe dog sat on\n")
    words = ["--input_file", prompts, "--tgt_length", 8, *how.split(), *WORDS, models / "stock", "--output_file"]
    assert main(["predict", *map(str, words), str(tmp_path / "one.jsonl")]) == 0
    one = capsys.readouterr()
    split = launched("predict", *words, tmp_path / "two.jsonl", "--tensor_parallel_degree", "2")
    assert split.returncode == 0, split.stderr
    assert split.stdout == one.out and len(one.out.strip()) > 10
    assert (tmp_path / "two.jsonl").read_text() == (tmp_path / "one.jsonl").read_text()
    assert split.stderr.count("tokens/s, without loading") == 1


@pytest.mark.distributed
def test_what_the_main_process_refuses_ends_all(models, tmp_path):
    """Prompts are read there alone, before weights are loaded."""
    (tmp_path / "empty.txt").write_text("\n")
    words = ["--input_file", tmp_path / "empty.txt", *WORDS, models / "stock", "--tensor_parallel_degree", "2"]
    ended = launched("predict", *words)
    assert ended.returncode == 1 and "rank 0: error: " in ended.stderr
    assert "empty.txt" in ended.stderr and "weights" not in ended.stderr


@pytest.mark.distributed
@pytest.mark.parametrize("command", ["evaluate", "predict"])
def test_a_damaged_weight_of_another_process_is_named(models, tmp_path, command):
    folder = tmp_path / "damaged"
    shutil.copytree(models / "stock", folder)
    weights = load_file(folder / "model.safetensors")
    name = "transformer.h.1.mlp.c_fc.weight"
    weights[name][0, -1] = np.nan  # (in, out): the second process has the last outputs
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    task = ["--task", "TEXT", "--eval_path", models / "text.txt"] if command == "evaluate" else ["--prompt", "the"]
    ended = launched(command, *task, *WORDS, folder, "--tensor_parallel_degree", "2")
    assert ended.returncode == 1
    assert re.search(rf"rank 0: error: .*1 of its 28 weight tensors contain them \(first: {name}\)", ended.stderr)


@pytest.mark.distributed
def test_weights_of_another_model_are_refused(models, tmp_path):
    folder = tmp_path / "other"
    shutil.copytree(models / "stock", folder)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"n_positions": 65}))
    ended = launched("predict", "--prompt", "the", *WORDS, folder, "--tensor_parallel_degree", "2")
    assert ended.returncode == 1 and "missing or of another shape (first: transformer.wpe.weight)" in ended.stderr


TEXT = ["--task", "TEXT", "--eval_path", "f"]


@pytest.mark.parametrize(
    ("command", "processes", "words", "message"),
    [
        (
            "evaluate",
            1,
            "--tensor_parallel_degree 2",
            "2: this is one process; start 2: torchrun --nproc_per_node 2",
        ),
        (
            "predict",
            1,
            "--tensor_parallel_degree 4",
            "4: this is one process.* start 4: torchrun --nproc_per_node 4",
        ),
        ("evaluate", 3, "--tensor_parallel_degree 2", "there are 3 processes; start 2: torchrun"),
        ("evaluate", 7, "--tensor_parallel_degree 2", "there are 7 processes; start 6: torchrun"),
        ("predict", 4, "--tensor_parallel_degree 2", "there are 4 processes, and prediction has no data parallelism"),
        ("evaluate", 3, "--tensor_parallel_degree 3", "3 does not divide the 4 attention heads and .* one of 1, 2, 4$"),
        ("predict", 3, "--tensor_parallel_degree 3", "3 does not divide the 4 attention heads and .* one of 1, 2, 4$"),
        ("evaluate", 2, "--tensor_parallel_degree 2 --device gpu:1", "'gpu:1' is one GPU for 2 processes"),
        ("predict", 2, "--tensor_parallel_degree 2 --device gpu:1", "'gpu:1' is one GPU for 2 processes"),
        ("predict", 2, "--tensor_parallel_degree 2 --serve", "one process answers"),
        ("predict", 2, "--pipeline_parallel_degree 2", "use --tensor_parallel_degree"),
    ],
)
def test_degrees_that_do_not_fit(models, command, processes, words, message):
    model = ["--model_name_or_path", str(models / "stock"), *words.split()]
    with pytest.raises(UsageError, match=message):
        if command == "evaluate":
            parse_evaluate([*TEXT, *model], processes)
        else:
            parse_predict(model, processes)


def test_adapters_are_to_be_merged_first(models, tmp_path):
    adapted = get_peft_model(
        GPT2LMHeadModel.from_pretrained(models / "stock"),
        LoraConfig(r=2, target_modules=["c_attn"], fan_in_fan_out=True),
    )
    adapted.peft_config["default"].base_model_name_or_path = str(models / "stock")
    adapted.save_pretrained(tmp_path)
    message = f"gptlm merge-lora --lora_path {tmp_path} --output_path DIR"
    with pytest.raises(UsageError, match=message):
        parse_predict(["--model_name_or_path", str(tmp_path), "--tensor_parallel_degree", "2"], 2)
    with pytest.raises(UsageError, match=message):
        words = ["--model_name_or_path", str(models / "stock"), "--lora_path", str(tmp_path)]
        parse_evaluate([*TEXT, *words, "--tensor_parallel_degree", "2"], 2)


def test_a_command_is_shown_without_its_processes(models, tmp_path):
    """Neither processes nor weights are needed for --print_config; -1 is 1, as in training."""
    words = ["--model_name_or_path", str(models / "stock"), "--tensor_parallel_degree"]
    assert resolve_predict([*words, "2"], printing=True).missing == []
    assert parse_predict([*words, "-1"])[0].tensor_parallel_degree == 1
    with pytest.raises(GptlmError, match="neither a folder nor a built-in name"):
        parse_predict(["--model_name_or_path", str(tmp_path / "none"), "--tensor_parallel_degree", "2"], 2)


@pytest.mark.parametrize("command", ["chat", "serve"])
def test_one_process_answers_messages(models, capsys, command):
    assert main([command, *WORDS, str(models / "stock"), "--tensor_parallel_degree", "2"]) == 2
    assert "one process answers; see gptlm predict" in capsys.readouterr().err
