"""HuggingFace's Trainer with PaddleNLP's data order, schedules and log lines.

`stepping.py` adds precision and ZeRO, `saving.py` checkpoints. Overridden here, and why:
    get_train_dataloader, get_eval_dataloader   order lies in the index; going on starts at the consumed sample
    evaluation_loop                             samples per second without what fills batches up
    prediction_step                             the mean over all targets, not of the batches' means
    create_scheduler                            our schedules
    get_batch_samples                           the time spent waiting for data
    log                                         the originals' lines
    _maybe_log_save_evaluate                    a loss that is no number stops the run before it is saved
"""

import logging
import math
import time
from collections.abc import Callable
from typing import Any

import torch
from torch.optim.lr_scheduler import LambdaLR
from torch.utils.data import DataLoader
from transformers import ProgressCallback
from transformers.trainer_callback import PrinterCallback
from transformers.trainer_pt_utils import nested_gather
from transformers.trainer_utils import EvalLoopOutput

from gptlm.checkpoint import folder as checkpoint
from gptlm.checkpoint.checkpointer import SavingTrainer
from gptlm.compat.log_lines import FORMATS, Evaluation, Step
from gptlm.data.epochs import Size
from gptlm.errors import GptlmError
from gptlm.training.callbacks import Bookkeeping, OwnDropoutPerRank, PlainProgress, ProgressBar
from gptlm.training.lr_schedule import Schedule
from gptlm.training.metrics.loss import loss_sum, mean_loss
from gptlm.training.metrics.memory import gpu_fields, process_fields
from gptlm.training.metrics.throughput import Throughput, log_line, train_fields
from gptlm.training.sampler import ConsecutiveBatches
from gptlm.training.step import ADVICE, FP16_ADVICE, START_ADVICE

logger = logging.getLogger(__name__)


