"""Log lines in PaddleNLP's fields, order and rounding."""

import logging

import pytest

from gptlm.training.metrics.throughput import Throughput, log_line, start_logging, table, train_fields


def test_the_training_line_in_paddlenlp_s_order():
    fields = train_fields(
        5.961434364318848,
        0.00098041,
        1,
        0.00203,
        gpu={"current_memory_allocated": 1.5},
        speed={"interval_runtime": 0.0724, "interval_samples_per_second": 55.2356},
        process={"cpu_mem_used": 100},
    )
    assert log_line(fields) == (
        "loss: 5.96143436, learning_rate: 0.0009804, global_step: 1, current_memory_allocated: 1.5, "
        "interval_runtime: 0.0724, interval_samples_per_second: 55.2356, cpu_mem_used: 100, progress_or_epoch: 0.002"
    )


def test_speed_is_what_the_clock_says(monkeypatch):
    now = [10.0]
    monkeypatch.setattr("gptlm.training.metrics.throughput.time.perf_counter", lambda: now[0])
    speed = Throughput(world=2)
    speed.restart(5, (40, 5000))
    now[0] = 14.0
    assert speed.interval(7, (55, 6800)) == {
        "interval_runtime": 4.0,
        "interval_samples_per_second": 3.75,  # 15 in 4 s, whole job
        "interval_tokens_per_second_per_device": 225.0,  # 1800 in 4 s on 2 processes
        "interval_steps_per_second": 0.5,
    }
    now[0] = 15.0
    assert speed.mean == (7.5, 900.0) and speed.seconds == 2.0
    assert speed.interval(8, (56, 6801))["interval_runtime"] == 1.0


def test_lines_on_stdout_have_stamp_and_level(capsys):
    start_logging(main_process=True)
    logging.getLogger("gptlm.x").info("loss: 1")
    logging.getLogger("gptlm.x").warning("careful")
    first, second = capsys.readouterr().out.splitlines()
    assert first.endswith("] [    INFO] - loss: 1") and second.endswith("] [ WARNING] - careful")
    start_logging(main_process=False)
    logging.getLogger("gptlm.x").info("loss: 2")
    assert capsys.readouterr().out == ""


def test_tables_are_padded():
    assert table("train", {"b": 1.5, "long_key": 12}) == [
        "***** train metrics *****", "  b        = 1.5000", "  long_key =     12"
    ]  # fmt: skip


def test_utilisation_is_the_share_of_the_peak():
    """1000 tokens a second and device of 2e9 operations each are 2e12, 20 % of a peak of 1e13."""
    throughput = Throughput(world=2, utilisation=2e9 / 1e13)
    throughput._time -= 4.0  # ten steps of 800 tokens in 4 s on 2 devices
    found = throughput.interval(10, (80, 8000))
    assert found["interval_tokens_per_second_per_device"] == pytest.approx(1000, rel=1e-2)
    assert found["mfu"] == pytest.approx(0.2, rel=1e-2)
    assert "mfu" not in Throughput(world=2).interval(1, (8, 800))
