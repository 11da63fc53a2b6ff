"""Standard input, output and error, which the caller may have closed, or connected to what cannot be written."""

import io
import os
import sys
from typing import IO, Any


def require_utf8() -> None:
    """Restart in Python's UTF-8 mode if the locale is not UTF-8: texts and paths are always UTF-8."""
    if sys.getfilesystemencoding() != "utf-8" and not sys.flags.utf8_mode:
        os.environ["PYTHONUTF8"] = "1"
        os.execv(sys.executable, [sys.executable, *sys.orig_argv[1:]])


def open_standard_streams() -> None:
    """Open the streams that are closed, so that no file gets their numbers, and print text that is not UTF-8 escaped.

    A line is written as a whole, with PYTHONUNBUFFERED, too: the lines of several ranks are not mixed.

    Writing to an output that was closed fails, as writing to a full disk does; what is printed to a closed standard
    error is lost.
    """
    if sys.stdin is None:
        sys.stdin = _opened(0, os.O_RDONLY, "r")
    if sys.stdout is None:
        sys.stdout = _opened(1, os.O_RDONLY, "w")
    if sys.stderr is None:
        sys.stderr = _opened(2, os.O_WRONLY, "w")
    for stream in (sys.stdout, sys.stderr):
        if not isinstance(stream, io.TextIOWrapper):  # another program collects the output
            continue
        stream.reconfigure(errors="backslashreplace")
        if isinstance(stream.buffer, io.FileIO):  # PYTHONUNBUFFERED writes words and line ends apart
            stream.reconfigure(line_buffering=True, write_through=False)


def can_write_output() -> bool:
    """Whether a line can be written to standard output; False for a full disk or a closed output. Writes an empty line.

    What was printed before is no answer: Python drops it when the first attempt fails.
    """
    try:
        os.write(sys.stdout.fileno(), b"\n")
    except (OSError, ValueError):
        return False
    return True


def discard_output() -> None:
    """Drop what was printed and not written yet: the interpreter would try again when it ends, and fail."""
    null = os.open(os.devnull, os.O_WRONLY)
    os.dup2(null, sys.stdout.fileno())
    os.close(null)


def _opened(number: int, access: int, mode: str) -> IO[Any]:
    """The standard stream `number`, connected to nothing."""
    null = os.open(os.devnull, access)
    if null != number:
        os.dup2(null, number)
        os.close(null)
    return open(number, mode, encoding="utf-8", closefd=False)
