"""The network compiled by torch: block by block, so that the start is short and all blocks share one piece of code."""

import os
import shutil
from functools import partial
from typing import Any

import torch

from gptlm.kernels.fused_gelu import load_cublaslt
from gptlm.kernels.linear_cross_entropy import chunk_loss
from gptlm.upstream.torch import triton_obstacle

COMPILED_CHUNK = 4096  # tokens: without float32 logits in memory longer chunks cost less and fill the GPU better


def compile_model(model: Any, *, within_hooks: bool = False, fused: bool = True, lengths_vary: bool = False) -> None:
    """Let the blocks of `model`, a GPTLMHeadModel, and its loss be compiled when they are first used; names stay.

    Exchanges between tensor-parallel processes are compiled with what they belong to.

    Args:
        within_hooks: a block's hooks are not compiled, as ZeRO's stage 3 needs it, whose hooks bring its weights.
        fused: GELU may be computed inside matrix products; each takes the CPU a tenth of a millisecond, which is too
            much for the small micro-batches of a pipeline.
        lengths_vary: from batch to batch, so one piece of code is made for all of them.
    """
    dynamic = True if lengths_vary else None
    for block in model.transformer.own_blocks:
        # torch's own dropout kernel makes four random numbers in the time of one of Triton's; for what a block
        # computes again, the compiler has to know the numbers' seed
        options: Any = None if block.recompute else {"fallback_random": True}
        block.mlp.fused = (
            fused and block.recompute != "full" and load_cublaslt() is not None
        )  # its results would be kept
        if within_hooks:
            block.forward = torch.compile(block.forward, dynamic=dynamic, options=options)
        else:
            block.compile(dynamic=dynamic, options=options)
    chunk = torch.compile(chunk_loss, dynamic=dynamic)
    model.output_loss = partial(model.output_loss, chunk=chunk, chunk_tokens=COMPILED_CHUNK)


def compile_obstacle(device: str) -> str | None:
    """What this machine lacks for compiling, or None."""
    if device == "cpu":
        return None if os.environ.get("CXX") or any(map(shutil.which, ("g++", "clang++"))) else "no C++ compiler"
    obstacle = triton_obstacle()
    if obstacle:
        return obstacle
    return None if os.environ.get("CC") or any(map(shutil.which, ("gcc", "clang", "cc"))) else "no C compiler"
