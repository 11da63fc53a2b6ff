"""Progress where there is no terminal: lines, and only after silence."""

from types import SimpleNamespace

from gptlm.training.callbacks import PlainProgress
from gptlm.training.metrics.throughput import start_logging


def test_a_line_comes_after_a_minute_without_one(capsys, monkeypatch):
    now = [0.0]
    monkeypatch.setattr("time.monotonic", lambda: now[0])
    start_logging(main_process=True)
    progress, state = PlainProgress(), SimpleNamespace(global_step=0, max_steps=100)
    for step in range(1, 11):  # 20 seconds each, a log line after the fifth
        now[0] += 20
        state.global_step = step
        progress.on_step_end(None, state, None)
        if step == 5:
            progress.on_log(None, state, None)
    for _ in range(4):
        now[0] += 20
        progress.on_prediction_step(None, state, None, eval_dataloader=range(9))
    said = [line.split(" - ")[1] for line in capsys.readouterr().out.splitlines()]
    assert said == ["step 3 of 100", "step 8 of 100", "evaluation: batch 1 of 9", "evaluation: batch 4 of 9"]
