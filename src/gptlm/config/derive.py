"""What follows from the flags that were given: processes, degrees, batch, schedule, and when to evaluate."""

import math
from collections.abc import Mapping

from gptlm.compat.defaults import launch_words, wanted_processes
from gptlm.compat.paddlenlp import EVALUATES
from gptlm.config.batch import NAMES, solve
from gptlm.config.parser import Parsed, shown
from gptlm.config.validate_layout import degrees_fit, sharing
from gptlm.errors import UsageError, named
from gptlm.parallel.dims import ParallelDims
from gptlm.ranks import launched_processes

LAYOUT = (  # what --auto_parallel decides
    "tensor_parallel_degree",
    "pipeline_parallel_degree",
    "virtual_pp_degree",
    "sequence_parallel",
    "sharding",
    "per_device_train_batch_size",
    "gradient_accumulation_steps",
    "recompute",
    "recompute_granularity",
)


INTERVALS = ("eval_steps", "save_steps", "logging_steps")  # whole numbers, or below 1 shares of the run


def resolve_schedule(parsed: Parsed) -> None:
    """Warm-up, decay, and when to log, evaluate and save, as soon as max_steps is known."""
    values = parsed.values
    steps = values["max_steps"]
    for name in INTERVALS:
        if values[name] is not None and float(values[name]).is_integer():
            values[name] = int(values[name])
    if steps < 1:
        return
    for name in INTERVALS:
        if values[name] is not None and 0 < values[name] < 1:
            parsed.set(name, math.ceil(steps * values[name]), f"derived: {values[name]} x max_steps {steps}")
    if values["decay_steps"] is None:
        parsed.set("decay_steps", steps, "derived: max_steps")
    if values["warmup_steps"] > 0:
        for name in ("warmup_ratio", "warmup_fraction"):
            if values[name] and not parsed.sources["warmup_steps"].startswith("derived"):
                parsed.note(f"--{name} {values[name]:g} has no effect: warmup_steps {values['warmup_steps']:g} wins")
        if values["warmup_steps"] < 1 and not parsed.sources["warmup_steps"].startswith("derived"):
            source = f"derived: {values['warmup_steps']} x max_steps {steps}"
            parsed.set("warmup_steps", math.ceil(steps * values["warmup_steps"]), source)
    elif values["warmup_ratio"]:
        source = f"derived: warmup_ratio {values['warmup_ratio']:g} x max_steps {steps}"
        parsed.set("warmup_steps", values["warmup_ratio"] * steps, source)
    elif values["warmup_fraction"]:
        source = f"derived: warmup_fraction {values['warmup_fraction']:g} x decay_steps {values['decay_steps']:g}"
        parsed.set("warmup_steps", values["warmup_fraction"] * values["decay_steps"], source)
    times = values["minimum_eval_times"]
    if times and values["eval_steps"] and values["eval_steps"] > max(1, steps // times):
        parsed.set("eval_steps", max(1, steps // times), f"derived: {steps} / minimum_eval_times {times}")


def resolve_world(parsed: Parsed, environment: Mapping[str, str], printing: bool) -> None:
    if parsed.values["world_size"] is not None and not printing:
        raise UsageError(
            f"--{named('world_size')} {parsed.values['world_size']} goes with --print_config only; the launcher sets "
            "the number of processes: torchrun --nproc_per_node N SCRIPT ..."
        )
    if parsed.values["world_size"] is None:
        given = launched_processes(environment)
        parsed.set("world_size", 1 if given is None else given, "default" if given is None else "WORLD_SIZE")
    if parsed.values["world_size"] < 1:
        raise UsageError(f"{named('world_size')} {parsed.values['world_size']}: expected at least 1 process")


def resolve_processes(parsed: Parsed, environment: Mapping[str, str], printing: bool) -> tuple[str, ...]:
    """The number of processes of a run; the launcher's words where they are still to be started, else ()."""
    launch = _resolve_wanted(parsed, environment, printing)
    resolve_world(parsed, environment, printing)
    if launch:
        parsed.set("world_size", wanted_processes(parsed.values), "derived: processes that are started")
    return launch


def _resolve_wanted(parsed: Parsed, environment: Mapping[str, str], printing: bool) -> tuple[str, ...]:
    """The launcher's words if the processes that the command or its file asks for are still to be started, else ()."""
    wanted, given = wanted_processes(parsed.values), launched_processes(environment)
    if wanted is None:
        return ()
    source = f"derived: {parsed.values['num_gpus_per_node']} x {parsed.values['num_nodes']}"
    if given is None:
        if printing and parsed.values["world_size"] is None:
            parsed.set("world_size", wanted, source)
        return launch_words(parsed.values) if wanted > 1 and not printing else ()
    if given != wanted:
        raise UsageError(
            f"{parsed.typed_as('num_gpus_per_node')} {parsed.values['num_gpus_per_node']} x {named('num_nodes')} "
            f"{parsed.values['num_nodes']} are {wanted} processes, the launcher started {given} (WORLD_SIZE)"
        )
    return ()


def resolve_degrees(parsed: Parsed, dims: ParallelDims) -> None:
    values = parsed.values
    for name, degree in (("tensor_parallel_degree", dims.tensor), ("pipeline_parallel_degree", dims.pipeline)):
        if values[name] != degree:
            parsed.set(name, degree, "derived: below 1 means 1")
    if values["sharding"].lower() in ("true", "1"):
        parsed.set("sharding", "stage1", parsed.sources["sharding"])
    if values["sharding"].lower() in ("false", "0", "none"):
        parsed.set("sharding", "", parsed.sources["sharding"])
    groups = values["data_parallel_degree"]
    if values["sharding"] and dims.data == 1 and values["sharding_parallel_degree"] > 1 and groups < 1:
        parsed.note(f"--sharding_parallel_degree {values['sharding_parallel_degree']} has no effect: one replica")
        parsed.set("sharding_parallel_degree", 1, "derived: one data-parallel replica")
    if values["sharding_parallel_degree"] < 1 and not values["sharding"]:
        parsed.set("sharding_parallel_degree", 1, "derived: no sharding")
    elif values["sharding_parallel_degree"] < 1:
        degree = dims.data // groups if groups > 0 and dims.data % groups == 0 else dims.data
        source = f"derived: {dims.data} data-parallel replicas"
        parsed.set("sharding_parallel_degree", degree, source + (f" / {groups}" if degree < dims.data else ""))
    if values["sharding_parallel_degree"] > 1 and not values["sharding"]:
        parsed.note(
            f"--{named('sharding_parallel_degree')} {values['sharding_parallel_degree']} has no effect without "
            f"--{named('sharding')} stage1, stage2 or stage3"
        )
    shares = sharing(values)
    left = max(dims.data // shares, 1)
    if values["adapt_dp"] and groups > 0 and not degrees_fit(values, dims) and left * shares == dims.data:
        parsed.note(
            f"{named('data_parallel_degree')} {groups} does not fit {dims.world} processes: "
            f"so adaptively adjust dp_degree to {left}"
        )
        groups = -1
    if groups < 1:
        parsed.set("data_parallel_degree", left, f"derived: {dims.data} / {shares}")


def name_layout(parsed: Parsed) -> None:
    """Say what --auto_parallel chose: it is on the command line behind what was typed, see `planning.with_layout`."""
    if not parsed.values["auto_parallel"]:
        return
    chosen = [name for name in LAYOUT if parsed.sources[name].startswith("-")]
    for name in chosen:
        parsed.sources[name] = "--auto_parallel"
    parsed.note("--auto_parallel takes " + ", ".join(f"{name} {shown(parsed.values[name])}" for name in chosen))


def resolve_batch(parsed: Parsed, dims: ParallelDims, dialect: str) -> None:
    """All four sizes from those that were given, and the batches of an evaluation.

    In PaddleNLP an evaluation reads `eval_iters` batches of its own size; in the other dialects as many global ones.
    """
    values, sources = parsed.values, parsed.sources
    given = {short: values[name] for short, name in NAMES.items() if sources[name] != "default"}
    batch = solve(given, replicas=dims.data, sharding=sharing(values), micro=values["per_device_train_batch_size"])
    solved = {
        "micro": (batch.micro, f"derived: {batch.local} / {batch.accumulation}"),
        "accumulation": (batch.accumulation, f"derived: {batch.local} / {batch.micro}"),
        "local": (batch.local, f"derived: {batch.micro} x {batch.accumulation}"),
        "total": (batch.total, f"derived: {batch}"),
    }
    for short, (size, source) in solved.items():
        if short not in given and values[NAMES[short]] != size:
            parsed.set(NAMES[short], size, source)
    if dialect == "paddlenlp":
        return
    if sources["per_device_eval_batch_size"] == "default":
        parsed.set("per_device_eval_batch_size", batch.micro, "derived: micro-batch")
    evaluates = values["do_eval"] or values["do_predict"]
    for name in ("eval_iters", "test_iters") if evaluates else ():
        count = values[name]
        if count and batch.accumulation > 1:
            parsed.set(name, count * batch.accumulation, f"derived: {count} x {batch.accumulation} micro-batches")


def resolve_strategies(parsed: Parsed) -> None:
    values = parsed.values
    if values["do_train"] is None:
        only_evaluate = values["do_eval"] or values["do_predict"]
        parsed.set("do_train", not only_evaluate, "derived: no do_* flag" if not only_evaluate else "default")
    asks = parsed.words.get("eval_steps") in EVALUATES
    if asks and values["do_train"] and not parsed.given("do_eval") and not parsed.given("evaluation_strategy"):
        parsed.set("do_eval", True, f"derived: {parsed.typed['eval_steps']}")
    if values["evaluation_strategy"] in (None, "no") and values["do_eval"] and values["do_train"]:
        if values["evaluation_strategy"] == "no":
            parsed.note("--evaluation_strategy no is overruled by --do_eval: evaluation happens every eval_steps")
        parsed.set("evaluation_strategy", "steps", "derived: do_eval")
    if values["evaluation_strategy"] is None:
        parsed.set("evaluation_strategy", "no", "derived: no do_eval")
    if values["evaluation_strategy"] != "no" and not values["do_eval"]:
        parsed.set("do_eval", True, "derived: evaluation_strategy")
    if values["evaluation_strategy"] == "steps" and not values["eval_steps"]:
        parsed.set("eval_steps", values["logging_steps"], "derived: logging_steps")
    if values["do_train"] and values["evaluation_strategy"] == "no" and parsed.given("eval_steps"):
        parsed.note(f"--{named('eval_steps')} {values['eval_steps']:g} has no effect: evaluation is off (--do_eval)")
    if values["disable_tqdm"] is None:
        parsed.values["disable_tqdm"] = False
    if values["load_best_model_at_end"] and values["metric_for_best_model"] is None:
        parsed.set("metric_for_best_model", "loss", "derived: load_best_model_at_end")
