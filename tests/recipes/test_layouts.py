"""Tensor, pipeline and sequence parallelism against an independent single-process loop on stock GPT-2.

All runs of two and of four processes happen in one launched session each; the tests look at what they left.
"""

import pytest
import torch
from transformers import AutoModelForCausalLM, GPT2Config, GPT2LMHeadModel

from gptlm.data.cache import IndexCache
from gptlm.data.splits import build_split, open_corpora
from tests.recipes.test_pretrain import reference_run
from tests.recipes.test_sharding import NO_DROPOUT, losses, norms, run_session

STEPS, SAVED = 6, 3
BASE = (
    f"--max_seq_length 16 --max_steps {STEPS} --eval_iters 2 --logging_steps 1 --save_steps {SAVED} --eval_steps {SAVED} "
    "--learning_rate 1e-2 --min_learning_rate 1e-3 --split 80,10,10 --warmup_steps 2 --weight_decay 0.1 --do_train "
    "--do_eval --device cpu --disable_tqdm --report_to none --continue_training --global_batch_size 4"
).split()


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """A stock GPT-2 of 4 layers and 4 heads with random weights."""
    folder = tmp_path_factory.mktemp("layouts") / "model"
    torch.manual_seed(3)
    config = GPT2Config(
        vocab_size=512, n_positions=16, n_embd=32, n_layer=4, n_head=4, bos_token_id=0, eos_token_id=0
    )
    GPT2LMHeadModel(config).save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def wanted(model, corpus_folder):
    """Losses and final weights of the independent loop: 4 samples a step."""
    return reference_run(model, corpus_folder / "mmap", STEPS, 1, 4)


LAYOUTS = {  # words, for two processes
    "tp2": "--tensor_parallel_degree 2 --per_device_train_batch_size 2",
    "tp2 sp": "--tensor_parallel_degree 2 --sequence_parallel 1 --per_device_train_batch_size 2",
    "pp2": "--pipeline_parallel_degree 2 --per_device_train_batch_size 1",
    "pp2 few": "--pipeline_parallel_degree 2 --per_device_train_batch_size 4",
    "pp2 v2": "--pipeline_parallel_degree 2 --virtual_pp_degree 2 --per_device_train_batch_size 1",
}


def cases_of(layouts, model, data, folder):
    base = [*BASE, *NO_DROPOUT, "--input_dir", data, "--model_name_or_path", model, "--per_device_eval_batch_size", 2]
    return [(name, [*base, *words.split(), "--output_dir", folder / name]) for name, words in layouts.items()]


@pytest.fixture(scope="module")
def two(model, corpus_folder, tmp_path_factory):
    folder = tmp_path_factory.mktemp("two")
    return folder, run_session(2, cases_of(LAYOUTS, model, corpus_folder / "mmap", folder), folder)


@pytest.mark.distributed
@pytest.mark.parametrize("name", LAYOUTS)
def test_two_processes_train_like_one(two, wanted, name):
    folder, results = two
    assert losses(results[name]) == pytest.approx(wanted[0], abs=1e-5)
