"""HuggingFace's Trainer with PaddleNLP's data order, schedules and log lines, and checkpoints that are whole or absent.

Overridden, and why:
    get_train_dataloader, get_eval_dataloader   order lies in the index; going on starts at the consumed sample
    prediction_step                             the mean over all targets, not of the batches' means
    create_scheduler                            our schedules
    log                                         PaddleNLP's fields
    _init_training_state                        a resumed run obeys the new command's intervals
    _load_optimizer_and_scheduler               ... and its learning rate, weight decay and betas
    _maybe_log_save_evaluate                    a loss that is no number stops the run before it is saved
    _save_checkpoint                            written aside, then renamed
    _load_from_checkpoint, _load_best_model     with the weight layout of model/gpt.py
"""

import logging
import math
import shutil
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.optim.lr_scheduler import LambdaLR
from torch.utils.data import DataLoader
from transformers import ProgressCallback, Trainer
from transformers.trainer_callback import PrinterCallback
from transformers.trainer_pt_utils import nested_gather

from gptlm.errors import GptlmError
from gptlm.model.build import load_model
from gptlm.training import checkpoint
from gptlm.training.callbacks import Bookkeeping, OwnDropoutPerRank, ProgressBar
from gptlm.training.evaluation import loss_sum, mean_loss
from gptlm.training.logging import Throughput, log_line, train_fields
from gptlm.training.memory import gpu_fields, process_fields
from gptlm.training.sampler import ConsecutiveBatches
from gptlm.training.schedule import Schedule

logger = logging.getLogger(__name__)

OPTIMIZER_SETTINGS = ("initial_lr", "weight_decay", "betas", "eps")


