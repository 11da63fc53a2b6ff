"""A checked training run: every argument filled in, the model, and the processes."""

import json
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

from gptlm.config.args.hub import HubArguments
from gptlm.config.args.sft import LoraArguments, SftArguments
from gptlm.config.args.training import DataArguments, ModelArguments, ParallelArguments, TrainingArguments
from gptlm.config.batch import Batch
from gptlm.config.checkpoints import derive_checkpoint_format
from gptlm.config.deepspeed_file import take_deepspeed
from gptlm.config.derive import degrees_fit, derive_batch, derive_degrees, derive_schedule
from gptlm.config.model_size import ModelSource, derive_shape
from gptlm.config.origin import Source, derived
from gptlm.config.parser import Parsed
from gptlm.config.problem import Problem, usage_error
from gptlm.config.validate import problems_of, steps_apart
from gptlm.errors import UsageError, with_flags_shown
from gptlm.model.presets import Shape
from gptlm.parallel.dims import ParallelDims
from gptlm.secret import Secret

TEST_FACTOR = 10  # the final test reads ten times the batches of an evaluation, as in PaddleNLP
ONE_START = (
    "world_size", "local_rank", "resume_from_checkpoint", "overwrite_output_dir", "auto_parallel", "profile",
    "hub_token",
)  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Run:
    """A checked training run; its data is a field of the subclasses.

    Attributes:
        model, parallel, training, hub: the arguments, those that were not given filled in.
        source, shape: the model.
        dims: the processes.
        task: what is trained; a checkpoint of another task is not resumed from (checkpoint/task.py).
        sources: argument -> where its value came from.
        typed: argument that was given -> how messages call it.
        notes: lines to log once.
        refusals: why this version cannot start the run; empty when it can.
        missing: with --print_config: what the command lacks to be started.
    """

    model: ModelArguments
    parallel: ParallelArguments
    training: TrainingArguments
    hub: HubArguments
    source: ModelSource
    shape: Shape
    dims: ParallelDims
    task: str
    sources: dict[str, Source]
    typed: dict[str, str]
    notes: tuple[str, ...]
    refusals: tuple[str, ...]
    missing: tuple[str, ...] = ()

    @property
    def batch(self) -> Batch:
        training = self.training
        return Batch(training.per_device_train_batch_size, training.gradient_accumulation_steps, self.dims.data)

    @property
    def step_batch(self) -> int:
        """Samples in a batch of the Trainer: a micro-batch, or with a pipeline the local batch."""
        return self.batch.local if self.dims.pipeline > 1 else self.batch.micro

    @property
    def step_accumulation(self) -> int:
        """Such batches in an optimizer step."""
        return 1 if self.dims.pipeline > 1 else self.batch.accumulation

    @property
    def order_seed(self) -> int:
        """The random seed of the data order."""
        return self.training.seed if self.training.data_seed is None else self.training.data_seed

    @property
    def groups(self) -> tuple[Any, ...]:
        """All arguments of the run."""
        return (self.model, self.parallel, self.training, self.hub)

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
        """The run as a JSON argument file that starts it again, perhaps with other values beside it.

        Arguments of one start alone are omitted, and values that are recomputed by a rule.
        """
        values = {name: value for group in self.groups for name, value in asdict(group).items()}
        kept = {name: value for name, value in values.items() if value is not None and name not in ONE_START}
        for name in list(kept):
            source = self.sources[name]
            if source.share is not None:
                kept[name] = source.share
            elif source.recomputed:
                del kept[name]
        return json.dumps(kept, indent=1, ensure_ascii=False) + "\n"

    def as_values(self) -> dict[str, Any]:
        """Every argument of the run with its final value, and the processes."""
        values = {name: _plain(value) for group in self.groups for name, value in asdict(group).items()}
        return values | {"world_size": self.dims.world, "data_parallel_replicas": self.dims.data}

    def as_parameters(self) -> dict[str, Any]:
        """What trackers record of the run: `as_values`, the sizes of the model, and the global batch."""
        return self.as_values() | asdict(self.shape) | {"global_batch_size": self.batch.total}

    def as_json(self) -> str:
        """The run, the source of each value, and the notes, as one JSON object."""
        run = self.as_values()
        replicas = derived(f"{self.dims.world} / ({self.dims.tensor} x {self.dims.pipeline})")
        sources = self.sources | {"data_parallel_replicas": replicas}
        shown = {name: source.text for name, source in sources.items() if name in run}
        refusals = [f"this version refuses to run it: {line}" for line in self.refusals]
        return json.dumps({"run": run, "from": shown, "notes": [*self.notes, *refusals]}, indent=1)


AnyRun = TypeVar("AnyRun", bound=Run)


@dataclass(frozen=True, kw_only=True)
class PretrainRun(Run):
    """A run on token files.

    Attributes:
        launch: arguments of `gptlm launch` where the processes are still to be started; else empty.
    """

    data: DataArguments
    launch: tuple[str, ...] = ()

    @property
    def groups(self) -> tuple[Any, ...]:
        return (self.model, self.data, self.parallel, self.training, self.hub)

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


@dataclass(frozen=True, kw_only=True)
class SftRun(Run):
    """A run on prompts and responses.

    Attributes:
        adapters: the folder of the adapters that lora_path names, if any.
    """

    data: SftArguments
    lora: LoraArguments
    adapters: Path | None

    @property
    def groups(self) -> tuple[Any, ...]:
        return (self.model, self.data, self.lora, self.parallel, self.training, self.hub)

    @property
    def evaluated(self) -> str | None:
        base, adapters = super().evaluated, self.lora.lora_path
        if base is None or not adapters:
            return base
        folder = Path(adapters).resolve()
        own = folder == Path(self.training.output_dir or "").resolve()
        return None if own else f"{base} with the adapters {folder if folder.is_dir() else adapters}"

    @property
    def trains_all(self) -> bool:
        return not self.lora.lora


