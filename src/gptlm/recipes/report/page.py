"""The page of a report: one HTML file without network, with everything that is needed to draw it.

Text goes through `_text` into markup, which this module alone makes, and as JSON without `<` into the script.
"""

import html
import json
import time
from collections.abc import Iterable, Sequence
from importlib.resources import files
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np

from gptlm.errors import GptlmError, reason_of
from gptlm.recipes.report.reading import Recorded
from gptlm.recipes.report.series import KINDS, PANELS, SCORES, SPEED, marks_of, panels_of, processes

LARGEST = 2_000_000 - 50_000  # bytes of a page
BUCKETS = 700  # points of a curve are at most twice as many
FEWEST_BUCKETS = 40
EXPECTED = ("Learning rate", "Gradient norm", "Speed", "MFU")
EXAMPLES, MOST_CHARACTERS = 12, 1500
LIBRARY = ("bokeh.min.js", "bokeh-api.min.js")
POLICY = (
    "default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline'; img-src data: blob:; font-src data:; "
    "connect-src 'self'"
)


def page_of(runs: Sequence[Recorded], *, version: str = "") -> str:
    """The page of `runs`. With a `version` it asks the server that it came from for another one, and reloads then.

    Raises:
        GptlmError: if Bokeh is not installed.
    """
    library, buckets = _library(), max(BUCKETS // len(runs), FEWEST_BUCKETS)
    marks = [mark for run in runs for mark in marks_of(run)]
    while True:
        panels = panels_of(runs, buckets)
        data = {"panels": panels, "marks": marks, "runs": len(runs), "version": version}
        page = _document(runs, data, library)
        if len(page.encode()) <= LARGEST or buckets == FEWEST_BUCKETS:
            return page
        buckets = max(buckets // 2, FEWEST_BUCKETS)


def _library() -> str:
    """BokehJS and its interface for scripts. Bokeh itself is not imported, which takes a second."""
    found = find_spec("bokeh")
    if found is None or found.origin is None:
        raise GptlmError("a report needs Bokeh; install it with pip install 'bokeh>=3.9'")
    folder = Path(found.origin).parent / "server" / "static" / "js"
    try:
        return "\n".join((folder / name).read_text(encoding="utf-8") for name in LIBRARY)
    except OSError as error:
        raise GptlmError(f"Bokeh is not complete ({error.filename}: {reason_of(error)}); install it again") from error


def _document(runs: Sequence[Recorded], data: dict[str, Any], library: str) -> str:
    folder = files("gptlm.recipes.report")
    style, script = (folder.joinpath(name).read_text(encoding="utf-8") for name in ("chart.css", "chart.js"))
    parts = [_head(runs), _charts(runs, data), _answers(runs), _results(runs), _data(runs), _configuration(runs)]
    body = "\n".join(line for part in parts for line in part)
    stored = json.dumps(data, ensure_ascii=False, separators=(",", ":")).replace("<", "\\u003c")
    return f"""<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="color-scheme" content="light dark">
<meta name="generator" content="gptlm report">
<meta http-equiv="Content-Security-Policy" content="{POLICY}">
<title>{_text("gptlm: " + ", ".join(run.name for run in runs))}</title>
<style>{style}</style>
<script>{library}</script>
</head>
<body>
<main>
{body}
</main>
<script type="application/json" id="report-data">{stored}</script>
<script>{script}</script>
</body>
</html>
"""


def _text(value: object) -> str:
    return html.escape(str(value), quote=True)


def _head(runs: Sequence[Recorded]) -> Iterable[str]:
    yield f"<h1>{_text(runs[0].name if len(runs) == 1 else f'{len(runs)} runs')}</h1>"
    if len(runs) == 1:
        run = runs[0]
        yield f'<p class="sub">{_text(run.folder)}</p>'
        cards = "".join(f"<div><dt>{_text(k)}</dt><dd>{_text(v)}</dd></div>" for k, v in _facts(run).items())
        yield f'<dl class="cards">{cards}</dl>'
        return
    facts = [_facts(run) for run in runs]
    names = list(dict.fromkeys(name for found in facts for name in found))
    yield _table(["", *(run.name for run in runs)], [[name, *(f.get(name, "") for f in facts)] for name in names])


def _facts(run: Recorded) -> dict[str, str]:
    """The numbers that a reader looks for first."""
    last, most = run.last_step, run.facts.get("max_steps")
    steps = f"{last:,} of {most:,}" if isinstance(most, int) else f"{last:,}"
    state = "in progress, or interrupted" if run.ended is None else "finished"
    if run.ended is not None and isinstance(most, int) and run.ended < most:
        state = "stopped"
    found = {"state": state, "steps": steps}
    if (loss := run.last("loss")) is not None:
        found["last train loss"] = f"{loss:.4f}"
    if "eval_loss" in run.columns:
        at, losses = run.columns["eval_loss"]
        lowest = int(losses.argmin())
        found["lowest evaluation loss"] = f"{losses[lowest]:.4f} (step {at[lowest]:,.0f})"
    for name in ("bleu4", "rougel"):
        if (score := run.last(f"eval_{name}")) is not None:
            found[f"last {SCORES[name]}"] = f"{score:.4f}"
    if (tokens := run.last("consumed_tokens")) is not None:
        found["tokens trained"] = _short(tokens)
    if SPEED in run.columns:
        found["tokens/s (median)"] = f"{np.median(run.columns[SPEED][1]) * processes(run):,.0f}"
    if resumed := [step for step in run.starts if step]:
        found["resumes"] = f"{len(resumed):,}"
    if run.checkpoints:
        found["checkpoints"] = f"{len({*run.checkpoints}):,}"
    if "skipped_steps" in run.columns and (skipped := run.columns["skipped_steps"][1].sum()):
        found["skipped steps"] = f"{skipped:,.0f}"
    if run.times:
        found["started"] = time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime(run.times[0]))
        found["last event"] = time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime(run.times[1]))
    if device := run.facts.get("device"):
        found["device"] = f"{processes(run)} x {device}" if processes(run) > 1 else str(device)
    versions = run.facts.get("versions")
    if isinstance(versions, dict):
        found["versions"] = ", ".join(f"{name} {value}" for name, value in versions.items())
    return found


