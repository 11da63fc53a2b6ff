"""Locks: one process has one at a time, the file goes with it, and files of others stay as they are."""

import multiprocessing
import os
import signal
import time
from collections.abc import Callable
from multiprocessing.context import SpawnProcess
from pathlib import Path

import pytest

from gptlm.locks import CONTENT, Lock, locked


def test_a_lock_excludes_others_and_its_file_goes_with_it(tmp_path):
    path = tmp_path / ".lock"
    with locked(path):
        assert path.read_bytes() == CONTENT and not Lock(path).acquire()
        with pytest.raises(BlockingIOError, match="another process has the lock"), locked(path):
            pass
    assert not path.exists()
    with pytest.raises(KeyError), locked(path):
        raise KeyError
    assert not path.exists()


@pytest.mark.parametrize("content", ["mine", "", CONTENT.decode() + "and more"])
def test_a_file_of_others_stays_as_it_is(tmp_path, content):
    path = tmp_path / ".lock"
    path.write_text(content)
    before = path.stat()
    with locked(path):
        assert not Lock(path).acquire()
    assert path.read_text() == content and path.stat().st_mtime_ns == before.st_mtime_ns


def test_what_cannot_be_locked_stays_as_it_is(tmp_path):
    (tmp_path / "mine").write_text("mine")
    (tmp_path / "link.lock").symlink_to(tmp_path / "mine")
    (tmp_path / "folder.lock").mkdir()
    for name in ("link.lock", "folder.lock", "no/file.lock"):
        with pytest.raises(OSError, match=name), locked(tmp_path / name):
            pass
    assert sorted(path.name for path in tmp_path.iterdir()) == ["folder.lock", "link.lock", "mine"]
    assert (tmp_path / "mine").read_text() == "mine"


def holding(folder: Path, hold: Callable[[Path], None]) -> SpawnProcess:
    """A process in `hold`, which has the lock and has made the file `held`."""
    process = multiprocessing.get_context("spawn").Process(target=hold, args=(folder / ".lock",))
    process.start()
    while not (folder / "held").exists():
        assert process.is_alive()
        time.sleep(0.01)
    return process


def _hold(path: Path) -> None:
    with locked(path):
        path.with_name("held").touch()
        time.sleep(60)


def test_the_lock_of_a_killed_process_is_free_and_its_file_is_removed_by_the_next(tmp_path):
    process = holding(tmp_path, _hold)
    assert not Lock(tmp_path / ".lock").acquire()
    os.kill(process.pid, signal.SIGKILL)
    process.join()
    assert (tmp_path / ".lock").exists()
    with locked(tmp_path / ".lock"):
        pass
    assert not (tmp_path / ".lock").exists()


def _hold_and_fork(path: Path) -> None:
    with locked(path):
        child = os.fork()
        if child == 0:
            os.setsid()
            time.sleep(60)
            os._exit(0)
        path.with_name("child").write_text(str(child))
        path.with_name("held").touch()
        time.sleep(60)


def test_forked_processes_do_not_keep_the_lock_of_a_killed_process(tmp_path):
    process = holding(tmp_path, _hold_and_fork)
    os.kill(process.pid, signal.SIGKILL)
    process.join()
    child = int((tmp_path / "child").read_text())
    try:
        os.kill(child, 0)
        with locked(tmp_path / ".lock"):
            pass
    finally:
        os.kill(child, signal.SIGKILL)


def _count(path: Path) -> None:
    for _ in range(20):
        with locked(path, wait=True):
            number = int(path.with_name("number").read_text())
            path.with_name("number").write_text(str(number + 1))


def test_waiting_processes_take_turns_although_the_file_is_removed_each_time(tmp_path):
    (tmp_path / "number").write_text("0")
    context = multiprocessing.get_context("fork")
    processes = [context.Process(target=_count, args=(tmp_path / ".lock",)) for _ in range(3)]
    for process in processes:
        process.start()
    for process in processes:
        process.join(60)
    assert (tmp_path / "number").read_text() == "60" and not (tmp_path / ".lock").exists()
