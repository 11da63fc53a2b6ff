"""Pretraining in one process: losses by hand, exact resume, files, and bad input refused before a model exists."""

import json
import logging
import os
import random
import shutil
import subprocess
import sys

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from transformers import AutoModelForCausalLM

from gptlm import owned
from gptlm.checkpoint import folder as checkpoint
from gptlm.commands.pretrain import parse_pretrain
from gptlm.data.blocks import build_split
from gptlm.data.cache import IndexCache
from gptlm.data.collate import collate_blocks
from gptlm.data.corpora import open_corpora
from gptlm.data.indexed import open_tokens
from gptlm.data.writer import IndexedTokensWriter
from gptlm.errors import GptlmError, UsageError
from gptlm.locks import locked
from gptlm.model.tokenizer import train_tokenizer
from gptlm.recipes.common import model as pretrain_model
from gptlm.recipes.pretrain.run import pretrain
from gptlm.training.metrics.throughput import start_logging
from tests.checkpoint.made import note_again
from tests.conftest import write_tokens

BASE = (
    "--max_seq_length 16 --per_device_train_batch_size 2 --per_device_eval_batch_size 2 --max_steps 6 --eval_iters 2 "
    "--logging_steps 1 --save_steps 3 --eval_steps 3 --learning_rate 1e-2 --min_learning_rate 1e-3 --split 80,10,10 "
    "--warmup_steps 2 --weight_decay 0.1 --do_train --do_eval --device cpu --disable_tqdm --report_to none"
).split()


@pytest.fixture
def train(tiny_model, corpus_folder, tmp_path):
    """Run with BASE and more words; returns metrics and the log history."""

    def run(*words, output="out", data=None, model=tiny_model):
        folder = tmp_path / output
        argv = [
            *BASE,
            "--model_name_or_path",
            model,
            "--input_dir",
            data or corpus_folder / "mmap",
            "--output_dir",
            folder,
        ]
        argv += ["--continue_training", *words]
        metrics = pretrain(parse_pretrain([str(word) for word in argv], {}))
        history = json.loads((folder / "trainer_state.json").read_text())["log_history"]
        return metrics, history

    return run


def losses(history):
    return [entry["loss"] for entry in history if "loss" in entry]


def weights(folder):
    return AutoModelForCausalLM.from_pretrained(folder).state_dict()


def equal(a, b):
    return all(torch.equal(a[name], b[name]) for name in a)


def reference_batches(data_folder, steps, size):
    """Tokens (steps, size, 17) and learning rates of each step."""
    corpora = open_corpora(str(data_folder), "80,10,10")
    train = build_split(corpora, "train", num_samples=steps * size, seq_length=16, seed=42, cache=IndexCache([]))
    tokens = torch.tensor(np.stack([train[i] for i in range(steps * size)])).view(steps, size, 17)
    rates = [1e-2 * (step + 1) / 2 if step + 1 <= 2 else 1e-3 + (1 - (step - 1) / 4) * 9e-3 for step in range(steps)]
    return tokens, rates


def reference_run(model_folder, data_folder, steps, batch, accumulation, masked=None):
    """An independent plain loop on stock GPT-2: losses of each step, final weights, gradient norms."""
    model = AutoModelForCausalLM.from_pretrained(model_folder)
    for module in model.modules():
        if isinstance(module, torch.nn.Dropout):
            module.p = 0.0
    model.config.attn_pdrop = 0.0
    model.train()
    decayed = [p for name, p in model.named_parameters() if "bias" not in name and "ln_" not in name]
    rest = [p for name, p in model.named_parameters() if "bias" in name or "ln_" in name]
    groups = [{"params": decayed, "weight_decay": 0.1}, {"params": rest, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=1.0)
    found, norms = [], []
    for tokens, rate in zip(*reference_batches(data_folder, steps, batch * accumulation)):
        for group in optimizer.param_groups:
            group["lr"] = rate
        logits = model(tokens[:, :-1]).logits
        targets = tokens[:, 1:]
        if masked is not None:
            targets = torch.where(targets < masked, -100, targets)
        loss = F.cross_entropy(logits.flatten(0, 1), targets.flatten())
        optimizer.zero_grad()
        loss.backward()
        norms.append(torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0).item())
        optimizer.step()
        found.append(loss.item())
    return found, model.state_dict(), norms


NO_DROPOUT = ("--hidden_dropout_prob", "0", "--attention_probs_dropout_prob", "0")


@pytest.mark.parametrize(("batch", "accumulation"), [(4, 1), (2, 2), (1, 4)])
def test_losses_and_weights_equal_a_plain_loop(train, tiny_model, corpus_folder, tmp_path, batch, accumulation):
    """1 x 4 == 2 x 2 == 4 x 1 == cross-entropy and AdamW by hand: order, shift, schedule, decay groups, clipping."""
    _, history = train(
        *NO_DROPOUT, "--per_device_train_batch_size", batch, "--gradient_accumulation_steps", accumulation
    )
    wanted, final, _ = reference_run(tiny_model, corpus_folder / "mmap", 6, batch, accumulation)
    assert losses(history) == pytest.approx(wanted, abs=2e-5)
    for name, tensor in weights(tmp_path / "out").items():
        torch.testing.assert_close(tensor, final[name], rtol=0, atol=1e-4)


def test_masked_labels_count_only_what_is_left(train, tiny_model, corpus_folder, monkeypatch):
    """Half of the targets ignored: the mean is over the rest of the whole accumulated batch."""

    def masking(blocks):
        batch = collate_blocks(blocks)
        targets = torch.where(batch["labels"] < 250, -100, batch["labels"])
        return {**batch, "labels": targets, "shift_labels": targets}

    monkeypatch.setattr("gptlm.recipes.pretrain.run.collator", lambda run: masking)
    _, history = train(*NO_DROPOUT, "--gradient_accumulation_steps", "2")
    wanted, *_ = reference_run(tiny_model, corpus_folder / "mmap", 6, 2, 2, masked=250)
    assert losses(history) == pytest.approx(wanted, abs=2e-5)


@pytest.mark.parametrize("loss_type", [None, "ForCausalLM"])
def test_the_loss_does_not_depend_on_transformers_loss_type(train, tiny_model, corpus_folder, monkeypatch, loss_type):
    original = pretrain_model.make_model

    def make(run, tokenizer, deepspeed, mesh):
        model = original(run, tokenizer, deepspeed, mesh)
        model.loss_type = loss_type
        return model

    monkeypatch.setattr("gptlm.recipes.pretrain.run.make_model", make)
    _, history = train(*NO_DROPOUT, "--gradient_accumulation_steps", "2")
    wanted, *_ = reference_run(tiny_model, corpus_folder / "mmap", 6, 2, 2)
    assert losses(history)[0] == pytest.approx(wanted[0], abs=1e-6)


