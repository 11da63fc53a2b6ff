"""Fine-tuning on two processes: DDP and ZeRO 1-3, whole models and adapters, train and evaluate like one process.

All runs happen in one launched session (see session.py); the tests look at what it left.
"""

import json
import os
import subprocess
import sys

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from gptlm.checkpoint.folder import read
from tests.conftest import ROOT, run_script
from tests.recipes.test_sft import BASE, NO_DROPOUT, ROWS, examples, model  # noqa: F401 - fixtures
from tests.recipes.test_sharding import TINY, losses, norms, run_session

pytestmark = pytest.mark.distributed
STRATEGIES = ("ddp", "stage1", "stage2", "stage3")
COMPILED = ("ddp lora", "stage2 whole", "stage3 whole", "stage3 lora")
KINDS = {"whole": [], "lora": ["--lora"], "packed": ["--zero_padding", "--max_length", "24"]}


NINE_BATCHES = ["--per_device_train_batch_size", 1, "--gradient_accumulation_steps", 2]  # on two processes: 4


def nine_examples(folder):
    """The words for two epochs of nine examples, whose files are written into `folder`."""
    (folder / "nine").mkdir(exist_ok=True)
    for name, rows in (("train", ROWS[:9]), ("dev", ROWS[:5])):
        (folder / "nine" / f"{name}.json").write_text(json.dumps(rows))
    return ["--dataset_name_or_path", folder / "nine", "--max_steps", -1, "--num_train_epochs", 2]


@pytest.fixture(scope="module")
def session(model, examples, tmp_path_factory):  # noqa: F811
    folder = tmp_path_factory.mktemp("sft-session")
    zero3 = {"zero_optimization": {"stage": 3, "stage3_prefetch_bucket_size": 0, **TINY}}
    (folder / "zero3.json").write_text(json.dumps(zero3))
    sharding = {"ddp": [], "stage1": ["--sharding", "stage1"], "stage2": ["--sharding", "stage2"]}
    sharding["stage3"] = ["--deepspeed", folder / "zero3.json"]
    data = ["--model_name_or_path", model, "--dataset_name_or_path", examples, "--do_eval", "--generate_num", 3]
    words = [*BASE, *NO_DROPOUT, *data, "--tgt_length", 8, "--per_device_train_batch_size", 2]
    quiet = [*words, "--eval_with_do_generation", 0]  # where no test reads what was generated
    cases = []
    for name in STRATEGIES:
        for kind, more in KINDS.items():
            cases.append((f"{name} {kind}", [*words, *sharding[name], *more]))
        saved = folder / f"{name} lora" / "checkpoint-3"
        cases.append((f"{name} again", [*quiet, *sharding[name], "--lora", "--resume_from_checkpoint", saved]))
        cases.append((f"{name} nine", [*quiet, *sharding[name], *nine_examples(folder), *NINE_BATCHES]))
        half = ["--bf16", "--fp16_opt_level", "O2"]
        if name == "ddp":
            cases.append(("ddp grouped", [*cases[-1][1], "--group_by_length", "--pad_to_multiple_of", 8]))
        cases.append((f"{name} half", [*quiet, *sharding[name], "--lora", *half, "--recompute", 1]))
    for name, kind in map(str.split, COMPILED):
        cases.append((f"{name} {kind} compiled", [*quiet, *sharding[name], *KINDS[kind], "--torch_compile"]))
    saved = folder / "stage3 lora" / "checkpoint-3"
    cases.append(("crosswise", [*quiet, "--lora", "--resume_from_checkpoint", saved]))
    cases.append(("merged", [*quiet, *sharding["stage3"], "--lora", "--merge_weights", "--max_steps", 3]))
    return folder, run_session(2, [(name, [*w, "--output_dir", folder / name]) for name, w in cases], folder)


@pytest.fixture(scope="module")
def alone(model, examples, tmp_path_factory):  # noqa: F811
    """The same in one process with twice the micro-batch."""
    from gptlm.commands.sft import parse_sft
    from gptlm.recipes.sft.run import sft

    def run(*more):
        folder = tmp_path_factory.mktemp("alone")
        words = [*BASE, *NO_DROPOUT, "--model_name_or_path", model, "--dataset_name_or_path", examples, "--do_eval"]
        words += ["--generate_num", 3, "--tgt_length", 8, "--output_dir", folder, *more]
        metrics = sft(parse_sft([str(word) for word in words], {}))
        history = json.loads((folder / "trainer_state.json").read_text())["log_history"]
        predictions = (folder / "predictions" / "eval-step-6.jsonl").read_text()
        return {"metrics": metrics, "history": history, "predictions": predictions}

    return run


