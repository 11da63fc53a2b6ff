"""What makes a run faster on the machine it meets: compiling, recorded passes, float8."""

import logging
from importlib.util import find_spec
from typing import Any

import torch
import torch.distributed as dist

from gptlm.config.run import Run
from gptlm.errors import UsageError
from gptlm.kernels.compiling import compile_model, compile_obstacle
from gptlm.kernels.float8 import convert_to_float8
from gptlm.model.gpt import GPTLMHeadModel
from gptlm.parallel.zero_config import gathers_whole_blocks, stage_of
from gptlm.ranks import local_world_size
from gptlm.recipes.common.deepspeed import shard_groups
from gptlm.recipes.common.device import Machine
from gptlm.upstream.deepspeed import has_flat_grad_sync
from gptlm.upstream.torch import has_nvlink

logger = logging.getLogger(__name__)

AT_ONCE = 10**9  # parameters of which all gradients, 2 GB, may lie on each card under ZeRO


def speed_arguments(
    run: Run,
    machine: Machine,
    model: GPTLMHeadModel,
    deepspeed: dict[str, Any] | None,
    *,
    compiled: bool,
    uneven: str | None,
    lengths_vary: bool = False,
) -> dict[str, Any]:
    """Let `model` be compiled and multiply in float8 as the flags say; what its trainer is made with for speed.

    Args:
        compiled: the default of --torch_compile on a GPU.
        uneven: why batches differ in shape, if they do.
        lengths_vary: that is their length.
    """
    stage = stage_of(deepspeed or {})
    float8_if_wanted(run, model, machine.device, stage=stage)
    compiled = compile_if_wanted(run, model, machine.device, deepspeed, default=compiled, lengths_vary=lengths_vary)
    parameters = model.num_parameters()
    if run.dims.is_model_parallel:
        parameters = largest_of_all(parameters)  # stages differ, and all have to decide alike
    at_once = exchanged_at_once(run, machine, parameters, groups=shard_groups(run, deepspeed) is not None)
    alone = not run.dims.is_model_parallel and (at_once or (run.dims.world == 1 and deepspeed is None))
    passes = recorded(run, machine.device, compiled=compiled, alone=alone, obstacle=uneven)
    return {"exchanged_at_once": at_once, "recorded": passes}


def compile_if_wanted(
    run: Run,
    model: GPTLMHeadModel,
    device: str,
    deepspeed: dict[str, Any] | None,
    *,
    default: bool,
    lengths_vary: bool,
) -> bool:
    """Compile blocks and loss as --torch_compile says; unset, on a GPU where that is the `default`.

    Returns:
        Whether they are compiled.
    """
    wanted = run.training.torch_compile
    if not (default and device == "cuda" if wanted is None else wanted):
        return False
    sharded = stage_of(deepspeed or {}) == 3
    obstacle = compile_obstacle(device)
    if sharded and not gathers_whole_blocks(deepspeed or {}):
        obstacle = "ZeRO stage 3 brings each weight by itself here, as with adapters (stage 2 does not)"
    if obstacle is None:
        fused = run.dims.pipeline == 1
        compile_model(model, within_hooks=sharded, fused=fused, lengths_vary=lengths_vary)
        logger.info("blocks and loss are compiled, the first step takes longer (--torch_compile 0: they are not)")
        return True
    if wanted:
        logger.warning("--torch_compile has no effect: %s", obstacle)
    else:
        logger.info("blocks and loss are not compiled: %s", obstacle)
    return False


def largest_of_all(number: int) -> int:
    """The largest that a process has of `number`, on all of them."""
    numbers = [number] * dist.get_world_size()
    dist.all_gather_object(numbers, number)
    return max(numbers)


def exchanged_at_once(run: Run, machine: Machine, parameters: int, *, groups: bool = False) -> bool:
    """Whether gradients are exchanged in one go after the backward pass, where that is faster than during it.

    It is between cards with NVLink, where the exchange takes some 3 % of a step and what goes on beside a backward
    pass takes more; and on a CPU, which does one thing at a time. Under ZeRO it costs memory for all gradients, so
    large models go DeepSpeed's way, bucket by bucket; so do stage 3, offloading, sums in float32, and those with a
    DeepSpeed configuration of their own. Without replicas there is nothing to exchange and to share, and what is left
    is its bookkeeping for each weight, which costs more than the passes of a small model.

    Args:
        parameters: on the process that has most, the same everywhere.
        groups: replicas share optimizer states in groups.
    """
    dims, sharding = run.dims, run.parallel.sharding
    if dims.world == 1 or groups or not machine.half_weights or run.parallel.deepspeed:
        return False
    zero = bool(sharding) or dims.is_model_parallel  # DeepSpeed steps
    in_float32 = run.training.amp_master_grad
    if zero and ("stage3" in sharding or "offload" in sharding or (in_float32 and dims.pipeline == 1)):
        return False
    if zero and not has_flat_grad_sync(needed=in_float32):
        return False
    if dims.data == 1 or in_float32 and dims.pipeline > 1:  # DeepSpeed cannot add a pipeline's up in float32
        return True
    if local_world_size() != dims.world or (zero and parameters > AT_ONCE):
        return False
    if machine.device != "cpu" and not has_nvlink(dims.world):
        return False
    logger.info("gradients are exchanged in one go after the passes")
    return True


def recorded(run: Run, device: str, *, compiled: bool, alone: bool, obstacle: str | None = None) -> bool:
    """Whether the passes of a micro-batch are replayed as a CUDA graph, as --cuda_graphs says; unset, where they can.

    Args:
        compiled: whether the blocks are.
        alone: nothing is exchanged with other processes during the passes.
        obstacle: why batches differ in shape, if they do.
    """
    wanted = run.training.cuda_graphs
    if device != "cuda":
        obstacle = "there is no GPU"
    elif not alone:
        obstacle = "processes exchange data during the passes"
    elif not compiled:
        obstacle = "the blocks are not compiled (see --torch_compile)"
    if obstacle is None and wanted is not False:
        logger.info("the passes of a micro-batch are replayed as a CUDA graph (--cuda_graphs 0: they are not)")
        return True
    if obstacle is not None and wanted:
        logger.warning("--cuda_graphs has no effect: %s", obstacle)
    return False


def check_float8(run: Run, machine: Machine) -> None:
    """Raises UsageError if --fp8 is asked for and cannot be had here."""
    if not run.training.fp8:
        return
    if find_spec("torchao") is None:
        raise UsageError("--fp8 needs torchao, which is not installed: pip install 'gptlm[fp8]'")
    if machine.device == "cpu":
        logger.warning("--fp8: a CPU has no float8, its rounding is computed, which is slow")
    elif torch.cuda.get_device_capability() < (8, 9):
        name = torch.cuda.get_device_name()
        raise UsageError(f"{name} has no float8 (Ada, Hopper and newer cards have); leave --fp8 out, use --bf16")


def float8_if_wanted(run: Run, model: GPTLMHeadModel, device: str, *, stage: int) -> None:
    """Let the blocks' matrix products be float8 ones, with --fp8.

    Raises:
        UsageError: under stage 3 of ZeRO, which --deepspeed FILE may ask for.
    """
    if run.training.fp8:
        if stage == 3:
            raise UsageError("--fp8 goes without ZeRO stage 3, which takes the weights apart; use stage 1 or 2")
        convert_to_float8(model, emulated=device == "cpu")
        logger.info("the blocks' matrix products are float8; weights, checkpoints and all else are as without --fp8")
