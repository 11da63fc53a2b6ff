"""Ends training after a signal, at a step that all processes agree on."""

import signal
from collections import deque
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from gptlm.ranks import is_main_process
from gptlm.signals import Terminated, installed

HANGUP = 1 << 20  # SIGHUP among the counted signals; SIGTERM is 1


class SignalStop:
    """Which signal ends the run, the same on every process.

    The signals that processes have received are summed in the all-reduce that counts the targets of a step, so sharing
    them takes no communication of its own. On a GPU the sum is read one step later, when the host need not wait for it.

    Args:
        saves: whether a checkpoint is written first.

    Attributes:
        number: the signal; None: none yet.
        saved: step of the last checkpoint, and what it notes as `evaluation_is_due`.
        evaluation_is_due: the evaluation of this step was not finished; a resumed run begins with it.
    """

    def __init__(self, world_size: int, device: torch.device, *, saves: bool):
        self.saves, self.evaluation_is_due = saves, False
        self.number: int | None = None
        self.saved: tuple[int, bool] | None = None
        self._world, self._device = world_size, device
        self._delay = 1 if device.type == "cuda" else 0  # steps
        self._unread: deque[tuple[Tensor, Any]] = deque()

    def share(self, count: int) -> Tensor:
        """`count` summed over the processes, () int64 on the device. Signals go with it."""
        if self._world == 1:
            return torch.full((), count, dtype=torch.int64, device=self._device)
        totals = torch.full((2,), count, dtype=torch.int64, device=self._device)
        totals[1].fill_(0 if self._received is None else HANGUP if self._received == signal.SIGHUP else 1)
        dist.all_reduce(totals)
        signals, copied = totals[1], None
        if self._device.type == "cuda":
            signals = torch.empty((), dtype=torch.int64, pin_memory=True)
            signals.copy_(totals[1], non_blocking=True)
            copied = torch.cuda.Event()
            copied.record()
        self._unread.append((signals, copied))
        return totals[0]

    def look(self) -> None:
        """Set `number` if a signal was shared; called after each `share`."""
        if self._world == 1:
            self.number = self.number or self._received
        while len(self._unread) > self._delay:
            self._read()

    def agree(self) -> None:
        """Set `number` if a process has a signal by now; waits for the device."""
        if self._world > 1 and self.number is None:
            self._unread.clear()  # a later sum has every earlier signal
            self.share(0)
            self._read()
        self.look()

    def end_evaluation(self) -> None:
        """Called for each batch of an evaluation. Raises Terminated on all processes if one has a signal."""
        if self._world > 1:
            self.share(0)
        self.look()
        if self.number is not None:
            raise Terminated(self.number, is_shown=is_main_process())

    def ended(self, detail: str) -> Terminated:
        """What ends the run, to be raised. From here on, further signals have no effect."""
        if handler := installed():
            handler.is_ending = True
        return Terminated(self.number or signal.SIGTERM, detail, is_shown=is_main_process())

    def _read(self) -> None:
        signals, copied = self._unread.popleft()
        if copied is not None:
            copied.synchronize()
        total = int(signals)
        if total and self.number is None:
            self.number = signal.SIGTERM if total % HANGUP else signal.SIGHUP

    @property
    def _received(self) -> int | None:
        handler = installed()
        return handler.received if handler else None
