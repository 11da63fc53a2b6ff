"""`gptlm plan`: the parallel layouts that fit a machine; and the layout that `--auto_parallel` chooses."""

import difflib
from collections.abc import Mapping, Sequence
from dataclasses import replace

from gptlm.commands.pretrain import PRETRAIN, parse_pretrain
from gptlm.compat.defaults import derive_processes
from gptlm.config.args.training import ParallelArguments, TrainingArguments
from gptlm.config.field import check_fields
from gptlm.config.origin import Origin
from gptlm.config.parser import Vocabulary, parse
from gptlm.config.problem import usage_error
from gptlm.config.run import PretrainRun, tried
from gptlm.errors import UsageError
from gptlm.planner.args import PlanArguments, PlanJob, precision_of, sizes_of, words_of
from gptlm.planner.memory import GIB
from gptlm.planner.search import Cluster, candidates

OWN = Vocabulary((PlanArguments,))
PLAN = replace(PRETRAIN, groups=(PlanArguments, *PRETRAIN.groups), sections=None)
ALONE = (
    "--world_size 1 --tensor_parallel_degree 1 --pipeline_parallel_degree 1 --virtual_pp_degree 1 "
    "--sequence_parallel 0 --data_parallel_degree -1 --sharding_parallel_degree -1"
).split()


def parse_plan(argv: Sequence[str]) -> PlanJob:
    """The job. Degrees in a file only give the number of data-parallel replicas, if no global batch size is given.

    Raises:
        UsageError: listing everything that is wrong.
    """
    own, rest = _own_words(list(argv))
    _check_words(rest)
    machine = parse(OWN, own)[PlanArguments]
    problems = check_fields(machine)
    given = parse(PRETRAIN, rest)
    parallel, training = given[ParallelArguments], given[TrainingArguments]
    degrees = {"tensor_parallel_degree": parallel.tensor_parallel_degree}
    degrees |= {"pipeline_parallel_degree": parallel.pipeline_parallel_degree}
    typed = (Origin.CLI, Origin.OVERRIDE)
    if any(degree > 1 and given.sources[name].origin in typed for name, degree in degrees.items()):
        raise UsageError("gptlm plan chooses tensor and pipeline degrees; leave them out")
    if parallel.world_size is not None:
        raise UsageError(f"--world_size {parallel.world_size}: use --num_gpus for the number of GPUs to plan for")
    run = tried(lambda: _on_one_process(rest, training), problems)
    if problems or run is None:
        raise usage_error(problems, {})
    total = run.batch.total
    if training.global_batch_size is None:
        split = max(parallel.tensor_parallel_degree, 1) * max(parallel.pipeline_parallel_degree, 1)
        total *= max(machine.num_gpus // split, 1)
    parallel = replace(parallel, sharding=run.parallel.sharding)
    return PlanJob(machine, run, tuple(rest), parallel, training, total)


def _own_words(argv: list[str]) -> tuple[list[str], list[str]]:
    """The arguments of PlanArguments, and the others."""
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


def _on_one_process(argv: Sequence[str], training: TrainingArguments) -> PretrainRun:
    """The job on one process, with micro-batches of one sample if the global batch size is given."""
    total = training.global_batch_size
    words = [*argv, *ALONE]
    if total:
        words += ["--per_device_train_batch_size", "1", "--gradient_accumulation_steps", str(total)]
    if total and training.local_batch_size:
        words += ["--local_batch_size", str(total)]
    return parse_pretrain(words, {}, printing=True)


def _check_words(words: list[str]) -> None:
    """Refuse arguments that are meant for the planner but would be taken as arguments of pretraining."""
    for word in words:
        if not word.startswith("--"):
            continue
        name = word[2:].partition("=")[0].replace("-", "_")
        if name in ("num_gpus_per_node", "num_nodes"):
            raise UsageError(f"{word}: use --num_gpus (in total) and --gpus_per_node")
        near = difflib.get_close_matches(name, OWN.flags(), n=1, cutoff=0.8)
        if near and name not in PRETRAIN.names():
            raise UsageError(f"{word} is unknown; did you mean --{near[0]}?")


def with_layout(argv: list[str], environment: Mapping[str, str]) -> list[str]:
    """`argv` with the arguments of the best layout if it contains `--auto_parallel`.

    Raises:
        UsageError: if nothing fits, or a layout is given, too.
    """
    if not any(word.replace("-", "_").startswith("__auto_parallel") for word in argv):
        return argv
    parsed = parse(PRETRAIN, argv)
    training = parsed[TrainingArguments]
    run = _on_one_process(argv, training)
    if not run.parallel.auto_parallel:
        return argv
    parallel = replace(parsed[ParallelArguments], sharding=run.parallel.sharding)
    if parallel.tensor_parallel_degree > 1 or parallel.pipeline_parallel_degree > 1 or parallel.sharding:
        raise UsageError("--auto_parallel chooses degrees and sharding; leave them out")
    derive_processes(parsed, environment, printing=True)
    world, memory = parsed[ParallelArguments].world_size or 1, run.parallel.auto_parallel_memory
    total = run.batch.total * (world if training.global_batch_size is None else 1)
    found = candidates(sizes_of(run), Cluster(world, min(world, 8), memory * GIB), total, precision_of(run))
    if not found:
        raise UsageError(
            f"--auto_parallel: no layout of {world} processes fits into {memory:g} GiB per GPU with a global batch of "
            f"{total}; gptlm plan shows the nearest layouts"
        )
    return [*argv, "--global_batch_size", str(total), *words_of(found[0].layout, parallel, training)]
