"""What a process knows from its launcher's environment."""

import pytest

from gptlm import ranks
from gptlm.errors import UsageError

NAMES = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "LOCAL_SIZE")


@pytest.fixture(autouse=True)
def no_launcher(monkeypatch):
    for name in NAMES:
        monkeypatch.delenv(name, raising=False)


def test_without_a_launcher_this_is_the_only_process():
    assert (ranks.rank(), ranks.local_rank(), ranks.world_size(), ranks.local_world_size()) == (0, 0, 1, None)
    assert ranks.is_main_process() and not ranks.is_launched()


@pytest.mark.parametrize("local_size", ["LOCAL_WORLD_SIZE", "LOCAL_SIZE"])
def test_under_a_launcher(monkeypatch, local_size):
    for name, value in {"RANK": "5", "LOCAL_RANK": "1", "WORLD_SIZE": " 8 ", local_size: "4"}.items():
        monkeypatch.setenv(name, value)
    assert (ranks.rank(), ranks.local_rank(), ranks.world_size(), ranks.local_world_size()) == (5, 1, 8, 4)
    assert ranks.is_launched() and not ranks.is_main_process()


def test_a_world_size_that_is_not_a_number_is_refused(monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "many")
    with pytest.raises(UsageError, match="WORLD_SIZE in the environment is 'many'"):
        ranks.world_size()
    assert ranks.launched_processes({"WORLD_SIZE": ""}) is None


def test_a_single_process_gets_the_variables_of_a_launcher(monkeypatch):
    for name in (*NAMES, "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.setenv(name, "")  # restored afterwards
    ranks.become_single_process()
    assert ranks.is_launched() and (ranks.rank(), ranks.world_size()) == (0, 1)
