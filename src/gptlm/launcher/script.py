"""Split a launcher's command line at the script, and replace other frameworks' scripts by gptlm's commands."""

import re
from collections.abc import Sequence
from pathlib import Path

from gptlm.errors import UsageError

LAUNCHERS = (("-m", "paddle.distributed.launch"), ("-m", "paddle.distributed.fleet.launch"), ("fleetrun",))
# scripts of other frameworks, and ours where the path does not exist -> gptlm's command
SCRIPTS = {
    "tools/auto.py": "pretrain",
    "tools/train.py": "pretrain",
    "tools/eval.py": "evaluate",
    "run_pretrain.py": "pretrain",
    "finetune_generation.py": "sft",
    "scripts/evaluate.py": "evaluate",
}
COMMANDS = ("pretrain", "sft", "evaluate", "predict")  # gptlm's own that run in several processes
OURS = ("gptlm", "gptlm.cli")  # modules
MODULES = {"oneflow_gpt.training": "pretrain"}
ONE_PROCESS = MODULES  # these start one process on each node unless their arguments name a number
PYTHON = re.compile(r"python[\d.]*")
STARTS_COMMAND = re.compile(r"^from gptlm\.cli import main\b", re.MULTILINE)
IMPORTS_OTHER_FRAMEWORK = re.compile(r"^\s*(?:import|from)\s+(?:paddle|paddlenlp|ppfleetx|oneflow)\b", re.MULTILINE)


def split_command(argv: Sequence[str]) -> tuple[list[str], list[str], list[str]]:
    """The launcher's flags, the script (`X.py`, `-m` and a module, or gptlm's command; none: []), and its flags."""
    words = _without_launcher(argv)
    for index, word in enumerate(words):
        if word == "-m":
            return _without_python(words[:index]), words[index : index + 2], words[index + 2 :]
        if word.endswith(".py") and not word.startswith("-"):
            return _without_python(words[:index]), [word], words[index + 1 :]
        if word in COMMANDS and not (index and words[index - 1].startswith("-")):  # after a flag it is a value
            return words[:index], [word], words[index + 1 :]
    return words, [], []


def _without_python(words: list[str]) -> list[str]:
    """The launcher's flags without a last `python3 -u`, as in `--rank 0 python3 -m MODULE`."""
    kept = words[:-1] if words and words[-1] == "-u" else words
    return kept[:-1] if kept and PYTHON.fullmatch(Path(kept[-1]).name) else words


def _without_launcher(argv: Sequence[str]) -> list[str]:
    """`argv` without a leading `python -u -m paddle.distributed.launch` or a part of it."""
    words = list(argv)
    if words and PYTHON.fullmatch(Path(words[0]).name):
        del words[0]
        while words and words[0] == "-u":
            del words[0]
    for launcher in LAUNCHERS:
        if tuple(words[: len(launcher)]) == launcher:
            return words[len(launcher) :]
    return words


def program(script: Sequence[str]) -> tuple[tuple[str, ...], str | None]:
    """The script to run, and a note if another one was named.

    Raises:
        UsageError: if there is none, or its file does not exist.
    """
    if not script or script == ["-m"]:
        raise UsageError(
            "no script to launch: after the launcher's flags give FILE.py, -m MODULE, or a command such as pretrain"
        )
    name = script[-1]
    if name in COMMANDS:
        return ("-m", "gptlm", name), None
    if len(script) == 2:
        command, reason = MODULES.get(name), "another framework's"
    else:
        path = Path(name)
        exists = path.is_file()
        reason = "another framework's" if exists else "not here"
        replaced = not exists or IMPORTS_OTHER_FRAMEWORK.search(path.read_text(encoding="utf-8", errors="replace"))
        command = SCRIPTS.get("/".join(path.parts[-2:]), SCRIPTS.get(path.name)) if replaced else None
        if not exists and command is None:
            raise UsageError(f"the script {name} does not exist; give the path of a file, or -m MODULE")
    if command is None:
        return tuple(script), None
    return ("-m", "gptlm", command), f"{name} is {reason}: gptlm {command} runs instead, with the same arguments"


def is_ours(script: Sequence[str]) -> bool:
    """Whether `script`, as `program` returns it, is a command of gptlm: its module, or a file that starts one."""
    if len(script) > 1:
        return script[1] in OURS
    return STARTS_COMMAND.search(Path(script[0]).read_text(encoding="utf-8", errors="replace")) is not None
