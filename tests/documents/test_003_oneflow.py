"""OneFlow's GPT page, command by command, in small form."""

import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from tests.conftest import ROOT

SIZES = "--num-layers 2 --hidden-size 32 --num-attention-heads 2 --seq-length 16 --vocab-size 512"
STEPS = "--train-iters 2 --log-interval 1 --split 80,10,10 --device cpu --attention-dropout 0 --hidden-dropout 0"


def environment(**more: str) -> dict[str, str]:
    clean = {key: value for key, value in os.environ.items() if key not in ("RANK", "WORLD_SIZE", "LOCAL_RANK")}
    return {**clean, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", "PYTHONPATH": str(ROOT / "src"), **more}


def start(words: list[str], folder: Path) -> subprocess.Popen:
    folder.mkdir(exist_ok=True)
    return subprocess.Popen(
        words, cwd=folder, env=environment(), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )


def free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return found.getsockname()[1]


@pytest.mark.distributed
def test_two_nodes_whose_ranks_are_given(corpus_folder, tmp_path):
    """Both addresses belong to this machine, so the commands name their ranks: before the module, and as the script."""
    data = next((corpus_folder / "mmap").glob("*.bin")).with_suffix("")
    nodes = f"--num-nodes 2 --node-ips 127.0.0.1,127.0.0.1 --ctrl-port {free_port()} --micro-batch-size 4"
    training = f"{SIZES} {STEPS} {nodes} --global-batch-size 8 --dataset {data} --save {tmp_path}/out".split()
    scripts = ROOT / "scripts"
    launched = [str(scripts / "launch.py"), "--rank", "0", "python3", "-m", "oneflow_gpt.training", *training]
    plain = [str(scripts / "run_pretrain.py"), *training, "--rank", "1"]
    started = [
        start([sys.executable, *words], tmp_path / f"node{rank}") for rank, words in enumerate((launched, plain))
    ]
    try:
        outputs = [process.communicate(timeout=120)[0] for process in started]
    finally:
        for process in started:
            process.kill()
    assert [process.returncode for process in started] == [0, 0], outputs
    assert "node 1 of 2 connects to the others at 127.0.0.1:" in outputs[1]
    assert json.loads((tmp_path / "out" / "trainer_state.json").read_text())["global_step"] == 2
