"""Learning rates against PaddleNLP's recorded values and the formulas by hand."""

import json

import pytest

from gptlm.training.lr_schedule import Schedule


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


def test_fleetx_s_cosine_is_paddlenlp_s():
    """Recorded: FleetX's files of August 2022 (which rise), of November 2022, and those that count samples."""
    tables = [
        (Schedule("cosine", 1e-5, 5e-5, 3600, 360000), {1: 2.777777777777778e-09, 3600: 1e-05,
         36000: 1.0810140527710047e-05, 180000: 2.968268072330384e-05, 400000: 5e-05}),
        (Schedule("cosine", 5e-5, 1e-5, 3600, 360000), {1: 1.388888888888889e-08, 100: 1.388888888888889e-06,
         3601: 4.9999999999222995e-05, 180000: 3.031731927669616e-05, 360001: 1e-05}),
        (Schedule("cosine", 5e-5, 1e-5, 3600, 360000, start=0), {1: 0.0, 2: 1.388888888888889e-08,
         3600: 4.998611111111111e-05, 36000: 4.918990913983459e-05, 360000: 1.0000000000777006e-05}),
    ]  # fmt: skip
    for schedule, table in tables:
        for update, rate in table.items():
            assert schedule.rate(update) == pytest.approx(rate, rel=1e-12, abs=1e-30)


def test_megatron_subtracts_the_warm_up_and_oneflow_does_not():
    """Recorded, by steps done before the update: 345M, 3200 of 320000 steps of warm-up, 1.5e-4 to 1e-5."""
    megatron = Schedule("cosine", 1.5e-4, 1e-5, 3200, 320000, start=0)
    oneflow = Schedule("oneflow_cosine", 1.5e-4, 1e-5, 3200, 320000, start=0)
    for done, theirs, others in [
        (0, 0.0, 0.0),
        (3199, 0.000149953125, 0.00014995312499999997),
        (3200, 0.00015, 0.0001499654592256012),
        (80000, 0.0001306613826673549, 0.0001294974746830583),
        (160000, 8.111061746843656e-05, 7.999999999999999e-05),
        (319999, 1.0000000003441894e-05, 1.0000000003373403e-05),
        (499999, 1e-05, 1e-05),
    ]:
        assert megatron.rate(done + 1) == pytest.approx(theirs, rel=1e-12, abs=1e-30)
        assert oneflow.rate(done + 1) == pytest.approx(others, rel=1e-12, abs=1e-30)


def test_every_recorded_rate_of_megatron_and_oneflow(shared):
    cases = json.loads((shared / "cases/megatron/lr_schedules.json").read_text())["cases"]
    compared = 0
    for name, case in cases.items():
        args = case["args"]
        if args.get("style") not in ("cosine", "linear"):
            continue
        decay = args.get("decay_iters") or args["train_iters"]
        warmup = args.get("warmup_iters") or args.get("warmup_fraction", 0) * decay
        for source, kind in (("megatron_old_AnnealingLR", args["style"]), ("oneflow", "oneflow_cosine")):
            schedule = Schedule(kind, args["lr"], args["min_lr"], int(warmup), decay, start=0)
            for done, rate in (case.get(source) or {}).items():
                assert schedule.rate(int(done) + 1) == pytest.approx(rate, rel=1e-9, abs=1e-30), (name, source, done)
                compared += 1
    assert compared > 50


def test_every_recorded_rate_of_fleetx(shared):
    first = {"g1": (1e-5, 5e-5, 1), "nov": (5e-5, 1e-5, 1), "head use": (5e-5, 1e-5, 0)}
    compared = 0
    for case in json.loads((shared / "cases/fleetx/lr_tables.json").read_text()):
        found = next((numbers for name, numbers in first.items() if case["case"].startswith(name)), None)
        for update, rate in case["table"].items() if found else ():
            schedule = Schedule("cosine", found[0], found[1], 3600, 360000, start=found[2])
            assert schedule.rate(int(update)) == pytest.approx(rate["used"], rel=1e-12, abs=1e-30), (
                case["case"],
                update,
            )
            compared += 1
    assert compared > 30
