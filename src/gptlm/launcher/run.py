"""Start a plan's processes through torchrun, keep their output in workerlog.N, and end all of them together."""

import os
import re
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

from gptlm.errors import GptlmError
from gptlm.launcher.args import LaunchPlan
from gptlm.launcher.process_tree import end_with_parent, no_process_left, signals_noted
from gptlm.launcher.rank_logs import RankOutput, last_lines, write

LOOK = 0.1  # seconds between two looks at the processes
TORCHRUN_LOG = "torchrun.log"
FAILURE = re.compile(r"rank\s+: (\d+) \(local_rank: (\d+)\)\s+exitcode\s+: (-?\d+)")


@dataclass(frozen=True)
class Failure:
    """The rank that died first: its global and local rank, its exit code or minus its signal."""

    rank: int
    local_rank: int
    code: int


def launch(plan: LaunchPlan) -> int:
    """Run `plan` to its end; returns the exit code: the first failing rank's, 128 + N after signal N.

    Raises:
        GptlmError: if the logs cannot be written.
    """
    for line in plan.notes:
        _say(line)
    with ExitStack() as stack:
        raw = _make_folders(plan, stack)
        ranks = [
            stack.enter_context(RankOutput(raw, rank, plan.log_dir / f"workerlog.{rank}", plan.log_overwrite))
            for rank in range(plan.processes)
        ]
        caught = stack.enter_context(signals_noted())
        with no_process_left():
            code = _run(plan, raw, ranks, caught)
        for output in ranks:
            output.copy(whole=True)
        if code == 0:
            return 0
        if caught:
            _say(f"ended by {signal.Signals(caught[0]).name}, which was passed on to all ranks")
            return 128 + caught[0]
        return _report(raw, code, ranks)


def count_cards() -> int:
    """The GPUs of this machine, as nvidia-smi lists them."""
    try:
        listed = subprocess.run(["nvidia-smi", "-L"], capture_output=True, text=True, timeout=60)
    except (OSError, subprocess.TimeoutExpired):
        return 0
    return sum(line.startswith("GPU ") for line in listed.stdout.splitlines())


def is_own(address: str) -> bool:
    """Whether `address` is one of this machine's: only those can be bound."""
    try:
        family, kind, _, _, place = socket.getaddrinfo(address, 0, type=socket.SOCK_STREAM)[0]
        with socket.socket(family, kind) as probe:
            probe.bind(place)
    except OSError:
        return False
    return True


def _make_folders(plan: LaunchPlan, stack: ExitStack) -> Path:
    """`log_dir`, and in it a passing folder for torchrun's own files."""
    try:
        plan.log_dir.mkdir(parents=True, exist_ok=True)
        passing = tempfile.TemporaryDirectory(prefix=".torchrun-", dir=plan.log_dir, ignore_cleanup_errors=True)
    except OSError as error:
        raise GptlmError(
            f"--log_dir {plan.log_dir} cannot be written to ({error.strerror}); give another --log_dir"
        ) from error
    return Path(stack.enter_context(passing)).absolute()


def _run(plan: LaunchPlan, raw: Path, ranks: Sequence[RankOutput], caught: Sequence[int]) -> int:
    """torchrun from start to end; returns its exit code.

    It has a session of its own: Ctrl-C on the terminal reaches the ranks through us and it, once.
    """
    _say(plan.shown())
    if plan.nodes > 1:
        place = "this node" if plan.rank is None else f"node {plan.rank}"
        _say(f"{place} of {plan.nodes} meets the others at {plan.master}:{plan.port}")
    redirected = {"PET_LOG_DIR": str(raw), "PET_REDIRECTS": "3"}  # torchrun's --log-dir and --redirects
    with open(raw / TORCHRUN_LOG, "wb") as log:
        torchrun = subprocess.Popen(
            [sys.executable, "-m", "torch.distributed.run", *plan.torchrun()[1:]],
            env={**os.environ, **plan.environment(), **redirected},
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            preexec_fn=end_with_parent,
        )
    passed = 0
    while torchrun.poll() is None:
        for output in ranks:
            output.copy()
        if len(caught) > passed:
            _pass_on(torchrun, caught[passed], first=passed == 0)
            passed += 1
        time.sleep(LOOK)
    return torchrun.returncode


def _pass_on(torchrun: subprocess.Popen, number: int, *, first: bool) -> None:
    """The first signal goes to torchrun, which sends it to each rank; a second Ctrl-C waits for nobody."""
    if first:
        _say(f"{signal.Signals(number).name}: passed on to all ranks, which have 30 seconds to end")
        torchrun.send_signal(number)
    elif number == signal.SIGINT:
        torchrun.kill()


def _report(raw: Path, code: int, ranks: Sequence[RankOutput]) -> int:
    """Say what went wrong; returns the exit code."""
    said = (raw / TORCHRUN_LOG).read_text(encoding="utf-8", errors="replace")
    failure = _first_failure(said)
    if failure is None:
        _say(f"error: torchrun ended with {_ending(code)}, no rank is to blame; it says:\n{last_lines(said)}")
        return _as_exit_code(code)
    output = ranks[failure.local_rank]
    _say(
        f"error: rank {failure.rank} ended with {_ending(failure.code)}, the other ranks were ended; its output is in "
        f"{output.path}, the last lines are\n{last_lines(output.written())}"
    )
    return _as_exit_code(failure.code)


def _first_failure(said: str) -> Failure | None:
    """The root cause in torchrun's report."""
    found = FAILURE.search(said.rpartition("Root Cause")[2])
    return Failure(*map(int, found.groups())) if found else None


def _ending(code: int) -> str:
    return f"exit code {code}" if code >= 0 else f"signal {signal.Signals(-code).name}"


def _as_exit_code(code: int) -> int:
    return code if code >= 0 else 128 - code


def _say(line: str) -> None:
    write(2, f"gptlm launch: {line}\n".encode())
