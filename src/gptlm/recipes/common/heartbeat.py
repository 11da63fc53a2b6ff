"""Which rank lets the others wait: all ranks write signs of life into the store by which they found each other."""

import atexit
import os
import sys
import time
from contextlib import suppress
from datetime import timedelta
from threading import Event, Thread
from typing import Any

import torch.distributed as dist
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from gptlm.errors import GptlmError
from gptlm.upstream.torch import default_store

INTERVAL = 1.0  # seconds between signs of life
PATIENCE = timedelta(seconds=5)  # for an answer of the store


class Heartbeat(TrainerCallback):
    """Writes "COUNT STEP" of this rank into the store every second, in a thread.

    Args:
        seconds: with `ends`, a rank without a sign of life for so long ends this process with its number: NCCL would
            abort it without one. gloo raises an error, for which `missing_rank` finds the rank.
    """

    def __init__(self, seconds: int, *, ends: bool):
        self.step, self._seconds, self._ends = 0, seconds, ends
        self._store = _open_store()
        self._store.set(str(dist.get_rank()), "0 0")
        self._ended = Event()
        thread = Thread(target=self._run, name="heartbeat", daemon=True)
        thread.start()
        atexit.register(_end, self._ended, thread)

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        self.step = state.global_step

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        self.step = state.global_step

    def _run(self) -> None:
        rank, world, count = dist.get_rank(), dist.get_world_size(), 0
        seen: dict[int, tuple[str, float]] = {}
        with suppress(RuntimeError):  # the store ends with the run
            while dist.is_initialized():
                if self._ended.wait(INTERVAL):
                    return
                count += 1
                self._store.set(str(rank), f"{count} {self.step}")
                for other in range(world) if self._ends else ():
                    beat, now = _beat(self._store, other), time.monotonic()
                    if seen.get(other, ("", 0.0))[0] != beat:
                        seen[other] = (beat, now)
                    elif beat and now - seen[other][1] > self._seconds:
                        sys.stderr.write(f"gptlm: rank {rank}: error: {_stopped(other, beat, self._seconds)}\n")
                        sys.stderr.flush()
                        os._exit(1)


def _end(ended: Event, thread: Thread) -> None:
    """A daemon thread that returns from C++ while the interpreter ends would abort the process (SIGABRT)."""
    ended.set()
    thread.join()


def missing_rank(seconds: int) -> str | None:
    """Why this rank waited in vain, with the number of the rank it waited for; None: not known.

    Called by each rank whose wait has ended after `seconds`. The others are those that let it wait.
    """
    if not dist.is_initialized():
        return None
    rank, world = dist.get_rank(), dist.get_world_size()
    try:
        store = _open_store()
        if not _beat(store, rank):
            return None
        store.set(f"waited {rank}", "")
        before = [_beat(store, other) for other in range(world)]
        time.sleep(2.5 * INTERVAL)
        after = [_beat(store, other) for other in range(world)]
        busy = [other for other in range(world) if not store.check([f"waited {other}"])]
    except (RuntimeError, GptlmError):
        return None
    for other in busy:
        if before[other] == after[other]:
            return _stopped(other, after[other], seconds)
    if not busy:
        return None
    slowest = min(busy, key=lambda other: _step(after[other]))
    return (
        f"rank {slowest} lets the others wait longer than {seconds} s: it hangs, or is still at work, after step "
        f"{_step(after[slowest])}"
    )


def _open_store() -> dist.Store:
    """A connection of its own: another one may be waiting."""
    shared: Any = dist.PrefixStore("heartbeat", default_store())
    store: dist.Store = shared.clone()
    store.set_timeout(PATIENCE)
    return store


def _beat(store: dist.Store, rank: int) -> str:
    """The last sign of life of `rank`, "COUNT STEP"; "" before the first."""
    return store.get(str(rank)).decode() if store.check([str(rank)]) else ""


def _step(beat: str) -> int:
    return int((beat or "0 0").split()[1])


def _stopped(rank: int, beat: str, seconds: int) -> str:
    return (
        f"rank {rank} lets the others wait longer than {seconds} s and gives no sign of life after step {_step(beat)}: "
        "its process is stopped, or its machine is gone"
    )
