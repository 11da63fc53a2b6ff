"""A process that is killed is started again with the others, as torchrun --max-restarts does: the run continues.

The tests look at the result: it is that of a run that was not interrupted.
"""

import json
import os
import shutil
import socket
import sys
import time

import pytest
import torch
from safetensors.torch import load_file

from tests.conftest import ROOT
from tests.processes import clean_environment, run
from tests.recipes.test_sft import BASE as TUNE
from tests.recipes.test_sft import examples, model  # noqa: F401 - fixtures

pytestmark = pytest.mark.distributed
BASE = (
    "--max_seq_length 16 --per_device_train_batch_size 2 --max_steps 8 --logging_steps 1 --save_steps 2 --do_train "
    "--split 80,10,10 --learning_rate 1e-2 --warmup_steps 2 --device cpu --disable_tqdm --report_to none "
    "--continue_training --hidden_dropout_prob 0.1 --attention_probs_dropout_prob 0.1"
).split()
NO_DROPOUT = ["--hidden_dropout_prob", "0", "--attention_probs_dropout_prob", "0"]


@pytest.fixture
def command(tiny_model, corpus_folder):
    return ["pretrain", *BASE, "--input_dir", corpus_folder / "mmap", "--model_name_or_path", tiny_model]


def launched(how, rank, when, words, *, processes=2, restarts=1, launcher="first", **options):
    named = {"TORCHELASTIC_ERROR_FILE": f"/tmp/torchelastic/{launcher}/attempt_0/0/error.json"}
    environment = clean_environment(PYTHONPATH=f"{ROOT / 'src'}:{ROOT}", **named)
    script = [sys.executable, ROOT / "tests" / "recipes" / "failing.py", how, rank, when, *words]
    return run(script, env=environment, processes=processes, restarts=restarts, timeout=150, **options)


def trained(output):
    """Weights and losses of a finished run."""
    history = json.loads((output / "trainer_state.json").read_text())["log_history"]
    file = next(output.glob("*model.safetensors"))
    return load_file(file), {entry["step"]: entry["loss"] for entry in history if "loss" in entry}


def assert_same(found, wanted):
    (weights, losses), (wanted_weights, wanted_losses) = found, wanted
    assert losses == wanted_losses and weights.keys() == wanted_weights.keys()
    assert all(torch.equal(weights[name], wanted_weights[name]) for name in weights)


@pytest.fixture(scope="module")
def whole(tiny_model, corpus_folder, tmp_path_factory):
    """A run that was not interrupted."""
    output = tmp_path_factory.mktemp("whole")
    words = ["pretrain", *BASE, "--input_dir", corpus_folder / "mmap", "--model_name_or_path", tiny_model]
    done = launched("late", 1, "", [*words, "--output_dir", output], restarts=0)
    assert done.returncode == 0, done.stderr
    return trained(output)


@pytest.mark.parametrize(
    ("rank", "when", "resumed"),
    [(0, "step 5", "checkpoint-4"), (1, "checkpoint-6.incomplete", "checkpoint-4"), (1, "step 1", None)],
)
def test_a_killed_rank_changes_nothing(command, whole, tmp_path, rank, when, resumed):
    done = launched("kill", rank, when, [*command, "--output_dir", tmp_path])
    assert done.returncode == 0, done.stderr
    assert ("resuming from" in done.stdout) == (resumed is not None)
    assert resumed is None or f"resuming from {tmp_path / resumed}: step 4" in done.stdout
    assert_same(trained(tmp_path), whole)
    assert not list(tmp_path.glob(".checkpoint*")) and not list(tmp_path.glob("left-*"))


def test_flags_about_the_start_do_not_count_twice(command, whole, tmp_path):
    """The checkpoint to begin from is another run's, whose optimizer is left."""
    done = launched("late", 1, "", [*command, "--output_dir", tmp_path / "begin"], restarts=0)
    assert done.returncode == 0, done.stderr
    words = [*command, "--resume_from_checkpoint", tmp_path / "begin" / "checkpoint-2", "--ignore_load_lr_and_optim"]
    uninterrupted = launched("late", 1, "", [*words, "--output_dir", tmp_path / "wanted"], restarts=0)
    assert uninterrupted.returncode == 0, uninterrupted.stderr
    killed = launched("kill", 1, "step 5", [*words, "--output_dir", tmp_path / "out"])
    assert killed.returncode == 0, killed.stderr
    assert f"resuming from {tmp_path / 'begin' / 'checkpoint-2'}" in killed.stdout
    assert f"resuming from {tmp_path / 'out' / 'checkpoint-4'}" in killed.stdout
    assert_same(trained(tmp_path / "out"), trained(tmp_path / "wanted"))


def test_overwriting_is_done_once_by_each_launcher(command, whole, tmp_path):
    words = [*command, "--overwrite_output_dir", "--output_dir", tmp_path]
    for launcher in ("first", "second"):
        done = launched("kill", 1, "step 5", words, launcher=launcher)
        assert done.returncode == 0, done.stderr
        assert done.stdout.count("resuming from") == 1
        assert f"restarted: the run continues from {tmp_path / 'checkpoint-4'}" in done.stdout
        assert ("removed from" in done.stdout) == (launcher == "second")
        assert_same(trained(tmp_path), whole)


