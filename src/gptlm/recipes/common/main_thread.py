"""Generation in the main thread for requests of other threads, one after the other.

Only there signals interrupt it, and only there the time of a chat template is limited.
"""

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from queue import Empty, Full, Queue, SimpleQueue
from threading import Event
from typing import Any

ALIVE = 0.5  # seconds between two looks whether a request is still wanted


class BusyError(Exception):
    """Too many requests wait."""


@dataclass
class _Job:
    make: Callable[[], Iterator[Any]]
    results: SimpleQueue = field(default_factory=SimpleQueue)  # (an item,), an exception, or None at the end
    abandoned: Event = field(default_factory=Event)


class MainThread:
    """A queue of iterators that the main thread runs, while others read what they yield.

    Args:
        most_waiting: requests that may wait.
    """

    def __init__(self, most_waiting: int):
        self._jobs: Queue[_Job] = Queue(most_waiting)

    def run(self) -> None:
        """In the main thread: run iterators until an exception such as KeyboardInterrupt comes from outside."""
        while True:
            self._run(self._jobs.get())

    def _run(self, job: _Job) -> None:
        if job.abandoned.is_set():
            return
        try:
            for item in job.make():
                job.results.put((item,))
                if job.abandoned.is_set():
                    break  # the iterator is closed with its last reference
        except Exception as error:
            job.results.put(error)
        finally:
            job.results.put(None)

    def stream(self, make: Callable[[], Iterator[Any]], is_wanted: Callable[[], bool] = lambda: True) -> Iterator[Any]:
        """In another thread: what the iterator that `make` returns yields in the main thread, and its exception.

        Closing this iterator, or `is_wanted` returning False, ends the other one at its next item.

        Raises:
            BusyError: if too many requests wait.
        """
        job = _Job(make)
        try:
            self._jobs.put_nowait(job)
        except Full as error:
            raise BusyError("too many requests wait") from error
        try:
            looked = time.monotonic()
            while True:
                if time.monotonic() - looked >= ALIVE:
                    if not is_wanted():
                        return
                    looked = time.monotonic()
                try:
                    found = job.results.get(timeout=ALIVE)
                except Empty:
                    continue
                if found is None:
                    return
                if isinstance(found, Exception):
                    raise found
                yield found[0]
        finally:
            job.abandoned.set()