def _short(count: float) -> str:
    for unit, size in (("T", 1e12), ("B", 1e9), ("M", 1e6), ("k", 1e3)):
        if count >= size:
            return f"{count / size:.3g}{unit}"
    return f"{count:.0f}"


def _charts(runs: Sequence[Recorded], data: dict[str, Any]) -> Iterable[str]:
    if not data["panels"]:
        yield "<p>No log line has been written yet.</p>"
        return
    lacks = "" if all("consumed_tokens" in run.columns for run in runs) else " disabled"
    present = {mark["kind"] for mark in data["marks"]}
    boxes = "".join(
        f'<label><input type="checkbox" name="{kind}" autocomplete="off" checked> {name}</label>'
        for kind, name in KINDS.items()
        if kind in present
    )
    yield (
        '<form id="switches"><div class="switch"><span>x axis</span>'
        '<label><input type="radio" name="x" value="step" autocomplete="off" checked> steps</label>'
        f'<label><input type="radio" name="x" value="tokens" autocomplete="off"{lacks}> tokens</label></div>'
        + (f'<div class="switch"><span>marks</span>{boxes}</div>' if boxes else "")
        + "</form>"
    )
    yield '<div class="charts">'
    for panel in data["panels"]:
        yield f'<section class="chart"><h2>{_text(panel["title"])}</h2><div class="plot"></div>'
        yield '<p class="values"></p></section>'
    yield "</div>"
    shown = {panel["title"] for panel in data["panels"]}
    if missing := [panel.title for panel in PANELS if panel.title in EXPECTED and panel.title not in shown]:
        yield f'<p class="note">Not recorded: {_text(", ".join(missing))}.</p>'


