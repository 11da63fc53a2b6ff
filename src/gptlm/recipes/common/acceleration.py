"""What makes a run faster on the hardware it meets: torch.compile, CUDA graphs, flat gradient sync, float8."""

import logging
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from gptlm.config.run import Run
from gptlm.errors import UsageError, named
from gptlm.kernels.compiling import compile_model, compile_obstacle, lengths_obstacle
from gptlm.kernels.float8 import Float8Weights
from gptlm.kernels.label_smoothing import smooth_labels
from gptlm.model.gpt import GPTLMHeadModel
from gptlm.parallel.zero_config import gathers_whole_blocks, stage_of
from gptlm.ranks import local_world_size
from gptlm.recipes.common.device import Device
from gptlm.upstream.deepspeed import has_flat_grad_sync
from gptlm.upstream.torch import has_nvlink

logger = logging.getLogger(__name__)

FLAT_LIMIT = 10**9  # parameters of which all gradients, 2 GB, may lie on each GPU under ZeRO


@dataclass(frozen=True)
class Acceleration:
    """How gradients are reduced, and how forward and backward run.

    Attributes:
        flat_grad_sync: one all-reduce or reduce-scatter after backward.
        cuda_graph: forward and backward of a micro-batch are replayed as a CUDA graph of its shape.
        float8: weights that are rounded anew for each step; None without --fp8.
    """

    flat_grad_sync: bool
    cuda_graph: bool
    float8: Float8Weights | None


def accelerate(
    run: Run,
    device: Device,
    model: GPTLMHeadModel,
    deepspeed: dict[str, Any] | None,
    *,
    lengths_vary: bool = False,
    uneven: str | None = None,
    adapters: str | None = None,
) -> Acceleration:
    """Compile `model` and let it multiply in float8 as the flags ask; decide what its trainer does.

    Args:
        lengths_vary: the sequence length is not the same in all batches.
        uneven: why shapes of batches do not repeat, if they do not.
        adapters: why adapters keep the blocks from being compiled, unless --torch_compile asks for it.
    """
    float8 = use_float8(run, model, deepspeed)
    parameters = model.num_parameters()
    if run.dims.is_model_parallel:
        parameters = largest_of_all(parameters)  # stages differ in size, and all have to decide alike
    flat = choose_flat_grad_sync(run, device, parameters)
    if flat:
        logger.info("flat_grad_sync: gradients are reduced once, after backward (--flat_grad_sync 0: during it)")
    is_local = not run.dims.is_model_parallel and (flat or (run.dims.world == 1 and deepspeed is None))
    obstacle = _graph_obstacle(device.type, is_local=is_local, uneven=uneven)
    is_graph_wanted = run.training.cuda_graphs is not False and not run.training.full_determinism
    if obstacle is None and run.training.auto_find_batch_size:
        obstacle = "--auto_find_batch_size may change the micro-batch"
        logger.info("forward and backward are not replayed as a CUDA graph: %s", obstacle)
    elif obstacle is None and run.training.neftune_noise_alpha:
        obstacle = "--neftune_noise_alpha draws noise outside of the compiled blocks"
        logger.info("forward and backward are not replayed as a CUDA graph: %s", obstacle)
    if obstacle is None and adapters is not None and not run.training.torch_compile:
        obstacle = adapters
        logger.info("blocks are neither compiled nor captured as CUDA graphs: %s (see --torch_compile)", adapters)
    is_captured = obstacle is None and is_graph_wanted
    # without a graph, checking for each block whether its code fits a length costs more time than compiling saves
    default = (not lengths_vary or is_captured) and (adapters is None or bool(run.training.torch_compile))
    is_compiled = _compile(
        run, model, device.type, deepspeed, default=default, lengths_vary=lengths_vary, joins_norms=is_captured
    )
    if run.training.label_smoothing_factor:
        smooth_labels(model, run.training.label_smoothing_factor, torch.compile if is_compiled else None)
    if obstacle is None and not is_compiled:
        obstacle = "the blocks are not compiled (see --torch_compile)"
    if obstacle is None and is_graph_wanted:
        logger.info(
            "forward and backward of a micro-batch are replayed as a CUDA graph, one for each shape "
            "(--cuda_graphs 0 switches this off)"
        )
    elif run.training.cuda_graphs:
        logger.warning("--cuda_graphs has no effect: %s", obstacle)
    return Acceleration(flat, obstacle is None and is_graph_wanted, float8)


def _graph_obstacle(device: str, *, is_local: bool, uneven: str | None) -> str | None:
    """Why forward and backward of a micro-batch cannot be replayed as a CUDA graph.

    Args:
        is_local: they do not communicate with other processes.
        uneven: why shapes of batches do not repeat, if they do not.
    """
    if device != "cuda":
        return "there is no GPU"
    return uneven if is_local else "processes communicate during forward and backward"


