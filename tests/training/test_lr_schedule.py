"""Learning rates against PaddleNLP's recorded values and the formulas by hand."""

import pytest

from gptlm.training.lr_schedule import Schedule
from tests.golden import recorded


def rates(kind, warmup, count=12, decay=10, maximum=1.0, minimum=0.1, **more):
    schedule = Schedule(kind, maximum, minimum, warmup, decay, **more)
    return [schedule.rate(update) for update in range(1, count + 1)]


def test_cosine_is_paddlenlp_s():
    wanted = [0.5, 1, 0.965746, 0.868198, 0.722208, 0.55, 0.377792, 0.231802, 0.134254, 0.1, 0.1, 0.1]
    assert rates("cosine", 2) == pytest.approx(wanted, abs=1e-6)


def test_linear_is_paddlenlp_s():
    wanted = [0.5, 1, 0.8875, 0.775, 0.6625, 0.55, 0.4375, 0.325, 0.2125, 0.1, 0.1, 0.1]
    assert rates("linear", 2) == pytest.approx(wanted, abs=1e-12)
    assert rates("linear", 0)[0] == pytest.approx(0.91)


def test_fractional_warm_up_and_decay_before_the_end():
    assert rates("linear", 0.3)[0] == pytest.approx(0.1 + (1 - 0.7 / 9.7) * 0.9)
    assert rates("linear", 2.5)[:3] == pytest.approx([0.4, 0.8, 0.1 + (1 - 0.5 / 7.5) * 0.9])
    assert rates("cosine", 0, decay=4)[4:] == [0.1] * 8
    assert rates("linear", 10, decay=10)[9:] == pytest.approx([1.0, 0.1, 0.1])
    assert rates("linear", 20, decay=10)[11] == pytest.approx(12 / 20)


def test_the_other_three_start_at_step_zero():
    assert rates("constant", 3) == [1.0] * 12
    assert rates("constant_with_warmup", 4)[:6] == [0, 0.25, 0.5, 0.75, 1, 1]
    polynomial = rates("polynomial", 2, end=0.2, power=2.0)
    assert polynomial[:2] == [0, 0.5]
    assert polynomial[2:] == pytest.approx([0.2 + 0.8 * (1 - k / 8) ** 2 for k in range(9)] + [0.2])


MEGATRON = recorded("megatron/learning_rates.json")


@pytest.mark.parametrize("name", MEGATRON)
@pytest.mark.parametrize(("source", "kind"), [("megatron", "cosine"), ("oneflow", "oneflow_cosine")])
def test_every_recorded_rate_of_megatron_and_oneflow(name, source, kind):
    """By updates done before. Megatron's decay begins behind the warm-up; OneFlow's counts it."""
    case = MEGATRON[name]
    assert case["style"] == "cosine"
    decay = case["decay_iters"]
    schedule = Schedule(kind, case["lr"], case["min_lr"], int(case["warmup_fraction"] * decay), decay, start=0)
    for done, rate in case[source].items():
        assert schedule.rate(int(done) + 1) == pytest.approx(rate, rel=1e-9, abs=1e-30), done


FLEETX = recorded("fleetx/learning_rates.json")


@pytest.mark.parametrize(
    ("name", "rates", "start"), [("g1", (1e-5, 5e-5), 1), ("nov", (5e-5, 1e-5), 1), ("head", (5e-5, 1e-5), 0)]
)
def test_every_recorded_rate_of_fleetx(name, rates, start):
    """Files of August 2022 (which rise), November 2022 and 2023: the rates of an update and of the next one."""
    schedule = Schedule("cosine", *rates, 3600, 360000, start=start)
    for update, recorded_rates in FLEETX[name].items():
        found = [schedule.rate(int(update)), schedule.rate(int(update) + 1)]
        assert found == pytest.approx(recorded_rates, rel=1e-12, abs=1e-30), update
