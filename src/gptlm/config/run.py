"""One training run, resolved: what was typed, what follows from it, and what is wrong with it."""

import json
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

from gptlm.compat import megatron as spellings_megatron
from gptlm.compat import paddlenlp as spellings
from gptlm.compat import transformers as spellings_transformers
from gptlm.compat.auto_convert import take_foreign_model, take_foreign_start
from gptlm.compat.defaults import DialectArguments, resolve_dialect
from gptlm.compat.fleetx.translate import training_words
from gptlm.config.args.training import DataArguments, ModelArguments, ParallelArguments, TrainingArguments
from gptlm.config.batch import Batch
from gptlm.config.deepspeed_file import take_deepspeed
from gptlm.config.derive import (
    INTERVALS,
    name_layout,
    resolve_batch,
    resolve_degrees,
    resolve_processes,
    resolve_schedule,
    resolve_strategies,
)
from gptlm.config.field import check_fields
from gptlm.config.messages import all_in_user_words, in_user_words
from gptlm.config.model_size import ModelSource, find_model, resolve_shape
from gptlm.config.parser import Parsed, Vocabulary, build, parse
from gptlm.config.tokenizer_class import drop_class
from gptlm.config.validate import pretrain_problems, problems_of, steps_apart
from gptlm.config.validate_layout import degrees_fit, not_built
from gptlm.errors import UsageError, named
from gptlm.model.files import has_weights
from gptlm.model.presets import Shape
from gptlm.parallel.dims import ParallelDims

DERIVED = {  # values that follow from others -> how their origin begins
    "max_steps": "derived: ",
    "decay_steps": "derived: max_steps",
    "warmup_steps": "derived: warmup_",
    "min_learning_rate": "derived: lr_decay_ratio",
    "lora_alpha": "derived: 2 x lora_rank",
    "max_length": "derived: src_length",
}
SHARES = ("warmup_steps", *INTERVALS)
SHARE = re.compile(r"derived: (\S+) x max_steps ")

TEST_FACTOR = 10  # the final test reads ten times the batches of an evaluation, as in PaddleNLP