@pytest.mark.parametrize("kind", KINDS)
def test_every_strategy_trains_and_evaluates_like_one_process(session, alone, kind):
    """Answers of different lengths, five rows for evaluation on two processes, generation: all as in one."""
    folder, results = session
    wanted = alone(*KINDS[kind])
    for name in STRATEGIES:
        found = results[f"{name} {kind}"]
        assert losses(found) == pytest.approx(losses(wanted), abs=1e-5), name
        assert norms(found) == pytest.approx(norms(wanted), abs=1e-5), name
        for key in ("eval_loss", "eval_accuracy", "eval_bleu4", "eval_rougel"):
            assert found["metrics"][key] == pytest.approx(wanted["metrics"][key], abs=1e-5), (name, key)
        predictions = (folder / f"{name} {kind}" / "predictions" / "eval-step-6.jsonl").read_text()
        assert predictions == wanted["predictions"], name


def test_nine_examples_are_nine_on_any_number_of_processes(session, alone, tmp_path):
    """Steps of 4, 4 and 1: in the last one a process has no sample, and all have a micro-batch without any."""
    folder, results = session
    wanted = alone(*nine_examples(tmp_path))
    assert len(losses(wanted)) == 6
    grouped = alone(*nine_examples(tmp_path), "--group_by_length")
    assert losses(results["ddp grouped"]) == pytest.approx(losses(grouped), abs=1e-5)
    for name in STRATEGIES:
        found = results[f"{name} nine"]
        assert losses(found) == pytest.approx(losses(wanted), abs=1e-5), name
        assert norms(found) == pytest.approx(norms(wanted), abs=1e-5), name
        assert read(folder / f"{name} nine" / "checkpoint-6").manifest.consumed_samples == 18, name
        assert found["metrics"]["eval_loss"] == pytest.approx(wanted["metrics"]["eval_loss"], abs=1e-5), name


def test_compiled_blocks_train_alike(session):
    for name in COMPILED:
        found, wanted = session[1][f"{name} compiled"], session[1][f"ddp {name.split()[1]}"]
        assert losses(found) == pytest.approx(losses(wanted), abs=1e-5), name
        assert norms(found) == pytest.approx(norms(wanted), abs=1e-5), name
    said = (session[0] / "log.txt").read_text()
    assert said.count("--torch_compile has no effect: ZeRO stage 3 gathers each weight separately here") == 1
    assert said.count("blocks and loss are compiled") == len(COMPILED) - 1


def test_the_share_of_the_adapters_is_said_alike(session):
    """Under stage 3, too, where a process holds next to nothing of the model."""
    said = (session[0] / "log.txt").read_text()
    assert len({line.partition("adapters: ")[2] for line in said.splitlines() if "parameters are trained" in line}) == 1


@pytest.mark.parametrize("name", STRATEGIES)
def test_adapters_resume(session, name):
    folder, results = session
    assert losses(results[f"{name} again"]) == losses(results[f"{name} lora"])
    a, b = (load_file(folder / run / "adapter_model.safetensors") for run in (f"{name} again", f"{name} lora"))
    assert a.keys() == b.keys() and all(torch.equal(a[key], b[key]) for key in a)
    assert losses(results["crosswise"]) == pytest.approx(losses(results["stage3 lora"]), abs=2e-6)


def test_half_precision_with_recomputation(session):
    folder, results = session
    for name in STRATEGIES:
        assert losses(results[f"{name} half"]) == pytest.approx(losses(results["ddp lora"]), abs=2e-2), name
    stored = load_file(folder / "stage3 half" / "adapter_model.safetensors")
    assert all(value.dtype == torch.bfloat16 for value in stored.values())


def test_adapters_trained_in_shards_are_merged(session):
    folder, _ = session
    assert AutoModelForCausalLM.from_pretrained(folder / "merged" / "merged").config.n_layer == 2


def test_the_deepspeed_launcher_and_both_spellings_of_the_rank(model, examples, tmp_path):  # noqa: F811
    """`deepspeed scripts/finetune_generation.py --lora ...` hands every process --local_rank."""
    words = [*BASE, "--model_name_or_path", model, "--dataset_name_or_path", examples, "--lora", "--max_steps", "2"]
    command = [sys.executable, "-m", "deepspeed.launcher.runner", "--num_gpus", "2", "--master_port", "29711"]
    command += [ROOT / "scripts" / "finetune_generation.py", *words, "--output_dir", tmp_path / "two"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "DS_ACCELERATOR": "cpu"}
    done = subprocess.run([str(w) for w in command], env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-2000:]
    assert (tmp_path / "two" / "adapter_model.safetensors").is_file()
    for spelling in (["--local_rank", "0"], ["--local-rank=0"]):
        done = run_script(
            "finetune_generation", *spelling, *words, "--output_dir", tmp_path / spelling[0], cwd=tmp_path
        )
        assert done.returncode == 0, done.stderr


def test_there_are_rows_for_everyone():
    assert len({len(row["tgt"]) for row in ROWS}) > 3
