"""`GPTTrainer` with stock arguments alone, and what it relies on in transformers' Trainer."""

import ast
import inspect
import json
import logging
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from transformers import AutoModelForCausalLM, Trainer, TrainerCallback, TrainingArguments

from gptlm.errors import GptlmError
from gptlm.model.build import load_model
from gptlm.training import loop, trainer
from gptlm.training.metrics.throughput import start_logging
from gptlm.training.trainer import GPTTrainer

PACKAGE = Path(loop.__file__).parents[1]
OWN = {name: member for name, member in vars(GPTTrainer).items() if inspect.isfunction(member)}
OVERRIDDEN = sorted(name for name in OWN if hasattr(Trainer, name) and name != "__init__")


def test_there_is_one_subclass_of_trainer():
    found = []
    for file in PACKAGE.rglob("*.py"):
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ClassDef) and any(
                ast.unparse(base).split(".")[-1] == "Trainer" for base in node.bases
            ):
                found.append(node.name)
    assert found == ["GPTTrainer"]


def test_at_most_ten_methods_are_overridden():
    assert len(OVERRIDDEN) <= 10
    for name in OVERRIDDEN:
        assert f"    {name} " in trainer.__doc__, f"the docstring of trainer.py does not list {name}"
        assert len(inspect.getsource(OWN[name]).splitlines()) <= 15, f"{name} does not delegate"


@pytest.mark.parametrize("name", OVERRIDDEN)
def test_overridden_methods_have_the_signature_of_the_installed_transformers(name):
    own, stock = (list(inspect.signature(getattr(kind, name)).parameters) for kind in (GPTTrainer, Trainer))
    assert own == stock


def private_names(module, owner):
    """Names of `owner._name` in a module."""
    for node in ast.walk(ast.parse(inspect.getsource(module))):
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == owner:
            if node.attr.startswith("_") and not node.attr.startswith("__"):
                yield node.attr


def test_private_names_of_trainer_exist(tiny_model, tmp_path):
    """A name that a new version of transformers drops would be used in vain."""
    made = stock_trainer(tiny_model, tmp_path)
    used = {*private_names(loop, "trainer"), *private_names(trainer, "self")} - {name for name in OWN}
    set_by_us = {"_initial_num_input_tokens_seen"}
    source = inspect.getsource(Trainer)
    assert len(used) > 5
    for name in used - set_by_us:
        assert hasattr(made, name), name
    assert all(name in source for name in set_by_us)
    for file in PACKAGE.rglob("*.py"):
        if file.parent.name != "training" or file.name not in ("loop.py", "trainer.py"):
            assert not list(private_names_in(file)), file


def private_names_in(file):
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "trainer":
            if node.attr.startswith("_"):
                yield node.attr


def blocks(count=10, length=16, seed=0):
    return list(np.random.RandomState(seed).randint(0, 500, (count, length + 1)))


class Events(TrainerCallback):
    """Notes every event of the loop."""

    def __init__(self):
        self.seen = []

    def __getattribute__(self, name):
        if name.startswith("on_") and name not in ("on_init_end", "on_prediction_step"):
            return lambda *args, **kwargs: self.seen.append(name)
        return super().__getattribute__(name)


def stock_trainer(model, folder, *, dataset=None, args=None, dropout=None, **more):
    words = {"output_dir": str(folder), "per_device_train_batch_size": 2, "learning_rate": 1e-2, "use_cpu": True}
    words |= {"report_to": [], "logging_steps": 1, "save_steps": 3, "max_steps": 6, "disable_tqdm": True}
    arguments = TrainingArguments(**(words | (args or {})))
    network = load_model(str(model), hidden_dropout=dropout, attention_dropout=dropout)
    return GPTTrainer(model=network, args=arguments, train_dataset=blocks() if dataset is None else dataset, **more)


def losses(made):
    return [entry["loss"] for entry in made.state.log_history if "loss" in entry]


