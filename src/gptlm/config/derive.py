"""What follows from the arguments that were given: degrees, batch, schedule, and when to evaluate."""

import math
from collections.abc import Mapping
from dataclasses import replace

from gptlm.config.args.training import ParallelArguments, TrainingArguments
from gptlm.config.batch import NAMES, solve
from gptlm.config.origin import DEFAULT, Origin, Source, derived
from gptlm.config.parser import Parsed, shown
from gptlm.errors import UsageError, named
from gptlm.parallel.dims import ParallelDims
from gptlm.ranks import launched_processes

LAYOUT = (  # what --auto_parallel decides
    "tensor_parallel_degree",
    "pipeline_parallel_degree",
    "virtual_pp_degree",
    "sequence_parallel",
    "sharding",
    "sharding_parallel_degree",
    "per_device_train_batch_size",
    "gradient_accumulation_steps",
    "recompute",
    "recompute_granularity",
)
INTERVALS = ("eval_steps", "save_steps", "logging_steps")  # whole numbers, or below 1 shares of the run


def derive_world(parsed: Parsed, environment: Mapping[str, str], printing: bool) -> None:
    """The number of processes, which the launcher sets; with --print_config an argument.

    Raises:
        UsageError: if it is given elsewhere, or is not a positive number.
    """
    parallel = parsed[ParallelArguments]
    if parallel.world_size is not None and not printing:
        raise UsageError(
            f"{named('world_size')} {parallel.world_size} works only with --print_config; the launcher sets the "
            "number of processes: torchrun --nproc_per_node N SCRIPT ..."
        )
    if parallel.world_size is None:
        given = launched_processes(environment)
        source = DEFAULT if given is None else Source(Origin.ENVIRONMENT, "WORLD_SIZE")
        parallel = parsed.put(replace(parallel, world_size=1 if given is None else given), source)
    if (parallel.world_size or 0) < 1:
        raise UsageError(f"{named('world_size')} {parallel.world_size}: expected at least 1 process")


def sharing(parallel: ParallelArguments) -> int:
    """Replicas that share one state."""
    return max(parallel.sharding_parallel_degree, 1) if parallel.sharding else 1


def degrees_fit(parallel: ParallelArguments, dims: ParallelDims) -> bool:
    """Whether groups of replicas and replicas per group give all replicas."""
    return parallel.data_parallel_degree * sharing(parallel) == dims.data


