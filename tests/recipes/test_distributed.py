"""Two processes do what one does, and leave nothing behind."""

import json

import pytest
import torch
from transformers import AutoModelForCausalLM

from tests.conftest import run_script

pytestmark = pytest.mark.distributed


def words(tiny_model, corpus_folder, output, batch, accumulation, *more):
    return [
        *("--model_name_or_path", tiny_model, "--continue_training", "--input_dir", corpus_folder / "mmap"),
        *("--output_dir", output, "--max_seq_length", 16, "--max_steps", 5, "--logging_steps", 1, "--eval_steps", 5),
        *("--per_device_train_batch_size", batch, "--gradient_accumulation_steps", accumulation, "--eval_iters", 2),
        *("--learning_rate", "1e-2", "--split", "80,10,10", "--do_train", "--do_eval", "--device", "cpu"),
        *("--hidden_dropout_prob", 0, "--attention_probs_dropout_prob", 0, "--disable_tqdm", *more),
    ]


def history(output, key):
    entries = json.loads((output / "trainer_state.json").read_text())["log_history"]
    return [entry[key] for entry in entries if key in entry]


def test_two_processes_equal_one(tiny_model, corpus_folder, tmp_path):
    one, two = tmp_path / "one", tmp_path / "two"
    first = run_script("run_pretrain", *words(tiny_model, corpus_folder, one, 2, 2, "--per_device_eval_batch_size", 4))
    assert first.returncode == 0, first.stderr
    of_two = words(tiny_model, corpus_folder, two, 2, 1, "--per_device_eval_batch_size", 2, "--save_steps", 3)
    second = run_script("run_pretrain", *of_two, processes=2)
    assert second.returncode == 0, second.stderr
    assert history(two, "loss") == pytest.approx(history(one, "loss"), abs=1e-5)
    assert history(two, "eval_loss") == pytest.approx(history(one, "eval_loss"), abs=1e-5)
    assert history(two, "test_loss") == pytest.approx(history(one, "test_loss"), abs=1e-5)
    a, b = (AutoModelForCausalLM.from_pretrained(folder).state_dict() for folder in (one, two))
    for name in a:
        torch.testing.assert_close(a[name], b[name], rtol=0, atol=1e-4)
    assert second.stdout.count("global_step: 5,") == 1  # one process speaks
    # the newest checkpoint is damaged: both step back to the one before
    weights = two / "checkpoint-5" / "model.safetensors"
    content = bytearray(weights.read_bytes())
    content[-1] ^= 1
    weights.write_bytes(content)
    again = run_script("run_pretrain", *of_two, processes=2)
    assert again.returncode == 0 and again.stdout.count("the content of model.safetensors is not what was") == 1
    assert again.stdout.count("step 3, 12 samples consumed") == 1
    assert history(two, "loss") == pytest.approx(history(one, "loss"), abs=1e-5)
    # going on with one process from what two wrote
    more = words(tiny_model, corpus_folder, two, 2, 2, "--per_device_eval_batch_size", 4, "--max_steps", 7)
    third = run_script("run_pretrain", *more)
    assert third.returncode == 0 and "step 5, 20 samples consumed" in third.stdout, third.stderr


def test_a_bad_run_ends_every_process_with_a_sentence(tiny_model, corpus_folder, tmp_path):
    bad = words(tiny_model, corpus_folder, tmp_path / "bad", 2, 1, "--split", "1,0,0")
    result = run_script("run_pretrain", *bad, processes=2)
    assert result.returncode != 0 and result.stderr.count("valid split is empty") == 2
    flags = ["--pipeline_parallel_degree", "2", "--sharding", "stage3"]
    result = run_script("run_pretrain", *words(tiny_model, corpus_folder, tmp_path / "x", 2, 1, *flags), processes=2)
    assert result.returncode != 0 and "stage3 with" in result.stderr
    assert not (tmp_path / "x").exists()
