"""Fine-tuning in one process: losses by hand, answers that end, adapters, resume, metrics, and what is refused."""

import json
import math
import re
import shlex
import shutil

import peft
import pytest
import torch
import torch.nn.functional as F
from huggingface_hub import ModelCard
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer, GPT2Config, GPT2LMHeadModel

from gptlm.commands.sft import parse_sft
from gptlm.errors import GptlmError, UsageError
from gptlm.inference.loading import load_for_inference
from gptlm.model.lora import write_card
from gptlm.model.tokenizer import train_tokenizer
from gptlm.recipes.merge_lora import merged
from gptlm.recipes.sft.data import load_data
from gptlm.recipes.sft.run import sft
from gptlm.recipes.sft.sources import find_sources
from gptlm.training.metrics.throughput import start_logging
from gptlm.upstream.torch import recomputes_open_shapes
from tests.checkpoint.made import note_again
from tests.conftest import run_script
from tests.recipes.test_pretrain import tracked_parameters

WORDS = "the cat sat on a mat while two dogs ran far away from all those birds in our old garden".split()
ROWS = [
    {"src": f"{a} {b} ", "tgt": f"{b} {a} {c}"} for a, b, c in zip(WORDS, WORDS[3:] + WORDS[:3], WORDS[5:] + WORDS[:5])
] + [{"src": f"{word} {word} ", "tgt": word} for word in WORDS[:4]]
BASE = (
    "--max_steps 6 --per_device_train_batch_size 4 --per_device_eval_batch_size 3 --logging_steps 1 --save_steps 3 "
    "--eval_steps 3 --learning_rate 1e-2 --weight_decay 0.1 --device cpu --disable_tqdm --report_to none --do_train"
).split()
NO_DROPOUT = ["--hidden_dropout_prob", "0", "--attention_probs_dropout_prob", "0"]


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """A folder with a tokenizer of the words and random weights: 2 layers, 32 wide, 48 positions."""
    folder = tmp_path_factory.mktemp("sft") / "my 模型"
    tokenizer = train_tokenizer([" ".join(WORDS)] * 5, 330)
    tokenizer.save_pretrained(folder)
    torch.manual_seed(5)
    config = GPT2Config(
        vocab_size=len(tokenizer), n_positions=48, n_embd=32, n_layer=2, n_head=2, bos_token_id=0, eos_token_id=0
    )
    GPT2LMHeadModel(config).save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def examples(tmp_path_factory):
    folder = tmp_path_factory.mktemp("examples")
    (folder / "train.jsonl").write_text("\n".join(map(json.dumps, ROWS)))
    (folder / "dev.json").write_text(json.dumps(ROWS[:5]))
    return folder


@pytest.fixture
def tune(model, examples, tmp_path):
    """Run with BASE and more words; returns metrics and the log history."""

    def run(*words, output="out", data=None, base=model):
        argv = [*BASE, "--model_name_or_path", base, "--dataset_name_or_path", data or examples]
        argv += ["--output_dir", tmp_path / output, *words]
        metrics = sft(parse_sft([str(word) for word in argv], {}))
        state = tmp_path / output / "trainer_state.json"
        return metrics, json.loads(state.read_text())["log_history"] if state.exists() else []

    return run


def losses(history):
    return [entry["loss"] for entry in history if "loss" in entry]


def by_hand(folder, rows, tokenizer_folder=None):
    """Cross-entropy of stock GPT-2 over the answers' tokens and their ends, row by row without padding."""
    model = AutoModelForCausalLM.from_pretrained(folder).eval()
    tokenizer = AutoTokenizer.from_pretrained(tokenizer_folder or folder)
    total = right = count = 0
    for row in rows:
        source = tokenizer(row["src"])["input_ids"]
        ids = torch.tensor([source + tokenizer(row["tgt"])["input_ids"] + [tokenizer.eos_token_id]])
        with torch.no_grad():
            logits = model(ids).logits[0, len(source) - 1 : -1]
        targets = ids[0, len(source) :]
        total += F.cross_entropy(logits, targets, reduction="sum").item()
        right += (logits.argmax(-1) == targets).sum().item()
        count += len(targets)
    return total / count, right / count


def test_the_loss_is_that_of_the_answers_by_hand(tune, model, tmp_path):
    """Every example in one batch: the first logged loss is the mean over all answers' tokens of the first weights."""
    words = [*NO_DROPOUT, "--per_device_train_batch_size", len(ROWS), "--max_steps", "1", "--do_eval"]
    metrics, history = tune(*words, "--generate_num", "0")
    assert losses(history)[0] == pytest.approx(by_hand(model, ROWS)[0], abs=1e-5)
    loss, accuracy = by_hand(tmp_path / "out", ROWS[:5], model)
    assert metrics["eval_loss"] == pytest.approx(loss, abs=1e-5)
    assert metrics["eval_accuracy"] == pytest.approx(accuracy, abs=1e-9)
    assert metrics["eval_ppl"] == pytest.approx(math.exp(loss), abs=1e-3)
    assert history[0]["ppl"] == pytest.approx(math.exp(history[0]["loss"]), abs=1e-3)


def test_weights_that_hold_nan_are_to_blame_for_the_first_loss(tune, model, tmp_path):
    """No learning rate is: nothing was updated before the first loss."""
    damaged = shutil.copytree(model, tmp_path / "damaged")
    weights = AutoModelForCausalLM.from_pretrained(model)
    with torch.no_grad():
        weights.transformer.h[0].mlp.c_fc.weight[0, 0] = math.nan
    weights.save_pretrained(damaged)
    for more in ((), ("--lora",)):
        with pytest.raises(
            GptlmError, match="the loss is nan at step 1.* the starting weights already give this loss"
        ) as error:
            tune(*more, base=damaged)
        assert "learning_rate" not in str(error.value)


@pytest.mark.parametrize("more", [(), ("--lora",), ("--zero_padding", "--max_length", "40")])
def test_accumulation_does_not_change_the_loss(tune, more):
    """Answers of different lengths: the mean is over tokens, not over micro-batches."""
    words = [*NO_DROPOUT, *more]
    one = tune(*words, output="one")[1]
    two = tune(*words, "--per_device_train_batch_size", 1, "--gradient_accumulation_steps", 4, output="two")[1]
    assert losses(one) == pytest.approx(losses(two), abs=1e-5)
    assert [e["grad_norm"] for e in one if "loss" in e] == pytest.approx(
        [e["grad_norm"] for e in two if "loss" in e], abs=1e-5
    )


