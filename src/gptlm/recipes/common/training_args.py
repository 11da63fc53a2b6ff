"""The run in the words of transformers.TrainingArguments, and the trackers its events go to."""

import json
import logging
import sys
import time
from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path
from socket import gethostname
from typing import Any

from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments
from transformers.integrations import TensorBoardCallback, WandbCallback, rewrite_logs

from gptlm import owned
from gptlm.config.origin import Origin
from gptlm.config.run import Run
from gptlm.errors import GptlmError, reason_of
from gptlm.quiet import quiet_transformers
from gptlm.ranks import world_size
from gptlm.recipes.common.device import Device
from gptlm.recipes.common.main_process_first import init_gloo
from gptlm.upstream.torch import set_group_timeout
from gptlm.upstream.transformers import use_one_gpu

logger = logging.getLogger(__name__)


def hf_arguments(run: Run, device: Device, deepspeed: dict[str, Any] | None = None) -> TrainingArguments:
    """Starts the process group when a launcher started several processes. `deepspeed` shards with that configuration.

    Precision: HuggingFace's flags mean autocast without DeepSpeed and half weights with it; the other two cases are
    DeepSpeed's torch_autocast and our master weights, with the flags off.
    """
    flags = device.half_weights == (deepspeed is not None)
    quiet_transformers()
    training = run.training
    if world_size() > 1:
        set_group_timeout(training.ddp_timeout)  # else groups of some of the processes have torch's own
    if device.type == "cpu":
        init_gloo(training.ddp_timeout)  # transformers passes no time limit to gloo
    arguments = TrainingArguments(
        output_dir=training.output_dir,
        per_device_train_batch_size=run.step_batch,
        per_device_eval_batch_size=training.per_device_eval_batch_size,
        gradient_accumulation_steps=run.step_accumulation,
        max_steps=training.max_steps,
        learning_rate=training.learning_rate,
        weight_decay=training.weight_decay,
        adam_beta1=training.adam_beta1,
        adam_beta2=training.adam_beta2,
        adam_epsilon=training.adam_epsilon,
        max_grad_norm=training.max_grad_norm,
        optim="adamw_torch" if training.optim == "adamw_torch" else "adamw_torch_fused",
        seed=training.seed,
        use_cpu=device.type == "cpu",
        fp16=flags and device.precision == "fp16",
        bf16=flags and device.precision == "bf16",
        deepspeed=deepspeed,
        eval_strategy=training.evaluation_strategy or "no",
        eval_steps=training.eval_steps,
        eval_on_start=training.eval_on_start and training.do_eval,
        save_strategy=training.save_strategy,
        save_steps=training.save_steps,
        save_only_model=training.ignore_save_lr_and_optim,
        load_best_model_at_end=training.load_best_model_at_end,
        metric_for_best_model=training.metric_for_best_model,
        greater_is_better=bool(training.greater_is_better) if training.metric_for_best_model else None,
        logging_steps=training.logging_steps,
        logging_first_step=training.logging_first_step,
        logging_nan_inf_filter=False,  # it hides NaN and waits for the device at every micro-batch
        run_name=training.run_name,
        report_to=[],
        disable_tqdm=training.disable_tqdm or not sys.stderr.isatty(),
        dataloader_num_workers=training.dataloader_num_workers,
        ignore_data_skip=True,  # the sampler starts at the consumed sample
        ddp_find_unused_parameters=False,
        ddp_timeout=training.ddp_timeout,
        log_level="error",
        log_level_replica="error",
    )
    arguments.device  # noqa: B018 - starts the process group and counts the GPUs
    use_one_gpu(arguments)
    return arguments


class _RunParameters:
    """transformers' arguments. Trackers read these from the resolved run: schedule, data, adapters, parallel layout."""

    def __init__(self, arguments: TrainingArguments, parameters: dict[str, Any]):
        self._arguments, self._parameters = arguments, parameters

    def __getattr__(self, name: str) -> Any:
        return getattr(self._arguments, name)

    def to_dict(self) -> dict[str, Any]:
        return dict(self._parameters)

    def to_json_string(self) -> str:
        return json.dumps(self._parameters, indent=2, ensure_ascii=False)


