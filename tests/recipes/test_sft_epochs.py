"""Epochs of fine-tuning: every example once in each, right losses of partial batches, resume inside an epoch."""

import json
import shutil

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch.utils.data import Dataset
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments

from gptlm.checkpoint.folder import newest
from tests.checkpoint.made import note_again
from tests.recipes.test_sft import NO_DROPOUT, ROWS, by_hand, examples, losses, model, tune  # noqa: F401 - fixtures

NINE = ROWS[:9]
DROPOUT = ("--hidden_dropout_prob", "0.1", "--attention_probs_dropout_prob", "0.1")
STILL = (*NO_DROPOUT, "--learning_rate", "0", "--max_steps", "-1")  # the weights stay: losses are those of the start


@pytest.fixture
def nine(tune, tmp_path):  # noqa: F811
    """Train on nine examples; returns metrics, log history and the facts of the last checkpoint."""
    (tmp_path / "nine.json").write_text(json.dumps(NINE))

    def run(*words, output="out"):
        metrics, history = tune("--max_steps", -1, *words, output=output, data=tmp_path / "nine.json")
        found, _ = newest(tmp_path / output)
        return metrics, history, found.manifest

    return run


def batch_words(micro, accumulation):
    return ["--per_device_train_batch_size", micro, "--gradient_accumulation_steps", accumulation]


class Counted(Trainer):
    """The stock Trainer, and how many samples it has trained."""

    samples = 0

    def training_step(self, model, inputs, num_items_in_batch=None):  # noqa: F811
        self.samples += len(inputs["input_ids"])
        return super().training_step(model, inputs, num_items_in_batch)


class Nine(Dataset):
    def __len__(self):
        return len(NINE)

    def __getitem__(self, index):
        return {"input_ids": torch.tensor([index, 1]), "labels": torch.tensor([index, 1])}


@pytest.mark.parametrize(
    ("micro", "accumulation", "passes", "trained", "steps"),
    [(4, 8, 3, 27, 3), (8, 1, 1, 9, 2), (2, 2, 1.5, 17, 5), (2, 3, 2, 18, 4)],
)
def test_as_many_samples_and_steps_as_the_stock_trainer(nine, tmp_path, micro, accumulation, passes, trained, steps):
    stock = Counted(
        GPT2LMHeadModel(GPT2Config(vocab_size=16, n_positions=4, n_embd=8, n_layer=1, n_head=1)),
        TrainingArguments(
            output_dir=tmp_path / "stock", per_device_train_batch_size=micro, gradient_accumulation_steps=accumulation,
            num_train_epochs=passes, report_to=[], disable_tqdm=True, use_cpu=True, save_strategy="no",
        ),
        train_dataset=Nine(),
    )  # fmt: skip
    stock.train()
    assert (stock.samples, stock.state.global_step) == (trained, steps)
    metrics, history, facts = nine(*batch_words(micro, accumulation), "--num_train_epochs", passes)
    assert (facts.consumed_samples, facts.global_step) == (trained, steps)
    assert metrics["progress_or_epoch"] == pytest.approx(trained / 9, abs=1e-4)
    # speeds are of what was trained: their sum over time is all of it
    counted = [e["interval_samples_per_second"] * e["interval_runtime"] for e in history if "loss" in e]
    assert sum(counted) == pytest.approx(trained, rel=1e-2)
    assert metrics["train_samples_per_second"] * metrics["train_runtime"] == pytest.approx(trained, rel=1e-2)


def test_the_loss_of_a_partial_batch_is_the_mean_over_its_targets(nine, model):  # noqa: F811
    """Steps of 4, 4 and 1 examples: each loss is that of its own examples by hand, twice over."""
    _, history, _ = nine(*STILL, "--num_train_epochs", 2)
    wanted = []
    for epoch in range(2):
        order = np.random.default_rng([42, epoch]).permutation(9)
        wanted += [by_hand(model, [NINE[i] for i in order[first : first + 4]])[0] for first in (0, 4, 8)]
    assert losses(history) == pytest.approx(wanted, abs=1e-5)


