"""A run that is killed again and again, mostly while it saves, ends with the weights of one that was not."""

import os
import random
import subprocess
import sys
import time

import psutil
import pytest
from transformers import AutoModelForCausalLM

from tests.conftest import ROOT, run_script

FORMS = {"hf": (20, []), "sharded": (30, ["--checkpoint_format", "sharded", "--async_save"])}  # kills and flags


@pytest.mark.slow
@pytest.mark.parametrize("form", FORMS)
def test_kills_at_random_moments_change_nothing(tiny_model, corpus_folder, tmp_path, form):
    kills, flags = FORMS[form]
    words = [
        *flags,
        *("--model_name_or_path", tiny_model, "--continue_training", "--input_dir", corpus_folder / "mmap"),
        *("--max_seq_length", 16, "--max_steps", 400, "--save_steps", 1, "--save_total_limit", 2),
        *("--per_device_train_batch_size", 2, "--split", "1,0,0", "--device", "cpu", "--disable_tqdm"),
        *("--hidden_dropout_prob", 0.1, "--attention_probs_dropout_prob", 0.1, "--report_to", "none"),
    ]
    whole = run_script("run_pretrain", *words, "--output_dir", tmp_path / "whole")
    assert whole.returncode == 0, whole.stderr
    command = [sys.executable, str(ROOT / "scripts" / "run_pretrain.py"), *map(str, words)]
    output = tmp_path / "killed"
    generator = random.Random(0)
    interrupted = 0
    for _ in range(kills):
        process = subprocess.Popen(
            [*command, "--output_dir", str(output)],
            env={**os.environ, "OMP_NUM_THREADS": "1"},
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        before = {path.name for path in output.glob("checkpoint-*")}
        deadline = time.monotonic() + 60
        while {path.name for path in output.glob("checkpoint-*")} == before and time.monotonic() < deadline:
            time.sleep(0.005)
        time.sleep(generator.uniform(0, 0.4))
        process.kill()
        interrupted += process.wait() < 0
    assert interrupted >= kills // 2  # else the runs ended before they were killed
    last = run_script("run_pretrain", *words, "--output_dir", output)
    assert last.returncode == 0 and "resuming from" in last.stdout, last.stderr
    a, b = (AutoModelForCausalLM.from_pretrained(folder).state_dict() for folder in (tmp_path / "whole", output))
    assert all(a[name].equal(b[name]) for name in a)
    assert not list(output.glob(".checkpoint-*"))


@pytest.mark.slow
@pytest.mark.parametrize("form", FORMS)
def test_a_rank_killed_while_two_save_leaves_no_checkpoint_that_looks_whole(tiny_model, corpus_folder, tmp_path, form):
    """ZeRO stage 2 on two processes; the launcher ends with the killed one, and the same command goes on."""
    words = [
        *FORMS[form][1],
        *("--model_name_or_path", tiny_model, "--continue_training", "--input_dir", corpus_folder / "mmap"),
        *(
            "--max_seq_length",
            16,
            "--max_steps",
            60,
            "--save_steps",
            1,
            "--save_total_limit",
            2,
            "--sharding",
            "stage2",
        ),
        *("--per_device_train_batch_size", 2, "--split", "1,0,0", "--device", "cpu", "--disable_tqdm"),
        *("--hidden_dropout_prob", 0.1, "--attention_probs_dropout_prob", 0.1, "--report_to", "none"),
    ]
    whole = run_script("run_pretrain", *words, "--output_dir", tmp_path / "whole", processes=2)
    assert whole.returncode == 0, whole.stderr
    output = tmp_path / "killed"
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2"]
    command = [*launcher, str(ROOT / "scripts" / "run_pretrain.py"), *map(str, words), "--output_dir", str(output)]
    generator = random.Random(1)
    for kill in range(5):
        process = subprocess.Popen(
            command, env={**os.environ, "OMP_NUM_THREADS": "1"}, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        )
        before = {path.name for path in output.glob("checkpoint-*")}
        deadline = time.monotonic() + 90
        while {path.name for path in output.glob("checkpoint-*")} == before and time.monotonic() < deadline:
            time.sleep(0.005)
        time.sleep(generator.uniform(0, 0.2))
        ranks = psutil.Process(process.pid).children()
        ranks[kill % 2].kill()
        assert process.wait(timeout=120) != 0
    last = run_script("run_pretrain", *words, "--output_dir", output, processes=2)
    assert last.returncode == 0 and "resuming from" in last.stdout, last.stderr
    a, b = (AutoModelForCausalLM.from_pretrained(folder).state_dict() for folder in (tmp_path / "whole", output))
    assert all(a[name].equal(b[name]) for name in a)
    assert not list(output.glob(".checkpoint-*"))
