"""Progress: a bar on a terminal, lines elsewhere."""

from types import SimpleNamespace

import pytest
import torch

from gptlm.training.callbacks import PlainProgress, ProgressBar
from gptlm.training.metrics.run_log import RunLog
from gptlm.training.metrics.throughput import start_logging

QUIET = SimpleNamespace(should_log=False)


@pytest.fixture
def now(monkeypatch):
    now = [1000.0]
    monkeypatch.setattr("time.monotonic", lambda: now[0])
    start_logging(main_process=True)
    return now


def trainer(log_format="paddlenlp"):
    """Each step has the loss 2 and 100 tokens; `done` makes one."""
    made = SimpleNamespace(
        args=SimpleNamespace(world_size=1), run_log=RunLog(log_format=log_format), learning_rate=1e-3,
        train_loss=SimpleNamespace(pending=torch.zeros(())), trained=SimpleNamespace(tokens=0),
    )  # fmt: skip
    made.state = SimpleNamespace(global_step=0, max_steps=100, is_world_process_zero=True)

    def done():
        made.state.global_step += 1
        made.train_loss.pending += 2.0
        made.trained.tokens += 100

    made.done = done
    return made


def lines(capsys):
    return [line.split(" - ")[1] for line in capsys.readouterr().out.splitlines()]


def test_lines_begin_with_the_first_step_and_become_rarer(capsys, now):
    run = trainer()
    progress = PlainProgress(run)
    progress.on_train_begin(None, run.state, QUIET)
    for _ in range(40):  # 5 seconds each
        now[0] += 5
        run.done()
        progress.on_step_end(None, run.state, QUIET)
    said = lines(capsys)
    assert said[0] == "step 1 of 100: loss 2.0000, learning rate 0.001"
    assert said[1] == "step 3 of 100: loss 2.0000, learning rate 0.001, 20 tokens/s, 0:08:05 left"
    assert [line.split(" of")[0] for line in said] == ["step 1", "step 3", "step 7", "step 15", "step 27", "step 39"]


def test_the_log_line_of_a_step_is_its_only_line(capsys, now):
    run = trainer()
    progress = PlainProgress(run)
    progress.on_train_begin(None, run.state, QUIET)
    for _ in range(3):
        now[0] += 60
        run.done()
        progress.on_step_end(None, run.state, SimpleNamespace(should_log=True))
        progress.on_log(None, run.state, QUIET, {"loss": 2.0})
        run.train_loss.pending.zero_()
    run.done()
    now[0] += 60
    progress.on_step_end(None, run.state, QUIET)
    assert lines(capsys) == ["step 4 of 100: loss 2.0000, learning rate 0.001, 2 tokens/s, 1:36:00 left"]


def test_the_formats_of_others_get_a_line_after_a_minute_without_one(capsys, now):
    run = trainer("megatron")
    progress = PlainProgress(run)
    progress.on_train_begin(None, run.state, QUIET)
    for step in range(1, 11):  # 20 seconds each, a log line after the fifth
        now[0] += 20
        run.done()
        progress.on_step_end(None, run.state, QUIET)
        if step == 5:
            progress.on_log(None, run.state, QUIET)
    for _ in range(4):
        now[0] += 20
        progress.on_prediction_step(None, run.state, QUIET, eval_dataloader=range(9))
    said = [line.split(":")[0] + line.split("batch")[-1] * ("batch" in line) for line in lines(capsys)]
    assert said == ["step 3 of 100", "step 8 of 100", "evaluation 1 of 9", "evaluation 4 of 9"]


def test_the_bar_of_a_resumed_run_begins_at_its_step(now, capsys):
    run = trainer()
    run.state.global_step = 90
    bar = ProgressBar(run)
    bar.on_train_begin(None, run.state, QUIET)
    for _ in range(2):
        now[0] += 10
        run.done()
        bar.on_step_end(None, run.state, QUIET)
    assert (bar.training_bar.initial, bar.training_bar.n, bar.training_bar.total) == (90, 92, 100)
    assert bar.training_bar.postfix == "loss 2.0000, learning rate 0.001, 10 tokens/s"
    bar.on_train_end(None, run.state, QUIET)
