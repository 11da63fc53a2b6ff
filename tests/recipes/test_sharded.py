"""Sharded checkpoints in one process: training, the commands that read them, and what goes wrong while writing.

Several processes: test_sharding.py and test_layouts.py; single files and their index: tests/checkpoint/test_shards.py.
"""

import io
import json
import resource
import shutil
import sys
import time
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, TrainerCallback

from gptlm.checkpoint.checkpointer import Checkpointer
from gptlm.checkpoint.folder import read
from gptlm.cli import main
from gptlm.errors import GptlmError
from gptlm.model.build import load_model
from gptlm.model.lora import fingerprint_of
from gptlm.model.tokenizer import train_tokenizer
from tests.checkpoint.made import assert_same_tensors
from tests.training.test_trainer import StopAt, losses, stock_trainer


def sharded_trainer(model, folder, *, in_background=False, args=None):
    checkpointer = Checkpointer(sharded=True, in_background=in_background, keep=2)
    return stock_trainer(model, folder, args=args, checkpointer=checkpointer)


@pytest.fixture(scope="module")
def runs(tiny_model, tmp_path_factory):
    """The same run with checkpoints of both forms, the sharded ones resumed, too."""
    folder = tmp_path_factory.mktemp("sharded")
    whole = stock_trainer(tiny_model, folder / "hf")
    whole.train()
    found = {"hf": losses(whole)}
    for name, in_background in (("sharded", False), ("background", True)):
        run = sharded_trainer(tiny_model, folder / name, in_background=in_background)
        run.train()
        found[name] = losses(run)
    stopped = sharded_trainer(tiny_model, folder / "again", in_background=True)
    stopped.add_callback(StopAt(3))
    stopped.train()
    resumed = stock_trainer(tiny_model, folder / "again")
    resumed.train(resume_from_checkpoint=True)
    return folder, found | {"again": losses(resumed)}


def test_both_forms_hold_the_same_and_resume_exactly(runs):
    folder, found = runs
    assert found["sharded"] == found["background"] == found["again"] == found["hf"]
    for name in ("sharded", "background"):
        for step in (3, 6):
            assert_same_tensors(folder / "hf" / f"checkpoint-{step}", folder / name / f"checkpoint-{step}")
    manifests = [read(folder / name / "checkpoint-3").manifest for name in ("hf", "background", "again")]
    assert [manifest.checkpoint_format for manifest in manifests] == ["hf", "sharded", "sharded"]
    ends = [load_model(str(folder / name / "checkpoint-6")).state_dict() for name in ("hf", "again")]
    assert all(torch.equal(ends[0][key], ends[1][key]) for key in ends[0])
    assert not [path for path in (folder / "background").iterdir() if path.name.startswith(".checkpoint")]


def test_commands_take_a_sharded_checkpoint(runs, tmp_path, capsys):
    folder, _ = runs
    path = folder / "sharded" / "checkpoint-6"
    assert main(["convert", "--check", str(path)]) == 0
    train_tokenizer(["the cat sat on the mat and the dog sat on the log " * 20], 300).save_pretrained(path)
    whole, own = load_model(str(folder / "hf" / "checkpoint-6")), load_model(str(path))
    assert all(torch.equal(x, y) for x, y in zip(whole.state_dict().values(), own.state_dict().values(), strict=True))
    assert fingerprint_of(path) == fingerprint_of(folder / "hf" / "checkpoint-6")  # of the base of adapters
    assert main(["convert", "--from", str(path), "--to", "hf", "--output", str(tmp_path / "stock")]) == 0
    assert "is a checkpoint of gptlm, sharded" in capsys.readouterr().out
    stock = AutoModelForCausalLM.from_pretrained(tmp_path / "stock")
    wanted = AutoModelForCausalLM.from_pretrained(folder / "hf" / "checkpoint-6")
    assert all(torch.equal(x, y) for x, y in zip(stock.state_dict().values(), wanted.state_dict().values()))
    words = ["--prompt", "the cat", "--max_new_tokens", "3", "--device", "cpu"]
    assert main(["predict", "--model_name_or_path", str(path), *words]) == 0
    said = capsys.readouterr().out
    assert main(["predict", "--model_name_or_path", str(tmp_path / "stock"), *words]) == 0
    assert said and capsys.readouterr().out == said


