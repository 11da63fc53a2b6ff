"""`from gptlm import pretrain, sft, load, generate, evaluate`: the functions are the commands, with objects."""

import json
import logging
import os
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from datasets import Dataset
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback

import gptlm
from gptlm.cli import main
from gptlm.model.tokenizer import load_tokenizer
from tests.processes import run
from tests.recipes.test_sft import ROWS, WORDS, model  # noqa: F401

COMMON = {
    "max_steps": 3,
    "per_device_train_batch_size": 4,
    "logging_steps": 1,
    "learning_rate": 1e-2,
    "device": "cpu",
    "disable_tqdm": True,
    "report_to": "none",
    "save_strategy": "no",
    "eval_with_do_generation": False,
}
TEXTS = [f"{a} {b} {c} {a} {c} {b} {a} {b}" for a, b, c in zip(WORDS, WORDS[3:] + WORDS[:3], WORDS[5:] + WORDS[:5])]


def as_words(flags):
    return [f"--{name}={str(value).lower() if isinstance(value, bool) else value}" for name, value in flags.items()]


def losses(history):
    return [entry["loss"] for entry in history if "loss" in entry]


def history_of(folder):
    return json.loads((folder / "trainer_state.json").read_text())["log_history"]


@pytest.fixture(scope="module")
def command(model, tmp_path_factory):  # noqa: F811
    """The folder of the command on files, in a process of its own."""
    folder = tmp_path_factory.mktemp("command")
    (folder / "train.jsonl").write_text("\n".join(map(json.dumps, ROWS)))
    (folder / "dev.json").write_text(json.dumps(ROWS[:5]))
    files = {"dataset_name_or_path": folder / "train.jsonl", "eval_dataset_name_or_path": folder / "dev.json"}
    flags = COMMON | files | {"model_name_or_path": model, "output_dir": folder / "out", "do_train": True}
    words = [*as_words(flags | {"do_eval": True}), "--eval_steps=3"]
    done = run([sys.executable, "-m", "gptlm", "sft", *words])
    assert done.returncode == 0, done.stderr
    return folder / "out"


@pytest.mark.parametrize("kind", ["list", "dataset"])
def test_objects_are_the_files_bit_for_bit(kind, model, command, tmp_path):  # noqa: F811
    """Records, model and tokenizer from memory; run after run in this process, while the command had its own."""
    records = ROWS if kind == "list" else Dataset.from_list(ROWS)
    network, tokenizer = AutoModelForCausalLM.from_pretrained(model), load_tokenizer(str(model))
    before = {name: weight.clone() for name, weight in network.state_dict().items()}
    result = gptlm.sft(
        model=network,
        tokenizer=tokenizer,
        train_dataset=records,
        eval_dataset=ROWS[:5],
        eval_steps=3,
        output_dir=tmp_path / "out",
        **COMMON,
    )
    assert losses(result.history) == losses(history_of(command)) and len(losses(result.history)) == 3
    assert result.metrics["eval_loss"] == json.loads((command / "all_results.json").read_text())["eval_loss"]
    assert result.output_dir == tmp_path / "out" and result.trainer.state.global_step == 3
    saved, own = load_file(command / "model.safetensors"), load_file(result.output_dir / "model.safetensors")
    assert saved.keys() == own.keys() and all(torch.equal(saved[name], own[name]) for name in saved)
    assert all(torch.equal(before[name], weight) for name, weight in network.state_dict().items())


