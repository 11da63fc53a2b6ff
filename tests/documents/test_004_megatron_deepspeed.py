"""The 8-GPU recipes of Megatron-DeepSpeed, command by command and twice, in small form."""

import json
import os
import re
import subprocess
import sys
from importlib.metadata import version

import pytest

from gptlm.cli import main
from gptlm.data.indexed import open_tokens
from gptlm.errors import GptlmError, UsageError
from gptlm.launcher.args import check_cards, parse_launch
from gptlm.model.tokenizer import train_tokenizer
from gptlm.upstream.deepspeed import import_deepspeed
from tests.conftest import ROOT, write_tokens

TEXTS = [f"Dr. Smith wrote {n} letters. He lives in the U.S. and walks.\n\nNo. {n} was lost." for n in range(60)]
TINY = (
    "--num-layers 2 --hidden-size 32 --num-attention-heads 2 --seq-length 16 --max-position-embeddings 16 "
    "--vocab-size 512 --num-gpus-per-node 1 --pipeline-model-parallel-size 1 --micro-batch-size 2 "
    "--global-batch-size 4 --eval-interval 2 --eval-iters 1 --num-workers 0 --split 80,10,10 --device cpu"
).split()


@pytest.fixture
def reader(tmp_path, monkeypatch):
    """A new folder of a reader without network and without nltk's data."""
    import nltk

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(nltk.data, "path", [str(tmp_path / "nltk_data")])
    (tmp_path / "bin").mkdir()
    for name, does in (("curl", 'echo "$@" >> attempts; exit 6'), ("python", 'printf "%s\\0" "$@" > words')):
        (tmp_path / "bin" / name).write_text(f"#!/bin/sh\n{does}\n")
        (tmp_path / "bin" / name).chmod(0o755)
    return tmp_path


def bash(name, *words):
    """Run a script whose `python` notes what it is started with."""
    environment = {**os.environ, "PATH": f"bin:{os.environ['PATH']}", "PYTHON": "bin/python"}
    command = ["bash", str(ROOT / "scripts" / name), *words]
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60)


def typed(reader, name, *words):
    """The words behind `python SCRIPT.py` of a script."""
    result = bash(name, *words)
    assert result.returncode == 0, result.stderr
    return (reader / "words").read_text().split("\0")[1:-1]


def table(said):
    """The last row of the closing table, by column."""
    head, _, row = re.findall(r"^.*?(\| .* \|)$", said, flags=re.M)[-3:]
    return dict(zip(*([cell.strip() for cell in line.strip("|").split("|")] for line in (head, row)), strict=True))


def train(reader, capsys, name, *words):
    """The words of a recipe and then small sizes; returns the closing table and all that was printed."""
    capsys.readouterr()
    assert main(["pretrain", *typed(reader, name, "--data_path=data/my-gpt_text_sentence", *words), *TINY]) == 0
    said = capsys.readouterr().out
    return table(said), said


def history(folder):
    return json.loads((folder / "trainer_state.json").read_text())["log_history"]


