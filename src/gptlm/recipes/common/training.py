"""Builds and runs a training job: what pretraining and fine-tuning share, in the order in which it happens.

check_run -> start_job -> build_trainer -> train -> evaluate -> finish
"""

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import Dataset
from transformers import TrainerState
from transformers import TrainingArguments as HFTrainingArguments

from gptlm import owned
from gptlm.checkpoint import folder as checkpoint
from gptlm.checkpoint.checkpointer import Checkpointer
from gptlm.checkpoint.manifest import SHARDED
from gptlm.config.args.training import TrainingArguments
from gptlm.config.run import Run
from gptlm.errors import UsageError, doing
from gptlm.model.build import check_finite
from gptlm.model.safetensors_io import check_weights
from gptlm.parallel.deepspeed import setup_deepspeed
from gptlm.parallel.process_groups import Mesh
from gptlm.parallel.zero_config import stage_of
from gptlm.ranks import is_main_process
from gptlm.recipes.common.acceleration import Acceleration, check_flat_grad_sync, check_float8
from gptlm.recipes.common.deepspeed import deepspeed_config, shard_degree
from gptlm.recipes.common.device import Device, choose_arithmetic, choose_device, use_device
from gptlm.recipes.common.hooks import Hooks
from gptlm.recipes.common.hub_upload import check_upload, upload_of
from gptlm.recipes.common.main_process_first import told_by_main
from gptlm.recipes.common.model import log_weights_source
from gptlm.recipes.common.model_card import checkpoint_card, write_run_card
from gptlm.recipes.common.output_folder import check_own_files, clear_output, read_checkpoints
from gptlm.recipes.common.peers import Peers
from gptlm.recipes.common.profiling import check_profile, profiled
from gptlm.recipes.common.restart import note_start
from gptlm.recipes.common.resume import (
    check_output,
    check_shape,
    find_resume_checkpoint,
    is_complete,
    is_same_order,
    log_changes,
    settings,
)
from gptlm.recipes.common.trackers import check_trackers, tracker_callbacks
from gptlm.recipes.common.training_args import hf_arguments
from gptlm.recipes.common.updates import check_updates, make_optimizer, stock_schedule
from gptlm.recipes.report.recording import Recorder
from gptlm.recipes.report.write import report_training
from gptlm.signals import Terminated, finish_unless_signalled, held
from gptlm.training.callbacks import RoundWeights
from gptlm.training.cuda_graphs import CudaGraphStep
from gptlm.training.early_stopping import EarlyStopping
from gptlm.training.grad_sync import DataParallel, DeepSpeedSync, FlatAllReduce, FlatZero, GradSync
from gptlm.training.lr_schedule import Schedule, StockSchedule
from gptlm.training.metrics.loss import LossMetrics
from gptlm.training.metrics.results import write_results
from gptlm.training.metrics.run_log import RunLog
from gptlm.training.metrics.throughput import start_logging, table
from gptlm.training.pipeline_step import PipelineStep
from gptlm.training.precision.loss_scale import LossScale
from gptlm.training.precision.weights import DeepSpeedWeights, Float32Weights, MasterWeights
from gptlm.training.step import EagerStep
from gptlm.training.trainer import GPTTrainer
from gptlm.upstream.accelerate import unwrap_without_deepspeed

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Job:
    """A run on its device and in its process group.

    Attributes:
        resume: the checkpoint to resume from; None for a new run.
        deepspeed: the complete DeepSpeed configuration; None without it.
        mesh: process groups where several processes share a replica of the model.
        groups: `mesh`, or process groups where fewer replicas than all share one optimizer state.
        peers: the other processes; None: there are none.
    """

    device: Device
    resume: checkpoint.Checkpoint | None
    arguments: HFTrainingArguments
    deepspeed: dict[str, Any] | None
    mesh: Mesh | None
    groups: Mesh | None
    peers: Peers | None


