"""`gptlm COMMAND ...`: parse, call, and turn errors into one sentence and an exit code.

Exit codes: 0 done, 1 the run could not go on (data, files, weights), 2 the command is wrong.
"""

import os
import sys
from collections.abc import Callable, Sequence

from gptlm.errors import GptlmError


def pretrain(argv: Sequence[str]) -> None:
    """Pretrain a GPT on token files."""
    from gptlm.config.parser import help_text
    from gptlm.config.run import PRETRAIN, parse_pretrain

    if _wants_help(argv):
        print(help_text("run_pretrain.py", "Pretrain a GPT on token files.", PRETRAIN), end="")
        return
    printing = "--print_config" in argv or "--print-config" in argv
    words = [word for word in argv if word not in ("--print_config", "--print-config")]
    run = parse_pretrain(words, os.environ, printing=printing)
    if printing:
        print(run.as_json())
        return
    from gptlm.recipes.pretrain import pretrain as recipe

    recipe(run)


COMMANDS: dict[str, Callable[[Sequence[str]], None]] = {"pretrain": pretrain}


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; returns the exit code."""
    words = list(sys.argv[1:] if argv is None else argv)
    if not words or words[0] not in COMMANDS:
        known = "\n".join(f"  {name:<12}{command.__doc__}" for name, command in COMMANDS.items())
        asked = bool(words) and words[0] in ("-h", "--help", "help")
        print(f"usage: gptlm COMMAND [--flag value ...]\n{known}", file=sys.stdout if asked else sys.stderr)
        return 0 if asked else 2
    try:
        COMMANDS[words[0]](words[1:])
    except GptlmError as error:
        rank = os.environ.get("RANK")
        prefix = f"rank {rank}: " if rank else ""
        print(f"gptlm {words[0]}: {prefix}error: {error}", file=sys.stderr)
        return error.exit_code
    except KeyboardInterrupt:
        print(f"gptlm {words[0]}: interrupted", file=sys.stderr)
        return 130
    return 0


def _wants_help(argv: Sequence[str]) -> bool:
    return any(word in ("-h", "--help") for word in argv)