def test_the_log_counts_tokens_without_padding(tune, model):
    """One epoch in six steps: seconds times tokens/s are the tokens of all examples, the last one of each a target."""
    _, history = tune("--pad_to_multiple_of", 32)
    shown = [entry for entry in history if "loss" in entry]
    found = sum(entry["interval_runtime"] * entry["interval_tokens_per_second_per_device"] for entry in shown)
    tokenizer = AutoTokenizer.from_pretrained(model)
    wanted = sum(len(tokenizer(row[key])["input_ids"]) for row in ROWS for key in ("src", "tgt"))
    assert len(shown) == len(ROWS) / 4 and found == pytest.approx(wanted, rel=0.02)


def test_packing_changes_no_loss(tune, model):
    """The same weights, examples alone and packed, in batches of any size: one loss, that of the answers by hand."""
    few = ["--do_train", "0", "--do_eval", "--generate_num", "0"]
    sizes = [(), ("--zero_padding",), ("--per_device_eval_batch_size", 1), ("--per_device_eval_batch_size", 7)]
    found = [tune(*few, *more)[0]["eval_loss"] for more in sizes]
    assert found == pytest.approx([by_hand(model, ROWS[:5])[0]] * 4, abs=1e-5)


def test_twenty_examples_are_learnt_and_end_by_themselves(tune, model, tmp_path):
    words = [
        "--max_steps",
        150,
        "--per_device_train_batch_size",
        20,
        "--learning_rate",
        "5e-3",
        "--save_strategy",
        "no",
    ]
    words += [
        "--eval_dataset_name_or_path",
        tmp_path / "dev.json",
        "--do_eval",
        "--eval_steps",
        150,
        "--tgt_length",
        30,
    ]
    (tmp_path / "dev.json").write_text(json.dumps(ROWS))
    metrics, _ = tune(*NO_DROPOUT, *words, "--weight_decay", "0")
    assert metrics["eval_accuracy"] == metrics["eval_rouge1"] == metrics["eval_bleu4"] == 1.0
    lines = [json.loads(line) for line in (tmp_path / "out/predictions/eval-step-150.jsonl").read_text().splitlines()]
    assert [(line["prompt"], line["prediction"], line["reference"]) for line in lines] == [
        (row["src"], row["tgt"], row["tgt"]) for row in ROWS
    ]
    stock, tokenizer = AutoModelForCausalLM.from_pretrained(tmp_path / "out"), AutoTokenizer.from_pretrained(model)
    assert stock.generation_config.eos_token_id == tokenizer.eos_token_id and stock.config.use_cache
    for row in ROWS:
        ids = torch.tensor([tokenizer(row["src"])["input_ids"]])
        out = stock.generate(ids, max_new_tokens=30, do_sample=False)[0, ids.shape[1] :]
        assert out[-1] == tokenizer.eos_token_id and tokenizer.decode(out[:-1]) == row["tgt"]


@pytest.mark.parametrize(
    "more", [(), ("--lora", "--lora_dropout", "0.1"), ("--lora", "--bf16", "--fp16_opt_level", "O2")]
)
def test_resumed_equals_uninterrupted_bit_for_bit(tune, tmp_path, more):
    """With dropout; also in half precision, where adapters have float32 copies."""
    _, whole = tune(*more, "--recompute", "1")
    _, resumed = tune(*more, "--resume_from_checkpoint", tmp_path / "out/checkpoint-3", output="again")
    assert losses(resumed) == losses(whole)
    name = "adapter_model.safetensors" if "--lora" in more else "model.safetensors"
    a, b = (load_file(tmp_path / folder / name) for folder in ("out", "again"))
    assert a.keys() == b.keys() and all(torch.equal(a[key], b[key]) for key in a)


def test_adapters_are_small_load_in_plain_peft_and_leave_the_model_alone(tune, model, tmp_path):
    before = (model / "model.safetensors").read_bytes()
    metrics, _ = tune(*NO_DROPOUT, "--lora", "--lora_rank", 2, "--do_eval", "--generate_num", 0, "--merge_weights")
    assert (model / "model.safetensors").read_bytes() == before
    out = tmp_path / "out"
    config = json.loads((out / "adapter_config.json").read_text())
    assert (config["r"], config["lora_alpha"], config["lora_dropout"]) == (2, 4, 0)
    assert config["base_model_name_or_path"] == str(model) and set(config["target_modules"]) == {
        "c_attn",
        "c_proj",
        "c_fc",
    }
    stock = peft.PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(model), out).eval()
    whole = AutoModelForCausalLM.from_pretrained(out / "merged").eval()
    ids = torch.tensor([[5, 9, 200, 31]])
    assert torch.allclose(stock(ids).logits, whole(ids).logits, atol=1e-4)
    assert by_hand(out / "merged", ROWS[:5])[0] == pytest.approx(metrics["eval_loss"], abs=1e-5)
    assert whole.generation_config.eos_token_id == 0
    trained = [value for name, value in load_file(out / "adapter_model.safetensors").items() if "lora_B" in name]
    assert all(value.abs().max() > 0 for value in trained)
    again, _ = tune(
        "--do_train", 0, "--do_eval", "--generate_num", 0, "--lora_path", out, "--lora_rank", 2, output="eval"
    )
    assert again["eval_loss"] == pytest.approx(metrics["eval_loss"], abs=1e-6)


def test_trackers_get_the_adapters(tune, model, examples, tmp_path):
    tune("--lora", "--lora_rank", 2, "--max_steps", 1, "--report_to", "tensorboard")
    noted = tracked_parameters(tmp_path / "out")
    wanted = {
        "lora": True, "lora_rank": 2, "lora_alpha": 4, "lora_target_modules": ["c_attn", "c_proj", "c_fc"],
        "dataset_name_or_path": str(examples), "do_train": True, "learning_rate": 0.01, "min_learning_rate": 0.001,
    }  # fmt: skip
    assert {name: noted.get(name) for name in wanted} == wanted


