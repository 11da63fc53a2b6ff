"""The trackers of --report_to: transformers' integrations with the parameters of the resolved run, and VisualDL."""

import json
import logging
import os
import time
from contextlib import nullcontext, suppress
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from socket import gethostname
from typing import Any

from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments
from transformers.integrations import (
    MLflowCallback,
    SwanLabCallback,
    TensorBoardCallback,
    TrackioCallback,
    WandbCallback,
    rewrite_logs,
)

from gptlm import owned
from gptlm.config.origin import Origin
from gptlm.config.run import Run
from gptlm.config.validate_options import TRACKER_PACKAGES
from gptlm.errors import GptlmError, UsageError, reason_of

logger = logging.getLogger(__name__)


class _RunParameters:
    """transformers' arguments. Trackers read these from the resolved run: schedule, data, adapters, parallel layout."""

    def __init__(self, arguments: TrainingArguments, parameters: dict[str, Any], **own: Any):
        self._arguments, self._parameters, self._own = arguments, parameters, own

    def __getattr__(self, name: str) -> Any:
        return self._own[name] if name in self._own else getattr(self._arguments, name)

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


class RunSwanLab(SwanLabCallback):
    """SwanLab with the parameters of the resolved run."""

    def __init__(self, parameters: dict[str, Any]):
        super().__init__()
        self.parameters = parameters

    def setup(self, args: TrainingArguments, state: TrainerState, model: Any, **kwargs: Any) -> None:
        if state.is_world_process_zero:
            self._begin(args)
        super().setup(_RunParameters(args, self.parameters), state, model, **kwargs)  # type: ignore[arg-type]

    def _begin(self, args: TrainingArguments) -> None:
        """Start a run unless there is one: SwanLab 0.8 raises where transformers 5.24 expects None for no run."""
        swanlab = import_module("swanlab")
        try:
            swanlab.get_run()
        except RuntimeError:
            given = {name: os.environ.get(f"SWANLAB_{name.upper()}") for name in ("project", "resume")}
            given |= {"experiment_name": args.run_name, "id": os.environ.get("SWANLAB_RUN_ID")}
            swanlab.init(**{name: value for name, value in given.items() if value is not None})


class RunMLflow(MLflowCallback):
    """MLflow with the parameters of the resolved run. Evaluations after training are logged into the same run."""

    def __init__(self, parameters: dict[str, Any]):
        super().__init__()
        self.parameters, self.run_id, self.ended = parameters, None, False

    def setup(self, args: TrainingArguments, state: TrainerState, model: Any) -> None:
        super().setup(_RunParameters(args, self.parameters), state, model)  # type: ignore[arg-type]
        if state.is_world_process_zero:
            self.run_id = import_module("mlflow").active_run().info.run_id

    def on_log(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        logs: Any = None,
        model: Any = None,
        **kwargs: Any,
    ) -> None:
        again = self.ended and state.is_world_process_zero  # else MLflow would begin another run
        with import_module("mlflow").start_run(run_id=self.run_id) if again else nullcontext():
            super().on_log(args, state, control, logs, model=model, **kwargs)

    def on_train_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        super().on_train_end(args, state, control, **kwargs)
        self.ended = state.is_world_process_zero and import_module("mlflow").active_run() is None


class RunTrackio(TrackioCallback):
    """Trackio with the parameters of the resolved run. Evaluations after training are logged into the same run."""

    def __init__(self, parameters: dict[str, Any]):
        super().__init__()
        self.parameters, self.name, self.ended = parameters, None, False

    def setup(self, args: TrainingArguments, state: TrainerState, model: Any, **kwargs: Any) -> None:
        own: dict[str, Any] = {"run_name": self.name} if self.name else {}  # else Trackio would begin another run
        super().setup(_RunParameters(args, self.parameters, **own), state, model, **kwargs)  # type: ignore[arg-type]
        if state.is_world_process_zero:
            self.name = import_module("trackio").context_vars.current_run.get().name

    def on_log(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        model: Any = None,
        logs: Any = None,
        **kwargs: Any,
    ) -> None:
        super().on_log(args, state, control, model=model, logs=logs, **kwargs)
        if self.ended and state.is_world_process_zero:
            import_module("trackio").finish()
            self._initialized = False

    def on_train_end(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        model: Any = None,
        processing_class: Any = None,
        **kwargs: Any,
    ) -> None:
        super().on_train_end(args, state, control, model, processing_class, **kwargs)
        self.ended = True


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


CALLBACKS: dict[str, type[Any]] = {
    "wandb": RunWandb,
    "mlflow": RunMLflow,
    "swanlab": RunSwanLab,
    "trackio": RunTrackio,
}


def check_trackers(run: Run) -> None:
    """Raises UsageError if a tracker of `--report_to` is not installed; VisualDL and TensorBoard can stand in."""
    for name in () if "none" in run.training.report_to else run.training.report_to:
        package = TRACKER_PACKAGES.get(name)
        if package and find_spec(package) is None:
            raise UsageError(f"--report_to {name}: {package} is not installed; pip install {package}")


def tracker_callbacks(run: Run, output_dir: Path) -> list[TrainerCallback]:
    """One callback per tracker in `--report_to`; VisualDL that is not installed is replaced, with a log line."""
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
    return [*callbacks, *(CALLBACKS[one](run.as_parameters()) for one in CALLBACKS if one in wanted)]


def _visualdl_writer(folder: str) -> Any:
    """Raises GptlmError if visualdl is not there, or does not work with the packages that are."""
    if find_spec("visualdl") is None:
        raise GptlmError("visualdl is not installed (pip install 'gptlm[visualdl]')")
    try:
        from visualdl import LogWriter
    except Exception as error:  # its imports fail in several ways beside other versions of Flask-Babel and protobuf
        raise GptlmError(f"visualdl cannot be imported ({reason_of(error)})") from error
    return LogWriter(logdir=folder)
