"""The two kinds of errors a user can cause, how messages refer to flags, and the text of other libraries' errors."""

import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager

TERMINAL_CODE = re.compile(r"\x1b(\[[0-?]*[ -/]*[@-~]|\][^\x07\x1b]*(\x07|\x1b\\)|[@-Z\\-_])")
CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f]")
SENTENCE_END = re.compile(r"(?<=[.!?])\s+(?=[A-Z(\"'`])")
WORKER = re.compile(r"Caught \w+ in DataLoader worker process")
STAGE = "while "  # prefix of the note that `doing` adds to an exception
MARK = "\0"  # occurs in no path and no argument, so a value is never mistaken for a flag


def named(name: str) -> str:
    """A reference to the argument `name` inside a message, which is shown as the user typed it."""
    return f"{MARK}{name}{MARK}"


def with_flags_shown(text: str, typed: Mapping[str, str]) -> str:
    """`text` with each reference of `named` as the user typed it, else as `--name`.

    Args:
        typed: argument -> as typed, perhaps with its place as in "Global.seed (x.yaml:3)", which is shown once only.
    """
    parts = text.split(MARK)  # text, name, text, name, ..., text
    names = parts[1::2]
    for position, name in enumerate(names):
        shown = typed.get(name, f"--{name}")
        parts[2 * position + 1] = shown.partition(" (")[0] if name in names[:position] else shown
    return "".join(parts)


class GptlmError(ValueError):
    """The run fails for a reason that the user can correct. The commands print it and exit with 1.

    The message states what happened, which value, and what to do.
    """

    exit_code = 1

    def __str__(self) -> str:
        return with_flags_shown(self.marked, {})

    @property
    def marked(self) -> str:
        """The message with its references to flags, for `with_flags_shown`."""
        return super().__str__()


class UsageError(GptlmError):
    """The command is wrong: flags, values, or combinations of them. Exit code 2."""

    exit_code = 2


def reason_of(error: BaseException) -> str:
    """The first sentence of another library's exception, without terminal codes and line breaks.

    For an error of the operating system it is its text ("No space left on device"), for an exception without a text
    the name of its type.
    """
    if isinstance(error, OSError) and error.strerror:
        return error.strerror
    if isinstance(error, KeyError) and error.args:
        return f"{error.args[0]!r} is missing"
    if isinstance(error, RecursionError):
        return "too deeply nested"
    text = CONTROL.sub("", TERMINAL_CODE.sub("", from_worker(str(error))))
    if "sys.set_int_max_str_digits" in text:  # advice that is not for users
        return "a number has thousands of digits"
    sentence = ""
    for line in filter(None, map(str.strip, text.splitlines())):
        sentence = f"{sentence} {line}".strip()
        if not sentence.endswith((":", ",", ";")):  # else the sentence continues in the next line
            break
    first = SENTENCE_END.split(" ".join(sentence.split()))[0].rstrip(".:,; ")
    return first or type(error).__name__


def printed(error: GptlmError) -> str:
    """The message for the screen: at most three lines. Of four problems or more the third line has the rest."""
    text = from_worker(str(error))
    if not isinstance(error, UsageError):
        return text
    lines = text.splitlines()
    if len(lines) > 3:
        lines[2:] = [f"{len(lines) - 2} more: " + " ".join(f"({n}) {line}" for n, line in enumerate(lines[2:], 3))]
    return "\n".join(lines)


def from_worker(text: str) -> str:
    """`text` without the traceback that torch's DataLoader adds to an exception of a worker process."""
    if not WORKER.match(text):
        return text
    kind, _, own = text.rstrip().rpartition("\n")[2].partition(": ")
    return own or kind


@contextmanager
def flags_as_typed(typed: Mapping[str, str]) -> Iterator[None]:
    """Show flags in the messages of GptlmErrors as the user typed them."""
    try:
        yield
    except GptlmError as error:
        error.args = (with_flags_shown(error.marked, typed),)
        raise


@contextmanager
def doing(what: str | Callable[[], str]) -> Iterator[None]:
    """Note the stage on an unexpected exception; the innermost stage counts. Also a decorator."""
    try:
        yield
    except Exception as error:
        if not isinstance(error, GptlmError) and stage_of(error) is None:
            error.add_note(STAGE + (what if isinstance(what, str) else what()))
        raise


def stage_of(error: BaseException) -> str | None:
    """The stage that `doing` noted on `error`: "while saving the model"."""
    return next((note for note in getattr(error, "__notes__", ()) if note.startswith(STAGE)), None)


def is_out_of_memory(error: BaseException) -> bool:
    """Whether a GPU or the machine ran out of memory."""
    # torch reports it by exceptions of several types
    words = ("out of memory", "can't allocate memory", "CUBLAS_STATUS_ALLOC_FAILED")
    known = isinstance(error, MemoryError) or type(error).__name__ == "OutOfMemoryError"
    return known or (isinstance(error, RuntimeError) and any(word in str(error) for word in words))
