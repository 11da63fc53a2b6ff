"""Two nodes with a launcher each, DeepSpeed's own launcher: all train like one process."""

import json
import os
import socket
import subprocess
import sys

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


def test_two_nodes_with_a_launcher_each(words, wanted, tmp_path):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    script = [ROOT / "scripts" / "run_pretrain.py", *words, "--gradient_accumulation_steps", 2]
    command = [sys.executable, "-m", "torch.distributed.run", "--nnodes", 2, "--nproc_per_node", 1]
    command += ["--rdzv_id", "job", "--rdzv_backend", "c10d", "--rdzv_endpoint", f"127.0.0.1:{port}"]
    whole = [str(word) for word in [*command, *script, "--sharding", "stage2", "--output_dir", tmp_path / "out"]]
    nodes = [
        subprocess.Popen(whole, env={**os.environ, **ENVIRONMENT}, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
        for _ in range(2)
    ]
    for node in nodes:
        _, errors = node.communicate(timeout=240)
        assert node.returncode == 0, errors.decode()[-3000:]
    history = json.loads((tmp_path / "out" / "trainer_state.json").read_text())["log_history"]
    assert losses({"history": history}) == pytest.approx(losses(wanted), abs=1e-5)


def test_deepspeed_s_launcher(words, wanted, tmp_path):
    command = [sys.executable, "-m", "deepspeed.launcher.runner", "--num_gpus", 2, "--master_port", 0]
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        command[-1] = free.getsockname()[1]
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
    history = json.loads((tmp_path / "out" / "trainer_state.json").read_text())["log_history"]
    assert losses({"history": history}) == pytest.approx(losses(wanted), abs=1e-5)


@pytest.mark.slow
def test_torchrun_restarts_two_nodes(words, wanted, tmp_path):
    """A process of the second node is killed after a checkpoint; both launchers start theirs again."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [sys.executable, "-m", "torch.distributed.run", "--nnodes", 2, "--nproc_per_node", 1]
    command += ["--max-restarts", 2, "--rdzv_id", "job", "--rdzv_backend", "c10d"]
    command += ["--rdzv_endpoint", f"127.0.0.1:{port}", ROOT / "tests" / "recipes" / "failing.py", "kill", 1, "step 4"]
    command += ["pretrain", *words, "--gradient_accumulation_steps", 2, "--overwrite_output_dir"]
    whole = [str(word) for word in [*command, "--output_dir", tmp_path / "out"]]
    nodes = [
        subprocess.Popen(whole, env={**os.environ, **ENVIRONMENT}, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
        for _ in range(2)
    ]
    printed = [node.communicate(timeout=400)[0].decode() for node in nodes]
    assert [node.returncode for node in nodes] == [0, 0], printed
    assert sum(text.count(f"resuming from {tmp_path / 'out' / 'checkpoint-3'}") for text in printed) == 1, printed
    history = json.loads((tmp_path / "out" / "trainer_state.json").read_text())["log_history"]
    assert losses({"history": history}) == pytest.approx(losses(wanted), abs=1e-5)
