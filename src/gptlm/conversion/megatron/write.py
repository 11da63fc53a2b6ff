"""Write a checkpoint of Megatron-LM's classic code, version 3.0, for any tensor x pipeline degree."""

import argparse
from collections.abc import Callable, Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from gptlm.conversion.detect import ITERATION, MEGATRON_FILES
from gptlm.conversion.gpt2_names import FINAL_NORM, WPE, WTE, layer_and_part, layer_names
from gptlm.conversion.megatron.layout import COLUMN_PARALLEL, ROW_PARALLEL, SIZES, WRITTEN
from gptlm.conversion.source import Source
from gptlm.errors import UsageError, named
from gptlm.model.files import CONV1D_WEIGHTS
from gptlm.model.presets import Shape

DIVISIBLE = 128  # Megatron pads the embedding to a multiple of this times the tensor degree


def check_degrees(shape: Shape, tensor: int, pipeline: int) -> None:
    """Raises UsageError if a model of `shape` cannot be split so."""
    if shape.num_attention_heads % tensor or shape.intermediate_size % tensor:
        raise UsageError(
            f"{named('tensor_parallel_degree')} {tensor} does not divide {shape.num_attention_heads} heads and a "
            f"feed-forward size of {shape.intermediate_size}"
        )
    if shape.num_hidden_layers % pipeline:
        raise UsageError(
            f"{named('pipeline_parallel_degree')} {pipeline} does not divide {shape.num_hidden_layers} layers"
        )


def padded_rows(shape: Shape, tensor: int) -> int:
    """Rows of the written embedding."""
    unit = DIVISIBLE * tensor
    return -(-shape.vocab_size // unit) * unit


def write_megatron(
    source: Source, folder: Path, *, tensor: int, pipeline: int, dtype: torch.dtype | None, done: Callable[[], Any]
) -> None:
    """Write `source` into `folder`/release, one pipeline stage in memory at a time.

    Args:
        tensor, pipeline: degrees of parallelism.
        dtype: of the weights; None keeps theirs.
        done: called after each weight.
    """
    layers, heads = source.shape.num_hidden_layers, source.shape.num_attention_heads
    rows = padded_rows(source.shape, tensor)
    arguments = _arguments(source, rows, tensor, pipeline, dtype or source.get(WPE).dtype)
    for stage in range(pipeline):
        ranks: list[dict[str, Tensor]] = [{} for _ in range(tensor)]
        for name in _stage_names(layers, pipeline, stage):
            value = source.get(name) if dtype is None else source.get(name).to(dtype)
            for rank, part in enumerate(_split(name, value, heads, tensor, rows)):
                ranks[rank][name] = part
            done()
        for rank, weights in enumerate(ranks):
            rank_folder = f"mp_rank_{rank:02d}" + (f"_{stage:03d}" if pipeline > 1 else "")
            path = folder / "release" / rank_folder / MEGATRON_FILES[0]
            path.parent.mkdir(parents=True)
            model = _nested(weights, first_layer=stage * layers // pipeline)
            content = {"args": arguments, "checkpoint_version": 3.0, "iteration": 0, "model": model}
            with path.open("wb") as file:  # given a path, torch does not say why it cannot be written
                torch.save(content, file)
    (folder / ITERATION).write_text("release")


def _arguments(source: Source, rows: int, tensor: int, pipeline: int, dtype: torch.dtype) -> argparse.Namespace:
    sizes, dropouts = asdict(source.shape), source.dropouts
    return argparse.Namespace(
        **{theirs: sizes[ours] for ours, theirs in SIZES.items()},
        vocab_size=sizes["vocab_size"],
        padded_vocab_size=rows,
        make_vocab_size_divisible_by=DIVISIBLE,
        kv_channels=sizes["hidden_size"] // sizes["num_attention_heads"],
        seq_length=sizes["max_position_embeddings"],
        tensor_model_parallel_size=tensor,
        pipeline_model_parallel_size=pipeline,
        virtual_pipeline_model_parallel_size=None,
        layernorm_epsilon=source.epsilon,
        tokenizer_type="GPT2BPETokenizer",
        bias_gelu_fusion=source.activation != "gelu",  # the fused kernel computes the tanh form
        openai_gelu=False,
        hidden_dropout=dropouts[0],
        attention_dropout=dropouts[1],
        position_embedding_type="learned_absolute",
        untie_embeddings_and_output_weights=False,
        add_position_embedding=True,
        params_dtype=dtype,
        consumed_train_samples=0,
        consumed_valid_samples=0,
    )


def _stage_names(layers: int, pipeline: int, stage: int) -> Iterator[str]:
    """The weights of a stage. The last stage has a copy of the embedding for the output head."""
    if stage in (0, pipeline - 1):
        yield WTE
    if stage == 0:
        yield WPE
    for layer in range(layers * stage // pipeline, layers * (stage + 1) // pipeline):
        yield from layer_names(layer)
    if stage == pipeline - 1:
        yield from FINAL_NORM


def _split(name: str, value: Tensor, heads: int, tensor: int, rows: int) -> list[Tensor]:
    """The part of a weight for each of `tensor` ranks, in Megatron's layout.

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
    if part in COLUMN_PARALLEL:
        parts = value.chunk(tensor, dim=0)
    else:
        parts = value.chunk(tensor, dim=1) if part in ROW_PARALLEL else (value,) * tensor
    # torch.save writes the whole storage of a view
    return [part.clone(memory_format=torch.contiguous_format) for part in parts]


def _nested(weights: dict[str, Tensor], first_layer: int) -> dict[str, Any]:
    """Megatron's nested dict of a stage."""
    model: dict[str, Any] = {"language_model": {"encoder": {}}}
    language, encoder = model["language_model"], model["language_model"]["encoder"]
    for name, value in weights.items():
        layer, part = layer_and_part(name)
        module, _, kind = part.rpartition(".")
        if layer is not None:
            encoder[f"layers.{layer - first_layer}.{WRITTEN[module]}.{kind}"] = value
        elif name in FINAL_NORM:
            encoder[f"final_layernorm.{kind}"] = value
        elif WPE in weights:  # the first stage
            table = "word_embeddings" if name == WTE else "position_embeddings"
            language.setdefault("embedding", {})[table] = {"weight": value}
        else:
            model["word_embeddings_for_head"] = {"weight": value}
    return model
