"""Where a launcher's command line goes over to the script, and which script that is here."""

import re
from collections.abc import Sequence
from pathlib import Path

from gptlm.errors import UsageError
from gptlm.launcher import aliases as spellings


def split_command(argv: Sequence[str]) -> tuple[list[str], list[str], list[str]]:
    """The launcher's words, the script (`X.py`, or `-m` and a module; none: []), and the script's words."""
    words = _without_launcher(argv)
    for place, word in enumerate(words):
        if word == "-m":
            return words[:place], words[place : place + 2], words[place + 2 :]
        if word.endswith(".py") and not word.startswith("-"):
            return words[:place], [word], words[place + 1 :]
    return words, [], []


def _without_launcher(argv: Sequence[str]) -> list[str]:
    """What follows `python -u -m paddle.distributed.launch`, where the words begin with it or part of it."""
    words = list(argv)
    if words and re.fullmatch(r"python[\d.]*", Path(words[0]).name):
        del words[0]
        while words and words[0] == "-u":
            del words[0]
    for launcher in spellings.LAUNCHERS:
        if tuple(words[: len(launcher)]) == launcher:
            return words[len(launcher) :]
    return words


def program(script: Sequence[str]) -> tuple[tuple[str, ...], str | None]:
    """The script to run, and a note where it stands for another."""
    if not script or script == ["-m"]:
        raise UsageError("there is nothing to launch: after the launcher's flags give FILE.py or -m MODULE")
    name = script[-1]
    command, reason = None, "another framework's"
    if len(script) == 2:
        command = spellings.LAUNCH_MODULES.get(name)
    else:
        path = Path(name)
        here = path.is_file()
        reason = reason if here else "not here"
        if not here or re.search(spellings.OTHER_FRAMEWORKS, path.read_text(encoding="utf-8", errors="replace"), re.M):
            ends = ["/".join(path.parts[-2:]), path.name]
            command = next((spellings.LAUNCH_SCRIPTS[end] for end in ends if end in spellings.LAUNCH_SCRIPTS), None)
        if not here and command is None:
            raise UsageError(f"the script {name} does not exist; give the path of a file, or -m MODULE")
    if command is None:
        return tuple(script), None
    return ("-m", "gptlm", command), f"{name} is {reason}: gptlm {command} runs in its place, with the same words"