class RunTensorBoard(TensorBoardCallback):
    """TensorBoard's events with the parameters of the resolved run."""

    def __init__(self, folder: str, parameters: dict[str, Any]):
        super().__init__()
        self.logging_dir, self.parameters = folder, parameters

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        super().on_train_begin(_RunParameters(args, self.parameters), state, control, **kwargs)  # type: ignore[arg-type]


class RunWandb(WandbCallback):
    """Weights & Biases with the parameters of the resolved run."""

    def __init__(self, parameters: dict[str, Any]):
        super().__init__()
        self.parameters = parameters

    def setup(self, args: TrainingArguments, state: TrainerState, model: Any, **kwargs: Any) -> None:
        super().setup(_RunParameters(args, self.parameters), state, model, **kwargs)  # type: ignore[arg-type]


class VisualDLCallback(TrainerCallback):
    """Scalars of every log line, and the parameters of the resolved run, into VisualDL's event files."""

    def __init__(self, writer: Any, parameters: dict[str, Any]):
        self.writer, self.parameters = writer, parameters

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        if state.is_world_process_zero:
            self.writer.add_text("args", json.dumps(self.parameters, indent=2, ensure_ascii=False), 0)

    def on_log(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, logs: Any = None, **kwargs: Any
    ) -> None:
        if state.is_world_process_zero:
            for name, value in rewrite_logs(logs or {}).items():
                if isinstance(value, (int, float)):
                    self.writer.add_scalar(tag=name, value=value, step=state.global_step)

    def on_train_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        self.writer.flush()  # closed, it would start another file for the evaluations to come

    def on_evaluate(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        self.writer.flush()


class NoteEvents(TrainerCallback):
    """Notes the folder of this run's events as gptlm's when training begins, after what earlier runs wrote is gone."""

    def __init__(self, output_dir: Path, name: str):
        self.output_dir, self.name = output_dir, name

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        if state.is_world_process_zero:
            with suppress(OSError):  # a full disk ends no training here: the events are only not listed then
                self.output_dir.mkdir(parents=True, exist_ok=True)
                owned.note(self.output_dir, [f"{self.name}/"], owned.RUN)


def tracker_callbacks(run: Run, output_dir: Path) -> list[TrainerCallback]:
    """One callback per tracker in `--report_to`. One that is not installed is replaced or omitted, with a warning."""
    wanted = set(run.training.report_to)
    if "none" in wanted:
        return []
    if "all" in wanted:
        wanted |= {"tensorboard", "visualdl"}
    stamp = time.strftime("%b%d_%H-%M-%S")
    name = f"runs/{stamp}_{gethostname()}"
    folder = run.training.logging_dir or str(output_dir / name)
    callbacks: list[TrainerCallback] = [] if run.training.logging_dir else [NoteEvents(output_dir, name)]
    if "visualdl" in wanted and run.sources["report_to"].origin is not Origin.DEFAULT:
        try:
            callbacks.append(VisualDLCallback(_visualdl_writer(folder), run.as_parameters()))
        except GptlmError as error:
            logger.info("%s: events go to TensorBoard files in %s", error, folder)
            wanted.add("tensorboard")
    elif "visualdl" in wanted:
        wanted.add("tensorboard")
    if "tensorboard" in wanted:
        callbacks.append(RunTensorBoard(folder, run.as_parameters()))
    if "wandb" in wanted:
        try:
            callbacks.append(RunWandb(run.as_parameters()))
        except RuntimeError as error:
            raise GptlmError("--report_to wandb: wandb is not installed; pip install wandb") from error
    return callbacks


def _visualdl_writer(folder: str) -> Any:
    """Raises GptlmError if visualdl is not there, or does not work with the packages that are."""
    if find_spec("visualdl") is None:
        raise GptlmError("visualdl is not installed (pip install 'gptlm[visualdl]')")
    try:
        from visualdl import LogWriter
    except Exception as error:  # its imports fail in several ways beside other versions of Flask-Babel and protobuf
        raise GptlmError(f"visualdl cannot be imported ({reason_of(error)})") from error
    return LogWriter(logdir=folder)
