"""Flags of `gptlm plan`, and the layout that `--auto_parallel` takes."""

import difflib
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from gptlm.commands.pretrain import PRETRAIN, parse_pretrain
from gptlm.compat.defaults import derive_processes
from gptlm.config.field import arg, check_fields
from gptlm.config.origin import Origin
from gptlm.config.parser import Vocabulary, build, parse
from gptlm.config.problem import Problem, usage_error
from gptlm.config.run import PretrainRun, tried
from gptlm.errors import UsageError
from gptlm.planner.memory import GIB, Layout, Sizes
from gptlm.planner.search import Cluster, candidates


@dataclass(frozen=True, kw_only=True)
class PlanArguments:
    """The machine to plan for. All other flags are those of pretraining: the model, the batch, the precision."""

    num_gpus: int = arg(8, "cards in all", ge=1)
    gpus_per_node: int = arg(8, "cards that share fast links", ge=1)
    gpu_memory: float = arg(80.0, "GiB of each card", gt=0)
    gpu_tflops: float = arg(989.0, "peak of a card in half precision, in 10^12 operations per second", gt=0)
    link_gbs: float = arg(300.0, "GB/s between cards of a node", gt=0)
    network_gbs: float = arg(25.0, "GB/s of each card between nodes", gt=0)
    rows: int = arg(10, "layouts to print", ge=1)


OWN = Vocabulary((PlanArguments,))
PLAN = replace(PRETRAIN, groups=(PlanArguments, *PRETRAIN.groups), sections=None)
DEGREES = ("tensor_parallel_degree", "pipeline_parallel_degree")
ALONE = (
    "--world_size 1 --tensor_parallel_degree 1 --pipeline_parallel_degree 1 --virtual_pp_degree 1 "
    "--sequence_parallel 0 --data_parallel_degree -1 --sharding_parallel_degree -1"
).split()


@dataclass(frozen=True)
class PlanJob:
    """A checked planning command.

    Attributes:
        run: the job in one process.
        typed: its words.
        given: its flags as the words and a file have them.
        global_batch: samples in a step on all cards.
    """

    machine: PlanArguments
    run: PretrainRun
    typed: tuple[str, ...]
    given: Mapping[str, Any]
    global_batch: int


