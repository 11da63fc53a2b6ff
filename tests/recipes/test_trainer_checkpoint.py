"""Checkpoints of transformers' own Trainer: their weights and AdamW's moments, continued as the Trainer continues."""

import json
import pickle
import shutil

import pytest
import torch
from transformers import AutoTokenizer, GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments

from gptlm.cli import main
from gptlm.model.tokenizer import train_tokenizer

TEXTS = ["one two three four", "five six", "seven eight nine ten eleven", "two four six eight ten"]
SETTINGS = {"learning_rate": 1e-2, "weight_decay": 0.1, "max_grad_norm": 0.5, "max_steps": 6, "logging_steps": 1}
# the batch holds all examples, so that their order has no effect
RUN = (
    "sft --model_name_or_path base --dataset_name_or_path rows.jsonl --per_device_train_batch_size 4 --do_train "
    "--lr_scheduler_type linear --lr_start_step 0 --min_learning_rate 0 --warmup_steps 2 --device cpu --report_to none "
    "--hidden_dropout_prob 0 --attention_probs_dropout_prob 0"
).split() + [word for name, value in SETTINGS.items() for word in (f"--{name}", str(value))]


def batch_of(tokenizer, texts):
    """As fine-tuning makes it of plain texts: begin and end tokens, loss on all but the first token."""
    rows = [[tokenizer.eos_token_id, *tokenizer(text)["input_ids"], tokenizer.eos_token_id] for text in texts]
    width = max(map(len, rows))
    padded = {"input_ids": [], "attention_mask": [], "labels": []}
    for row in rows:
        rest = width - len(row)
        padded["input_ids"].append(row + [0] * rest)
        padded["attention_mask"].append([1] * len(row) + [0] * rest)
        padded["labels"].append([-100, *row[1:]] + [-100] * rest)
    return {name: torch.tensor(value) for name, value in padded.items()}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """`base`, `rows.jsonl`, and `stock`, a run of 6 steps of transformers' Trainer with a checkpoint after 3."""
    folder = tmp_path_factory.mktemp("trainer")
    tokenizer = train_tokenizer(TEXTS * 3, 300)
    tokenizer.save_pretrained(folder / "base")
    (folder / "rows.jsonl").write_text("\n".join(json.dumps({"text": text}) for text in TEXTS))
    torch.manual_seed(3)
    sizes = {"n_positions": 32, "n_embd": 32, "n_layer": 2, "n_head": 2, "bos_token_id": 0, "eos_token_id": 0}
    dropouts = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
    model = GPT2LMHeadModel(GPT2Config(vocab_size=len(tokenizer), **sizes, **dropouts))
    model.save_pretrained(folder / "base")
    arguments = TrainingArguments(
        str(folder / "stock"), per_device_train_batch_size=4, save_steps=3, warmup_steps=2, lr_scheduler_type="linear",
        use_cpu=True, report_to="none", remove_unused_columns=False, disable_tqdm=True, **SETTINGS,
    )  # fmt: skip
    Trainer(
        model, arguments, train_dataset=TEXTS, data_collator=lambda texts: batch_of(tokenizer, texts),
        processing_class=tokenizer,
    ).train()  # fmt: skip
    return folder


@pytest.fixture(autouse=True)
def inside(folder, monkeypatch):
    monkeypatch.chdir(folder)


def logged(path):
    """Losses by step."""
    history = json.loads((path / "trainer_state.json").read_text())["log_history"]
    return {entry["step"]: entry["loss"] for entry in history if "loss" in entry}


def copy_of(tmp_path):
    return shutil.copytree("stock/checkpoint-3", tmp_path / "checkpoint-3")


def convert(path, *words):
    return main(["convert", "--from", str(path), "--output", str(path.parent / "new"), *words])


def test_moments_and_schedule_continue_as_in_the_trainer(folder, tmp_path, capsys):
    old = copy_of(tmp_path)
    (old / "training_args.bin").write_bytes(pickle.dumps(pytest.fail))  # called by none, because it is not read
    assert convert(old, "--with_optimizer") == 0, capsys.readouterr().err
    said = capsys.readouterr().out
    flags = "--learning_rate 0.01 --weight_decay 0.1 --adam_beta1 0.9 --adam_beta2 0.999 --adam_epsilon 1e-08"
    assert f"AdamW with {flags}; give these" in said
    assert "checkpoint-3: step 3, 3 updates" in said
    assert main([*RUN, "--output_dir", str(tmp_path / "new")]) == 0, capsys.readouterr().err
    assert "checkpoint-3: step 3" in capsys.readouterr().out
    stock, ours = logged(folder / "stock/checkpoint-6"), logged(tmp_path / "new")
    assert sorted(ours) == [4, 5, 6]
    for step, loss in ours.items():
        assert loss == pytest.approx(stock[step], rel=2e-6)


