"""Pretraining, from a checked run to a saved model: data -> model -> trainer -> train -> save -> metrics."""

import logging
import os
from pathlib import Path

from transformers import PreTrainedTokenizerBase, set_seed
from transformers import TrainingArguments as HFTrainingArguments

from gptlm.config.run import PretrainRun, with_epochs_counted
from gptlm.data.splits import Corpus, open_corpora
from gptlm.errors import UsageError
from gptlm.model.gpt import GPTLMHeadModel
from gptlm.parallel.engine import start_deepspeed
from gptlm.recipes.hf_arguments import hf_arguments, tracker_callbacks
from gptlm.recipes.machine import Machine, choose_machine, process_group_closed, use_device
from gptlm.recipes.model import find_tokenizer, make_model, say_start
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
from gptlm.recipes.sharding import deepspeed_config, shard_groups
from gptlm.recipes.start import check_output, output_locked, say_changes, settings, starting_point
from gptlm.recipes.training import evaluate, finish, loss_scale, say_run, schedule, train
from gptlm.training import checkpoint
from gptlm.training.logging import start_logging
from gptlm.training.loss_scale import LossScale
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
    say_run(run, sample_counts(run)["train"], run.data.max_seq_length)
    set_seed(training.seed)
    model = make_model(run, tokenizer, deepspeed)
    if deepspeed is None:
        model = model.to(dtype=machine.dtype)  # type: ignore[call-arg]
    scale = loss_scale(run, deepspeed) if machine.precision == "fp16" else None
    trainer = _trainer(run, arguments, datasets, tokenizer, start, model, shard_groups(run, deepspeed), scale)
    metrics = train(run, trainer, start) if training.do_train else {}
    if training.do_eval and not training.do_train:
        metrics |= evaluate(trainer, "eval")
    if training.do_eval or training.do_predict:
        metrics |= _test(run, trainer, datasets)
    finish(run, trainer, metrics)
    return metrics


def _trainer(
    run: PretrainRun,
    arguments: HFTrainingArguments,
    datasets: Datasets,
    tokenizer: PreTrainedTokenizerBase | None,
    start: checkpoint.Checkpoint | None,
    model: GPTLMHeadModel,
    shard_degree: int | None,
    scale: LossScale | None,
) -> PretrainTrainer:
    training = run.training
    masking = {"document_masking": run.data.document_masking, "eod_mask_loss": run.data.eod_mask_loss}
    facts = {"order": order_facts(run, datasets["train"]), "settings": settings(run) | masking}
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
        schedule=schedule(run),
        seq_length=run.data.max_seq_length,
        consumed_samples=start.facts["consumed_samples"] if start else 0,
        consumed_steps=start.facts["global_step"] if start else 0,
        loss_sum=start.facts["loss_sum"] if start else 0.0,
        facts=facts,
        loss_scale=scale,
        master_grad=training.amp_master_grad,
        weights_only=training.ignore_load_lr_and_optim,
        shard_degree=shard_degree,
        keep=training.save_total_limit,
        process_memory=not training.skip_memory_metrics,
    )


def _test(run: PretrainRun, trainer: PretrainTrainer, datasets: Datasets) -> dict[str, float]:
    """The final evaluation on the test split, where there is one."""
    dataset = window(run, datasets["test"], run.eval_batches * TEST_FACTOR)
    if dataset is None:
        logger.info("the test split is empty or shorter than a sample (--split %s): no test evaluation", run.data.split)
        return {}
    return evaluate(trainer, "test", dataset)
