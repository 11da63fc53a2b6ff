"""Result files of a run: `NAME_results.json`, and `all_results.json` with everything so far."""

import json
import logging
import os
from collections.abc import Mapping, Sequence
from pathlib import Path

from gptlm.training.log_formats import perplexity

logger = logging.getLogger(__name__)


def write_results(folder: Path, name: str, metrics: Mapping[str, float]) -> None:
    """Write `metrics` of one stage ("train", "eval", "test") and merge them into `all_results.json`."""
    everything = folder / "all_results.json"
    for path, content in ((folder / f"{name}_results.json", metrics), (everything, {**_read(everything), **metrics})):
        temporary = path.with_name(path.name + ".incomplete")
        temporary.write_text(json.dumps(content, indent=4, sort_keys=True) + "\n", encoding="utf-8")
        os.replace(temporary, path)


WINDOW = 100  # log lines that the speed is a mean of


def summary_table(
    name: str, history: Sequence[Mapping[str, float]], *, parameters: int, seq_length: int, steps: int
) -> list[str]:
    """The table at the end of the 8-card recipes, and what its numbers are.

    Args:
        history: the noted log lines: `eval_loss` of each evaluation, `interval_samples_per_second` of each step.
        parameters: of the model.
    """
    losses = [entry["eval_loss"] for entry in history if "eval_loss" in entry]
    speeds = [s for entry in history if (s := entry.get("interval_samples_per_second")) is not None][-WINDOW:]
    speed = sum(speeds) / len(speeds) if speeds else float("nan")
    row = {
        "NAME": name,
        "params": f"{parameters / 1e6:.1f}M",
        "final PPL": f"{perplexity(losses[-1]):.3f}" if losses else "-",
        "best PPL": f"{perplexity(min(losses)):.3f}" if losses else "-",
        "samples/s": f"{speed:.2f}",
        "tokens/s": f"{speed * seq_length:.0f}",
        "seq_len": str(seq_length),
        "Steps": str(steps),
    }
    return [
        "| " + " | ".join(row) + " |",
        "| " + " | ".join("-" * len(title) for title in row) + " |",
        "| " + " | ".join(row.values()) + " |",
        f"PPL is exp(loss) on the same validation windows every time ({len(losses)} evaluations); published tables of "
        "these recipes give the minimum over windows that moved, which is lower",
        f"speeds are means over the last {len(speeds)} log lines of all processes, without evaluation and saving",
    ]


def remove_results(folder: Path) -> None:
    """Remove the result files of an earlier run."""
    for path in (*folder.glob("*_results.json"), folder / "trainer_state.json"):
        path.unlink(missing_ok=True)


def _read(path: Path) -> dict[str, float]:
    try:
        return dict(json.loads(path.read_text(encoding="utf-8")))
    except FileNotFoundError:
        return {}
    except (ValueError, TypeError) as error:
        logger.warning("%s was damaged (%s) and is written anew", path, error)
        return {}
