"""An unexpected error: one line in each command, its traceback in a file, exit code 1."""

import ast
import fcntl
import http.server
import json
import os
import pathlib
import runpy
import shlex
import subprocess
import sys
import tempfile

import pytest
import torch
import transformers
from torch._inductor import config as inductor
from transformers import GPT2Config, GPT2LMHeadModel

from gptlm.cli import COMMANDS, main
from gptlm.errors import GptlmError
from gptlm.failures import without_debug
from gptlm.model.tokenizer import train_tokenizer
from gptlm.signals import Terminated

TEXT = "the cat sat on a mat while two dogs ran far away from all those birds in our old garden"
SMALL = "--device cpu --max_steps 2 --save_steps 100 --per_device_train_batch_size 2 --do_train --report_to none"


@pytest.fixture(scope="module")
def work(tmp_path_factory):
    """A model with its tokenizer, examples, text and token files."""
    folder = tmp_path_factory.mktemp("failures")
    tokenizer = train_tokenizer([TEXT] * 5, 330)
    tokenizer.save_pretrained(folder / "base")
    sizes = {"n_positions": 48, "n_embd": 32, "n_layer": 1, "n_head": 2, "bos_token_id": 0, "eos_token_id": 0}
    GPT2LMHeadModel(GPT2Config(vocab_size=len(tokenizer), **sizes)).save_pretrained(folder / "base")
    rows = [{"src": f"{word} ", "tgt": word} for word in TEXT.split()]
    (folder / "examples.json").write_text(json.dumps(rows))
    (folder / "text.jsonl").write_text("\n".join(json.dumps({"text": TEXT * 3}) for _ in range(30)))
    words = "preprocess --input_path text.jsonl --model_name_or_path base --output_prefix data/text --append_eos"
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        assert main(words.split()) == 0
        lora = f"sft --model_name_or_path base --dataset_name_or_path examples.json --output_dir lora --lora {SMALL}"
        assert main(lora.split()) == 0
    return folder


@pytest.fixture
def fails(work, tmp_path, monkeypatch, capsys):
    """Run a command in which a function of another library fails; returns its error lines."""
    monkeypatch.chdir(work)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setenv("GPTLM_DEBUG", "")

    def run(words, owner, name, error=None, code=1):
        def failing(*args, **kwargs):
            raise error or ZeroDivisionError("that's \x1b[1mnot\x1b[0m ours. At all")

        capsys.readouterr()
        with monkeypatch.context() as patch:
            patch.setattr(owner, name, failing)
            assert main(shlex.split(words.replace("OUT", str(tmp_path / "out")))) == code
        return capsys.readouterr().err

    return run


LAYER = (torch.nn.functional, "layer_norm")
CASES = {
    "pretrain": (
        "--model_name_or_path base --continue_training --input_dir data --output_dir OUT --max_seq_length 16 " + SMALL,
        *LAYER,
        "while training, step 1",
    ),
    "sft": (
        f"--model_name_or_path base --dataset_name_or_path examples.json --output_dir OUT --lora {SMALL}",
        *LAYER,
        "while training, step 1",
    ),
    "merge-lora": (
        "--lora_path lora --output_path OUT",
        *(transformers.PreTrainedModel, "save_pretrained", "while saving the merged model"),
    ),
    "convert": (
        "--from base --to megatron --output OUT/x",
        *(fcntl, "flock", "while running gptlm convert"),
    ),
    "preprocess": (
        "--input_path text.jsonl --model_name_or_path base --output_prefix OUT/x",
        *(tempfile, "TemporaryDirectory", "while encoding the texts"),
    ),
    "tokenizer": (
        "--input_path text.jsonl --output_dir OUT --vocab_size 300",
        *(transformers.GPT2Tokenizer, "save_pretrained", "while running gptlm tokenizer"),
    ),
    "predict": ("--model_name_or_path base --device cpu --tgt_length 2 --prompt the", *LAYER, "while generating"),
    "evaluate": (
        "--task TEXT --eval_path text.jsonl --model_name_or_path base --device cpu --max_seq_length 16",
        *LAYER,
        "while scoring",
    ),
    "chat": ("--model_name_or_path base --device cpu", torch, "manual_seed", "while running gptlm chat"),
    "serve": (
        "--model_name_or_path base --device cpu",
        *(http.server.HTTPServer, "server_bind", "while running gptlm serve"),
    ),
    "report": ("data", pathlib.Path, "iterdir", "while running gptlm report"),
    "data": ("check data/text", os, "pread", "while running gptlm data"),
    "plan": ("--model_name_or_path gpt2-medium-en --num_gpus 2", shlex, "join", "while running gptlm plan"),
    "launch": ("--nproc_per_node 2 --log_dir OUT -m x", subprocess, "Popen", "while running gptlm launch"),
    "demo": ("--output_dir OUT", ast, "walk", "while running gptlm demo"),
}


def test_every_command_has_a_case():
    assert CASES.keys() == COMMANDS.keys()


@pytest.mark.parametrize("command", CASES)
def test_one_line_and_a_traceback_in_a_file(fails, tmp_path, command):
    words, owner, name, stage = CASES[command]
    said = fails(f"{command} {words}", owner, name).strip().splitlines()[-1]
    log = f"gptlm-error-{os.getpid()}.log"
    found = sorted(path for path in tmp_path.rglob(log))
    assert found == [tmp_path / "out" / log if (tmp_path / "out").is_dir() and command != "launch" else tmp_path / log]
    reason = f"{stage}: ZeroDivisionError: that's not ours; the traceback is in {found[0]} (--debug prints it)"
    assert said == f"gptlm {command}: error: {reason}"
    text = found[0].read_text()
    assert text.count("Traceback (most recent call last)") >= 1 and "in failing" in text and "not\x1b[0m ours." in text


