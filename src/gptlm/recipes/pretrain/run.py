"""Pretraining, from a resolved run to a saved model: data -> model -> trainer -> train -> evaluate."""

import logging

from gptlm.checkpoint.folder import Checkpoint, log_lines_in
from gptlm.compat.log_lines import flops_per_sample
from gptlm.config.run import PretrainRun, with_epochs_counted
from gptlm.data.corpora import Corpus
from gptlm.planner.args import sizes_of
from gptlm.recipes.common.acceleration import accelerate
from gptlm.recipes.common.device import Device, close_process_group, peak_flops
from gptlm.recipes.common.hooks import NO_HOOKS, Hooks
from gptlm.recipes.common.model import find_tokenizer, make_model
from gptlm.recipes.common.peers import Peers, find_peers
from gptlm.recipes.common.restart import continued
from gptlm.recipes.common.resume import lock_output
from gptlm.recipes.common.training import (
    build_trainer,
    check_run,
    evaluate,
    finish,
    log_run,
    schedule,
    start_job,
    train,
)
from gptlm.recipes.pretrain.data import (
    build_datasets,
    collator,
    data_table,
    evaluated_samples,
    evaluation_samples,
    loader_samples,
    log_blend,
    log_data,
    log_evaluations,
    log_missing_ends,
    open_together,
    order_manifest,
    samples_per_epoch,
    steps_per_epoch,
)
from gptlm.recipes.pretrain.text_source import with_token_files
from gptlm.training.metrics.results import summary_table
from gptlm.training.progress import SequentialProgress
from gptlm.training.trainer import GPTTrainer

logger = logging.getLogger(__name__)


def pretrain(run: PretrainRun, hooks: Hooks = NO_HOOKS) -> dict[str, float]:
    """Run it; returns the metrics that are also in `output_dir/all_results.json`.

    Raises:
        GptlmError: for anything the user can fix, before the model is built wherever that is possible.
    """
    with find_peers(run.training.ddp_timeout) as peers:
        run = continued(run, peers)
        device, resume = check_run(run, peers)
        run = with_token_files(run)
        corpora = open_together(run, peers)
        run = with_epochs_counted(run, steps_per_epoch(run, corpora))
        with lock_output(run, peers), close_process_group(peers):
            # a function of its own: the trainer has to be gone when the process group closes
            return _run(run, device, resume, peers, corpora, hooks)


def _run(
    run: PretrainRun,
    device: Device,
    resume: Checkpoint | None,
    peers: Peers | None,
    corpora: list[Corpus],
    hooks: Hooks,
) -> dict[str, float]:
    training, data = run.training, run.data
    job = start_job(run, device, resume, peers)

    log_data(run, corpora)
    datasets = build_datasets(run, corpora)
    log_blend(run, corpora, datasets["train"])
    tokenizer = find_tokenizer(run, corpora)
    log_missing_ends(run, corpora, tokenizer)
    log_evaluations(run, corpora, datasets)
    log_run(run, run.batch.total * training.max_steps, data.max_seq_length)
    hooks.log(run.training.label_smoothing_factor)

    model = make_model(run, tokenizer, job.deepspeed, job.groups)
    model.transformer.expect_repeated_shapes()
    if job.deepspeed is None:  # DeepSpeed converts the weights itself
        model = model.to(dtype=device.dtype)  # type: ignore[call-arg]
    acceleration = accelerate(run, device, model, job.deepspeed, uneven=hooks.graph_obstacle)

    train_dataset = loader_samples(run, job.mesh, datasets["train"])
    trainer = build_trainer(
        run,
        job,
        model,
        acceleration,
        hooks,
        order=order_manifest(run, datasets["train"]),
        data_settings={"document_masking": data.document_masking, "eod_mask_loss": data.eod_mask_loss},
        flops={"flops_per_sample": _flops(run), "utilisation": _utilisation(run, device)},
        data_table=data_table(run, corpora, datasets["train"]),
        train_dataset=train_dataset,
        eval_dataset=evaluation_samples(run, job.mesh, datasets["valid"], evaluated_samples(run, corpora, "valid")),
        data_collator=collator(run),
        processing_class=tokenizer,
        schedule=schedule(run),
        progress=SequentialProgress(
            train_dataset,
            seq_length=data.max_seq_length,
            samples_per_step=run.batch.total,
            samples_per_epoch=samples_per_epoch(datasets["train"]),
        ),
    )

    metrics = train(run, job, trainer) if training.do_train else {}
    if training.do_eval and not training.do_train:  # training has evaluated already
        metrics |= evaluate(trainer, "eval")
    if training.do_eval or training.do_predict:
        test = evaluation_samples(run, job.mesh, datasets["test"], evaluated_samples(run, corpora, "test"))
        if test is None:
            logger.info("the test split is empty or shorter than a sample (--split %s): no test evaluation", data.split)
        else:
            metrics |= evaluate(trainer, "test", test)
    finish(run, trainer, metrics)
    hooks.end(trainer)
    if training.do_train and training.log_format == "megatron":
        _log_summary(run, device, resume, trainer)
    return metrics


def _log_summary(run: PretrainRun, device: Device, resume: Checkpoint | None, trainer: GPTTrainer) -> None:
    """Megatron's table at the end of a training, of what this run did after `resume`."""
    for line in summary_table(
        f"{run.dims.world}p-{'GPU' if device.type == 'cuda' else device.type.upper()}",
        trainer.state.log_history[log_lines_in(resume.path) if resume else 0 :],
        parameters=sizes_of(run).parameters,
        seq_length=run.data.max_seq_length,
        first_step=resume.manifest.global_step + 1 if resume else 1,
        last_step=trainer.state.global_step,
    ):
        logger.info("%s", line)


def _flops(run: PretrainRun) -> float:
    shape = run.shape
    return flops_per_sample(
        layers=shape.num_hidden_layers,
        hidden=shape.hidden_size,
        vocabulary=shape.vocab_size,
        length=run.data.max_seq_length,
        recompute=run.training.recompute,
    )


def _utilisation(run: PretrainRun, device: Device) -> float | None:
    """Share of a GPU's peak that one token per second is: 6 N + 12 L H S operations (arXiv 2204.02311, appendix B)."""
    peak, sizes = peak_flops(device), sizes_of(run)
    return (6 * sizes.parameters + 12 * sizes.layers * sizes.width * sizes.length) / peak if peak else None
