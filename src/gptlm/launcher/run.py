"""Run a launch plan through torchrun, with each rank's output in workerlog.N."""

import os
import re
import signal
import socket
import subprocess
import sys
import tempfile
import time
from contextlib import ExitStack, closing, suppress
from pathlib import Path
from typing import BinaryIO

from gptlm.errors import GptlmError, named
from gptlm.launcher.args import LaunchPlan
from gptlm.launcher.process_tree import children_of, no_process_left, signals_noted, terminate_with_parent
from gptlm.signals import EXIT_CODES, TOGETHER

POLL_INTERVAL = 0.1  # seconds
SECONDS_TO_END = 300  # for ranks that got a signal: they save a checkpoint
SHOWN_LINES = 15  # last lines of a failed rank's output
TAIL_BYTES = 1 << 16  # searched for them
# torchrun's report of the rank that failed first
ROOT_CAUSE = re.compile(r"Root Cause.*?rank\s+: (\d+) \(local_rank: (\d+)\)\s+exitcode\s+: (-?\d+)", re.DOTALL)


class RankOutput:
    """The output of one rank, stdout and stderr line by line: to workerlog.N, rank 0's to the terminal too.

    torchrun's own log files cannot replace this. It truncates them at every start and keeps two per rank in folders of
    its own naming; `--tee` puts a prefix before each line and mixes the ranks on the terminal.
    """

    def __init__(self, torchrun_dir: Path, local_rank: int, path: Path, overwrite: bool):
        self.path = path
        self._sources, self._rank = torchrun_dir, local_rank
        self._log = open(path, "w+b" if overwrite else "a+b")
        self._start = self._log.seek(0, os.SEEK_END)
        self._streams: dict[str, BinaryIO] = {}
        self._partial_lines = {"stdout.log": b"", "stderr.log": b""}

    def close(self) -> None:
        for file in (self._log, *self._streams.values()):
            file.close()

    def copy(self, *, last: bool = False) -> None:
        """Copy the new complete lines; with `last` also an unfinished one."""
        for descriptor, name in enumerate(self._partial_lines, start=1):
            # torchrun creates the files when it starts the rank
            for found in () if name in self._streams else self._sources.glob(f"*/attempt_0/{self._rank}/{name}"):
                self._streams[name] = open(found, "rb")
            if name not in self._streams:
                continue
            text = self._partial_lines[name] + self._streams[name].read()
            end = len(text) if last else 1 + max(text.rfind(b"\n"), text.rfind(b"\r"))  # progress bars end with \r
            self._partial_lines[name] = text[end:]
            if end:
                self._log.write(text[:end])
                self._log.flush()
                if self._rank == 0:
                    _write(descriptor, text[:end])

    def tail(self) -> str:
        """The end of this run's output."""
        self._log.seek(max(self._start, self._log.seek(0, os.SEEK_END) - TAIL_BYTES))
        return self._log.read().decode("utf-8", errors="replace")


def launch(plan: LaunchPlan) -> int:
    """Run `plan`; returns 0, the exit code of the rank that failed first, or 128 + N after signal N.

    Raises:
        GptlmError: if the logs cannot be written.
    """
    for line in plan.notes:
        _log(line)
    with ExitStack() as stack:
        try:
            plan.log_dir.mkdir(parents=True, exist_ok=True)
            passing = tempfile.TemporaryDirectory(prefix=".torchrun-", dir=plan.log_dir, ignore_cleanup_errors=True)
        except OSError as error:
            raise GptlmError(
                f"{named('log_dir')} {plan.log_dir} cannot be written to ({error.strerror}); give another "
                f"{named('log_dir')}"
            ) from error
        torchrun_dir = Path(stack.enter_context(passing)).absolute()
        logs = [plan.log_dir / f"workerlog.{rank}" for rank in range(plan.processes)]
        outputs = [
            stack.enter_context(closing(RankOutput(torchrun_dir, rank, path, plan.log_overwrite)))
            for rank, path in enumerate(logs)
        ]
        signals = stack.enter_context(signals_noted())
        torchrun_log = torchrun_dir / "torchrun.log"
        with no_process_left():
            code = _run_torchrun(plan, torchrun_dir, torchrun_log, outputs, signals)
        for output in outputs:
            output.copy(last=True)
        if code == 0:
            return 0
        if signals:
            _log(f"terminated by {signal.Signals(signals[0]).name}, which was forwarded to all ranks")
            return 128 + signals[0]
        return _report_failure(torchrun_log.read_text(encoding="utf-8", errors="replace"), code, outputs)


