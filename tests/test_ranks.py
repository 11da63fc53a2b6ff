"""What a process knows from its launcher's environment."""

import pytest

from gptlm import ranks
from gptlm.cli import main
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


@pytest.mark.parametrize(
    ("environment", "says"),
    [
        ("RANK=abc", "RANK in the environment is 'abc'"),
        ("RANK=\u0663 WORLD_SIZE=4", "RANK in the environment is '\u0663'"),
        ("LOCAL_RANK=-1", "LOCAL_RANK in the environment is '-1'"),
        ("LOCAL_WORLD_SIZE=x", "LOCAL_WORLD_SIZE in the environment is 'x'"),
        ("WORLD_SIZE=0", "WORLD_SIZE in the environment is 0"),
        (f"WORLD_SIZE={'9' * 5000}", "WORLD_SIZE in the environment is '9"),
        ("RANK=2 WORLD_SIZE=2", "the ranks are 0 to 1"),
        ("LOCAL_RANK=1 LOCAL_WORLD_SIZE=1", "the ranks are 0 to 0"),
        ("MASTER_PORT=abc", "MASTER_PORT in the environment is 'abc'"),
        ("MASTER_PORT=65536", "expected a port"),
    ],
)
def test_a_wrong_launcher_is_one_sentence(monkeypatch, capsys, environment, says):
    for pair in environment.split():
        monkeypatch.setenv(*pair.split("="))
    assert main(["data", "check", "nothing"]) == 2
    printed = capsys.readouterr().err
    assert says in printed and printed.count("\n") == 1 and "error: " in printed


def test_empty_variables_are_removed():
    environment = dict.fromkeys(NAMES, " ") | {"HOME": ""}
    ranks.check_launcher(environment)
    assert environment == {"HOME": ""}


def test_processes_that_cannot_find_each_other_are_refused():
    whole = {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"}
    for accepted in (whole, {}, {"WORLD_SIZE": "1"}):
        ranks.check_connection(accepted)
    for missing in whole:
        with pytest.raises(UsageError, match=f", {missing} is not; start the processes with torchrun"):
            ranks.check_connection({name: value for name, value in whole.items() if name != missing})