def test_the_loss_of_the_caller_is_trained_and_evaluated(model, command, tmp_path, capsys):  # noqa: F811
    seen = []

    class Counts(TrainerCallback):
        def on_step_end(self, args, state, control, **kwargs):
            seen.append(state.global_step)

    def doubled(outputs, labels, num_items_in_batch=None):
        total = F.cross_entropy(outputs.logits.flatten(0, 1).float(), labels.flatten(), reduction="sum")
        return 2 * total / num_items_in_batch

    def hits(prediction):
        found, targets = prediction.predictions, prediction.label_ids
        assert found.shape == targets.shape and (targets != -100).any(axis=1).all()
        return {"rows": len(targets), "hits": float((found == targets)[targets != -100].mean())}

    result = gptlm.sft(
        model_name_or_path=model,
        train_dataset=ROWS,
        eval_dataset=ROWS[:5],
        eval_steps=3,
        per_device_eval_batch_size=2,  # a filler, which the metrics do not see
        output_dir=tmp_path,
        callbacks=[Counts()],
        compute_loss_func=doubled,
        compute_metrics=hits,
        preprocess_logits_for_metrics=lambda logits, labels: logits.argmax(-1),
        **COMMON,
    )
    plain = history_of(command)
    assert losses(result.history)[0] == pytest.approx(2 * losses(plain)[0], rel=1e-5)
    assert seen == [1, 2, 3] and result.metrics["eval_rows"] == 5
    assert result.metrics["eval_hits"] == pytest.approx(result.metrics["eval_accuracy"])
    capsys.readouterr()
    plain_loss = gptlm.sft(
        model_name_or_path=tmp_path, eval_dataset=ROWS[:5], do_eval=True, output_dir=tmp_path / "evaluated", **COMMON
    ).metrics["eval_loss"]
    assert result.metrics["eval_loss"] == pytest.approx(2 * plain_loss, rel=1e-5)
    lines = [line for line in capsys.readouterr().out.splitlines() if "***** eval metrics" in line]
    assert len(lines) == 1 and len(logging.getLogger("gptlm").handlers) == 1


@pytest.mark.parametrize("kind", ["texts", "ids", "records"])
def test_pretraining_on_documents_is_that_on_their_token_files(kind, model, tmp_path):  # noqa: F811
    tokenizer = load_tokenizer(str(model))
    ids = [[*tokenizer(text)["input_ids"], tokenizer.eos_token_id] for text in TEXTS]
    given = {"texts": TEXTS, "ids": ids, "records": Dataset.from_dict({"text": TEXTS})}[kind]
    (tmp_path / "texts.jsonl").write_text("\n".join(json.dumps({"text": text}) for text in TEXTS))
    words = [f"--input_path={tmp_path / 'texts.jsonl'}", f"--model_name_or_path={model}", "--append_eos"]
    assert main(["preprocess", *words, f"--output_prefix={tmp_path / 'data' / 'c'}"]) == 0
    flags = {name: value for name, value in COMMON.items() if name != "eval_with_do_generation"}
    flags |= {"model_name_or_path": model, "continue_training": True, "max_seq_length": 16, "max_steps": 2}
    files = {"input_dir": tmp_path / "data", "split": "15,5,0", "output_dir": tmp_path / "files", "do_train": True}
    assert len(TEXTS) == 20 and main(["pretrain", *as_words(flags | files), "--do_eval", "--eval_steps=2"]) == 0
    result = gptlm.pretrain(
        train_dataset=given[:15] if kind != "records" else given.select(range(15)),
        eval_dataset=given[15:] if kind != "records" else given.select(range(15, 20)),
        output_dir=tmp_path / "memory",
        eval_steps=2,
        **flags,
    )
    assert losses(result.history) == losses(history_of(tmp_path / "files")) and len(losses(result.history)) == 2
    assert result.metrics["eval_loss"] == json.loads((tmp_path / "files/all_results.json").read_text())["eval_loss"]


def test_load_generate_and_evaluate(model, tmp_path, capsys):  # noqa: F811
    network, tokenizer = gptlm.load(model, device="cpu")
    assert isinstance(network, torch.nn.Module) and not network.training
    prompts = [f"{WORDS[0]} {WORDS[1]}", WORDS[2]]
    capsys.readouterr()
    found = gptlm.generate(network, prompts, tokenizer=tokenizer, tgt_length=4, device="cpu", batch_size=2)
    assert capsys.readouterr().out == ""
    stock = AutoModelForCausalLM.from_pretrained(model)
    for prompt, one in zip(prompts, found, strict=True):
        ids = tokenizer(prompt, return_tensors="pt")["input_ids"]
        wanted = stock.generate(ids, max_new_tokens=4, do_sample=False, pad_token_id=0)[0, ids.shape[1] :].tolist()
        assert one.prompt == prompt and one.token_ids == [number for number in wanted if number != 0]
    assert gptlm.generate(model, prompts[0], tgt_length=4, device="cpu") == found[:1]
    result = gptlm.evaluate(network, tokenizer=tokenizer, texts=TEXTS, device="cpu", overlapping_eval=8)
    tokens = [number for text in TEXTS for number in (*tokenizer(text)["input_ids"], tokenizer.eos_token_id)]
    assert result.report["num_tokens"] == len(tokens) and result.ppl == pytest.approx(np.exp(result.loss))
    (tmp_path / "t.jsonl").write_text("\n".join(json.dumps({"text": text}) for text in TEXTS))
    by_file = gptlm.evaluate(model, task="TEXT", eval_path=tmp_path / "t.jsonl", device="cpu", overlapping_eval=8)
    assert by_file.loss == result.loss


