"""Standard streams that are closed or full, and errors of the system that name a file: one sentence, no traceback."""

import os
import shutil
import socket
import subprocess
import sys
from pathlib import Path

import pytest
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM

from gptlm.cli import COMMANDS, DATA_TOOLS, main
from gptlm.model.tokenizer import train_tokenizer
from tests.conftest import write_tokens

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


def test_a_line_is_one_write():
    """Lines of several ranks on one pipe are not mixed, with PYTHONUNBUFFERED, too."""
    ours, theirs = socket.socketpair(type=socket.SOCK_DGRAM)
    with ours, theirs:
        ours.settimeout(5)
        environment = {**os.environ, "PYTHONUNBUFFERED": "1"}
        command = [sys.executable, "-c", MAIN, "data", "merge"]
        done = subprocess.run(command, env=environment, stdout=theirs, stderr=theirs, timeout=120)
        written = ours.recv(10_000).decode()
    assert done.returncode == 2 and written.startswith("gptlm data: error: ") and written.endswith("\n")


def vocabularies():
    yield from ((name, command.vocabulary) for name, command in COMMANDS.items())
    yield from ((f"data {tool}", vocabulary) for tool, (_, vocabulary, _) in DATA_TOOLS.items())


def path_flags():
    for command, vocabulary in vocabularies():
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


COMPLETE = {  # commands that lack nothing, so that what is wrong is a name
    "merge-lora": "--lora_path lora --model_name_or_path model --output_path out",
    "convert": "--from model --output out --verify 0",
    "evaluate": "--task TEXT --eval_path c.txt --model_name_or_path model --device cpu --max_seq_length 16",
    "plan": "--model_name_or_path model --num_gpus 2",
    "data merge": "--input d/c --output_prefix e/c",
}


@pytest.mark.parametrize("command", COMPLETE)
def test_a_name_too_long_for_the_file_system_in_a_complete_command(command, tiny_model, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    text = "the cat sat on the mat\n\n" * 30
    shutil.copytree(tiny_model, "model")
    train_tokenizer([text], 290).save_pretrained("model")
    stock = AutoModelForCausalLM.from_pretrained("model")
    get_peft_model(stock, LoraConfig(target_modules=["c_attn"], fan_in_fan_out=True)).save_pretrained("lora")
    Path("c.txt").write_text(text)
    write_tokens(tmp_path / "d/c")
    vocabulary = dict(vocabularies())[command]
    pairs = dict(zip(*[iter(COMPLETE[command].split())] * 2, strict=True))
    left = sorted(path for path in tmp_path.rglob("*"))
    capsys.readouterr()
    for flag in [flag for name, flag in path_flags() if name == command]:
        words = {f"--{flag}": "x/" + NAMES["long"]}
        field = vocabulary.flags()[flag]
        others = {name: value for name, value in pairs.items() if vocabulary.flags().get(name[2:]) != field}
        code = main([*command.split(), *(word for pair in (others | words).items() for word in pair)])
        printed = capsys.readouterr().err
        if code:  # `plan` does not use the paths of a run
            assert "error: " in printed and printed.count("\n") == 1, (flag, printed)
            known = ("File name too long", NAMES["long"], "--task DATA", "--validation_file needs --train_file")
            assert any(words in printed for words in known), (flag, printed)
        assert code in ((0, 1, 2) if command == "plan" else (1, 2)), (flag, code, printed)
    assert sorted(path for path in tmp_path.rglob("*") if path.name != "x") == left