def test_evaluation_is_cross_entropy_on_the_same_windows(train, tmp_path, corpus_folder):
    metrics, history = train(*NO_DROPOUT, "--eval_on_start", "--learning_rate", "0", "--min_learning_rate", "0")
    evaluations = [entry["eval_loss"] for entry in history if "eval_loss" in entry]
    assert len(evaluations) == 3 and len(set(evaluations)) == 1  # weights stand still, so must the windows
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "out").eval()
    corpora = open_corpora(str(corpus_folder / "mmap"), "80,10,10")
    (corpus,) = corpora
    count = (corpus.token_count("test") - 1) // 16
    assert count < 2 * 2 * 10  # ten times the batches are more than the test split has: each sample once
    for split, samples, size in (("valid", 2 * 2 * 3, 4), ("test", count, count)):
        dataset = build_split(corpora, split, num_samples=samples, seq_length=16, seed=42, cache=IndexCache([]))
        tokens = torch.tensor(np.stack([dataset[i] for i in range(size)]))
        by_hand = F.cross_entropy(model(tokens[:, :-1]).logits.flatten(0, 1), tokens[:, 1:].flatten()).item()
        name = {"valid": "eval_loss", "test": "test_loss"}[split]
        assert metrics[name] == pytest.approx(by_hand, abs=1e-5)


def test_resumed_equals_uninterrupted_bit_for_bit(train, tmp_path):
    dropout = ("--hidden_dropout_prob", "0.1", "--attention_probs_dropout_prob", "0.1")
    options = (*dropout, "--gradient_accumulation_steps", "2", "--dataloader_num_workers", "1")
    _, whole = train(*options)
    shutil.copytree(tmp_path / "out", tmp_path / "again")
    shutil.rmtree(tmp_path / "again" / "checkpoint-6")
    (tmp_path / "again" / "model.safetensors").unlink()
    _, resumed = train(*options, output="again")
    assert losses(resumed) == losses(whole)
    for key in ("learning_rate", "progress_or_epoch", "grad_norm"):
        assert [e[key] for e in resumed if "loss" in e] == [e[key] for e in whole if "loss" in e]
    assert equal(weights(tmp_path / "out"), weights(tmp_path / "again"))


def test_resuming_under_another_batch_goes_on_at_the_consumed_sample(train, tmp_path, capsys):
    train(*NO_DROPOUT)
    shutil.rmtree(tmp_path / "out" / "checkpoint-6")
    (tmp_path / "out" / "model.safetensors").unlink()
    train(*NO_DROPOUT, "--gradient_accumulation_steps", "2")
    manifest = json.loads((tmp_path / "out" / "checkpoint-6" / "manifest.json").read_text())
    assert manifest["consumed_samples"] == 3 * 2 + 3 * 4
    assert "step 3, 6 samples consumed" in capsys.readouterr().out


def test_a_damaged_newest_checkpoint_is_skipped(train, tmp_path, capsys):
    _, whole = train(*NO_DROPOUT)
    newest = tmp_path / "out" / "checkpoint-6" / "model.safetensors"
    newest.write_bytes(newest.read_bytes()[:100])
    _, resumed = train(*NO_DROPOUT)
    out = capsys.readouterr().out
    assert "checkpoint-6 is damaged: model.safetensors" in out and "resuming from" in out
    assert losses(resumed) == losses(whole)


def test_a_finished_run_is_not_trained_again(train, tmp_path, capsys):
    first, history = train()
    before = weights(tmp_path / "out")
    metrics, again = train()
    assert losses(again) == losses(history)
    assert "nothing to train" in capsys.readouterr().out
    assert equal(before, weights(tmp_path / "out"))
    assert metrics["eval_loss"] == pytest.approx(first["eval_loss"], abs=1e-6)


def test_overwriting_starts_anew_and_removes_old_checkpoints(train, tmp_path):
    train("--max_steps", "9")
    _, history = train("--overwrite_output_dir")
    assert len(losses(history)) == 6
    assert sorted(p.name for p in (tmp_path / "out").glob("checkpoint-*")) == ["checkpoint-3", "checkpoint-6"]


def test_a_model_without_checkpoints_is_not_overwritten(train, tmp_path):
    train("--save_strategy", "no")
    before = weights(tmp_path / "out")
    with pytest.raises(GptlmError, match="--overwrite_output_dir"):
        train()
    assert equal(before, weights(tmp_path / "out"))


def test_explicit_checkpoints(train, tmp_path):
    _, whole = train(*NO_DROPOUT)
    _, resumed = train(*NO_DROPOUT, "--resume_from_checkpoint", tmp_path / "out" / "checkpoint-3", output="other")
    assert losses(resumed) == losses(whole)
    train("--resume_from_checkpoint", "true", output="fresh")  # the first start of a job that restarts itself
    with pytest.raises(GptlmError, match="checkpoint-99 does not exist"):
        train("--resume_from_checkpoint", tmp_path / "out" / "checkpoint-99", output="other2")
    train(*NO_DROPOUT, "--seed", "7", output="own")
    own = weights(tmp_path / "own")
    with pytest.raises(GptlmError, match="nothing is left to train after .*out/.*own holds a run of its own"):
        train(*NO_DROPOUT, "--resume_from_checkpoint", tmp_path / "out", output="own")
    assert equal(own, weights(tmp_path / "own"))


def test_two_runs_in_one_folder(train, tmp_path, capsys):
    (tmp_path / "out").mkdir()
    with locked(tmp_path / "out" / ".lock"), pytest.raises(GptlmError, match="another run is writing into .*out;"):
        train()
    (tmp_path / "out" / ".lock").write_text("mine")
    train("--max_steps", "3")
    assert (tmp_path / "out" / ".lock").read_text() == "mine"
    capsys.readouterr()
    train()
    said = capsys.readouterr()
    assert f"weights from {tmp_path / 'out' / 'checkpoint-3'}\n" in said.out and "do not match" not in said.err
    with pytest.raises(GptlmError, match=r"not a number|is nan|is inf") as caught:
        train("--learning_rate", "1e30", "--max_grad_norm", "0", output="nan")
    assert "--bf16" not in str(caught.value)


