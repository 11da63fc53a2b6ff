"""Steps that every training run takes: its loss scale and schedule, training, evaluating, reporting."""

import logging
import shutil
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import Dataset
from transformers import TrainingArguments as HFTrainingArguments

from gptlm.checkpoint import folder as checkpoint
from gptlm.config.run import Run
from gptlm.errors import UsageError, doing
from gptlm.model.build import check_finite
from gptlm.model.safetensors_io import check_weights
from gptlm.parallel.process_groups import Mesh
from gptlm.ranks import is_main_process
from gptlm.recipes.common.acceleration import check_float8
from gptlm.recipes.common.deepspeed import shard_groups
from gptlm.recipes.common.device import Machine, choose_machine, use_device
from gptlm.recipes.common.model import say_start
from gptlm.recipes.common.resume import check_output, check_shape, say_changes, settings, starting_point
from gptlm.recipes.common.training_args import tracker_callbacks
from gptlm.training.lr_schedule import Schedule
from gptlm.training.metrics.results import remove_results, write_results
from gptlm.training.metrics.throughput import start_logging, table
from gptlm.training.precision.loss_scale import LossScale
from gptlm.training.trainer import PretrainTrainer

logger = logging.getLogger(__name__)


def begin(
    run: Run, check: Callable[[Any, checkpoint.Checkpoint], None] = check_shape
) -> tuple[checkpoint.Checkpoint | None, Machine]:
    """The checkpoint to go on from and the machine, after all that can be found out without data and weights.

    Args:
        check: raises GptlmError where a checkpoint is not of this run's model.
    """
    start_logging(main_process=is_main_process())
    if run.refusals:
        raise UsageError("\n".join(run.refusals))
    training = run.training
    check_output("output_dir", Path(training.output_dir or ""))
    if training.logging_dir:
        check_output("logging_dir", Path(training.logging_dir))
    start = starting_point(run, check)
    say_start(run, start)
    if run.model.continue_training and run.source.kind == "folder":
        check_weights(Path(run.source.weights or ""))
    machine = choose_machine(training.device, fp16=training.fp16, bf16=training.bf16, level=training.fp16_opt_level)
    use_device(machine)
    check_float8(run, machine)
    return start, machine


def trainer_arguments(
    run: Run,
    machine: Machine,
    arguments: HFTrainingArguments,
    deepspeed: dict[str, Any] | None,
    start: checkpoint.Checkpoint | None,
    facts: dict[str, dict[str, Any]],
) -> dict[str, Any]:
    """What every kind of trainer is made with, beside its model and data.

    Args:
        facts: "order" and "settings", noted in each checkpoint; what is not as in `start` is said.
    """
    training = run.training
    facts["settings"] = settings(run) | facts.get("settings", {})
    if start is not None:
        say_changes(start, facts)
    return {
        "args": arguments,
        "callbacks": tracker_callbacks(run, Path(training.output_dir or "")),
        "consumed_samples": start.facts["consumed_samples"] if start else 0,
        "consumed_steps": start.facts["global_step"] if start else 0,
        "loss_sum": start.facts["loss_sum"] if start else 0.0,
        "steps_without_loss": start.facts.get("steps_without_loss", 0) if start else 0,
        "facts": facts,
        "run_file": run.as_arguments(),
        "evaluated": run.evaluated,
        "loss_scale": _loss_scale(run, deepspeed) if machine.precision == "fp16" else None,
        "master_grad": training.amp_master_grad,
        "weights_only": training.ignore_load_lr_and_optim,
        "shard_degree": shard_groups(run, deepspeed),
        "keep": training.save_total_limit,
        "process_memory": not training.skip_memory_metrics,
        "log_format": training.log_format,
    }


def layout_arguments(run: Run, mesh: Mesh | None, machine: Machine) -> dict[str, Any]:
    """What a trainer is made with where processes share a replica."""
    if mesh is None:
        return {}
    half = machine.precision != "fp32" and not machine.half_weights
    kind = torch.float16 if machine.precision == "fp16" else torch.bfloat16
    pipeline = run.dims.pipeline > 1
    return {
        "mesh": mesh,
        "chunks": run.parallel.virtual_pp_degree if pipeline else 1,
        "micro_batches": run.batch.accumulation if pipeline else 1,
        "autocast": partial(torch.autocast, machine.device, kind) if half else nullcontext,
    }


def _loss_scale(run: Run, deepspeed: dict[str, Any] | None) -> LossScale:
    """Of the flags, or of a --deepspeed FILE that speaks of it."""
    training = run.training
    block = {key: value for key, value in (deepspeed or {}).get("fp16", {}).items() if value != "auto"}
    power = block.get("initial_scale_power")
    return LossScale(
        training.scale_loss if power is None else 2.0**power,
        window=block.get("loss_scale_window", training.loss_scale_window),
        hysteresis=block.get("hysteresis", training.hysteresis),
        minimum=block.get("min_loss_scale", training.min_loss_scale),
        fixed=block.get("loss_scale") or training.loss_scale,
    )


def schedule(run: Run) -> Schedule:
    """The learning rate of each update."""
    training = run.training
    return Schedule(
        kind=training.lr_scheduler_type,
        maximum=training.learning_rate,
        minimum=training.min_learning_rate,
        warmup=training.warmup_steps,
        decay=training.decay_steps or training.max_steps,
        end=training.lr_end,
        power=training.power,
        start=training.lr_start_step,
    )