@dataclass(frozen=True)
class Resolved:
    """The parts of a run that pretraining and fine-tuning share, as `Run` has them."""

    source: ModelSource
    shape: Shape
    dims: ParallelDims


def resolve(
    parsed: Parsed,
    source: ModelSource | None,
    printing: bool,
    problems: list[Problem],
    own_problems: Callable[[], Iterable[Problem]],
    *,
    length_flag: str,
    global_evaluation: bool = False,
) -> Resolved:
    """Fill in what follows for every training run, then check it.

    Args:
        source: the model; None: it was not found, see `problems`.
        problems: what is wrong so far; everything else that is wrong is found before they are raised.
        own_problems: what can be wrong with this kind of run alone; called when everything is resolved.
        length_flag: the argument with the tokens of a sample.
        global_evaluation: as in `derive_batch`.

    Raises:
        UsageError: listing everything that is wrong.
    """
    parallel = parsed[ParallelArguments]
    shape = tried(lambda: derive_shape(parsed, source, length_flag), problems) if source else None
    world, degrees = parallel.world_size or 0, (parallel.tensor_parallel_degree, parallel.pipeline_parallel_degree)
    dims = tried(lambda: ParallelDims.of(world, *degrees), problems) if world > 0 else None
    problems += tried(lambda: list(take_deepspeed(parsed)), problems) or ()
    if dims is not None:
        derive_degrees(parsed, dims)
        if degrees_fit(parsed[ParallelArguments], dims):
            tried(lambda: derive_batch(parsed, dims, global_evaluation=global_evaluation), problems)
        if shape is not None:
            derive_checkpoint_format(parsed, shape, dims)
    derive_schedule(parsed)
    problems += [*problems_of(parsed, dims, source, printing), *own_problems()]
    if problems or source is None or shape is None or dims is None:
        refusals = [Problem("", line) for line in parsed.refusals]
        raise usage_error(refusals if refusals and not printing else problems, parsed.typed)
    if source.kind == "flags":
        parsed.set("model_name_or_path", None, derived("sizes are given"))
    return Resolved(source, shape, dims)


def refusals_of(parsed: Parsed, own: Iterable[Problem]) -> tuple[str, ...]:
    """Why this version cannot start the run, as the user typed its arguments."""
    return (*parsed.refusals, *(with_flags_shown(problem.marked, parsed.typed) for problem in own))


Found = TypeVar("Found")


def tried(step: Callable[[], Found], problems: list[Problem]) -> Found | None:
    """The result of `step`; if it raises, its message joins `problems`."""
    try:
        return step()
    except UsageError as error:
        problems.append(Problem("", error.marked))
        return None


def with_epochs_counted(run: AnyRun, steps_per_epoch: int, *, last_step: int | None = None) -> AnyRun:
    """`run` with everything filled in that depends on the data: max_steps, and what is given in epochs.

    Args:
        steps_per_epoch: optimizer steps in one pass over the training split.
        last_step: the one that ends num_train_epochs, where the trainer knows when epochs end and evaluates and saves
            then; None: the epochs are so many whole batches, and evaluations and checkpoints come after as many steps.

    Raises:
        UsageError: if checkpoints then come without evaluations, which load_best_model_at_end needs.
    """
    parsed = Parsed({TrainingArguments: run.training}, dict(run.sources), typed=run.typed)
    training = run.training
    if training.max_steps < 1:
        steps = max(1, int(training.num_train_epochs * steps_per_epoch)) if last_step is None else last_step
        rule = f"{training.num_train_epochs:g} x {steps_per_epoch} steps per epoch"
        training = parsed.put(replace(training, max_steps=steps), derived(rule, recomputed=True))
    if training.evaluation_strategy == "epoch" and last_step is None:
        training = parsed.put(replace(training, evaluation_strategy="steps"), derived("epoch"))
        training = parsed.put(replace(training, eval_steps=steps_per_epoch), derived("steps per epoch"))
        delay = training.eval_delay * steps_per_epoch
        training = parsed.put(replace(training, eval_delay=delay), derived(f"{training.eval_delay:g} epochs"))
    if training.save_strategy == "epoch" and last_step is None:
        training = parsed.put(replace(training, save_strategy="steps"), derived("epoch"))
        training = parsed.put(replace(training, save_steps=steps_per_epoch), derived("steps per epoch"))
    if training.logging_strategy == "epoch" and last_step is None:
        training = parsed.put(replace(training, logging_strategy="steps"), derived("epoch"))
        parsed.put(replace(training, logging_steps=steps_per_epoch), derived("steps per epoch"))
    derive_schedule(parsed)
    training = parsed[TrainingArguments]
    if training.do_train and training.load_best_model_at_end and training.evaluation_strategy == "steps":
        problems = list(steps_apart(training))
        if problems:
            raise usage_error(problems, run.typed)
    notes = tuple(dict.fromkeys([*run.notes, *parsed.notes]))
    return replace(run, training=training, sources=parsed.sources, notes=notes)


def _plain(value: Any) -> Any:
    if isinstance(value, Secret):
        return str(value)
    return int(value) if isinstance(value, float) and value.is_integer() and abs(value) < 2**53 else value