def derive_degrees(parsed: Parsed, dims: ParallelDims) -> None:
    """Degrees of each dimension, and the values of `sharding` that mean on and off."""
    parallel = parsed[ParallelArguments]
    parallel = parsed.put(
        replace(parallel, tensor_parallel_degree=dims.tensor, pipeline_parallel_degree=dims.pipeline),
        derived("below 1 means 1"),
    )
    if parallel.sharding.lower() in ("true", "1"):
        parallel = parsed.put(replace(parallel, sharding="stage1"))
    if parallel.sharding.lower() in ("false", "0", "none"):
        parallel = parsed.put(replace(parallel, sharding=""))
    groups = parallel.data_parallel_degree
    if parallel.sharding and dims.data == 1 and parallel.sharding_parallel_degree > 1 and groups < 1:
        degree = parallel.sharding_parallel_degree
        parsed.note(f"{named('sharding_parallel_degree')} {degree} has no effect: one replica")
        source = derived("one data-parallel replica")
        parallel = parsed.put(replace(parallel, sharding_parallel_degree=1), source)
    if parallel.sharding_parallel_degree < 1 and not parallel.sharding:
        parallel = parsed.put(replace(parallel, sharding_parallel_degree=1), derived("no sharding"))
    elif parallel.sharding_parallel_degree < 1:
        degree = dims.data // groups if groups > 0 and dims.data % groups == 0 else dims.data
        source = derived(f"{dims.data} data-parallel replicas" + (f" / {groups}" if degree < dims.data else ""))
        parallel = parsed.put(replace(parallel, sharding_parallel_degree=degree), source)
    if parallel.sharding_parallel_degree > 1 and not parallel.sharding:
        parsed.note(
            f"{named('sharding_parallel_degree')} {parallel.sharding_parallel_degree} has no effect without "
            f"{named('sharding')} stage1, stage2 or stage3"
        )
    shares = sharing(parallel)
    left = max(dims.data // shares, 1)
    if parallel.adapt_dp and groups > 0 and not degrees_fit(parallel, dims) and left * shares == dims.data:
        parsed.note(
            f"{named('data_parallel_degree')} {groups} does not fit {dims.world} processes: "
            f"so adaptively adjust dp_degree to {left}"
        )
        groups = -1
    if groups < 1:
        parsed.put(replace(parallel, data_parallel_degree=left), derived(f"{dims.data} / {shares}"))


def name_auto_parallel(parsed: Parsed) -> None:
    """Log what --auto_parallel chose: the planner has added it to the command line, after what was typed."""
    if not parsed[ParallelArguments].auto_parallel:
        return
    chosen = [name for name in LAYOUT if parsed.sources[name].origin in (Origin.CLI, Origin.OVERRIDE)]
    parsed.sources |= dict.fromkeys(chosen, Source(Origin.CLI, "--auto_parallel"))
    values = ", ".join(f"{name} {shown(parsed.value(name))}" for name in chosen)
    parsed.note(f"{named('auto_parallel')} takes {values}")


def derive_batch(parsed: Parsed, dims: ParallelDims, *, global_evaluation: bool) -> None:
    """All four batch sizes from those that were given, and the batches of an evaluation.

    Args:
        global_evaluation: `eval_iters` counts global batches, as in all originals but PaddleNLP, where an evaluation
            reads `eval_iters` batches of its own size.

    Raises:
        UsageError: as `batch.solve`.
    """
    training = parsed[TrainingArguments]
    sizes: dict[str, int | None] = {short: parsed.value(n) for short, n in NAMES.items() if not parsed.is_default(n)}
    given = {short: size for short, size in sizes.items() if size is not None}
    batch = solve(
        given,
        replicas=dims.data,
        sharding=sharing(parsed[ParallelArguments]),
        micro=training.per_device_train_batch_size,
    )
    solved = {
        "micro": (batch.micro, f"{batch.local} / {batch.accumulation}"),
        "accumulation": (batch.accumulation, f"{batch.local} / {batch.micro}"),
        "local": (batch.local, f"{batch.micro} x {batch.accumulation}"),
        "total": (batch.total, str(batch)),
    }
    for short, (size, rule) in solved.items():
        if short not in given and parsed.value(NAMES[short]) != size:
            parsed.set(NAMES[short], size, derived(rule))
    if not global_evaluation:
        return
    if parsed.is_default("per_device_eval_batch_size"):
        parsed.set("per_device_eval_batch_size", batch.micro, derived("micro-batch"))
    evaluates = training.do_eval or training.do_predict
    for name in ("eval_iters", "test_iters") if evaluates else ():
        count = parsed.value(name)
        if count and batch.accumulation > 1:
            parsed.set(name, count * batch.accumulation, derived(f"{count} x {batch.accumulation} micro-batches"))


def derive_actions(parsed: Parsed) -> None:
    """Whether to train: unless only an evaluation is asked for."""
    training = parsed[TrainingArguments]
    if training.do_train is None:
        only_evaluate = training.do_eval or training.do_predict
        source = DEFAULT if only_evaluate else derived("no do_* flag")
        parsed.put(replace(training, do_train=not only_evaluate), source)


def derive_evaluations(parsed: Parsed) -> None:
    """When to evaluate."""
    training = parsed[TrainingArguments]
    if training.evaluation_strategy in (None, "no") and training.do_eval and training.do_train:
        if training.evaluation_strategy == "no":
            parsed.note(
                f"{named('evaluation_strategy')} no is overruled by {named('do_eval')}: evaluation happens every "
                "eval_steps"
            )
        training = parsed.put(replace(training, evaluation_strategy="steps"), derived("do_eval"))
    if training.evaluation_strategy is None:
        training = parsed.put(replace(training, evaluation_strategy="no"), derived("no do_eval"))
    if training.evaluation_strategy != "no" and not training.do_eval:
        training = parsed.put(replace(training, do_eval=True), derived("evaluation_strategy"))
    if training.evaluation_strategy == "steps" and not training.eval_steps:
        training = parsed.put(replace(training, eval_steps=training.logging_steps), derived("logging_steps"))
    if (
        training.do_train
        and training.evaluation_strategy == "no"
        and parsed.given("eval_steps")
        and training.eval_steps
    ):
        parsed.note(
            f"{named('eval_steps')} {training.eval_steps:g} has no effect: evaluation is off ({named('do_eval')})"
        )
    if training.disable_tqdm is None:
        training = parsed.put(replace(training, disable_tqdm=False))
    wanted = wants_best(training)
    if wanted and training.metric_for_best_model is None:
        parsed.put(replace(training, metric_for_best_model="loss"), derived(wanted))


def derive_own_metric(parsed: Parsed) -> None:
    """The direction of a metric that the caller of `pretrain` measures."""
    training = parsed[TrainingArguments]
    metric = training.metric_for_best_model
    if metric and training.greater_is_better is None:
        parsed.put(replace(training, greater_is_better=more_is_better(metric)), derived(metric))


def more_is_better(metric: str) -> bool:
    """The direction of a metric that gptlm does not know, as transformers guesses it."""
    return not metric.endswith("loss")


def wants_best(training: TrainingArguments) -> str | None:
    """The argument that compares evaluations, if there is one."""
    if training.load_best_model_at_end:
        return "load_best_model_at_end"
    if training.save_strategy == "best":
        return "save_strategy"
    return "early_stopping_patience" if training.early_stopping_patience is not None else None


def derive_schedule(parsed: Parsed) -> None:
    """Warm-up, decay, and when to log, evaluate and save, as soon as max_steps is known."""
    for name in INTERVALS:
        every = parsed.value(name)
        if every is not None and float(every).is_integer():
            parsed.set(name, int(every), parsed.sources[name])
    steps = parsed[TrainingArguments].max_steps
    if steps < 1:
        return
    for name in INTERVALS:
        every = parsed.value(name)
        if every is not None and 0 < every < 1:
            parsed.set(name, math.ceil(steps * every), _share(every, steps))
    training = parsed[TrainingArguments]
    if training.decay_steps is None:
        training = parsed.put(replace(training, decay_steps=steps), derived("max_steps", recomputed=True))
    training = _derive_warmup(parsed, training, steps)
    times, every = training.minimum_eval_times, training.eval_steps
    if times and every and every > max(1, steps // times):
        source = derived(f"{steps} / minimum_eval_times {times}")
        parsed.put(replace(training, eval_steps=max(1, steps // times)), source)


def _derive_warmup(parsed: Parsed, training: TrainingArguments, steps: int) -> TrainingArguments:
    """Warm-up steps. Called before and after `max_steps` is known, as fractions need it."""
    warmup, ratio, fraction = training.warmup_steps, training.warmup_ratio, training.warmup_fraction
    if warmup > 0 and parsed.sources["warmup_steps"].origin is Origin.DERIVED:
        return training  # from a call before max_steps was known
    if warmup > 0:
        for name, value in (("warmup_ratio", ratio), ("warmup_fraction", fraction)):
            if value:
                parsed.note(
                    f"{named(name)} {value:g} has no effect: {named('warmup_steps')} {warmup:g} takes precedence"
                )
        if warmup < 1:
            return parsed.put(replace(training, warmup_steps=math.ceil(steps * warmup)), _share(warmup, steps))
    elif ratio:
        source = derived(f"warmup_ratio {ratio:g} x max_steps {steps}", recomputed=True)
        return parsed.put(replace(training, warmup_steps=ratio * steps), source)
    elif fraction and training.decay_steps is not None:
        source = derived(f"warmup_fraction {fraction:g} x decay_steps {training.decay_steps:g}", recomputed=True)
        return parsed.put(replace(training, warmup_steps=fraction * training.decay_steps), source)
    return training


def _share(share: float, steps: int) -> Source:
    return derived(f"{share} x max_steps {steps}", share=share)