def test_weights_only_checkpoints_cannot_be_resumed(train, tmp_path):
    train("--ignore_save_lr_and_optim", "--max_steps", "3")
    with pytest.raises(GptlmError, match="weights only"):
        train("--ignore_save_lr_and_optim")


def test_an_output_folder_that_is_a_file_is_refused_at_once(train, tmp_path):
    (tmp_path / "out").write_text("x")
    for name in ("out", "out/deeper"):
        with pytest.raises(GptlmError, match="out is a file"):
            train(output=name)


def test_a_full_disk_is_one_sentence_and_leaves_the_older_checkpoint_whole(tiny_model, corpus_folder, tmp_path):
    """A limit on the size of files, set once checkpoint-3 is there, stands for the full disk."""
    output = tmp_path / "out"
    argv = [*BASE, "--model_name_or_path", tiny_model, "--continue_training", "--input_dir", corpus_folder / "mmap"]
    words = [str(word) for word in [*argv, "--output_dir", output]]
    run = f"""
import resource, sys
from transformers import TrainerCallback
from gptlm.recipes.common import training as recipe
class Full(TrainerCallback):
    def on_step_end(self, args, state, control, **kwargs):
        if state.global_step == 4:
            resource.setrlimit(resource.RLIMIT_FSIZE, (20000, resource.RLIM_INFINITY))
original = recipe.tracker_callbacks
recipe.tracker_callbacks = lambda run, folder: [*original(run, folder), Full()]
from gptlm.cli import main
sys.exit(main(["pretrain", *{words!r}]))
"""
    result = subprocess.run([sys.executable, "-c", run], capture_output=True, text=True, timeout=120)
    assert result.returncode == 1 and "Traceback" not in result.stderr, result.stderr
    assert "cannot write the checkpoint" in result.stderr and "bytes are free" not in result.stderr
    assert "File too large" in result.stderr and "raise the limit" in result.stderr
    found, skipped = checkpoint.newest(output)
    assert found.path.name == "checkpoint-3" and skipped == []
    assert not (output / "checkpoint-6").exists()


def test_best_model_at_the_end(train, tmp_path):
    """A learning rate that ruins the weights: the best evaluation is an earlier one, and its weights are kept."""
    options = (
        "--load_best_model_at_end",
        "--learning_rate",
        "3",
        "--lr_scheduler_type",
        "constant",
        "--save_total_limit",
        "1",
    )
    _, history = train(*options, "--save_steps", "1", "--eval_steps", "1")
    evaluations = {entry["step"]: entry["eval_loss"] for entry in history if "eval_loss" in entry}
    best = min(evaluations, key=evaluations.get)
    assert best < 6
    folders = {p.name for p in (tmp_path / "out").glob("checkpoint-*")}
    assert folders == {f"checkpoint-{best}", "checkpoint-6"}
    assert equal(weights(tmp_path / "out"), weights(tmp_path / "out" / f"checkpoint-{best}"))


def test_files_fields_and_words_scripts_look_for(train, tmp_path, capsys):
    metrics, history = train("--report_to", "tensorboard", "--skip_memory_metrics", "0", "--do_predict")
    out = tmp_path / "out"
    assert set(json.loads((out / "train_results.json").read_text())) == {
        "progress_or_epoch", "train_loss", "train_runtime", "train_samples_per_second", "train_steps_per_second",
    }  # fmt: skip
    everything = json.loads((out / "all_results.json").read_text())
    assert everything["test_loss"] == metrics["test_loss"] and everything["eval_loss"] == metrics["eval_loss"]
    assert len(list(out.glob("runs/*/events.out.tfevents*"))) >= 1
    lines = capsys.readouterr().out
    for word in ("global_step: 6", "loss: ", "interval_samples_per_second: ", "interval_tokens_per_second_per_device: ",
                 "***** Running training *****", "***** train metrics *****", "***** test metrics *****",
                 "Effective Tokens per second: ", "cpu_mem_used: "):  # fmt: skip
        assert word in lines, word
    assert "weights from" in lines.splitlines()[0]
    line = next(line for line in lines.splitlines() if "global_step: 1," in line)
    fields = [field.split(":")[0] for field in line.split(" - ")[1].split(", ")]
    assert fields == [
        "loss", "learning_rate", "global_step", "interval_runtime", "interval_samples_per_second",
        "interval_tokens_per_second_per_device", "interval_steps_per_second", "cpu_mem_used", "cpu_mem_used_peak",
        "progress_or_epoch",
    ]  # fmt: skip
    assert history[0]["learning_rate"] == 1e-2  # the next step's, as PaddleNLP prints it: 1e-2 x 2 / 2


def tracked_parameters(folder):
    """The text "args" in the event file of a run."""
    (events,) = folder.glob("runs/*")
    accumulator = EventAccumulator(str(events))
    accumulator.Reload()
    (event,) = accumulator.Tensors("args/text_summary")
    return json.loads(event.tensor_proto.string_val[0])


def test_trackers_get_the_resolved_run(train, tiny_model, corpus_folder, tmp_path):
    words = ["--lr_scheduler_type", "cosine", "--warmup_ratio", "0.5", "--gradient_accumulation_steps", "3"]
    train(*words, "--report_to", "tensorboard", "--max_steps", "4", "--warmup_steps", "0")
    noted = tracked_parameters(tmp_path / "out")
    wanted = {
        "lr_scheduler_type": "cosine", "warmup_steps": 2, "min_learning_rate": 1e-3, "do_train": True, "do_eval": True,
        "max_steps": 4, "model_name_or_path": str(tiny_model), "input_dir": str(corpus_folder / "mmap"),
        "split": "80,10,10", "max_seq_length": 16, "global_batch_size": 6, "tensor_parallel_degree": 1,
        "data_parallel_replicas": 1, "num_hidden_layers": 2, "hidden_size": 32, "vocab_size": 500,
    }  # fmt: skip
    assert {name: noted.get(name) for name in wanted} == wanted