PRETRAIN = Vocabulary(
    groups=(ModelArguments, DataArguments, ParallelArguments, TrainingArguments, DialectArguments),
    renamed=spellings.PRETRAIN_RENAMED | spellings_transformers.PRETRAIN_RENAMED | spellings_megatron.RENAMED,
    ignored=spellings.PRETRAIN_IGNORED | spellings_transformers.PRETRAIN_IGNORED | spellings_megatron.IGNORED,
    refused=spellings.PRETRAIN_REFUSED | spellings_transformers.PRETRAIN_REFUSED | spellings_megatron.REFUSED,
    settings=spellings_transformers.TRAINING_SETTINGS,
    respelled=spellings_megatron.VALUES,
    sections=training_words,
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
    def step_batch(self) -> int:
        """Samples that the Trainer hands over at once: a micro-batch, or all of a step's to a pipeline."""
        return self.batch.local if self.dims.pipeline > 1 else self.batch.micro

    @property
    def step_accumulation(self) -> int:
        """How often it does so in a step."""
        return 1 if self.dims.pipeline > 1 else self.batch.accumulation

    @property
    def groups(self) -> tuple[Any, ...]:
        """All flags of the run."""
        return (self.model, self.parallel, self.training)

    @property
    def trains_all(self) -> bool:
        """Whether every weight of the model is trained."""
        return True

    @property
    def evaluated(self) -> str | None:
        """The model that is evaluated, where it is not the one trained in output_dir."""
        output = Path(self.training.output_dir or "").resolve()
        name = self.model.model_name_or_path or ""
        if self.training.do_train or Path(name).resolve() == output:
            return None
        return str(Path(name).resolve()) if Path(name).is_dir() else name

    def as_arguments(self) -> str:
        """The run as a JSON argument file; what belongs to one start alone is left out.

        So is what follows from other values of it by a rule: it follows again where those are changed.
        """
        once = ("world_size", "local_rank", "resume_from_checkpoint", "overwrite_output_dir", "auto_parallel")
        values = {name: value for group in self.groups for name, value in asdict(group).items()}
        kept = {name: value for name, value in values.items() if value is not None and name not in once}
        for name, source in self.sources.items():
            share = SHARE.match(source)
            if name in kept and share and name in SHARES:
                kept[name] = float(share[1])
            elif name in kept and name in DERIVED and source.startswith(DERIVED[name]):
                del kept[name]
        return json.dumps(kept, indent=1, ensure_ascii=False) + "\n"

    def as_values(self) -> dict[str, Any]:
        """Every flag of the run with its final value, and the processes."""
        values = {name: _plain(value) for group in self.groups for name, value in asdict(group).items()}
        return values | {"world_size": self.dims.world, "data_parallel_replicas": self.dims.data}

    def as_parameters(self) -> dict[str, Any]:
        """What trackers note of the run: `as_values`, the sizes of the model, and the global batch."""
        return self.as_values() | asdict(self.shape) | {"global_batch_size": self.batch.total}

    def as_json(self) -> str:
        """The run, the origin of each value, and the notes, as one JSON object."""
        run = self.as_values()
        replicas = f"derived: {self.dims.world} / ({self.dims.tensor} x {self.dims.pipeline})"
        sources = self.sources | {"data_parallel_replicas": replicas}
        sources = {name: source for name, source in sources.items() if name in run}
        refusals = [f"this version refuses to run it: {line}" for line in self.refusals]
        return json.dumps({"run": run, "from": sources, "notes": [*self.notes, *refusals]}, indent=1)


AnyRun = TypeVar("AnyRun", bound=Run)


@dataclass(frozen=True, kw_only=True)
class PretrainRun(Run):
    """A run on token files.

    Attributes:
        launch: what to tell the launcher where the processes are still to be started; else empty.
    """

    data: DataArguments
    launch: tuple[str, ...] = ()

    @property
    def groups(self) -> tuple[Any, ...]:
        return (self.model, self.data, self.parallel, self.training)

    @property
    def eval_batches(self) -> int:
        """Batches of one evaluation on each process."""
        return self._limited(self.data.eval_iters)

    @property
    def test_batches(self) -> int:
        """Batches of the final test on each process."""
        own = self.data.test_iters
        return self._limited(self.data.eval_iters) * TEST_FACTOR if own is None else self._limited(own)

    def _limited(self, batches: int) -> int:
        limit = self.data.max_evaluate_steps
        return min(batches, limit) if limit > 0 else batches


def parse_pretrain(argv: Sequence[str], environment: Mapping[str, str], *, printing: bool = False) -> PretrainRun:
    """The run that `argv` and the launcher's `environment` describe.

    Args:
        printing: the run is for --print_config: `--world_size` counts, missing folders are noted.

    Raises:
        UsageError: listing everything that is wrong.
    """
    parsed = parse(PRETRAIN, argv)
    take_foreign_start(parsed)
    take_foreign_model(parsed)
    problems: list[str] = []
    tried(lambda: resolve_dialect(parsed), problems)
    name_layout(parsed)
    launch = tried(lambda: resolve_processes(parsed, environment, printing), problems)
    resolve_strategies(parsed)
    drop_class(parsed, "tokenizer_name_or_path")
    tried(lambda: _resolve_weights(parsed), problems)
    source = tried(lambda: find_model(parsed), problems)
    fields = resolve(
        parsed, PRETRAIN, source, printing, problems, lambda: pretrain_problems(parsed, printing),
        parsed.values["dialect"],
    )  # fmt: skip
    return PretrainRun(data=build(DataArguments, parsed.values), launch=launch or (), **fields)


def resolve(
    parsed: Parsed,
    vocabulary: Vocabulary,
    source: ModelSource | None,
    printing: bool,
    problems: list[str],
    own_problems: Callable[[], Iterable[str]],
    dialect: str = "paddlenlp",
) -> dict[str, Any]:
    """The fields of `Run`, after every check.

    Args:
        source: the model; None: it was not found, which `problems` says.
        problems: what is known to be wrong already; everything else that is wrong is found before they are raised.
        own_problems: what can be wrong with this kind of run alone; called when everything is resolved.
        dialect: whose batches evaluations read.

    Raises:
        UsageError: listing everything that is wrong.
    """
    values = parsed.values
    shape = tried(lambda: resolve_shape(parsed, source), problems) if source else None
    degrees = (values["world_size"], values["tensor_parallel_degree"], values["pipeline_parallel_degree"])
    dims = tried(lambda: ParallelDims.of(*degrees), problems) if (values["world_size"] or 0) > 0 else None
    problems += tried(lambda: list(take_deepspeed(parsed)), problems) or ()
    if dims is not None:
        resolve_degrees(parsed, dims)
        if degrees_fit(values, dims):
            tried(lambda: resolve_batch(parsed, dims, dialect), problems)
    resolve_schedule(parsed)
    out_of_range = check_fields(*(build(group, values) for group in vocabulary.groups))
    problems += [*(problem.marked for problem in out_of_range), *problems_of(parsed, dims, source, printing)]
    problems += own_problems()
    if problems or source is None or shape is None or dims is None:
        reasons = parsed.refusals if parsed.refusals and not printing else problems
        raise UsageError(all_in_user_words(reasons, parsed))
    if source.kind == "flags":
        parsed.set("model_name_or_path", None, "derived: sizes are given")
    return {
        "model": build(ModelArguments, values),
        "parallel": build(ParallelArguments, values),
        "training": build(TrainingArguments, values),
        "source": source,
        "shape": shape,
        "dims": dims,
        "sources": parsed.sources,
        "notes": tuple(parsed.notes),
        "refusals": (*parsed.refusals, *(in_user_words(line, parsed) for line in not_built(dims, values))),
    }


Found = TypeVar("Found")


def tried(step: Callable[[], Found], problems: list[str]) -> Found | None:
    """What `step` gives; where it raises, its message joins `problems`."""
    try:
        return step()
    except UsageError as error:
        problems.append(error.marked)
        return None


def with_epochs_counted(run: AnyRun, steps_per_epoch: int, *, last_step: int | None = None) -> AnyRun:
    """`run` with everything that waits for the data filled in: max_steps, and what is said in epochs.

    Args:
        steps_per_epoch: optimizer steps in one pass over the training split.
        last_step: the one that ends num_train_epochs, where the trainer knows when epochs end and evaluates and saves
            then; None: the epochs are so many whole batches, and evaluations and checkpoints come after as many steps.
    """
    values = {**asdict(run.training)}
    parsed = Parsed(values, dict(run.sources), [])
    if values["max_steps"] < 1:
        steps = max(1, int(values["num_train_epochs"] * steps_per_epoch)) if last_step is None else last_step
        parsed.set("max_steps", steps, f"derived: {values['num_train_epochs']:g} x {steps_per_epoch} steps per epoch")
    if values["evaluation_strategy"] == "epoch" and last_step is None:
        parsed.set("evaluation_strategy", "steps", "derived: epoch")
        parsed.set("eval_steps", steps_per_epoch, "derived: steps per epoch")
    if values["save_strategy"] == "epoch" and last_step is None:
        parsed.set("save_strategy", "steps", "derived: epoch")
        parsed.set("save_steps", steps_per_epoch, "derived: steps per epoch")
    resolve_schedule(parsed)
    if values["do_train"] and values["load_best_model_at_end"] and values["evaluation_strategy"] == "steps":
        problems = list(steps_apart(values))
        if problems:
            raise UsageError(all_in_user_words(problems, parsed))
    training = build(TrainingArguments, parsed.values)
    notes = tuple(dict.fromkeys([*run.notes, *parsed.notes]))
    return replace(run, training=training, sources=parsed.sources, notes=notes)


def _resolve_weights(parsed: Parsed) -> None:
    """Evaluation without training needs weights: those of output_dir unless a model is named with them."""
    values = parsed.values
    evaluates_only = not values["do_train"] and (values["do_eval"] or values["do_predict"])
    if not evaluates_only or values["continue_training"] or not values["output_dir"]:
        return
    if parsed.sources["model_name_or_path"] != "default" or not has_weights(Path(values["output_dir"])):
        raise UsageError(
            f"evaluation without training needs weights: add --{named('continue_training')} to use those of "
            f"{values['model_name_or_path']}, or leave the model out and give the {named('output_dir')} of a finished "
            "run"
        )
    parsed.set("model_name_or_path", values["output_dir"], "derived: the model in output_dir")
    parsed.set("continue_training", True, "derived: the model in output_dir")


def _plain(value: Any) -> Any:
    return int(value) if isinstance(value, float) and value.is_integer() and abs(value) < 2**53 else value
