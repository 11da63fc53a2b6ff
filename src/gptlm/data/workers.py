"""Worker processes that apply one function to many items, in order, and always end with their parent."""

import os
import signal
import sys
import traceback
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import contextmanager
from functools import partial
from multiprocessing import get_context
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from multiprocessing.resource_tracker import ensure_running
from queue import SimpleQueue
from threading import current_thread, main_thread
from types import ModuleType
from typing import Any, Generic, TypeVar

from gptlm.errors import GptlmError
from gptlm.signals import held

ITEMS_AHEAD = 4  # items in flight per worker; bounds memory however many there are
SECONDS_BETWEEN_REPORTS = 0.5
BYTES_PER_WORKER = 8 << 20  # less text is not worth a process

Item = TypeVar("Item")
Result = TypeVar("Result")


class Workers(Generic[Item, Result]):
    """Up to `count` processes with a pipe each; `function` must be picklable and lie in an importable module.

    With `on_report`, `function(item, report)` can call `report(value)`, and `on_report` gets the value in the process
    and thread that waits for the results.
    """

    # Not ProcessPoolExecutor: its workers share one pipe, and it hangs if a worker is killed while sending a result.
    # Here the death of a worker closes its pipe.

    def __init__(self, count: int, function: Callable[..., Result], on_report: Callable[[Any], None] | None = None):
        self._count, self._function, self._on_report = count, function, on_report
        self._reports: SimpleQueue[Any] = SimpleQueue()
        self._context = get_context("spawn")  # a forked child would inherit the threads of tokenizers and hang
        self._processes: list[BaseProcess] = []
        self._idle: SimpleQueue[Connection] = SimpleQueue()

    def map(self, items: Iterable[Item]) -> Generator[Result, None, None]:
        """The results in the order of the items. Close the iterator to end the workers early.

        Raises:
            GptlmError: if a worker dies.
            Exception: what `function` raises, with the worker's traceback as a note.
        """
        threads = ThreadPoolExecutor(self._count)
        in_flight: deque = deque()
        try:
            for item in items:
                if len(self._processes) < self._count:
                    self._start()
                in_flight.append(threads.submit(self._ask, item))
                if len(in_flight) >= self._count * ITEMS_AHEAD:
                    yield self._result(in_flight.popleft())
            while in_flight:
                yield self._result(in_flight.popleft())
        finally:
            with interrupts_ignored():  # a second Ctrl-C must not interrupt the cleanup
                threads.shutdown(wait=False, cancel_futures=True)
                for process in self._processes:
                    process.terminate()
                threads.shutdown(wait=True)
                for process in self._processes:
                    process.join()

    def _result(self, future: Future) -> Result:
        while self._on_report is not None:
            done, _ = wait([future], timeout=SECONDS_BETWEEN_REPORTS)
            while not self._reports.empty():
                self._on_report(self._reports.get())
            if done:
                break
        return future.result()

    def _start(self) -> None:
        ours, theirs = self._context.Pipe()
        process = self._context.Process(
            target=_serve, args=(theirs, self._function, self._on_report is not None), daemon=True
        )
        ensure_running()  # otherwise process.start() starts it, which unblocks Ctrl-C
        with held(), _interrupts_deferred(), _main_hidden():
            process.start()
        self._processes.append(process)
        theirs.close()  # so that the pipe closes with the worker
        self._idle.put(ours)

    def _ask(self, item: Item) -> Result:
        connection = self._idle.get()
        try:
            connection.send(item)
            while (message := connection.recv())[0] == "report":
                self._reports.put(message[1])
            _, result, error = message
        except (EOFError, OSError) as end:
            raise GptlmError(
                f"one of the {self._count} worker processes died (killed, or out of memory); "
                "nothing was written, try fewer --workers"
            ) from end
        finally:
            self._idle.put(connection)
        if error is not None:
            raise error
        return result


def one_thread() -> None:
    """Switch off the threads of `tokenizers`, which would compete with the workers, unless the user has set them."""
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")


def _serve(connection: Connection, function: Callable, reports: bool) -> None:
    """The loop of a worker; it ends with its parent, because that closes the pipe."""
    one_thread()
    if reports:
        function = partial(_reporting, function, connection)
    try:
        while True:
            item = connection.recv()
            message: tuple[str, Any, Exception | None]
            try:
                message = ("result", function(item), None)
            except Exception as error:
                error.add_note(traceback.format_exc())
                message = ("result", None, error)
            connection.send(message)
    except (EOFError, OSError):
        return


def _reporting(function: Callable, connection: Connection, item: Any) -> Any:
    return function(item, lambda value: connection.send(("report", value)))


@contextmanager
def _main_hidden() -> Iterator[None]:
    """Processes started in the block do not import the program: it may be slow, or start a run when it is imported."""
    main = sys.modules["__main__"]
    sys.modules["__main__"] = ModuleType("__main__")
    try:
        yield
    finally:
        sys.modules["__main__"] = main


@contextmanager
def interrupts_ignored() -> Iterator[None]:
    """Ctrl-C has no effect inside the block."""
    if current_thread() is not main_thread():
        yield
        return
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


@contextmanager
def _interrupts_deferred() -> Iterator[None]:
    """Ctrl-C is deferred to the end of the block; processes started in it never get the signal."""
    if current_thread() is not main_thread():
        yield
        return
    received: list[int] = []
    # blocking alone is not enough: another thread gets the signal, and Python raises it in this one
    handler = signal.signal(signal.SIGINT, lambda number, _: received.append(number))
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        signal.signal(signal.SIGINT, handler)
        if received:
            signal.raise_signal(signal.SIGINT)
