"""Pretraining, from a checked run to a saved model: data -> model -> trainer -> train -> save -> metrics."""

import logging
import os
import shutil
from pathlib import Path
from typing import Any

from torch.utils.data import Dataset
from transformers import PreTrainedTokenizerBase, set_seed
from transformers import TrainingArguments as HFTrainingArguments

from gptlm.config.run import PretrainRun, with_epochs_counted
from gptlm.data.splits import Corpus, open_corpora
from gptlm.errors import UsageError
from gptlm.model.gpt import GPTLMHeadModel
from gptlm.parallel.engine import start_deepspeed
from gptlm.recipes.hf_arguments import hf_arguments, tracker_callbacks
from gptlm.recipes.machine import Machine, choose_machine, process_group_closed, use_device
from gptlm.recipes.pretrain_data import (
    TEST_FACTOR,
    Datasets,
    build_datasets,
    collator,
    order_facts,
    sample_counts,
    say_blend,
    say_data,
    served,
    steps_per_epoch,
    window,
)
from gptlm.recipes.pretrain_model import find_tokenizer, make_model, say_start
from gptlm.recipes.pretrain_start import check_output, output_locked, say_changes, settings, starting_point
from gptlm.recipes.sharding import deepspeed_config, shard_groups
from gptlm.training import checkpoint
from gptlm.training.logging import start_logging, table
from gptlm.training.loss_scale import LossScale
from gptlm.training.results import remove_results, write_results
from gptlm.training.schedule import Schedule
from gptlm.training.trainer import PretrainTrainer

logger = logging.getLogger(__name__)


def pretrain(run: PretrainRun) -> dict[str, float]:
    """Run it; returns the metrics that are also in `output_dir/all_results.json`.

    Raises:
        GptlmError: for anything the user can mend, before the model is built wherever that is possible.
    """
    start_logging(speaks=int(os.environ.get("RANK", 0)) == 0)
    if run.refusals:
        raise UsageError("\n".join(run.refusals))
    training = run.training
    check_output("output_dir", Path(training.output_dir or ""))
    if training.logging_dir:
        check_output("logging_dir", Path(training.logging_dir))
    start = starting_point(run)
    say_start(run, start)
    machine = choose_machine(training.device, fp16=training.fp16, bf16=training.bf16, level=training.fp16_opt_level)
    use_device(machine)
    corpora = open_corpora(run.data.input_dir or "", run.data.split, run.data.data_order)
    run = with_epochs_counted(run, steps_per_epoch(run, corpora))
    with output_locked(run), process_group_closed():
        return _run(run, machine, corpora, start)


def _run(
    run: PretrainRun, machine: Machine, corpora: list[Corpus], start: checkpoint.Checkpoint | None
) -> dict[str, float]:
    """Everything that needs the process group."""
    training = run.training
    deepspeed = deepspeed_config(run, machine)
    if deepspeed is not None:
        start_deepspeed(on_cpu=machine.device == "cpu")
    arguments = hf_arguments(run, machine, deepspeed)
    say_data(run, corpora)
    datasets = build_datasets(run, corpora, arguments)
    say_blend(run, corpora, datasets["train"])
    tokenizer = find_tokenizer(run, corpora)
    _say_run(run)
    set_seed(training.seed)
    model = make_model(run, tokenizer, deepspeed)
    if deepspeed is None:
        model = model.to(dtype=machine.dtype)  # type: ignore[call-arg]
    scale = _loss_scale(run, deepspeed) if machine.precision == "fp16" else None
    trainer = _trainer(run, arguments, datasets, tokenizer, start, model, shard_groups(run, deepspeed), scale)
    metrics = _train(run, trainer, start) if training.do_train else {}
    if training.do_eval and not training.do_train:
        metrics |= _evaluate(trainer, "eval")
    if training.do_eval or training.do_predict:
        metrics |= _test(run, trainer, datasets)
    _finish(run, trainer, metrics)
    return metrics


def _trainer(
    run: PretrainRun,
    arguments: HFTrainingArguments,
    datasets: Datasets,
    tokenizer: PreTrainedTokenizerBase | None,
    start: checkpoint.Checkpoint | None,
    model: GPTLMHeadModel,
    shard_degree: int | None,
    loss_scale: LossScale | None,
) -> PretrainTrainer:
    training = run.training
    facts = {"order": order_facts(run, datasets["train"]), "settings": settings(run)}
    if start is not None:
        say_changes(start, facts)
    return PretrainTrainer(
        model=model,
        args=arguments,
        train_dataset=served(run, datasets["train"]),
        eval_dataset=window(run, datasets["valid"], run.eval_batches),
        data_collator=collator(run),
        processing_class=tokenizer,
        callbacks=tracker_callbacks(run, Path(training.output_dir or "")),
        schedule=_schedule(run),
        seq_length=run.data.max_seq_length,
        consumed_samples=start.facts["consumed_samples"] if start else 0,
        consumed_steps=start.facts["global_step"] if start else 0,
        loss_sum=start.facts["loss_sum"] if start else 0.0,
        facts=facts,
        loss_scale=loss_scale,
        master_grad=training.amp_master_grad,
        weights_only=training.ignore_load_lr_and_optim,
        shard_degree=shard_degree,
        keep=training.save_total_limit,
        process_memory=not training.skip_memory_metrics,
    )