def test_visualdl_without_visualdl_is_tensorboard_with_one_line(train, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr("gptlm.recipes.common.trackers.find_spec", lambda name: None)
    train("--report_to", "visualdl")
    assert capsys.readouterr().out.count("visualdl is not installed") == 1
    assert list(tmp_path.glob("out/runs/*/events.out.tfevents*"))


def test_visualdl_reads_what_a_run_writes(train, tmp_path, capsys):
    visualdl = pytest.importorskip("visualdl")
    _, history = train("--report_to", "visualdl")
    assert "visualdl is not installed" not in capsys.readouterr().out
    (file,) = tmp_path.glob("out/runs/*/vdlrecords.*.log")
    reader = visualdl.LogReader(file_path=str(file))
    written = [(record.id, record.value) for record in reader.get_data("scalar", "train/loss")]
    losses = [(entry["step"], entry["loss"]) for entry in history if "loss" in entry]
    assert [step for step, _ in written] == [step for step, _ in losses]
    assert [value for _, value in written] == pytest.approx([value for _, value in losses])
    assert {"train/learning_rate", "eval/loss", "test/loss"} <= set(reader.get_tags()["scalar"])
    assert json.loads(reader.get_data("text", "args")[0].text.encoded_text_string)["global_batch_size"] == 2
    assert not list(tmp_path.glob("out/runs/*/events.out.tfevents*"))


def test_weights_that_are_not_used_are_said_loudly(train, tiny_model, capsys):
    train("--continue_training", "0")
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].endswith("random initialisation")
    assert "WARNING" in lines[1] and "RANDOM" in lines[1] and str(tiny_model) in lines[1]


def test_half_precision_and_gpu_on_a_cpu_are_one_loud_line_each(train, capsys):
    if torch.cuda.is_available():
        pytest.skip("there is a GPU here")
    train("--device", "gpu", "--fp16", "--fp16_opt_level", "O2", "--sharding", "stage2", "--recompute", "1")
    lines = capsys.readouterr().out
    assert lines.count("no GPU is visible") == 1 and lines.count("half precision is not used on a CPU") == 1
    assert lines.count("--sharding stage2 has no effect") == 1


def test_epochs_instead_of_steps(train, corpus_folder):
    _, history = train("--max_steps", "-1", "--num_train_epochs", "0.5", "--save_strategy", "no")
    corpora = open_corpora(str(corpus_folder / "mmap"), "80,10,10")
    per_epoch = (corpora[0].token_count("train") - 1) // 16 // 2
    assert len(losses(history)) == int(0.5 * per_epoch)


def test_evaluation_alone_trains_nothing(tiny_model, corpus_folder, tmp_path):
    argv = [word for word in BASE if word != "--do_train"]
    argv += ["--model_name_or_path", tiny_model, "--continue_training", "--input_dir", corpus_folder / "mmap"]
    metrics = pretrain(parse_pretrain([*map(str, argv), "--output_dir", str(tmp_path / "o")], {}))
    assert metrics["eval_loss"] == pytest.approx(np.log(500), abs=0.3)
    assert not list((tmp_path / "o").glob("*.safetensors"))


def test_npy_data_and_blends_train(train, corpus_folder, capsys):
    _, mmap = train(*NO_DROPOUT)
    _, npy = train(*NO_DROPOUT, data=corpus_folder / "npy", output="npy")
    assert losses(mmap) == losses(npy)
    blend = f"0.25 {corpus_folder}/mmap/c 0.75 {corpus_folder}/npy/c"
    train("--max_steps", "10", data=blend, output="blend")
    lines = capsys.readouterr().out
    assert (
        "mmap/c     0.25              4,463               5      0.02" in lines
        and "npy/c      0.75              4,463              15      0.05" in lines
    )


@pytest.mark.parametrize("layout", ["lazy", "npz"])
def test_the_older_formats_train_as_well(train, corpus_folder, tmp_path, layout):
    """Also without metadata, so that the ids are looked at."""
    source = open_tokens(str(corpus_folder / "mmap" / "c"))
    (tmp_path / "d").mkdir()
    if layout == "npz":
        np.savez(tmp_path / "d" / "c_ids.npz", ids=source.tokens, lens=source.sizes)
    else:
        writer = IndexedTokensWriter(str(tmp_path / "d" / "c"), 500, layout)
        writer.copy(source)
        writer.finish({})
        (tmp_path / "d" / "c.meta.json").unlink()
    _, history = train(*NO_DROPOUT, data=tmp_path / "d")
    _, wanted = train(*NO_DROPOUT, output="wanted")
    assert losses(history) == losses(wanted)


def test_many_epochs_are_warned_of(train, capsys):
    train("--max_steps", "600", "--eval_steps", "600", "--save_steps", "600", "--logging_steps", "600")
    lines = capsys.readouterr().out
    assert "1,200      4.30, more than 4 epochs" in lines  # 1200 x 16 / 4463


@pytest.mark.parametrize(
    ("prepare", "words", "says"),
    [
        (lambda p: (p / "c.bin").write_bytes((p / "c.bin").read_bytes()[:-4]), (), "c.bin is"),
        (lambda p: (p / "c.idx").write_bytes(b""), (), "c.idx is 0 bytes"),
        (lambda p: (p / "c.idx").unlink(), (), "c.idx does not exist"),
        (lambda p: [f.unlink() for f in p.iterdir()], (), "has no token files"),
        (lambda p: None, ("--vocab_size", "400", "--continue_training", "0"), "vocabulary has 400"),
        (lambda p: None, ("--split", "1,0,0"), "valid split is empty"),
        (lambda p: None, ("--split", "1,1,0", "--do_predict"), "test split is empty"),
        (lambda p: None, ("--max_seq_length", "64", "--split", "118,1,1"), "valid split.*one sample takes 65"),
        (
            lambda p: write_tokens(p / "c", seed=3),
            ("--max_seq_length", "64", "--split", "100,19,1", "--do_predict"),
            "test split.*takes 65",
        ),
        (lambda p: None, ("--tokenizer_name_or_path", "{data}"), "holds no tokenizer"),
        (lambda p: None, ("--input_dir", "{data}/c.idx"), "one file of a pair; give the prefix .*/c$"),
        (lambda p: narrowed(p), (), "uint16, which cannot store the 70000 entries in its metadata"),
    ],
)  # fmt: skip
def test_bad_input_stops_before_the_model_is_built(train, tmp_path, monkeypatch, prepare, words, says):
    def no_model(*arguments):
        raise AssertionError("the model was built")

    monkeypatch.setattr("gptlm.recipes.pretrain.run.make_model", no_model)
    write_tokens(tmp_path / "d" / "c")
    prepare(tmp_path / "d")
    with pytest.raises(GptlmError, match=says) as caught:
        train(*[word.format(data=tmp_path / "d") for word in words], data=tmp_path / "d")
    assert len(str(caught.value).splitlines()) == 1
    assert not list((tmp_path / "out").glob("*.safetensors"))


