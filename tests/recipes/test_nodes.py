"""Two nodes with a launcher each, DeepSpeed's own launcher: all train like one process."""

import json
import os
import socket
import subprocess
import sys
import time

import pytest

from gptlm.commands.pretrain import parse_pretrain
from gptlm.recipes.pretrain.run import pretrain
from tests.conftest import ROOT
from tests.recipes.test_sharding import losses

pytestmark = pytest.mark.distributed

BASE = (
    "--max_seq_length 16 --per_device_train_batch_size 1 --max_steps 6 --logging_steps 1 --save_steps 3 "
    "--learning_rate 1e-2 --min_learning_rate 1e-3 --split 80,10,10 --warmup_steps 2 --weight_decay 0.1 --do_train "
    "--device cpu --disable_tqdm 1 --report_to none --hidden_dropout_prob 0 --attention_probs_dropout_prob 0 "
    "--continue_training"
).split()
ENVIRONMENT = {"OMP_NUM_THREADS": "1", "DS_ACCELERATOR": "cpu", "PYTHONPATH": f"{ROOT / 'src'}:{ROOT}"}


@pytest.fixture(scope="module")
def words(tiny_model, corpus_folder):
    return [*BASE, "--model_name_or_path", tiny_model, "--input_dir", corpus_folder / "mmap"]


@pytest.fixture(scope="module")
def wanted(words, tmp_path_factory):
    """One process, four micro-batches."""
    folder = tmp_path_factory.mktemp("one")
    argv = [*words, "--gradient_accumulation_steps", 4, "--output_dir", folder]
    pretrain(parse_pretrain([str(word) for word in argv], {}))
    return {"history": json.loads((folder / "trainer_state.json").read_text())["log_history"]}


@pytest.fixture
def port():
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return free.getsockname()[1]


def started(port, nodes, script, *words, is_host="", **environment):
    """The launcher of one of `nodes` with one process; `is_host`: whether it holds the store of the launchers."""
    command = [sys.executable, "-m", "torch.distributed.run", "--nnodes", nodes, "--nproc_per_node", 1]
    command += ["--max-restarts", 2, "--rdzv_id", "job", "--rdzv_backend", "c10d", "--rdzv_endpoint"]
    settings = "last_call_timeout=20,keep_alive_interval=2" + (f",is_host={is_host}" if is_host else "")
    command += [f"127.0.0.1:{port}", "--rdzv_conf", settings, script, *words]
    return subprocess.Popen(
        [str(word) for word in command],
        env={**os.environ, **ENVIRONMENT, **environment},
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
    )  # fmt: skip


def assert_trained(output, wanted):
    history = json.loads((output / "trainer_state.json").read_text())["log_history"]
    assert losses({"history": history}) == pytest.approx(losses(wanted), abs=1e-5)


def test_two_nodes_with_a_launcher_each(words, wanted, port, tmp_path):
    words = [*words, "--gradient_accumulation_steps", 2, "--sharding", "stage2", "--output_dir", tmp_path / "out"]
    nodes = [started(port, 2, ROOT / "scripts" / "run_pretrain.py", *words) for _ in range(2)]
    for node in nodes:
        printed, _ = node.communicate(timeout=240)
        assert node.returncode == 0, printed[-3000:]
    assert_trained(tmp_path / "out", wanted)


def test_deepspeed_s_launcher(words, wanted, port, tmp_path):
    command = [sys.executable, "-m", "deepspeed.launcher.runner", "--num_gpus", 2, "--master_port", port]
    command += [ROOT / "scripts" / "run_pretrain.py", *words, "--gradient_accumulation_steps", 2]
    command += ["--sharding", "stage1", "--output_dir", tmp_path / "out"]
    done = subprocess.run(
        [str(word) for word in command],
        env={**os.environ, **ENVIRONMENT},
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert_trained(tmp_path / "out", wanted)


FAILING = ROOT / "tests" / "recipes" / "failing.py"


@pytest.mark.slow
def test_torchrun_restarts_two_nodes(words, wanted, port, tmp_path):
    """A process of the second node is killed after a checkpoint; both launchers start theirs again."""
    words = [*words, "--gradient_accumulation_steps", 2, "--overwrite_output_dir", "--output_dir", tmp_path / "out"]
    nodes = [started(port, 2, FAILING, "kill", 1, "step 4", "pretrain", *words) for _ in range(2)]
    printed = [node.communicate(timeout=400)[0] for node in nodes]
    assert [node.returncode for node in nodes] == [0, 0], printed
    assert sum(text.count(f"resuming from {tmp_path / 'out' / 'checkpoint-3'}") for text in printed) == 1, printed
    assert_trained(tmp_path / "out", wanted)


@pytest.mark.slow
def test_the_run_continues_without_a_lost_node(words, wanted, port, tmp_path):
    words = ["pretrain", *words, "--global_batch_size", 4, "--output_dir", tmp_path / "out"]
    first = started(port, "1:2", FAILING, "late", 0, "", *words, is_host="true")
    lost = started(port, "1:2", FAILING, "node", 1, "step 4", *words, is_host="false")
    printed = [node.communicate(timeout=400)[0] for node in (first, lost)]
    assert [first.returncode, lost.returncode] == [0, -9], printed
    assert f"resuming from {tmp_path / 'out' / 'checkpoint-3'}" in printed[0], printed
    assert_trained(tmp_path / "out", wanted)


@pytest.mark.slow
def test_a_node_joins(words, wanted, port, tmp_path):
    """torchrun ends the process of the first node, which saves, and starts one on each.

    Without the variable, the new launcher waits for an address that the first one does not give again
    (pytorch/pytorch#147064).
    """
    own_store = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
    words = ["pretrain", *words, "--global_batch_size", 4, "--output_dir", tmp_path / "out"]
    first = started(port, "1:2", FAILING, "alone", 0, "step 4", *words, **own_store)
    deadline = time.monotonic() + 200
    while not (tmp_path / "out" / "checkpoint-3").exists() and time.monotonic() < deadline:
        time.sleep(0.1)
    joins = started(port, "1:2", FAILING, "late", 1, "", *words, **own_store)
    printed = [node.communicate(timeout=400)[0] for node in (first, joins)]
    assert [first.returncode, joins.returncode] == [0, 0], printed
    assert f"resuming from {tmp_path / 'out' / 'checkpoint-4'}" in printed[0], printed
    assert_trained(tmp_path / "out", wanted)
