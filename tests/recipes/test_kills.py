"""A run that is killed again and again, mostly while it saves, ends with the weights of one that was not."""

import random
import subprocess
import sys
import time
from functools import partial

import pytest
from transformers import AutoModelForCausalLM

from gptlm.checkpoint import folder as checkpoint
from tests.conftest import ROOT
from tests.processes import DEEPSPEED, clean_environment, run, start, started_ranks, store_server

LAUNCHED = {"TORCHELASTIC_RESTART_COUNT": 0}
KILLS = 30
FORMS = {"hf": [], "sharded": ["--checkpoint_format", "sharded", "--async_save"]}


@pytest.mark.slow
@pytest.mark.parametrize("form", FORMS)
def test_kills_at_random_moments_change_nothing(tiny_model, corpus_folder, tmp_path, form):
    words = [
        *FORMS[form],
        *("--model_name_or_path", tiny_model, "--continue_training", "--input_dir", corpus_folder / "mmap"),
        *("--max_seq_length", 16, "--max_steps", 400, "--save_steps", 1, "--save_total_limit", 2),
        *("--per_device_train_batch_size", 2, "--split", "1,0,0", "--device", "cpu", "--disable_tqdm"),
        *("--hidden_dropout_prob", 0.1, "--attention_probs_dropout_prob", 0.1, "--report_to", "none"),
    ]
    output = tmp_path / "killed"
    command = [sys.executable, ROOT / "scripts" / "run_pretrain.py", *words, "--output_dir", output]
    whole = run([*command[:-1], tmp_path / "whole"], timeout=1500)
    assert whole.returncode == 0, whole.stderr
    generator = random.Random(0)
    interrupted = 0
    for _ in range(KILLS):
        before = {path.name for path in output.glob("checkpoint-*")}
        process = start(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        deadline = time.monotonic() + 200
        while {path.name for path in output.glob("checkpoint-*")} == before and time.monotonic() < deadline:
            time.sleep(0.005)
        time.sleep(generator.uniform(0, 0.4))
        process.kill()
        interrupted += process.wait() < 0
        found, skipped = checkpoint.newest(output)
        assert found is not None and not skipped, skipped
    assert interrupted >= KILLS // 2  # else the runs ended before they were killed
    last = run(command, timeout=1500)
    assert last.returncode == 0 and "resuming from" in last.stdout, last.stderr
    a, b = (AutoModelForCausalLM.from_pretrained(folder).state_dict() for folder in (tmp_path / "whole", output))
    assert all(a[name].equal(b[name]) for name in a)
    assert not list(output.glob(".checkpoint-*"))


@pytest.mark.slow
@pytest.mark.distributed
@pytest.mark.parametrize("form", FORMS)
def test_ranks_killed_while_two_save_leave_no_checkpoint_that_looks_whole(tiny_model, corpus_folder, tmp_path, form):
    """ZeRO stage 2 on two processes, of which one or the other or both are killed; the same command goes on."""
    words = [
        *FORMS[form],
        *("--model_name_or_path", tiny_model, "--continue_training", "--input_dir", corpus_folder / "mmap"),
        *("--max_seq_length", 16, "--max_steps", 250, "--save_steps", 1, "--save_total_limit", 2),
        *("--per_device_train_batch_size", 2, "--split", "1,0,0", "--device", "cpu", "--disable_tqdm"),
        *("--hidden_dropout_prob", 0.1, "--attention_probs_dropout_prob", 0.1, "--report_to", "none"),
        *("--sharding", "stage2", "--ddp_timeout", 60),
    ]
    output, generator, interrupted = tmp_path / "killed", random.Random(1), 0
    command = [sys.executable, ROOT / "scripts" / "run_pretrain.py", *words, "--output_dir", output]
    for kill in range(KILLS):
        begin = partial(start, command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, modules=DEEPSPEED)
        with store_server() as port, started_ranks(begin, clean_environment(**LAUNCHED, MASTER_PORT=port), 2) as ranks:
            before = {path.name for path in output.glob("checkpoint-*")}
            deadline = time.monotonic() + 200
            while {path.name for path in output.glob("checkpoint-*")} == before and time.monotonic() < deadline:
                time.sleep(0.005)
            time.sleep(generator.uniform(0, 0.4))
            killed = ranks if kill % 3 == 2 else [ranks[kill % 3]]
            for rank in killed:
                rank.kill()
            assert all(rank.wait(100) != 0 for rank in ranks)  # the other one ends, too
            interrupted += all(rank.wait() == -9 for rank in killed)
        found, skipped = checkpoint.newest(output)
        assert found is not None and not skipped, skipped
    assert interrupted >= KILLS * 2 // 3  # else the runs ended before they were killed
    for folder in ("whole", "killed"):
        ended = run([*command[:-1], tmp_path / folder], processes=2, modules=DEEPSPEED, timeout=1500)
        assert ended.returncode == 0, ended.stderr
    assert "resuming from" in ended.stdout
    a, b = (AutoModelForCausalLM.from_pretrained(tmp_path / name).state_dict() for name in ("whole", "killed"))
    assert all(a[name].equal(b[name]) for name in a)
    assert not list(output.glob(".checkpoint-*"))