def prepare(reader):
    """What the reader brings: a text, and GPT-2's vocabulary and merges in ./data."""
    (reader / "t.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in TEXTS))
    model = json.loads(train_tokenizer(TEXTS, 300).backend_tokenizer.to_str())["model"]
    (reader / "data").mkdir(exist_ok=True)
    (reader / "data" / "gpt2-vocab.json").write_text(json.dumps(model["vocab"]))
    merges = [merge if isinstance(merge, str) else " ".join(merge) for merge in model["merges"]]
    (reader / "data" / "gpt2-merges.txt").write_text("\n".join(["#version: 0.2", *merges]) + "\n")


def test_the_data_step_without_network_says_what_to_bring(reader):
    """One attempt; every missing file with its place; what is there already is not asked for."""
    result = bash("dataset_preprocess_gpt.sh")
    assert result.returncode == 1 and len((reader / "attempts").read_text().splitlines()) == 1
    for told in (
        "vocab.json as ./data/gpt2-vocab.json",
        "merges.txt as ./data/gpt2-merges.txt",
        "--input=FILE_OR_FOLDER",
    ):
        assert told in result.stderr
    prepare(reader)
    result = bash("dataset_preprocess_gpt.sh")
    assert result.returncode == 1 and len((reader / "attempts").read_text().splitlines()) == 2
    assert "gpt2-vocab.json" not in result.stderr and "--input=FILE_OR_FOLDER" in result.stderr


def test_the_document_twice(reader, capsys):
    prepare(reader)
    for _ in range(2):
        words = typed(reader, "dataset_preprocess_gpt.sh", "--input=t.jsonl", "--workers=1")
        assert main(["preprocess", *words]) == 0
        assert "nltk's data for English are missing: sentences are split by nltk's rules" in capsys.readouterr().out
        names = [
            "gpt2-merges.txt",
            "gpt2-vocab.json",
            *(f"my-gpt_text_sentence.{s}" for s in ("bin", "idx", "meta.json")),
        ]
        assert sorted(path.name for path in (reader / "data").glob("[!.]*")) == names
        assert len(open_tokens("data/my-gpt_text_sentence")) == len(TEXTS)

    kept = reader / "ckpts" / "ckpts_tmp"
    for size in ("345M", "345M_without_mp"):  # the same sizes of the model
        row, _ = train(reader, capsys, "train_full_8p.sh", f"--model_size={size}", "--train_iters=4")
        assert (row["NAME"], row["seq_len"], row["Steps"]) == ("1p-CPU", "16", "4")
        losses = [line["eval_loss"] for line in history(kept / size) if "eval_loss" in line]
        assert len(losses) == 2 and float(row["samples/s"]) > 0 and float(row["PPL"]) <= float(row["final PPL"])
    for _ in range(2):
        row, said = train(reader, capsys, "train_performance_8p.sh", "--model_size=345M", "--train_iters=3")
        assert row["Steps"] == "3" and float(row["samples/s"]) > 0 and "resuming" not in said
    folders = sorted(str(path.relative_to(kept)) for path in kept.glob("*/checkpoint-*"))
    assert folders == ["345M-performance/checkpoint-3", "345M/checkpoint-4", "345M_without_mp/checkpoint-4"]

    row, said = train(reader, capsys, "train_full_8p.sh", "--model_size=345M", "--train_iters=4")
    assert (row["Steps"], row["samples/s"], row["tokens/s"]) == ("-", "-", "-") and float(row["PPL"]) > 1
    assert "made no step: the checkpoint was at step 4 already" in said
    row, said = train(reader, capsys, "train_full_8p.sh", "--model_size=345M", "--train_iters=6")
    assert row["Steps"] == "5-6" and "1 evaluations" in said and "last 2 log lines" in said


def test_save_moves_a_recipe(reader, capsys):
    """The recipe's own folders are neither read nor written, and a measurement in DIR removes nothing there."""
    prepare(reader)
    assert main(["preprocess", *typed(reader, "dataset_preprocess_gpt.sh", "--input=t.jsonl", "--workers=1")]) == 0
    train(reader, capsys, "train_full_8p.sh", "--train_iters=2")
    row, _ = train(reader, capsys, "train_full_8p.sh", "--train_iters=2", "--save", "own")
    assert row["Steps"] == "2"
    row, _ = train(reader, capsys, "train_performance_8p.sh", "--train_iters=3", "--save=own")
    assert row["Steps"] == "3-3"
    assert [path.name for path in (reader / "ckpts" / "ckpts_tmp").iterdir()] == ["345M"]


def test_values_of_the_document_s_variables_that_are_not_set(reader):
    """`--train_iters=$train_iters` and `--model_size=$selected_model_size` with empty variables are the defaults."""
    words = typed(reader, "train_full_8p.sh", "--data_path=d", "--model_size=", "--train_iters=")
    assert words == "-c gpt2-345m --data_path d --train_iters 500000".split()
    words = typed(reader, "train_performance_8p.sh", "--data_path", "d", "--model_size=1.3B", "--train_iters=")
    assert words[:6] == "-c gpt-1.3b --data_path d --train_iters 300".split()
    for given, said in (
        (["--data_path="], "--data_path is missing"),
        (["--data_path"], "--data_path needs a value"),
        (["--data_path=d", "--model_size=7B"], "expected 345M, 1.3B, 2.7B, 3.7B or 345M_without_mp"),
    ):
        result = bash("train_full_8p.sh", *given)
        assert result.returncode == 2 and said in result.stderr


@pytest.mark.parametrize("name", ["checkpoint-300", "latest_checkpointed_iteration.txt"])
def test_a_checkpoint_without_a_size_is_not_resumed(reader, name):
    """Ours, or one of the originals, directly in ckpts_tmp: the size of its model does not show."""
    (reader / "ckpts" / "ckpts_tmp" / name).mkdir(parents=True)
    result = bash("train_full_8p.sh", "--data_path=d")
    assert result.returncode == 2 and "move them to ckpts/ckpts_tmp/345M" in result.stderr
    assert typed(reader, "train_full_8p.sh", "--data_path=d", "--save", "x")[-2:] == ["--save", "x"]
    assert "ckpts/ckpts_tmp/345M-performance" in typed(reader, "train_performance_8p.sh", "--data_path=d")


def test_the_requirements_are_ours_with_the_tested_versions():
    lines = [line for line in (ROOT / "requirements.txt").read_text().splitlines() if not line.startswith("#")]
    assert lines == ["-c requirements/constraints.txt", "-e .[sentences]"]
    assert (ROOT / "requirements" / "constraints.txt").is_file() and "sentences = [" in (
        ROOT / "pyproject.toml"
    ).read_text()


def test_the_original_s_deepspeed_is_named(tmp_path, monkeypatch):
    """`pip3 install deepspeed==0.6.0`, as the document says, cannot be imported with a new torch."""
    (tmp_path / "deepspeed").mkdir()
    (tmp_path / "deepspeed" / "__init__.py").write_text("from torch._six import inf\n")
    (tmp_path / "deepspeed-0.6.0.dist-info").mkdir()
    (tmp_path / "deepspeed-0.6.0.dist-info" / "METADATA").write_text("Name: deepspeed\nVersion: 0.6.0\n")
    for name in [name for name in sys.modules if name.split(".")[0] == "deepspeed"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.syspath_prepend(tmp_path)
    assert version("deepspeed") == "0.6.0"
    with pytest.raises(GptlmError, match=r"DeepSpeed 0\.6\.0 cannot be imported.*pip install -r requirements\.txt"):
        import_deepspeed()


def test_fewer_cards_than_the_recipe_s_eight(reader, capsys, monkeypatch):
    """Refused before anything starts; the document has no command for fewer."""
    words = ["pretrain", *typed(reader, "train_full_8p.sh", "--data_path=data/c")]
    write_tokens(reader / "data" / "c")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1")
    assert main(words) == 2
    assert "8 processes on a machine with 2 GPUs" in capsys.readouterr().err
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    plan = parse_launch(["--nproc_per_node", "8", "-m", "gptlm", "pretrain"], "")
    check_cards(plan, "", lambda: 1)  # none visible: the CPUs do it
    with pytest.raises(UsageError, match="1 GPUs.*--num_gpus_per_node 1"):
        check_cards(plan, None, lambda: 1)


def test_messages_name_the_flag_of_the_document(reader, capsys):
    assert main(["pretrain", *typed(reader, "train_full_8p.sh", "--data_path=nowhere"), *TINY]) == 1
    assert "nowhere: No such file or directory; --data_path takes a folder" in capsys.readouterr().err


@pytest.mark.distributed
def test_two_stages_twice(corpus_folder, tmp_path):
    """As typed, with the recipe's pipeline: the second start makes no step and evaluates."""
    data = next((corpus_folder / "mmap").glob("*.bin")).with_suffix("")
    small = [*TINY, "--num-gpus-per-node", "2", "--pipeline-model-parallel-size", "2"]
    words = [
        str(ROOT / "scripts/train_full_8p.sh"),
        f"--data_path={data}",
        "--model_size=345M",
        "--train_iters=2",
        *small,
    ]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", "PYTHON": sys.executable}
    rows = []
    for _ in range(2):
        done = subprocess.run(
            ["bash", *words], cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=240
        )
        assert done.returncode == 0, done.stdout[-1500:] + done.stderr[-2500:]
        rows.append(table(done.stdout))
    assert [(row["NAME"], row["Steps"]) for row in rows] == [("2p-CPU", "2"), ("2p-CPU", "-")]
    assert rows[1]["samples/s"] == "-" and rows[1]["final PPL"] == rows[0]["final PPL"]