def check_run(
    run: Run, peers: Peers | None, check: Callable[[Any, checkpoint.Checkpoint], None] = check_shape
) -> tuple[Device, checkpoint.Checkpoint | None]:
    """The device and the checkpoint to resume from, after all checks that need neither data nor weights.

    Args:
        peers: of `find_peers`.
        check: raises GptlmError where a checkpoint is not of this run's model.
    """
    start_logging(main_process=is_main_process())
    if run.refusals:
        raise UsageError("\n".join(run.refusals))
    training = run.training
    check_trackers(run)
    check_output("output_dir", Path(training.output_dir or ""))
    if training.logging_dir:
        check_output("logging_dir", Path(training.logging_dir))
    check_own_files(run)
    resume = find_resume_checkpoint(run, check, peers)
    check_updates(run, resume)
    log_weights_source(run, resume)
    if run.model.continue_training and run.source.kind == "folder":
        check_weights(Path(run.source.weights or ""))
    device = choose_device(training.device, fp16=training.fp16, bf16=training.bf16, level=training.fp16_opt_level)
    use_device(device)
    check_float8(run, device)
    choose_arithmetic(run.training, device)
    check_flat_grad_sync(run, device)
    if run.hub.push_to_hub and training.do_train:
        told_by_main(peers, "the repository on the hub", lambda: check_upload(upload_of(run)))
    return device, resume


def start_job(run: Run, device: Device, resume: checkpoint.Checkpoint | None, peers: Peers | None) -> Job:
    """Join the process group of a launcher."""
    check_profile(run, resume)
    deepspeed = deepspeed_config(run, device)
    if deepspeed is not None and is_complete(run, resume) and stage_of(deepspeed) < 3:
        deepspeed = None  # DeepSpeed evaluates without an optimizer in stage 3 only
    if deepspeed is not None:
        setup_deepspeed(on_cpu=device.type == "cpu")
    arguments = hf_arguments(run, device, deepspeed, peers)
    shards = shard_degree(run, deepspeed)
    groups = Mesh(run.dims, shards) if run.dims.is_model_parallel or shards else None
    mesh = groups if run.dims.is_model_parallel else None
    if peers is not None:
        peers.heartbeat.ends = device.type == "cuda"
    return Job(device, resume, arguments, deepspeed, mesh, groups, peers)


def build_trainer(
    run: Run,
    job: Job,
    model: Any,
    acceleration: Acceleration,
    hooks: Hooks,
    *,
    order: dict[str, Any],
    data_settings: dict[str, Any],
    flops: dict[str, float | None] | None = None,
    data_table: list[dict[str, Any]] | None = None,
    **given: Any,
) -> GPTTrainer:
    """The trainer with the parts that the flags ask for.

    Args:
        hooks: of the caller.
        order: what fixes the sample order, noted in each checkpoint.
        data_settings: other settings of the data that change the updates to come, noted too.
        flops: arguments of `RunLog` about the operations of a sample.
        data_table: rows about the data for the report: column -> value.
        given: data, metrics, progress and schedule of the recipe.
    """
    training = run.training
    unwrap_without_deepspeed()
    given.setdefault("metrics", LossMetrics(run.evaluated))
    manifest: dict[str, Any] = {"order": order, "settings": settings(run) | data_settings}
    if job.resume is not None:
        log_changes(job.resume, manifest)
    return GPTTrainer(
        model=model,
        args=job.arguments,
        callbacks=[
            *early_stopping(training),
            *tracker_callbacks(run, Path(training.output_dir or "")),
            Recorder(run, data_table or []),
            *hooks.callbacks,
            *([] if acceleration.float8 is None else [RoundWeights(acceleration.float8)]),
        ],
        **hooks.of_trainer,
        optimizer_cls_and_kwargs=make_optimizer(run, job.arguments),
        mesh=job.mesh,
        save_on_signal=training.save_on_signal,
        clears_output=training.overwrite_output_dir,
        finds_batch_size=training.auto_find_batch_size,
        weights=make_weights(run, job),
        grad_sync=make_grad_sync(run, job, is_flat=acceleration.flat_grad_sync),
        runner=make_runner(run, job, use_cuda_graph=acceleration.cuda_graph),
        checkpointer=Checkpointer(
            manifest=manifest | {"task": run.task},
            keep=training.save_total_limit,
            protected=read_checkpoints(run),
            run_file=run.as_arguments(),
            card=partial(checkpoint_card, run),
            resume_weights_only=training.ignore_load_lr_and_optim,
            checked=job.resume.path if job.resume else None,
            mesh=job.mesh,
            sharded=training.checkpoint_format == SHARDED,
            in_background=training.async_save,
            chunks=run.parallel.virtual_pp_degree if run.dims.pipeline > 1 else 1,
        ),
        run_log=RunLog(
            log_format=training.log_format,
            process_memory=not training.skip_memory_metrics,
            **(flops or {}),  # type: ignore[arg-type]
        ),
        **given,
    )


