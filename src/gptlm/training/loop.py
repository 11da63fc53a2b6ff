"""The training loop: the stock loop of transformers 5.24 around `TrainingStep`.

It fires the callback events of the stock loop in its order and keeps the meaning of TrainerState and TrainerControl.
Differences: an epoch is a pass over the data as `trainer.progress` counts it, resuming needs no replay of the data, a
NaN or infinite loss ends the run before it is saved, and `logging_nan_inf_filter` therefore has no effect.
"""

import logging
import math
import os
import time
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any, NoReturn

import torch
from transformers import TrainerState
from transformers.integrations.deepspeed import deepspeed_init
from transformers.integrations.neftune import deactivate_neftune
from transformers.trainer_callback import ExportableState
from transformers.trainer_pt_utils import nested_gather
from transformers.trainer_utils import SaveStrategy, TrainOutput, speed_metrics

from gptlm.checkpoint import folder as checkpoint
from gptlm.checkpoint.manifest import Manifest
from gptlm.errors import GptlmError, named
from gptlm.signals import Terminated, held, installed, not_held
from gptlm.training.grad_sync import offload_error
from gptlm.training.metrics.loss import TrainLoss
from gptlm.training.smaller_batches import SmallerBatches
from gptlm.training.step import Inputs, TrainingStep

logger = logging.getLogger(__name__)

HISTORY = checkpoint.HISTORY
ADVICE = "try a lower --learning_rate, more --warmup_steps, or --max_grad_norm 1.0"
START_ADVICE = (  # no update came before: no learning rate is to blame
    "the starting weights already give this loss; use an earlier checkpoint, or copy their folder again"
)
FP16_ADVICE = ", or --bf16 instead of --fp16"


def train(trainer: Any, resume_from: str | None, trial: Any, ignore_keys: list[str] | None) -> TrainOutput:
    """Train up to the last step; `resume_from` is a checkpoint folder.

    Raises:
        GptlmError: for a NaN or infinite loss, or gradients that overflow at the lowest loss scale.
        Terminated: after a signal to the command, with a checkpoint of the step (see `SignalStop`).
    """
    with not_held():
        manifest = trainer.checkpointer.read(Path(resume_from)) if resume_from else None
        step, begun = _start(trainer, resume_from, manifest, trial, ignore_keys)
    with held():
        return _run(trainer, step, manifest, begun, trial, ignore_keys)


def _start(
    trainer: Any, resume_from: str | None, manifest: Manifest | None, trial: Any, ignore_keys: list[str] | None
) -> tuple[TrainingStep, float]:
    """Everything before the first step; returns the step, and the time when training began."""
    args = trainer.args
    trainer.accelerator.free_memory()
    max_steps = trainer.start_progress(manifest)
    progress = trainer.progress
    trainer.state = _initial_state(trainer, resume_from, max_steps, trial)
    dataloader = trainer.get_train_dataloader()
    step = prepare(trainer, max_steps)
    if resume_from is not None:
        trainer.checkpointer.load(Path(resume_from), trainer.optimizer, trainer.lr_scheduler, trainer.loss_scale)
    handler = trainer.callback_handler
    handler.model, handler.optimizer, handler.lr_scheduler = trainer.model, trainer.optimizer, trainer.lr_scheduler
    handler.train_dataloader = dataloader

    state, begun = trainer.state, time.time()
    trainer._initial_num_input_tokens_seen = state.num_input_tokens_seen  # `log` of the stock Trainer reads it
    trainer.train_loss = TrainLoss(args.device, manifest)
    step.grad_sync.zero_grad()
    trainer.fire("on_train_begin")
    torch.manual_seed(trainer.dropout_seed)  # else all replicas would draw the same dropout masks
    trainer.throughput.restart(state.global_step, progress.trained(0))
    if args.eval_on_start:
        trainer._evaluate(trial, ignore_keys, skip_scheduler=True)

    trainer.fire("on_epoch_begin")
    if resume_from is not None:
        trainer.checkpointer.load_rng_state(Path(resume_from), trainer.dropout_seed)
    return step, begun


