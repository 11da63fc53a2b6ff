"""What fails in one process while all of them save fails in all: none waits for one that has given up."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch.distributed as dist

from gptlm.disk import is_write_error, write_reason
from gptlm.errors import GptlmError


@contextmanager
def together(what: str, group: Any = None) -> Iterator[None]:
    """A part of saving, in all processes. Their collective operations in it have to end although writing fails.

    Args:
        what: is saved, for messages.

    Raises:
        Exception: what the block raises.
        GptlmError: naming the rank, if the block of another process has raised.
    """
    error: Exception | None = None
    try:
        yield
    except Exception as caught:
        if not is_write_error(caught):  # such as a lost process: nothing can be agreed on
            raise
        error = caught
    agree(error, what, group)


def agree(error: Exception | None, what: str, group: Any = None) -> None:
    """Raises on all processes if one has an error; waits for all."""
    reason = None if error is None else write_reason(error)
    reasons: list[str | None] = [reason]
    if dist.is_initialized() and dist.get_world_size() > 1:
        reasons = [None] * dist.get_world_size()
        dist.all_gather_object(reasons, reason, group=group)
    if error is not None:
        raise error
    for rank, found in enumerate(reasons):
        if found is not None:
            raise GptlmError(f"rank {rank} cannot write its part of {what}: {found}")