def test_fine_tuning_is_restarted(model, examples, tmp_path):  # noqa: F811
    words = ["sft", *TUNE, "--model_name_or_path", model, "--dataset_name_or_path", examples, "--lora"]
    words += ["--overwrite_output_dir", "--output_dir"]
    wanted = launched("late", 1, "", [*words, tmp_path / "whole"], restarts=0)
    assert wanted.returncode == 0, wanted.stderr
    done = launched("kill", 1, "step 5", [*words, tmp_path / "killed"])
    assert done.returncode == 0, done.stderr
    assert "restarted: the run continues from" in done.stdout
    assert_same(trained(tmp_path / "killed"), trained(tmp_path / "whole"))


def test_another_number_of_processes_keeps_the_global_batch(command, tmp_path):
    """As with torchrun --nnodes 1:2, when a node is lost."""
    words = [*command, *NO_DROPOUT]
    killed = launched("kill", 1, "step 5", [*words, "--output_dir", tmp_path], restarts=0)
    assert killed.returncode == 1
    alone = launched("late", 1, "", [*words, "--output_dir", tmp_path], processes=1, restarts=0)
    assert alone.returncode == 1
    assert "another number of processes, 1 now: its global batch would be 2 samples instead of 4" in alone.stderr
    assert "--global_batch_size 4" in alone.stderr and not (tmp_path / "model.safetensors").exists()
    kept = [*words, "--output_dir", tmp_path, "--global_batch_size", 4]
    done = launched("late", 1, "", kept, processes=1, restarts=0)
    assert done.returncode == 0 and "resuming from" in done.stdout, done.stderr
    whole = launched("late", 1, "", [*words, "--output_dir", tmp_path / "whole"], restarts=0)
    assert whole.returncode == 0, whole.stderr
    found, wanted = trained(tmp_path), trained(tmp_path / "whole")
    assert found[1] == pytest.approx(wanted[1], abs=1e-5)
    assert all(torch.allclose(found[0][name], wanted[0][name], atol=1e-5) for name in wanted[0])


FULL = {  # rank, moment, flags, what is not written
    "hf": (0, "step 3", [], "the checkpoint {}/.checkpoint-4.incomplete"),
    "hf, states of rank 1": (1, "step 3", ["--sharding", "stage2"], "the checkpoint {}/.checkpoint-4.incomplete"),
    "sharded": (1, "step 3", ["--checkpoint_format", "sharded"], "the checkpoint {}/.checkpoint-4.incomplete"),
    "async": (
        1, "step 3", ["--checkpoint_format", "sharded", "--async_save"], "the checkpoint {}/.checkpoint-4.incomplete"
    ),
    "final": (0, ".model.incomplete/config.json", [], "the final model {}"),
}  # fmt: skip


@pytest.mark.parametrize("case", FULL)
def test_a_full_disk_of_one_rank_ends_all_with_one_sentence(command, whole, tmp_path, case):
    rank, when, flags, what = FULL[case]
    what = what.format(tmp_path)
    done = launched("full", rank, when, [*command, *flags, "--output_dir", tmp_path])
    assert done.returncode == 0, done.stderr
    lines = [line for line in done.stderr.splitlines() if "error: " in line]
    assert len(lines) == 2 and {line[:6] for line in lines} == {"rank 0", "rank 1"}, done.stderr
    own, other = sorted(lines, key=lambda line: not line.startswith(f"rank {rank}: "))
    assert f"error: cannot write {what}: File too large" in own and "earlier checkpoints are intact" in own
    assert f"error: rank {rank} cannot write its part of {what}: File too large" in other
    assert done.stdout.count(f"resuming from {tmp_path / 'checkpoint-2'}") == (case != "final")
    assert not list(tmp_path.glob(".*incomplete"))
    if "--sharding" not in flags:
        assert_same(trained(tmp_path), whole)


def test_nodes_with_other_clocks_and_no_locks(command, whole, corpus_folder, tmp_path):
    """A killed run on two nodes continues, although its files are a day younger than they can be."""
    shutil.copytree(corpus_folder / "mmap", tmp_path / "data", ignore=shutil.ignore_patterns("index-cache"))
    words = [*command, "--input_dir", tmp_path / "data", "--output_dir", tmp_path / "out"]
    killed = launched("kill@nodes", 1, "step 5", words, restarts=0)
    assert killed.returncode == 1 and "cannot be locked (No locks available)" in killed.stdout, killed.stderr
    tomorrow = time.time() + 86400
    for path in tmp_path.rglob("*"):
        os.utime(path, (tomorrow, tomorrow))
    done = launched("late@nodes", 1, "", words, restarts=0)
    assert done.returncode == 0 and "resuming from" in done.stdout, done.stderr
    assert_same(trained(tmp_path / "out"), whole)


@pytest.mark.slow
def test_nodes_with_folders_of_their_own_are_refused(command, tmp_path):
    for node in range(2):
        (tmp_path / f"node{node}").mkdir()
    done = launched("late@nodes", 1, "", [*command, "--output_dir", "out"], restarts=0, cwd=tmp_path)
    assert done.returncode == 1
    for rank in range(2):
        assert f"rank {rank}: error: rank 1 on {socket.gethostname()} does not see the --output_dir out" in done.stderr
    assert not list(tmp_path.rglob("*.incomplete")) and not list(tmp_path.rglob("checkpoint-*"))
    final = launched("late@nodes", 1, "", [*command, "--save_strategy", "no", "--output_dir", "out"], cwd=tmp_path)
    assert final.returncode == 0 and "does not see the output_dir out" in final.stdout, final.stderr
    assert (tmp_path / "node0" / "out" / "model.safetensors").exists()
