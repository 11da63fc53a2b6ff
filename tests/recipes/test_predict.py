"""The command around generation: prompts from flags, files and pipes, results, adapters, a terminal."""

import json
import os
import pty
import re
import resource
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from peft import LoraConfig, get_peft_model
from transformers import AutoTokenizer, GPT2LMHeadModel

from gptlm import owned
from gptlm.cli import main
from gptlm.config.args.inference import DEFAULT_PROMPTS
from gptlm.model.tokenizer import train_tokenizer
from tests.conftest import ROOT


@pytest.fixture(scope="module")
def folder(tiny_model, tmp_path_factory):
    """The tiny model, 64 positions and 500 entries, with a tokenizer of fewer."""
    path = tmp_path_factory.mktemp("predict") / "m"
    shutil.copytree(tiny_model, path)
    train_tokenizer(["the cat sat on the mat and the dog sat on the log " * 20], 300).save_pretrained(path)
    return path


def predict(folder, capsys, *words):
    """Exit code, lines on stdout, stderr."""
    code = main(["predict", "--model_name_or_path", str(folder), "--device", "cpu", *map(str, words)])
    said = capsys.readouterr()
    return code, said.out, said.err


def beams(folder, prompt, count):
    """The texts of stock code's beam search."""
    tokenizer = AutoTokenizer.from_pretrained(folder)
    ids = torch.tensor([tokenizer(prompt)["input_ids"]])
    out = GPT2LMHeadModel.from_pretrained(folder).generate(
        ids,
        attention_mask=torch.ones_like(ids),
        num_beams=count,
        num_return_sequences=count,
        max_new_tokens=6,
        pad_token_id=0,
        suppress_tokens=list(range(len(tokenizer), 500)),
    )
    return [tokenizer.decode(row[ids.shape[1] :], skip_special_tokens=True).rstrip("\ufffd") for row in out]


def test_every_continuation_has_a_row_in_the_order_of_the_prompts(folder, capsys, tmp_path):
    prompts = ["今天天气😀", "the cat sat on", "a"]
    file = tmp_path / "p.jsonl"
    records = [{"src": prompts[0], "tgt": "x"}, {"prompt": prompts[1]}, {"text": prompts[2]}]
    file.write_text("\n".join(json.dumps(record, ensure_ascii=False) for record in records), encoding="utf-8")
    words = "--batch_size 2 --num_beams 2 --num_return_sequences 2 --max_new_tokens 6 --output_file".split()
    code, out, err = predict(folder, capsys, "--input_file", file, *words, tmp_path / "new" / "o.jsonl")
    rows = [json.loads(line) for line in (tmp_path / "new" / "o.jsonl").read_text(encoding="utf-8").splitlines()]
    assert code == 0, err
    assert [row["prompt"] for row in rows] == [prompt for prompt in prompts for _ in range(2)]
    assert [row["continuation"] for row in rows] == [text for prompt in prompts for text in beams(folder, prompt, 2)]
    assert out == "".join(row["continuation"] + "\n" for row in rows)  # and nothing else: it may be piped
    assert re.search(r"\d+ tokens in \d+\.\d\d s", err.splitlines()[-2])


@pytest.mark.parametrize("half", ["--bf16", "--fp16"])
def test_half_precision_on_a_cpu(folder, capsys, half):
    code, _out, err = predict(folder, capsys, "--prompt", "the", "--tgt_length", 3, half)
    assert code == 0, err
    assert ("half precision is not used on a CPU" in err) == (half == "--fp16")


@pytest.mark.filterwarnings("ignore")
def test_a_folder_of_adapters_names_its_model(folder, capsys, tmp_path, monkeypatch):
    """Relative to the working directory; the same as both named, another text than without, and found missing."""
    torch.manual_seed(1)
    config = LoraConfig(task_type="CAUSAL_LM", target_modules=["c_attn", "c_fc"], init_lora_weights=False)
    config.fan_in_fan_out = True
    get_peft_model(GPT2LMHeadModel.from_pretrained(folder), config).save_pretrained(tmp_path / "a")
    settings = json.loads((tmp_path / "a" / "adapter_config.json").read_text())
    monkeypatch.chdir(folder.parent)
    outputs = []
    for base in ("m", "elsewhere"):
        (tmp_path / "a" / "adapter_config.json").write_text(json.dumps({**settings, "base_model_name_or_path": base}))
        outputs.append(predict(tmp_path / "a", capsys, "--prompt", "the cat", "--tgt_length", 9))
    both = predict(folder, capsys, "--prompt", "the cat", "--tgt_length", 9, "--lora_path", tmp_path / "a")
    none = predict(folder, capsys, "--prompt", "the cat", "--tgt_length", 9)
    texts = [out for _, out, _ in (outputs[0], both, none)]
    assert texts[0] == texts[1] != texts[2]
    assert outputs[1][0] == 1 and "'elsewhere' is neither a folder" in outputs[1][2]
    twice = predict(tmp_path / "a", capsys, "--prompt", "a", "--lora_path", tmp_path / "a")
    assert twice[0] == 1 and "both adapters" in twice[2]