def _run_torchrun(
    plan: LaunchPlan, torchrun_dir: Path, torchrun_log: Path, outputs: list[RankOutput], signals: list[int]
) -> int:
    """Start torchrun, copy the output and forward signals until it ends; returns its exit code."""
    _log(plan.shown())
    if plan.nodes > 1:
        node = "this node" if plan.rank is None else f"node {plan.rank}"
        _log(f"{node} of {plan.nodes} connects to the others at {plan.master}:{plan.port}")
    redirected = {"PET_LOG_DIR": str(torchrun_dir), "PET_REDIRECTS": "3"}  # torchrun's --log-dir and --redirects
    with open(torchrun_log, "wb") as log:
        torchrun = subprocess.Popen(
            [sys.executable, "-m", "torch.distributed.run", *plan.torchrun()[1:]],
            env={**os.environ, **plan.environment(), **plan.secrets, **redirected},
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,  # else the terminal's Ctrl-C would reach the ranks a second time
            preexec_fn=terminate_with_parent,
        )
    forwarded, first = 0, 0.0
    while torchrun.poll() is None:
        for output in outputs:
            output.copy()
        if len(signals) > forwarded:
            number = signals[forwarded]
            if forwarded == 0:
                first = time.monotonic()
                _log(f"{signal.Signals(number).name}: forwarded to all ranks, which have {SECONDS_TO_END} s to end")
                _forward(torchrun, number, plan.processes)
            elif number == signal.SIGINT or time.monotonic() - first > TOGETHER:  # a second one does not wait
                torchrun.kill()
            forwarded += 1
        if forwarded and time.monotonic() - first > SECONDS_TO_END:
            _log(f"ranks that have not ended {SECONDS_TO_END} s after the signal are killed")
            torchrun.kill()
        time.sleep(POLL_INTERVAL)
    return torchrun.returncode


def _forward(torchrun: subprocess.Popen, number: int, processes: int) -> None:
    """Send signal `number` to each rank, or to torchrun, which kills ranks 30 s later, if it has not started all."""
    ranks = children_of(torchrun.pid)
    if len(ranks) != processes:
        torchrun.send_signal(number)
        return
    for rank in ranks:
        with suppress(ProcessLookupError):
            os.kill(rank, number)


def _report_failure(report: str, code: int, outputs: list[RankOutput]) -> int:
    """Log what failed, from torchrun's `report`; returns the exit code."""
    found = ROOT_CAUSE.search(report)
    if found is None:
        _log(
            f"error: torchrun failed with {_cause(code)} and names no rank; its output ends with\n{_last_lines(report)}"
        )
    else:
        rank, local_rank, code = map(int, found.groups())
        output = outputs[local_rank]
        if code in EXIT_CODES:
            name = signal.Signals(EXIT_CODES[code]).name
            _log(f"rank {rank} was ended by {name}, and the other ranks with it; its output is in {output.path}")
            return code
        _log(
            f"error: rank {rank} failed with {_cause(code)}, the other ranks were terminated; its output is in "
            f"{output.path}, the last lines are\n{_last_lines(output.tail())}"
        )
    return code if code >= 0 else 128 - code


def _cause(code: int) -> str:
    return f"exit code {code}" if code >= 0 else f"signal {signal.Signals(-code).name}"


def _last_lines(text: str) -> str:
    return "\n".join(f"    {line}" for line in text.splitlines()[-SHOWN_LINES:]) or "    (nothing)"


def _log(line: str) -> None:
    _write(2, f"gptlm launch: {line}\n".encode(errors="backslashreplace"))


def _write(descriptor: int, text: bytes) -> None:
    with suppress(OSError):  # a closed terminal does not end the run
        while text:
            text = text[os.write(descriptor, text) :]


def count_cards() -> int:
    """The number of GPUs on this machine, from nvidia-smi."""
    try:
        listed = subprocess.run(["nvidia-smi", "-L"], capture_output=True, text=True, timeout=60)
    except (OSError, subprocess.TimeoutExpired):
        return 0
    return sum(line.startswith("GPU ") for line in listed.stdout.splitlines())


def is_own(address: str) -> bool:
    """Whether `address` belongs to this machine: only those can be bound."""
    try:
        family, kind, _, _, address_and_port = socket.getaddrinfo(address, 0, type=socket.SOCK_STREAM)[0]
        with socket.socket(family, kind) as probe:
            probe.bind(address_and_port)
    except OSError:
        return False
    return True
