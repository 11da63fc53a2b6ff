"""One training run, resolved: what was typed, what follows from it, and what is wrong with it."""

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

from gptlm.config import spellings
from gptlm.config.arguments import DataArguments, ModelArguments, ParallelArguments, TrainingArguments
from gptlm.config.batch import Batch
from gptlm.config.checks import not_built, pretrain_problems, problems_of
from gptlm.config.parser import Parsed, Vocabulary, build, parse
from gptlm.config.shapes import ModelSource, find_model, resolve_shape
from gptlm.errors import UsageError
from gptlm.model.presets import Shape, has_weights
from gptlm.parallel.dims import ParallelDims

PRETRAIN = Vocabulary(
    groups=(ModelArguments, DataArguments, ParallelArguments, TrainingArguments),
    renamed=spellings.PRETRAIN_RENAMED,
    ignored=spellings.PRETRAIN_IGNORED,
    refused=spellings.PRETRAIN_REFUSED,
)


@dataclass(frozen=True, kw_only=True)
class Run:
    """A checked training run; what it trains on is a field of its subclasses.

    Attributes:
        model, parallel, training: the flags, those that were not given filled in.
        source, shape: the model.
        dims: the processes.
        sources: flag -> where its value came from.
        notes: lines to log once.
        refusals: why this version cannot start the run; empty when it can.
    """

    model: ModelArguments
    parallel: ParallelArguments
    training: TrainingArguments
    source: ModelSource
    shape: Shape
    dims: ParallelDims
    sources: dict[str, str]
    notes: tuple[str, ...]
    refusals: tuple[str, ...]

    @property
    def batch(self) -> Batch:
        training = self.training
        return Batch(training.per_device_train_batch_size, training.gradient_accumulation_steps, self.dims.data)

    @property
    def groups(self) -> tuple[Any, ...]:
        """All flags of the run."""
        return (self.model, self.parallel, self.training)

    def as_json(self) -> str:
        """The run, the origin of each value, and the notes, as one JSON object."""
        values = {name: value for group in self.groups for name, value in asdict(group).items()}
        derived = {
            "world_size": (self.dims.world, self.sources["world_size"]),
            "data_parallel_degree": (
                self.dims.data,
                f"derived: {self.dims.world} / ({self.dims.tensor} x {self.dims.pipeline})",
            ),
            "local_batch_size": (self.batch.local, f"derived: {self.batch.micro} x {self.batch.accumulation}"),
            "global_batch_size": (self.batch.total, f"derived: {self.batch}"),
        }
        values |= {name: value for name, (value, _) in derived.items()}
        sources = self.sources | {name: source for name, (_, source) in derived.items()}
        refusals = [f"this version refuses to run it: {line}" for line in self.refusals]
        run = {name: _plain(value) for name, value in values.items()}
        return json.dumps({"run": run, "from": sources, "notes": [*self.notes, *refusals]}, indent=1)


AnyRun = TypeVar("AnyRun", bound=Run)


@dataclass(frozen=True, kw_only=True)
class PretrainRun(Run):
    """A run on token files."""

    data: DataArguments

    @property
    def groups(self) -> tuple[Any, ...]:
        return (self.model, self.data, self.parallel, self.training)

    @property
    def eval_batches(self) -> int:
        """Batches of one evaluation on each process."""
        limit = self.data.max_evaluate_steps
        return min(self.data.eval_iters, limit) if limit > 0 else self.data.eval_iters


def parse_pretrain(argv: Sequence[str], environment: Mapping[str, str], *, printing: bool = False) -> PretrainRun:
    """The run that `argv` and the launcher's `environment` describe.

    Args:
        printing: the run is for --print_config: `--world_size` counts, missing folders are noted.

    Raises:
        UsageError: listing everything that is wrong.
    """
    parsed = parse(PRETRAIN, argv)
    resolve_world(parsed, environment, printing)
    resolve_strategies(parsed)
    _resolve_weights(parsed)
    source = find_model(parsed)
    fields = resolve(parsed, source, printing, lambda: pretrain_problems(parsed, printing))
    return PretrainRun(data=build(DataArguments, parsed.values), **fields)


def resolve(
    parsed: Parsed, source: ModelSource, printing: bool, own_problems: Callable[[], Iterable[str]]
) -> dict[str, Any]:
    """The fields of `Run`, after every check.

    Args:
        own_problems: what can be wrong with this kind of run alone; called when everything is resolved.

    Raises:
        UsageError: listing everything that is wrong.
    """
    problems: list[str] = []
    shape = None
    try:
        shape = resolve_shape(parsed, source)
    except UsageError as error:
        problems.append(str(error))
    values = parsed.values
    dims = ParallelDims.of(values["world_size"], values["tensor_parallel_degree"], values["pipeline_parallel_degree"])
    _resolve_degrees(parsed, dims)
    resolve_schedule(parsed)
    problems += [*problems_of(parsed, dims, source, printing), *own_problems()]
    if problems or shape is None:
        raise UsageError("\n".join(problems))
    return {
        "model": build(ModelArguments, values),
        "parallel": build(ParallelArguments, values),
        "training": build(TrainingArguments, values),
        "source": source,
        "shape": shape,
        "dims": dims,
        "sources": parsed.sources,
        "notes": tuple(parsed.notes),
        "refusals": tuple(not_built(dims)),
    }


