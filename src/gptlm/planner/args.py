"""Arguments of `gptlm plan`, and what the planner takes from a run."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from gptlm.config.args.training import ParallelArguments, TrainingArguments
from gptlm.config.field import arg
from gptlm.config.run import PretrainRun
from gptlm.planner.memory import GIB, Layout, Sizes
from gptlm.planner.search import Cluster


@dataclass(frozen=True, kw_only=True)
class PlanArguments:
    """Machine"""

    num_gpus: int = arg(8, "total number of GPUs", ge=1)
    gpus_per_node: int = arg(8, "GPUs per node", ge=1)
    gpu_memory: float = arg(80.0, "memory of a GPU", gt=0, unit="GiB")
    gpu_tflops: float = arg(989.0, "peak half-precision throughput of a GPU", gt=0, unit="TFLOP/s")
    link_gbs: float = arg(300.0, "bandwidth between GPUs of a node", gt=0, unit="GB/s")
    network_gbs: float = arg(25.0, "bandwidth per GPU between nodes", gt=0, unit="GB/s")
    rows: int = arg(10, "number of layouts to print", ge=1)


@dataclass(frozen=True)
class PlanJob:
    """A checked planning command.

    Attributes:
        run: the job on one process.
        typed: the arguments of pretraining as typed.
        parallel, training: these arguments before anything is derived, except `sharding` by any alias.
        global_batch: samples per optimizer step on all GPUs.
        refusal: why the other arguments do not allow a layout; "" if they do.
    """

    machine: PlanArguments
    run: PretrainRun
    typed: tuple[str, ...]
    parallel: ParallelArguments
    training: TrainingArguments
    global_batch: int
    refusal: Callable[[Layout], str]


def sizes_of(run: PretrainRun) -> Sizes:
    shape, training = run.shape, run.training
    return Sizes(
        layers=shape.num_hidden_layers,
        width=shape.hidden_size,
        inner=shape.intermediate_size,
        heads=shape.num_attention_heads,
        vocabulary=shape.vocab_size,
        positions=shape.max_position_embeddings,
        length=run.data.max_seq_length,
        float8_layers=shape.num_hidden_layers - 2 * training.fp8_skip if training.fp8 else 0,
    )


def cluster_of(machine: PlanArguments) -> Cluster:
    return Cluster(
        cards=machine.num_gpus,
        per_node=min(machine.gpus_per_node, machine.num_gpus),
        memory=machine.gpu_memory * GIB,
        peak=machine.gpu_tflops * 1e12,
        link=machine.link_gbs * 1e9,
        network=machine.network_gbs * 1e9,
    )


def precision_of(run: PretrainRun) -> str:
    training = run.training
    half = (training.fp16 or training.bf16) and training.fp16_opt_level != "O0"
    return training.fp16_opt_level if half else "fp32"


def words_of(layout: Layout, parallel: ParallelArguments, training: TrainingArguments) -> list[str]:
    """The arguments of a layout, those that undo given values of `parallel` and `training` included."""
    words: dict[str, Any] = {
        "tensor_parallel_degree": layout.tensor,
        "pipeline_parallel_degree": layout.pipeline,
        "per_device_train_batch_size": layout.micro,
        "gradient_accumulation_steps": layout.accumulation,
    }
    if training.local_batch_size is not None:
        words["local_batch_size"] = layout.micro * layout.accumulation
    if layout.chunks > 1 or parallel.virtual_pp_degree > 1:
        words["virtual_pp_degree"] = layout.chunks
    if layout.sequence or parallel.sequence_parallel:
        words["sequence_parallel"] = int(layout.sequence)
    if layout.stage or parallel.sharding:
        words["sharding"] = f"stage{layout.stage}" if layout.stage else "none"
    smaller = layout.stage > 0 and layout.shards < layout.data
    if smaller or parallel.sharding_parallel_degree > 0:
        words["sharding_parallel_degree"] = layout.shards if smaller else -1
    if parallel.data_parallel_degree > 0:
        words["data_parallel_degree"] = -1
    if layout.recompute or training.recompute:
        words["recompute"] = int(bool(layout.recompute))
    if layout.recompute:
        words["recompute_granularity"] = layout.recompute
    return [word for name, value in words.items() for word in (f"--{name}", str(value))]