def test_adapters_are_trained_loaded_and_continued(model, tmp_path):  # noqa: F811
    flags = {"model_name_or_path": model, "train_dataset": ROWS, "output_dir": tmp_path, "lora": True}
    result = gptlm.sft(**flags, **COMMON)
    network, tokenizer = gptlm.load(tmp_path, device="cpu")
    wanted = gptlm.generate(network, WORDS[:2], tokenizer=tokenizer, tgt_length=4, device="cpu")
    found = gptlm.generate(result.model, WORDS[:2], tokenizer=result.tokenizer, tgt_length=4, device="cpu")
    assert found == wanted
    with pytest.raises(gptlm.UsageError, match="adapters name the folder of their model"):
        gptlm.sft(model=network, tokenizer=tokenizer, **{**flags, "model_name_or_path": None}, **COMMON)


@pytest.mark.parametrize(
    ("function", "more", "text"),
    [
        ("sft", {"max_stepz": 3}, "max_stepz is not an argument; did you mean max_steps"),
        ("pretrain", {"input_dirs": "x"}, "input_dirs is not an argument; did you mean input_dir"),
        ("sft", {"max_steps": "many"}, "--max_steps 'many': expected a whole number"),
        ("sft", {"train_dataset": {"train": ROWS}}, "train_dataset is dict with train; give one of them"),
        ("sft", {"train_dataset": [{"src": {1, 2}}]}, r"train_dataset\[0\] holds a value that JSON has not"),
        ("sft", {"train_dataset": ROWS, "dataset_name_or_path": "x"}, "dataset_name_or_path and train_dataset are"),
        ("sft", {"callbacks": [print]}, "callbacks: builtin_function_or_method is not a transformers"),
        ("sft", {"compute_loss_func": 1}, "compute_loss_func is int; expected a function"),
        ("pretrain", {"train_dataset": ["a", [1, 2]]}, "texts and lists of token ids; give one of the two"),
        ("pretrain", {"train_dataset": ["a", " "]}, r"train_dataset\[1\] is an empty text"),
        ("pretrain", {"train_dataset": [[1.5]]}, r"train_dataset\[0\] is neither a text nor"),
    ],
)
def test_wrong_arguments_are_usage_errors(function, more, text, model, tmp_path):  # noqa: F811
    with pytest.raises(gptlm.UsageError, match=text):
        getattr(gptlm, function)(
            **{"model_name_or_path": model, "output_dir": tmp_path / "out", "device": "cpu"} | more
        )
    assert not (tmp_path / "out").exists()


def test_a_signal_saves_and_then_has_the_caller_s_effect(model, tmp_path):  # noqa: F811
    class Send(TrainerCallback):
        def on_step_end(self, args, state, control, **kwargs):
            if state.global_step == 2:
                os.kill(os.getpid(), signal.SIGTERM)

    got = []
    before = signal.signal(signal.SIGTERM, lambda number, frame: got.append(number))
    flags = COMMON | {"model_name_or_path": model, "output_dir": tmp_path, "train_dataset": ROWS}
    try:
        mine = signal.getsignal(signal.SIGTERM)
        with pytest.raises(gptlm.GptlmError, match="ended by SIGTERM after step 2; .*checkpoint-2 is where"):
            gptlm.sft(**flags, callbacks=[Send])
        assert got == [signal.SIGTERM] and signal.getsignal(signal.SIGTERM) is mine
        assert gptlm.sft(**flags).trainer.state.global_step == 3
    finally:
        signal.signal(signal.SIGTERM, before)


def test_the_stub_names_what_the_package_has():
    stub = (Path(gptlm.__file__).parent / "__init__.pyi").read_text()
    assert {line.split(" as ")[1] for line in stub.splitlines() if " as " in line} == {*gptlm.__all__} - {"__version__"}
    assert all(getattr(gptlm, name) is not None for name in gptlm.__all__) and set(gptlm.__all__) <= set(dir(gptlm))
    with pytest.raises(AttributeError, match="no attribute 'finetune'"):
        gptlm.finetune  # noqa: B018
    code = "import sys, gptlm; print([m for m in ('torch', 'transformers', 'numpy') if m in sys.modules])"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout == "[]\n"


