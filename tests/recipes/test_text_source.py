"""Pretraining on text: token files and losses are those of preprocess and pretrain, encoded once, from any source."""

import json
from concurrent.futures import ThreadPoolExecutor

import datasets
import pytest
import torch
from transformers import GPT2Config, GPT2LMHeadModel

from gptlm.commands.preprocess import parse_preprocess
from gptlm.commands.pretrain import parse_pretrain
from gptlm.data import preprocess as encoding
from gptlm.errors import GptlmError, UsageError
from gptlm.model.tokenizer import train_tokenizer
from gptlm.recipes.preprocess import preprocess
from gptlm.recipes.pretrain.run import pretrain
from gptlm.recipes.pretrain.text_source import with_token_files

WORDS = "the cat sat on a mat while two dogs ran far away from all those birds in our old garden".split()
TEXTS = [" ".join(WORDS[number % 7 :: 1 + number % 3]) for number in range(60)]
BASE = (
    "--max_seq_length 8 --per_device_train_batch_size 2 --max_steps 2 --logging_steps 1 --split 80,10,10 --do_train "
    "--continue_training --device cpu --disable_tqdm --report_to none --save_strategy no"
).split()


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    folder = tmp_path_factory.mktemp("model")
    tokenizer = train_tokenizer(TEXTS, 300)
    tokenizer.save_pretrained(folder)
    torch.manual_seed(1)
    config = GPT2Config(vocab_size=len(tokenizer), n_positions=16, n_embd=32, n_layer=1, n_head=2)
    GPT2LMHeadModel(config).save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def lines(tmp_path_factory):
    path = tmp_path_factory.mktemp("text") / "x.jsonl"
    path.write_text("".join(json.dumps({"text": text, "n": 1}) + "\n" for text in TEXTS))
    return path


@pytest.fixture
def parsed(model, tmp_path):
    def run(*words, output="out"):
        argv = [*BASE, "--model_name_or_path", model, "--output_dir", tmp_path / output]
        return parse_pretrain([str(word) for word in [*argv, "--data_cache", tmp_path / "cache", *words]], {})

    return run


def token_bytes(run):
    prefix = with_token_files(run).data.input_dir
    return [open(f"{prefix}{suffix}", "rb").read() for suffix in (".bin", ".idx")]


def losses(folder):
    return [e["loss"] for e in json.loads((folder / "trainer_state.json").read_text())["log_history"] if "loss" in e]


def test_the_files_and_losses_are_those_of_preprocess_and_pretrain(parsed, model, lines, tmp_path, monkeypatch):
    words = ["--input_path", lines, "--output_prefix", tmp_path / "p", "--model_name_or_path", model, "--append_eos"]
    preprocess(parse_preprocess([str(word) for word in words]))
    wanted = [(tmp_path / f"p{suffix}").read_bytes() for suffix in (".bin", ".idx")]
    assert token_bytes(parsed("--train_file", lines)) == wanted
    monkeypatch.setattr(encoding, "write_corpus", None)  # a second start encodes nothing
    monkeypatch.setattr("gptlm.recipes.preprocess.write_corpus", None)
    pretrain(parsed("--train_file", lines))
    pretrain(parsed("--input_dir", tmp_path / "p", output="other"))
    assert losses(tmp_path / "out") == losses(tmp_path / "other") and len(losses(tmp_path / "out")) == 2
    again = parse_pretrain([str(tmp_path / "out" / "run.json"), "--overwrite_output_dir"], {})
    assert again.data.train_file == str(lines) and again.data.input_dir is None


@pytest.mark.parametrize("more", [(), ("--streaming",)])
@pytest.mark.parametrize("kind", ["folder", "saved", "splits", "cached"])
def test_a_dataset_by_name_is_the_same_text(parsed, lines, tmp_path, monkeypatch, kind, more):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "hf")
    table, name = datasets.Dataset.from_list([{"text": text} for text in TEXTS]), tmp_path / "data"
    if kind == "folder":
        name.mkdir()
        table.to_parquet(name / "train-00000-of-00001.parquet")
    elif kind == "saved":
        table.save_to_disk(name)
    elif kind == "splits":
        datasets.DatasetDict({"train": table, "test": table.select(range(3))}).save_to_disk(name)
    else:  # as `hf download` leaves it
        monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))
        snapshot = tmp_path / "hub" / "datasets--me--data" / "snapshots" / ("a" * 40)
        snapshot.mkdir(parents=True)
        (snapshot.parents[1] / "refs").mkdir()
        (snapshot.parents[1] / "refs" / "main").write_text("a" * 40)
        (snapshot / "train.jsonl").write_bytes(lines.read_bytes())
        name = "me/data"
    assert token_bytes(parsed("--dataset_name", name, *more)) == token_bytes(parsed("--train_file", lines))