def _run(
    trainer: Any,
    step: TrainingStep,
    manifest: Manifest | None,
    begun: float,
    trial: Any,
    ignore_keys: list[str] | None,
) -> TrainOutput:
    state, progress, stop = trainer.state, trainer.progress, trainer.stop
    last_logged, max_steps = progress.start_step, state.max_steps
    if manifest and manifest.evaluation_is_due:  # a signal ended the run before this evaluation was finished
        trainer.control.should_evaluate = trainer.control.should_save = True
        last_logged = _log_evaluate_save(trainer, step, last_logged, begun, trial, ignore_keys)
        if stop.number is not None:
            _end_by_signal(trainer, last_logged)
    batches = iter(trainer.callback_handler.train_dataloader)
    restarts = SmallerBatches(trainer) if trainer.finds_batch_size else None
    while state.global_step < max_steps and not trainer.control.should_training_stop:
        micro_batches = _next_batches(trainer, batches)
        if not micro_batches:
            logger.warning("the training data ended at step %d of %d", state.global_step, max_steps)
            break
        smaller = _step(trainer, step, micro_batches, restarts)
        if restarts is not None and smaller is not None:
            del micro_batches
            batches = restarts.restart(smaller)
            continue
        state.global_step += 1
        done = state.global_step - progress.start_step
        state.epoch = progress.passes(done)
        for inputs in micro_batches:
            trainer.current_flos += float(trainer.floating_point_ops(inputs))
            if trainer.args.include_num_input_tokens_seen == "all":
                trainer._track_num_input_tokens(inputs)
        if trainer.args.include_num_input_tokens_seen == "non_padding":
            state.num_input_tokens_seen = trainer.consumed.tokens
        trainer.fire("on_step_end")
        stop.look()
        last_logged = _log_evaluate_save(trainer, step, last_logged, begun, trial, ignore_keys)
        is_last = state.global_step >= max_steps or trainer.control.should_training_stop
        if progress.is_epoch_end(done) or is_last or trainer.control.should_epoch_stop:
            trainer.fire("on_epoch_end")
            last_logged = _log_evaluate_save(trainer, step, last_logged, begun, trial, ignore_keys)
            if not is_last and stop.number is None:
                trainer.fire("on_epoch_begin")
        if stop.number is not None:
            _end_by_signal(trainer, last_logged)
        if is_last or trainer.control.should_training_stop:
            break
    return _finish(trainer, begun, last_logged)


def _step(trainer: Any, step: TrainingStep, micro_batches: list[Inputs], restarts: SmallerBatches | None) -> int | None:
    """Train a step; returns the micro-batch to repeat it with where it has run out of memory."""
    # compiling takes a while, and there is nothing to save; of several processes all end at the same step
    is_first = trainer.state.global_step == trainer.progress.start_step and trainer.args.world_size == 1
    try:
        with not_held() if is_first else nullcontext():
            step(micro_batches, count_targets(trainer, micro_batches), trainer.train_loss.pending)
    except RuntimeError as error:
        if restarts is None or (smaller := restarts.next_size(error)) is None:
            raise
        return smaller
    if restarts is not None:
        restarts.note()
    return None


