"""What a run records for its report, a line of JSON each, as soon as it happens:

    {"event": "start", "step": 0, "max_steps": 500, "configuration": {...}, "from": {...}, "data": [...], ...}
    {"event": "log", "step": 10, "loss": 9.1, "learning_rate": 0.0003, ...}
    {"event": "checkpoint", "step": 100}
    {"event": "end", "step": 500}

`step` of a start is the one that the run resumes after. trainer_state.json holds the log lines too, but only those up
to the last checkpoint, and neither starts nor checkpoints.
"""

import json
import logging
import time
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from gptlm import __version__, owned
from gptlm.config.run import Run
from gptlm.errors import reason_of
from gptlm.json_text import parse_json
from gptlm.recipes.report.reading import Row

logger = logging.getLogger(__name__)


class Recorder(TrainerCallback):
    """Appends the events of a run to its record. Without space for them training continues, with a warning.

    Args:
        data: the rows of the data table: column -> value.
    """

    def __init__(self, run: Run, data: list[Row]):
        self.run, self.data = run, data
        self.folder = Path(run.training.output_dir or "")
        self.is_writing = False

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        self.is_writing = state.is_world_process_zero
        if not self.is_writing:
            return
        resolved = parse_json(self.run.as_json())
        on_gpu = args.device.type == "cuda"
        facts = {
            "task": self.run.task,
            "max_steps": state.max_steps,
            "processes": self.run.dims.world,
            "device": torch.cuda.get_device_name(args.device) if on_gpu else "CPU",
            "versions": {"gptlm": __version__, **{name: version(name) for name in ("torch", "transformers")}},
            "configuration": resolved["run"],
            "from": resolved["from"],
            "data": self.data,
        }
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            owned.note(self.folder, [owned.RUN_LOG], owned.RUN)
        except OSError as error:
            self._stop(error)
        self._append("start", state, facts)

    def on_log(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, logs: Any = None, **kwargs: Any
    ) -> None:
        self._append("log", state, {key: value for key, value in (logs or {}).items() if key != "step"})

    def on_save(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        self._append("checkpoint", state, {})

    def on_train_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        self._append("end", state, {})

    def _append(self, event: str, state: TrainerState, fields: dict[str, Any]) -> None:
        if not self.is_writing:
            return
        line = {"event": event, "step": state.global_step, "time": round(time.time(), 3), **fields}
        try:
            with open(self.folder / owned.RUN_LOG, "a", encoding="utf-8") as file:
                file.write(("\n" if event == "start" else "") + json.dumps(line, default=str) + "\n")
        except OSError as error:
            self._stop(error)

    def _stop(self, error: OSError) -> None:
        self.is_writing = False
        logger.warning(
            "cannot write %s: %s; its report will be incomplete", self.folder / owned.RUN_LOG, reason_of(error)
        )