def narrowed(folder):
    """Ids of a vocabulary of 70,000 squeezed into uint16."""
    facts = json.loads((folder / "c.meta.json").read_text())
    (folder / "c.meta.json").write_text(json.dumps({**facts, "vocab_size": 70000}))


@pytest.fixture
def tokenizer_of(tmp_path):
    """A saved tokenizer with as many entries as asked for, at least 257."""

    def make(entries):
        tokenizer = train_tokenizer(["a text " * 9], 257)
        tokenizer.add_tokens([f"<{i}>" for i in range(entries - len(tokenizer))])
        tokenizer.save_pretrained(tmp_path / f"tok{entries}")
        return tmp_path / f"tok{entries}"

    return make


def test_uint16_data_and_a_larger_tokenizer_are_refused(train, tokenizer_of, tmp_path):
    """No metadata tells; the width alone shows that ids above 65,535 were cut off."""
    write_tokens(tmp_path / "d" / "c")
    (tmp_path / "d" / "c.meta.json").unlink()
    words = ("--tokenizer_name_or_path", tokenizer_of(70_000), "--vocab_size", 70_016, "--continue_training", 0)
    with pytest.raises(
        GptlmError, match="c.bin is uint16, which cannot hold the ids of a tokenizer with 70000 entries"
    ):
        train(*words, data=tmp_path / "d")


def test_ids_that_the_tokenizer_does_not_have_are_warned_of(train, tokenizer_of, corpus_folder, capsys):
    """The model has rows for them, so it trains; but text and ids do not belong together."""
    train("--tokenizer_name_or_path", tokenizer_of(400))
    assert "holds id 499, the tokenizer has 400 entries: the two do not belong together" in capsys.readouterr().out


def test_a_test_split_too_short_is_left_out_of_do_eval(train, tmp_path, capsys):
    """Of 120 documents the last one is the test split, and it is shorter than 64 + 1 tokens."""
    write_tokens(tmp_path / "d" / "c", seed=3)
    metrics, _ = train("--max_seq_length", "64", "--split", "100,19,1", data=tmp_path / "d")
    assert "eval_loss" in metrics and "test_loss" not in metrics
    assert "shorter than a sample (--split 100,19,1): no test evaluation" in capsys.readouterr().out


def test_names_without_network_say_what_to_do_and_do_not_wait(train, tmp_path, monkeypatch):
    """A closed port on this machine stands for the hub."""
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", "http://127.0.0.1:9")
    with pytest.raises(GptlmError, match="hf download openai-community/gpt2 --local-dir.*--continue_training 0"):
        train(model="gpt2-en")
    with pytest.raises(GptlmError, match="neither a folder nor a built-in name"):
        train("--tokenizer_name_or_path", "nowhere")


@pytest.fixture(autouse=True)
def log_to_this_test(capsys):
    start_logging(main_process=True)
    yield
    logging.getLogger("gptlm").handlers = []


def rates(history):
    return [entry["learning_rate"] for entry in history if "loss" in entry]


def cut_back_to(folder, step):
    """Make a finished run look as if it had been stopped after the checkpoint of `step`."""
    for path in folder.glob("checkpoint-*"):
        if path.name != f"checkpoint-{step}":
            shutil.rmtree(path)
    (folder / "model.safetensors").unlink()


def test_a_resumed_run_obeys_new_rates_and_says_so(train, tmp_path, capsys):
    """From step 3 on the rates are those of a fresh run under the new flags, and so is the weight decay."""
    new = ("--learning_rate", "4e-3", "--min_learning_rate", "2e-4", "--max_steps", "9", "--weight_decay", "0.3")
    _, fresh = train(*new, output="fresh")
    train()
    cut_back_to(tmp_path / "out", 3)
    capsys.readouterr()
    _, resumed = train(*new)
    assert rates(resumed)[3:] == rates(fresh)[3:]
    lines = capsys.readouterr().out
    for said in ("learning_rate was 0.01 in checkpoint-3, is 0.004 now", "max_steps was 6", "weight_decay was 0.1"):
        assert said in lines
    less = train(*new, "--weight_decay", "0", "--resume_from_checkpoint", tmp_path / "out/checkpoint-3", output="less")
    assert losses(less[1])[:4] == losses(resumed)[:4] and losses(less[1])[4:] != losses(resumed)[4:]


def test_the_same_data_in_another_place_is_no_change_of_order(train, corpus_folder, tmp_path, capsys):
    train()
    cut_back_to(tmp_path / "out", 3)
    shutil.copytree(corpus_folder / "mmap", tmp_path / "moved")
    train(data=tmp_path / "moved")
    lines = capsys.readouterr().out
    assert "resuming from" in lines and "another order" not in lines
    cut_back_to(tmp_path / "out", 3)
    train("--seed", "43")
    assert "seed was 42 in checkpoint-3, is 43 now: the samples to come are in another order" in capsys.readouterr().out


def test_resuming_over_changed_text_of_the_same_lengths_is_said(train, corpus_folder, tmp_path, capsys):
    shutil.copytree(corpus_folder / "mmap", tmp_path / "data")
    train(data=tmp_path / "data")
    cut_back_to(tmp_path / "out", 3)
    saved = tmp_path / "out" / "checkpoint-3"
    order = json.loads((saved / "manifest.json").read_text())["order"]
    file = tmp_path / "data" / "c.bin"
    ids, times = np.fromfile(file, np.uint16), file.stat()
    ids[0] = (ids[0] + 1) % 500
    ids.tofile(file)
    os.utime(file, ns=(times.st_atime_ns, times.st_mtime_ns))
    capsys.readouterr()
    train(data=tmp_path / "data")
    lines = capsys.readouterr().out
    assert lines.count("sampled_content was") == 1 and "[" not in lines.split("content was")[1].split(":")[0]
    assert "the samples to come are of other text" in lines
    assert "another order" not in lines
    cut_back_to(tmp_path / "out", 3)
    del order["sampled_content"]  # as older versions wrote them
    note_again(saved, checksums=False, order=order)
    capsys.readouterr()
    train(data=tmp_path / "data")
    lines = capsys.readouterr().out
    assert "content was" not in lines and lines.count("does not note the content of the token files") == 1


