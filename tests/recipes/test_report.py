"""The report of a run: what is recorded, what is drawn of it, and what cannot happen to a training because of it."""

import json
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from http.client import HTTPConnection
from pathlib import Path

import numpy as np
import pytest

from gptlm import owned
from gptlm.cli import main
from gptlm.commands.pretrain import parse_pretrain
from gptlm.errors import GptlmError
from gptlm.recipes.pretrain.run import pretrain
from gptlm.recipes.report.page import LARGEST, page_of
from gptlm.recipes.report.reading import find_runs, read_run
from gptlm.recipes.report.series import marks_of, panels_of, spikes_kept
from gptlm.recipes.report.watch import Pages, Server
from tests import processes
from tests.conftest import write_tokens

ATTACK = "</script><script>document.title = 'taken'</script><img src=x onerror=alert(1)>"


def record(folder: Path, *events: dict, name: str = owned.RUN_LOG) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / name).write_text("".join(json.dumps(event) + "\n" for event in events))
    return folder


def start(step=0, **facts):
    facts = {"max_steps": 100, "processes": 2, "configuration": {"seed": 1}, "from": {"seed": "default"}} | facts
    return {"event": "start", "step": step, "time": 1.7e9 + step, **facts}


def log(step, loss=1.0, **fields):
    speed = {"interval_tokens_per_second_per_device": 10.0, "consumed_tokens": step * 8}
    return {"event": "log", "step": step, "time": 1.7e9 + step, "loss": loss, **speed, **fields}


def data_of(page: str) -> dict:
    """What the page's script draws."""
    return json.loads(re.search(r'<script type="application/json" id="report-data">(.*?)</script>', page)[1])


@pytest.fixture
def train(tiny_model, tmp_path):
    write_tokens(tmp_path / "tokens" / "c")
    words = """--max_seq_length 16 --per_device_train_batch_size 1 --save_steps 2 --logging_steps 1 --eval_steps 2
        --eval_iters 1 --device cpu --report_to none --split 8,1,1 --do_train --do_eval --continue_training""".split()
    words += ["--input_dir", str(tmp_path / "tokens"), "--model_name_or_path", str(tiny_model)]

    def call(*more, output=tmp_path / "out"):
        pretrain(parse_pretrain([*words, "--output_dir", str(output), *more], {}))
        return output

    return call


def test_a_training_writes_the_report_of_all_its_starts(train, tmp_path):
    folder = train("--max_steps", "2")
    train("--max_steps", "4")
    run = read_run(folder, "out")
    assert (run.starts, run.checkpoints, run.ended, run.last_step) == ([0, 2], [2, 4], 4, 4)
    history = json.loads((folder / "trainer_state.json").read_text())["log_history"]
    for field in ("loss", "eval_loss", "grad_norm", "consumed_tokens", "cpu_mem_used", "learning_rate"):
        expected = [(line["step"], line[field]) for line in history if field in line]
        assert list(zip(*run.columns[field])) == expected
        assert expected
    assert run.columns["consumed_tokens"][1].tolist() == [16, 32, 48, 64]
    assert run.configuration["max_steps"] == (4, "--max_steps")
    (row,) = run.data
    assert row["train tokens"] > 0
    assert row["samples drawn"] == 4
    page = (folder / owned.REPORT).read_text()
    loss = next(panel for panel in data_of(page)["panels"] if panel["title"] == "Loss")
    assert loss["curves"][0]["step"] == [1, 2, 3, 4]
    assert loss["curves"][0]["tokens"] == [16, 32, 48, 64]
    assert [(mark["kind"], mark["step"]) for mark in data_of(page)["marks"]] == [
        ("resume", [2]),
        ("checkpoint", [2, 4]),
    ]
    train("--max_steps", "2", "--overwrite_output_dir")
    assert read_run(folder, "out").starts == [0]