def _answers(runs: Sequence[Recorded]) -> Iterable[str]:
    """Prompts with the reference and the model's answers at the first, a middle and the last evaluation."""
    for run in runs:
        steps = sorted(run.answers)
        if not steps:
            continue
        yield f"<h2>Answers{_text('' if len(runs) == 1 else f' of {run.name}')}</h2>"
        shown = sorted({steps[0], steps[len(steps) // 2], steps[-1]}, reverse=True)
        last = run.answers[steps[-1]]
        count = f"{min(len(last), EXAMPLES)} of {len(last):,} prompts, evaluated at step {steps[-1]:,}"
        yield f'<p class="note">{count}.</p>'
        for place, row in enumerate(last[:EXAMPLES]):
            yield '<article class="answer">'
            yield _quoted("prompt", row.get("prompt"))
            yield _quoted("reference", row.get("reference"))
            for step in shown:
                rows = run.answers[step]
                if place < len(rows) and rows[place].get("prompt") == row.get("prompt"):
                    yield _quoted(f"answer at step {step:,}", rows[place]["prediction"])
            yield "</article>"


def _quoted(label: str, value: Any) -> str:
    text = value if isinstance(value, str) else ""
    if len(text) > MOST_CHARACTERS:
        text = f"{text[:MOST_CHARACTERS]} … ({len(text) - MOST_CHARACTERS:,} more characters)"
    return f"<h3>{_text(label)}</h3><pre>{_text(text) or '&nbsp;'}</pre>"


def _results(runs: Sequence[Recorded]) -> Iterable[str]:
    names = sorted({name for run in runs for name in run.results})
    if names:
        yield "<h2>Results</h2>"
        head = ["", *(run.name for run in runs)] if len(runs) > 1 else ["metric", "value"]
        yield _table(head, [[name, *(run.results.get(name, "") for run in runs)] for name in names])


def _data(runs: Sequence[Recorded]) -> Iterable[str]:
    for run in runs:
        if run.data:
            yield f"<h2>Data{_text('' if len(runs) == 1 else f' of {run.name}')}</h2>"
            columns = list(dict.fromkeys(name for row in run.data for name in row))
            yield _table(columns, [[row.get(name, "") for name in columns] for row in run.data])


def _configuration(runs: Sequence[Recorded]) -> Iterable[str]:
    if len(runs) > 1:
        yield "<h2>Differences</h2>"
        names = list(dict.fromkeys(name for run in runs for name in run.configuration))
        values = {name: [_json(*run.configuration.get(name, ("", ""))[:1]) for run in runs] for name in names}
        rows = [[name, *found] for name, found in values.items() if len({*found}) > 1 and name != "output_dir"]
        if rows:
            yield _table(["argument", *(run.name for run in runs)], rows)
        else:
            yield "<p>The runs have the same arguments.</p>"
    for run in runs:
        if not run.configuration:
            continue
        yield f"<h2>Configuration{_text('' if len(runs) == 1 else f' of {run.name}')}</h2>"
        rows = [[name, _json(value), origin] for name, (value, origin) in run.configuration.items()]
        head = ["argument", "value", "from"]
        chosen, defaults = [r for r in rows if r[2] != "default"], [r for r in rows if r[2] == "default"]
        yield _folded(f"{len(chosen)} that were given or derived", _table(head, chosen), is_open=len(runs) == 1)
        if defaults:
            yield _folded(f"{len(defaults)} defaults", _table(head[:2], [row[:2] for row in defaults]))


def _folded(summary: str, content: str, *, is_open: bool = False) -> str:
    return f"<details{' open' if is_open else ''}><summary>{_text(summary)}</summary>{content}</details>"


def _json(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, default=str)


def _table(head: Sequence[object], rows: Iterable[Sequence[object]]) -> str:
    title = "".join(f"<th>{_text(cell)}</th>" for cell in head)
    body = "\n".join("<tr>" + "".join(_cell(cell) for cell in row) + "</tr>" for row in rows)
    return f'<div class="wide"><table><thead><tr>{title}</tr></thead><tbody>{body}</tbody></table></div>'


def _cell(value: object) -> str:
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return f"<td>{_text(value if isinstance(value, str) else _json(value))}</td>"
    return f'<td class="number">{value:,}</td>' if isinstance(value, int) else f'<td class="number">{value:,.6g}</td>'
