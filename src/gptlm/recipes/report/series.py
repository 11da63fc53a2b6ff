"""The charts of a report as data: which log fields they show, in which unit, and which of their points are drawn."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from gptlm.recipes.report.reading import Floats, Recorded

COLOURS = ("#2f7ed8", "#e8710a", "#18a058", "#d6336c", "#8b5cf6", "#b58900", "#0ea5b7", "#7c6f64")
DASHES = ("solid", "dashed", "dotted", "dotdash", "dashdot")
DOTTED = 40  # a curve with fewer points has a dot at each
MOST_MARKS = 200  # of a kind
KINDS = {"resume": "resumes", "checkpoint": "checkpoints", "skipped": "skipped steps"}
SPEED = "interval_tokens_per_second_per_device"


@dataclass(frozen=True)
class Panel:
    """A chart of curves with one unit.

    Attributes:
        fields: log field -> its label.
        scale: what values are multiplied with to have the unit.
        digits: format of values below the chart, such as 0.00 for two decimals.
    """

    title: str
    unit: str
    fields: dict[str, str]
    scale: float = 1.0
    digits: str = "0.0000"


SCORES = {"bleu4": "BLEU-4", "rouge1": "ROUGE-1", "rouge2": "ROUGE-2", "rougel": "ROUGE-L", "accuracy": "accuracy"}
MEMORY_GPU = {
    "max_memory_reserved": "reserved (peak)",
    "max_memory_allocated": "allocated (peak)",
    "current_memory_allocated": "allocated",
}
MEMORY_CPU = {"cpu_mem_used_peak": "peak", "cpu_mem_used": "in use"}
PANELS = (
    Panel("Loss", "loss", {"loss": "train", "eval_loss": "evaluation", "test_loss": "test"}),
    Panel("Scores of evaluations", "score", {f"eval_{name}": label for name, label in SCORES.items()}),
    Panel("Learning rate", "learning rate", {"learning_rate": "learning rate"}, digits="0.000e+0"),
    Panel("Gradient norm", "norm", {"grad_norm": "gradient norm"}),
    Panel("Speed", "tokens/s", {SPEED: "tokens/s"}, digits="0,0"),
    Panel("GPU memory", "GiB", MEMORY_GPU, digits="0.00"),
    Panel("Memory of the main process", "GiB", MEMORY_CPU, scale=1 / 1024, digits="0.00"),  # recorded in MiB
    Panel("MFU", "% of the peak", {"mfu": "MFU"}, scale=100.0, digits="0.0"),
    Panel("Loss scale", "factor", {"loss_scale": "loss scale"}, digits="0,0"),
)


def panels_of(runs: Sequence[Recorded], buckets: int) -> list[dict[str, Any]]:
    """The charts that `runs` have values for, as chart.js draws them; at most 2 `buckets` points in a curve."""
    found = []
    for panel in PANELS:
        present = [run for run in runs if panel.fields.keys() & run.columns.keys()]
        curves = [c for run in present for c in _curves(run, panel, runs.index(run), len(present) > 1, buckets)]
        if curves:
            found.append({"title": panel.title, "unit": panel.unit, "digits": panel.digits, "curves": curves})
    return found


def _curves(run: Recorded, panel: Panel, place: int, several: bool, buckets: int) -> Iterator[dict[str, Any]]:
    """Of `several` runs each has a colour and each of its curves a dash; of one run each curve has a colour."""
    present = [field for field in panel.fields if field in run.columns]
    for number, field in enumerate(present):
        steps, values = run.columns[field]
        if field == SPEED:
            values = values * processes(run)
        kept = spikes_kept(values, buckets)
        steps, values, label = steps[kept], values[kept] * panel.scale, panel.fields[field]
        yield {
            "name": f"{run.name}: {label}" if several else label,
            "colour": COLOURS[(place if several else number) % len(COLOURS)],
            "dash": DASHES[number % len(DASHES)] if several else "solid",
            "dots": field.startswith(("eval_", "test_")) or len(values) < DOTTED,
            "step": steps.astype(np.int64).tolist(),
            "tokens": _plain(run.tokens_at(steps), 9),
            "y": _plain(values, 6),
        }


def processes(run: Recorded) -> int:
    """Of the run's last start; 1 where it is not recorded."""
    found = run.facts.get("processes")
    return found if isinstance(found, int) and found > 0 else 1


def _plain(values: Floats, digits: int) -> list[float | None]:
    return [float(f"{value:.{digits}g}") if np.isfinite(value) else None for value in values.tolist()]


def spikes_kept(values: Floats, buckets: int) -> NDArray[np.int64]:
    """Indices, in order, of the first and last of `values`, and of the smallest and largest in each of the buckets.

    The buckets are equal parts of `values`. All are kept if they are no more than 2 `buckets`.
    """
    count = len(values)
    if count <= 2 * buckets:
        return np.arange(count)
    edges = np.linspace(0, count, buckets + 1).astype(np.int64).tolist()
    kept = {0, count - 1}
    for first, last in pairwise(edges):
        part = values[first:last]
        kept |= {first + int(part.argmin()), first + int(part.argmax())}
    return np.array(sorted(kept), dtype=np.int64)


def marks_of(run: Recorded) -> list[dict[str, Any]]:
    """Steps of resumes, checkpoints and skipped steps, of each kind that happened."""
    resumed = {step: f"resumed after step {step:,}" for step in run.starts if step}
    saved = {step: f"checkpoint of step {step:,}" for step in sorted({*run.checkpoints})}
    skipped = {
        int(step): f"{int(count):,} skipped up to step {int(step):,} (overflow)"
        for step, count in zip(*run.columns.get("skipped_steps", ((), ())), strict=True)
        if count
    }
    found = []
    for kind, texts in zip(KINDS, (resumed, saved, skipped), strict=True):
        steps = thinned([*texts])
        if steps:
            tokens = _plain(run.tokens_at(np.array(steps, dtype=np.float64)), 9)
            shown = [f"{run.name}: {texts[step]}" for step in steps]
            found.append({"kind": kind, "step": steps, "tokens": tokens, "text": shown})
    return found


def thinned(steps: list[int]) -> list[int]:
    """At most MOST_MARKS of `steps`: the first, the last, and some between."""
    places = np.unique(np.linspace(0, len(steps) - 1, min(len(steps), MOST_MARKS)).astype(np.int64))
    return [steps[place] for place in places.tolist()]
