"""`parallelize`: makes this process's part of a tensor- and pipeline-parallel model.

The model starts on the meta device. Each module is initialized in full, with the same random numbers on every process,
then sharded and put back, so a process never holds more than its part and one full module. Layers of other pipeline
stages are replaced by empty modules, so parameters keep the names of the full model.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import nn

from gptlm.parallel.collectives import gather_sequence
from gptlm.parallel.process_groups import Mesh
from gptlm.parallel.sharding import EMBEDDING, OUTPUT, shard, split_of, stage_layers, vocab_range
from gptlm.parallel.tensor import (
    ColumnLinear,
    RowLinear,
    SequenceLayerNorm,
    SequencePositions,
    VocabularyEmbedding,
    VocabularyLogits,
    VocabularyLoss,
    VocabularyScores,
    own_random_numbers,
)
from gptlm.upstream.torch import check_tensor_parallel

Fill = Callable[[Any, str, nn.Module], None]  # (model, name, module): initializes the weights of one module


class Elsewhere(nn.Module):
    """In place of a module that is on another pipeline stage."""


def parallelize(
    model: Any,
    mesh: Mesh,
    fill: Fill,
    loss: Any,
    *,
    chunks: int = 1,
    sequence: bool = False,
    device: torch.device | None = None,
) -> Any:
    """Initialize this process's part of `model`, a `GPTLMHeadModel` on the meta device, in place.

    Args:
        loss: `kernels.linear_cross_entropy.linear_cross_entropy`.
        chunks: pipeline chunks per process.
        sequence: split activations along the sequence inside the tensor-parallel group.
        device: whose generator draws attention's dropout; None: the CPU.

    Raises:
        GptlmError: if this version of torch cannot do sequence parallelism.
    """
    if mesh.dims.tensor > 1:
        check_tensor_parallel(sequence=sequence)
    layers = own_layers(mesh, model.config.n_layer, chunks)
    for name in [name for name, _ in model.named_modules()]:  # a list of modules would keep all of them in full
        module = model.get_submodule(name)
        if name + ".weight" == OUTPUT or not dict(module.named_parameters(recurse=False)):  # `_tie` sets the output
            continue
        module.to_empty(device="cpu", recurse=False)
        fill(model, name, module)
        kept = _belongs(name, mesh, layers)
        _replace(model, name, _share(name, module, mesh, sequence) if kept else Elsewhere())
        if name + ".weight" == EMBEDDING:
            _tie(model, module, mesh)
    for number in range(model.config.n_layer):
        if number not in layers:
            model.transformer.h[number] = Elsewhere()
    _connect(model, mesh, loss, sequence, device or torch.device("cpu"))
    return model


def own_layers(mesh: Mesh, count: int, chunks: int) -> list[int]:
    """The layers of this process's stages, which are `pipeline` apart (see `parallel.pipeline`)."""
    stages = mesh.dims.pipeline * chunks
    own = range(mesh.pipeline_rank, stages, mesh.dims.pipeline)
    return [layer for stage in own for layer in stage_layers(stage, stages, count)]


def _belongs(name: str, mesh: Mesh, layers: list[int]) -> bool:
    if name.startswith("transformer.h."):
        return int(name.split(".")[2]) in layers
    if name == "transformer.ln_f":
        return mesh.is_last_stage
    return mesh.is_first_stage  # both embeddings


def _share(name: str, module: Any, mesh: Mesh, sequence: bool) -> nn.Module:
    """This process's shard of a full module."""
    degree = mesh.dims.tensor
    if degree == 1:
        return module
    values = {
        own: shard(f"{name}.{own}", tensor.data, mesh.tensor_rank, degree)
        for own, tensor in module.named_parameters(recurse=False)
    }
    group = mesh.tensor_group
    if isinstance(module, nn.Linear):
        kind = RowLinear if name.endswith(".c_proj") else ColumnLinear
        whole = module.in_features, module.out_features
        return kind(values["weight"], values["bias"], *whole, group, sequence)
    if isinstance(module, nn.LayerNorm):
        return SequenceLayerNorm(values["weight"], values["bias"], module.eps, group) if sequence else module
    if name + ".weight" == EMBEDDING:
        first = vocab_range(mesh.tensor_rank, degree, module.weight.shape[0]).start
        return VocabularyEmbedding(values["weight"], group, sequence, first)
    return SequencePositions(values["weight"], group) if sequence else module


def _tie(model: Any, whole: nn.Module, mesh: Mesh) -> None:
    """Set the output layer's weight: the embedding, or a copy of it if that is on another stage."""
    model.lm_head = nn.Module()
    if not mesh.is_last_stage:
        return
    weight = model.transformer.wte.weight if mesh.is_first_stage else None
    if weight is None:
        share = shard(EMBEDDING, whole.weight.data, mesh.tensor_rank, mesh.dims.tensor)  # type: ignore[union-attr, arg-type]
        weight = nn.Parameter(share)
    if mesh.dims.tensor > 1:
        model.lm_head = VocabularyLogits(weight, mesh.tensor_group, model.config.vocab_size)
    else:
        model.lm_head.weight = weight


def _replace(model: nn.Module, name: str, module: nn.Module) -> None:
    parent, _, own = name.rpartition(".")
    setattr(model.get_submodule(parent), own, module)


def _connect(model: Any, mesh: Mesh, loss: Any, sequence: bool, device: torch.device) -> None:
    """Set the vocabulary-parallel loss and scores, and heads and RNG of split attention.

    Also which copy of a weight counts for the gradient norm.
    """
    if mesh.dims.tensor > 1:
        first = vocab_range(mesh.tensor_rank, mesh.dims.tensor, model.config.vocab_size).start
        model.output_loss = VocabularyLoss(loss, mesh.tensor_group, sequence, first)
        model.output_scores = VocabularyScores(model.output_scores, mesh.tensor_group, first)
        if sequence:
            model.gather_hidden = partial(gather_sequence, group=mesh.tensor_group)
        for module in model.modules():
            if hasattr(module, "core_context"):
                module.heads //= mesh.dims.tensor
                module.core_context = partial(own_random_numbers, mesh.tensor_rank, device)
    for name, parameter in model.named_parameters():
        mark_counted(name, parameter, mesh)


def mark_counted(name: str, parameter: Any, mesh: Mesh) -> None:
    """Note whether `parameter` counts for the gradient norm: of what several processes hold alike, one copy does."""
    is_copy = name == OUTPUT and not mesh.is_first_stage  # the embedding counts on the first stage
    counts = (bool(split_of(name)) or mesh.tensor_rank == 0) and not is_copy
    parameter.model_parallel = parameter.tensor_model_parallel = counts  # DeepSpeed and `FlatGradSync` read them
