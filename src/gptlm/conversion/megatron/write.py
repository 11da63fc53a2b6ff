"""A checkpoint of Megatron-LM's classic code, version 3.0, for any tensor x pipeline degree."""

import argparse
from collections.abc import Callable, Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from gptlm.conversion.detect import ITERATION, MEGATRON_FILES
from gptlm.conversion.gpt2_names import LAST, WPE, WTE, layer_and_part, layer_names
from gptlm.conversion.megatron import names as words
from gptlm.conversion.megatron.read import COLUMN, ROW
from gptlm.conversion.source import Source
from gptlm.errors import UsageError
from gptlm.model.files import CONV1D_WEIGHTS
from gptlm.model.presets import Shape

DIVISIBLE = 128  # Megatron pads the embedding to a multiple of this times the tensor degree


def check_degrees(shape: Shape, tensor: int, pipeline: int) -> None:
    """Raises UsageError if a model of `shape` cannot be cut so."""
    if shape.num_attention_heads % tensor or shape.intermediate_size % tensor:
        raise UsageError(
            f"--tensor_parallel_degree {tensor} does not divide {shape.num_attention_heads} heads and a feed-forward "
            f"width of {shape.intermediate_size}"
        )
    if shape.num_hidden_layers % pipeline:
        raise UsageError(f"--pipeline_parallel_degree {pipeline} does not divide {shape.num_hidden_layers} layers")


def padded_rows(shape: Shape, tensor: int) -> int:
    """Rows of the embedding that is written."""
    unit = DIVISIBLE * tensor
    return -(-shape.vocab_size // unit) * unit


def write_megatron(
    source: Source, folder: Path, *, tensor: int, pipeline: int, dtype: torch.dtype | None, done: Callable[[], Any]
) -> None:
    """Write `source` into `folder`/release, one stage at a time.

    Args:
        dtype: of the weights; None keeps theirs.
        done: called after each weight.
    """
    rows = padded_rows(source.shape, tensor)
    arguments = argparse.Namespace(
        **words.written_arguments(
            asdict(source.shape),
            rows,
            (tensor, pipeline),
            source.epsilon,
            source.activation,
            source.dropouts,
            dtype or source.get(WPE).dtype,
        )
    )
    for stage in range(pipeline):
        ranks: list[dict[str, Tensor]] = [{} for _ in range(tensor)]
        for name in stage_names(source.shape.num_hidden_layers, pipeline, stage):
            value = source.get(name) if dtype is None else source.get(name).to(dtype)
            for rank, piece in enumerate(cut(name, value, source.shape.num_attention_heads, tensor, rows)):
                ranks[rank][name] = piece
            done()
        for rank, weights in enumerate(ranks):
            place = f"mp_rank_{rank:02d}" + (f"_{stage:03d}" if pipeline > 1 else "")
            path = folder / "release" / place / MEGATRON_FILES[0]
            path.parent.mkdir(parents=True)
            first = stage * source.shape.num_hidden_layers // pipeline
            content = {"args": arguments, "checkpoint_version": 3.0, "iteration": 0, "model": tree(weights, first)}
            torch.save(content, path)
    (folder / ITERATION).write_text("release")


def stage_names(layers: int, pipeline: int, stage: int) -> Iterator[str]:
    """The weights of a stage; the last one has the embedding again, for the head."""
    if stage == 0 or stage == pipeline - 1:
        yield WTE
    if stage == 0:
        yield WPE
    for layer in range(layers * stage // pipeline, layers * (stage + 1) // pipeline):
        yield from layer_names(layer)
    if stage == pipeline - 1:
        yield from LAST


def cut(name: str, value: Tensor, heads: int, tensor: int, rows: int) -> list[Tensor]:
    """The pieces of a weight for `tensor` ranks, in Megatron's layout; a whole one for each where it is not cut.

    Args:
        value: in stock GPT-2's layout.
        rows: of the embedding with padding, which is zero.
    """
    part = layer_and_part(name)[1]
    if part in CONV1D_WEIGHTS:
        value = value.t()
    if part == WTE:
        value = torch.cat([value, value.new_zeros(rows - len(value), value.shape[1])])
    if part.startswith("attn.c_attn"):  # [3, heads, size] -> [heads, 3, size]
        value = value.reshape(3, heads, -1, *value.shape[1:]).transpose(0, 1).flatten(0, 2)
    if part in COLUMN:
        pieces = list(value.chunk(tensor, dim=0))
    else:
        pieces = list(value.chunk(tensor, dim=1)) if part in ROW else [value] * tensor
    return [piece.clone(memory_format=torch.contiguous_format) for piece in pieces]


def tree(weights: dict[str, Tensor], first: int) -> dict[str, Any]:
    """Megatron's nested dict of a stage whose first layer is `first`."""
    model: dict[str, Any] = {"language_model": {"encoder": {}}}
    language, encoder = model["language_model"], model["language_model"]["encoder"]
    for name, value in weights.items():
        layer, part = layer_and_part(name)
        module, _, kind = part.rpartition(".")
        if layer is not None:
            encoder[f"layers.{layer - first}.{words.WRITTEN[module]}.{kind}"] = value
        elif name in LAST:
            encoder[f"final_layernorm.{kind}"] = value
        elif name == WPE or WPE in weights:
            place = "word_embeddings" if name == WTE else "position_embeddings"
            language.setdefault("embedding", {})[place] = {"weight": value}
        else:
            model["word_embeddings_for_head"] = {"weight": value}
    return model
