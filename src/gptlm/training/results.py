"""Result files of a run: `NAME_results.json`, and `all_results.json` with everything so far."""

import json
from collections.abc import Mapping
from pathlib import Path


def write_results(folder: Path, name: str, metrics: Mapping[str, float]) -> None:
    """Write `metrics` of one stage ("train", "eval", "test") and merge them into `all_results.json`."""
    everything = folder / "all_results.json"
    merged = json.loads(everything.read_text(encoding="utf-8")) if everything.is_file() else {}
    for path, content in ((folder / f"{name}_results.json", metrics), (everything, {**merged, **metrics})):
        path.write_text(json.dumps(content, indent=4, sort_keys=True) + "\n", encoding="utf-8")
