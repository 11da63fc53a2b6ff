"""`gptlm plan`: the parallel layouts that fit a machine; and the layout that `--auto_parallel` chooses."""

import difflib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

from gptlm.commands.pretrain import PRETRAIN, parse_pretrain
from gptlm.compat.defaults import derive_processes
from gptlm.config.args.training import ParallelArguments, TrainingArguments
from gptlm.config.field import check_fields
from gptlm.config.origin import Origin
from gptlm.config.parser import Vocabulary, parse
from gptlm.config.problem import usage_error
from gptlm.config.run import PretrainRun, tried
from gptlm.errors import GptlmError, UsageError
from gptlm.planner.args import PlanArguments, PlanJob, precision_of, sizes_of, words_of
from gptlm.planner.memory import GIB, Layout
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
    refusal = refusals(rest, parallel, training, machine.num_gpus)
    return PlanJob(machine, run, tuple(rest), parallel, training, total, refusal)


def refusals(
    words: Sequence[str], parallel: ParallelArguments, training: TrainingArguments, world: int
) -> Callable[[Layout], str]:
    """Why `pretrain WORDS` refuses a layout of `world` processes, "" if it takes it: --fp8 and --optim allow few.

    Layouts that differ in the batch alone are tried once.
    """
    known: dict[Layout, str] = {}

    def refusal(layout: Layout) -> str:
        kind = replace(layout, micro=1, accumulation=1)
        if kind not in known:
            total = ["--global_batch_size", str(layout.micro * layout.accumulation * layout.data)]
            more = [*total, *words_of(layout, parallel, training), "--world_size", str(world), "--auto_parallel", "0"]
            try:
                parse_pretrain([*words, *more], {}, printing=True)
                known[kind] = ""
            except GptlmError as error:
                known[kind] = str(error).splitlines()[0]
        return known[kind]

    return refusal


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


def with_layout(argv: list[str], environment: Mapping[str, str]) -> tuple[list[str], str]:
    """`argv` with the arguments of the best layout if it asks for `--auto_parallel`, and a line for the log: why.

    A layout in a file is replaced; its degrees only give the number of replicas, as in `parse_plan`.

    Raises:
        UsageError: if nothing fits, or a layout is typed, too.
    """
    parsed = parse(PRETRAIN, argv)
    if not parsed[ParallelArguments].auto_parallel:
        return argv, ""
    training, asked = parsed[TrainingArguments], parsed.typed_as("auto_parallel")
    run = _on_one_process(argv, training)
    parallel = replace(parsed[ParallelArguments], sharding=run.parallel.sharding)
    split = max(parallel.tensor_parallel_degree, 1) * max(parallel.pipeline_parallel_degree, 1)
    given = {
        n: parsed.sources[n] for n in ("tensor_parallel_degree", "pipeline_parallel_degree") if parsed.value(n) > 1
    }
    given |= {"sharding": run.sources["sharding"]} if parallel.sharding else {}
    typed = [name for name, source in given.items() if source.origin is not Origin.FILE]
    if typed:
        words = ", ".join(parsed.typed_as(name) for name in typed)
        raise UsageError(f"{asked} chooses degrees and sharding; leave them out ({words})")
    derive_processes(parsed, environment, printing=True)
    world, memory = parsed[ParallelArguments].world_size or 1, run.parallel.auto_parallel_memory
    total = run.batch.total * (max(world // split, 1) if training.global_batch_size is None else 1)
    sizes = sizes_of(run)
    cluster = Cluster(world, min(world, 8), memory * GIB)
    refusal = refusals(argv, parallel, training, world)
    found = candidates(sizes, cluster, total, precision_of(run), refusal)
    if not found:
        raise UsageError(
            f"{asked}: no layout of {world} processes fits into {memory:g} GiB per GPU with a global batch of {total}; "
            "gptlm plan shows the nearest layouts"
        )
    best, *others = found
    why = (
        f"{asked}: of {len(found)} layouts that fit into {memory:g} GiB this one is the fastest by estimate: "
        f"{best.memory.total / GIB:.1f} GiB per GPU, {best.tokens_per_second(sizes):,.0f} tokens/s"
    )
    if others:
        why += f"; the next one has {others[0].tokens_per_second(sizes):,.0f} tokens/s (gptlm plan prints them)"
    return [*argv, "--global_batch_size", str(total), *words_of(best.layout, parallel, training)], why
