"""Processes that wait for each other, no longer than `--ddp_timeout` seconds."""

import json
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta

import torch.distributed as dist

from gptlm.errors import GptlmError, named, reason_of
from gptlm.ranks import is_main_process, local_rank, rank, world_size
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
        from gptlm.recipes.common.heartbeat import missing_rank  # imports transformers' Trainer

        if found := missing_rank(seconds):
            raise GptlmError(
                f"{found}; if it only needs time, give more seconds with {named('ddp_timeout')}"
            ) from error
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
    own = dist.get_rank()
    first = own - local_rank() if per_node else 0
    store = dist.PrefixStore(what, default_store())
    done = f"{first} is done {store.add(f'calls of {own}', 1)}"  # every rank calls equally often
    if own != first:
        _wait(store, done, f"makes {what}", first, seconds, ", or make it ahead with gptlm data index")
    try:
        yield
    finally:
        if own == first:
            store.set(done, "")


@contextmanager
def early_store(seconds: int) -> Iterator[dist.Store | None]:
    """What the processes of a launcher exchange before they have a process group; None with a single process.

    Without torchrun rank 0 serves it, at the address that the process group takes later: the block contains both.
    """
    if world_size() == 1:
        yield None
    elif dist.is_initialized():
        yield default_store()
    else:
        with explain_timeout(seconds):
            store, _, _ = next(dist.rendezvous("env://", timeout=timedelta(seconds=seconds)))
        yield store


def told_by_main(store: dist.Store | None, what: str, seconds: int, find: Callable[[], str | None]) -> str | None:
    """What `find` returns on rank 0, told to all; every rank raises the GptlmError that it raises there.

    Args:
        store: of `early_store`.
        what: is found, for messages.

    Raises:
        GptlmError: also on a rank that waited longer than `seconds`.
    """
    if store is None:
        return find()
    shared = dist.PrefixStore(what, store)
    key = f"answer {shared.add(f'calls of {rank()}', 1)}"  # every rank calls equally often
    if not is_main_process():
        _wait(shared, key, f"looks for {what}", 0, seconds)
        answer = json.loads(shared.get(key))
        if answer["error"] is not None:
            raise GptlmError(answer["error"])
        return answer["found"]
    answer = {"found": None, "error": "rank 0 failed"}
    try:
        answer = {"found": find(), "error": None}
    except Exception as error:
        answer["error"] = error.marked if isinstance(error, GptlmError) else reason_of(error)
        raise
    finally:
        shared.set(key, json.dumps(answer))
    return answer["found"]


def _wait(store: dist.Store, key: str, what: str, first: int, seconds: int, more: str = "") -> None:
    try:
        store.wait([key], timedelta(seconds=seconds))
    except RuntimeError as error:
        if not TIMED_OUT.search(str(error)):
            raise
        raise GptlmError(
            f"rank {first} {what} for longer than {seconds} s, and this process waits no longer; give more seconds "
            f"with {named('ddp_timeout')}{more}"
        ) from error
