"""The multi-GPU commands of FleetX, OneFlow and Megatron-DeepSpeed, with sizes and degrees scaled down."""

import json
import os
import subprocess
import sys

import pytest
from transformers import AutoModelForCausalLM

from tests.conftest import ROOT
from tests.recipes.test_compat import YAML

TINY = "--num-layers 2 --hidden-size 32 --num-attention-heads 2 --seq-length 16 --vocab-size 512 --split 80,10,10"


@pytest.fixture
def run(tmp_path):
    """Run a command in a folder with `data` (token files) and x.yaml; returns what it printed."""

    def start(*words):
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", "PYTHON": sys.executable}
        done = subprocess.run(
            [str(word) for word in words], cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=240
        )
        assert done.returncode == 0, done.stdout[-1500:] + done.stderr[-2500:]
        return done.stdout

    return start


@pytest.fixture
def data(corpus_folder, tmp_path):
    (tmp_path / "data").symlink_to(corpus_folder / "mmap")
    (tmp_path / "x.yaml").write_text(YAML.replace("OUT", "out").replace("DATA", "data"))
    return next((tmp_path / "data").glob("*.bin")).with_suffix("")


def trained(folder):
    AutoModelForCausalLM.from_pretrained(folder)
    return json.loads((folder / "trainer_state.json").read_text())["log_history"]


@pytest.mark.distributed
@pytest.mark.parametrize(
    "overrides",
    [
        "-o Distributed.dp_degree=2 -o Global.global_batch_size=8",
        "-o Distributed.sharding={degree} -o Global.global_batch_size=",
        "-o Distributed.mp_degree=2",
    ],
)
def test_paddle_s_launcher_on_auto_py(run, data, tmp_path, overrides):
    """`python -m paddle.distributed.launch --log_dir D --devices ... ./tools/auto.py -c X.yaml -o ...`"""
    batch = ["-o", "Global.local_batch_size=4"] if overrides.endswith("=") else []
    section = "Distributed.sharding.sharding_"
    overrides = overrides.replace("Distributed.sharding={degree}", f"{section}degree=2 -o {section}stage=2")
    said = run(
        sys.executable, ROOT / "scripts/launch.py", "--log_dir", "logs", "--nproc_per_node", 2, "./tools/auto.py",
        "-c", "x.yaml", *overrides.split(), *batch,
    )  # fmt: skip
    assert "[train] epoch: 0 step: 3 lr: " in said and len(trained(tmp_path / "out")) > 4
    assert (tmp_path / "logs" / "workerlog.1").exists()


@pytest.mark.distributed
def test_a_script_of_oneflow(run, data, tmp_path):
    """`bash examples/pretrain_1n8d_2x4x1_16_1536x16.sh`: 4 processes split each layer there, 2 here."""
    said = run(
        sys.executable, ROOT / "scripts/run_pretrain.py", "-c", "pretrain_1n8d_2x4x1_16_1536x16", *TINY.split(),
        "--dataset", data, "--num-gpus-per-node", 2, "--tensor-model-parallel-size", 2, "--micro-batch-size", 2,
        "--global-batch-size", 4, "--train-iters", 2, "--log-interval", 1, "--device", "cpu",
    )  # fmt: skip
    assert "| 2        | 4               | 8               |" in said
    assert trained(tmp_path / "checkpoint")


@pytest.mark.distributed
def test_the_8_card_script(run, data, tmp_path):
    """`bash test/train_full_8p.sh --data_path=P --model_size=345M --train_iters=N`: two stages, as there."""
    said = run(
        "bash", ROOT / "scripts/train_full_8p.sh", f"--data_path={data}", "--model_size=345M", "--train_iters=2",
        *TINY.split(), "--max-position-embeddings", 16, "--num-gpus-per-node", 2, "--micro-batch-size", 2,
        "--global-batch-size", 8, "--eval-interval", 2, "--eval-iters", 1, "--num-workers", 0, "--device", "cpu",
    )  # fmt: skip
    assert " iteration        2/       2 | consumed samples:           16 |" in said
    assert "| 2p-CPU |" in said and trained(tmp_path / "ckpts" / "ckpts_tmp" / "345M")