def test_stock_arguments_train_evaluate_save_and_resume(tiny_model, tmp_path):
    """Dropout and order included: the resumed run equals the uninterrupted one bit for bit."""
    args = {"gradient_accumulation_steps": 2, "warmup_steps": 2, "eval_strategy": "steps", "eval_steps": 3}
    whole = stock_trainer(tiny_model, tmp_path / "whole", args=args, eval_dataset=blocks(5, seed=1))
    result = whole.train()
    assert result.global_step == 6 and len(losses(whole)) == 6 and np.isfinite(losses(whole)).all()
    assert [entry["step"] for entry in whole.state.log_history if "eval_loss" in entry] == [3, 6]
    stopped = stock_trainer(tiny_model, tmp_path / "parts", args=args, eval_dataset=blocks(5, seed=1))
    stopped.add_callback(StopAt(3))
    stopped.train()
    resumed = stock_trainer(tiny_model, tmp_path / "parts", args=args, eval_dataset=blocks(5, seed=1))
    resumed.train(resume_from_checkpoint=True)
    assert losses(resumed) == losses(whole)
    for a, b in zip(whole.model.parameters(), resumed.model.parameters(), strict=True):
        assert torch.equal(a, b)
    stock = AutoModelForCausalLM.from_pretrained(tmp_path / "whole" / "checkpoint-6")
    tokens = torch.tensor(np.stack(blocks(5, seed=1)))
    with torch.no_grad():
        logits = stock.eval()(tokens[:, :-1]).logits
    wanted = F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten()).item()
    assert whole.evaluate()["eval_loss"] == pytest.approx(wanted, rel=1e-5)  # 5 samples in batches of 8


class StopAt(TrainerCallback):
    def __init__(self, step):
        self.step = step

    def on_step_end(self, args, state, control, **kwargs):
        control.should_training_stop |= state.global_step == self.step


def test_dicts_are_trained_in_huggingface_convention(tiny_model, tmp_path):
    """Labels alone, unshifted, -100 ignored, rows of different length; the last batch of an epoch is partial."""
    rows = [
        {"input_ids": block[: 8 + number], "labels": block[: 8 + number].copy()}
        for number, block in enumerate(blocks(3))
    ]
    for row in rows:
        row["labels"][:3] = -100
    args = {"max_steps": 2, "per_device_train_batch_size": 3, "learning_rate": 0.0, "save_strategy": "no"}
    made = stock_trainer(tiny_model, tmp_path, dataset=rows, args=args, dropout=0.0)
    made.train()
    stock = AutoModelForCausalLM.from_pretrained(tiny_model).eval()
    total = count = 0
    for row in rows:
        ids, labels = torch.tensor(row["input_ids"])[None], torch.tensor(row["labels"])[None]
        with torch.no_grad():
            logits = stock(ids).logits
        total += F.cross_entropy(logits[0, :-1], labels[0, 1:], ignore_index=-100, reduction="sum").item()
        count += int((labels[0, 1:] != -100).sum())
    assert losses(made)[0] == pytest.approx(total / count, rel=1e-5)
    fewer = stock_trainer(tiny_model, tmp_path / "x", dataset=rows, args=args | {"per_device_train_batch_size": 2})
    fewer.train()
    assert [entry["progress_or_epoch"] for entry in fewer.state.log_history if "loss" in entry] == [0.6667, 1.0]


def test_events_come_in_the_order_of_the_stock_loop(tiny_model, tmp_path):
    """Three epochs of two steps with two micro-batches; saved at the end of each epoch."""
    args = {"max_steps": -1, "num_train_epochs": 2, "gradient_accumulation_steps": 2, "save_strategy": "epoch"}
    events = Events()
    made = stock_trainer(tiny_model, tmp_path, dataset=blocks(8), args=args, callbacks=[events])
    made.train()
    step = ["on_step_begin", "on_substep_end", "on_pre_optimizer_step", "on_optimizer_step", "on_step_end", "on_log"]
    epoch = ["on_epoch_begin", *step, *step, "on_epoch_end", "on_save"]
    assert events.seen == ["on_train_begin", *epoch, *epoch, "on_log", "on_train_end"]
    assert sorted(path.name for path in tmp_path.glob("checkpoint-*")) == ["checkpoint-2", "checkpoint-4"]


def test_half_precision_weights_have_masters(tiny_model, tmp_path):
    made = stock_trainer(tiny_model, tmp_path, args={"max_steps": 3})
    half = GPTTrainer(model=load_model(str(tiny_model)).to(torch.bfloat16), args=made.args, train_dataset=blocks())
    half.train()
    manifest = json.loads((tmp_path / "checkpoint-3" / "manifest.json").read_text())
    assert manifest["optimizer_steps"] == 3 and manifest["epoch_position"] == [0, 6]
    assert type(half.weights).__name__ == "MasterWeights" and half.optimizer.masters[0].dtype == torch.float32