def test_debug_prints_the_traceback_and_errors_name_the_rank(fails, tmp_path, monkeypatch):
    monkeypatch.setenv("RANK", "1")
    words, owner, name, stage = CASES["tokenizer"]
    said = fails(f"tokenizer --debug {words}", owner, name)
    assert "Traceback (most recent call last)" in said
    assert said.splitlines()[-1] == f"gptlm tokenizer: rank 1: error: {stage}: ZeroDivisionError: that's not ours"
    assert not list(tmp_path.rglob("gptlm-error-*"))


@pytest.mark.parametrize("command", ["pretrain", "sft", "predict", "evaluate"])
def test_out_of_memory_is_one_sentence_with_advice(fails, command):
    words, owner, name, stage = CASES[command]
    full = torch.OutOfMemoryError(
        "CUDA out of memory. Tried to allocate 20.00 GiB. GPU 0 has a total capacity of 4 GiB"
    )
    said = fails(f"{command} {words.replace('OUT', 'OUT/memory')}", owner, name, full).strip().splitlines()[-1]
    assert f"error: out of memory {stage} (20.00 GiB more were requested); give a smaller --" in said
    assert ("--recompute" in said) == (command in ("pretrain", "sft"))


def test_out_of_memory_is_not_reported_as_a_damaged_model(fails):
    """While loading weights, every other error of a library means that the folder is damaged."""
    full = RuntimeError(
        "[enforce fail at alloc_cpu.cpp:127] data. DefaultCPUAllocator: can't allocate memory: you tried"
    )
    words = CASES["predict"][0]
    said = fails(f"predict {words}", transformers.PreTrainedModel, "from_pretrained", full).strip().splitlines()[-1]
    assert "error: out of memory while loading the model; give a smaller" in said


def test_a_lost_process_is_not_reported_as_an_error_of_this_one(fails, monkeypatch):
    """gloo's message in the processes that wait for it."""
    monkeypatch.setenv("RANK", "0")
    words, owner, name, stage = CASES["evaluate"]
    gone = RuntimeError("[/pytorch/third_party/gloo/gloo/transport/tcp/pair.cc:534] Connection closed by peer [::1]:5")
    said = fails(f"evaluate {words}", owner, name, gone).strip().splitlines()[-1]
    line = f"rank 0: error: another process of this run ended {stage}; its own error message, or its launcher's, has"
    assert said.endswith(f"{line} the cause")


@pytest.mark.parametrize("says", ["cc1plus: fatal error: no room", ""])
def test_a_failing_compiler_is_one_sentence(work, tmp_path, monkeypatch, capsys, says):
    compiler = tmp_path / "g++"
    compiler.write_text(f'#!/bin/sh\ncase "$*" in *--version*) exec g++ "$@";; esac\necho "{says}" >&2\nexit 1\n')
    compiler.chmod(0o755)
    monkeypatch.chdir(work)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "cache"))  # nothing is compiled yet
    torch._dynamo.reset()
    with inductor.patch({"cpp.cxx": (str(compiler),)}):
        assert main(["evaluate", "--torch_compile", *CASES["evaluate"][0].split()]) == 1
    torch._dynamo.reset()
    line = capsys.readouterr().err.splitlines()[-1]
    expected = f"the C++ compiler {compiler} failed: {says or 'it printed nothing'}; --torch_compile 0 runs without it"
    assert line.endswith(expected) and not list(tmp_path.glob("*.log"))


def test_interrupts_are_not_reported_as_errors(fails, tmp_path):
    words, owner, name, _ = CASES["tokenizer"]
    assert fails(f"tokenizer {words}", owner, name, KeyboardInterrupt(), code=130) == "gptlm tokenizer: interrupted\n"
    assert not list(tmp_path.rglob("gptlm-error-*"))


@pytest.mark.parametrize(("signal", "code"), [(KeyboardInterrupt(), 130), (Terminated(15), 143)])
@pytest.mark.parametrize("kind", [RuntimeError, GptlmError, BrokenPipeError])
def test_an_error_in_the_cleanup_after_a_signal_does_not_hide_the_signal(fails, tmp_path, signal, code, kind):
    """As of tqdm, which releases a lock that it does not have if a signal comes while it takes it."""
    words, owner, name, _ = CASES["tokenizer"]
    error = kind("cannot release un-acquired lock")
    error.__context__ = signal
    said = fails(f"tokenizer {words}", owner, name, error, code=code)
    assert said == ("gptlm tokenizer: interrupted\n" if code == 130 else "gptlm tokenizer: ended by SIGTERM\n")
    assert not list(tmp_path.rglob("gptlm-error-*"))


def test_debug_is_a_flag_of_every_command(capsys):
    for command in COMMANDS:
        assert main([command, "--help"]) == 0
        assert "With --debug" in capsys.readouterr().out
    assert without_debug([]) == ([], False)
    assert without_debug(["--debug", "--x", "1", "--debug"]) == (["--x", "1"], True)
    assert without_debug(["--debug", "underflow_overflow"]) == (["--debug", "underflow_overflow"], False)


def test_the_module_is_a_command_too(monkeypatch, capsys):
    """As in `torchrun -m gptlm.cli`."""
    monkeypatch.setattr(sys, "argv", ["gptlm", "plan", "--model_name_or_path", "gpt2-medium-en", "--num_gpus", "2"])
    monkeypatch.delitem(sys.modules, "gptlm.cli")
    with pytest.raises(SystemExit) as ended:
        runpy.run_module("gptlm.cli", run_name="__main__")
    assert ended.value.code == 0 and "torchrun --nproc_per_node 2" in capsys.readouterr().out