def test_adapters_on_another_base_are_warned_of(tune, model, tmp_path, capsys):
    """Weights of the same shape but other values, in prediction, merging, `--lora_path`; no run goes on with them."""
    tune("--lora", "--lora_rank", 2)
    out, moved, other = tmp_path / "out", tmp_path / "moved", tmp_path / "other"
    shutil.copytree(model, moved)
    shutil.copytree(model, other)
    torch.manual_seed(6)
    GPT2LMHeadModel(GPT2Config.from_pretrained(model)).save_pretrained(other)
    half = shutil.copytree(model, tmp_path / "half")
    AutoModelForCausalLM.from_pretrained(model, dtype=torch.bfloat16).save_pretrained(half)

    def said(action):
        capsys.readouterr()
        action()
        return [
            line for line in capsys.readouterr().out.splitlines() if "WARNING" in line and "the adapters in" in line
        ]

    start_logging(main_process=True)

    def load(base):
        return lambda: load_for_inference(str(base), torch.device("cpu"), lora_path=str(out))

    for same in (model, moved, half):
        assert said(load(same)) == []
    (line,) = said(load(other))
    assert f"trained on {model}; the weights in {other} are others" in line
    (line,) = said(lambda: merged(str(other), out))
    assert str(other) in line
    (line,) = said(lambda: tune("--lora_path", out, base=other, output="again"))
    assert str(other) in line
    assert said(lambda: tune("--lora_path", out, base=moved, output="and again")) == []
    kept = (out / "adapter_model.safetensors").read_bytes()
    for steps in (6, 9):  # finished, and to go on
        with pytest.raises(GptlmError, match=f"were trained on {model}, the weights in {other} are others"):
            tune("--lora", "--lora_rank", 2, "--max_steps", steps, base=other)
    assert (out / "adapter_model.safetensors").read_bytes() == kept
    tune("--lora", "--lora_rank", 2, base=moved)


def test_adapters_of_plain_peft_are_judged_by_what_they_name(model, tmp_path, capsys):
    stock = peft.get_peft_model(AutoModelForCausalLM.from_pretrained(model), peft.LoraConfig(fan_in_fan_out=True))
    stock.save_pretrained(tmp_path / "adapters")
    other = shutil.copytree(model, tmp_path / "other")
    torch.manual_seed(6)
    GPT2LMHeadModel(GPT2Config.from_pretrained(model)).save_pretrained(other)
    start_logging(main_process=True)
    settings = tmp_path / "adapters" / "adapter_config.json"
    for base, named, says in (
        (model, str(model), None),
        (other, str(model), "are others"),
        (other, "openai-community/gpt2", "cannot be compared"),
        (other, "some/other", None),
    ):
        settings.write_text(json.dumps({**json.loads(settings.read_text()), "base_model_name_or_path": named}))
        capsys.readouterr()
        load_for_inference(str(base), torch.device("cpu"), lora_path=str(tmp_path / "adapters"))
        out = capsys.readouterr().out
        assert (says in out and named in out) if says else "the adapters in" not in out


def test_merging_by_script(tune, tmp_path):
    tune("--lora")
    done = run_script(
        "merge_lora", "--lora_path", "out", "--output_path", "merged", "--dtype", "bfloat16", cwd=tmp_path
    )
    assert done.returncode == 0, done.stderr
    assert AutoModelForCausalLM.from_pretrained(tmp_path / "merged").dtype == torch.bfloat16
    (tmp_path / "file").write_text("")
    for words, says in (
        (["--lora_path", "out", "--output_path", "file/x"], "is a file, not a folder"),
        (["--lora_path", "nowhere", "--output_path", "m"], "nowhere does not exist"),
        (
            ["--lora_path", "out", "--output_path", "m", "--model_name_or_path", "nowhere"],
            "neither a folder nor a built-in name",
        ),
    ):
        done = run_script("merge_lora", *words, cwd=tmp_path)
        assert done.returncode == 1 and says in done.stderr and "Traceback" not in done.stderr


def test_added_tokens_are_learnt_and_saved(tune, model, tmp_path):
    """Rows of the new tokens travel with the adapters, whatever the embedding of the model holds there."""
    rows = [{"src": f"<user name> {word}", "tgt": f"{word} <bot>"} for word in WORDS[:8]]
    (tmp_path / "d.json").write_text(json.dumps(rows))
    words = ["--additional_special_tokens", "<user name>", "<bot>", "--lora", "--do_eval", "--generate_num", 0]
    metrics, _ = tune(*NO_DROPOUT, *words, "--merge_weights", data=tmp_path / "d.json")
    out = tmp_path / "out"
    tokenizer = AutoTokenizer.from_pretrained(out)
    assert (
        len(tokenizer) == len(AutoTokenizer.from_pretrained(model)) + 2
        and tokenizer.decode(tokenizer("<user name> x<bot>")["input_ids"]) == "<user name> x<bot>"
    )
    whole = AutoModelForCausalLM.from_pretrained(out / "merged")
    assert whole.config.vocab_size == len(tokenizer)
    held = [{"src": row["src"], "tgt": row["tgt"]} for row in rows[-1:]]
    assert by_hand(out / "merged", held)[0] == pytest.approx(metrics["eval_loss"], abs=1e-5)
    delta = load_file(out / "adapter_model.safetensors")[
        "base_model.model.transformer.wte.token_adapter.trainable_tokens_delta"
    ]
    assert delta.shape == (2, 32)


@pytest.mark.parametrize(("metric", "more"), [("loss", ()), ("loss", ("--lora",)), ("accuracy", ())])
def test_the_best_model_comes_back(tune, tmp_path, metric, more):
    """A learning rate that rises far too high: the last evaluation is not the best one."""
    words = ["--load_best_model_at_end", "--do_eval", "--eval_steps", 1, "--save_steps", 1]
    words += ["--learning_rate", 30 if more else 2]
    words += ["--lr_scheduler_type", "constant_with_warmup", "--warmup_steps", 6, "--metric_for_best_model", metric]
    metrics, history = tune(*NO_DROPOUT, *words, *more, "--generate_num", 0)
    found = [entry for entry in history if "eval_loss" in entry]
    sign = -1 if metric == "loss" else 1
    best = max(found, key=lambda entry: sign * entry[f"eval_{metric}"])
    assert metrics[f"eval_{metric}"] == best[f"eval_{metric}"]
    assert metric == "accuracy" or more or best["step"] < 6
    name = "adapter_model.safetensors" if more else "model.safetensors"
    a, b = (load_file(folder / name) for folder in (tmp_path / "out", tmp_path / "out" / f"checkpoint-{best['step']}"))
    assert all(torch.equal(a[key], b[key]) for key in a)


def test_generated_texts_are_compared_by_word_or_character(tune, tmp_path):
    few = ["--do_train", "0", "--do_eval", "--generate_num", 2, "--tgt_length", 6]
    word, char = (tune(*few, "--metric_level", level, output=level)[0] for level in ("word", "char"))
    assert word["eval_loss"] == char["eval_loss"]
    lines = (tmp_path / "char/predictions/eval-step-0.jsonl").read_text().splitlines()
    assert len(lines) == 2 and set(json.loads(lines[0])) == {"prompt", "prediction", "reference"}
    for scores in (word, char):
        assert {key for key in scores if "bleu" in key or "rouge" in key} == {
            "eval_bleu4", "eval_rouge1", "eval_rouge2", "eval_rougel",
        }  # fmt: skip


