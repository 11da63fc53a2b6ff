"""Folders that are built once: kept, found again, never half, rebuilt where damaged, by one process at a time."""

import errno
import fcntl
import json
import logging
import multiprocessing
import os
import signal
import time
from pathlib import Path

import pytest

from gptlm.data.folder_cache import DESCRIPTION, FolderCache
from gptlm.errors import GptlmError


def read(folder: Path) -> str:
    text = (folder / "text").read_text()
    if "?" in text:
        raise ValueError("a question mark")
    return text


def builder(text, calls=None):
    def build(folder):
        (folder / "text").write_text(text)
        if calls is not None:
            calls.append(text)
        return {"length": len(text)}

    return build


def entries(folder):
    return sorted(path.name for path in folder.iterdir())


def test_an_entry_is_built_once_and_another_description_is_another_entry(tmp_path):
    cache, calls = FolderCache([tmp_path / "new" / "folder"], read), []
    for _ in range(2):
        assert cache.load_or_build({"a": 1}, builder("one", calls)) == ("one", {"length": 3})
    assert cache.load_or_build({"a": 2}, builder("three", calls)) == ("three", {"length": 5})
    assert calls == ["one", "three"] and len(entries(tmp_path / "new" / "folder")) == 2


@pytest.mark.parametrize("how", ["short", "longer", "description", "other", "content", "missing"])
def test_a_damaged_entry_is_built_again_with_a_warning(tmp_path, caplog, how):
    cache, calls = FolderCache([tmp_path], read), []
    cache.load_or_build({"a": 1}, builder("one", calls))
    (name,) = entries(tmp_path)
    folder = tmp_path / name
    entry = json.loads((folder / DESCRIPTION).read_text())
    match how:
        case "short" | "longer":
            (folder / "text").write_text("on" if how == "short" else "ones")
        case "description":
            (folder / DESCRIPTION).write_text("{")
        case "other":
            (folder / DESCRIPTION).write_text(json.dumps(entry | {"of": {"a": 3}}))
        case "content":
            (folder / "text").write_text("on?")
        case "missing":
            (folder / "text").unlink()
    with caplog.at_level(logging.WARNING):
        assert cache.load_or_build({"a": 1}, builder("one", calls))[0] == "one"
    assert calls == ["one", "one"] and caplog.text.count("is damaged") == 1
    caplog.clear()
    assert cache.load_or_build({"a": 1}, builder("one", calls))[0] == "one" and calls == ["one", "one"]
    assert caplog.text == ""


def test_a_failure_while_building_leaves_nothing(tmp_path):
    def build(folder):
        (folder / "text").write_text("half")
        raise GptlmError("line 7 is broken")

    with pytest.raises(GptlmError, match="line 7 is broken"):
        FolderCache([tmp_path], read).load_or_build({}, build)
    assert entries(tmp_path) == []


def _build_slowly(folder: Path) -> None:
    def build(inner):
        (inner / "text").write_text("half")
        (folder / "building").touch()
        time.sleep(60)
        return {}

    FolderCache([folder / "cache"], read).load_or_build({}, build)


def test_killed_while_building_leaves_nothing_usable(tmp_path):
    process = multiprocessing.get_context("spawn").Process(target=_build_slowly, args=(tmp_path,))
    process.start()
    while not (tmp_path / "building").exists():
        assert process.is_alive()
        time.sleep(0.01)
    os.kill(process.pid, signal.SIGKILL)
    process.join()
    lock, left = sorted(entries(tmp_path / "cache"), key=lambda name: name.endswith(".incomplete"))
    assert left.endswith(".incomplete") and lock.endswith(".lock")
    assert FolderCache([tmp_path / "cache"], read).load_or_build({}, builder("whole"))[0] == "whole"
    (name,) = entries(tmp_path / "cache")
    assert not name.endswith(".incomplete")


def _build_and_count(folder: Path, number: int) -> None:
    def build(inner):
        (folder / f"built-{number}").touch()
        time.sleep(0.5)
        (inner / "text").write_text("same")
        return {}

    found, _ = FolderCache([folder / "cache"], read).load_or_build({}, build, first=number == 1)
    (folder / f"read-{number}-{found}").touch()


def test_of_two_processes_at_once_the_first_builds_and_the_other_waits(tmp_path):
    context = multiprocessing.get_context("spawn")
    processes = [context.Process(target=_build_and_count, args=(tmp_path, number)) for number in (0, 1)]
    processes[0].start()
    time.sleep(0.3)
    processes[1].start()
    for process in processes:
        process.join(60)
        assert process.exitcode == 0
    assert {path.name for path in tmp_path.iterdir()} == {"cache", "built-1", "read-0-same", "read-1-same"}


def _no_locks(*arguments):
    raise OSError(errno.ENOLCK, "No locks available")


def _build_until(folder: Path) -> None:
    fcntl.flock = _no_locks

    def build(inner):
        (inner / "text").write_text("same")
        (folder / "building").touch()
        while not (folder / "go on").exists():
            time.sleep(0.01)
        return {}

    assert FolderCache([folder / "cache"], read).load_or_build({}, build)[0] == "same"


def test_without_locks_each_process_builds_and_one_entry_stays(tmp_path, monkeypatch):
    """As on Lustre without `-o flock`."""
    process = multiprocessing.get_context("spawn").Process(target=_build_until, args=(tmp_path,))
    process.start()
    while not (tmp_path / "building").exists():
        assert process.is_alive()
        time.sleep(0.01)
    monkeypatch.setattr(fcntl, "flock", _no_locks)
    assert FolderCache([tmp_path / "cache"], read).load_or_build({}, builder("same"))[0] == "same"
    (tmp_path / "go on").touch()
    process.join(60)
    assert process.exitcode == 0
    assert len(entries(tmp_path / "cache")) == 1


def test_the_first_folder_that_can_be_written_is_taken(tmp_path):
    (tmp_path / "file").write_text("")
    cache = FolderCache([tmp_path / "file" / "x", tmp_path / "ok"], read)
    assert cache.load_or_build({}, builder("one"))[0] == "one" and len(entries(tmp_path / "ok")) == 1
    with pytest.raises(GptlmError, match=r"no folder .* can be written .*file/x: Not a directory.*--data_cache"):
        FolderCache([tmp_path / "file" / "x"], read).load_or_build({}, builder("one"))


def test_a_full_disk_is_said_and_leaves_nothing(tmp_path):
    def build(folder):
        with open(folder / "text", "wb") as file:
            file.write(b"half")
        raise OSError(28, "No space left on device")

    with pytest.raises(GptlmError, match="cannot write .*No space left on device .*make room, or .*--data_cache"):
        FolderCache([tmp_path], read).load_or_build({}, build)
    assert entries(tmp_path) == []
