"""What a launcher (torchrun, DeepSpeed's) tells a process in its environment. The only module that reads it."""

import os
import socket
from collections.abc import Mapping

from gptlm.errors import UsageError


def rank() -> int:
    """Index of this process among all processes of the run; 0 without a launcher."""
    return int(os.environ.get("RANK") or 0)


def local_rank() -> int:
    """Index of this process on its machine; 0 without a launcher."""
    return int(os.environ.get("LOCAL_RANK") or 0)


def world_size() -> int:
    """Number of processes of the run; 1 without a launcher.

    Raises:
        UsageError: if WORLD_SIZE is not a number.
    """
    given = launched_processes(os.environ)
    return 1 if given is None else given


def local_world_size() -> int | None:
    """Number of processes on this machine; None without a launcher."""
    given = os.environ.get("LOCAL_WORLD_SIZE") or os.environ.get("LOCAL_SIZE")  # torchrun's name, DeepSpeed's name
    return int(given) if given else None


def is_main_process() -> bool:
    """Whether this is rank 0, which logs and writes files."""
    return rank() == 0


def is_launched() -> bool:
    """Whether a launcher started this process."""
    return bool(os.environ.get("RANK"))


def launched_processes(environment: Mapping[str, str]) -> int | None:
    """WORLD_SIZE in `environment`; None without a launcher.

    Raises:
        UsageError: if it is not a number.
    """
    given = environment.get("WORLD_SIZE", "").strip()
    if given and not given.isdigit():
        raise UsageError(f"WORLD_SIZE in the environment is {given!r}; launchers set it to the number of processes")
    return int(given) if given else None


def become_single_process() -> None:
    """Set the environment of a run with one process, for libraries that need a launcher's variables."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    os.environ.update(RANK="0", LOCAL_RANK="0", WORLD_SIZE="1", MASTER_ADDR="127.0.0.1", MASTER_PORT=port)
