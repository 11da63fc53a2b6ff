"""Processes that wait for each other, no longer than `--ddp_timeout` seconds."""

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta

import torch.distributed as dist

from gptlm.errors import GptlmError, named, reason_of
from gptlm.ranks import is_main_process, local_rank, rank
from gptlm.recipes.common.peers import TIMED_OUT, Peers
from gptlm.upstream.torch import default_store


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


def told_by_main(peers: Peers | None, what: str, find: Callable[[], str | None]) -> str | None:
    """What `find` returns on rank 0, told to all; every rank raises the GptlmError that it raises there.

    Args:
        peers: of `find_peers`.
        what: is found, for messages.

    Raises:
        GptlmError: also on a rank that waited longer than `--ddp_timeout`.
    """
    if peers is None:
        return find()
    shared = dist.PrefixStore(what, peers.store)
    key = f"answer {shared.add(f'calls of {rank()}', 1)}"  # every rank calls equally often
    if not is_main_process():
        _wait(shared, key, f"looks for {what}", 0, peers.seconds)
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