def prepare(trainer: Any, max_steps: int) -> TrainingStep:
    """Wrap the model, make optimizer and schedule, and connect the parts of a step."""
    if trainer._created_lr_scheduler:  # of an earlier call of `train`
        trainer.lr_scheduler, trainer._created_lr_scheduler = None, False
    try:
        if trainer.is_deepspeed_enabled:  # fills its "auto" values, and calls create_optimizer
            trainer.optimizer, trainer.lr_scheduler = deepspeed_init(trainer, num_training_steps=max_steps)
        else:
            trainer.create_optimizer()
        sync, weights = trainer.grad_sync, trainer.weights
        wrapped = sync.wrap(trainer.accelerator, trainer.model, trainer.optimizer, weights)
    except (AttributeError, ImportError, RuntimeError, OSError) as error:
        if (found := offload_error(error, trainer.args.deepspeed)) is None:
            raise
        raise found from error
    trainer.model_wrapped, trainer.optimizer = wrapped
    if trainer.is_deepspeed_enabled:
        trainer.deepspeed = trainer.model_wrapped  # `evaluation_loop` looks for it
    weights.start(trainer.model_wrapped, trainer.optimizer)
    trainer.create_scheduler(num_training_steps=max_steps)
    trainer.runner.prepare(
        model=sync.forward_model,
        network=trainer.model,
        world_size=trainer.args.world_size,
        compute_loss=trainer.micro_batch_loss,
        grad_sync=sync,
        weights=weights,
        accumulation=trainer.args.gradient_accumulation_steps,
    )
    return TrainingStep(
        model=trainer.model_wrapped,
        forward_backward=trainer.runner,
        grad_sync=sync,
        weights=weights,
        scheduler=trainer.lr_scheduler,
        to_device=trainer.inputs_on_device,
        max_grad_norm=trainer.args.max_grad_norm,
        event=trainer.fire,
    )


def _initial_state(trainer: Any, resume_from: str | None, max_steps: int, trial: Any) -> TrainerState:
    callbacks: list[Any] = [*trainer.callback_handler.callbacks, trainer.control]
    stateful: Any = [one for one in callbacks if isinstance(one, ExportableState)]
    state = TrainerState(stateful_callbacks=stateful)
    history = Path(resume_from or "") / HISTORY
    if resume_from is not None and history.is_file():
        state = TrainerState.load_from_json(str(history))
        state.best_model_checkpoint = _best_checkpoint(state)
        trainer.state = state
        trainer._load_callback_state()
    state.is_hyper_param_search = trial is not None
    state.train_batch_size = trainer._train_batch_size
    epochs = math.ceil(trainer.args.num_train_epochs) if trainer.args.max_steps <= 0 else 1
    state.init_training_references(trainer, max_steps, epochs, trial)
    state.compute_steps(trainer.args, max_steps)  # a resumed run obeys the intervals of the new command
    return state


def _best_checkpoint(state: TrainerState) -> str | None:
    """The best checkpoint so far, if it still is one of that step."""
    best = state.best_model_checkpoint
    if not best:
        return None
    if not os.path.isdir(best):
        logger.warning("the best checkpoint so far, %s, is gone; it is ignored", best)
        return None
    try:
        step = checkpoint.read(Path(best)).manifest.global_step
        reason = None if step == state.best_global_step else f"it is of step {step}, not {state.best_global_step}"
    except GptlmError as error:
        reason = str(error)
    if reason is not None:
        logger.warning("the best checkpoint so far, %s, is ignored: %s", best, reason)
    return best if reason is None else None


def _next_batches(trainer: Any, batches: Iterator[Inputs]) -> list[Inputs]:
    """The micro-batches of a step; the time spent waiting for them is noted."""
    started = time.perf_counter()
    found = [batch for _, batch in zip(range(trainer.args.gradient_accumulation_steps), batches, strict=False)]
    trainer.throughput.waited(time.perf_counter() - started)
    trainer.current_gradient_accumulation_steps = len(found)
    return found


def count_targets(trainer: Any, micro_batches: list[Inputs]) -> torch.Tensor | None:
    """Targets of a step on all processes, a tensor on the device; None where batches have no labels.

    The signals that the processes have received are shared with it.

    Counted before the copy to the device, so that nothing waits for it.
    """
    counts = []
    for batch in micro_batches:
        targets = batch["shift_labels"] if "shift_labels" in batch else batch.get("labels")
        if targets is None:
            trainer.stop.share(0)
            return None
        shifted = targets if "shift_labels" in batch else targets[..., 1:]  # `labels` alone are shifted in the model
        counts.append(int((shifted != -100).sum()))
    return trainer.stop.share(sum(counts))