def test_the_schedule_is_paddlenlp_s(tune):
    """Warm-up from 0, then down to lr_decay_ratio of the highest rate; the log shows the next step's."""
    _, history = tune("--warmup_steps", 2, "--lr_decay_ratio", "0.2", "--learning_rate", "1.0")
    rates = [entry["learning_rate"] for entry in history if "loss" in entry]
    factor = [step / 2 if step < 2 else 1 - 0.8 * (step - 2) / 4 for step in range(1, 7)]
    assert rates == pytest.approx(factor, abs=1e-6)


def test_a_share_is_held_out_where_there_is_no_dev_file(tune, tmp_path, capsys):
    (tmp_path / "d.json").write_text(json.dumps([*ROWS, {"src": "x", "tgt": ""}]))
    metrics, _ = tune("--do_eval", "--max_steps", "1", data=tmp_path / "d.json")
    said = capsys.readouterr().out
    assert f"the last 1 of {len(ROWS)} are held out" in said and "1 records of" in said and "without a response" in said
    assert "the first example, prompt: " in said and repr(f"{ROWS[0]['tgt']}<|endoftext|>") in said
    assert "eval_loss" in metrics


def test_worker_processes_and_epochs(tune, capfd):
    _, history = tune("--max_steps", -1, "--num_train_epochs", 2, "--dataloader_num_workers", 2)
    assert history[-2]["step"] == 2 * math.ceil(len(ROWS) / 4)
    assert "forked" not in capfd.readouterr().err


def test_loading_whole_models_and_adapters_crosswise_is_refused(tune, tmp_path):
    tune("--lora")
    saved = tmp_path / "out" / "checkpoint-3"
    with pytest.raises(GptlmError, match="is of training adapters, this run is fine-tuning: it cannot be resumed; --l"):
        tune("--resume_from_checkpoint", saved)
    with pytest.raises(GptlmError, match="is of training adapters, this run is fine-tuning"):
        tune("--resume_from_checkpoint", tmp_path / "out", output="other")
    (saved / "run.json").unlink()
    note_again(saved, without=["task"])
    with pytest.raises(GptlmError, match="is of adapters; give --lora"):
        tune("--resume_from_checkpoint", saved, output="other")
    with pytest.raises(GptlmError, match="has other adapters: lora_rank 8 there, 4 in the command"):
        tune("--lora", "--lora_rank", 4)
    shutil.rmtree(tmp_path / "out" / "checkpoint-3")
    shutil.rmtree(tmp_path / "out" / "checkpoint-6")
    with pytest.raises(GptlmError, match="holds a model but no checkpoint"):
        tune("--lora")


@pytest.mark.parametrize(
    ("words", "data", "says"),
    [
        ((), "[]", "there are no examples to train on"),
        (
            ("--do_eval",),
            json.dumps(ROWS[:1]),
            r"there are 1 examples in .*d\.json; one for training and one for evaluation",
        ),
        ((), '[{"a": "x", "b": "y"}]', "the keys a, b are not a known form"),
        (("--val_size", "3"), json.dumps(ROWS[:3]), "val_size 3: there are 3 examples in"),
        ((), "nowhere", "is neither on this machine nor on the HuggingFace hub"),
    ],
)
def test_data_that_cannot_be_learnt(tune, tmp_path, words, data, says, monkeypatch):
    monkeypatch.setattr("datasets.config.HF_HUB_OFFLINE", True)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    if data != "nowhere":
        (tmp_path / "d.json").write_text(data)
    with pytest.raises(GptlmError, match=says):
        tune(*words, data=tmp_path / "d.json" if data != "nowhere" else "no/where")
    assert not (tmp_path / "out" / "model.safetensors").exists()


DOCUMENT = (
    '--model_name_or_path gpt2-medium-en --output_dir "output/gpt3_hybrid" --per_device_train_batch_size 2 '
    "--per_device_eval_batch_size 1 --tensor_parallel_degree 1 --pipeline_parallel_degree 1 --sequence_parallel 0 "
    '--fp16 --fp16_opt_level "O2" --scale_loss 1024 --learning_rate 0.00001 --max_steps 10000 --save_steps 5000 '
    "--weight_decay 0.01 --warmup_ratio 0.01 --max_grad_norm 1.0 --logging_steps 1 --dataloader_num_workers 1 "
    '--sharding "stage2" --eval_steps 1000 --report_to "visualdl" --disable_tqdm true --recompute 1 '
    "--gradient_accumulation_steps 2 --do_train --do_eval --device gpu"
)


@pytest.mark.parametrize(
    "more",
    [
        ("--lora", "--lora_dropout", "0.1"),
        pytest.param(("--hidden_dropout_prob", "0.1"), marks=pytest.mark.slow),
        pytest.param(("--lora", "--additional_special_tokens", "<bot>"), marks=pytest.mark.slow),
        pytest.param(("--zero_padding", "--max_length", "40"), marks=pytest.mark.slow),
        pytest.param(
            ("--recompute", "1"),
            marks=[pytest.mark.slow, pytest.mark.skipif(not recomputes_open_shapes(), reason="a fault of torch 2.11")],
        ),
    ],
)
def test_compiling_changes_no_loss(tune, more):
    """Lengths that differ, adapters, evaluation between the steps; the code is whole, and compiled a few times."""
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    words = [*NO_DROPOUT, *more, "--do_eval", "--evaluation_strategy", "steps", "--generate_num", "2"]
    plain = tune(*words)
    with torch._dynamo.config.patch(fail_on_recompile_limit_hit=True):
        compiled = tune(*words, "--torch_compile", output="compiled")
    assert losses(compiled[1]) == pytest.approx(losses(plain[1]), abs=1e-5)
    assert compiled[0]["eval_loss"] == pytest.approx(plain[0]["eval_loss"], abs=1e-5)
    assert torch._dynamo.utils.counters["frames"]["ok"] > 1
    if "--zero_padding" not in more:  # on a CPU attention inside documents reads their lengths
        assert not torch._dynamo.utils.counters["graph_break"]


