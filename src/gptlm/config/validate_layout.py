"""What can be wrong with the way processes are divided: degrees, pipeline stages, sharding."""

from collections.abc import Iterator, Mapping
from typing import Any

from gptlm.compat.paddlenlp import PARALLEL_WORDS
from gptlm.config.parser import Parsed
from gptlm.errors import named
from gptlm.parallel.dims import ParallelDims, bubble_fraction

PIPELINE_STAGE = "pipeline parallel is not compatible for sharding stage2 or stage3, please using sharding stage1"


def not_built(dims: ParallelDims, values: Mapping[str, Any]) -> list[str]:
    """What is sensible but not implemented in this version."""
    refusals = []
    masking = values.get("document_masking", "none")
    if dims.pipeline > 1 and masking != "none":
        refusals.append(
            f"{named('document_masking')} {masking} with {named('pipeline_parallel_degree')} {dims.pipeline}: stages "
            f"hand on hidden states only, without documents; use --{named('tensor_parallel_degree')} instead, or "
            f"{named('document_masking')} none"
        )
    if "document_masking" not in values and dims.is_model_parallel:
        refusals.append(
            f"{named('tensor_parallel_degree')} {dims.tensor} and {named('pipeline_parallel_degree')} "
            f"{dims.pipeline}: fine-tuning runs on replicas only; use --{named('sharding')} stage3 for models that do "
            "not fit on one card"
        )
    return refusals


def layout_problems(parsed: Parsed, dims: ParallelDims) -> Iterator[str]:
    """What can be wrong with degrees and sharding."""
    values = parsed.values
    for name, known in PARALLEL_WORDS.items():
        for word in values[name].replace(",", " ").split():
            if word not in known:
                yield f"{named(name)}: {word!r} is unknown; expected {', '.join(known)}"
    yield from _sharding(parsed, dims)
    for name in ("num_attention_heads", "hidden_size", "intermediate_size"):
        if dims.tensor > 1 and values[name] and values[name] % dims.tensor:
            yield f"{named(name)} {values[name]} is not a multiple of {named('tensor_parallel_degree')} ({dims.tensor})"
    length = values.get("max_seq_length")
    if values["sequence_parallel"] and length and length % dims.tensor:
        yield (
            f"{named('max_seq_length')} {length} is not a multiple of {named('tensor_parallel_degree')} "
            f"({dims.tensor}): {named('sequence_parallel')}"
        )
    yield from _stages(parsed, dims)
    if dims.pipeline > 1 and values["virtual_pp_degree"] > 1 and values["gradient_accumulation_steps"] % dims.pipeline:
        steps = values["gradient_accumulation_steps"]
        yield (
            f"num of microbatches {steps} should be divisible of pp_degree {dims.pipeline} when using interleave "
            f"pipeline\n  {named('gradient_accumulation_steps')} {steps}, {named('pipeline_parallel_degree')} "
            f"{dims.pipeline}, {named('virtual_pp_degree')} {values['virtual_pp_degree']}; raise the global batch "
            f"size or set {named('virtual_pp_degree')} 1"
        )
    if "enable_dp_comm_overlap" in values["pipeline_parallel_config"] and dims.pipeline > 1 and dims.data > 1:
        yield (
            f"{named('pipeline_parallel_config')} enable_dp_comm_overlap with data parallelism: overlap has accuracy "
            "issue"
        )


def _stages(parsed: Parsed, dims: ParallelDims) -> Iterator[str]:
    """Layers against pipeline stages."""
    values = parsed.values
    layers, chunks = values["num_hidden_layers"], values["virtual_pp_degree"] if dims.pipeline > 1 else 1
    stages = dims.pipeline * chunks
    if dims.pipeline == 1 or not layers:
        return
    if layers < stages:
        yield (
            f"{named('num_hidden_layers')} {layers} is less than the {stages} stages of the pipeline; lower the degrees"
        )
    elif layers % stages and chunks > 1:
        yield (
            f"virtual pp doesn't support uneven layer split.\n  {named('num_hidden_layers')} {layers} is not a "
            f"multiple of {named('pipeline_parallel_degree')} {dims.pipeline} x {named('virtual_pp_degree')} {chunks}"
        )
    elif layers % stages:
        parsed.note(
            f"{named('num_hidden_layers')} {layers} does not divide by {named('pipeline_parallel_degree')} {stages}: "
            f"the first {layers % stages} stages have {layers // stages + 1} layers, the others {layers // stages}"
        )
    steps = values["gradient_accumulation_steps"]
    idle = bubble_fraction(dims.pipeline, chunks, steps)
    parsed.note(
        f"pipeline: {dims.pipeline} stages, {steps} micro-batches in a step: each process waits {idle:.0%} of the time "
        "(more micro-batches make it less)"
    )


