"""What makes a run faster on the machine it meets: compiling, recorded passes, float8."""

import logging
from importlib.util import find_spec

import torch

from gptlm.config.run import Run
from gptlm.errors import UsageError
from gptlm.model.compiling import compile_network, why_not
from gptlm.model.float8 import use_float8
from gptlm.model.gpt import GPTLMHeadModel
from gptlm.recipes.machine import Machine

logger = logging.getLogger(__name__)


def compile_if_wanted(run: Run, model: GPTLMHeadModel, device: str, *, default: bool) -> bool:
    """Compile blocks and loss as --torch_compile says; unset, on a GPU where `default` and layers are whole.

    Returns:
        Whether they are compiled.
    """
    wanted = run.training.torch_compile
    helps = default and device == "cuda" and not run.dims.shares_replicas
    if not (helps if wanted is None else wanted):
        return False
    obstacle = why_not(device)
    if run.dims.pipeline > 1:
        obstacle = "the stages of a pipeline are not"
    elif "stage3" in run.parallel.sharding:
        obstacle = "ZeRO stage 3 brings each weight when it is needed"
    if obstacle is None:
        compile_network(model)
        logger.info("blocks and loss are compiled, the first step takes longer (--torch_compile 0: they are not)")
        return True
    if wanted:
        logger.warning("--torch_compile has no effect: %s", obstacle)
    else:
        logger.info("blocks and loss are not compiled: %s", obstacle)
    return False


def recorded(run: Run, device: str, *, compiled: bool, sharded: bool, obstacle: str | None = None) -> bool:
    """Whether the passes of a micro-batch are replayed as a CUDA graph, as --cuda_graphs says; unset, where they can.

    Args:
        compiled, sharded: whether the blocks are compiled, and DeepSpeed takes part.
        obstacle: why batches differ in shape, if they do.
    """
    wanted = run.training.cuda_graphs
    if device != "cuda":
        obstacle = "there is no GPU"
    elif sharded or run.dims.world > 1:
        obstacle = "processes exchange gradients during the passes"
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


def float8_if_wanted(run: Run, model: GPTLMHeadModel, device: str) -> None:
    """Let the blocks' matrix products be float8 ones, with --fp8."""
    if run.training.fp8:
        use_float8(model, emulated=device == "cpu")
        logger.info("the blocks' matrix products are float8; weights, checkpoints and all else are as without --fp8")
