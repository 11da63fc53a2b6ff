"""Reads what runs recorded: `run_log.jsonl` of this version, else the files that every run of transformers leaves."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from gptlm.checkpoint import folder as checkpoint
from gptlm.errors import GptlmError, reason_of
from gptlm.json_text import parse_json
from gptlm.owned import RUN_FILE, RUN_LOG

RESULTS = "all_results.json"
STEP_OF = "-step-"  # predictions/eval-step-100.jsonl

Row = dict[str, Any]
Floats = NDArray[np.float64]


@dataclass
class Recorded:
    """What is known of a run.

    Attributes:
        name: what tells it from the other runs of a page.
        facts: of its last start: processes, device, versions, max_steps.
        configuration: argument -> its value and where that came from.
        data: rows of the data table.
        logs: log lines with their "step", in order; those that a resumed run has made again are dropped.
        starts, checkpoints: steps.
        ended: the step that the last start ended with; None: it has not ended, or was killed.
        times: seconds since 1970 of the first and the last event; None where they are not recorded.
        results: of all_results.json.
        answers: step -> rows with prompt, prediction and reference.
    """

    folder: Path
    name: str
    facts: Row = field(default_factory=dict)
    configuration: dict[str, tuple[Any, str]] = field(default_factory=dict)
    data: list[Row] = field(default_factory=list)
    logs: list[Row] = field(default_factory=list)
    starts: list[int] = field(default_factory=list)
    checkpoints: list[int] = field(default_factory=list)
    ended: int | None = None
    times: tuple[float, float] | None = None
    results: Row = field(default_factory=dict)
    answers: dict[int, list[Row]] = field(default_factory=dict)

    @cached_property
    def columns(self) -> dict[str, tuple[Floats, Floats]]:
        """Log field -> the steps where it is a finite number, and these numbers."""
        found: dict[str, tuple[list[float], list[float]]] = {}
        for line in self.logs:
            for name, value in line.items():
                if _is_number(value):
                    steps, values = found.setdefault(name, ([], []))
                    steps.append(line["step"])
                    values.append(value)
        return {name: (np.array(steps, float), np.array(values, float)) for name, (steps, values) in found.items()}

    def tokens_at(self, steps: Floats) -> Floats:
        """Tokens trained up to `steps`, between two log lines by proportion; NaN where no line has them."""
        if "consumed_tokens" not in self.columns:
            return np.full(len(steps), np.nan)
        known, tokens = self.columns["consumed_tokens"]
        if not any(self.starts):  # else an earlier version may have trained the first steps
            known, tokens = np.insert(known, 0, 0.0), np.insert(tokens, 0, 0.0)
        return np.interp(steps, known, tokens)

    def last(self, name: str) -> float | None:
        """The newest value of a log field."""
        return float(self.columns[name][1][-1]) if name in self.columns else None

    @property
    def last_step(self) -> int:
        return max([line["step"] for line in self.logs] + [*self.starts, *self.checkpoints, self.ended or 0], default=0)


def find_runs(folders: Sequence[Path]) -> list[Recorded]:
    """The runs in `folders`, each of which is a run, or has runs directly in it.

    Raises:
        GptlmError: if there is no such folder, no run in it, or a file of a run cannot be read.
    """
    found: dict[Path, None] = {}
    for folder in folders:
        if not folder.is_dir():
            what = "is a file, not the folder of a run" if folder.exists() else "does not exist"
            raise GptlmError(f"{folder} {what}; give the --output_dir of a training")
        inside = [folder] if _is_run(folder) else sorted(p for p in folder.iterdir() if p.is_dir() and _is_run(p))
        if not inside:
            raise GptlmError(
                f"{folder} holds no run: neither {RUN_LOG} nor {checkpoint.HISTORY} is in it, in its folders, or in a "
                "checkpoint; give the --output_dir of a training"
            )
        found |= dict.fromkeys(inside)
    return [read_run(path, name) for path, name in zip(found, _names(list(found)), strict=True)]


def _is_run(folder: Path) -> bool:
    return (folder / RUN_LOG).is_file() or _history(folder) is not None


def _history(folder: Path) -> Path | None:
    """The trainer_state.json of a run without a record: of its end, or of its newest checkpoint."""
    places = [folder, *reversed(checkpoint.folders(folder))]
    return next((place / checkpoint.HISTORY for place in places if (place / checkpoint.HISTORY).is_file()), None)


def _names(folders: list[Path]) -> list[str]:
    """The shortest ends of the paths that differ."""
    paths = [folder.resolve().parts for folder in folders]
    for length in range(1, max(map(len, paths), default=1) + 1):
        names = ["/".join(parts[-length:]) for parts in paths]
        if len({*names}) == len(names):
            break
    return names


def read_run(folder: Path, name: str) -> Recorded:
    """Raises GptlmError if a file cannot be read."""
    run = Recorded(folder, name)
    try:
        if (folder / RUN_LOG).is_file():
            _take_record(run)
        elif (history := _history(folder)) is not None:
            _take_history(run, history)
        if (folder / RESULTS).is_file():
            run.results = _object(folder / RESULTS)
        for path in sorted(folder.glob("predictions/*.jsonl")):
            _take_answers(run, path)
    except (OSError, UnicodeDecodeError) as error:
        place = getattr(error, "filename", None) or folder
        raise GptlmError(f"cannot read {place}: {reason_of(error)}") from error
    return run


def _take_record(run: Recorded) -> None:
    path = run.folder / RUN_LOG
    events = [event for event in _lines(path) if isinstance(event.get("event"), str) and _is_step(event.get("step"))]
    if not events:
        raise GptlmError(f"{path} holds no event of a run: it is damaged; remove it to see what checkpoints hold")
    for event in events:
        kind, step = event.pop("event"), event["step"]
        if kind == "start":
            run.logs = [line for line in run.logs if line["step"] <= step]
            run.checkpoints = [saved for saved in run.checkpoints if saved <= step]
            run.starts = [*(start for start in run.starts if start <= step), step] if step else [0]
            _take_start(run, event)
        elif kind == "log":
            run.logs.append(event)
        elif kind == "checkpoint":
            run.checkpoints.append(step)
        elif kind == "end":
            run.ended = step
    moments = [event["time"] for event in events if _is_number(event.get("time"))]
    run.times = (moments[0], moments[-1]) if moments else None


def _take_start(run: Recorded, event: Row) -> None:
    run.ended = None
    values, origins, data = (event.get(key) for key in ("configuration", "from", "data"))
    if isinstance(values, dict):
        texts = origins if isinstance(origins, dict) else {}
        run.configuration = {name: (value, str(texts.get(name, ""))) for name, value in values.items()}
    run.data = [row for row in data if isinstance(row, dict)] if isinstance(data, list) else []
    run.facts = {key: event.get(key) for key in ("task", "max_steps", "processes", "device", "versions")}


def _take_history(run: Recorded, history: Path) -> None:
    """What transformers' Trainer leaves: log lines, the last step, and the names of checkpoints."""
    state = _object(history)
    lines = state.get("log_history")
    if not isinstance(lines, list):
        raise GptlmError(f"{history} has no log_history; it is not of a Trainer")
    run.logs = [line for line in lines if isinstance(line, dict) and _is_step(line.get("step"))]
    run.checkpoints = [checkpoint.step_of(path) for path in checkpoint.folders(run.folder)]
    run.facts = {"max_steps": state.get("max_steps")}
    run.ended = state["global_step"] if history.parent == run.folder and _is_step(state.get("global_step")) else None
    place = next((f for f in (run.folder, history.parent) if (f / RUN_FILE).is_file()), None)
    if place is not None:
        run.configuration = {name: (value, RUN_FILE) for name, value in _object(place / RUN_FILE).items()}