def test_processes_that_start_together_encode_once(parsed, lines):
    with ThreadPoolExecutor(4) as pool:
        runs = list(pool.map(with_token_files, [parsed("--train_file", lines)] * 4))
    assert len({run.data.input_dir for run in runs}) == 1


def test_other_text_or_columns_are_encoded_anew(parsed, lines, tmp_path):
    first = with_token_files(parsed("--train_file", lines)).data.input_dir
    other = tmp_path / "y.jsonl"
    other.write_text("".join(json.dumps({"body": text}) + "\n" for text in TEXTS))
    second = with_token_files(parsed("--train_file", other, "--text_column", "body")).data.input_dir
    assert first != second and open(f"{first}.bin", "rb").read() == open(f"{second}.bin", "rb").read()


def test_what_is_wrong_is_said(parsed, lines, tmp_path, monkeypatch):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))
    for words, says in (
        (("--dataset_name", "no/where"), "the dataset no/where is neither on this machine nor on the HuggingFace hub"),
        (("--train_file", tmp_path / "none.jsonl"), "none.jsonl: no file ending in"),
        (("--train_file", lines, "--text_column", "body"), "no text under 'body'"),
        (("--dataset_name", lines.parent, "--text_column", "body"), "no column 'body', it has text, n"),
        (("--dataset_name", lines.parent, "--dataset_split", "dev"), "the dev split of the dataset"),
    ):
        with pytest.raises(GptlmError, match=says):
            with_token_files(parsed(*words))
    for words, says in (
        (("--train_file", "x", "--input_dir", "d"), "--input_dir and --train_file each name the data"),
        ((), "--input_dir is missing: the folder with token files; or give text with --train_file or --dataset_name"),
    ):
        with pytest.raises(UsageError, match=says):
            parsed(*words)
    assert any("--streaming has no effect without" in note for note in parsed("--train_file", "x", "--streaming").notes)


def test_a_validation_file_is_what_is_evaluated(model, lines, tmp_path):
    """The losses are those of token files whose split is at the boundary of the two texts."""
    held = tmp_path / "held.jsonl"
    held.write_text("".join(json.dumps({"text": text}) + "\n" for text in [*TEXTS[3:10], "", *TEXTS[40:44]]))
    both = tmp_path / "both.jsonl"
    both.write_text(lines.read_text() + held.read_text())
    words = ["--input_path", both, "--output_prefix", tmp_path / "tokens" / "t", "--model_name_or_path", model]
    preprocess(parse_preprocess([str(word) for word in [*words, "--append_eos"]]))
    at = BASE.index("--split")
    base = [*BASE[:at], *BASE[at + 2 :], "--do_eval", "--eval_iters", "3", "--model_name_or_path", model]
    base += ["--data_cache", tmp_path / "cache"]

    def run(output, *more):
        return parse_pretrain([str(word) for word in [*base, "--output_dir", tmp_path / output, *more]], {})

    of_files = run("a", "--train_file", lines, "--validation_file", held)
    pretrain(of_files)
    pretrain(run("b", "--input_dir", tmp_path / "tokens", "--split", "60,11,0"))
    results = [json.loads((tmp_path / name / "all_results.json").read_text()) for name in "ab"]
    assert losses(tmp_path / "a") == losses(tmp_path / "b")
    assert results[0]["eval_loss"] == results[1]["eval_loss"]
    resolved = with_token_files(of_files)  # from the cache
    assert resolved.data.split == "60,11,0"
    assert resolved.data.input_dir != with_token_files(run("c", "--train_file", lines)).data.input_dir
    again = json.loads((tmp_path / "a" / "run.json").read_text())
    assert again["validation_file"] == str(held)
    with pytest.raises(GptlmError, match="--validation_file: there is no text under 'text'"):
        empty = tmp_path / "empty.jsonl"
        empty.write_text('{"text": ""}\n')
        with_token_files(run("d", "--train_file", lines, "--validation_file", empty))
    for more, says in (
        (
            ("--train_file", lines, "--validation_file", held, "--split", "8,1,1"),
            "--validation_file and --split each say",
        ),
        (("--dataset_name", "x", "--validation_file", held), "--validation_file needs --train_file"),
        (("--input_dir", "x", "--eval_dataset", held), "--eval_dataset needs --train_file"),
    ):
        with pytest.raises(UsageError, match=says):
            run("e", *more)