def test_the_mean_loss_of_a_resumed_run_is_that_of_the_whole_run(train, tmp_path):
    whole, history = train(*NO_DROPOUT)
    assert whole["train_loss"] == pytest.approx(np.mean(losses(history)), abs=1e-6)
    cut_back_to(tmp_path / "out", 3)
    resumed, _ = train(*NO_DROPOUT)
    assert resumed["train_loss"] == pytest.approx(whole["train_loss"], abs=1e-9)


@pytest.mark.parametrize("case", ["damaged", "left"])
def test_later_checkpoints_are_set_aside_and_the_one_just_written_stays(train, tmp_path, capsys, case):
    """A damaged newest one, or going back to an older one: with a limit of 1 the new checkpoints must survive."""
    train("--max_steps", "12", "--decay_steps", "12")
    shutil.rmtree(tmp_path / "out/checkpoint-9")
    shutil.rmtree(tmp_path / "out/checkpoint-12")
    words = ["--max_steps", "5", "--decay_steps", "12", "--save_total_limit", "1", "--save_steps", "1"]
    if case == "damaged":
        (tmp_path / "out/checkpoint-6/optimizer-00001.safetensors").write_bytes(b"")
    else:
        words += ["--resume_from_checkpoint", tmp_path / "out/checkpoint-3"]
    train(*words)
    assert "checkpoint-6 is newer than the resumed checkpoint; renamed to" in capsys.readouterr().out
    names = sorted(path.name for path in (tmp_path / "out").glob("*checkpoint-*"))
    assert names == ["checkpoint-5", "left-checkpoint-6"]


def test_weights_alone_can_go_on(train, tmp_path, capsys):
    """--ignore_load_lr_and_optim: the samples go on, the schedule and the optimizer start anew."""
    words = (*NO_DROPOUT, "--lr_scheduler_type", "constant_with_warmup", "--warmup_steps", "3")
    _, whole = train(*words)
    cut_back_to(tmp_path / "out", 3)
    capsys.readouterr()
    _, found = train(*words, "--ignore_load_lr_and_optim")
    out = capsys.readouterr().out
    assert "random states are not restored (ignore_load_lr_and_optim)" in out and "parallel layout" not in out
    assert rates(found)[3:] == rates(whole)[:3] and losses(found)[3] == pytest.approx(losses(whole)[3], abs=1e-6)
    assert losses(found)[4] != pytest.approx(losses(whole)[4], abs=1e-5)
    assert checkpoint.read(tmp_path / "out/checkpoint-6").manifest.consumed_samples == 12


def test_a_checkpoint_of_another_model_is_refused(train, tiny_model, tmp_path):
    train()
    cut_back_to(tmp_path / "out", 3)
    with pytest.raises(GptlmError, match="num_hidden_layers 2 there, 3 in the command"):
        train("--continue_training", "0", "--num_hidden_layers", "3")


@pytest.mark.parametrize("name", ["optimizer-00001.safetensors", "model.safetensors"])
def test_damage_that_keeps_the_size_is_one_sentence(train, tmp_path, name):
    train()
    cut_back_to(tmp_path / "out", 3)
    file = tmp_path / "out" / "checkpoint-3" / name
    content = file.read_bytes()
    file.write_bytes(bytes(64) + content[64:])
    with pytest.raises(GptlmError, match="checkpoint-3"):
        train()


def damage_random_states(path, damage):
    file = path / "rng_state.json"
    states = json.loads(file.read_text())
    if damage == "cut":
        file.write_text(file.read_text()[:500])
    elif damage == "missing":
        file.unlink()
    elif damage == "a list":
        file.write_text("[]")
    elif damage == "other bytes":
        file.write_text(json.dumps(states | {"cpu": "00ff"}))
    else:
        del states[damage]
        file.write_text(json.dumps(states))
    note_again(path)


@pytest.mark.parametrize(
    ("damage", "says"),
    [
        ("cut", "rng_state.json: Expecting"),
        ("missing", "rng_state.json is missing"),
        ("numpy", "'numpy' is missing"),
        ("cpu", "'cpu' is missing"),
        ("a list", "rng_state.json: list indices"),
        ("other bytes", "rng_state.json: Expected a CPUGeneratorImplState of size 5056"),
    ],
)
def test_unreadable_random_states_do_not_stop_a_run(train, tmp_path, capsys, damage, says):
    train()
    cut_back_to(tmp_path / "out", 3)
    damage_random_states(tmp_path / "out" / "checkpoint-3", damage)
    capsys.readouterr()
    history = train()[1]
    assert [entry["global_step"] for entry in history if "loss" in entry] == [1, 2, 3, 4, 5, 6]
    out = capsys.readouterr().out
    assert "WARNING] - the random states of" in out and says in out and "dropout draws new numbers" in out
    assert "remove" not in out and "\x1b" not in out


def old_random_states(path, numpy_state=None):
    """Write the states of `rng_state.json` as rng_state.pth, a pickle, in its place."""
    states = json.loads((path / "rng_state.json").read_text())
    version, words, gauss = states["python"]
    kind, keys, *rest = states["numpy"]
    cpu = torch.tensor(list(bytes.fromhex(states["cpu"])), dtype=torch.uint8)
    numpy_state = numpy_state or (kind, np.array(keys, np.uint32), *rest)
    torch.save({"python": (version, tuple(words), gauss), "numpy": numpy_state, "cpu": cpu}, path / "rng_state.pth")
    (path / "rng_state.json").unlink()
    note_again(path)


def test_random_states_of_earlier_versions_are_read(train, tmp_path, capsys):
    whole = train(output="whole")[1]
    train()
    cut_back_to(tmp_path / "out", 3)
    old_random_states(tmp_path / "out" / "checkpoint-3")
    capsys.readouterr()
    assert losses(train()[1]) == losses(whole)
    assert "random states" not in capsys.readouterr().out


def test_an_old_random_state_that_would_run_code(train, tmp_path, capsys):
    train()
    cut_back_to(tmp_path / "out", 3)
    old_random_states(tmp_path / "out" / "checkpoint-3", np.random.RandomState(1))
    capsys.readouterr()
    train()
    out = capsys.readouterr().out
    assert "rng_state.pth is refused: it asks for numpy.random" in out and "dropout draws new numbers" in out
    assert "weights_only" not in out


def test_checkpoints_hold_no_pickle(train, tmp_path):
    train()
    kinds = {path.suffix for path in (tmp_path / "out" / "checkpoint-3").rglob("*") if path.is_file()}
    assert kinds <= {".json", ".safetensors", ".txt", ".jinja", ".md"} and {".json", ".safetensors"} <= kinds
    assert not [path for path in (tmp_path / "out").rglob("*") if path.suffix in (".bin", ".pth", ".pt", ".pkl")]