@pytest.mark.parametrize("more", [(), ("--lora",)])
def test_the_document_s_commands(model, tmp_path, more):
    """As typed but for the model, the data and the number of steps; as typed, without network, one sentence."""
    articles = [{"title": "t", "paragraphs": [{"context": f"the {word} ran", "qas": [
        {"id": word, "question": f"what ran {word}", "answers": [{"text": word, "answer_start": 4}]}
    ]} for word in WORDS]}]  # fmt: skip
    (tmp_path / "dev.json").write_text(json.dumps({"version": "1.1", "data": articles}))
    words = [*shlex.split(DOCUMENT), *more]
    done = run_script("finetune_generation", *words, cwd=tmp_path, environment={"HF_HUB_OFFLINE": "1"})
    assert done.returncode == 1 and done.stderr.count("\n") == 1 and "gptlm sft: error: " in done.stderr, done.stderr
    words += ["--model_name_or_path", model, "--dataset_name_or_path", tmp_path / "dev.json"]
    words += ["--max_steps", 2, "--save_steps", 2, "--eval_steps", 2]
    done = run_script("finetune_generation", *words, cwd=tmp_path)
    assert done.returncode == 0 and done.stderr == "", done.stderr  # no bars in a pipe, no noise of other libraries
    assert "global_step: 2," in done.stdout and "eval_bleu4" in done.stdout and "Traceback" not in done.stderr
    stored = "adapter_model.safetensors" if more else "model.safetensors"
    assert (tmp_path / "output" / "gpt3_hybrid" / stored).is_file()


