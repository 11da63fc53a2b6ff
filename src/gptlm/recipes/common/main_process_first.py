"""Processes that wait for each other, no longer than `--ddp_timeout` seconds."""

import re
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta

import torch.distributed as dist

from gptlm.errors import GptlmError, named
from gptlm.ranks import local_rank, world_size
from gptlm.upstream.torch import default_store

TIMED_OUT = re.compile(r"tim(ed|e)[ -]?out", re.IGNORECASE)
LIBRARIES = re.compile("gloo|nccl|c10d|store", re.IGNORECASE)  # which say so in a plain RuntimeError, too


def init_gloo(seconds: int) -> None:
    """Join the process group over gloo where a launcher started several processes and none is open yet."""
    if world_size() > 1 and not dist.is_initialized():
        dist.init_process_group("gloo", timeout=timedelta(seconds=seconds))


@contextmanager
def explain_timeout(seconds: int) -> Iterator[None]:
    """A wait for other processes that took longer than `seconds` becomes one sentence.

    Raises:
        GptlmError: naming the flag.
    """
    try:
        yield
    except RuntimeError as error:
        text = str(error)
        if not TIMED_OUT.search(text) or not (isinstance(error, dist.DistError) or LIBRARIES.search(text)):
            raise
        raise GptlmError(
            f"another process let this one wait longer than {seconds} s: it is still at work (an index, a checkpoint) "
            f"or has ended; if it only needs time, give more seconds with {named('ddp_timeout')}"
        ) from error


@contextmanager
def main_process_first(what: str, seconds: int, *, per_node: bool) -> Iterator[None]:
    """Rank 0, or the first rank of each node, goes through the block alone; the others follow when it is done.

    They wait for an entry in the store by which the processes found each other: NCCL would end a process that waits
    too long without a word.

    Raises:
        GptlmError: on a rank that waited longer than `seconds`.
    """
    if not dist.is_initialized() or dist.get_world_size() == 1:
        yield
        return
    rank = dist.get_rank()
    first = rank - local_rank() if per_node else 0
    store = dist.PrefixStore(what, default_store())
    done = f"{first} is done {store.add(f'calls of {rank}', 1)}"  # every rank calls equally often
    if rank != first:
        _wait(store, done, what, first, seconds)
    try:
        yield
    finally:
        if rank == first:
            store.set(done, "")


def _wait(store: dist.Store, key: str, what: str, first: int, seconds: int) -> None:
    try:
        store.wait([key], timedelta(seconds=seconds))
    except RuntimeError as error:
        if not TIMED_OUT.search(str(error)):
            raise
        raise GptlmError(
            f"rank {first} makes {what} for longer than {seconds} s, and this process waits no longer; give more "
            f"seconds with {named('ddp_timeout')}, or make it ahead with gptlm data index"
        ) from error
