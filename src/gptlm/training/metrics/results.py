"""Result files of a run: `NAME_results.json`, their union `all_results.json`, and the model that they belong to."""

import json
import logging
from collections.abc import Iterable, Mapping, Sequence
from itertools import count
from pathlib import Path
from typing import Any

from gptlm import owned
from gptlm.compat.log_lines import perplexity
from gptlm.disk import replacing
from gptlm.json_text import parse_json

logger = logging.getLogger(__name__)


OWNERS = "results_of.json"  # JSON: suffix of result files -> the model they belong to
OWN = "the model trained here"


def write_results(folder: Path, name: str, metrics: Mapping[str, float], of: str | None = None) -> None:
    """Write `metrics` of one stage ("train", "eval", "test") and merge them into `all_results.json`.

    Results of another model are never replaced: those of the model trained in `folder` have the plain names, others
    take `NAME_results-2.json` and so on where those are taken.

    Args:
        of: the model that was evaluated; None: the one trained in `folder`.
    """
    suffix = suffix_of(folder, of)
    everything = folder / f"all_results{suffix}.json"
    results = folder / f"{name}_results{suffix}.json"
    if suffix:
        logger.info("results of %s: %s", of, results)
    owned.note(folder, [results.name, everything.name], owned.RUN)
    for path, content in ((results, metrics), (everything, {**_read(everything), **metrics})):
        _replace(path, content)


def suffix_of(folder: Path, of: str | None) -> str:
    """The suffix of a model's result files in `folder`, "" or "-2" and so on; notes it there."""
    model = of or OWN
    owners: dict[str, str] = {key: str(value) for key, value in _read(folder / OWNERS).items()}
    if "" not in owners and any(folder.glob("*_results.json")):
        owners[""] = OWN  # written by a version without this file
    if model == OWN and owners.get("", OWN) != OWN:
        other = _free(owners, folder)
        owners[other] = owners.pop("")
        moved = {path: path.with_name(f"{path.stem}{other}.json") for path in folder.glob("*_results.json")}
        owned.note(folder, [path.name for path in moved.values()], owned.RUN)
        for path, new in moved.items():
            path.replace(new)
        logger.info("results of %s are called *_results%s.json now", owners[other], other)
    found = next((suffix for suffix, owner in owners.items() if owner == model), None)
    suffix = found if found is not None else _free(owners, folder)
    if owners.get(suffix) != model or found is None:
        owned.note(folder, [OWNERS], owned.RUN)
        _replace(folder / OWNERS, owners | {suffix: model})
    return suffix


def _free(owners: Mapping[str, str], folder: Path) -> str:
    """The first suffix without an owner, and without files that gptlm did not write."""
    for number in count(1):
        suffix = f"-{number}" if number > 1 else ""
        files = [*folder.glob(f"*_results{suffix}.json"), *folder.glob(f"predictions{suffix}")]
        if suffix not in owners and not files:
            return suffix
    raise AssertionError


def _replace(path: Path, content: Mapping[str, object]) -> None:
    with replacing(path) as file:
        file.write((json.dumps(content, indent=4, sort_keys=True) + "\n").encode())


WINDOW = 100  # log lines in the mean speed


def summary_table(
    name: str,
    history: Sequence[Mapping[str, float]],
    *,
    parameters: int,
    seq_length: int,
    first_step: int,
    last_step: int,
) -> list[str]:
    """The table at the end of the 8-GPU recipes, with an explanation of its columns.

    The columns of the published tables come first, in their order and with their meaning.

    Args:
        name: of the row, such as "8p-GPU".
        history: log lines of this run alone, with `eval_loss` or `interval_samples_per_second`.
        parameters: of the model.
        seq_length: tokens of a sample.
        first_step, last_step: steps that this run made; it made none if `first_step` is greater.
    """
    losses = [entry["eval_loss"] for entry in history if "eval_loss" in entry]
    speeds = [s for entry in history if (s := entry.get("interval_samples_per_second")) is not None][-WINDOW:]
    speed = sum(speeds) / len(speeds) if speeds else None
    made_none, is_part = first_step > last_step, first_step > 1
    row = {
        "NAME": name,
        "params": f"{parameters / 1e6:.1f}M",
        "PPL": f"{perplexity(min(losses)):.3f}" if losses else "-",
        "samples/s": "-" if speed is None else f"{speed:.2f}",
        "seq_len": str(seq_length),
        "Steps": "-" if made_none else f"{first_step}-{last_step}" if is_part else str(last_step),
        "final PPL": f"{perplexity(losses[-1]):.3f}" if losses else "-",
        "tokens/s": "-" if speed is None else f"{speed * seq_length:.0f}",
    }
    lines = ["| " + " | ".join(cells) + " |" for cells in (row, ["-" * len(title) for title in row], row.values())]
    if losses:
        lines.append(
            f"PPL is exp(loss), the lowest of {len(losses)} evaluations on the same windows (final PPL: the last); "
            "published tables of these recipes take the lowest over windows that moved, which is lower"
        )
    if speeds:
        lines.append(
            f"speeds are means over the last {len(speeds)} log lines of all processes, without evaluation and saving"
        )
    if made_none:
        lines.append(f"this run made no step: the checkpoint was at step {last_step} already")
    elif is_part:
        lines.append(f"all figures are of steps {first_step} to {last_step}, which this run made")
    return lines


def of_other_models(folder: Path, names: Iterable[str]) -> set[str]:
    """Those of the files `names` in `folder` that are results of other models than the one trained there."""
    owners = _read(folder / OWNERS)
    suffixes = [suffix for suffix, owner in owners.items() if str(owner) != OWN]
    ends = tuple(f"_results{suffix}.json" for suffix in suffixes)
    parts = tuple(f"predictions{suffix}/" for suffix in suffixes)
    return {name for name in names if name.endswith(ends) or name.startswith(parts) or (suffixes and name == OWNERS)}


def _read(path: Path) -> dict[str, Any]:
    try:
        return dict(parse_json(path.read_text(encoding="utf-8")))
    except FileNotFoundError:
        return {}
    except (ValueError, TypeError) as error:
        logger.warning("%s was damaged (%s) and is written anew", path, error)
        return {}
