"""Remote input through fsspec's memory file system: read as local files are, copied once and again when it changes."""

import importlib.util
import json

import fsspec
import pytest
from transformers import AutoTokenizer

from gptlm.commands.preprocess import parse_preprocess
from gptlm.commands.pretrain import parse_pretrain
from gptlm.commands.sft import parse_sft
from gptlm.errors import GptlmError
from gptlm.recipes.common.remote_files import local_copy
from gptlm.recipes.preprocess import preprocess
from gptlm.recipes.pretrain.text_source import with_token_files
from gptlm.recipes.sft.data import load_data
from gptlm.recipes.sft.sources import find_sources
from tests.recipes.test_text_source import TEXTS, model  # noqa: F401 - a fixture

LINES = "".join(json.dumps({"text": text}) + "\n" for text in TEXTS).encode()


@pytest.fixture
def memory():
    system = fsspec.filesystem("memory")
    system.pipe({"/b/train.jsonl": LINES, "/b/deep/dev.jsonl": LINES[: LINES.index(b"\n") + 1]})
    yield system
    system.rm("/b", recursive=True)


def test_training_files_are_read_as_local_ones(memory, model, tmp_path, monkeypatch):  # noqa: F811
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "hf"))
    (tmp_path / "x.jsonl").write_bytes(LINES)

    def tokens(path):
        words = ["--train_file", path, "--model_name_or_path", model, "--output_dir", tmp_path / "o", "--max_steps", 1]
        prefix = with_token_files(parse_pretrain([str(word) for word in words], {})).data.input_dir
        return open(f"{prefix}.bin", "rb").read()

    def encoded(path):
        words = ["--input_path", path, "--output_prefix", tmp_path / "p", "--model_name_or_path", model, "--overwrite"]
        preprocess(parse_preprocess([str(word) for word in words]))
        return (tmp_path / "p.bin").read_bytes()

    def examples(path):
        words = ["--dataset_name_or_path", path, "--model_name_or_path", model, "--output_dir", tmp_path / "o"]
        run = parse_sft([str(word) for word in [*words, "--do_train", "--device", "cpu"]], {})
        return load_data(run, find_sources(run), AutoTokenizer.from_pretrained(model)).digest

    for read in (tokens, encoded, examples):
        assert read("memory://b/train.jsonl") == read(tmp_path / "x.jsonl")


def test_a_copy_is_used_until_the_files_change(memory, tmp_path):
    def copy(path):
        return local_copy("train_file", path, data_cache=str(tmp_path), output_dir=None)

    folder, file = copy("memory://b"), copy("memory://b/train.jsonl")
    assert open(f"{folder}/train.jsonl", "rb").read() == open(file, "rb").read() == LINES
    assert open(f"{folder}/deep/dev.jsonl", "rb").read() == LINES[: LINES.index(b"\n") + 1]
    assert copy("memory://b") == folder and copy("memory://b/*.jsonl") != folder
    memory.pipe("/b/train.jsonl", b'{"text": "new"}\n')
    assert open(copy("memory://b/train.jsonl"), "rb").read() == b'{"text": "new"}\n'
    assert copy(str(tmp_path)) == str(tmp_path)


def test_what_cannot_be_read_is_said(memory, tmp_path, monkeypatch):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    packages = {"s3": "s3fs", "gs": "gcsfs", "abfs": "adlfs", "oci": "ocifs"}
    protocol, package = next(pair for pair in packages.items() if importlib.util.find_spec(pair[1]) is None)
    for url, says in (
        ("memory://b/none.jsonl", "--train_file memory://b/none.jsonl: there is no such file or folder"),
        (f"{protocol}://b/x.jsonl", f"reading {protocol}:// needs {package}; pip install {package}"),
        ("nowhere://b/x", "nowhere:// is no storage that fsspec knows"),
        ("hf://datasets/a/b/x.jsonl", "cannot read --train_file hf://datasets/a/b/x.jsonl: HF_HUB_OFFLINE is set"),
    ):
        with pytest.raises(GptlmError, match=says):
            local_copy("train_file", url, data_cache=str(tmp_path), output_dir=None)
