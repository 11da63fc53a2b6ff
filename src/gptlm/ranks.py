"""What a launcher (torchrun, DeepSpeed's) tells a process in its environment. The only module that reads it."""

import os
import socket
from collections.abc import Mapping, MutableMapping

from gptlm.errors import UsageError

LONGEST = 10  # digits
LARGEST_PORT = 2**16 - 1
MEANING = {
    "RANK": "the index of the process, from 0",
    "LOCAL_RANK": "the index of the process on its machine, from 0",
    "WORLD_SIZE": "the number of processes",
    "LOCAL_WORLD_SIZE": "the number of processes on this machine",
    "LOCAL_SIZE": "the number of processes on this machine",
    "MASTER_PORT": "a port of the machine with rank 0",
}


def check_launcher(environment: MutableMapping[str, str]) -> None:
    """Check what a launcher has set, and remove empty variables, on which other libraries fail.

    Raises:
        UsageError: if a value is not a number, or two contradict each other.
    """
    for name in MEANING:
        if name in environment and not environment[name].strip():
            del environment[name]
    world, rank = launched_processes(environment), _number(environment, "RANK")
    if world == 0:
        raise UsageError("WORLD_SIZE in the environment is 0; launchers set it to the number of processes, at least 1")
    if rank is not None and world is not None and rank >= world:
        raise UsageError(f"RANK is {rank} in the environment, WORLD_SIZE {world}; the ranks are 0 to {world - 1}")
    local, here = _number(environment, "LOCAL_RANK"), _processes_here(environment)
    if local is not None and here is not None and local >= here:
        raise UsageError(
            f"LOCAL_RANK is {local} in the environment, of {here} processes on this machine (LOCAL_WORLD_SIZE); "
            f"the ranks are {f'0 to {here - 1}' if here else 'none'}"
        )
    port = _number(environment, "MASTER_PORT")
    if port is not None and port > LARGEST_PORT:
        raise UsageError(f"MASTER_PORT in the environment is {port}; expected a port, 1 to {LARGEST_PORT}")


def check_connection(environment: Mapping[str, str]) -> None:
    """Check that a process that a launcher started knows how to reach the others.

    Raises:
        UsageError: if a variable is missing.
    """
    given = [name for name in ("RANK", "WORLD_SIZE") if environment.get(name)]
    if given == ["WORLD_SIZE"] and launched_processes(environment) == 1:
        return
    missing = [name for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT") if not environment.get(name)]
    if given and missing:
        raise UsageError(
            f"{' and '.join(given)} {'is' if len(given) == 1 else 'are'} set in the environment, "
            f"{', '.join(missing)} {'is' if len(missing) == 1 else 'are'} not; start the processes with torchrun, or "
            f"unset {given[0]}"
        )


def rank() -> int:
    """Index of this process among all processes of the run; 0 without a launcher."""
    return _number(os.environ, "RANK") or 0


def local_rank() -> int:
    """Index of this process on its machine; 0 without a launcher."""
    return _number(os.environ, "LOCAL_RANK") or 0


def world_size() -> int:
    """Number of processes of the run; 1 without a launcher.

    Raises:
        UsageError: if WORLD_SIZE is not a number.
    """
    given = launched_processes(os.environ)
    return 1 if given is None else given


def local_world_size() -> int | None:
    """Number of processes on this machine; None without a launcher."""
    return _processes_here(os.environ)


def is_main_process() -> bool:
    """Whether this is rank 0, which logs and writes files."""
    return rank() == 0


def is_launched() -> bool:
    """Whether a launcher started this process."""
    return bool(os.environ.get("RANK"))


def launcher() -> str | None:
    """The machine and a name of the torchrun process that started this one, the same after it restarts its processes.

    None without torchrun. Neither the id of the job nor the count of restarts tells: an id may be used again, and a
    restart for a new number of nodes is not counted.
    """
    found = os.environ.get("TORCHELASTIC_ERROR_FILE", "").split("/")  # .../NAME/attempt_0/0/error.json
    return f"{socket.gethostname()}:{found[-4]}" if len(found) > 3 else None


def launched_processes(environment: Mapping[str, str]) -> int | None:
    """WORLD_SIZE in `environment`; None without a launcher.

    Raises:
        UsageError: if it is not a number.
    """
    return _number(environment, "WORLD_SIZE")


def _processes_here(environment: Mapping[str, str]) -> int | None:
    given = _number(environment, "LOCAL_WORLD_SIZE")  # torchrun's name
    return _number(environment, "LOCAL_SIZE") if given is None else given  # DeepSpeed's


def _number(environment: Mapping[str, str], name: str) -> int | None:
    """The number in the variable `name`; None if it is not set or empty. Raises UsageError."""
    given = environment.get(name, "").strip()
    if given and not (given.isascii() and given.isdigit() and len(given) < LONGEST):
        raise UsageError(f"{name} in the environment is {given!r}; launchers set it to {MEANING[name]}")
    return int(given) if given else None


def become_single_process() -> None:
    """Set the environment of a run with one process, for libraries that need a launcher's variables."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    os.environ.update(RANK="0", LOCAL_RANK="0", WORLD_SIZE="1", MASTER_ADDR="127.0.0.1", MASTER_PORT=port)