def test_every_command_does_with_it_what_it_does_with_the_stock_folder(runs, tmp_path, monkeypatch, capsys):
    """Evaluation, a conversation, fine-tuning, adapters on it and their merge."""
    folder, _ = runs
    models = {"sharded": tmp_path / "checkpoint", "stock": tmp_path / "stock"}
    shutil.copytree(folder / "sharded" / "checkpoint-6", models["sharded"])
    text = "the cat sat on the mat and the dog sat on the log "
    train_tokenizer([text * 20], 300).save_pretrained(models["sharded"])
    assert main(["convert", "--from", str(models["sharded"]), "--output", str(models["stock"])]) == 0
    (tmp_path / "t.txt").write_text(text * 5)
    (tmp_path / "d.jsonl").write_text('{"src": "the cat", "tgt": "sat on"}\n' * 2)
    few = ["--dataset_name_or_path", tmp_path / "d.jsonl", "--max_steps", 1, "--disable_tqdm", "--report_to", "none"]
    found: dict[str, list] = {}
    for name, path in models.items():

        def run(command, *words, name=name, path=path):
            capsys.readouterr()
            assert main([command, "--model_name_or_path", str(path), *map(str, words)]) == 0
            return capsys.readouterr().out

        measured = json.loads(
            run("evaluate", "--task", "TEXT", "--eval_path", tmp_path / "t.txt", "--device", "cpu", "--json")
        )
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"the cat\nthe dog\n")))
        said = run("chat", "--chat_template", "plain", "--max_new_tokens", 4, "--device", "cpu")
        tuned, adapters, merged = (tmp_path / f"{name}-{kind}" for kind in ("sft", "lora", "merged"))
        run("sft", *few, "--device", "cpu", "--do_train", "--output_dir", tuned)
        run("sft", *few, "--device", "cpu", "--do_train", "--output_dir", adapters, "--lora")
        run("merge-lora", "--lora_path", adapters, "--output_path", merged)
        losses = {key: value for key, value in measured.items() if isinstance(value, float) and "second" not in key}
        found[name] = [losses, said, *(load_file(where / "model.safetensors") for where in (tuned, merged))]
    for one, other in zip(*found.values(), strict=True):
        if isinstance(one, dict) and "transformer.wte.weight" in one:
            assert one.keys() == other.keys() and all(torch.equal(one[key], other[key]) for key in one)
        else:
            assert one == other and one


class Full(TrainerCallback):
    """A limit on the size of files from the second step on stands for a full disk."""

    def on_step_end(self, args, state, control, **kwargs):
        if state.global_step == 2:
            deadline = time.monotonic() + 60
            while not (Path(args.output_dir) / "checkpoint-1").exists() and time.monotonic() < deadline:
                time.sleep(0.01)  # it is written in the background
            resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, resource.RLIM_INFINITY))


@pytest.mark.parametrize("in_background", [False, True])
def test_a_failed_write_is_one_sentence_and_ends_the_run(tiny_model, tmp_path, in_background):
    made = sharded_trainer(tiny_model, tmp_path, in_background=in_background, args={"save_steps": 1})
    made.add_callback(Full())
    try:
        with pytest.raises(GptlmError, match=r"^cannot write the checkpoint .*\.checkpoint-2.*File too large") as error:
            made.train()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    assert "earlier checkpoints are intact" in str(error.value)
    assert [path.name for path in tmp_path.glob("*checkpoint-*")] == ["checkpoint-1"]
    read(tmp_path / "checkpoint-1")


@pytest.mark.parametrize(
    ("words", "form", "why"),
    [
        ([], "hf", "derived: one process"),
        (["--world_size", "8"], "hf", "derived: 8 processes, up to 1,000,000,000 weights"),
        (["--model_name_or_path", "gpt3-1.3B-en"], "hf", "derived: one process"),
        (
            ["--model_name_or_path", "gpt3-1.3B-en", "--world_size", "8"],
            "sharded",
            "derived: 8 processes, more than 1,000,000,000 weights",
        ),
        (["--checkpoint_format", "sharded", "--async_save"], "sharded", "--checkpoint_format"),
    ],
)
def test_the_form_of_a_run(tmp_path, corpus_folder, capsys, words, form, why):
    base = ["--model_name_or_path", "gpt2-en", "--input_dir", str(corpus_folder / "mmap"), "--max_steps", "5"]
    assert main(["pretrain", *base, "--output_dir", str(tmp_path), *words, "--print_config"]) == 0
    shown = json.loads(capsys.readouterr().out)
    assert shown["run"]["checkpoint_format"] == form and shown["from"]["checkpoint_format"] == why


@pytest.mark.parametrize(
    ("command", "words", "says"),
    [
        ("pretrain", ["--async_save"], "--async_save needs --checkpoint_format sharded"),
        ("sft", ["--lora", "--checkpoint_format", "sharded"], "--checkpoint_format sharded is for whole models"),
    ],
)
def test_forms_that_do_not_fit(tmp_path, corpus_folder, tiny_model, capsys, command, words, says):
    data = {"pretrain": ["--input_dir", str(corpus_folder / "mmap")], "sft": ["--dataset_name_or_path", str(tmp_path)]}
    base = ["--model_name_or_path", str(tiny_model), *data[command], "--max_steps", "5", "--output_dir", "x"]
    assert main([command, *base, *words, "--print_config"]) == 2
    assert says in capsys.readouterr().err