def _loss_scale(run: PretrainRun, deepspeed: dict[str, Any] | None) -> LossScale:
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


def _schedule(run: PretrainRun) -> Schedule:
    training = run.training
    return Schedule(
        kind=training.lr_scheduler_type,
        maximum=training.learning_rate,
        minimum=training.min_learning_rate,
        warmup=training.warmup_steps,
        decay=training.decay_steps or training.max_steps,
        end=training.lr_end,
        power=training.power,
    )


def _train(run: PretrainRun, trainer: PretrainTrainer, start: checkpoint.Checkpoint | None) -> dict[str, float]:
    """Train, save the final model, write results. A run that had reached its last step is only saved again."""
    _clear_output(run, trainer, start)
    if start is not None and start.facts["global_step"] >= run.training.max_steps:
        done, wanted = start.facts["global_step"], run.training.max_steps
        logger.info("%s is at step %d, max_steps is %d: nothing to train", start.path, done, wanted)
        trainer.restore(start.path)
        trainer.save_final()
        return _evaluate(trainer, "eval") if run.training.do_eval else {}
    if start is not None:
        step, samples = start.facts["global_step"], start.facts["consumed_samples"]
        same = start.facts["order"] == trainer.facts["order"]
        promise = "none of them is read again" if same else "the next ones are taken from the new order"
        logger.info("resuming from %s: step %d, %d samples consumed, %s", start.path, step, samples, promise)
    result = trainer.train(resume_from_checkpoint=str(start.path) if start else None)
    trainer.save_final()
    kept = ("train_loss", "train_runtime", "train_samples_per_second", "train_steps_per_second")
    metrics = {key: result.metrics[key] for key in kept}
    metrics["train_loss"] = trainer.mean_loss(result.training_loss)
    metrics["progress_or_epoch"] = round(trainer.state.epoch or 0.0, 4)
    _report(trainer, "train", metrics)
    evaluation = _evaluation_of_result(trainer)
    if evaluation:
        _report(trainer, "eval", evaluation)
    return metrics | evaluation


def _evaluation_of_result(trainer: PretrainTrainer) -> dict[str, float]:
    """The noted evaluation of the weights that training ended with; empty if there was none."""
    step = trainer.state.best_global_step if trainer.args.load_best_model_at_end else trainer.state.global_step
    for entry in reversed(trainer.state.log_history):
        if "eval_loss" in entry and entry["step"] == step:
            return {key: value for key, value in entry.items() if key.startswith("eval_")}
    return {}


def _clear_output(run: PretrainRun, trainer: PretrainTrainer, start: checkpoint.Checkpoint | None) -> None:
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


def _evaluate(trainer: PretrainTrainer, name: str, dataset: Dataset | None = None) -> dict[str, float]:
    metrics = trainer.evaluate(dataset, metric_key_prefix=name)
    metrics.pop(f"{name}_model_preparation_time", None)
    _report(trainer, name, metrics)
    return metrics


def _test(run: PretrainRun, trainer: PretrainTrainer, datasets: Datasets) -> dict[str, float]:
    """The final evaluation on the test split, where there is one."""
    dataset = window(run, datasets["test"], run.eval_batches * TEST_FACTOR)
    if dataset is None:
        logger.info("the test split is empty or shorter than a sample (--split %s): no test evaluation", run.data.split)
        return {}
    return _evaluate(trainer, "test", dataset)


def _report(trainer: PretrainTrainer, name: str, metrics: dict[str, float]) -> None:
    for line in table(name, metrics):
        logger.info("%s", line)
    if trainer.args.should_save:
        write_results(Path(trainer.args.output_dir or ""), name, metrics)


def _say_run(run: PretrainRun) -> None:
    training, batch = run.training, run.batch
    for note in run.notes:
        logger.info("%s", note)
    if not training.do_train:
        return
    length = run.data.max_seq_length
    logger.info("***** Running training *****")
    logger.info("  Num examples = %s", f"{sample_counts(run)['train']:,}")
    logger.info("  Instantaneous batch size per device = %d", batch.micro)
    logger.info("  Gradient Accumulation steps = %d", batch.accumulation)
    logger.info("  Total train batch size (w. parallel, distributed & accumulation) = %d", batch.total)
    logger.info("  Tokens per step = %s (%s x %d)", f"{batch.total * length:,}", batch, length)
    logger.info("  Total optimization steps = %s", f"{training.max_steps:,}")


def _finish(run: PretrainRun, trainer: PretrainTrainer, metrics: dict[str, float]) -> None:
    if not run.training.do_train:
        return
    if trainer.args.should_save:
        trainer.state.save_to_json(str(Path(trainer.args.output_dir or "") / "trainer_state.json"))
    if "train_steps_per_second" in metrics:
        tokens = run.batch.total * run.data.max_seq_length
        logger.info("Effective Tokens per second: %.2f", metrics["train_steps_per_second"] * tokens)
    logger.info("model, tokenizer, results and logs are in %s", run.training.output_dir)