def _sharding(parsed: Parsed, dims: ParallelDims) -> Iterator[str]:
    values = parsed.values
    words = values["sharding"].replace(",", " ").replace("_", " ").split()
    unknown = [word for word in words if word not in ("stage1", "stage2", "stage3", "offload")]
    stages = [word for word in words if word.startswith("stage")]
    if unknown:
        yield f"{named('sharding')} {values['sharding']!r}: expected stage1, stage2 or stage3, optionally with offload"
        return
    if words and len(stages) != 1:
        yield f"{named('sharding')} {values['sharding']!r}: exactly one of stage1, stage2 and stage3 is needed"
        return
    if stages and stages[0] != "stage1" and dims.pipeline > 1:
        yield f"{PIPELINE_STAGE} (sharding {values['sharding']!r}, {named('pipeline_parallel_degree')} {dims.pipeline})"
    if values["sharding"] and values["deepspeed"]:
        yield (
            f"{named('sharding')} {values['sharding']!r} and deepspeed {values['deepspeed']!r} both say how to shard; "
            "give one"
        )
    yield from _groups(values, dims)
    if stages:
        yield from _shares(stages[0], values["sharding_parallel_degree"], dims)


def _groups(values: Mapping[str, Any], dims: ParallelDims) -> Iterator[str]:
    """Whether groups and shares make up all replicas. The first line is PaddleFleetX's."""
    shares = sharing(values)
    if dims.data % shares or degrees_fit(values, dims):
        return
    groups = values["data_parallel_degree"]
    needed = groups * shares * dims.tensor * dims.pipeline
    yield (
        f"unreasonable config of dist_strategy.\n  {named('data_parallel_degree')} {groups} x "
        f"{named('sharding_parallel_degree')} {shares} x {named('tensor_parallel_degree')} {dims.tensor} x "
        f"{named('pipeline_parallel_degree')} {dims.pipeline} = {needed} is not the number of processes "
        f"({dims.world}); launch {needed} (--{named('world_size')} {needed} with --print_config), leave "
        f"{named('data_parallel_degree')} out, or add --{named('adapt_dp')}"
    )


def _shares(stage: str, degree: int, dims: ParallelDims) -> Iterator[str]:
    """Whether so many replicas can share."""
    if dims.data % degree:
        yield (
            f"{named('sharding_parallel_degree')} {degree} does not divide the {dims.data} data-parallel replicas "
            f"({dims.world} processes / ({dims.tensor} x {dims.pipeline}))"
        )
    elif 1 < degree < dims.data and dims.is_model_parallel:
        yield (
            f"{named('sharding_parallel_degree')} {degree} of {dims.data} replicas with tensor or pipeline "
            "parallelism: ZeRO shares over all replicas or none; leave the degree out"
        )
    elif 1 < degree < dims.data and stage == "stage2":
        yield (
            f"{named('sharding')} stage2 with {named('sharding_parallel_degree')} {degree} of {dims.data} replicas: "
            "DeepSpeed shares gradients over all replicas or none; use stage1 with this degree, stage3 with it, or "
            "leave the degree out"
        )


def sharing(values: Mapping[str, Any]) -> int:
    """Replicas that share one state."""
    return max(values["sharding_parallel_degree"], 1) if values["sharding"] else 1


def degrees_fit(values: Mapping[str, Any], dims: ParallelDims) -> bool:
    """Whether groups of replicas and replicas per group give all replicas."""
    return values["data_parallel_degree"] * sharing(values) == dims.data
