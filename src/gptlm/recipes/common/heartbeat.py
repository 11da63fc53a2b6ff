"""Which rank lets the others wait: all ranks write signs of life into the store by which they found each other."""

import os
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from threading import Event, Thread
from typing import Any

import torch.distributed as dist

INTERVAL = 1.0  # seconds between signs of life
PATIENCE = timedelta(seconds=5)  # for an answer of the store


class Heartbeat:
    """Writes "COUNT STEP" of this rank into the store every second, in a thread, until `end`.

    Args:
        store: of the processes of this start alone.
        seconds: how long a rank waits for another one.
        is_served_by_rank_0: whether the store ends with rank 0; else a launcher has it.

    Attributes:
        ends: a rank without a sign of life for `seconds` ends this process with its number, as it must where the
            wait is one for a lock of that rank, or NCCL's, which would abort without a number. gloo raises an error,
            for which `missing_rank` finds the rank.
    """

    def __init__(self, store: dist.Store, rank: int, world: int, seconds: int, *, is_served_by_rank_0: bool):
        self._step: Callable[[], int] = int
        self.ends = True
        self._rank, self._world, self._seconds = rank, world, seconds
        self._is_served_by_rank_0 = is_served_by_rank_0
        self._source = store
        self._store = self._connect()
        self._store.set(str(rank), "0 0")
        self._ended = Event()
        self._thread = Thread(target=self._run, name="heartbeat", daemon=True)
        self._thread.start()

    def follow(self, step: Callable[[], int]) -> None:
        """From now on `step` tells the step of the training."""
        self._step = step

    def end(self) -> None:
        """A daemon thread that returns from C++ while the interpreter ends would abort the process (SIGABRT)."""
        self._ended.set()
        self._thread.join()

    def missing_rank(self) -> str | None:
        """Why this rank waited in vain, with the number of the rank it waited for; None: not known.

        Called by each rank whose wait has ended after `seconds`. The others are those that let it wait.
        """
        try:
            store = self._connect()
            store.set(f"waited {self._rank}", "")
            before = [_beat(store, other) for other in range(self._world)]
            time.sleep(2.5 * INTERVAL)
            after = [_beat(store, other) for other in range(self._world)]
            busy = [other for other in range(self._world) if not store.check([f"waited {other}"])]
        except RuntimeError:
            if self._is_served_by_rank_0 and self._rank > 0:
                return f"rank 0 does not answer for {self._seconds} s: its process is stopped or has ended"
            return None
        for other in busy:
            if before[other] == after[other]:
                return _stopped(other, after[other], self._seconds)
        if not busy:
            return None
        slowest = min(busy, key=lambda other: _step(after[other]))
        return (
            f"rank {slowest} lets the others wait longer than {self._seconds} s: it hangs, or is still at work, after "
            f"step {_step(after[slowest])}"
        )

    def _connect(self) -> dist.Store:
        """A connection of its own: another one may be waiting."""
        shared: Any = dist.PrefixStore("heartbeat", self._source)
        store: dist.Store = shared.clone()
        store.set_timeout(PATIENCE)
        return store

    def _run(self) -> None:
        count = 0
        seen: dict[int, tuple[str, float]] = {}
        with suppress(RuntimeError):  # the store ends with the run
            while not self._ended.wait(INTERVAL):
                count += 1
                self._store.set(str(self._rank), f"{count} {self._step()}")
                for other in range(self._world) if self.ends else ():
                    beat, now = _beat(self._store, other), time.monotonic()
                    if seen.get(other, ("", 0.0))[0] != beat:
                        seen[other] = (beat, now)
                    elif beat and now - seen[other][1] > self._seconds:
                        text = _stopped(other, beat, self._seconds)
                        sys.stderr.write(f"gptlm: rank {self._rank}: error: {text}\n")
                        sys.stderr.flush()
                        os._exit(1)


def _beat(store: dist.Store, rank: int) -> str:
    """The last sign of life of `rank`, "COUNT STEP"; "" before the first."""
    return store.get(str(rank)).decode() if store.check([str(rank)]) else ""


def _step(beat: str) -> int:
    return int((beat or "0 0").split()[1])


def _stopped(rank: int, beat: str, seconds: int) -> str:
    step = _step(beat)
    where = f" after step {step}" if step else ""
    return (
        f"rank {rank} lets the others wait longer than {seconds} s and gives no sign of life{where}: its process is "
        "stopped, or its machine is gone"
    )