def test_a_mask_of_padding_on_the_right_is_left_out(tiny_model, tmp_path):
    """As stock collators make it, where no code of the user may read it."""

    class OwnLoss(GPTTrainer):
        def compute_loss(self, *args, **kwargs):
            return super().compute_loss(*args, **kwargs)

    def collate(rows, side="right"):
        mask = torch.tensor([[1, 1, 1], [1, 1, 0]] if side == "right" else [[1, 1, 1], [0, 1, 1]])
        ids = torch.tensor([[5, 6, 7], [8, 9, 4]])
        return {"input_ids": ids, "attention_mask": mask, "labels": ids.masked_fill(mask == 0, -100)}

    def user_loss(outputs, labels, num_items_in_batch=None):
        return outputs.logits.sum()

    made = stock_trainer(tiny_model, tmp_path, data_collator=collate)
    assert set(made.inputs_on_device(collate([]))) == {"input_ids", "labels"}
    assert "attention_mask" in made.inputs_on_device(collate([], side="left"))
    assert "attention_mask" in OwnLoss(made.model, made.args, data_collator=collate).inputs_on_device(collate([]))
    given = stock_trainer(tiny_model, tmp_path, data_collator=collate, compute_loss_func=user_loss)
    assert "attention_mask" in given.inputs_on_device(collate([]))


def test_a_loss_function_of_the_user_is_used(tiny_model, tmp_path):
    given = []

    def loss(outputs, labels, num_items_in_batch=None):
        given.append((outputs.logits.shape, labels.shape, int(num_items_in_batch)))
        return F.cross_entropy(outputs.logits.flatten(0, 1), labels.flatten(), reduction="sum") / num_items_in_batch

    args = {"max_steps": 2, "save_strategy": "no", "learning_rate": 0.0}
    made = stock_trainer(tiny_model, tmp_path, args=args, compute_loss_func=loss)
    plain = stock_trainer(tiny_model, tmp_path, args=args)
    made.train()
    plain.train()
    assert given == [((2, 16, 500), (2, 16), 32)] * 2
    assert losses(made) == pytest.approx(losses(plain), rel=1e-5)


def test_a_stock_collator_gives_the_losses_of_the_stock_trainer(tiny_model, tmp_path):
    """Training and evaluation, on rows of different length, all in a batch; the labels are not shifted."""

    def collate(rows):
        ids = torch.nn.utils.rnn.pad_sequence([torch.tensor(row) for row in rows], batch_first=True)
        return {"input_ids": ids, "labels": ids.masked_fill(ids == 0, -100)}

    def loss(outputs, labels, num_items_in_batch=None):  # which counts first tokens, too: stock GPT-2 shifts later
        return F.cross_entropy(outputs.logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())

    def rates(prediction):
        return {"rows": len(prediction.label_ids), "width": prediction.predictions.shape[-1]}

    rows = [(1 + block[: 6 + 2 * number] % 498).tolist() for number, block in enumerate(blocks(6))]
    args = {"max_steps": 3, "per_device_train_batch_size": 6, "save_strategy": "no"}
    made = stock_trainer(
        tiny_model, tmp_path, dataset=rows, args=args, dropout=0.0, data_collator=collate, eval_dataset=rows[:5],
        compute_metrics=rates,
    )  # fmt: skip
    network = AutoModelForCausalLM.from_pretrained(tiny_model, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0)
    stock = Trainer(
        network, made.args, data_collator=collate, train_dataset=rows, eval_dataset=rows[:5], compute_loss_func=loss
    )
    before = made.evaluate(), stock.evaluate()
    assert before[0]["eval_rows"] == 5 and before[0]["eval_width"] == 500
    assert before[0]["eval_loss"] == pytest.approx(before[1]["eval_loss"], rel=1e-5)
    made.train()
    stock.train()
    assert losses(made) == pytest.approx(losses(stock), rel=1e-3) and losses(made)[2] < losses(made)[0]
    assert made.evaluate()["eval_loss"] == pytest.approx(stock.evaluate()["eval_loss"], rel=1e-4)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("auto_find_batch_size", True),
        ("train_sampling_strategy", "group_by_length"),
        ("dataloader_drop_last", True),
        ("torch_empty_cache_steps", 1),
        ("average_tokens_across_devices", False),
    ],
)
def test_arguments_without_effect_are_refused(tiny_model, tmp_path, name, value):
    with pytest.raises(GptlmError, match=f"TrainingArguments: {name}={value!r} is not supported"):
        stock_trainer(tiny_model, tmp_path, args={name: value})


