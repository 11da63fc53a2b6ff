"""A finished run that is started again, in each strategy and layout: the same model, and the same evaluation.

All runs happen in one launched session (see session.py); the tests look at what it left.
"""

import json
import shutil

import pytest
import torch
from safetensors.torch import load_file

from gptlm.commands.pretrain import parse_pretrain
from gptlm.recipes.pretrain.run import pretrain
from tests.recipes.test_sft import BASE as TUNE
from tests.recipes.test_sft import examples, model  # noqa: F401 - fixtures
from tests.recipes.test_sharding import losses, run_session

pytestmark = pytest.mark.distributed
BASE = (
    "--max_seq_length 16 --per_device_train_batch_size 2 --per_device_eval_batch_size 2 --max_steps 6 --eval_iters 2 "
    "--logging_steps 1 --save_steps 3 --eval_steps 3 --learning_rate 1e-2 --min_learning_rate 1e-3 --split 80,10,10 "
    "--do_train --do_eval --device cpu --disable_tqdm --report_to none --continue_training"
).split()
BEST = "--load_best_model_at_end --learning_rate 1 --lr_scheduler_type constant_with_warmup --warmup_steps 6".split()
RUNS = {
    "stage1": ["--sharding", "stage1"],
    "stage2 O2": "--sharding stage2 --bf16 --fp16_opt_level O2".split(),
    "stage2 best": ["--sharding", "stage2", *BEST],
    "stage3": ["--sharding", "stage3"],
}
LAYOUTS = {  # last: DeepSpeed keeps their process groups
    "tp2": ["--tensor_parallel_degree", "2"],
    "pp2 stage1": ["--pipeline_parallel_degree", "2", "--sharding", "stage1"],
}
TUNED = {"sft stage2": ["--sharding", "stage2"], "lora stage1": ["--sharding", "stage1", "--lora"]}


@pytest.fixture(scope="module")
def session(tiny_model, corpus_folder, model, examples, tmp_path_factory):  # noqa: F811
    """The folder, the results, and a copy of each run's folder between its two starts."""
    folder = tmp_path_factory.mktemp("again")
    start = [*BASE, "--input_dir", corpus_folder / "mmap", "--model_name_or_path", tiny_model]
    tune = [*TUNE, "--model_name_or_path", model, "--dataset_name_or_path", examples, "--do_eval"]
    cases = [(name, [*start, *words]) for name, words in RUNS.items()]
    cases += [(name, [*tune, *words]) for name, words in TUNED.items()]
    cases += [(name, [*start, *words]) for name, words in LAYOUTS.items()]
    cases = [(name, [*words, "--output_dir", folder / name]) for name, words in cases]
    first = run_session(2, cases, folder)
    shutil.copytree(folder, folder / "first")
    return folder, first, run_session(2, cases, folder)


@pytest.mark.parametrize("name", [*RUNS, *TUNED, *LAYOUTS])
def test_a_finished_run_is_evaluated_again_with_the_same_result(session, name):
    folder, first, again = session
    assert "error" not in again[name], again[name]
    found, wanted = (
        {key: value for key, value in results[name]["metrics"].items() if key in ("eval_loss", "test_loss")}
        for results in (first, again)
    )
    assert found == pytest.approx(wanted, abs=1e-6) and "eval_loss" in found
    assert ("test_loss" in found) == (name not in TUNED)
    assert losses(again[name]) == losses(first[name])
    file = "adapter_model.safetensors" if "lora" in name else "model.safetensors"
    now, before = load_file(folder / name / file), load_file(folder / "first" / name / file)
    assert now.keys() == before.keys() and all(torch.equal(now[key], before[key]) for key in now)


def test_the_best_model_is_not_replaced_by_the_last(session):
    folder, _, _ = session
    state = json.loads((folder / "stage2 best" / "trainer_state.json").read_text())
    assert state["best_global_step"] == 3 and state["global_step"] == 6
    final, best, last = (
        (folder / "stage2 best" / name / "model.safetensors").read_bytes()
        for name in ("", "checkpoint-3", "checkpoint-6")
    )
    assert final == best != last


def test_the_best_model_of_one_process(tiny_model, corpus_folder, tmp_path):
    words = [*BASE, *BEST, "--input_dir", corpus_folder / "mmap", "--model_name_or_path", tiny_model]
    words += ["--output_dir", tmp_path, "--gradient_accumulation_steps", 2]
    found = [pretrain(parse_pretrain([str(word) for word in words], {})) for _ in range(2)]
    best = (tmp_path / "checkpoint-3" / "model.safetensors").read_bytes()
    assert (tmp_path / "model.safetensors").read_bytes() == best
    assert found[0]["eval_loss"] == pytest.approx(found[1]["eval_loss"], abs=1e-7)
