"""Result files of a run: `NAME_results.json`, and `all_results.json` with everything so far."""

import json
import logging
import os
from collections.abc import Mapping
from pathlib import Path

logger = logging.getLogger(__name__)


def write_results(folder: Path, name: str, metrics: Mapping[str, float]) -> None:
    """Write `metrics` of one stage ("train", "eval", "test") and merge them into `all_results.json`."""
    everything = folder / "all_results.json"
    for path, content in ((folder / f"{name}_results.json", metrics), (everything, {**_read(everything), **metrics})):
        temporary = path.with_name(path.name + ".incomplete")
        temporary.write_text(json.dumps(content, indent=4, sort_keys=True) + "\n", encoding="utf-8")
        os.replace(temporary, path)


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