def test_a_flipped_byte_steps_back_or_is_refused(train, tmp_path, capsys):
    """In each file, size and time kept: the checkpoint before is used, and the run ends as it would."""
    whole = train(output="whole")[1]
    train()
    cut_back_to(tmp_path / "out", 3)
    train("--max_steps", "5", "--decay_steps", "6", "--save_steps", "5")  # the schedule of the whole run
    newest, draw = tmp_path / "out" / "checkpoint-5", random.Random(7)
    names = sorted(str(path.relative_to(newest)) for path in newest.rglob("*") if path.is_file())
    assert {"manifest.json", "model.safetensors", "optimizer-00001.safetensors", "rng_state.json"} < set(names)
    for name in names:
        flip(newest / name, draw)
        found, skipped = checkpoint.newest(tmp_path / "out")
        assert found.path.name == "checkpoint-3" and len(skipped) == 1 and "checkpoint-5" in skipped[0], name
        assert name in skipped[0]
        with pytest.raises(GptlmError, match="checkpoint-5.*give another one with --resume_from_checkpoint"):
            train("--resume_from_checkpoint", newest, output="other")
        flip(newest / name, draw, back=True)
    assert checkpoint.newest(tmp_path / "out")[0].path == newest
    flip(newest / "optimizer-00001.safetensors", draw)
    capsys.readouterr()
    assert losses(train()[1]) == losses(whole)
    out = capsys.readouterr().out
    assert "checkpoint-5 is damaged: the content of optimizer-00001.safetensors is not what was written" in out
    assert "resuming from" in out and "checkpoint-3: step 3" in out


def test_a_checkpoint_without_checksums_is_resumed_with_one_line(train, tmp_path, capsys):
    whole = train(output="whole")[1]
    train()
    cut_back_to(tmp_path / "out", 3)
    note_again(tmp_path / "out" / "checkpoint-3", checksums=False)
    capsys.readouterr()
    assert losses(train()[1]) == losses(whole)
    assert capsys.readouterr().out.count("checkpoint-3 has no checksums") == 1


def flip(path, draw, *, back=False):
    """Flip a bit at a random place, or the one flipped before `back`."""
    content, times = bytearray(path.read_bytes()), path.stat()
    if not back:
        flip.place, flip.bit = draw.randrange(len(content)), 1 << draw.randrange(8)
    content[flip.place] ^= flip.bit
    path.write_bytes(content)
    os.utime(path, ns=(times.st_atime_ns, times.st_mtime_ns))


def test_a_damaged_history_is_a_damaged_checkpoint(train, tmp_path):
    train()
    cut_back_to(tmp_path / "out", 3)
    history = tmp_path / "out" / "checkpoint-3" / "trainer_state.json"
    history.write_text("x" * history.stat().st_size)
    note_again(history.parent)
    with pytest.raises(GptlmError, match=r"checkpoint-3 is damaged: trainer_state.json cannot be read"):
        train()


def test_results_that_cannot_be_written_are_one_sentence(train, tmp_path):
    (tmp_path / "out" / "train_results.json").mkdir(parents=True)
    owned.note(tmp_path / "out", ["train_results.json"], owned.RUN)
    with pytest.raises(GptlmError, match=r"cannot write the results .*train_results.json: Is a directory"):
        train()


def test_when_no_checkpoint_is_whole_nothing_is_overwritten(train, tmp_path):
    train()
    cut_back_to(tmp_path / "out", 3)
    (tmp_path / "out" / "checkpoint-3" / "optimizer-00001.safetensors").write_bytes(b"")
    with pytest.raises(GptlmError, match="none of the 1 checkpoints"):
        train()
    train("--overwrite_output_dir")


def test_a_loss_that_is_no_number_stops_the_run_and_is_not_saved(train, tmp_path):
    words = ("--learning_rate", "1e18", "--max_grad_norm", "0", "--lr_scheduler_type", "constant", "--save_steps", "1")
    with pytest.raises(GptlmError, match=r"the loss is (nan|inf) at step \d.*last finite loss was.*--learning_rate"):
        train(*words, "--logging_steps", "1", "--eval_steps", "6")
    for folder in (tmp_path / "out").glob("checkpoint-*"):
        state = json.loads((folder / "trainer_state.json").read_text())
        assert all(np.isfinite(entry["loss"]) for entry in state["log_history"] if "loss" in entry)
    assert not (tmp_path / "out" / "model.safetensors").exists()


def test_a_loss_that_is_no_number_and_not_logged_is_not_saved(train, tmp_path):
    words = ("--learning_rate", "1e30", "--min_learning_rate", "0", "--max_grad_norm", "0", "--save_strategy", "no")
    with pytest.raises(GptlmError, match=r"the loss is nan in one of the steps 1 to 6, no loss was finite before"):
        train(*words, "--logging_steps", "500", "--evaluation_strategy", "no")
    assert not (tmp_path / "out" / "model.safetensors").exists()


def test_damaged_results_do_not_stop_a_run_and_old_ones_do_not_stay(train, tmp_path):
    train()
    results = tmp_path / "out" / "all_results.json"
    results.write_text("{")
    train()
    assert "eval_loss" in json.loads(results.read_text())
    train("--overwrite_output_dir", "--save_strategy", "no", "--do_eval", "0", "--evaluation_strategy", "no")
    assert "eval_loss" not in json.loads(results.read_text()) and not (tmp_path / "out" / "eval_results.json").exists()


def test_evaluation_alone_takes_the_model_in_output_dir(train, corpus_folder, tiny_model, tmp_path):
    trained, _ = train(*NO_DROPOUT)
    base = f"--input_dir {corpus_folder}/mmap --output_dir {tmp_path}/out --max_seq_length 16 --split 80,10,10"
    more = "--max_steps 6 --per_device_eval_batch_size 2 --eval_iters 2 --eval_steps 3 --device cpu --report_to none"
    words = [*base.split(), *more.split()]
    again = pretrain(parse_pretrain([*words, "--do_eval", "--evaluation_strategy", "steps"], {}))
    assert again["eval_loss"] == pytest.approx(trained["eval_loss"], abs=1e-6)
    named = [*words, "--do_eval", "--model_name_or_path", str(tiny_model)]
    with pytest.raises(UsageError, match="--continue_training"):
        parse_pretrain(named, {})
    results = (tmp_path / "out" / "eval_results.json").read_text()
    base = pretrain(parse_pretrain([*named, "--continue_training"], {}))
    assert (tmp_path / "out" / "eval_results.json").read_text() == results
    assert base["eval_loss"] != pytest.approx(trained["eval_loss"], abs=1e-3)
    for name in ("eval", "test"):
        found = json.loads((tmp_path / "out" / f"{name}_results-2.json").read_text())
        assert found[f"{name}_loss"] == base[f"{name}_loss"]