def test_an_argument_file_of_paddlenlp(model, examples, tmp_path):
    """The keys of llm/config/gpt-3/sft_argument.json."""
    arguments = {
        "model_name_or_path": str(model), "dataset_name_or_path": str(examples), "output_dir": str(tmp_path / "o"),
        "per_device_train_batch_size": 4, "gradient_accumulation_steps": 1, "per_device_eval_batch_size": 8,
        "eval_accumulation_steps": 16, "num_train_epochs": 1, "learning_rate": 3e-05, "warmup_steps": 2,
        "logging_steps": 1, "evaluation_strategy": "epoch", "save_strategy": "epoch", "src_length": 30,
        "max_length": 40, "fp16": True, "fp16_opt_level": "O2", "do_train": True, "do_eval": True,
        "disable_tqdm": True, "load_best_model_at_end": True, "eval_with_do_generation": False,
        "metric_for_best_model": "accuracy", "recompute": True, "save_total_limit": 1, "tensor_parallel_degree": 1,
        "pipeline_parallel_degree": 1, "zero_padding": False, "use_flash_attention": False,
    }  # fmt: skip
    (tmp_path / "sft_argument.json").write_text(json.dumps(arguments))
    done = run_script("finetune_generation", "sft_argument.json", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    results = json.loads((tmp_path / "o" / "all_results.json").read_text())
    assert 0 <= results["eval_accuracy"] <= 1 and "eval_bleu4" not in results


def test_there_is_no_test_split(model, examples, tmp_path):
    words = [
        "--model_name_or_path",
        model,
        "--dataset_name_or_path",
        examples,
        "--output_dir",
        tmp_path,
        "--do_predict",
    ]
    with pytest.raises(UsageError, match="has no test split; use --do_eval"):
        parse_sft([str(word) for word in words], {})
    run = parse_sft([*map(str, words), "--do_train"], {})
    assert any("--do_predict has no effect" in note for note in run.notes)


CHAT = [{"role": "user", "content": "the cat"}, {"role": "assistant", "content": "sat on"}]
CHATML = (
    "{% for m in messages %}<{{ m['role'] }}>{{ m['content'] }}{% if m['role'] == 'assistant' %}{{ eos_token }}"
    "{% endif %}{{ '\n' }}{% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}"
)


@pytest.fixture
def chat(model, tmp_path):
    """A copy of the model whose tokenizer has the template given, and a file of one conversation of `turns` turns."""

    def make(template, turns=2):
        folder = tmp_path / "chat"
        shutil.copytree(model, folder)
        tokenizer = AutoTokenizer.from_pretrained(folder)
        tokenizer.chat_template = template
        tokenizer.save_pretrained(folder)
        data = tmp_path / "chat.jsonl"
        data.write_text(json.dumps({"messages": CHAT * turns}))
        argv = [*BASE, "--model_name_or_path", folder, "--dataset_name_or_path", data, "--output_dir", tmp_path / "out"]
        return parse_sft([str(word) for word in argv], {}), tokenizer

    return make


def test_a_chat_template_gives_the_row_it_renders(chat):
    """All turns in one row, id for id what the template renders; every answer and its end is learnt, nothing else."""
    run, tokenizer = chat(CHATML)
    (row,) = load_data(run, find_sources(run), tokenizer).train[0]
    end = tokenizer.eos_token
    rendered = f"<user>the cat\n<assistant>sat on{end}\n<user>the cat\n<assistant>sat on{end}\n"
    assert tokenizer.decode(row.ids.tolist()) == rendered
    targets = [tokenizer.decode(row.ids[row.loss_mask].tolist())]
    assert targets == [f"sat on{end}" * 2]
    assert tokenizer.decode(row.ids[: row.prompt_length].tolist()) == rendered.removesuffix(f"sat on{end}\n")


@pytest.mark.parametrize(
    ("template", "says"),
    [
        ("{{ raise_exception('no system turn') }}", "line 1: .* refuses the conversation: no system turn"),
        ("{{ messages | length }}{{ messages[-1]['content'] }}", "line 1: .* changes earlier turns"),
    ],
)
def test_chat_templates_that_do_not_serve(chat, template, says):
    run, tokenizer = chat(template)
    with pytest.raises(GptlmError, match=says):
        load_data(run, find_sources(run), tokenizer)


def test_turns_without_room_are_counted(tune, tmp_path, capfd):
    """A turn and its headings are more than 8 tokens, positions are 48: of nine turns at least three are left out."""
    (tmp_path / "long.json").write_text(json.dumps([{"messages": CHAT * 9}] * 4))
    tune(data=tmp_path / "long.json")
    found = re.search(r"(\d+) turns at the ends of 4 train conversations are skipped", "".join(capfd.readouterr()))
    assert found and int(found[1]) >= 12


def test_a_loss_of_exactly_0_is_spoken_of(tune, model, tmp_path, capfd):
    """A model that is certain of the end-of-text token, and answers that are nothing else where they may spell it."""
    shutil.copytree(model, tmp_path / "certain")
    network = GPT2LMHeadModel.from_pretrained(model)
    with torch.no_grad():
        network.transformer.ln_f.weight.zero_()
        network.transformer.ln_f.bias.zero_()[0] = 1e3
        network.transformer.wte.weight[:, 0] = -1.0
        network.transformer.wte.weight[0, 0] = 1.0
    network.save_pretrained(tmp_path / "certain")
    end = AutoTokenizer.from_pretrained(model).eos_token
    (tmp_path / "ends.json").write_text(json.dumps([{"src": "the cat", "tgt": end}] * 4))
    _, history = tune("--allow_special_tokens", base=tmp_path / "certain", data=tmp_path / "ends.json")
    assert losses(history) == [0.0] * 6
    said = "".join(capfd.readouterr())
    assert said.count("the loss has been exactly 0 up to step 1") == said.count("exactly 0") == 1


@pytest.mark.parametrize(
    ("words", "says"),
    [
        ("--lora_rank 4 --lora_alpha 3", "--lora_rank has no effect: there are no adapters without --lora"),
        ("--merge_weights", "--merge_weights has no effect: there are no adapters without --lora"),
        ("--lora_path some/adapters", "--lora_path some/adapters: its adapters are trained, --lora is on"),
    ],
)
def test_flags_of_adapters_are_not_dropped_in_silence(model, words, says):
    argv = [*BASE, "--model_name_or_path", str(model), "--dataset_name_or_path", "d", "--output_dir", "o"]
    assert says in parse_sft([*argv, *words.split()], {}, printing=True).notes


def test_layouts_are_not_chosen_for_fine_tuning(model):
    argv = [*BASE, "--model_name_or_path", str(model), "--dataset_name_or_path", "d", "--output_dir", "o"]
    with pytest.raises(UsageError, match="auto_parallel chooses layouts of pretraining"):
        parse_sft([*argv, "--auto_parallel"], {})


@pytest.mark.parametrize("more", [(), ("--lora",), ("--lora", "--additional_special_tokens", "<user name>")])
def test_evaluation_alone_is_of_the_trained_model(tune, model, examples, tmp_path, capsys, more):
    """The command without --do_train, and one that names no model; another model is evaluated where it is named."""
    words = ["--do_eval", "--generate_num", "4", *NO_DROPOUT]
    trained = tune(*words, *more)[0]
    results = tmp_path / "out" / "eval_results.json"
    stored = results.read_text()
    assert "trained in" not in capsys.readouterr().out
    again = tune(*words, *more, "--do_train", "0")[0]
    assert again["eval_loss"] == pytest.approx(trained["eval_loss"], abs=1e-6)
    assert f"trained in {tmp_path / 'out'} is evaluated" in capsys.readouterr().out
    unnamed = [w for w in BASE if w != "--do_train"] + words
    argv = [*unnamed, "--dataset_name_or_path", examples, "--output_dir", tmp_path / "out"]
    assert sft(parse_sft([str(word) for word in argv], {}))["eval_loss"] == pytest.approx(
        trained["eval_loss"], abs=1e-6
    )
    assert json.loads(results.read_text())["eval_loss"] == pytest.approx(json.loads(stored)["eval_loss"], abs=1e-6)
    stored = results.read_text()
    other = shutil.copytree(model, tmp_path / "other")
    capsys.readouterr()
    base = tune(*words, "--do_train", "0", base=other)[0]
    assert base["eval_loss"] == pytest.approx(by_hand(model, ROWS[:5])[0], abs=1e-5)
    out = capsys.readouterr().out
    assert f"{other} is evaluated, not the model trained in" in out and "eval_results-2.json" in out
    assert results.read_text() == stored
    assert json.loads((tmp_path / "out" / "eval_results-2.json").read_text())["eval_loss"] == base["eval_loss"]
    assert (tmp_path / "out" / "predictions-2").is_dir()


def test_adapters_of_layers_that_the_model_lacks_are_not_merged(tune, model, tmp_path):
    """The base has one layer, the adapters are of two: PEFT alone would pass over the second."""
    tune("--lora")
    shallow = tmp_path / "shallow"
    shutil.copytree(model, shallow)
    config = GPT2Config.from_pretrained(model)
    config.n_layer = 1
    GPT2LMHeadModel(config).save_pretrained(shallow)
    done = run_script("merge_lora", "--lora_path", tmp_path / "out", "--model_name_or_path", shallow,
                      "--output_path", tmp_path / "merged")  # fmt: skip
    assert done.returncode == 1 and "of another model: the model has no place for" in done.stderr
    assert not (tmp_path / "merged").exists()


def test_adapters_to_start_from_bring_their_rank_scale_and_places(tune, model, tmp_path):
    """What is not said is theirs; what is said otherwise, or is of another model, is refused before data is read."""
    tune("--lora", "--lora_rank", 2, "--lora_alpha", 5, "--lora_target_modules", "c_attn", "c_fc")
    words = [*BASE, "--dataset_name_or_path", "nowhere", "--output_dir", "o", "--lora_path", str(tmp_path / "out")]
    run = parse_sft([*words, "--model_name_or_path", str(model)], {})
    assert (run.lora.lora_rank, run.lora.lora_alpha, run.lora.lora_target_modules) == (2, 5.0, ["c_attn", "c_fc"])
    assert run.sources["lora_rank"].text.endswith("out/adapter_config.json")
    for more, says in (
        (("--lora_rank", "4"), "lora_rank 4: the adapters in .*out have 2; leave the flag out"),
        (("--lora_alpha", "4"), "lora_alpha 4: the adapters in .*out have 5; leave the flag out"),
        (("--lora_target_modules", "c_attn"), "lora_target_modules c_attn: the adapters in .*out have c_attn c_fc"),
    ):
        with pytest.raises(UsageError, match=says):
            parse_sft([*words, "--model_name_or_path", str(model), *more], {})
    for name, size, says in (("wide", 64, "is 32 wide|this model is 64 wide"), ("flat", 32, "they have a layer 1")):
        (tmp_path / name).mkdir()
        config = {"n_embd": size, "n_layer": 1, "n_head": 2, "n_positions": 48, "vocab_size": 330}
        (tmp_path / name / "config.json").write_text(json.dumps(config))
        with pytest.raises(GptlmError, match=says):
            parse_sft([*words, "--model_name_or_path", str(tmp_path / name)], {})
    settings = json.loads((tmp_path / "out" / "adapter_config.json").read_text())
    (tmp_path / "out" / "adapter_config.json").write_text(json.dumps(settings | {"use_rslora": True}))
    assert parse_sft([*words, "--model_name_or_path", str(model)], {}).lora.use_rslora
    (tmp_path / "out" / "adapter_config.json").write_text(json.dumps(settings | {"lora_bias": True}))
    with pytest.raises(UsageError, match="its adapters have lora_bias = True"):
        parse_sft([*words, "--model_name_or_path", str(model)], {})


def test_cut_texts_are_counted_and_references_stay_whole(tune, tmp_path, capfd):
    """Of each kind by hand: "the cat sat " x 9 is longer than 20 tokens, its answer longer than 6; "on" is neither."""
    rows = [{"src": "the cat sat " * 9, "tgt": "on a mat " * 5 + "old"}] * 2 + [{"src": "on ", "tgt": "on"}] * 4
    (tmp_path / "cut.json").write_text(json.dumps(rows))
    tune(
        "--src_length", 20, "--tgt_length", 6, "--do_eval", "--eval_dataset_name_or_path", tmp_path / "cut.json",
        data=tmp_path / "cut.json",
    )  # fmt: skip
    said = "".join(capfd.readouterr())
    assert "2 of 6 train prompts are truncated to --src_length" in said
    assert "2 of 6 train responses are truncated to --tgt_length or --max_length: the model does not learn" in said
    (path,) = (tmp_path / "out" / "predictions").glob("eval-step-6.jsonl")
    references = [json.loads(line)["reference"] for line in path.read_text().splitlines()]
    assert references == [row["tgt"] for row in rows]


@pytest.mark.parametrize("name", ["model.safetensors", "config.json", "tokenizer.json"])
def test_a_file_cut_in_half_is_named_before_data_is_read(tune, model, tmp_path, name):
    shutil.copytree(model, tmp_path / "half")
    content = (model / name).read_bytes()
    (tmp_path / "half" / name).write_bytes(content[: len(content) // 2])
    with pytest.raises(GptlmError, match=rf"half/{name} is (damaged|not valid JSON)"):
        tune(base=tmp_path / "half", data="no/where")
    if name != "config.json":
        with pytest.raises(GptlmError, match=rf"half/{name} is damaged"):
            load_for_inference(str(tmp_path / "half"), torch.device("cpu"))


def test_an_absurd_rank_is_refused_and_one_mistake_gives_one_message(model):
    argv = [*BASE, "--model_name_or_path", str(model), "--dataset_name_or_path", "d", "--output_dir", "o", "--lora"]
    for words, says in (
        (["--lora_rank", "33"], "--lora_rank 33: the matrices have rank 32; give less"),
        (["--lora_rank", "0"], "--lora_rank 0: expected at least 1"),
    ):
        with pytest.raises(UsageError) as caught:
            parse_sft([*argv, *words], {})
        assert str(caught.value) == says


@pytest.mark.parametrize("content", ["[]", json.dumps([{"src": "the cat", "tgt": " "}] * 3)])
def test_a_named_evaluation_file_without_examples_is_an_error(tune, tmp_path, content):
    """It is never replaced by training examples; neither is the only one that can be evaluated."""
    (tmp_path / "empty.json").write_text(content)
    with pytest.raises(GptlmError, match=r"no examples to evaluate on in .*empty.json; give another file"):
        tune("--do_eval", "--eval_dataset_name_or_path", tmp_path / "empty.json")
    with pytest.raises(GptlmError, match=r"no examples to evaluate on in .*empty.json"):
        tune("--do_train", 0, "--do_eval", data=tmp_path / "empty.json")


def test_an_unusable_dev_file_in_the_folder_is_named(tune, tmp_path, capfd):
    (tmp_path / "train.json").write_text(json.dumps(ROWS))
    (tmp_path / "dev.json").write_text("[]")
    metrics, _ = tune("--do_eval", "--max_steps", 1, "--generate_num", 0, data=tmp_path)
    said = "".join(capfd.readouterr())
    assert "dev.json has no example with a response: training examples are held out instead" in said
    assert f"train: {len(ROWS) - 1} examples of {tmp_path}/train.json" in said and "eval_loss" in metrics
    with pytest.raises(GptlmError, match=r"no examples to evaluate on in .*dev.json"):
        tune("--do_train", 0, "--do_eval", data=tmp_path)


def test_evaluation_data_is_never_trained_on(tune, model, tmp_path, capfd):
    """A folder with a file for evaluation alone serves evaluation; several files for one use are named."""
    folder = tmp_path / "d"
    folder.mkdir()
    (folder / "dev.json").write_text(json.dumps(ROWS[:5]))
    with pytest.raises(GptlmError, match=r"has dev.json but no train.json"):
        tune(data=folder)
    few = ["--do_train", 0, "--do_eval", "--generate_num", 0]
    assert tune(*few, data=folder)[0]["eval_loss"] == pytest.approx(by_hand(model, ROWS[:5])[0], abs=1e-5)
    (folder / "valid.jsonl").write_text(json.dumps(ROWS[7]))
    named = ["--eval_dataset_name_or_path", folder]
    assert tune(*few, *named)[0]["eval_loss"] == pytest.approx(by_hand(model, ROWS[:5])[0], abs=1e-5)
    assert "dev.json is read; valid.jsonl in the same folder: ignored" in "".join(capfd.readouterr())


def test_an_id_beyond_the_vocabulary_names_the_example(tune, model, tmp_path, capfd):
    """The third example alone has the word; the ids of the tokenizer have a gap before it."""
    shutil.copytree(model, tmp_path / "gap")
    content = json.loads((model / "tokenizer.json").read_text())
    content["model"]["vocab"]["\u0120cat"] = 5000
    (tmp_path / "gap" / "tokenizer.json").write_text(json.dumps(content))
    rows = [{"src": "on a ", "tgt": "mat"}, {"src": "on a ", "tgt": "dogs"}, {"src": "the cat ", "tgt": "sat"}]
    (tmp_path / "d.json").write_text(json.dumps(rows))
    with pytest.raises(GptlmError, match=r"d.json, example 3 \(prompt 'the cat '\): the tokenizer gives id 5000"):
        tune(data=tmp_path / "d.json", base=tmp_path / "gap")


def test_rows_that_the_model_lacks_are_named_and_saved_with_adapters(tune, model, tmp_path, capfd):
    """A tokenizer of one entry more than the model has: a new row for it, which the adapters bring along."""
    folder = tmp_path / "more"
    tokenizer = AutoTokenizer.from_pretrained(model)
    entries = len(tokenizer)
    tokenizer.add_tokens("<user>")
    tokenizer.save_pretrained(folder)
    (tmp_path / "d.json").write_text(json.dumps([{"src": "<user> cat ", "tgt": "dogs"}] * 4))
    tune("--lora", "--tokenizer_name_or_path", folder, data=tmp_path / "d.json")
    said = f"has {entries + 1} entries, the model's embedding {entries} rows: 1 new rows start from random values"
    assert said in "".join(capfd.readouterr())
    assert json.loads((tmp_path / "out/adapter_config.json").read_text())["trainable_token_indices"] == {
        "wte": [entries]
    }


def test_flags_that_need_training_without_do_train(model):
    """As in transformers, --do_eval alone trains nothing."""
    argv = ["--model_name_or_path", str(model), "--dataset_name_or_path", "d", "--output_dir", "o", "--do_eval"]
    typed = [*argv, "--max_steps", "40", "--learning_rate", "1e-3"]
    says = "nothing is trained, although --max_steps, --learning_rate is given: --do_eval without --do_train only "
    says += "evaluates"
    assert says in parse_sft(typed, {}).notes
    assert not any("nothing is trained" in note for words in (["--do_train", "0"], ["--do_train"])
                   for note in parse_sft([*typed, *words], {}).notes)  # fmt: skip
    with pytest.raises(UsageError, match="--merge_weights merges the adapters that a run trains, this one trains none"):
        parse_sft([*argv, "--lora", "--merge_weights"], {})
    words = ["--do_train", "--do_eval", "0", "--eval_dataset_name_or_path", "x.json"]
    says = "--eval_dataset_name_or_path x.json has no effect: do_eval is off"
    assert says in parse_sft([*argv, *words], {}).notes


def test_adapters_to_start_from_have_the_rows_of_the_run_s_added_tokens(tune, model, tmp_path):
    """More, none or other tokens than the adapters': one sentence, where a row would be missing or of another token."""
    tune("--lora", "--max_steps", 1, "--additional_special_tokens", "<user>")
    out = tmp_path / "out"
    tune("--lora", "--max_steps", 1, output="plain")
    start = ("--max_steps", 1, "--lora_path")
    tune(*start, out, output="same")
    for words, there, here in (
        ((out, "--additional_special_tokens", "<bot>"), "<user>", "<user> <bot>"),
        ((out, "--tokenizer_name_or_path", model, "--additional_special_tokens", "<bot>"), "<user>", "<bot>"),
        ((out, "--tokenizer_name_or_path", model), "<user>", r"\(none\)"),
        ((tmp_path / "plain", "--additional_special_tokens", "<bot>"), r"\(none\)", "<bot>"),
    ):
        with pytest.raises(GptlmError, match=f"rows for the added tokens {there}, the run adds {here}: give the same"):
            tune(*start, *words, output="other")
    assert not (tmp_path / "other").exists()


def test_adapters_with_added_tokens_in_plain_peft(tune, model, tmp_path, capfd):
    """As the folder's README and the log say: resize, then load; the logits are those of our own way to the model."""
    (tmp_path / "d.json").write_text(json.dumps([{"src": f"<user> {word} ", "tgt": f"{word} <bot>"} for word in WORDS]))
    tune("--lora", "--additional_special_tokens", "<user>", "<bot>", data=tmp_path / "d.json")
    out = tmp_path / "out"
    tokenizer = AutoTokenizer.from_pretrained(out)
    call = f"model.resize_token_embeddings({len(tokenizer)})"
    assert f"plain PEFT needs {call} before PeftModel.from_pretrained" in "".join(capfd.readouterr())
    card = ModelCard.load(out / "README.md")
    facts = card.data.to_dict()
    assert call in card.text and facts["library_name"] == "peft" and "base_model" not in facts  # a local folder
    stock = AutoModelForCausalLM.from_pretrained(model)
    stock.resize_token_embeddings(len(tokenizer))
    stock = peft.PeftModel.from_pretrained(stock, out).eval()
    ours, _ = load_for_inference(str(model), torch.device("cpu"), lora_path=str(out))
    ids = torch.tensor([tokenizer("<user> cat dogs <bot>")["input_ids"]])
    with torch.no_grad():
        assert torch.allclose(stock(ids).logits, ours(ids).logits, atol=1e-5)
    (out / "README.md").write_text("my own words")
    write_card(out, str(model), None)
    assert (out / "README.md").read_text() == "my own words"


@pytest.mark.parametrize("token", ["", '["<a>", "<b>"]'])
def test_added_tokens_are_words(model, token):
    argv = ["--model_name_or_path", str(model), "--dataset_name_or_path", "d", "--output_dir", "o"]
    with pytest.raises(UsageError, match="additional_special_tokens .* is not a token; separate tokens with blanks"):
        parse_sft([*argv, "--additional_special_tokens", token], {})


def test_a_place_for_the_merged_model_is_found_out_before_training(tune, tmp_path):
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "merged").write_text("")
    with pytest.raises(GptlmError, match="merged is a file, not a folder"):
        tune("--lora", "--merge_weights", data="no/where")


def test_added_tokens_are_named(tune, capfd):
    tune("--additional_special_tokens", "a", "<user>", "--max_steps", 1)
    said = "".join(capfd.readouterr())
    assert "1 tokens are new in the vocabulary: <user>" in said and "the vocabulary already has a" in said


def test_a_file_of_weights_is_no_model(model):
    with pytest.raises(UsageError, match="model.safetensors is a file of weights; give the folder that holds it"):
        parse_sft(["--model_name_or_path", str(model / "model.safetensors"), "--output_dir", "o"], {})


def test_a_whole_model_with_added_tokens_resumes(tune, tmp_path):
    """Its vocabulary is larger than that of the model that it started from."""
    words = [*NO_DROPOUT, "--additional_special_tokens", "<x>"]
    _, whole = tune(*words)
    _, resumed = tune(*words, "--resume_from_checkpoint", tmp_path / "out/checkpoint-3", output="again")
    assert losses(resumed) == losses(whole)
    with pytest.raises(GptlmError, match=r"another tokenizer \(only there: <x>\)"):
        tune(*NO_DROPOUT)


def test_what_stands_where_by_products_go_costs_no_training(tune, tmp_path):
    """A file where the folder of predictions goes, a folder where the adapters' README goes."""
    (tmp_path / "out" / "README.md").mkdir(parents=True)
    (tmp_path / "out" / "predictions").write_text("mine")
    metrics, _ = tune("--lora", "--do_eval", "--max_steps", 3, "--generate_num", 1)
    assert (tmp_path / "out" / "adapter_model.safetensors").is_file() and "eval_rouge1" in metrics
    assert list((tmp_path / "out" / "predictions-2").glob("*.jsonl"))
    assert list((tmp_path / "out").glob("*results-2.json"))
    assert (tmp_path / "out" / "predictions").read_text() == "mine"