def test_a_prompt_that_is_not_unicode_is_named(folder, capsys, tmp_path):
    (tmp_path / "p.jsonl").write_text('{"prompt": "a"}\n\n{"prompt": "\\ud800"}\n')
    code, _, err = predict(folder, capsys, "--input_file", tmp_path / "p.jsonl")
    assert code == 1 and "p.jsonl, line 3 is not valid Unicode" in err


def piped(monkeypatch, tmp_path, content):
    """Standard input is a file with `content`; None: /dev/null."""
    path = Path(os.devnull)
    if content is not None:
        path = tmp_path / "stdin"
        path.write_bytes(content)
    monkeypatch.setattr(sys, "stdin", open(path, encoding="utf-8"))


@pytest.mark.parametrize(
    ("content", "prompts"),
    [
        (b"the cat\r\n\nthe dog sat\n", ["the cat", "the dog sat"]),
        (b'{"src": "the cat", "id": 1}\n{"prompt": "the dog sat"}', ["the cat", "the dog sat"]),
        (b'{"prompt": "the cat"}\nthe dog sat', ['{"prompt": "the cat"}', "the dog sat"]),  # text, as one line is
    ],
)
def test_piped_prompts_are_continued(folder, capsys, tmp_path, monkeypatch, content, prompts):
    wanted = predict(folder, capsys, "--tgt_length", 5, "--prompt", *prompts)[1]
    piped(monkeypatch, tmp_path, content)
    for words in ((), ("--input_file", "-")):
        sys.stdin.seek(0)
        code, out, err = predict(folder, capsys, "--tgt_length", 5, "--output_file", tmp_path / "o", *words)
        rows = [json.loads(line) for line in (tmp_path / "o").read_text().splitlines()]
        assert (code, out, [row["prompt"] for row in rows]) == (0, wanted, prompts), err
        assert ("read as JSON lines" in err) == content.startswith(b'{"src"')


def test_an_array_is_read_by_its_items_and_others_are_refused(folder, capsys, tmp_path):
    wanted = predict(folder, capsys, "--tgt_length", 5, "--prompt", "the cat", "a")[1]
    (tmp_path / "p.json").write_text('[\n{"prompt": "the cat"},\n {"text": "a"}]')
    assert predict(folder, capsys, "--tgt_length", 5, "--input_file", tmp_path / "p.json")[1] == wanted
    for content, name, says in (
        (b'[{"text": "a"}, {"txt": "b"}]', "p.json", "p.json, item 2: expected an object with a text"),
        (b"[1, ", "p.json", "p.json: broken JSON array"),
        (b"[ ]", "p.json", "p.json holds no prompts"),
        (b"\x1f\x8b\x08", "p.jsonl.gz", "p.jsonl.gz, line 1: not UTF-8 (byte 8b at column 2); unpack it"),
    ):
        (tmp_path / name).write_bytes(content)
        code, out, err = predict(folder, capsys, "--input_file", tmp_path / name)
        assert (code, out) == (1, "") and says in err


@pytest.mark.parametrize("content", [None, b"", b" \n\n", "closed"])
def test_without_piped_prompts_the_built_in_ones_are_continued(folder, capsys, tmp_path, monkeypatch, content):
    """As `python predict_generation.py` alone does in the original; an empty pipe is logged."""
    if content == "closed":
        monkeypatch.setattr(sys, "stdin", None)
    else:
        piped(monkeypatch, tmp_path, content)
    code, _, err = predict(folder, capsys, "--tgt_length", 2, "--src_length", 20, "--output_file", tmp_path / "o")
    rows = [json.loads(line) for line in (tmp_path / "o").read_text(encoding="utf-8").splitlines()]
    assert code == 0 and [row["prompt"] for row in rows] == list(DEFAULT_PROMPTS), err
    assert ("standard input is empty" in err) == isinstance(content, bytes)