@pytest.mark.parametrize(
    "more",
    [
        (),
        ("--hidden_dropout_prob", "0.1"),
        pytest.param(("--recompute", "1"), marks=pytest.mark.slow),
        pytest.param(("--recompute", "1", "--recompute_granularity", "core_attn"), marks=pytest.mark.slow),
        pytest.param(("--document_masking", "attention"), marks=pytest.mark.slow),
    ],
)
def test_compiling_changes_no_loss(train, tmp_path, more):
    """Training and evaluation, and the saved weights load in stock transformers under their names."""
    words = ["--hidden_dropout_prob", "0", "--attention_probs_dropout_prob", "0", *more]
    plain, compiled = train(*words), train(*words, "--torch_compile", output="compiled")
    assert losses(compiled[1]) == pytest.approx(losses(plain[1]), abs=1e-5)
    assert compiled[0]["eval_loss"] == pytest.approx(plain[0]["eval_loss"], abs=1e-5)
    found, wanted = weights(tmp_path / "compiled"), weights(tmp_path / "out")
    assert found.keys() == wanted.keys()
    for name, weight in wanted.items():
        torch.testing.assert_close(found[name], weight, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("more", [(), ("--recompute", "--gradient_accumulation_steps", "2")])
def test_float8_rounds_products_and_keeps_everything_else(train, tmp_path, more):
    """Losses near those of bfloat16, not the same; the same weights in the saved folder, and a run goes on exactly."""
    words = ["--bf16", "--fp16_opt_level", "O2", "--save_steps", "2", *NO_DROPOUT, *more]
    plain = losses(train(*words)[1])
    words += ["--fp8", "--fp8_skip", "0"]
    float8 = losses(train(*words, output="float8")[1])
    assert float8 == pytest.approx(plain, rel=0.01) and float8 != plain
    found, wanted = weights(tmp_path / "float8"), weights(tmp_path / "out")
    assert {name: tensor.shape for name, tensor in found.items()} == {n: t.shape for n, t in wanted.items()}
    again = train(*words, "--resume_from_checkpoint", tmp_path / "float8" / "checkpoint-2", output="again")
    assert losses(again[1]) == float8


def test_float8_without_a_layer_is_refused_before_anything_is_read(train):
    with pytest.raises(UsageError, match="--fp8_skip 1: none of the 2 layers is left; use a smaller number"):
        train("--bf16", "--fp8", data="/no/such/folder")


@pytest.mark.parametrize("blend", [False, True])
def test_progress_is_in_passes_over_the_training_data(train, tmp_path, blend):
    """96 samples of 16 tokens over the tokens of the training split, however many passes the index holds."""
    prefixes = [write_tokens(tmp_path / name, documents=10, seed=seed) for seed, name in enumerate("ab")]
    data = " ".join(f"0.5 {prefix}" for prefix in prefixes) if blend else prefixes[0]
    metrics, history = train("--per_device_train_batch_size", "16", "--split", "80,20,0", data=data)
    tokens = sum(corpus.token_count("train") for corpus in open_corpora(str(data), "80,20,0"))
    passes = [entry["progress_or_epoch"] for entry in history if "loss" in entry]
    assert passes == pytest.approx([16 * 16 * step / tokens for step in range(1, 7)], rel=0.04)
    assert metrics["progress_or_epoch"] == passes[-1] and {e["progress_or_epoch"] for e in history[-2:]} == {passes[-1]}


@pytest.mark.parametrize("more", [(), ("--document_masking", "attention", "--eod_mask_loss")])
def test_an_evaluation_of_many_passes_is_one_over_the_split(train, tmp_path, capsys, more):
    """The valid split is one document: its samples by hand, each once, the last batch partial; so the test split."""
    prefix = write_tokens(tmp_path / "few", documents=10, seed=3)
    metrics, _ = train(*NO_DROPOUT, *more, "--eval_iters", "100000", "--per_device_eval_batch_size", "4", data=prefix)
    (corpus,) = open_corpora(str(prefix), "80,10,10")
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "out").eval()
    said = capsys.readouterr().out
    for split, name, wanted in (("valid", "eval", 400_000), ("test", "test", 4_000_000)):
        (first, last), count = corpus.sequences(split), (corpus.token_count(split) - 1) // 16
        assert last == first + 1 and count % 4
        ids = torch.from_numpy(corpus.tokens.get(first).astype(np.int64))
        tokens = torch.stack([ids[16 * k : 16 * k + 17] for k in range(count)])
        with torch.no_grad():
            logits = model(tokens[:, :-1]).logits
        by_hand = F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten()).item()
        assert metrics[f"{name}_loss"] == pytest.approx(by_hand, abs=1e-5)
        evaluated = metrics[f"{name}_samples_per_second"] * metrics[f"{name}_runtime"]
        assert evaluated == pytest.approx(count, rel=0.05)
        line = f"{name}_iters: {wanted:,} samples, {wanted / count:,.0f} passes over the {split} split would be read: "
        assert said.count(f"{line}each of its {count} samples is evaluated once, the loss is that of the split") == 1


def test_a_blend_is_evaluated_until_each_corpus_has_been_read(train, tmp_path, capsys):
    """Weights repeat the smaller corpus: that no sample comes twice cannot be had, and the line says why."""
    small, large = (write_tokens(tmp_path / name, documents=n) for name, n in (("small", 10), ("large", 40)))
    train("--eval_iters", "100000", data=f"0.5 {small} 0.5 {large}")
    tokens = max(corpus.token_count("valid") for corpus in open_corpora(f"0.5 {small} 0.5 {large}", "80,10,10"))
    count = 2 * ((tokens - 1) // 16)
    assert f"would be read: the evaluation stops after {count} samples, when every corpus" in capsys.readouterr().out


def test_an_evaluation_of_less_than_a_pass_says_its_share(train, capsys):
    train()
    assert "passes over the valid split are read by an evaluation" in capsys.readouterr().out
