"""Results of commands: the same command on the same input replaces them, another one with --overwrite only."""

import json
import os
import shutil

import pytest

from gptlm.cli import main
from gptlm.model.tokenizer import train_tokenizer

TEXT = "the cat sat on the mat\n\nthe dog lay on the rug\n\n" * 30


@pytest.fixture(scope="module")
def model(tiny_model, tmp_path_factory):
    folder = tmp_path_factory.mktemp("with-tokenizer") / "model"
    shutil.copytree(tiny_model, folder)
    train_tokenizer([TEXT], 290).save_pretrained(folder)
    return folder


@pytest.fixture
def work(tmp_path, monkeypatch):
    (tmp_path / "corpus.txt").write_text(TEXT)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def tokenizer(*words):
    return main(["tokenizer", "--input_path", "corpus.txt", "--output_dir", "t", *words])


def preprocess(model, *words):
    command = ["--input_path", "corpus.txt", "--model_name_or_path", str(model), "--output_prefix", "d/c"]
    return main(["preprocess", *command, *words])


def predict(model, *words):
    command = [
        "--model_name_or_path",
        str(model),
        "--device",
        "cpu",
        "--tgt_length",
        "2",
        "--input_file",
        "prompts.txt",
    ]
    return main(["predict", *command, "--output_file", "texts.jsonl", *words])


def copy(model, *words):
    if not os.path.exists("d/c.bin"):
        assert preprocess(model) == 0
    return main(["data", "convert", "--input", "d/c", "--output_prefix", "e/c", *words])


CASES = {  # command, a file of the result, other arguments
    "tokenizer": (
        lambda model, *words: tokenizer("--vocab_size", "280", *words),
        "t/tokenizer.json",
        "--min_frequency=3",
    ),
    "preprocess": (preprocess, "d/c.bin", "--append_eos"),
    "predict": (predict, "texts.jsonl", "--seed=3"),
    "data": (copy, "e/c.idx", "--vocab_size=400"),
}


@pytest.mark.parametrize("name", CASES)
def test_a_result_is_replaced_by_the_same_command_or_with_overwrite(model, work, capfd, name):
    call, file, other = CASES[name]
    (work / "prompts.txt").write_text("the cat\n")
    for number in (1, 2):
        assert call(model) == 0
        said = "".join(capfd.readouterr()).count("replaced, the same command made it of the same input: ")
        assert said == number - 1
    made = (work / file).read_bytes()
    assert call(model, other) == 2
    assert "of other arguments or another input; --overwrite replaces it" in capfd.readouterr().err
    assert (work / file).read_bytes() == made
    assert call(model, other, "--overwrite") == 0
    capfd.readouterr()
    (work / file).write_text("mine")  # from here on it is another's
    for words in ((), ("--overwrite",), (other,), (other, "--overwrite")):
        assert call(model, *words) == 2
        error = capfd.readouterr().err
        assert f"{file} exists, and gptlm did not write it as it is now; move it elsewhere, or give another" in error
        assert (work / file).read_text() == "mine"


def test_another_input_needs_overwrite(model, work, capfd):
    assert preprocess(model) == 0
    before = (work / "d/c.bin").read_bytes()
    (work / "corpus.txt").write_text(TEXT + "the end\n")
    assert preprocess(model) == 2 and "another input" in capfd.readouterr().err
    assert (work / "d/c.bin").read_bytes() == before
    assert preprocess(model, "--overwrite") == 0 and (work / "d/c.bin").read_bytes() != before


@pytest.mark.parametrize("spelling", ["prompts.jsonl", "./d/../prompts.jsonl", "link", "hard link"])
def test_texts_do_not_replace_the_prompts(model, work, capfd, spelling):
    prompts = json.dumps({"prompt": "the cat"}) + "\n"
    (work / "prompts.jsonl").write_text(prompts)
    (work / "d").mkdir()
    (work / "link").symlink_to("prompts.jsonl")
    (work / "hard link").hardlink_to(work / "prompts.jsonl")
    for words in ((), ("--overwrite",)):
        assert predict(model, "--input_file", "prompts.jsonl", "--output_file", spelling, *words) == 2
        assert f"{os.path.basename(spelling)} is what the command reads; give another" in capfd.readouterr().err
    assert (work / "prompts.jsonl").read_text() == prompts


def test_texts_replace_no_file_of_the_model(model, work, capfd):
    (work / "prompts.txt").write_text("the cat\n")
    before = (model / "config.json").read_bytes()
    assert predict(model, "--output_file", str(model / "config.json"), "--overwrite") == 2
    assert "config.json is a file of" in capfd.readouterr().err and (model / "config.json").read_bytes() == before
    assert predict(model, "--output_file", "/dev/null") == 0  # no file


def test_a_failed_command_leaves_nothing_that_refuses_the_next(model, work, capfd):
    (work / "prompts.txt").write_text("the cat\n")
    assert predict("nowhere") != 0 and not (work / "texts.jsonl").exists()
    assert predict(model, "--batch_size", "0") != 0 and not (work / "texts.jsonl").exists()
    assert predict(model) == 0 and len((work / "texts.jsonl").read_text().splitlines()) == 1


def test_files_of_others_with_names_of_temporary_files_and_locks_stay(model, work, capfd):
    (work / "d").mkdir()
    for name in ("d/c.bin.incomplete", "d/c.meta.json.incomplete", ".out.lock"):
        (work / name).write_text("mine")
    assert preprocess(model) == 0
    assert "d/c.bin.incomplete was not written by gptlm; renamed to" in capfd.readouterr().out
    for name in ("left-c.bin.incomplete", "left-c.meta.json.incomplete"):
        assert (work / "d" / name).read_text() == "mine"
    assert main(["convert", "--from", str(model), "--output", "out", "--verify", "0"]) == 0
    assert (work / ".out.lock").read_text() == "mine"


def test_conversion_keeps_what_is_there(model, work, capfd):
    out = work / "out"
    words = ["convert", "--from", str(model), "--output", "out", "--verify", "0"]
    (out / "sub").mkdir(parents=True)
    (out / "sub" / "notes.txt").write_text("mine")
    assert main([*words, "--overwrite"]) == 2
    assert (
        "out is not empty: sub/notes.txt was not written by gptlm convert; give a new folder" in capfd.readouterr().err
    )
    shutil.rmtree(out)
    (work / ".out.incomplete").mkdir()
    (work / ".out.incomplete/x").write_text("mine")
    assert main(words) == 0 and (work / "left-.out.incomplete/x").read_text() == "mine"
    assert main(words) == 0 and "the same command made it of the same input: " in capfd.readouterr().out
    assert main([*words, "--dtype", "bfloat16"]) == 2 and "--overwrite replaces it" in capfd.readouterr().err
    assert main([*words, "--dtype", "bfloat16", "--overwrite"]) == 0
    assert main([*words[:-3], str(model), "--verify", "0", "--overwrite"]) == 2
    assert "which the command reads" in capfd.readouterr().err
    assert sorted(path.name for path in work.iterdir()) == ["corpus.txt", "left-.out.incomplete", "out"]