def early_stopping(training: TrainingArguments) -> list[EarlyStopping]:
    """The callback of --early_stopping_patience, if that is given."""
    patience = training.early_stopping_patience
    return [] if patience is None else [EarlyStopping(patience, training.early_stopping_threshold)]


def make_weights(run: Run, job: Job) -> Float32Weights:
    """How weights are kept: by DeepSpeed, as half precision with float32 masters (O2), or as float32."""
    scale = make_loss_scale(run, job.deepspeed) if job.device.precision == "fp16" else None
    if job.deepspeed is not None:
        return DeepSpeedWeights(scale)
    if job.device.half_weights:
        return MasterWeights(scale, float32_sums=run.training.amp_master_grad)
    return Float32Weights(scale)


def make_grad_sync(run: Run, job: Job, *, is_flat: bool) -> GradSync:
    if job.deepspeed is not None:
        if is_flat:
            return FlatZero(float32_sums=run.training.amp_master_grad, groups=job.groups)
        return DeepSpeedSync(has_pipeline=run.dims.pipeline > 1, groups=job.groups)
    if run.dims.world == 1:
        return GradSync()
    return FlatAllReduce() if is_flat else DataParallel()


def make_runner(run: Run, job: Job, *, use_cuda_graph: bool) -> EagerStep:
    """How forward and backward run: through a pipeline, as a CUDA graph, or kernel by kernel."""
    if run.dims.pipeline == 1 or job.mesh is None:
        return CudaGraphStep() if use_cuda_graph else EagerStep()
    is_autocast = job.device.precision != "fp32" and not job.device.half_weights
    dtype = torch.float16 if job.device.precision == "fp16" else torch.bfloat16
    return PipelineStep(
        job.mesh,
        chunks=run.parallel.virtual_pp_degree,
        micro_batches=run.batch.accumulation,
        autocast=partial(torch.autocast, job.device.type, dtype) if is_autocast else nullcontext,
    )


def make_loss_scale(run: Run, deepspeed: dict[str, Any] | None) -> LossScale:
    """The loss scale of the flags, or of the fp16 block of a --deepspeed FILE."""
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


def schedule(run: Run) -> Schedule | StockSchedule:
    """The learning rate of each update."""
    training = run.training
    if (stock := stock_schedule(training)) is not None:
        return stock
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


def train(run: Run, job: Job, trainer: GPTTrainer, position: str | None = None) -> dict[str, float]:
    """Train, save the final model, write results. A run that has reached its last step is saved and evaluated again.

    Args:
        position: where in the data a resumed run continues, for the log; None: at the next sample.
    """
    resume = job.resume
    if trainer.args.should_save:
        clear_output(run, resume)
        with checkpoint.writing(Path(run.training.output_dir or ""), "the list of files in"):
            note_start(run, job.peers, resume.manifest.global_step if resume else 0)
    if resume is not None and is_complete(run, resume):
        done, wanted = resume.manifest.global_step, run.training.max_steps
        logger.info("%s is at step %d, max_steps is %d: nothing to train", resume.path, done, wanted)
        _restore(trainer, resume.path)
        trainer.checkpointer.save_final()
        return evaluate(trainer, "eval") if run.training.do_eval else {}
    if resume is not None:
        step, samples = resume.manifest.global_step, resume.manifest.consumed_samples
        same = is_same_order(resume, trainer.checkpointer.manifest["order"])
        position = position or ("none of them is read again" if same else "the next ones are taken from the new order")
        logger.info("resuming from %s: step %d, %d samples consumed, %s", resume.path, step, samples, position)
    if job.peers is not None:
        job.peers.heartbeat.follow(lambda: trainer.state.global_step)
    with doing(lambda: f"training, step {trainer.state.global_step + 1}"):
        with reported_if_ended(trainer), profiled(run, trainer), held():  # not between last step and final model
            try:
                result = trainer.train(resume_from_checkpoint=str(resume.path) if resume else None)
                trainer.checkpointer.save_final()
            finally:
                trainer.checkpointer.close()  # before the process group ends
    kept = ("train_loss", "train_runtime", "train_samples_per_second", "train_steps_per_second")
    metrics = {key: result.metrics[key] for key in kept}
    metrics["progress_or_epoch"] = round(trainer.state.epoch or 0.0, 4)
    report(trainer, "train", metrics)
    evaluation = _last_evaluation(trainer)
    if evaluation:
        report(trainer, "eval", evaluation)
    return metrics | evaluation


