"""Standard streams that are closed or full, and errors of the system that name a file: one sentence, no traceback."""

import os
import subprocess
import sys

import pytest

from gptlm.cli import COMMANDS, DATA_TOOLS, main

MAIN = "import sys; from gptlm.cli import main; sys.exit(main(sys.argv[1:]))"
NAMES = {  # values that no path flag can use
    "long": "a" * 300,
    "deep": "/tmp/" + "c/" * 2500,
    "NUL": "a\0b",
    "not UTF-8": os.fsdecode(b"/tmp/\xff"),
}
PLACES = ("dir", "path", "file", "prefix", "output", "load", "input", "checkpoint", "deepspeed", "data", "name_or_path")


@pytest.mark.parametrize(
    ("words", "redirected", "code", "says"),
    [
        ("--version", ">&-", 1, "standard output: Bad file descriptor"),
        ("pretrain --help", ">/dev/full", 1, "standard output: No space left on device"),
    ],
)
def test_a_stream_that_cannot_be_used(words, redirected, code, says):
    command = ["bash", "-c", f'"$@" {redirected}', "bash", sys.executable, "-c", MAIN, *words.split()]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == code and says in done.stderr
    assert not done.stderr or (done.stderr.count("\n") == 1 and "error: " in done.stderr)


def path_flags():
    commands = {name: command.vocabulary for name, command in COMMANDS.items()}
    commands |= {f"data {tool}": vocabulary for tool, (_, vocabulary, _) in DATA_TOOLS.items()}
    for command, vocabulary in commands.items():
        for flag, (field, kind) in vocabulary.flags().items():
            if "str" in str(kind) and not field.metadata["choices"] and any(part in flag for part in PLACES):
                yield command, flag


def test_there_are_path_flags_in_every_command():
    assert {command for command, _ in path_flags()} >= COMMANDS.keys() - {"data", "launch"}


@pytest.mark.parametrize("kind", NAMES)
def test_a_name_that_is_no_path(kind, tmp_path, monkeypatch, capsys):
    """Without the other arguments most commands name those that are missing; `plan` uses no path."""
    monkeypatch.chdir(tmp_path)
    for command, flag in path_flags():
        code = main([*command.split(), f"--{flag}", NAMES[kind]])
        printed = capsys.readouterr().err
        assert command == "plan" or code in (1, 2), (command, flag)
        assert (code == 0 or "error: " in printed) and "traceback" not in printed.lower(), (command, flag, printed)
