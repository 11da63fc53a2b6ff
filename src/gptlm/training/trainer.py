"""`GPTTrainer`, the only subclass of transformers.Trainer in the package.

What happens to a batch is in step.py, the loop around it in loop.py. The trainer holds the parts and connects them:

    weights        how weights are kept, scaled, clipped and updated   precision/weights.py
    grad_sync      how gradients of several processes become one       grad_sync.py
    runner         how forward and backward run                        step.py, cuda_graphs.py, pipeline_step.py
    checkpointer   how checkpoints are written and resumed             checkpoint/checkpointer.py
    progress       where the run is in its data                        progress.py
    metrics        what an evaluation computes                         metrics/loss.py, metrics/responses.py
    run_log        what a log line holds                               metrics/run_log.py
    stop           at which step a signal ends the run                 stop.py

Overridden, and why (tests/training/test_trainer.py compares the signatures with the installed transformers):

    _inner_training_loop   the step should be visible, and any part of it replaceable
    create_optimizer       master weights of half-precision weights
    create_scheduler       our schedules
    get_train_dataloader   the order lies in the dataset's index; resuming starts at the consumed sample
    get_eval_dataloader    fills batches up, so that every process evaluates equally many
    prediction_step        sums over targets in place of batch means
    evaluation_loop        samples without those that fill batches up; metrics after the loop
    log                    log formats
    save_model             whole weights from every ZeRO stage and parallel layout, written by one process
    _load_from_checkpoint  the loop restores weights with the optimizer state, in any layout
"""

import logging
import weakref
from collections.abc import Callable, Mapping
from operator import attrgetter
from pathlib import Path
from typing import Any

import torch
from torch.optim.lr_scheduler import LambdaLR, LRScheduler
from torch.utils.data import DataLoader
from transformers import ProgressCallback, Trainer, TrainingArguments
from transformers.trainer_callback import PrinterCallback
from transformers.trainer_utils import EvalLoopOutput, TrainOutput

from gptlm.checkpoint.checkpointer import Checkpointer
from gptlm.checkpoint.manifest import Manifest
from gptlm.data.collate import FilledCollator, collate_samples, mask_is_needless, shifted, tokens_of
from gptlm.data.epochs import Epochs, Filled, Size, steps_left
from gptlm.errors import GptlmError
from gptlm.parallel.process_groups import Mesh
from gptlm.signals import survive_first
from gptlm.training import loop
from gptlm.training.callbacks import PlainProgress, ProgressBar
from gptlm.training.grad_sync import DeepSpeedSync, GradSync, default_grad_sync
from gptlm.training.lr_schedule import Schedule, StockSchedule
from gptlm.training.metrics.caller import CallerMetrics
from gptlm.training.metrics.loss import LossMetrics, TrainLoss
from gptlm.training.metrics.memory_parts import MemoryParts
from gptlm.training.metrics.run_log import RunLog
from gptlm.training.metrics.throughput import start_logging
from gptlm.training.pipeline_step import PipelineStep
from gptlm.training.precision.loss_scale import LossScale
from gptlm.training.precision.weights import DeepSpeedWeights, Float32Weights, MasterWeights
from gptlm.training.progress import EpochProgress, SequentialProgress, position_of
from gptlm.training.sample_checks import any_dataset, check_batch, check_dataset
from gptlm.training.sampler import ConsecutiveBatches
from gptlm.training.step import EagerStep, Inputs, to_device
from gptlm.training.stop import SignalStop
from gptlm.upstream.transformers import use_one_gpu

# Arguments that the stock Trainer reads in methods which are replaced here, and the values that need none of them.
ACCEPTED: dict[str, tuple[Any, ...]] = {
    "fsdp": (None, False, "", []),
    "auto_find_batch_size": (False,),
    "push_to_hub": (False,),
    "use_liger_kernel": (False,),
    "enable_jit_checkpoint": (False,),
    "parallelism_config": (None,),
    "torch_empty_cache_steps": (None,),
    "train_sampling_strategy": ("random",),
    "dataloader_drop_last": (False,),
    "dataloader_in_order": (True,),
    "accelerator_config.split_batches": (False,),
    "average_tokens_across_devices": (True,),  # gradients are means over replicas, see `micro_batch_loss`
}