@contextmanager
def reported_if_ended(trainer: GPTTrainer) -> Iterator[None]:
    """If a signal ends the training after a step, the report of its steps is written."""
    try:
        yield
    except Terminated as ended:
        if ended.detail and trainer.args.should_save:
            finish_unless_signalled(lambda: report_training(Path(trainer.args.output_dir or "")))
        raise


def _restore(trainer: GPTTrainer, folder: Path) -> None:
    """Log history of a checkpoint, if it has one, and its weights, or those of the best one that the run ends with."""
    history = folder / checkpoint.HISTORY
    if history.is_file():
        trainer.state = TrainerState.load_from_json(str(history))
        trainer.state.is_world_process_zero = trainer.is_world_process_zero()
        trainer.state.is_local_process_zero = trainer.is_local_process_zero()
        best = folder.with_name(f"checkpoint-{trainer.state.best_global_step}")
        if trainer.args.load_best_model_at_end and best.is_dir():
            logger.info("the best model is that of %s", best)
            folder = best
    trainer.checkpointer.load_weights(folder)


def _last_evaluation(trainer: GPTTrainer) -> dict[str, float]:
    """The logged evaluation of the weights that training ended with; empty if there was none."""
    step = trainer.state.best_global_step if trainer.args.load_best_model_at_end else trainer.state.global_step
    for entry in reversed(trainer.state.log_history):
        if "eval_loss" in entry and entry["step"] == step:
            return {key: value for key, value in entry.items() if key.startswith("eval_")}
    return {}


def evaluate(trainer: GPTTrainer, name: str, dataset: Dataset | None = None) -> dict[str, float]:
    """Evaluate and report; `name` is the split, and the prefix of every metric.

    Raises:
        GptlmError: if the loss is NaN or infinite.
    """
    with doing(f"evaluating ({name})"):
        metrics = trainer.evaluate(dataset, metric_key_prefix=name)
    check_finite(torch.tensor(metrics[f"{name}_loss"]), trainer.model)
    metrics.pop(f"{name}_model_preparation_time", None)
    report(trainer, name, metrics)
    return metrics


def report(trainer: GPTTrainer, name: str, metrics: dict[str, float]) -> None:
    """Print `metrics` as a table and write them into `name`_results.json and all_results.json."""
    for line in table(name, metrics):
        logger.info("%s", line)
    if trainer.args.should_save:
        folder = Path(trainer.args.output_dir or "")
        with checkpoint.writing(folder / f"{name}_results.json", "the results"):
            write_results(folder, name, metrics, trainer.metrics.evaluated)


def log_run(run: Run, examples: int, tokens_per_example: int) -> None:
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


def finish(run: Run, trainer: GPTTrainer, metrics: dict[str, float]) -> None:
    """Write the history of a finished training run, and log where its results are."""
    if not run.training.do_train:
        return
    if trainer.args.should_save:
        folder = Path(trainer.args.output_dir or "")
        owned.note(folder, [checkpoint.HISTORY], owned.RUN)
        trainer.state.save_to_json(str(folder / checkpoint.HISTORY))
        report_training(folder)
        with checkpoint.writing(folder, "the model card"):
            write_run_card(run, metrics)
    if "train_runtime" in metrics:
        speed = trainer.trained.tokens / max(metrics["train_runtime"], 1e-9)
        logger.info("Effective Tokens per second: %.2f", speed)
    logger.info("model, tokenizer, results and logs are in %s", run.training.output_dir)