def _log_evaluate_save(
    trainer: Any, step: TrainingStep, last_logged: int, begun: float, trial: Any, ignore_keys: list[str] | None
) -> int:
    """What `trainer.control` asks for after a step; returns the last logged step.

    After a signal no evaluation is begun or finished: a checkpoint notes that it is due.
    """
    control, state, loss, stop = trainer.control, trainer.state, trainer.train_loss, trainer.stop
    pending = None
    if stop.number is not None and control.should_evaluate:
        control.should_evaluate, stop.evaluation_is_due = False, True
    if control.should_log or control.should_save:
        pending = _mean_of_processes(trainer, loss.pending)  # waits for the device
        loss.look(pending)
        _check_loss(trainer, pending, last_logged)
    if trainer.loss_scale is not None and trainer.loss_scale.exhausted:
        what = f"gradients overflow at the lowest loss scale {trainer.loss_scale.value:g} at step {state.global_step}"
        raise GptlmError(failure(trainer, what))
    started = time.perf_counter()
    if control.should_log and state.global_step > last_logged and pending is not None:
        logs = {"loss": pending / (state.global_step - last_logged)}
        if (norm := step.weights.grad_norm) is not None:
            logs["grad_norm"] = norm.item() if isinstance(norm, torch.Tensor) else norm
        if trainer.args.include_num_input_tokens_seen != "no":
            logs["num_input_tokens_seen"] = state.num_input_tokens_seen
        loss.drain(pending)
        last_logged = state.global_step
        trainer.store_flos()
        trainer.log(logs, begun)
    is_long = trainer.control.should_evaluate or trainer.control.should_save
    if trainer.control.should_evaluate and (metrics := _evaluate(trainer, trial, ignore_keys)) is not None:
        _check_metric(trainer.args.metric_for_best_model, metrics)
        is_best = trainer._determine_best_metric(metrics=metrics, trial=trial)
        if trainer.args.save_strategy == SaveStrategy.BEST:
            trainer.control.should_save = is_best
    if trainer.control.should_save:
        _save(trainer)
    if is_long:
        stop.agree()
    trainer.throughput.exclude(time.perf_counter() - started)
    return last_logged


def _check_metric(name: str | None, metrics: dict[str, float]) -> None:
    """Raises GptlmError if the metric of the best model was not measured, which transformers says as a KeyError."""
    key = name if name is None or name.startswith("eval_") else f"eval_{name}"
    if key is not None and key not in metrics:
        measured = ", ".join(found.removeprefix("eval_") for found in metrics if found.startswith("eval_"))
        raise GptlmError(f"{named('metric_for_best_model')} {name} was not measured; measured were {measured}")


def _evaluate(trainer: Any, trial: Any, ignore_keys: list[str] | None) -> dict[str, float] | None:
    """The metrics; None if a signal has ended the evaluation."""
    # ZeRO stage 3 has to put gathered weights back, and several processes have to agree: they end between two batches
    is_alone = trainer.args.world_size == 1 and not trainer.is_deepspeed_enabled
    try:
        with not_held() if is_alone else nullcontext():
            return trainer._evaluate(trial, ignore_keys)
    except Terminated as ended:
        handler = installed()
        if handler is not None:
            handler.is_ending = False  # the run is saved first
        trainer.stop.number, trainer.stop.evaluation_is_due = ended.number, True
        trainer.control.should_evaluate = False
        return None


def _end_by_signal(trainer: Any, last_logged: int) -> NoReturn:
    """Save a checkpoint of this step, if that is asked for and not done yet; raises Terminated."""
    stop, step = trainer.stop, trainer.state.global_step
    if stop.saves and stop.saved != (step, stop.evaluation_is_due):
        pending = _mean_of_processes(trainer, trainer.train_loss.pending)
        trainer.train_loss.look(pending)
        _check_loss(trainer, pending, last_logged)
        _save(trainer)
    trainer.checkpointer.wait()
    trainer.runner.close()
    trainer.fire("on_train_end")
    if not stop.saves:
        raise stop.ended(f" after step {step}, without a checkpoint of it (save_on_signal 0)")
    folder = Path(trainer.args.output_dir or "") / f"checkpoint-{step}"
    use = "is where the same command resumes"
    if trainer.args.save_only_model:
        use = "holds its weights"
    elif trainer.clears_output:
        use += " without --overwrite_output_dir"
    raise stop.ended(f" after step {step}; {folder} {use}")