def test_a_flag_overrides_piped_prompts(folder, capsys, tmp_path, monkeypatch):
    (tmp_path / "p.txt").write_text("the cat")
    piped(monkeypatch, tmp_path, b"\xff not even text")
    outs = [
        predict(folder, capsys, "--tgt_length", 5, *words)[1]
        for words in (("--prompt", "the cat"), ("--input_file", tmp_path / "p.txt"))
    ]
    assert outs[0] == outs[1] != ""
    code, _, err = predict(folder, capsys)
    assert code == 1 and "standard input, line 1: not UTF-8 (byte ff at column 1)" in err


def test_a_prompt_that_is_cut_or_too_long_is_named(folder, capsys, tmp_path):
    (tmp_path / "p.txt").write_text("the cat\n\n" + "the cat sat on the mat " * 3 + "\n" + "the cat " * 500)
    words = ("--input_file", tmp_path / "p.txt", "--tgt_length", 60)
    code, out, err = predict(folder, capsys, *words, "--src_length", 10)
    assert code == 0 and "2 of 3 prompts are longer than --src_length 10" in err
    assert f"{tmp_path}/p.txt, line 3; {tmp_path}/p.txt, line 4" in err
    assert "leave no room for 60 new tokens" in err and out.count("\n") >= 3
    code, _, err = predict(folder, capsys, *words, "--src_length", 2000)
    assert code == 1 and "p.txt, line 4: the prompt of " in err


@pytest.mark.parametrize("words", ["", "--num_beams 2 --bf16"])  # every other search: tests/inference
def test_nan_weights_are_an_error_with_exit_code_1(folder, tmp_path, capsys, words):
    shutil.copytree(folder, tmp_path / "m")
    model = GPT2LMHeadModel.from_pretrained(folder)
    with torch.no_grad():
        model.transformer.h[1].mlp.c_fc.weight[2, 3] = float("nan")
    model.save_pretrained(tmp_path / "m")
    code, out, err = predict(tmp_path / "m", capsys, "--prompt", "the", "--tgt_length", 3, *words.split())
    assert code == 1 and out == "" and f"the model {tmp_path}/m computes NaN" in err
    assert "transformer.h.1.mlp.c_fc.weight" in err


def test_a_terminal_shows_the_same_as_a_file(folder, tmp_path):
    """Through a pseudo terminal: the pieces are the whole text, no character is split."""
    command = [sys.executable, str(ROOT / "scripts/predict_generation.py"), "--model_name_or_path", str(folder)]
    words = ["--device", "cpu", "--tgt_length", "40", "--do_sample", "--output_file", str(tmp_path / "o")]
    words += ["--prompt", "今天😀", "the"]
    master, terminal = pty.openpty()
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "LC_ALL": "C"}
    process = subprocess.Popen([*command, *words], stdout=terminal, stderr=subprocess.DEVNULL, env=environment)
    os.close(terminal)
    seen = b""
    try:
        while part := os.read(master, 4096):
            seen += part
    except OSError:  # the other end is closed
        pass
    assert process.wait(60) == 0, seen
    os.close(master)
    texts = [json.loads(line)["continuation"] for line in (tmp_path / "o").read_text(encoding="utf-8").splitlines()]
    assert seen.decode().replace("\r\n", "\n") == "\n".join([*texts, ""])
    assert len(texts) == 2 and all(texts)


def test_a_disk_that_is_full_at_the_line_of_the_listing_leaves_no_result(folder, capsys, tmp_path):
    """Else the result would count as a file of others, and the same command would be refused."""
    listing, output = tmp_path / owned.LISTING, tmp_path / "out.jsonl"
    listing.write_text("\n" * 20_000)
    words = ["--prompt", "the cat", "--output_file", output]
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (20_010, resource.RLIM_INFINITY))  # stands for the full disk
        assert predict(folder, capsys, *words)[0] == 1
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    assert [path.name for path in tmp_path.iterdir()] == [listing.name]
    assert predict(folder, capsys, *words)[0] == 0 and owned.entry_of(tmp_path, output.name).command == "predict"
    assert predict(folder, capsys, *words)[0] == 0  # the same command replaces it