def test_without_moments_the_losses_are_others(folder, tmp_path, capsys):
    """So the losses of the test above depend on the moments."""
    words = ["--model_name_or_path", "stock/checkpoint-3", "--output_dir", str(tmp_path / "new"), "--max_steps", "3"]
    assert main([*RUN, *words]) == 0, capsys.readouterr().err
    stock, ours = logged(folder / "stock/checkpoint-6"), logged(tmp_path / "new")
    assert ours[1] == pytest.approx(stock[4], rel=2e-6)  # the same weights
    assert abs(ours[3] - stock[6]) > 1e-2


def test_the_trainers_checkpoint_is_not_resumed_without_conversion(tmp_path, capsys):
    words = [*RUN, "--output_dir", str(tmp_path / "new"), "--resume_from_checkpoint"]
    assert main([*words, "stock/checkpoint-3"]) == 1
    error = capsys.readouterr().err
    assert "gptlm convert --from stock/checkpoint-3 --with_optimizer --output DIR" in error
    assert "--model_name_or_path stock/checkpoint-3" in error


def test_a_folder_of_checkpoints_is_no_model(tmp_path, capsys):
    words = ["--model_name_or_path", "stock", "--output_dir", str(tmp_path / "new")]
    assert main([*RUN, *words]) == 1
    assert (
        "stock holds checkpoints, but no model of its own; give one of them, such as stock/" in capsys.readouterr().err
    )


def state_of(path):
    return torch.load(path / "optimizer.pt")


def without_step(path):
    (path / "trainer_state.json").unlink()


def of_8bit(path):
    content = state_of(path)
    content["state"] = {number: {"step": 3, "state1": torch.zeros(2)} for number in content["state"]}
    torch.save(content, path / "optimizer.pt")


def in_another_order(path):
    content = state_of(path)
    content["state"][0], content["state"][1] = content["state"][1], content["state"][0]
    torch.save(content, path / "optimizer.pt")


def of_fewer_parameters(path):
    content = state_of(path)
    content["param_groups"][0]["params"].pop()
    torch.save(content, path / "optimizer.pt")


def of_something_else(path):
    torch.save({"state": 1, "param_groups": [1]}, path / "optimizer.pt")


def with_code(path):
    torch.save({"state": pytest.fail, "param_groups": []}, path / "optimizer.pt")


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (without_step, "trainer_state.json has step None"),
        (of_8bit, "has step, state1 of transformer.wte.weight; only AdamW's"),
        (in_another_order, "its parameters are in another order"),
        (of_fewer_parameters, "has groups of [9, 18] parameters; expected [10, 18]"),
        (of_something_else, "has unexpected content"),
        (with_code, "pytest"),
        (lambda path: (path / "optimizer.pt").unlink(), "has no optimizer.pt"),
    ],
)
def test_optimizer_states_that_cannot_be_read_are_refused(tmp_path, capsys, change, says):
    old = copy_of(tmp_path)
    change(old)
    assert convert(old, "--with_optimizer") == 1
    assert says in capsys.readouterr().err and not (tmp_path / "new").exists()
    assert convert(old) == 0, capsys.readouterr().err  # the weights alone


def test_a_checkpoint_with_deepspeeds_files_beside_the_weights_is_stock(folder, tmp_path, capsys):
    """transformers saves DeepSpeed's engine as `global_step3`, named by `latest`, beside the whole weights."""
    old = copy_of(tmp_path)
    (old / "optimizer.pt").unlink()
    (old / "latest").write_text("global_step3")
    (old / "global_step3").mkdir()
    torch.save({"module": {}}, old / "global_step3/mp_rank_00_model_states.pt")
    assert convert(old) == 0, capsys.readouterr().err
    assert "is a checkpoint of HuggingFace GPT-2" in capsys.readouterr().out
    assert len(AutoTokenizer.from_pretrained(tmp_path / "new")) == len(AutoTokenizer.from_pretrained("base"))
    assert convert(old, "--with_optimizer", "--overwrite") == 1
    assert "DeepSpeed's and FSDP's optimizer states are not read" in capsys.readouterr().err