def test_a_metric_of_the_caller_chooses_the_best_checkpoint(model, tmp_path, capsys):  # noqa: F811
    values = iter([0.5, 0.9, 0.1])
    flags = COMMON | {
        "model_name_or_path": model, "train_dataset": ROWS, "eval_dataset": ROWS[:5], "eval_steps": 1,
        "evaluation_strategy": "steps", "save_strategy": "steps", "save_steps": 1, "load_best_model_at_end": True,
        "preprocess_logits_for_metrics": lambda logits, labels: logits.argmax(-1),
    }  # fmt: skip
    result = gptlm.sft(
        **flags,
        compute_metrics=lambda _: {"score": next(values)},
        metric_for_best_model="score",
        output_dir=tmp_path / "a",
    )
    state = result.trainer.state
    assert (state.best_global_step, state.best_metric) == (2, 0.9)
    saved = load_file(tmp_path / "a" / "checkpoint-2" / "model.safetensors")
    final = load_file(tmp_path / "a" / "model.safetensors")
    assert all(torch.equal(saved[name], final[name]) for name in saved)
    with pytest.raises(gptlm.UsageError, match="metric_for_best_model 'score': expected loss, ppl"):
        gptlm.sft(**flags | {"preprocess_logits_for_metrics": None}, metric_for_best_model="score", output_dir=tmp_path)
    with pytest.raises(gptlm.GptlmError, match="skore"):
        gptlm.sft(
            **flags, compute_metrics=lambda _: {"score": 1.0}, metric_for_best_model="skore", output_dir=tmp_path / "b"
        )


@pytest.mark.parametrize("name", ["hits", "my_loss"])
def test_pretraining_stops_early_by_a_metric_of_the_caller(name, model, tmp_path):  # noqa: F811
    values = iter([3.0, 2.0, 1.0] if name == "hits" else [1.0, 2.0, 3.0])  # worse with each evaluation
    result = gptlm.pretrain(
        model_name_or_path=model, train_dataset=TEXTS, eval_dataset=TEXTS, max_seq_length=8, output_dir=tmp_path,
        continue_training=True, eval_steps=1, evaluation_strategy="steps", eval_iters=1, early_stopping_patience=1,
        compute_metrics=lambda _: {name: next(values)}, metric_for_best_model=name,
        preprocess_logits_for_metrics=lambda logits, labels: logits.argmax(-1), max_steps=3, device="cpu",
    )  # fmt: skip
    assert result.trainer.state.global_step == 2 and result.trainer.state.best_global_step == 1


def test_messages_are_continued_as_stock_transformers_does(model, tmp_path):  # noqa: F811
    tuned = gptlm.sft(
        model_name_or_path=model, train_dataset=ROWS, output_dir=tmp_path, chat_template="chatml", **COMMON
    )
    messages = [{"role": "user", "content": f"{WORDS[0]} {WORDS[1]}"}]
    stock, tokenizer = AutoModelForCausalLM.from_pretrained(tmp_path), AutoTokenizer.from_pretrained(tmp_path)
    ids = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_tensors="pt", return_dict=True)
    wanted = stock.generate(**ids, max_new_tokens=4, do_sample=False, pad_token_id=0)[0, ids["input_ids"].shape[1] :]
    ends = stock.generation_config.eos_token_id
    wanted = [number for number in wanted.tolist() if number not in (ends if isinstance(ends, list) else [ends])]
    flags = {"tokenizer": tuned.tokenizer, "tgt_length": 4, "device": "cpu"}
    (one,) = gptlm.generate(tuned.model, messages, **flags)
    assert one.prompt == messages and one.token_ids == wanted
    assert gptlm.generate(tuned.model, [messages, messages], **flags) == [one, one]
    assert [found.prompt for found in gptlm.generate(tuned.model, [messages, "a text"], **flags)] == [
        messages,
        "a text",
    ]
    with pytest.raises(gptlm.GptlmError, match="unknown role 'x'"):
        gptlm.generate(tuned.model, [{"role": "x", "content": "a"}], **flags)
    with pytest.raises(gptlm.UsageError, match="prompts hold int; expected texts, or lists of messages"):
        gptlm.generate(tuned.model, [1], **flags)
