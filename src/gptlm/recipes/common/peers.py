"""The other processes of a run: how they find each other, and waits of no longer than `--ddp_timeout` seconds."""

import os
import re
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from uuid import uuid4

import torch.distributed as dist

from gptlm.errors import GptlmError, named
from gptlm.ranks import rank, world_size
from gptlm.recipes.common.heartbeat import Heartbeat
from gptlm.upstream.torch import default_store

TIMED_OUT = re.compile(r"tim(ed|e)[ -]?out", re.IGNORECASE)
LIBRARIES = re.compile("gloo|nccl|c10d|store", re.IGNORECASE)  # which say so in a plain RuntimeError, too
FIRST_POLL, LAST_POLL = 0.01, 0.5  # seconds


@dataclass(frozen=True)
class Peers:
    """The processes that a launcher started together.

    Attributes:
        store: what they exchange before they have a process group, and make it with. torchrun keeps one store for all
            its restarts; this one has nothing that processes before a restart left behind.
        heartbeat: their signs of life.
        seconds: how long one waits for another.
    """

    store: dist.Store
    heartbeat: Heartbeat
    seconds: int

    def publish(self, what: str, text: str) -> None:
        """Let the others know something about this process."""
        self.store.set(f"{what} of {rank()}", text)

    def collect(self, what: str) -> list[str]:
        """What all processes have published, by rank; waits for them."""
        return [self.store.get(f"{what} of {other}").decode() for other in range(world_size())]

    def init_group(self, backend: str) -> None:
        """Join the process group, if none is open yet."""
        if not dist.is_initialized():
            limit = timedelta(seconds=self.seconds)
            dist.init_process_group(backend, store=self.store, rank=rank(), world_size=world_size(), timeout=limit)


@contextmanager
def find_peers(seconds: int) -> Iterator[Peers | None]:
    """Wait until all processes of the launcher have started; None with a single process.

    Inside, a wait for another process that takes longer than `seconds` becomes a GptlmError.

    Without torchrun rank 0 serves the store, at the address that the launcher has set.
    """
    if world_size() == 1:
        yield None
        return
    with explain_timeout(seconds):
        limit = timedelta(seconds=seconds)
        shared = default_store() if dist.is_initialized() else next(dist.rendezvous("env://", timeout=limit))[0]
        store = _store_of_this_start(shared, seconds)
    is_served = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True"
    heartbeat = Heartbeat(store, rank(), world_size(), seconds, is_served_by_rank_0=is_served)
    try:
        with explain_timeout(seconds, heartbeat):
            yield Peers(store, heartbeat, seconds)
    finally:
        heartbeat.end()


def _store_of_this_start(shared: dist.Store, seconds: int) -> dist.Store:
    """The part of `shared` that only the processes of this start use.

    Rank 0 makes a name. The others ask for it under a name of their own, so that no answer of an earlier start counts.

    Raises:
        GptlmError: naming a rank that has not started within `seconds`.
    """
    own, others = uuid4().hex, range(1, world_size())
    deadline, pause = time.monotonic() + seconds, FIRST_POLL
    if rank() > 0:
        shared.set(f"asked by {rank()}", own)
    while True:
        if rank() > 0:
            missing = [] if shared.check([f"answer to {own}"]) else [0]
        else:
            missing = [other for other in others if not shared.check([f"{own} has {other}"])]
            for other in missing:
                if shared.check([f"asked by {other}"]):
                    shared.set(f"answer to {shared.get(f'asked by {other}').decode()}", own)
        if not missing:
            break
        if time.monotonic() > deadline:
            raise GptlmError(
                f"rank {missing[0]} has not started within {seconds} s; if it only needs time, give more seconds with "
                f"{named('ddp_timeout')}"
            )
        time.sleep(pause)
        pause = min(2 * pause, LAST_POLL)
    if rank() == 0:
        return dist.PrefixStore(own, shared)
    name = shared.get(f"answer to {own}").decode()
    shared.set(f"{name} has {rank()}", "")
    return dist.PrefixStore(name, shared)


@contextmanager
def explain_timeout(seconds: int, heartbeat: Heartbeat | None = None) -> Iterator[None]:
    """A wait for other processes that took longer than `seconds` becomes one sentence.

    Raises:
        GptlmError: naming the flag, and the rank where `heartbeat` knows it.
    """
    try:
        yield
    except RuntimeError as error:
        text = str(error)
        if not TIMED_OUT.search(text) or not (isinstance(error, dist.DistError) or LIBRARIES.search(text)):
            raise
        found = heartbeat.missing_rank() if heartbeat else None
        found = found or (
            f"another process let this one wait longer than {seconds} s: it is still at work (an index, a checkpoint) "
            "or has ended"
        )
        raise GptlmError(f"{found}; if it only needs time, give more seconds with {named('ddp_timeout')}") from error
