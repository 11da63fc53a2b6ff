"""The commands around training."""

import json

import pytest

from gptlm.config.tools import parse_preprocess
from gptlm.errors import UsageError

REST = ["--output_prefix", "x", "--model_name", "t"]


@pytest.mark.parametrize(("word", "megatron"), [("input", True), ("input_path", False)])
def test_the_word_for_the_input_decides_whose_conventions_hold(tmp_path, word, megatron):
    """On the command line and in a JSON file alike."""
    assert parse_preprocess([f"--{word}", "a.jsonl", *REST]).megatron is megatron
    file = tmp_path / "args.json"
    file.write_text(json.dumps({word: "a.jsonl", "output_prefix": "x", "model_name": "t"}))
    assert parse_preprocess([str(file)]).megatron is megatron


def test_several_keys_need_megatron_s_names():
    assert parse_preprocess(["--input", "a.jsonl", "--json-keys", "title", "text", *REST]).arguments.json_keys == [
        "title",
        "text",
    ]
    with pytest.raises(UsageError, match="several --json_keys"):
        parse_preprocess(["--input_path", "a.jsonl", "--json-keys", "title", "text", *REST])