def _save(trainer: Any) -> None:
    trainer.save_checkpoint()
    trainer.stop.saved = (trainer.state.global_step, trainer.stop.evaluation_is_due)
    trainer.fire("on_save")


def _mean_of_processes(trainer: Any, value: torch.Tensor) -> float:
    return nested_gather(value, trainer.args.parallel_mode).mean().item()


def _check_loss(trainer: Any, pending: float, last_logged: int) -> None:
    """Raises GptlmError if `pending`, the sum of the losses after step `last_logged`, is NaN or infinite."""
    step = trainer.state.global_step
    if not math.isfinite(pending):
        is_first = step == trainer.progress.start_step + 1
        # the sum is read when it is logged or saved only, so which of several steps it was is not known
        steps = f"at step {step}" if step == last_logged + 1 else f"in one of the steps {last_logged + 1} to {step}"
        raise GptlmError(failure(trainer, f"the loss is {pending} {steps}", START_ADVICE if is_first else ADVICE))
    if pending == 0.0 and trainer.control.should_log and not trainer.is_zero_loss_logged:
        trainer.is_zero_loss_logged = True
        logger.warning(
            "the loss has been exactly 0 up to step %d: nothing is trained; check what the targets are, and the "
            "precision",
            step,
        )


def failure(trainer: Any, what: str, advice: str = ADVICE) -> str:
    """A sentence on why the run ends, with the last finite loss and the newest checkpoint."""
    good = [entry for entry in trainer.state.log_history if abs(entry.get("loss", math.nan)) < math.inf]
    last = (
        f"the last finite loss was {good[-1]['loss']} at step {good[-1]['step']}"
        if good
        else "no loss was finite before"
    )
    newest = checkpoint.folders(Path(trainer.args.output_dir or ""))
    where = f"the newest checkpoint is {newest[-1]}" if newest else "there is no checkpoint"
    advice += FP16_ADVICE if trainer.loss_scale is not None else ""
    return f"{what}, {last}; nothing of this step was saved, {where}; {advice}"


def _finish(trainer: Any, begun: float, last_logged: int) -> TrainOutput:
    """The results of the run, and the best model if it is asked for."""
    trainer.runner.close()
    trainer.checkpointer.wait()
    state, steps = trainer.state, trainer.state.global_step - trainer.progress.start_step
    pending = _mean_of_processes(trainer, trainer.train_loss.pending)
    _check_loss(trainer, pending, last_logged)  # the last steps may have been neither logged nor saved
    mean = trainer.train_loss.run_mean(pending, state.global_step)
    samples = trainer.progress.trained(steps).examples
    metrics = speed_metrics("train", begun, num_samples=samples, num_steps=steps)
    trainer.store_flos()
    metrics |= {"total_flos": state.total_flos, "train_loss": mean}
    trainer._memory_tracker.stop_and_update_metrics(metrics)
    trainer.log(metrics)
    if trainer.args.load_best_model_at_end and state.best_model_checkpoint is not None:
        best = state.best_model_checkpoint
        logger.info("best checkpoint: %s (%s %.8g)", best, trainer.args.metric_for_best_model, state.best_metric)
        trainer.checkpointer.load_weights(Path(best))
    trainer.fire("on_train_end")
    if trainer.neftune_noise_alpha is not None:
        deactivate_neftune(trainer.model, trainer.neftune_hook_handle, trainer.accelerator)
    trainer.is_in_train = False
    return TrainOutput(state.global_step, mean, metrics)
