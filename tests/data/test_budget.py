"""Code with limits is ended, and leaves the process as it was."""

import resource
import signal
import threading

import pytest

from gptlm.data.budget import OverBudgetError, budget

MIB = 1 << 20


def state():
    return (
        resource.getrlimit(resource.RLIMIT_AS),
        signal.getsignal(signal.SIGALRM),
        signal.getitimer(signal.ITIMER_REAL),
    )


def forever():
    while True:
        pass


@pytest.mark.parametrize(
    ("code", "says"),
    [
        (forever, "more than 0.2 s"),
        (lambda: 9**999_999_999, "more than 0.2 s|more than 300 MiB"),
        (lambda: "x" * (3 << 30), "more than 300 MiB"),
        (lambda: [1] * (1 << 30), "more than 300 MiB"),
    ],
    ids=["loop", "power", "text", "list"],
)
def test_time_and_memory_are_limited(code, says):
    before = state()
    with pytest.raises(OverBudgetError, match=says), budget(0.2, 300 * MIB):
        code()
    assert state() == before


def test_what_stays_within_the_limits_runs_and_other_errors_pass():
    before = state()
    with budget(5, 300 * MIB):
        size = len(bytes(50 * MIB))
    with pytest.raises(KeyError), budget(5, 300 * MIB):
        raise KeyError("a")
    assert size == 50 * MIB and state() == before


def test_an_own_handler_of_the_alarm_stays():
    def own(number, frame): ...

    old = signal.signal(signal.SIGALRM, own)
    try:
        with budget(5, 300 * MIB):
            assert signal.getsignal(signal.SIGALRM) is not own
        assert signal.getsignal(signal.SIGALRM) is own
    finally:
        signal.signal(signal.SIGALRM, old)


def test_memory_is_limited_in_other_threads_too():
    found = []

    def run():
        try:
            with budget(5, 300 * MIB):
                found.append("x" * (3 << 30))
        except OverBudgetError as error:
            found.append(str(error))

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    assert found == ["it needs more than 300 MiB of memory"]


def test_without_the_size_of_the_process_time_alone_is_limited(monkeypatch, tmp_path):
    monkeypatch.setattr("gptlm.data.budget.SIZE", tmp_path / "statm")
    before = state()
    with budget(60, MIB):
        assert len(bytearray(64 * MIB)) == 64 * MIB
    with pytest.raises(OverBudgetError, match=r"more than 0\.1 s"), budget(0.1, MIB):
        while True:
            pass
    assert state() == before