def train(
    run: Run, trainer: PretrainTrainer, start: checkpoint.Checkpoint | None, promise: str | None = None
) -> dict[str, float]:
    """Train, save the final model, write results. A run that had reached its last step is only saved again.

    Args:
        promise: where in the data a resumed run goes on; None: at the next sample.
    """
    _clear_output(run, trainer, start)
    if start is not None and start.facts["global_step"] >= run.training.max_steps:
        done, wanted = start.facts["global_step"], run.training.max_steps
        logger.info("%s is at step %d, max_steps is %d: nothing to train", start.path, done, wanted)
        trainer.restore(start.path)
        trainer.recall(start.path)
        trainer.save_final()
        return evaluate(trainer, "eval") if run.training.do_eval else {}
    if start is not None:
        step, samples = start.facts["global_step"], start.facts["consumed_samples"]
        same = start.facts["order"] == trainer.facts["order"]
        promise = promise or ("none of them is read again" if same else "the next ones are taken from the new order")
        logger.info("resuming from %s: step %d, %d samples consumed, %s", start.path, step, samples, promise)
    with doing(lambda: f"training, step {trainer.state.global_step + 1}"):
        result = trainer.train(resume_from_checkpoint=str(start.path) if start else None)
    trainer.save_final()
    kept = ("train_loss", "train_runtime", "train_samples_per_second", "train_steps_per_second")
    metrics = {key: result.metrics[key] for key in kept}
    metrics["progress_or_epoch"] = round(trainer.state.epoch or 0.0, 4)
    report(trainer, "train", metrics)
    evaluation = _evaluation_of_result(trainer)
    if evaluation:
        report(trainer, "eval", evaluation)
    return metrics | evaluation


def _evaluation_of_result(trainer: PretrainTrainer) -> dict[str, float]:
    """The noted evaluation of the weights that training ended with; empty if there was none."""
    step = trainer.state.best_global_step if trainer.args.load_best_model_at_end else trainer.state.global_step
    for entry in reversed(trainer.state.log_history):
        if "eval_loss" in entry and entry["step"] == step:
            return {key: value for key, value in entry.items() if key.startswith("eval_")}
    return {}


def _clear_output(run: Run, trainer: PretrainTrainer, start: checkpoint.Checkpoint | None) -> None:
    """Remove what an interrupted save left, and with overwrite_output_dir the old checkpoints; set later ones aside."""
    if not trainer.args.should_save:
        return
    output_dir = Path(run.training.output_dir or "")
    checkpoint.remove_leftovers(output_dir)
    for left in checkpoint.set_aside(output_dir, start.facts["global_step"]) if start else ():
        logger.warning("%s is not gone on from; it is called %s now", left.name.removeprefix("left-"), left)
    if run.training.overwrite_output_dir:
        remove_results(output_dir)
        for old in checkpoint.folders(output_dir):
            logger.info("%s removed (overwrite_output_dir)", old)
            shutil.rmtree(old)


def evaluate(trainer: PretrainTrainer, name: str, dataset: Dataset | None = None) -> dict[str, float]:
    """Evaluate and report; `name` is the split, and the prefix of every metric.

    Raises:
        GptlmError: if the loss is NaN or infinite.
    """
    with doing(f"evaluating ({name})"):
        metrics = trainer.evaluate(dataset, metric_key_prefix=name)
    check_finite(torch.tensor(metrics[f"{name}_loss"]), trainer.network)
    metrics.pop(f"{name}_model_preparation_time", None)
    report(trainer, name, metrics)
    return metrics


def report(trainer: PretrainTrainer, name: str, metrics: dict[str, float]) -> None:
    """Print `metrics` as a table and write them into `name`_results.json and all_results.json."""
    for line in table(name, metrics):
        logger.info("%s", line)
    if trainer.args.should_save:
        folder = Path(trainer.args.output_dir or "")
        with checkpoint.writing(folder / f"{name}_results.json", "the results"):
            write_results(folder, name, metrics, trainer.evaluated)


def say_run(run: Run, examples: int, tokens_per_example: int) -> None:
    """The notes of the command, then the sizes of the run in PaddleNLP's words."""
    training, batch = run.training, run.batch
    for note in run.notes:
        logger.info("%s", note)
    if not training.do_train:
        return
    tokens = batch.total * tokens_per_example
    logger.info("***** Running training *****")
    logger.info("  Num examples = %s", f"{examples:,}")
    logger.info("  Instantaneous batch size per device = %d", batch.micro)
    logger.info("  Gradient Accumulation steps = %d", batch.accumulation)
    logger.info("  Total train batch size (w. parallel, distributed & accumulation) = %d", batch.total)
    logger.info("  Tokens per step = %s (%s x %d)", f"{tokens:,}", batch, tokens_per_example)
    logger.info("  Total optimization steps = %s", f"{training.max_steps:,}")


def finish(run: Run, trainer: PretrainTrainer, metrics: dict[str, float]) -> None:
    """What is left to write and say when everything is done."""
    if not run.training.do_train:
        return
    if trainer.args.should_save:
        trainer.state.save_to_json(str(Path(trainer.args.output_dir or "") / "trainer_state.json"))
    if "train_runtime" in metrics:
        speed = trainer.trained.tokens / max(metrics["train_runtime"], 1e-9)
        logger.info("Effective Tokens per second: %.2f", speed)
    logger.info("model, tokenizer, results and logs are in %s", run.training.output_dir)