def _compile(
    run: Run,
    model: GPTLMHeadModel,
    device: str,
    deepspeed: dict[str, Any] | None,
    *,
    default: bool,
    lengths_vary: bool,
    joins_norms: bool,
) -> bool:
    """Compile blocks and loss as --torch_compile asks; unset, on a GPU where that is the `default`.

    Returns:
        Whether they are compiled.
    """
    wanted = False if run.training.full_determinism else run.training.torch_compile
    if not (default and device == "cuda" if wanted is None else wanted):
        return False
    sharded = stage_of(deepspeed or {}) == 3
    obstacle = compile_obstacle(device)
    if sharded and not gathers_whole_blocks(deepspeed or {}):
        obstacle = "ZeRO stage 3 gathers each weight separately here, as with adapters (stage 2 does not)"
    if obstacle is None and lengths_vary:
        obstacle = lengths_obstacle(model)
    if obstacle is None:
        fused = run.dims.pipeline == 1
        compile_model(
            model,
            within_hooks=sharded,
            fused=fused,
            lengths_vary=lengths_vary,
            joins_norms=joins_norms,
            autotune=run.training.torch_compile_mode == "max-autotune-no-cudagraphs",
        )
        logger.info("blocks and loss are compiled, the first step takes longer (--torch_compile 0 switches this off)")
        return True
    if wanted:
        logger.warning("--torch_compile has no effect: %s", obstacle)
    else:
        logger.info("blocks and loss are not compiled: %s", obstacle)
    return False


def largest_of_all(number: int) -> int:
    """The maximum of `number` over all processes, on each of them."""
    numbers = [number] * dist.get_world_size()
    dist.all_gather_object(numbers, number)
    return max(numbers)


def choose_flat_grad_sync(run: Run, device: Device, parameters: int) -> bool:
    """Whether gradients are reduced once after backward, as --flat_grad_sync asks; unset, where that is faster.

    It is faster in three cases. Between GPUs with NVLink the reduction takes about 3 % of a step, and DeepSpeed's
    hooks during the backward pass take more. On a CPU, reductions cannot overlap with the backward pass. With one
    replica nothing is reduced, and the bookkeeping of the hooks costs more than the passes of a small model.

    Args:
        parameters: on the process that has most, the same everywhere.
    """
    wanted, obstacle = run.training.flat_grad_sync, _flat_obstacle(run, device)
    if obstacle is not None:
        if wanted:
            logger.warning("--flat_grad_sync has no effect: %s", obstacle)
        return False
    if wanted is not None:
        return wanted or _needs_flat(run, device)
    dims = run.dims
    if dims.data == 1 or _needs_flat(run, device):
        return True
    under_zero = bool(run.parallel.sharding) or dims.is_model_parallel
    # under ZeRO it costs memory for all gradients, so large models keep DeepSpeed's buckets
    if local_world_size() != dims.world or (under_zero and parameters > FLAT_LIMIT):
        return False
    return device.type == "cpu" or has_nvlink(dims.world)


def _flat_obstacle(run: Run, device: Device) -> str | None:
    """Why gradients cannot be reduced once after backward."""
    dims, sharding = run.dims, run.parallel.sharding
    if dims.world == 1:
        return "there is one process"
    if not device.half_weights:
        return "it needs half-precision weights (--fp16_opt_level O2)"
    if run.parallel.deepspeed:
        return "a DeepSpeed configuration file decides how gradients are reduced"
    if "stage3" in sharding or "offload" in sharding:
        return f"--sharding {sharding} reduces gradients in its own way"
    under_zero, needed = bool(sharding) or dims.is_model_parallel, _needs_flat(run, device)
    if under_zero and run.training.amp_master_grad and not needed:
        return "DeepSpeed accumulates the gradients of --amp_master_grad"
    if under_zero and not has_flat_grad_sync(needed=needed):
        return "the installed DeepSpeed differs from the tested one"
    return None


def _needs_flat(run: Run, device: Device) -> bool:
    """Whether flat gradient sync is the only way: DeepSpeed cannot accumulate a pipeline's gradients in float32."""
    return run.training.amp_master_grad and run.dims.pipeline > 1 and device.half_weights


def check_flat_grad_sync(run: Run, device: Device) -> None:
    """Raises UsageError if --flat_grad_sync 0 leaves no correct way to reduce gradients."""
    if run.training.flat_grad_sync is False and _needs_flat(run, device):
        raise UsageError(
            f"{named('flat_grad_sync')} 0: a pipeline with {named('amp_master_grad')} needs flat gradient sync, "
            "because DeepSpeed cannot accumulate a pipeline's gradients in float32; leave one of them out"
        )


def check_float8(run: Run, device: Device) -> None:
    """Raises UsageError if --fp8 is given and not available here."""
    if not run.training.fp8:
        return
    if device.type == "cpu":
        logger.warning("--fp8: a CPU has no float8, its rounding is computed, which is slow")
    elif torch.cuda.get_device_capability() < (8, 9):
        name = torch.cuda.get_device_name()
        raise UsageError(f"{name} has no float8 (Ada, Hopper and newer GPUs have); leave --fp8 out, use --bf16")


def use_float8(run: Run, model: GPTLMHeadModel, deepspeed: dict[str, Any] | None) -> Float8Weights | None:
    """Let the blocks' matrix products be float8 ones, with --fp8, but for the first and the last --fp8_skip blocks.

    Returns:
        The weights of these products, which have to be rounded again when weights change; None without --fp8.

    Raises:
        UsageError: under stage 3 of ZeRO, which --deepspeed FILE may ask for.
    """
    if not run.training.fp8:
        return None
    if stage_of(deepspeed or {}) == 3:
        raise UsageError("--fp8 does not work with ZeRO stage 3, which splits the weights; use stage 1 or 2")
    skipped, blocks = run.training.fp8_skip, model.transformer.own_blocks
    chosen = blocks[skipped : len(blocks) - skipped]
    model.transformer.chains_blocks = True
    logger.info("the matrix products of %d of %d layers are float8", len(chosen), len(blocks))
    return Float8Weights(chosen)