def with_epochs_counted(run: AnyRun, steps_per_epoch: int) -> AnyRun:
    """`run` with everything that waits for the data filled in: max_steps, and what is said in epochs.

    Args:
        steps_per_epoch: optimizer steps in one pass over the training split.
    """
    values = {**asdict(run.training)}
    parsed = Parsed(values, dict(run.sources), [])
    if values["max_steps"] < 1:
        steps = max(1, int(values["num_train_epochs"] * steps_per_epoch))
        parsed.set("max_steps", steps, f"derived: {values['num_train_epochs']:g} x {steps_per_epoch} steps per epoch")
    if values["evaluation_strategy"] == "epoch":
        parsed.set("evaluation_strategy", "steps", "derived: epoch")
        parsed.set("eval_steps", steps_per_epoch, "derived: steps per epoch")
    if values["save_strategy"] == "epoch":
        parsed.set("save_strategy", "steps", "derived: epoch")
        parsed.set("save_steps", steps_per_epoch, "derived: steps per epoch")
    resolve_schedule(parsed)
    training = build(TrainingArguments, parsed.values)
    return replace(run, training=training, sources=parsed.sources, notes=run.notes + tuple(parsed.notes))


def resolve_schedule(parsed: Parsed) -> None:
    """Warm-up, decay and evaluation steps, as soon as max_steps is known."""
    values = parsed.values
    steps = values["max_steps"]
    if steps < 1:
        return
    if values["decay_steps"] is None:
        parsed.set("decay_steps", steps, "derived: max_steps")
    if values["warmup_steps"] > 0:
        for name in ("warmup_ratio", "warmup_fraction"):
            if values[name] and not parsed.sources["warmup_steps"].startswith("derived"):
                parsed.note(f"--{name} {values[name]:g} has no effect: warmup_steps {values['warmup_steps']:g} wins")
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
            f"--world_size {parsed.values['world_size']} goes with --print_config only; the launcher sets the number "
            "of processes: torchrun --nproc_per_node N scripts/run_pretrain.py ..."
        )
    if parsed.values["world_size"] is None:
        given = environment.get("WORLD_SIZE", "").strip()
        if given and not given.isdigit():
            raise UsageError(f"WORLD_SIZE in the environment is {given!r}; launchers set it to the number of processes")
        parsed.set("world_size", int(given or 1), "WORLD_SIZE" if given else "default")
    if parsed.values["world_size"] < 1:
        raise UsageError(f"world_size {parsed.values['world_size']}: expected at least 1 process")


def _resolve_degrees(parsed: Parsed, dims: ParallelDims) -> None:
    values = parsed.values
    for name, degree in (("tensor_parallel_degree", dims.tensor), ("pipeline_parallel_degree", dims.pipeline)):
        if values[name] != degree:
            parsed.set(name, degree, "derived: below 1 means 1")
    if values["sharding"].lower() in ("true", "1"):
        parsed.set("sharding", "stage1", parsed.sources["sharding"])
    if values["sharding"].lower() in ("false", "0", "none"):
        parsed.set("sharding", "", parsed.sources["sharding"])
    if values["sharding"] and dims.data == 1 and values["sharding_parallel_degree"] > 1:
        parsed.note(f"--sharding_parallel_degree {values['sharding_parallel_degree']} has no effect: one replica")
        parsed.set("sharding_parallel_degree", 1, "derived: one data-parallel replica")
    if values["sharding_parallel_degree"] < 1:
        degree = dims.data if values["sharding"] else 1
        source = f"derived: {dims.data} data-parallel replicas" if values["sharding"] else "derived: no sharding"
        parsed.set("sharding_parallel_degree", degree, source)


def resolve_strategies(parsed: Parsed) -> None:
    values = parsed.values
    if values["do_train"] is None:
        only_evaluate = values["do_eval"] or values["do_predict"]
        parsed.set("do_train", not only_evaluate, "derived: no do_* flag" if not only_evaluate else "default")
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
    if values["disable_tqdm"] is None:
        parsed.values["disable_tqdm"] = False
    if values["load_best_model_at_end"] and values["metric_for_best_model"] is None:
        parsed.set("metric_for_best_model", "loss", "derived: load_best_model_at_end")


def _resolve_weights(parsed: Parsed) -> None:
    """Evaluation without training needs weights: those of output_dir unless a model is named with them."""
    values = parsed.values
    evaluates_only = not values["do_train"] and (values["do_eval"] or values["do_predict"])
    if not evaluates_only or values["continue_training"] or not values["output_dir"]:
        return
    if parsed.sources["model_name_or_path"] != "default" or not has_weights(Path(values["output_dir"])):
        raise UsageError(
            f"evaluation without training needs weights: add --continue_training to use those of "
            f"{values['model_name_or_path']}, or leave the model out and give the output_dir of a finished run"
        )
    parsed.set("model_name_or_path", values["output_dir"], "derived: the model in output_dir")
    parsed.set("continue_training", True, "derived: the model in output_dir")


def _plain(value: Any) -> Any:
    return int(value) if isinstance(value, float) and value.is_integer() and abs(value) < 2**53 else value
