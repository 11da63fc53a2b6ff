"""Report an unexpected error in one line, with its traceback in a file (or printed with --debug)."""

import errno
import os
import platform
import re
import sys
import tempfile
import time
import traceback
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from gptlm.errors import GptlmError, is_out_of_memory, reason_of, stage_of

DEBUG = "--debug"
DEBUG_VARIABLE = "GPTLM_DEBUG"  # passes the flag to processes that a command starts
DEBUG_HELP = """
With --debug the traceback of an unexpected error is printed instead of written to gptlm-error-PID.log."""
OF_THE_MACHINE = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO, errno.EROFS, errno.EMFILE, errno.ENFILE)
FOLDER = "output folder: "  # prefix of the note that `logged_in` adds to an exception
MEMORY_ADVICE = {
    "pretrain": "give a smaller --per_device_train_batch_size with more --gradient_accumulation_steps, --recompute 1, "
    "or --sharding",
    "sft": "give a smaller --per_device_train_batch_size with more --gradient_accumulation_steps, --recompute 1, "
    "or --lora",
    "predict": "give a smaller --batch_size, shorter texts, or --bf16",
    **dict.fromkeys(("chat", "serve"), "give --bf16, or use a GPU with more memory"),
    "evaluate": "give a smaller --batch_size, a smaller --max_seq_length, or --bf16",
}


def without_debug(words: Sequence[str]) -> tuple[list[str], bool]:
    """`words` without --debug, and whether it was there."""
    # with a value it is transformers' --debug, which stays
    ends = [*words[1:], "--"][: len(words)]
    kept = [word for word, after in zip(words, ends, strict=True) if word != DEBUG or not after.startswith("-")]
    return kept, len(kept) < len(words)


@contextmanager
def logged_in(folder: str | Path | None) -> Iterator[None]:
    """Write the traceback of an unexpected error inside to `folder`, if that exists by then."""
    try:
        yield
    except Exception as error:
        if folder and not isinstance(error, GptlmError):
            error.add_note(f"{FOLDER}{folder}")
        raise


def report(error: Exception, command: str, *, debug: bool) -> str:
    """Write the traceback of `error` to a file, or print it with `debug`; returns the line that describes the error."""
    stage = stage_of(error) or f"while running gptlm {command}".rstrip()
    if loop := re.match(r"Symlink loop from '(.*)'", str(error)):  # Path.resolve of Python 3.12 and older
        trace = error.__traceback__
        error = OSError(errno.ELOOP, os.strerror(errno.ELOOP), loop[1]).with_traceback(trace)
    if is_out_of_memory(error):
        requested = re.search(r"[Tt]ried to allocate ([\d.]+ \w+)", str(error))
        size = f" ({requested[1]} more were requested)" if requested else ""
        line = f"out of memory {stage}{size}; {MEMORY_ADVICE.get(command, 'free memory, or use a machine with more')}"
    elif (problem := compiler_problem(error)) is not None:
        return f"{stage}: {problem}; --torch_compile 0 runs without it"
    elif is_lost_process(error):
        line = f"another process of this run ended {stage}; its own error message, or its launcher's, has the cause"
    elif isinstance(error, OSError) and error.filename and error.strerror:
        line = f"{stage}: {error.filename}: {reason_of(error)}"
    else:
        reason, kind = reason_of(error), type(error).__name__
        line = f"{stage}: {kind if reason == kind else f'{kind}: {reason}'}"
    if debug:
        traceback.print_exception(error)
        return line
    if is_lost_process(error):
        return line  # where this process waited is of no use, and each of many would write it
    if isinstance(error, OSError) and (error.filename or error.errno in OF_THE_MACHINE):
        return line  # its cause is in the line
    return f"{line}; {_write_traceback(error, command)}"


def compiler_problem(error: Exception) -> str | None:
    """Why the C++ compiler that torch.compile calls has failed; None for another error."""
    failed: Any = getattr(error, "inner_exception", error)
    if type(failed).__name__ != "CppCompileError":
        return None
    lines = [line.strip() for line in failed.output.splitlines() if line.strip()]
    said = next((line for line in lines if "error" in line), lines[-1] if lines else "it printed nothing")
    return f"the C++ compiler {failed.cmd[0]} failed: {said}"


def is_lost_process(error: Exception) -> bool:
    """Whether communication failed because another process ended. A timeout has other messages."""
    text = str(error)
    gone = ("Connection closed by peer", "Connection reset by peer", "remote process exited", "ncclRemoteError")
    return isinstance(error, RuntimeError) and any(words in text for words in gone)


def _write_traceback(error: Exception, command: str) -> str:
    """Write the traceback; returns a text with its path."""
    notes = [note.removeprefix(FOLDER) for note in getattr(error, "__notes__", ()) if note.startswith(FOLDER)]
    text = "".join(traceback.format_exception(error))
    head = f"{time.strftime('%Y-%m-%d %H:%M:%S')} gptlm {command}, {_versions()}\n{' '.join(sys.argv)}\n"
    for folder in [*notes, tempfile.gettempdir()]:
        path = Path(folder) / f"gptlm-error-{os.getpid()}.log"
        try:
            # appended: a process on another machine may have the same id
            with path.open("a", encoding="utf-8", errors="backslashreplace") as file:
                file.write(f"{head}{text}\n")
        except OSError:
            continue
        return f"the traceback is in {path} ({DEBUG} prints it)"
    return f"{DEBUG} prints the traceback"


def _versions() -> str:
    found = [f"Python {platform.python_version()}"]
    for name in ("gptlm", "torch", "transformers"):
        try:
            found.append(f"{name} {version(name)}")
        except PackageNotFoundError:
            continue
    return ", ".join(found)