@pytest.mark.parametrize("more", [(), ("--lora",), ("--bf16", "--fp16_opt_level", "O2", "--amp_master_grad", "1")])
def test_micro_batches_without_samples_change_nothing(nine, more):
    """9 samples of 16 places: accumulated one by one, seven micro-batches are empty."""
    words = (*NO_DROPOUT, *more, "--num_train_epochs", 2)
    one, two = (nine(*words, *batch_words(*size), output=str(size[0]))[1] for size in ((16, 1), (1, 16)))
    assert losses(one) == pytest.approx(losses(two), abs=2e-2 if "--bf16" in more else 1e-5)
    assert len(losses(two)) == 2


def test_packs_are_batched_and_examples_are_counted(nine, model, capfd):  # noqa: F811
    """Packs of up to 24 tokens: fewer than examples; an epoch has every example, the loss is that of its targets."""
    words = ("--zero_padding", "--max_length", "24", "--num_train_epochs", 3)
    _, history, facts = nine(*STILL, *batch_words(16, 1), *words)
    packs = int(capfd.readouterr().out.partition("9 examples are packed into ")[2].split()[0])
    assert 1 < packs < 9 and facts.consumed_samples == 27
    assert losses(history) == pytest.approx([by_hand(model, NINE)[0]] * 3, abs=1e-5)
    _, history, facts = nine(*STILL, *batch_words(packs - 1, 1), *words, output="partial")
    assert facts.consumed_samples == 27 and facts.global_step == 6 and facts.epoch_position == [3, 0]
    passes = [entry["progress_or_epoch"] for entry in history if "loss" in entry]
    assert passes[1::2] == [1, 2, 3] and all(0 < p - n < 1 for n, p in enumerate(passes[::2]))


@pytest.mark.parametrize("more", [(), ("--group_by_length",), ("--zero_padding", "--max_length", "24")])
def test_resume_inside_an_epoch_is_exact(nine, tmp_path, more):
    """Nine steps in all, the checkpoint lies after the first of the second epoch; with dropout."""
    saves = 2 if "--zero_padding" in more else 4
    words = (*DROPOUT, *more, *batch_words(2, 2), "--num_train_epochs", 3, "--save_steps", saves)
    _, whole, end = nine(*words)
    saved = tmp_path / "out" / f"checkpoint-{saves}"
    metrics, resumed, facts = nine(*words, "--resume_from_checkpoint", saved, output="again")
    assert losses(resumed) == losses(whole) and facts.consumed_samples == end.consumed_samples == 27
    a, b = (load_file(tmp_path / folder / "model.safetensors") for folder in ("out", "again"))
    assert all(torch.equal(a[name], b[name]) for name in a)
    found = [entry["train_loss"] for entry in resumed if "train_loss" in entry]
    assert found == [metrics["train_loss"]] == [pytest.approx(np.mean(losses(whole)), abs=1e-6)]


def test_resume_under_another_batch_trains_what_is_left_of_the_epoch(nine, tmp_path, capfd):
    """Of the second epoch 4 samples are trained: 5 are left, in batches of 3; evaluations come as epochs end."""
    nine(*batch_words(2, 2), "--num_train_epochs", 3, "--save_steps", 4)
    capfd.readouterr()
    words = ["--do_eval", "--generate_num", 0, "--eval_dataset_name_or_path", tmp_path / "nine.json"]
    words += ["--evaluation_strategy", "epoch", "--save_strategy", "epoch", "--num_train_epochs", 3]
    saved = tmp_path / "out" / "checkpoint-4"
    _, history, facts = nine(*batch_words(3, 1), *words, "--resume_from_checkpoint", saved, output="again")
    assert "step 4, 13 samples consumed, epoch 2 continues after 4 of its 9 samples" in capfd.readouterr().out
    assert (facts.consumed_samples, facts.global_step) == (27, 4 + 2 + 3)
    assert [(e["step"], e["progress_or_epoch"]) for e in history if "eval_loss" in e] == [(6, 2.0), (9, 3.0)]
    assert {path.name for path in (tmp_path / "again").glob("checkpoint-*")} == {"checkpoint-6", "checkpoint-9"}


