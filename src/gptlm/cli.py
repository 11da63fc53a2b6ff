"""`gptlm COMMAND ...`: parse, run, and turn errors into one sentence and an exit code.

Exit codes: 0 success, 1 the run failed (data, files, weights), 2 the command is wrong, 128 + N signal N.
"""

import atexit
import os
import sys
from collections.abc import Sequence

from gptlm.mapped_files import FileCutOff
from gptlm.signals import Terminated, end_at_once, ending_in, ending_on_signals, without_traceback

with without_traceback():
    import difflib
    from importlib.metadata import version

    from gptlm import __version__
    from gptlm.config.help import help_text
    from gptlm.entry_points import COMMANDS, DATA_TOOLS, HELP
    from gptlm.errors import GptlmError, UsageError, printed
    from gptlm.failures import DEBUG_HELP, DEBUG_VARIABLE, is_lost_process, report, without_debug
    from gptlm.launcher.script import split_command
    from gptlm.quiet import quiet_libraries
    from gptlm.ranks import check_launcher, is_launched, rank
    from gptlm.secret import hidden
    from gptlm.streams import can_write_output, discard_output, open_standard_streams, require_utf8

__all__ = ["COMMANDS", "DATA_TOOLS", "main"]


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; returns the exit code."""
    require_utf8()
    open_standard_streams()
    quiet_libraries()
    words = list(sys.argv[1:] if argv is None else argv)
    sys.argv[1:] = hidden(sys.argv[1:])  # trackers and error logs record it
    name = words[0] if words and words[0] in COMMANDS else ""
    try:
        with ending_on_signals(is_launched=is_launched()) as signals:
            code = _run(words)
            sys.stdout.flush()
            return code
    except (KeyboardInterrupt, Terminated, FileCutOff) as ended:
        return _ended(name, ended)
    except Exception as error:
        if (ending := ending_in(error)) is not None:
            return _ended(name, ending)
        # torch replaces what is raised while it reads elements of a tensor; or the signal has ended another rank
        if signals.was_interrupted:
            return _ended(name, KeyboardInterrupt())
        if signals.received is not None and (signals.was_raised or is_lost_process(error)):
            return Terminated(signals.received).reported(name)
        return _failed(name, error)
    finally:
        atexit.register(end_at_once)  # before what libraries have registered: Ctrl-C would print where they are


def _ended(name: str, by: KeyboardInterrupt | Terminated | FileCutOff) -> int:
    """Say that a signal has ended the command; returns the exit code."""
    if isinstance(by, Terminated):
        return by.reported(name)
    if isinstance(by, FileCutOff):
        return _failed(name, GptlmError(str(by)))
    sys.stderr.write(f"gptlm {name}: interrupted\n")
    return 130


def _failed(name: str, error: Exception) -> int:
    """Print why the command failed; returns the exit code."""
    if isinstance(error, GptlmError):
        sys.stderr.write(_with_prefix(name, printed(error)))
        return error.exit_code
    if isinstance(error, BrokenPipeError):  # the reader of the output has stopped, as `head` does
        discard_output()
        return 141
    debug = bool(os.environ.get(DEBUG_VARIABLE))  # a disk that fails, or a bug here or in a library
    if isinstance(error, OSError) and not error.filename and not can_write_output():
        error.filename = "standard output"
        discard_output()
    sys.stderr.write(_with_prefix(name, report(error, name, debug=debug)))
    return 1


def _run(words: Sequence[str]) -> int:
    """Run one command, or print the help that `words` ask for; returns the exit code."""
    if words == ["--version"]:
        print(_versions())
        return 0
    if not words or words[0] not in COMMANDS:
        asked = bool(words) and words[0] in ("-h", "--help", "help")
        print(_usage(), file=sys.stdout if asked else sys.stderr)
        if words and not asked:
            near = difflib.get_close_matches(words[0], COMMANDS, n=1)
            hint = f"; did you mean {near[0]}?" if near else ""
            print(f"gptlm: {words[0]!r} is not a command{hint}", file=sys.stderr)
        return 0 if asked else 2
    name, rest = words[0], words[1:]
    command = COMMANDS[name]
    ours, *script = split_command(rest) if name == "launch" else (rest,)
    ours, debug = without_debug(ours)
    if debug:
        os.environ[DEBUG_VARIABLE] = "1"
        rest = [*ours, *(word for part in script for word in part)]
    if any(word in HELP for word in ours) and not (name == "data" and rest[0] in DATA_TOOLS):
        if name == "data":
            print(_data_usage(), end="")
            return 0
        print(help_text(f"gptlm {name}", command.summary + command.more_help + DEBUG_HELP, command.vocabulary), end="")
        return 0
    check_launcher(os.environ)
    return command.run(rest) or 0


def _with_prefix(command: str, text: str) -> str:
    """Every line of an error with the command and the rank, because lines of several ranks are mixed.

    To be written in one go: `print` writes the last line end apart.
    """
    try:
        shown = f"rank {rank()}: " if is_launched() else ""
    except UsageError:  # this may be the error
        shown = ""
    prefix = f"{f'gptlm {command}'.strip()}: {shown}error: "
    return "".join(f"{prefix}{line}\n" for line in text.splitlines() or [""])


def _versions() -> str:
    """What a report of a fault should name; nothing is imported for it."""
    others = ("torch", "transformers", "deepspeed", "peft", "tokenizers", "datasets")
    found = ", ".join(f"{name} {version(name)}" for name in others)
    return f"gptlm {__version__} ({found}, Python {sys.version.split()[0]})"


def _usage() -> str:
    lines = [f"  {name:<12}{command.summary}" for name, command in COMMANDS.items()]
    return "\n".join(
        ["usage: gptlm COMMAND [--flag value ...]   (gptlm COMMAND --help lists the flags; gptlm --version)", *lines]
    )


def _data_usage() -> str:
    lines = [f"  {tool:<9}{summary}" for tool, (summary, _, _) in DATA_TOOLS.items()]
    usage = "usage: gptlm data TOOL ...   (gptlm data TOOL --help lists its flags)"
    return "\n".join([usage, "", "Inspect token files.", *lines, *DEBUG_HELP.splitlines()]) + "\n"


if __name__ == "__main__":
    sys.exit(main())