class GPTTrainer(Trainer):
    """transformers.Trainer for `GPTLMHeadModel`, alone or with LoRA adapters.

    Stock arguments are enough: `GPTTrainer(model=model, args=TrainingArguments(...), train_dataset=dataset)`, where
    `dataset` is a sequence of blocks (T + 1 token ids) or of dicts (`input_ids`, optionally `labels` in HuggingFace's
    convention). Each epoch then reads it in an order of its own. Each part has a default that suits model and `args`.
    For example:

        from gptlm.model.build import new_model
        from gptlm.model.presets import PRESETS
        model = new_model(PRESETS["gpt2-en"].shape)
        blocks = [[token % 50257 for token in range(start, start + 129)] for start in range(64)]
        GPTTrainer(model, TrainingArguments("output", max_steps=3, logging_steps=1), train_dataset=blocks).train()

    Token counts are exact for a list; of another dataset every sample counts as long as the first.

    Args:
        schedule: learning rate by update; None: the one of `args`.
        mesh: process groups where several processes share a replica of the model.
        finds_batch_size: see `SmallerBatches`.
        save_on_signal: whether a signal saves a checkpoint, inside `gptlm.signals.ending_on_signals()`.
        clears_output: whether the same command would begin anew, and not resume.

    Raises:
        GptlmError: for a value of `args` that has no effect here, see `ACCEPTED`.
    """

    model: Any
    progress: Any

    def __init__(
        self,
        model: Any = None,
        args: TrainingArguments | None = None,
        *,
        weights: Float32Weights | None = None,
        grad_sync: GradSync | None = None,
        runner: EagerStep | None = None,
        checkpointer: Checkpointer | None = None,
        progress: SequentialProgress | EpochProgress | None = None,
        metrics: LossMetrics | None = None,
        run_log: RunLog | None = None,
        schedule: Schedule | StockSchedule | None = None,
        mesh: Mesh | None = None,
        save_on_signal: bool = True,
        clears_output: bool = False,
        finds_batch_size: bool = False,
        data_collator: Callable | None = None,
        **kwargs: Any,
    ):
        if model is None:
            raise GptlmError("GPTTrainer needs a model; model_init is not supported")
        args = args or TrainingArguments("tmp_trainer")  # as the stock Trainer
        check_arguments(args)
        collator = FilledCollator(data_collator or collate_samples, any_dataset(**kwargs))
        super().__init__(model, args, collator, **kwargs)
        self.has_default_collator = data_collator is None
        use_one_gpu(self.args)
        self.mesh, self.schedule, self.finds_batch_size = mesh, schedule, finds_batch_size
        self.weights = weights or self._default_weights()
        self.grad_sync = grad_sync or (
            DeepSpeedSync() if self.is_deepspeed_enabled else default_grad_sync(self.args.world_size)
        )
        self.runner = runner or EagerStep()
        self.checkpointer = checkpointer or Checkpointer(keep=self.args.save_total_limit)
        self.checkpointer.attach(self.model, self.args, self.processing_class)
        self.progress_argument = self.progress = progress
        self.metrics = metrics or LossMetrics()
        if self.compute_metrics is not None or self.compute_loss_func is not None:
            more = self.compute_metrics, self.preprocess_logits_for_metrics, self.compute_loss_func
            self.metrics, self.preprocess_logits_for_metrics = CallerMetrics(self.metrics, *more), None
        self.compute_metrics = self.metrics.means
        if run_log is None and not logging.getLogger("gptlm").hasHandlers():  # else losses would not be printed
            start_logging(main_process=self.is_world_process_zero())
        self.run_log = run_log or RunLog()
        self.throughput = self.run_log.start_clock(self.args.world_size)
        self.train_loss = TrainLoss(self.args.device, None)
        self.stop = SignalStop(self.args.world_size, self.args.device, saves=save_on_signal)
        self.clears_output = clears_output
        self.is_zero_loss_logged = False
        for callback in (PrinterCallback, ProgressCallback):
            self.remove_callback(callback)
        progress_shown = PlainProgress if self.args.disable_tqdm else ProgressBar
        self.add_callback(progress_shown(weakref.proxy(self)))
        self.add_callback(MemoryParts(weakref.proxy(self)))

    def _default_weights(self) -> Float32Weights:
        has_scaler = self.accelerator.scaler is not None or (self.is_deepspeed_enabled and self.args.fp16)
        scale = LossScale() if has_scaler else None
        if self.is_deepspeed_enabled:
            return DeepSpeedWeights(scale)
        is_half = self.model.dtype in (torch.float16, torch.bfloat16)
        if not is_half or self.optimizer is not None:
            return Float32Weights(scale)
        return MasterWeights(scale or (LossScale() if self.model.dtype == torch.float16 else None))

    # Training ---------------------------------------------------------------------------------------------------

    def _inner_training_loop(
        self,
        batch_size: int | None = None,
        args: TrainingArguments | None = None,
        resume_from_checkpoint: str | None = None,
        trial: Any = None,
        ignore_keys_for_eval: list[str] | None = None,
    ) -> TrainOutput:
        return loop.train(self, resume_from_checkpoint, trial, ignore_keys_for_eval)

    def micro_batch_loss(self, model: Any, inputs: Inputs, num_items: torch.Tensor | None) -> torch.Tensor:
        """The loss of a micro-batch, as its share of the mean over the step's targets.

        `num_items` counts the targets of all processes. The stock `compute_loss` multiplies by the world size, because
        gradients become means over processes.
        """
        with self.compute_loss_context_manager():
            loss: Any = self.compute_loss(model, inputs, num_items_in_batch=num_items)
        is_scaled = self.loss_is_scaled_for_ga  # set by those who override compute_loss
        if is_scaled is None:
            is_scaled = self.compute_loss_func is not None or (self.model_accepts_loss_kwargs and num_items is not None)
        return loss if is_scaled else loss / self.current_gradient_accumulation_steps

    def inputs_on_device(self, inputs: Inputs, unused: tuple[str, ...] | None = None) -> Inputs:
        """A batch on the device. Its targets are there once: a loss function of the user takes `labels`.

        Args:
            unused: keys that are left out; None: what a training step does not need.
        """
        has_own_loss = self.compute_loss_func is not None or self.label_smoother is not None
        if unused is None:
            unused = ("shift_labels",) if has_own_loss else ("labels",) if "shift_labels" in inputs else ()
        is_stock = not has_own_loss and type(self).compute_loss is Trainer.compute_loss
        if is_stock and mask_is_needless(inputs):
            unused = (*unused, "attention_mask")
        if self.has_default_collator:  # else the embedding raises an IndexError, on a GPU an assertion of its kernel
            check_batch(inputs, self.model.config)
        return to_device(inputs, self.args.device, unused)

    def fire(self, event: str) -> None:
        """Call the callbacks of `event`."""
        self.control = getattr(self.callback_handler, event)(self.args, self.state, self.control)

    def create_optimizer(self, model: Any = None) -> torch.optim.Optimizer:
        if self.optimizer is not None or not isinstance(self.weights, MasterWeights):
            return super().create_optimizer(model)
        decayed = set(self.get_decay_parameter_names(self.model))
        named = [(name, p) for name, p in self.model.named_parameters() if p.requires_grad]
        groups = [
            {"params": [p for name, p in named if name in decayed], "weight_decay": self.args.weight_decay},
            {"params": [p for name, p in named if name not in decayed], "weight_decay": 0.0},
        ]
        kind, settings = self.optimizer_cls_and_kwargs or self.get_optimizer_cls_and_kwargs(self.args, self.model)
        self.optimizer = self.weights.make_optimizer(kind, groups, settings)
        return self.optimizer

    def create_scheduler(self, num_training_steps: int, optimizer: torch.optim.Optimizer | None = None) -> LRScheduler:
        if self.lr_scheduler is not None or self.schedule is None:
            return super().create_scheduler(num_training_steps, optimizer)
        schedule, highest = self.schedule, self.schedule.maximum
        factor = lambda done: schedule.rate(done + 1) / highest if highest else 1.0  # noqa: E731
        self.lr_scheduler = LambdaLR(optimizer or self.optimizer, factor)  # type: ignore[arg-type]
        self._created_lr_scheduler = True
        return self.lr_scheduler

    # Where the run is -------------------------------------------------------------------------------------------

    def start_progress(self, manifest: Manifest | None) -> int:
        """Begin at a checkpoint's position, or at the first sample; returns the last step of the run."""
        args, done = self.args, manifest.global_step if manifest else 0
        if self.progress_argument is not None:
            last = args.max_steps
        else:
            dataset: Any = self.train_dataset
            check_dataset(dataset, "train_dataset")
            position, batch = position_of(manifest), self.samples_per_step
            last = args.max_steps
            if last <= 0:
                last = done + steps_left(args.num_train_epochs, position, len(dataset), batch)
            if isinstance(dataset, list | tuple):
                sizes = [Size(1, tokens_of(sample)) for sample in dataset]
            else:  # reading every sample of another dataset could take minutes
                sizes = [Size(1, tokens_of(dataset[0]))] * len(dataset)
            if not isinstance(dataset[0], Mapping):  # blocks are equally long
                self.model.transformer.expect_repeated_shapes()
            steps = max(0, last - done)
            seed = args.seed if args.data_seed is None else args.data_seed
            epochs = Epochs(dataset, sizes=sizes, filler=None, batch=batch, steps=steps, seed=seed, start=position)
            self.progress = EpochProgress(epochs)
        if manifest is not None:
            self.progress.resume(manifest)
        return last

    @property
    def replicas(self) -> int:
        """Copies of the model, each of which reads its own samples."""
        return self.mesh.dims.data if self.mesh else self.args.world_size

    @property
    def replica(self) -> int:
        """The one that this process belongs to."""
        return self.mesh.data_rank if self.mesh else self.args.process_index

    @property
    def samples_per_step(self) -> int:
        """The global batch."""
        return self.args.per_device_train_batch_size * self.args.gradient_accumulation_steps * self.replicas

    @property
    def dropout_seed(self) -> int:
        """Same on ranks of a tensor-parallel group, different elsewhere.

        Dropout of split tensors has its own generator.
        """
        if self.mesh is None:
            return self.args.seed + self.args.process_index
        return self.args.seed + self.mesh.pipeline_rank * self.mesh.dims.data + self.mesh.data_rank

    @property
    def steps_done(self) -> int:
        """Optimizer steps since this start of the run."""
        return self.state.global_step - self.progress.start_step

    @property
    def trained(self) -> Size:
        """Samples and tokens trained since this start of the run."""
        return self.progress.trained(self.steps_done)

    @property
    def consumed(self) -> Size:
        """Samples and tokens trained in the whole run."""
        return self.progress.consumed(self.steps_done)

    @property
    def learning_rate(self) -> float:
        """Of the next update."""
        return self._get_learning_rate()

    @property
    def loss_scale(self) -> LossScale | None:
        return self.weights.loss_scale

    # Data -------------------------------------------------------------------------------------------------------

    def get_train_dataloader(self) -> DataLoader:
        if self.progress is None:
            self.start_progress(None)
        accumulation, progress = self.args.gradient_accumulation_steps, self.progress
        batches = self.state.max_steps * accumulation
        done = progress.start_step * accumulation
        return self.loader(progress.dataset, progress.first_index, self.args.per_device_train_batch_size, batches, done)

    def get_eval_dataloader(self, eval_dataset: Any = None) -> DataLoader:
        dataset: Any = self.eval_dataset if eval_dataset is None else eval_dataset
        if isinstance(dataset, str):
            dataset = self.eval_dataset[dataset]  # type: ignore[index]
        size = self.args.per_device_eval_batch_size
        if not isinstance(dataset, Filled):
            check_dataset(dataset, "eval_dataset")
            dataset = Filled(dataset, None, size * self.replicas)
        self.run_log.evaluated_batches = len(dataset) // (size * self.replicas)
        return self.loader(dataset, 0, size, self.run_log.evaluated_batches)

    def loader(self, dataset: Any, start: int, size: int, batches: int, done: int = 0) -> DataLoader:
        """Consecutive samples from `start` on; a resumed run has read `done` of its `batches`."""
        sampler = ConsecutiveBatches(
            start=start,
            batch_size=size,
            batches=batches,
            done=done,
            replica=self.replica,
            replicas=self.replicas,
        )
        return DataLoader(
            dataset,
            batch_sampler=sampler,
            collate_fn=self.data_collator,
            num_workers=self.args.dataloader_num_workers,
            prefetch_factor=self.args.dataloader_prefetch_factor,
            persistent_workers=self.args.dataloader_persistent_workers,
            multiprocessing_context=self.args.dataloader_multiprocessing_context,
            worker_init_fn=survive_first,
            pin_memory=self.args.dataloader_pin_memory and self.args.device.type == "cuda",
            # its own generator: else the loader draws from the global one and shifts dropout after a resume
            generator=torch.Generator().manual_seed(self.args.seed),
        )

    # Evaluation -------------------------------------------------------------------------------------------------

    def prediction_step(
        self, model: Any, inputs: Inputs, prediction_loss_only: bool, ignore_keys: list[str] | None = None
    ) -> tuple[Any, Any, Any]:
        self.stop.end_evaluation()
        if "shift_labels" not in inputs:  # the collator is the caller's
            inputs = {**inputs, "shift_labels": shifted(inputs["labels"])}
        inputs = self.inputs_on_device(inputs, unused=() if isinstance(self.metrics, CallerMetrics) else ("labels",))
        if isinstance(self.runner, PipelineStep):
            return None, *self.runner.summed_loss(self.model, inputs)
        with self.compute_loss_context_manager():
            return None, *self.metrics.batch_sums(model, inputs)

    def evaluation_loop(
        self,
        dataloader: DataLoader,
        description: str,
        prediction_loss_only: bool | None = None,
        ignore_keys: list[str] | None = None,
        metric_key_prefix: str = "eval",
    ) -> EvalLoopOutput:
        output = super().evaluation_loop(dataloader, description, prediction_loss_only, ignore_keys, metric_key_prefix)
        found = output.metrics or {}
        more = self.metrics.after_loop(self, found, metric_key_prefix)
        samples = getattr(dataloader.dataset, "examples", output.num_samples)
        return output._replace(metrics=found | more, num_samples=samples)

    # Logs and checkpoints ---------------------------------------------------------------------------------------

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        """Note `logs` in the history, hand them to the callbacks, and print them in the chosen format."""
        grad_norm = logs.pop("grad_norm", None)
        shown = self.run_log.fields(self, logs) | self.metrics.log_fields(logs)
        noted = shown if grad_norm is None else {**shown, "grad_norm": grad_norm}
        if "loss" in logs:
            noted = noted | self.run_log.unprinted(self, shown)
        self.state.log_history.append({**noted, "step": self.state.global_step})
        self.control = self.callback_handler.on_log(self.args, self.state, self.control, noted)
        self.run_log.print(self, shown, logs.get("loss"), grad_norm)

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        self.checkpointer.save_model(Path(output_dir or self.args.output_dir or ""))

    def save_checkpoint(self) -> None:
        """Write checkpoint-N of the current step."""
        self.store_flos()
        fields = {
            **self.progress.manifest(self.steps_done),
            "loss_sum": self.train_loss.run_sum,
            "steps_without_loss": self.train_loss.steps_without_loss,
            "evaluation_is_due": self.stop.evaluation_is_due,
            "global_batch_size": self.samples_per_step,
        }
        self.checkpointer.save(self.state, self.optimizer, self.lr_scheduler, self.loss_scale, fields)

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: Any = None) -> None:
        """Nothing: the loop restores weights with the optimizer state, which exists only then."""


def check_arguments(args: TrainingArguments) -> None:
    """Raises GptlmError for a value that would be ignored."""
    for name, accepted in ACCEPTED.items():
        value = attrgetter(name)(args)
        if value not in accepted:
            raise GptlmError(
                f"TrainingArguments: {name}={value!r} is not supported by GPTTrainer; leave it at {accepted[0]!r}"
            )
