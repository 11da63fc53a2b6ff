"""Worker processes: order, errors, and the death of one at any moment."""

import os
import signal
import threading
import time
from contextlib import closing
from functools import partial

import psutil
import pytest

from gptlm.data.workers import Workers
from gptlm.errors import GptlmError


def work(item: int) -> int | bytes:
    """Item 7 cannot be done; 8 ends its process by SIGKILL; 9 does so while its long answer is under way."""
    if item == 7:
        raise ValueError("seven cannot be done")
    if item == 8:
        os.kill(os.getpid(), signal.SIGKILL)
    if item == 9:
        threading.Thread(target=lambda: (time.sleep(0.03), os.kill(os.getpid(), signal.SIGKILL))).start()
        return Slow()
    return item * item


class Slow(bytes):
    """An answer whose pickle is longer than a pipe holds, and of which the reader takes its time."""

    def __reduce__(self):
        return bytes, (bytes(1 << 28),)


def test_answers_keep_the_order_of_the_items():
    assert list(Workers(3, work).map(iter([1, 2, 3, 4, 5, 6] * 5))) == [1, 4, 9, 16, 25, 36] * 5
    assert not workers_alive()


def test_what_a_worker_raises_arrives_with_its_traceback():
    with pytest.raises(ValueError, match="seven cannot be done") as caught:
        list(Workers(2, work).map([1, 7, 2]))
    assert "in work" in caught.value.__notes__[0]


def telling(item, report):
    report(("half", item))
    return work(item)


def test_reports_come_before_their_answers_in_the_thread_that_waits():
    told, thread = [], threading.get_ident()
    answers = Workers(2, telling, lambda value: told.append((value, threading.get_ident()))).map([1, 2, 3])
    for answer in answers:
        assert (("half", int(answer**0.5)), thread) in told
    assert len(told) == 3
    with pytest.raises(GptlmError, match="worker processes died"):
        list(Workers(2, telling, told.append).map([1, 8]))


@pytest.mark.parametrize("deadly", [8, 9])
def test_the_death_of_a_worker_is_an_error_whatever_it_was_doing(deadly):
    with pytest.raises(GptlmError, match="one of the 2 worker processes died"):
        list(Workers(2, work).map([1, deadly, 2, 3]))


def test_an_answer_that_nobody_waits_for_ends_the_workers():
    with closing(Workers(2, partial(pow, 2)).map(range(100))) as answers:
        assert next(answers) == 1
    assert not workers_alive()


def workers_alive() -> list[psutil.Process]:
    return [child for child in psutil.Process().children() if "spawn_main" in " ".join(child.cmdline())]
