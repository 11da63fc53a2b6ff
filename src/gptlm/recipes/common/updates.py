"""Optimizer and schedule of a run, in the words of training/."""

from types import SimpleNamespace
from typing import Any

from transformers import TrainingArguments as HFTrainingArguments
from transformers.training_args import OptimizerNames

from gptlm.checkpoint.folder import Checkpoint
from gptlm.config.args.choices import ADAMW, STOCK_SCHEDULES
from gptlm.config.args.training import TrainingArguments
from gptlm.config.optimizers import settings_of
from gptlm.config.run import Run
from gptlm.errors import UsageError, named, reason_of
from gptlm.training.lr_schedule import StockSchedule
from gptlm.training.optimizers import optimizer_of


def check_updates(run: Run, resume: Checkpoint | None) -> None:
    """Check what needs transformers to be known: settings of the optimizer and the schedule, and the optimizer's state.

    Raises:
        UsageError: for settings that they do not take, a missing package, or a checkpoint of another optimizer.
    """
    training = run.training
    if not training.do_train:
        return
    if training.optim not in ADAMW:
        optimizer_of(_arguments(training), training.optim, settings_of(training.optim_args))
    stock_schedule(training, training.max_steps if training.max_steps > 0 else 1)
    if resume is None or training.ignore_load_lr_and_optim:
        return
    before = resume.manifest.settings.get("optim", "adamw")
    if _class_of(before) != _class_of(training.optim):
        raise UsageError(
            f"the checkpoint {resume.path} has the state of {named('optim')} {before}, not of {training.optim}; give "
            f"the same optimizer, or {named('ignore_load_lr_and_optim')} to begin with a new state"
        )


def _class_of(name: str) -> str:
    return {"lion": "lion_32bit"}.get(name, "adamw" if name in ADAMW else name)


def _arguments(training: TrainingArguments) -> Any:
    """What the factory of transformers reads of its arguments, which themselves may start the process group."""
    return SimpleNamespace(
        optim=OptimizerNames(stock_name(training.optim)),
        optim_args=stock_settings(training),
        learning_rate=training.learning_rate,
        weight_decay=training.weight_decay,
        adam_beta1=training.adam_beta1,
        adam_beta2=training.adam_beta2,
        adam_epsilon=training.adam_epsilon,
    )


def stock_settings(training: TrainingArguments) -> str | None:
    """`optim_args` in the only form that transformers reads; `optimizer_of` gets all of them."""
    return None if "{" in (training.optim_args or "") else training.optim_args


def stock_name(name: str) -> str:
    """transformers' name of an optimizer; Muon, which is not among its own, is made by our factory."""
    if name == "adamw_torch":
        return name
    return {"lion": "lion_32bit"}.get(name, "adamw_torch_fused" if name in (*ADAMW, "muon") else name)


def make_optimizer(run: Run, arguments: HFTrainingArguments) -> tuple[Any, dict[str, Any]] | None:
    """`optimizer_cls_and_kwargs` of the trainer; None for AdamW, which the trainer makes."""
    training = run.training
    if training.optim in ADAMW:
        return None
    return optimizer_of(arguments, training.optim, settings_of(training.optim_args))


def stock_schedule(training: TrainingArguments, steps: float | None = None) -> StockSchedule | None:
    """The schedule, where it is one of transformers alone.

    Raises:
        UsageError: for settings that it does not take, or lacks.
    """
    if training.lr_scheduler_type not in STOCK_SCHEDULES:
        return None
    made = StockSchedule(
        kind=training.lr_scheduler_type,
        maximum=training.learning_rate,
        warmup=training.warmup_steps,
        steps=training.decay_steps or steps or training.max_steps,
        settings=settings_of(training.lr_scheduler_kwargs),
    )
    try:
        made.rate(1)
    except (TypeError, ValueError, ZeroDivisionError) as error:
        text = reason_of(error).rpartition("() ")[2]
        raise UsageError(
            f"{named('lr_scheduler_kwargs')} {training.lr_scheduler_kwargs or '(none)'} of "
            f"{named('lr_scheduler_type')} {made.kind}: {text}"
        ) from error
    return made
