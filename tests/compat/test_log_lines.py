"""Log lines against lines that the originals' documents show."""

import logging

import pytest

from gptlm.compat.log_lines import FORMATS, Evaluation, Step, flops_per_sample
from gptlm.training.metrics.throughput import ConsoleHandler


def step(number, **more):
    facts = {
        "number": number, "last": 500000, "loss": 11.030861855, "learning_rate": 8.33333e-09, "gradient_norm": None,
        "loss_scale": 32768.0, "skipped": 0, "seconds": 0.50125, "reading": 0.00016, "batch": 8, "samples": 8,
        "tokens": 8192, "consumed_samples": 8 * number, "consumed_tokens": 8192 * number, "accumulation": 1,
        "world": 1, "flops": 0.0,
    }  # fmt: skip
    return Step(**(facts | more))


def test_fleetx_of_2022():
    """The second line in FleetX's document of the 345M run, August 2022."""
    assert FORMATS["fleetx-2022"].step(step(2)) == (
        "global step 2, epoch: 0, batch: 1, loss: 11.030861855, avg_reader_cost: 0.00016 sec, avg_batch_cost: 0.50125 "
        "sec, speed: 2.00 step/s, ips_total: 16343 tokens/s, ips: 16343 tokens/s, learning rate: 8.33333e-09"
    )


def test_paddlefleetx():
    """Its document of automatic parallelism, with the head of each line."""
    line = FORMATS["fleetx"].step(step(1, loss=10.972320, learning_rate=5.555556e-09))
    assert line == "[train] epoch: 0 step: 0 lr: 5.555556e-09 loss: 10.972320"
    record = logging.LogRecord("gptlm", logging.INFO, "/x/engine.py", 461, line, (), None)
    record.head, record.created, record.msecs = FORMATS["fleetx"].head, 0.0, 392.0
    head = ConsoleHandler()._head(record)
    assert head.startswith("[INFO 19") and head.endswith(",392 engine.py:461] ")


def test_megatron_deepspeed():
    """The layout of its training.py, numbers by hand: 15.5 samples in half a second on 8 cards."""
    found = FORMATS["megatron"].step(
        step(
            10, last=300, loss=2.5, learning_rate=4.6875e-07, gradient_norm=1.25, skipped=2, seconds=0.5, batch=16,
            samples=15.5, tokens=16000, consumed_samples=159, consumed_tokens=160011, world=8, flops=4e12,
        )
    )  # fmt: skip
    assert found == (
        " iteration       10/     300 | consumed samples:          159 | consumed tokens:       160011 | "
        "elapsed time per iteration (ms): 500.0 | learning rate: 4.688E-07 | global batch size:    16 | "
        "lm loss: 2.500000E+00 | loss scale: 32768.0 | grad norm: 1.250 | number of skipped iterations:   2 | "
        "number of nan iterations:   0 | samples per second: 31.000 | TFLOPs: 1.00 |"
    )
    evaluation = FORMATS["megatron"].evaluation(Evaluation("eval", 1000, 2.0, 10, 1.0)).splitlines()
    assert (
        evaluation[1]
        == " validation loss at iteration 1000 | lm loss value: 2.000000E+00 | lm loss PPL: 7.389056E+00 | "
    )
    assert {*evaluation[0]} == {*evaluation[2]} == {"-"}


def test_oneflow_has_a_table_and_a_line():
    table = FORMATS["oneflow"]
    row = table.step(step(100, samples=8, seconds=0.5, accumulation=2, loss=9.56547))
    assert [cell.strip() for cell in row.strip("|").split("|")] == [
        "100",
        "200",
        "800",
        "16.00000",
        "0.50000",
        "9.56547",
    ]
    assert [cell.strip() for cell in table.title[0].strip("|").split("|")] == [
        "step", "micro_batches", "samples", "throughput", "latency", "loss",
    ]  # fmt: skip
    assert len(row) == len(table.title[0]) == len(table.title[1])
    line = FORMATS["oneflow-normal"].step(step(100, samples=8, seconds=0.5, accumulation=2, loss=9.56547))
    assert line == "step=100,micro_batches=200,samples=800,throughput=16.00000,latency=0.50000,loss=9.56547,"


def test_evaluations_of_fleetx():
    found = Evaluation("eval", 500, 6.5, 10, 2.0)
    assert FORMATS["fleetx-2022"].evaluation(found) == (
        "[eval] step 500, epoch: 0, batch: 9, loss: 6.500000000, avg_eval_cost: 0.20000 sec, speed: 5.00 step/s"
    )
    assert FORMATS["fleetx"].evaluation(found) == "[eval] epoch: 0 step: 499 loss: 6.500000"


def test_operations_are_those_of_the_matrices():
    """With recomputation four passes of each layer, 24 h^2 + 4 S h a token, and three of the output, 2 h V a token."""
    layer, output = 24 * 1024**2 + 4 * 1024 * 1024, 2 * 1024 * 50304
    sizes = {"layers": 24, "hidden": 1024, "vocabulary": 50304, "length": 1024}
    assert flops_per_sample(**sizes, recompute=True) == pytest.approx(1024 * (4 * 24 * layer + 3 * output), rel=1e-12)
    assert flops_per_sample(**sizes, recompute=False) == pytest.approx(0.75 * flops_per_sample(**sizes, recompute=True))
