"""When gradients are reduced once after backward (flat_grad_sync), and how they are flattened."""

import logging
import shlex
import sys

import pytest
import torch

from gptlm.commands.pretrain import parse_pretrain
from gptlm.errors import UsageError
from gptlm.parallel.flat_grad_sync import flatten_gradients
from gptlm.recipes.common.acceleration import FLAT_LIMIT, check_flat_grad_sync, choose_flat_grad_sync
from gptlm.recipes.common.deepspeed import deepspeed_config
from gptlm.recipes.common.device import Device
from tests.processes import run

BASE = "--model_name_or_path gpt2-medium-en --input_dir d --output_dir o --bf16 --fp16_opt_level O2 "
HALF = Device("cpu", "bf16", "O2")


def decided(flags="", world=2, here="2", device=HALF, parameters=1000, word="LOCAL_WORLD_SIZE"):
    run = parse_pretrain(shlex.split(BASE + flags), {"WORLD_SIZE": str(world)})
    with pytest.MonkeyPatch.context() as patch:
        for name in ("LOCAL_WORLD_SIZE", "LOCAL_SIZE"):
            patch.delenv(name, raising=False)
        if here:
            patch.setenv(word, here)
        return choose_flat_grad_sync(run, device, parameters)


def test_flat_for_half_precision_on_one_machine():
    assert decided() and decided("--sharding stage1") and decided("--sharding stage2")
    assert decided("--sharding stage2 --sharding_parallel_degree 2", world=4, here="4")
    assert decided(word="LOCAL_SIZE")  # DeepSpeed's launcher
    assert decided(parameters=FLAT_LIMIT + 1) and decided("--amp_master_grad")


@pytest.mark.distributed
def test_stages_of_different_size_decide_alike(tmp_path):
    """By the largest: stages on both sides of the limit would wait for each other."""
    script = tmp_path / "script.py"
    script.write_text(
        "import torch.distributed as dist\n"
        "from gptlm.recipes.common.acceleration import largest_of_all\n"
        "dist.init_process_group('gloo')\n"
        "assert largest_of_all(7 - dist.get_rank()) == 7\n"
        "dist.destroy_process_group()\n"
    )
    done = run([sys.executable, script], processes=2)
    assert done.returncode == 0, done.stderr[-1500:]


def test_flat_where_processes_share_a_replica():
    """Without replicas nothing is reduced, so on any number of machines and for any size."""
    for flags in ("--tensor_parallel_degree 2", "--pipeline_parallel_degree 2 --gradient_accumulation_steps 2"):
        assert decided(flags, parameters=FLAT_LIMIT + 1, here="1")
        assert decided(flags, world=4, here="4") and decided(f"{flags} --sharding stage1", world=4, here="4")


def test_flat_where_a_pipeline_accumulates_in_float32():
    """DeepSpeed cannot do that."""
    flags = "--pipeline_parallel_degree 2 --gradient_accumulation_steps 2 --amp_master_grad"
    assert decided(flags, here="1") and decided(flags, world=4, here="2", parameters=FLAT_LIMIT + 1)
    run = parse_pretrain(shlex.split(f"{BASE}{flags} --sharding stage1 offload"), {"WORLD_SIZE": "2"})
    with pytest.raises(UsageError, match="with a pipeline, --amp_master_grad does not work with offload"):
        deepspeed_config(run, HALF)


@pytest.mark.parametrize(
    "case",
    [
        {"flags": "--tensor_parallel_degree 2", "world": 4, "here": "2"},
        {"flags": "--tensor_parallel_degree 2", "world": 4, "here": "4", "parameters": FLAT_LIMIT + 1},
        {"flags": "--tensor_parallel_degree 2", "device": Device("cpu", "bf16", "O1")},
        {"flags": "--tensor_parallel_degree 2 --amp_master_grad"},
        {"flags": "--tensor_parallel_degree 2 --sharding stage3", "world": 4, "here": "4"},
        {"world": 1, "here": "1"},
        {"here": "1"},  # on two machines
        {"here": ""},
        {"device": Device("cpu", "bf16", "O1")},
        {"device": Device("cpu", "fp32")},
        {"flags": "--sharding stage3"},
        {"flags": "--sharding stage2 offload"},
        {"flags": "--sharding stage1 --amp_master_grad"},
        {"flags": "--sharding stage2", "parameters": FLAT_LIMIT + 1},
        {"flags": "--deepspeed ds_configs/zero2.json"},
    ],
)
def test_not_flat_otherwise(case):
    assert not decided(**case)


def test_the_flag_decides_where_both_ways_are_right(caplog):
    assert not decided("--flat_grad_sync 0") and not decided("--sharding stage1 --flat_grad_sync 0")
    assert not decided("--tensor_parallel_degree 2 --flat_grad_sync 0")
    assert decided("--flat_grad_sync 1", here="1")  # on two machines
    assert decided("--sharding stage2 --flat_grad_sync 1", parameters=FLAT_LIMIT + 1)
    caplog.set_level("WARNING", "gptlm")
    logging.getLogger("gptlm").propagate = True
    assert not decided("--flat_grad_sync 1", device=Device("cpu", "fp32"))
    assert "--flat_grad_sync has no effect: it needs half-precision weights" in caplog.text
    assert not decided("--flat_grad_sync 1 --sharding stage3")
    assert "--flat_grad_sync has no effect: --sharding stage3 reduces gradients in its own way" in caplog.text


def test_the_flag_is_refused_where_there_is_no_other_way():
    flags = "--pipeline_parallel_degree 2 --gradient_accumulation_steps 2 --flat_grad_sync 0"
    run = parse_pretrain(shlex.split(f"{BASE}{flags} --amp_master_grad"), {"WORLD_SIZE": "2"})
    with pytest.raises(UsageError, match="--flat_grad_sync 0: a pipeline with --amp_master_grad needs flat gradient"):
        check_flat_grad_sync(run, HALF)
    check_flat_grad_sync(parse_pretrain(shlex.split(BASE + flags), {"WORLD_SIZE": "2"}), HALF)


def test_gradients_are_flattened_and_taken():
    weights = [torch.nn.Parameter(torch.zeros(2)) for _ in range(3)]
    places = list(torch.full((3, 2), 7.0))
    weights[0].grad, weights[1].grad = torch.tensor([1.0, 2.0]), places[1]
    flatten_gradients(places, weights, zero=False)
    assert torch.stack(places).tolist() == [[1.0, 2.0], [7.0, 7.0], [0.0, 0.0]]
    assert all(weight.grad is None for weight in weights)