def parse_plan(argv: Sequence[str]) -> PlanJob:
    """The job; degrees that a file gives only say how many replicas read a batch each, where nothing says of all.

    Raises:
        UsageError: listing everything that is wrong.
    """
    own, rest = _own_words(list(argv))
    _check_words(rest)
    values: Mapping[str, Any] = parse(OWN, own).values
    problems: list[Problem] = check_fields(build(PlanArguments, values))
    given = parse(PRETRAIN, rest)
    degrees = {name: max(given.values[name], 1) for name in DEGREES}
    if any(
        degree > 1 and given.sources[name].origin in (Origin.CLI, Origin.OVERRIDE) for name, degree in degrees.items()
    ):
        raise UsageError("tensor and pipeline degrees are what is planned; leave them out")
    if given.values["world_size"] is not None:
        raise UsageError(
            f"--world_size {given.values['world_size']}: the cards to plan for are --num_gpus; leave it out"
        )
    run = tried(lambda: _alone(rest, given.values), problems)
    if problems or run is None:
        raise usage_error(problems, {})
    total = run.batch.total
    if given.values["global_batch_size"] is None:
        total *= max(values["num_gpus"] // math.prod(degrees.values()), 1)
    return PlanJob(build(PlanArguments, values), run, tuple(rest), _settings(given.values, run), total)


def _own_words(argv: list[str]) -> tuple[list[str], list[str]]:
    """The words of PlanArguments, and the others."""
    own: list[str] = []
    rest: list[str] = []
    into = rest
    for word in argv:
        if word.startswith("--"):
            name = word[2:].partition("=")[0].replace("-", "_")
            into = own if name in OWN.flags() else rest
        elif word in ("-c", "-o"):
            into = rest
        into.append(word)
    return own, rest


def _alone(argv: Sequence[str], given: Mapping[str, Any]) -> PretrainRun:
    """The job in one process, in micro-batches of one sample where the global batch is given."""
    total = given["global_batch_size"]
    words = [*argv, *ALONE]
    if total:
        words += ["--per_device_train_batch_size", "1", "--gradient_accumulation_steps", str(total)]
    if total and given["local_batch_size"]:
        words += ["--local_batch_size", str(total)]
    return parse_pretrain(words, {}, printing=True)


def _check_words(words: list[str]) -> None:
    """Refuse what is meant for the planner and would pass for a flag of pretraining."""
    for word in words:
        if not word.startswith("--"):
            continue
        name = word[2:].partition("=")[0].replace("-", "_")
        if name in ("num_gpus_per_node", "num_nodes"):
            raise UsageError(f"{word}: the cards to plan for are --num_gpus in all, --gpus_per_node in a node")
        near = difflib.get_close_matches(name, OWN.flags(), n=1, cutoff=0.8)
        if near and name not in PRETRAIN.words():
            raise UsageError(f"{word} is unknown; did you mean --{near[0]}?")


def with_layout(argv: list[str], environment: Mapping[str, str]) -> list[str]:
    """`argv` with the flags of the best layout where it asks for `--auto_parallel`.

    Raises:
        UsageError: if nothing fits, or the layout is given, too.
    """
    if not any(word.replace("-", "_").startswith("__auto_parallel") for word in argv):
        return argv
    parsed = parse(PRETRAIN, argv)
    run = _alone(argv, parsed.values)
    if not run.parallel.auto_parallel:
        return argv
    given = _settings(parsed.values, run)
    if any(given[name] > 1 for name in DEGREES) or given["sharding"]:
        raise UsageError("--auto_parallel chooses degrees and sharding; leave them out")
    derive_processes(parsed, environment, printing=True)
    world, memory = parsed.values["world_size"], run.parallel.auto_parallel_memory
    total = run.batch.total * (world if given["global_batch_size"] is None else 1)
    found = candidates(sizes_of(run), Cluster(world, min(world, 8), memory * GIB), total, precision_of(run))
    if not found:
        raise UsageError(
            f"--auto_parallel: no layout of {world} processes fits into {memory:g} GiB a card with a global batch of "
            f"{total}; gptlm plan says what comes nearest"
        )
    return [*argv, "--global_batch_size", str(total), *words_of(found[0].layout, given)]


def sizes_of(run: PretrainRun) -> Sizes:
    shape = run.shape
    return Sizes(
        layers=shape.num_hidden_layers,
        width=shape.hidden_size,
        inner=shape.intermediate_size,
        heads=shape.num_attention_heads,
        vocabulary=shape.vocab_size,
        positions=shape.max_position_embeddings,
        length=run.data.max_seq_length,
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


def _settings(values: Mapping[str, Any], run: PretrainRun) -> dict[str, Any]:
    """`values` as given, the sharding by whatever word."""
    return {**values, "sharding": run.parallel.sharding}


def words_of(layout: Layout, given: Mapping[str, Any]) -> list[str]:
    """The flags of a layout, those that take back what is `given` otherwise among them."""
    words: dict[str, Any] = {
        "tensor_parallel_degree": layout.tensor,
        "pipeline_parallel_degree": layout.pipeline,
        "per_device_train_batch_size": layout.micro,
        "gradient_accumulation_steps": layout.accumulation,
    }
    if given["local_batch_size"] is not None:
        words["local_batch_size"] = layout.micro * layout.accumulation
    if layout.chunks > 1 or given["virtual_pp_degree"] > 1:
        words["virtual_pp_degree"] = layout.chunks
    if layout.sequence or given["sequence_parallel"]:
        words["sequence_parallel"] = int(layout.sequence)
    if layout.stage or given["sharding"]:
        words["sharding"] = f"stage{layout.stage}" if layout.stage else "none"
    words |= {name: -1 for name in ("sharding_parallel_degree", "data_parallel_degree") if given[name] > 0}
    if layout.recompute or given["recompute"]:
        words["recompute"] = int(bool(layout.recompute))
    if layout.recompute:
        words["recompute_granularity"] = layout.recompute
    return [word for name, value in words.items() for word in (f"--{name}", str(value))]
