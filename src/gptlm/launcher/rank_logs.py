"""What the ranks of a launch write: from torchrun's files to workerlog.N as it comes, rank 0's to the terminal too."""

import os
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import BinaryIO

SHOWN = 15  # last lines of a rank that failed
TAIL = 1 << 16  # bytes in which they are looked for


class RankOutput:
    """The output of one rank, both streams line by line."""

    def __init__(self, raw: Path, local_rank: int, path: Path, overwrite: bool):
        self.path = path
        self._raw, self._rank = raw, local_rank
        self._log = open(path, "w+b" if overwrite else "a+b")
        self._start = self._log.seek(0, os.SEEK_END)
        self._streams: dict[str, BinaryIO] = {}
        self._pending = {"stdout.log": b"", "stderr.log": b""}

    def __enter__(self) -> "RankOutput":
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        for file in (self._log, *self._streams.values()):
            file.close()

    def copy(self, *, whole: bool = False) -> None:
        """Pass on the lines that are new; with `whole` also one that has not ended."""
        self._open()
        for terminal, name in enumerate(self._pending, start=1):
            if name not in self._streams:
                continue
            text = self._pending[name] + self._streams[name].read()
            end = len(text) if whole else 1 + max(text.rfind(b"\n"), text.rfind(b"\r"))
            self._pending[name] = text[end:]
            if end:
                self._log.write(text[:end])
                self._log.flush()
                if self._rank == 0:
                    write(terminal, text[:end])

    def written(self) -> str:
        """The end of what this run has written."""
        self._log.seek(max(self._start, self._log.seek(0, os.SEEK_END) - TAIL))
        return self._log.read().decode("utf-8", errors="replace")

    def _open(self) -> None:
        """torchrun makes the files when it starts the ranks, in a folder with a name of its own."""
        for name in self._pending.keys() - self._streams.keys():
            for found in self._raw.glob(f"*/attempt_0/{self._rank}/{name}"):
                self._streams[name] = open(found, "rb")


def last_lines(text: str) -> str:
    """The last lines of `text`, indented."""
    return "\n".join(f"    {line}" for line in text.splitlines()[-SHOWN:]) or "    (nothing)"


def write(terminal: int, text: bytes) -> None:
    """Write all of `text` to a file descriptor; a terminal that is gone does not end the run."""
    with suppress(OSError):
        while text:
            text = text[os.write(terminal, text) :]