def _take_answers(run: Recorded, path: Path) -> None:
    _, _, step = path.stem.rpartition(STEP_OF)
    if path.stem.startswith("eval") and step.isdecimal() and int(step) <= run.last_step:
        rows = [row for row in _lines(path) if isinstance(row.get("prediction"), str)]
        if rows:
            run.answers[int(step)] = rows


def _object(path: Path) -> Row:
    try:
        content = parse_json(path.read_bytes())
    except ValueError as error:
        raise GptlmError(f"{path} is damaged ({reason_of(error)}); remove it, or restore it from a copy") from error
    if not isinstance(content, dict):
        raise GptlmError(f"{path} holds no JSON object; it is not of a run")
    return content


def _lines(path: Path) -> Iterator[Row]:
    """The objects in a file of JSON lines. Others are left out: a line is cut where a process was killed."""
    with open(path, encoding="utf-8", errors="replace") as file:
        for line in file:
            try:
                content = parse_json(line) if line.strip() else None
            except ValueError:
                continue
            if isinstance(content, dict):
                yield content


def _is_step(value: Any) -> bool:
    return type(value) is int and 0 <= value < 2**53


def _is_number(value: Any) -> bool:
    """Whether it can be drawn; integers may be larger than any float."""
    return isinstance(value, (int, float)) and not isinstance(value, bool) and abs(value) < 1e300
