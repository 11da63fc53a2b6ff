"""torch.compile for the network, block by block: the start is short, and all blocks share one compiled graph."""

import os
import shutil
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from gptlm.kernels import fused_gelu
from gptlm.kernels.linear_cross_entropy import chunk_loss, chunk_scores
from gptlm.upstream.torch import leave_open, opens_dimensions, recomputes_open_shapes, triton_obstacle

AUTOTUNE = {"max_autotune": True, "coordinate_descent_tuning": True}  # mode max-autotune-no-cudagraphs of torch 2.13
COMPILED_CHUNK = 4096  # tokens: without float32 logits in memory, longer chunks cost less and fill the GPU better


def compile_model(
    model: Any,
    *,
    within_hooks: bool = False,
    fused: bool = True,
    lengths_vary: bool = False,
    joins_norms: bool = False,
    autotune: bool = False,
) -> None:
    """Compile the blocks of `model`, a GPTLMHeadModel, and its loss at their first use; parameter names stay.

    Collectives of tensor parallelism are compiled as parts of the blocks.

    Args:
        within_hooks: leave a block's hooks uncompiled, such as those of ZeRO stage 3, which gather its weights.
        fused: allow GELU inside matrix products. Each costs 0.1 ms of CPU time, too much for the small micro-batches
            of a pipeline.
        lengths_vary: compile once for all sequence lengths, not first for one of them.
        joins_norms: allow each residual sum to be one kernel with the layer norm after it, across blocks. Each costs
            CPU time, too.
        autotune: measure several kernels for each matrix product and take the fastest: minutes at the first step.
    """
    tuning: dict[str, Any] = AUTOTUNE if autotune else {}
    fused = fused and fused_gelu.is_available()
    transformer = model.transformer
    transformer.chains_blocks |= joins_norms and can_join_norms(transformer)
    for block in transformer.own_blocks:
        # torch's own dropout kernel makes four random numbers in the time of one of Triton's; to recompute dropout, the
        # compiler has to know its seed
        options: Any = tuning | ({} if block.recompute else {"fallback_random": True}) or None
        block.mlp.fused = fused and block.recompute != "full"  # a fused layer keeps its results, so nothing is saved
        if within_hooks:
            block.forward = torch.compile(block.forward, options=options)
        else:
            block.compile(options=options)
        if transformer.chains_blocks:
            block.chained = torch.compile(block.chained, options=options)
    if lengths_vary and opens_dimensions():  # dynamic=True would leave numbers of the code open, too: twice the time
        transformer.drop.register_forward_hook(_leave_shape_open)
        transformer.lengths_vary = True
    # the vocabulary is the same in all batches; after a second number of tokens, that one is compiled as any number
    chunk, scores = torch.compile(chunk_loss, options=tuning or None), torch.compile(chunk_scores)
    model.output_loss = partial(model.output_loss, chunk=chunk, chunk_tokens=COMPILED_CHUNK)
    model.output_scores = partial(model.output_scores, chunk=scores, chunk_tokens=COMPILED_CHUNK)


def _leave_shape_open(module: Any, arguments: Any, hidden: Tensor) -> None:
    # the batch, too: where it is known, inductor's sums over all tokens take four times as long (torch 2.11, H200)
    if not torch.compiler.is_compiling():
        leave_open(hidden, dimensions=(0, 1))


def can_join_norms(transformer: Any) -> bool:
    """Whether `chained` of each block does what `forward` does: plain layer norms, nothing recomputed."""
    norms = [transformer.ln_f, *(norm for block in transformer.h for norm in (block.ln_1, block.ln_2))]
    recomputed = {block.recompute for block in transformer.h} - {"", "core_attn"}
    return not recomputed and all(type(norm) is nn.LayerNorm for norm in norms)


def lengths_obstacle(model: Any) -> str | None:
    """Why the blocks of `model` cannot be trained compiled where lengths vary, or None."""
    recomputed = {block.recompute for block in model.transformer.own_blocks} - {"", "core_attn"}
    if recomputed and not recomputes_open_shapes():
        return f"torch {torch.__version__} does not compile recomputed layers for several lengths (2.13 does)"
    return None


def compile_obstacle(device: str) -> str | None:
    """What this machine lacks for torch.compile, or None."""
    if device == "cpu":
        return None if os.environ.get("CXX") or any(map(shutil.which, ("g++", "clang++"))) else "no C++ compiler"
    has_c = os.environ.get("CC") or any(map(shutil.which, ("gcc", "clang", "cc")))
    return triton_obstacle() or (None if has_c else "no C compiler")