@pytest.mark.parametrize(("optim", "name"), [("sgd", "SGD"), ("adafactor", "Adafactor")])
def test_master_weights_are_trained_with_adamw_only(tiny_model, tmp_path, optim, name):
    args = stock_trainer(tiny_model, tmp_path, args={"optim": optim}).args
    made = GPTTrainer(model=load_model(str(tiny_model)).to(torch.bfloat16), args=args, train_dataset=blocks())
    with pytest.raises(GptlmError, match=f"AdamW, not {name}"):
        made.train()


def test_a_missing_dataset_is_one_error(tiny_model, tmp_path):
    made = stock_trainer(tiny_model, tmp_path)
    for more in ({}, {"train_dataset": None, "eval_dataset": blocks()}):
        without = GPTTrainer(model=made.model, args=made.args, **more)
        with pytest.raises(GptlmError, match="no train_dataset"):
            without.train()
    assert np.isfinite(without.evaluate(blocks(3))["eval_loss"])  # 3 samples and a filler in batches of 8
    with pytest.raises(GptlmError, match="no eval_dataset"):
        GPTTrainer(model=made.model, args=made.args).evaluate()
    with pytest.raises(GptlmError, match="train_dataset has no samples"):
        stock_trainer(tiny_model, tmp_path, dataset=[]).train()
    with pytest.raises(GptlmError, match="needs a model"):
        GPTTrainer(args=made.args, train_dataset=blocks())


def test_samples_that_the_model_cannot_take_are_one_error(tiny_model, tmp_path):
    config = load_model(str(tiny_model)).config
    long = blocks(length=config.n_positions + 1)
    with pytest.raises(GptlmError, match=f"{config.n_positions + 1} input tokens, the model has {config.n_positions}"):
        stock_trainer(tiny_model, tmp_path, dataset=long).train()
    last_target = [np.append(block[:-1], config.vocab_size) for block in blocks()]
    with pytest.raises(GptlmError, match=f"token id {config.vocab_size}, the model's vocabulary"):
        stock_trainer(tiny_model, tmp_path, dataset=last_target).train()


def test_tokens_of_rows_of_different_length_are_counted(tiny_model, tmp_path):
    rows = [{"input_ids": block[:size]} for block, size in zip(blocks(4), (4, 6, 8, 16), strict=True)]
    made = stock_trainer(tiny_model, tmp_path, dataset=rows, args={"max_steps": 2, "save_strategy": "no"})
    made.train()
    assert made.trained == (4, 4 + 6 + 8 + 16)


def test_a_loss_that_is_not_finite_ends_the_run_unsaved(tiny_model, tmp_path, capsys):
    start_logging(main_process=True)
    made = stock_trainer(tiny_model, tmp_path, args={"learning_rate": 1e30, "max_grad_norm": 0.0})
    with pytest.raises(GptlmError, match=r"the loss is nan at step \d.*nothing of this step was saved"):
        made.train()
    assert not list(tmp_path.glob("checkpoint-*"))


def test_losses_are_printed_where_no_logging_is_configured(tiny_model, tmp_path, capsys, monkeypatch):
    package = logging.getLogger("gptlm")
    monkeypatch.setattr(logging.getLogger(), "handlers", [])
    for name, value in (("handlers", []), ("propagate", True), ("level", package.level)):
        monkeypatch.setattr(package, name, value)
    made = stock_trainer(tiny_model, tmp_path, args={"max_steps": 1, "save_strategy": "no"})
    made.train()
    assert "INFO] - loss: " in capsys.readouterr().out


def test_fields_that_the_caller_adds_are_logged(tiny_model, tmp_path):
    made = stock_trainer(tiny_model, tmp_path, args={"max_steps": 1, "save_strategy": "no"})
    made.train()
    made.log({"loss": 1.0, "aux_loss": 0.5})
    assert made.state.log_history[-1]["aux_loss"] == 0.5


def test_a_loss_that_was_never_logged_is_checked_at_the_end(tiny_model, tmp_path):
    args = {"learning_rate": 1e30, "max_grad_norm": 0.0, "logging_steps": 500, "save_strategy": "no"}
    with pytest.raises(GptlmError, match=r"the loss is nan in one of the steps 1 to 6, .*lower --learning_rate"):
        stock_trainer(tiny_model, tmp_path, args=args).train()