class PretrainTrainer(SavingTrainer):
    """Trainer for datasets whose order is the training order.

    Args:
        schedule: learning rate by optimizer update.
        seq_length: tokens per sample, for the speed in the log.
        samples_per_epoch: of one pass over the training data; None: as many as the dataset has.
        consumed_samples, consumed_steps: where the run goes on; 0 for a new one.
        loss_sum: sum of the losses of the steps before, for the mean over the whole run.
        steps_without_loss: steps before that are not in `loss_sum`; another library made them.
        process_memory: add the process's memory to the log line.
        log_format: whose lines are printed, see log_formats.py.
        flops_per_sample: floating-point operations of one sample, for a log line.
        utilisation: share of a device's peak that one token per second is; None: not known.
    """

    def __init__(
        self,
        *args: Any,
        schedule: Schedule,
        seq_length: int,
        samples_per_epoch: float | None = None,
        consumed_samples: int = 0,
        consumed_steps: int = 0,
        loss_sum: float = 0.0,
        steps_without_loss: int = 0,
        process_memory: bool = False,
        log_format: str = "paddlenlp",
        flops_per_sample: float = 0.0,
        utilisation: float | None = None,
        **kwargs: Any,
    ):
        super().__init__(*args, **kwargs)
        self.compute_metrics = mean_loss
        self.schedule = schedule
        self.start_samples, self.start_step, self.start_loss_sum = consumed_samples, consumed_steps, loss_sum
        self.loss_sum, self.steps_without_loss = loss_sum, steps_without_loss
        self.process_memory = process_memory
        self.log_format, self._title_due = FORMATS[log_format], True
        self.flops_per_sample = flops_per_sample
        self.seq_length, self.samples_per_epoch = seq_length, samples_per_epoch
        self.evaluated_batches = 0
        self._warned_of_zero = False
        self.throughput = Throughput(world=self.args.world_size, utilisation=utilisation)
        for callback in (PrinterCallback, ProgressCallback):
            self.remove_callback(callback)
        self.add_callback(PlainProgress() if self.args.disable_tqdm else ProgressBar())
        self.add_callback(OwnDropoutPerRank(self))
        self.add_callback(Bookkeeping(self))

    @property
    def samples_per_step(self) -> int:
        """The global batch."""
        args = self.args
        return args.per_device_train_batch_size * args.gradient_accumulation_steps * self.replicas

    @property
    def trained(self) -> Size:
        """Samples and tokens trained since this start of the run."""
        samples = (self.state.global_step - self.start_step) * self.samples_per_step
        return Size(samples, samples * self.seq_length)

    @property
    def consumed_samples(self) -> int:
        """Training samples used so far, earlier starts of the run included."""
        return self.start_samples + self.trained.examples

    @property
    def consumed_tokens(self) -> int:
        """The tokens of them."""
        return self.consumed_samples * self.seq_length

    @property
    def passes(self) -> float:
        """Passes over the training data so far, earlier starts of the run included: `progress_or_epoch`."""
        dataset: Any = self.train_dataset
        return self.consumed_samples / (self.samples_per_epoch or len(dataset))

    @property
    def at_epoch_end(self) -> bool:
        """Whether the last step ended a pass. Passes of pretraining end between steps, whose batches are whole."""
        return False

    @property
    def first_index(self) -> int:
        """Where in the training dataset this start of the run begins."""
        return self.start_samples

    # Data -------------------------------------------------------------------------------------------------------

    def get_train_dataloader(self) -> DataLoader:
        accumulation = self.args.gradient_accumulation_steps
        return self._loader(
            self.train_dataset,
            ConsecutiveBatches(
                start=self.first_index,
                batch_size=self.args.per_device_train_batch_size,
                batches=self.args.max_steps * accumulation,
                done=self.start_step * accumulation,
                replica=self.replica,
                replicas=self.replicas,
            ),
        )

    def get_eval_dataloader(self, eval_dataset=None) -> DataLoader:
        dataset: Any = self.eval_dataset if eval_dataset is None else eval_dataset
        size = self.args.per_device_eval_batch_size
        self.evaluated_batches = len(dataset) // (size * self.replicas)
        sampler = ConsecutiveBatches(
            start=0,
            batch_size=size,
            batches=self.evaluated_batches,
            replica=self.replica,
            replicas=self.replicas,
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

    def evaluation_loop(self, dataloader, *args, **kwargs) -> EvalLoopOutput:
        output = super().evaluation_loop(dataloader, *args, **kwargs)
        return output._replace(num_samples=dataloader.dataset.examples)

    def prediction_step(self, model, inputs, prediction_loss_only, ignore_keys=None):
        if self.has_pipeline:
            return None, *self.summed_loss(inputs)
        with self.compute_loss_context_manager():
            return None, *loss_sum(model, self._prepare_inputs(inputs))

    def get_batch_samples(self, *args, **kwargs):
        started = time.perf_counter()
        found = super().get_batch_samples(*args, **kwargs)
        self.throughput.waited(time.perf_counter() - started)
        return found

    # Schedule and state -----------------------------------------------------------------------------------------

    def create_scheduler(self, num_training_steps: int, optimizer=None):
        if self.lr_scheduler is None:
            highest = self.schedule.maximum

            def factor(done: int) -> float:
                return self.schedule.rate(done + 1) / highest if highest else 1.0

            self.lr_scheduler = LambdaLR(optimizer or self.optimizer, factor)  # type: ignore[arg-type]
            self._created_lr_scheduler = True
        return self.lr_scheduler

    def _maybe_log_save_evaluate(self, tr_loss, *args, **kwargs) -> None:
        if self.control.should_log or self.control.should_save:
            pending = nested_gather(tr_loss, self.args.parallel_mode).mean().item()
            self.loss_sum = self.start_loss_sum + self._total_loss_scalar + pending
            if not math.isfinite(pending):
                first = self.state.global_step == self.start_step + 1
                raise GptlmError(self.trouble(f"the loss is {pending}", START_ADVICE if first else ADVICE))
            if pending == 0.0 and self.control.should_log and not self._warned_of_zero:
                self._warned_of_zero = True
                logger.warning(
                    "the loss has been exactly 0 up to step %d: nothing is learnt; check what the targets are, and the "
                    "precision",
                    self.state.global_step,
                )
        if self.loss_scale is not None and self.loss_scale.exhausted:
            raise GptlmError(self.trouble(f"gradients overflow at the lowest loss scale {self.loss_scale.value:g}"))
        started = time.perf_counter()
        super()._maybe_log_save_evaluate(tr_loss, *args, **kwargs)
        self.throughput.exclude(time.perf_counter() - started)

    def trouble(self, what: str, advice: str = ADVICE) -> str:
        good = [entry for entry in self.state.log_history if math.isfinite(entry.get("loss", math.nan))]
        last = (
            f"the last good loss was {good[-1]['loss']} at step {good[-1]['step']}"
            if good
            else "no loss was good before"
        )
        newest = checkpoint.folders(self.output_dir)
        where = f"the newest checkpoint is {newest[-1]}" if newest else "there is no checkpoint"
        advice += FP16_ADVICE if self.loss_scale is not None else ""
        return f"{what} at step {self.state.global_step}, {last}; nothing of this step was saved, {where}; {advice}"

    def mean_loss(self, mean_since_start: float) -> float:
        """Mean training loss over all steps of the run, from the mean over those since this start."""
        steps, counted = self.state.global_step - self.start_step, self.state.global_step - self.steps_without_loss
        return (self.start_loss_sum + mean_since_start * steps) / max(counted, 1)

    # Log --------------------------------------------------------------------------------------------------------

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        """Note `logs` in the history, hand them to the trackers, and print them in PaddleNLP's words."""
        gradient_norm = logs.pop("grad_norm", None)
        loss = logs.get("loss")
        progress = self.state.epoch or 0.0
        gpu = self.args.device.type == "cuda"
        if "loss" in logs:
            shown = train_fields(
                logs["loss"],
                self._get_learning_rate(),
                self.state.global_step,
                progress,
                gpu=gpu_fields() if gpu else {},
                speed=self.throughput.interval(self.state.global_step, self.trained),
                process=process_fields(gpu=gpu) if self.process_memory else {},
            )
        else:
            if "train_runtime" in logs:
                logs |= self._results_of_run(logs["train_loss"], logs["train_runtime"])
            hidden = ("model_preparation_time", "total_flos")
            shown = {key: value for key, value in logs.items() if not key.endswith(hidden)}
            shown["progress_or_epoch"] = round(progress, 4)
        shown |= self.more_fields(logs)
        noted = shown if gradient_norm is None else {**shown, "grad_norm": gradient_norm}
        self.state.log_history.append({**noted, "step": self.state.global_step})
        self.control = self.callback_handler.on_log(self.args, self.state, self.control, noted)
        if loss is not None and self.log_format.step is not None:
            self._say_step(self.log_format.step, loss, gradient_norm)
        elif self.log_format.evaluation is not None and {"eval_loss", "test_loss"} & shown.keys():
            self._say_evaluation(self.log_format.evaluation, shown)
        else:
            logger.info(log_line(shown))

    def _results_of_run(self, mean_since_start: float, seconds: float) -> dict[str, float]:
        """What the stock Trainer takes for this start of the run alone, or counts in whole batches."""
        speed = self.trained.examples / max(seconds, 1e-9)
        return {"train_loss": self.mean_loss(mean_since_start), "train_samples_per_second": round(speed, 3)}

    def _say_step(self, line: Callable[[Step], str], loss: float, gradient_norm: float | None) -> None:
        if self._title_due:
            self._title_due = False
            for title in self.log_format.title:
                logger.info(title, extra={"head": self.log_format.head})
        scale = self.loss_scale
        samples, tokens = self.throughput.mean
        step = Step(
            number=self.state.global_step,
            last=self.args.max_steps,
            loss=loss,
            learning_rate=self._get_learning_rate(),
            gradient_norm=gradient_norm,
            loss_scale=scale.value if scale else None,
            skipped=scale.skipped if scale else 0,
            seconds=self.throughput.seconds,
            reading=self.throughput.reading,
            batch=self.samples_per_step,
            samples=samples,
            tokens=tokens,
            consumed_samples=self.consumed_samples,
            consumed_tokens=self.consumed_tokens,
            accumulation=self.args.gradient_accumulation_steps * self.micro_batches,
            world=self.args.world_size,
            flops=samples * self.flops_per_sample,
        )
        if scale:
            scale.skipped = 0
        logger.info(line(step), extra={"head": self.log_format.head})

    def _say_evaluation(self, line: Callable[[Evaluation], str], shown: dict[str, float]) -> None:
        name = "eval" if "eval_loss" in shown else "test"
        seconds = shown.get(f"{name}_runtime", 0.0)
        batches, step = max(self.evaluated_batches, 1), self.state.global_step
        found = Evaluation(name, step, shown[f"{name}_loss"], batches, max(seconds, 1e-9))
        for text in line(found).splitlines():
            logger.info(text, extra={"head": self.log_format.head})

    def more_fields(self, logs: dict[str, float]) -> dict[str, float]:
        """What a kind of training adds to a log line."""
        return {}

    def _manifest(self) -> dict[str, Any]:
        return {
            **super()._manifest(),
            "consumed_samples": self.consumed_samples,
            "loss_sum": self.loss_sum,
            "steps_without_loss": self.steps_without_loss,
            "global_batch_size": self.samples_per_step,
        }
