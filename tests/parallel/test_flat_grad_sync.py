"""What DeepSpeed is left with, where gradients are reduced once after backward."""

import sys

import pytest
import torch

from gptlm.parallel.flat_grad_sync import _runs
from tests.processes import DEEPSPEED, run

START = """
import torch
from gptlm.parallel.flat_grad_sync import FlatGradSync
from gptlm.parallel.deepspeed import setup_deepspeed
from gptlm.parallel.zero_config import RunSettings, fill_auto, zero_config

setup_deepspeed(on_cpu=True)
import deepspeed

def engine(*shape):
    model = torch.nn.Sequential(*(torch.nn.Linear(*shape) for _ in range(3)))
    config = fill_auto(zero_config(2), RunSettings(1, 1, 1, 0.0, "bf16", "O2"))
    config["zero_allow_untested_optimizer"] = True
    deepspeed.init_distributed("gloo")
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    return model, deepspeed.initialize(model=model, optimizer=optimizer, config=config)[0]
"""

LETS_GO = """
def alive(weights):
    found = 0
    for weight in weights:
        node = weight.view_as(weight).grad_fn.next_functions[0][0]
        found += "seen" in node.metadata
        node.metadata["seen"] = True
    return found

model, engine = engine(8, 8)
weights = list(model.parameters())
alive(weights)
before = alive(weights)
FlatGradSync(engine)
alive(weights)
print("found", before, alive(weights))
torch.distributed.destroy_process_group()
"""


SUMS = """
model, engine = engine(4, 4)
weights = list(model.parameters())
once = FlatGradSync(engine, in_float32=True)
before = [part.clone() for part in engine.optimizer.single_partition_of_fp32_groups]
for _ in range(2):
    for value in (1.0, 2**-9):
        sum((weight * value).sum() for weight in weights).backward()
    assert all(weight.grad is None for weight in weights)
    print("sum", set(once.gradient(weights[0]).flatten().tolist()))
    once.reduce()
    engine.step()
    once.clear()
moved = [(was - now)[:4] for was, now in zip(before, engine.optimizer.single_partition_of_fp32_groups)]
print("moved", {round(value, 6) for part in moved for value in part.tolist()})
torch.distributed.destroy_process_group()
"""


def said(script, folder):
    (folder / "script.py").write_text(START + script)
    done = run([sys.executable, folder / "script.py"], modules=DEEPSPEED)
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout


@pytest.mark.distributed
def test_no_graph_of_a_weight_is_left(tmp_path):
    """A recording cannot use what adds a gradient on another stream; a graph that is kept keeps that, too."""
    assert said(LETS_GO, tmp_path).split()[-3:] == ["found", "6", "0"]


@pytest.mark.distributed
def test_gradients_are_added_up_in_float32(tmp_path):
    """1 + 2^-9 is 1 in bfloat16; each step's sums begin anew: SGD with a rate of 1 moves weights twice by that."""
    assert said(SUMS, tmp_path).splitlines()[-3:] == ["sum {1.001953125}"] * 2 + ["moved {2.003906}"]


def test_each_weight_counts_once_for_the_norm():
    """Weights at 0 to 3, 3 to 8 (a copy of another process's), 8 to 10 and 10 to 16 of 16, and their two shares."""
    whole = torch.arange(20.0)[4:]
    weights = [whole[start:stop] for start, stop in ((0, 3), (3, 8), (8, 10), (10, 16))]
    weights[1].model_parallel = False
    weights[3].model_parallel = True
    weights.reverse()  # their order is not that of their places
    assert _runs(whole, weights, 1, 0) == [slice(0, 3), slice(8, 16)]
    assert _runs(whole, weights, 2, 0) == [slice(0, 3)]
    assert _runs(whole, weights, 2, 1) == [slice(0, 8)]
    assert _runs(whole, weights, 4, 1) == []
    assert _runs(whole, weights, 4, 2) == [slice(0, 4)]