def test_a_foreign_report_is_kept_and_no_training_begins(train, tmp_path):
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / owned.REPORT).write_text("mine")
    with pytest.raises(GptlmError, match=r"report\.html would be replaced"):
        train("--max_steps", "2")
    assert (tmp_path / "out" / owned.REPORT).read_text() == "mine"


def test_a_report_that_cannot_be_written_only_warns(train, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr("gptlm.recipes.report.page.find_spec", lambda name: None)
    folder = train("--max_steps", "1")
    assert "could not be written (a report needs Bokeh" in capsys.readouterr().out
    assert (folder / "model.safetensors").is_file()
    assert not (folder / owned.REPORT).exists()


def test_steps_that_were_trained_again_are_shown_once(tmp_path):
    events = [start(), log(1), log(2, 9.0), {"event": "checkpoint", "step": 2}, log(3, 9.0)]
    (tmp_path / owned.RUN_LOG).write_text(
        "".join(json.dumps(event) + "\n" for event in events)
        + '{"event": "log", "st'  # killed here
        + "".join("\n" + json.dumps(event) for event in [start(1), log(2, 5.0), {"event": "end", "step": 2}])
    )
    run = read_run(tmp_path, "run")
    assert [(line["step"], line["loss"]) for line in run.logs] == [(1, 1.0), (2, 5.0)]
    assert (run.starts, run.checkpoints, run.ended) == ([0, 1], [], 2)


def test_every_spike_of_many_steps_is_drawn_and_the_page_is_small(tmp_path):
    values = np.sin(np.arange(100_000) / 1000)
    values[[77, 50_000, 99_998]] = [50.0, -60.0, 70.0]
    kept = spikes_kept(values, 500)
    assert {0, 77, 50_000, 99_998, 99_999} <= {*kept.tolist()}
    assert len(kept) <= 1002
    assert np.abs(np.diff(kept)).max() <= 400
    lines = (log(step + 1, float(values[step])) for step in range(20_000))
    record(tmp_path / "a", start(), *lines)
    page = page_of(find_runs([tmp_path / "a"]))
    assert len(page.encode()) < LARGEST
    (loss,) = next(panel for panel in data_of(page)["panels"] if panel["title"] == "Loss")["curves"]
    assert max(loss["y"]) == 50.0
    assert len(loss["y"]) <= 1402


def test_speed_is_of_all_processes_and_marks_tell_skipped_steps(tmp_path):
    folder = record(
        tmp_path / "a", start(), log(1), log(2, skipped_steps=0), log(5, skipped_steps=3), log(9, float("nan"))
    )
    (run,) = find_runs([folder])
    speed = next(panel for panel in panels_of([run], 10) if panel["title"] == "Speed")
    assert speed["curves"][0]["y"] == [20.0] * 4
    assert [(mark["kind"], mark["step"], mark["tokens"]) for mark in marks_of(run)] == [("skipped", [5], [40.0])]
    assert run.columns["loss"][0].tolist() == [1, 2, 5]


def test_text_of_others_stays_text(tmp_path):
    folder = tmp_path / "<b>run"
    record(folder, start(configuration={ATTACK: ATTACK}, data=[{ATTACK: ATTACK}], device=ATTACK), log(1), log(2))
    (folder / "predictions").mkdir()
    rows = [{"prompt": ATTACK, "prediction": ATTACK, "reference": ATTACK}]
    record(folder / "predictions", *rows, name="eval-step-2.jsonl")
    (folder / "all_results.json").write_text(json.dumps({ATTACK: 1}))
    page = page_of(find_runs([folder, record(tmp_path / "other", start(), log(1))]))
    own = page_of(find_runs([tmp_path / "other"]))
    assert page.count("<script") == own.count("<script")
    assert "<img" not in page
    assert "<b>run" not in page
    assert page.count("&lt;img src=x") >= 6


def test_runs_are_compared(tmp_path):
    one = {"configuration": {"learning_rate": 1e-3, "seed": 1, "output_dir": "a"}}
    two = {"configuration": {"learning_rate": 1e-4, "seed": 1, "output_dir": "b"}}
    record(tmp_path / "runs" / "a", start(**one), log(1))
    record(tmp_path / "runs" / "b", start(**two), log(1))
    page = page_of(find_runs([tmp_path / "runs"]))
    (loss, *_) = data_of(page)["panels"]
    assert [curve["name"] for curve in loss["curves"]] == ["a: train", "b: train"]
    differences = page.split("<h2>Differences</h2>")[1].split("</table>")[0]
    assert re.findall(r"<td>(\w+)</td><td>(.*?)</td><td>(.*?)</td>", differences) == [
        ("learning_rate", "0.001", "0.0001")
    ]


def test_runs_of_stock_transformers_are_read(tmp_path):
    state = {
        "global_step": 2,
        "max_steps": 2,
        "log_history": [{"step": 1, "loss": 3.0, "epoch": 1}, {"step": 2, "eval_loss": 2}],
    }
    (tmp_path / "checkpoint-2").mkdir()
    (tmp_path / "checkpoint-2" / "trainer_state.json").write_text(json.dumps(state))
    (run,) = find_runs([tmp_path])
    assert (run.last("loss"), run.last("eval_loss"), run.checkpoints) == (3.0, 2.0, [2])
    assert "disabled" in page_of([run])  # there are no tokens for the x axis


@pytest.mark.parametrize(
    ("make", "sentence"),
    [
        (lambda folder: folder / "none", "none does not exist"),
        (lambda folder: folder, "holds no run"),
        (lambda folder: record(folder / "a", {"log_history": 1}, name="trainer_state.json"), "has no log_history"),
        (lambda folder: record(folder / "a", {"x": 1}), "holds no event of a run"),
        (
            lambda folder: (record(folder / "a", start()) / "all_results.json").write_text("[{") and folder / "a",
            "is damaged",
        ),
    ],
    ids=["nothing", "empty", "no history", "no event", "cut"],
)
def test_bad_input_is_one_sentence(tmp_path, capsys, make, sentence):
    assert main(["report", str(make(tmp_path))]) == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert sentence in line


def test_the_command_replaces_its_own_page_only(tmp_path, capsys):
    folder = record(tmp_path / "a", start(), log(1))
    for _ in range(2):
        assert main(["report", str(folder)]) == 0
    assert str(folder / owned.REPORT) in capsys.readouterr().out
    (folder / owned.REPORT).write_text("mine")
    assert main(["report", str(folder)]) == 1
    assert "give another --output" in capsys.readouterr().err
    assert (folder / owned.REPORT).read_text() == "mine"
    assert main(["report", str(folder), "--output", str(tmp_path / "x.html")]) == 0
    assert main(["report", "--watch", str(folder), "--output", "x"]) == 2


def test_the_watched_page_follows_the_run_and_answers_its_own_address_only(tmp_path):
    folder = record(tmp_path / "a", start(), log(1))
    with Server(Pages([folder]), 0) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()

        def get(path, host="localhost:1"):
            connection = HTTPConnection("127.0.0.1", server.server_port, timeout=60)
            connection.request("GET", path, headers={"Host": host})
            answer = connection.getresponse()
            body = answer.read().decode()
            connection.close()
            return answer.status, body

        try:
            first = data_of(get("/")[1])
            assert get("/version") == (200, first["version"])
            with open(folder / owned.RUN_LOG, "a") as file:
                file.write(json.dumps(log(2, 0.5)) + "\n")
            assert get("/version")[1] != first["version"]
            assert data_of(get("/", "127.0.0.1")[1])["panels"][0]["curves"][0]["step"] == [1, 2]
            assert get("/", "evil.example")[0] == get("/version", "evil.example:80")[0] == 403
            assert get("/../../etc/passwd")[0] == 404
        finally:
            server.shutdown()
            thread.join()


def test_ctrl_c_ends_the_watched_page_in_order(tmp_path):
    folder = record(tmp_path / "a", start(), log(1))
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    command = [sys.executable, "-m", "gptlm", "report", "--watch", folder, "--port", port]
    with open(tmp_path / "said", "w+") as said:
        process = processes.start(command, stdout=said, stderr=said)
        while not said.read().endswith("(Ctrl-C ends it)\n"):
            assert process.poll() is None
            said.seek(0)
            time.sleep(0.01)
        process.send_signal(signal.SIGINT)
        assert process.wait(60) == 0
        said.seek(0)
        assert said.read() == f"the page is open at http://127.0.0.1:{port} (Ctrl-C ends it)\n"


@pytest.mark.slow
def test_chromium_draws_the_page(tmp_path):
    """The page's script runs to its end, without network, and every chart has its canvas."""
    folder = record(tmp_path / "a", start(), *(log(step, 1 / step, eval_loss=2.0) for step in range(1, 50)), start(20))
    assert main(["report", str(folder)]) == 0
    flags = "--headless --no-sandbox --disable-gpu --disable-quic --no-first-run --virtual-time-budget=20000 --dump-dom"
    command = ["chromium", *flags.split(), f"--user-data-dir={tmp_path / 'profile'}", (folder / owned.REPORT).as_uri()]
    shown = subprocess.run(command, capture_output=True, text=True, timeout=300, check=True).stdout
    panels = len(data_of((folder / owned.REPORT).read_text())["panels"])
    assert f'data-drawn="{panels}"' in shown
    assert panels == shown.count("bk-Figure") == 2


DRAWN = """() => Bokeh.documents[0].roots().map((plot) => ({
    label: plot.below[0].axis_label, end: plot.x_range.end, text: plot.below[0].axis_label_text_color,
    x: [...plot.renderers.find((one) => one.data_source.data.y).data_source.data.x],
}))"""


@pytest.mark.slow
def test_a_person_reads_and_prints_the_page(tmp_path, browser):
    """Both x axes, the values under a pointer, and paper, which is bright and has no switches."""
    events = [log(step, 10 / step, eval_loss=2.0, learning_rate=0.5) for step in range(1, 41)]
    folder = record(tmp_path / "a", start(), *events)
    assert main(["report", str(folder)]) == 0
    tab, problems = browser.new_page(color_scheme="dark"), []
    tab.on("pageerror", lambda error: problems.append(error))
    tab.on("request", lambda request: problems.append(request.url) if request.url.startswith("http") else None)
    tab.goto((folder / owned.REPORT).as_uri(), timeout=120_000)
    tab.wait_for_selector("body[data-drawn]", timeout=120_000)
    first = tab.evaluate(DRAWN)
    assert [chart["label"] for chart in first] == ["step"] * 3 and first[0]["x"] == list(range(1, 41))
    assert 40 <= first[0]["end"] < 50
    tab.click("input[value=tokens]")
    tokens = tab.evaluate(DRAWN)
    assert [chart["label"] for chart in tokens] == ["tokens"] * 3
    assert tokens[0]["x"] == [8 * step for step in range(1, 41)]  # the run's consumed_tokens
    tab.wait_for_function("Bokeh.documents[0].roots()[0].x_range.end > 300")
    chart = tab.locator(".plot").first.bounding_box()
    tab.mouse.move(chart["x"] + chart["width"] - 20, chart["y"] + 100)  # the last step is the nearest
    tab.wait_for_selector(".values span")
    values = [place.split("\n") for place in tab.locator(".values").all_inner_texts()]
    assert values == [
        ["train 0.2500 (step 40)", "evaluation 2.0000 (step 40)"],
        ["learning rate 5.000e-1 (step 40)"],
        ["tokens/s 20 (step 40)"],
    ]
    tab.emulate_media(media="print", color_scheme="dark")
    tab.wait_for_function(f"({DRAWN})()[0].text === '#3d4757'")  # LIGHT of chart.js
    assert tab.locator("#switches").is_hidden()
    assert tab.evaluate("getComputedStyle(document.body).backgroundColor") == "rgb(255, 255, 255)"
    assert tab.pdf().startswith(b"%PDF")
    assert problems == []