class PretrainTrainer(Trainer):
    """Trainer for datasets whose order is the training order.

    Args:
        schedule: learning rate by optimizer update.
        seq_length: tokens per sample, for the speed in the log.
        consumed_samples, consumed_steps: where the run goes on; 0 for a new one.
        loss_sum: sum of the losses of the steps before, for the mean over the whole run.
        facts: noted in each checkpoint's manifest.
        loss_scale: first value of fp16's dynamic loss scale.
        keep: checkpoints to keep, the newest and the best always among them; None keeps all.
        process_memory: add the process's memory to the log line.
    """

    def __init__(
        self,
        *args: Any,
        schedule: Schedule,
        seq_length: int,
        consumed_samples: int = 0,
        consumed_steps: int = 0,
        loss_sum: float = 0.0,
        facts: dict[str, Any] | None = None,
        loss_scale: float = 32768.0,
        keep: int | None = None,
        process_memory: bool = False,
        **kwargs: Any,
    ):
        super().__init__(*args, **kwargs)
        self.compute_metrics = mean_loss
        self.schedule = schedule
        self.start_samples, self.start_step, self.start_loss_sum = consumed_samples, consumed_steps, loss_sum
        self.loss_sum = loss_sum
        self.facts = facts or {}
        self.keep = keep  # not args.save_total_limit, with which the Trainer may remove the newest one
        self.process_memory = process_memory
        self.throughput = Throughput(
            samples_per_step=self.samples_per_step, tokens_per_sample=seq_length, world=self.args.world_size
        )
        if self.accelerator.scaler is not None:  # PaddlePaddle's: x2 after 2000 good steps, x0.5 after a bad one
            self.accelerator.scaler = torch.amp.GradScaler(self.args.device.type, init_scale=loss_scale)
        for callback in (PrinterCallback, ProgressCallback):
            self.remove_callback(callback)
        if not self.args.disable_tqdm:
            self.add_callback(ProgressBar())
        self.add_callback(OwnDropoutPerRank())
        self.add_callback(Bookkeeping(self))

    @property
    def samples_per_step(self) -> int:
        """The global batch."""
        args = self.args
        return args.per_device_train_batch_size * args.gradient_accumulation_steps * args.world_size

    @property
    def consumed_samples(self) -> int:
        """Training samples used so far, earlier starts of the run included."""
        return self.start_samples + (self.state.global_step - self.start_step) * self.samples_per_step

    @property
    def output_dir(self) -> Path:
        return Path(self.args.output_dir or "")

    # Data -------------------------------------------------------------------------------------------------------

    def get_train_dataloader(self) -> DataLoader:
        accumulation = self.args.gradient_accumulation_steps
        return self._loader(
            self.train_dataset,
            ConsecutiveBatches(
                start=self.start_samples,
                batch_size=self.args.per_device_train_batch_size,
                batches=self.args.max_steps * accumulation,
                done=self.start_step * accumulation,
                replica=self.args.process_index,
                replicas=self.args.world_size,
            ),
        )

    def get_eval_dataloader(self, eval_dataset=None) -> DataLoader:
        dataset: Any = self.eval_dataset if eval_dataset is None else eval_dataset
        size = self.args.per_device_eval_batch_size
        sampler = ConsecutiveBatches(
            start=0,
            batch_size=size,
            batches=len(dataset) // (size * self.args.world_size),
            replica=self.args.process_index,
            replicas=self.args.world_size,
        )
        return self._loader(dataset, sampler)

    def _loader(self, dataset, sampler: ConsecutiveBatches) -> DataLoader:
        return DataLoader(
            dataset,
            batch_sampler=sampler,
            collate_fn=self.data_collator,
            num_workers=self.args.dataloader_num_workers,
            pin_memory=self.args.device.type == "cuda",
            # its own generator: else the loader draws from the global one and shifts dropout after a resume
            generator=torch.Generator().manual_seed(self.args.seed),
        )

    def prediction_step(self, model, inputs, prediction_loss_only, ignore_keys=None):
        with self.compute_loss_context_manager():
            return None, *loss_sum(model, self._prepare_inputs(inputs))

    # Schedule and state -----------------------------------------------------------------------------------------

    def create_scheduler(self, num_training_steps: int, optimizer=None):
        if self.lr_scheduler is None:
            highest = self.schedule.maximum

            def factor(done: int) -> float:
                return self.schedule.rate(done + 1) / highest if highest else 1.0

            self.lr_scheduler = LambdaLR(optimizer or self.optimizer, factor)  # type: ignore[arg-type]
            self._created_lr_scheduler = True
        return self.lr_scheduler

    def _init_training_state(self, max_steps, *args, **kwargs):
        position = super()._init_training_state(max_steps, *args, **kwargs)
        self.state.compute_steps(self.args, max_steps)
        return position

    def _load_optimizer_and_scheduler(self, folder: str | None) -> None:
        if folder is None or self.optimizer is None:
            return
        wanted = [{name: group[name] for name in OPTIMIZER_SETTINGS} for group in self.optimizer.param_groups]
        with checkpoint.reading(folder):
            super()._load_optimizer_and_scheduler(folder)
        scheduler: Any = self.lr_scheduler
        scheduler.base_lrs = [group["initial_lr"] for group in wanted]
        for group, settings in zip(self.optimizer.param_groups, wanted, strict=True):
            group.update(settings)
            group["lr"] = settings["initial_lr"] * scheduler.lr_lambdas[0](scheduler.last_epoch)
        scheduler._last_lr = [group["lr"] for group in self.optimizer.param_groups]

    def _load_rng_state(self, folder: str | None) -> None:
        with checkpoint.reading(folder or ""):
            super()._load_rng_state(folder)

    def _maybe_log_save_evaluate(self, tr_loss, *args, **kwargs) -> None:
        if self.control.should_log or self.control.should_save:
            pending = nested_gather(tr_loss, self.args.parallel_mode).mean().item()
            self.loss_sum = self.start_loss_sum + self._total_loss_scalar + pending
            if not math.isfinite(pending):
                raise GptlmError(self._not_a_number(pending))
        started = time.perf_counter()
        super()._maybe_log_save_evaluate(tr_loss, *args, **kwargs)
        self.throughput.exclude(time.perf_counter() - started)

    def _not_a_number(self, value: float) -> str:
        good = [entry for entry in self.state.log_history if math.isfinite(entry.get("loss", math.nan))]
        last = (
            f"the last good one was {good[-1]['loss']} at step {good[-1]['step']}" if good else "none was good before"
        )
        newest = checkpoint.folders(self.output_dir)
        where = f"the newest checkpoint is {newest[-1]}" if newest else "there is no checkpoint"
        return (
            f"the loss is {value} at step {self.state.global_step}, {last}; nothing of this step was saved, {where}; "
            "try a lower --learning_rate, more --warmup_steps, --max_grad_norm 1.0, or --bf16 instead of --fp16"
        )

    def mean_loss(self, mean_since_start: float) -> float:
        """Mean training loss over all steps of the run, from the mean over those since this start."""
        steps = self.state.global_step - self.start_step
        return (self.start_loss_sum + mean_since_start * steps) / max(self.state.global_step, 1)

    # Log --------------------------------------------------------------------------------------------------------

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        """Note `logs` in the history, hand them to the trackers, and print them in PaddleNLP's words."""
        gradient_norm = logs.pop("grad_norm", None)
        progress = self.state.epoch or 0.0
        gpu = self.args.device.type == "cuda"
        if "loss" in logs:
            shown = train_fields(
                logs["loss"],
                self._get_learning_rate(),
                self.state.global_step,
                progress,
                gpu=gpu_fields() if gpu else {},
                speed=self.throughput.interval(self.state.global_step),
                process=process_fields(gpu=gpu) if self.process_memory else {},
            )
        else:
            hidden = ("model_preparation_time", "total_flos")
            shown = {key: value for key, value in logs.items() if not key.endswith(hidden)}
            shown["progress_or_epoch"] = round(progress, 4)
        noted = shown if gradient_norm is None else {**shown, "grad_norm": gradient_norm}
        self.state.log_history.append({**noted, "step": self.state.global_step})
        self.control = self.callback_handler.on_log(self.args, self.state, self.control, noted)
        logger.info(log_line(shown))

    # Checkpoints ------------------------------------------------------------------------------------------------

    def save_final(self) -> None:
        """Write the final model and tokenizer into `output_dir`.

        Raises:
            GptlmError: if they cannot be written.
        """
        with checkpoint.writing(self.output_dir, "the final model"):
            self.save_model()

    def _save_checkpoint(self, model, trial) -> None:
        staging = checkpoint.staging_folder(self.output_dir, self.state.global_step)
        with checkpoint.writing(staging, "the checkpoint"):
            if self.args.should_save:
                shutil.rmtree(staging, ignore_errors=True)
                staging.mkdir(parents=True)
            self._barrier()
            self._write_checkpoint(str(staging))
            self._barrier()
            if self.args.should_save:
                self._commit(staging)
            self._barrier()

    def _commit(self, staging: Path) -> None:
        final = checkpoint.commit(staging, self._manifest())
        logger.info("checkpoint written to %s", final)
        best = self.state.best_model_checkpoint
        for old in checkpoint.rotate(self.output_dir, self.keep, Path(best) if best else None):
            logger.info("checkpoint %s removed (save_total_limit %s)", old, self.keep)

    def _write_checkpoint(self, folder: str) -> None:
        self.store_flos()
        self.save_model(folder, _internal_call=True)
        if not self.args.save_only_model:
            self._save_optimizer_and_scheduler(folder)
            self._save_scaler(folder)
            self._save_rng_state(folder)
        if self.args.should_save:
            if self.state.best_global_step:
                best = self.output_dir / f"checkpoint-{self.state.best_global_step}"
                if best.is_dir() or self.state.best_global_step == self.state.global_step:
                    self.state.best_model_checkpoint = str(best)
            self.state.save_to_json(str(Path(folder) / "trainer_state.json"))

    def _manifest(self) -> dict[str, Any]:
        return {
            **self.facts,
            "global_step": self.state.global_step,
            "consumed_samples": self.consumed_samples,
            "loss_sum": self.loss_sum,
            "world_size": self.args.world_size,
            "global_batch_size": self.samples_per_step,
        }

    def restore(self, folder: Path) -> None:
        """Put the weights of a checkpoint into the model."""
        model: Any = self.model
        model.load_state_dict(load_model(str(folder)).state_dict())

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model=None) -> None:
        self.restore(Path(resume_from_checkpoint))

    def _load_best_model(self) -> None:
        best = self.state.best_model_checkpoint
        logger.info("best checkpoint: %s (%s %s)", best, self.args.metric_for_best_model, self.state.best_metric)
        self.restore(Path(best or ""))

    def _barrier(self) -> None:
        if self.args.world_size > 1:
            dist.barrier()