def test_more_padding_changes_no_loss_and_grouping_only_the_order(nine, tmp_path, capfd):
    """Multiples of 1, 7 and 64. The grouped order depends on the batch: with another one the epoch starts again."""
    words = (*STILL, *batch_words(2, 2), "--num_train_epochs", 2)
    found = [losses(nine(*words, "--pad_to_multiple_of", n, output=f"pad-{n}")[1]) for n in (1, 7, 64)]
    assert found[1] == pytest.approx(found[0], abs=1e-5) and found[2] == pytest.approx(found[0], abs=1e-5)
    singly = (*STILL, *batch_words(1, 1), "--num_train_epochs", 2)
    plain = losses(nine(*singly, output="plain")[1])
    _, history, facts = nine(*singly, "--group_by_length", "--save_steps", 10, output="grouped")
    assert losses(history) != plain and facts.order["grouped_batch"] == 1
    for epoch in (slice(0, 9), slice(9, 18)):
        assert sorted(losses(history)[epoch]) == pytest.approx(sorted(plain[epoch]), abs=1e-6)
    capfd.readouterr()
    more = ("--group_by_length", "--resume_from_checkpoint", tmp_path / "grouped" / "checkpoint-10")
    nine(*STILL, *batch_words(3, 1), "--num_train_epochs", 2, *more, output="again")
    assert "data or order have changed: epoch 2 starts again" in capfd.readouterr().out


def test_evaluations_and_checkpoints_by_epoch(nine, tmp_path):
    """Three steps an epoch; 2.5 epochs end after ceil(2.5 x 3) = 8 steps, where the stock Trainer evaluates, too."""
    words = ["--do_eval", "--generate_num", 0, "--eval_dataset_name_or_path", tmp_path / "nine.json"]
    words += ["--evaluation_strategy", "epoch", "--save_strategy", "epoch", "--load_best_model_at_end"]
    _, history, _ = nine(*words, "--num_train_epochs", 2.5)
    assert [entry["step"] for entry in history if "eval_loss" in entry] == [3, 6, 8]
    steps = {int(path.name.partition("-")[2]) for path in (tmp_path / "out").glob("checkpoint-*")}
    assert steps == {3, 6, 8}


def test_max_steps_go_on_through_epochs(nine):
    _, history, facts = nine("--max_steps", 8, *batch_words(2, 2))
    assert facts.consumed_samples == 9 + 9 + 8 and facts.epoch_position == [2, 8]
    passes = [entry["progress_or_epoch"] for entry in history if "loss" in entry]
    assert passes == pytest.approx([4 / 9, 8 / 9, 1, 13 / 9, 17 / 9, 2, 22 / 9, 26 / 9], abs=1e-4)


def test_a_checkpoint_that_does_not_note_its_place_starts_its_epoch_again(nine, tmp_path, capfd):
    """As those were before: 16 samples of 9 are the second epoch."""
    nine("--num_train_epochs", 3, "--save_steps", 4)
    saved = tmp_path / "out" / "checkpoint-4"
    shutil.rmtree(tmp_path / "out" / "checkpoint-8")
    note_again(saved, checksums=False, without=["epoch_position"], consumed_samples=16)
    capfd.readouterr()
    _, _, facts = nine("--num_train_epochs", 3, "--resume_from_checkpoint", saved, output="again")
    said = capfd.readouterr().out
    assert said.count("it does not note its position in the epoch: epoch 2 starts again") == 1
    assert (facts.global_step, facts.consumed_samples, facts.epoch_position) == (4 + 6, 16 + 18, [3, 0])


def test_shares_of_a_run_whose_steps_follow_from_the_data(nine, tmp_path):
    """Six steps: a log line every ceil(0.3 x 6), a checkpoint after ceil(0.5 x 6), warm-up of ceil(0.4 x 6) = 3."""
    words = ("--logging_steps", 0.3, "--save_steps", 0.5, "--warmup_steps", 0.4, "--learning_rate", 1)
    _, history, _ = nine(*words, "--num_train_epochs", 2, "--lr_decay_ratio", 1)
    rates = {entry["step"]: entry["learning_rate"] for entry in history if "loss" in entry}
    assert rates == {2: pytest.approx(2 / 3, abs=1e-3), 4: 1.0, 6: 1.0}
    assert {path.name for path in (tmp_path / "out").glob("checkpoint-*")} == {"checkpoint-3", "checkpoint-6"}
