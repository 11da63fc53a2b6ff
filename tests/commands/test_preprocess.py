"""The commands around training."""

import json

import pytest

from gptlm.commands.preprocess import parse_preprocess
from gptlm.commands.pretrain import parse_pretrain
from gptlm.errors import UsageError, with_flags_shown

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
    with pytest.raises(UsageError, match="--json-keys with several keys"):
        parse_preprocess(["--input_path", "a.jsonl", "--json-keys", "title", "text", *REST])


@pytest.mark.parametrize("shard", ["0/2", "3/2", "1", "a/b", "1/", "-1/2", "²/3", "1/2/3"])
def test_a_shard_is_i_of_n(shard):
    with pytest.raises(UsageError, match="expected i/n with i from 1 to n"):
        parse_preprocess(["--input", "a.jsonl", "--shard", shard, *REST])
    assert parse_preprocess(["--input", "a.jsonl", "--shard", "2/8", *REST]).shard == (2, 8)


def test_a_limit_does_not_go_with_shards():
    with pytest.raises(UsageError, match="--max_doc_num counts documents of the whole input"):
        parse_preprocess(["--input", "a.jsonl", "--shard", "1/2", "--max_doc_num", "3", *REST])


def test_flags_of_sentences_are_noted_without_them_and_explained_with_them():
    job = parse_preprocess(["--input", "a", "--keep-newlines", "--chinese", "--sequence_level", "sentence", *REST])
    assert [note.split()[0] for note in job.notes] == ["--keep_newlines", "--sequence_level", "--chinese"]
    assert all("no effect" in note for note in job.notes) and job.arguments.sequence_level == "document"
    for words in ([], ["--sequence_level", "sentence"]):
        (note,) = parse_preprocess(["--input", "a", "--split-sentences", *words, *REST]).notes
        assert "shuffles the sentences of all documents" in note


def test_a_class_of_tokenizers_beside_a_folder_is_named_once(tmp_path):
    """PaddleNLP's --tokenizer_name is a class; GPT's own says nothing new, another one has no effect."""
    common = ["--input_path", "a.jsonl", "--output_prefix", "o", "--model_name_or_path", "gpt2"]
    assert parse_preprocess([*common, "--tokenizer_name", "GPTTokenizer"]).notes == ()
    (note,) = parse_preprocess([*common, "--tokenizer_name", "BertTokenizer"]).notes
    assert "--tokenizer_name BertTokenizer has no effect" in with_flags_shown(note, {}) and "gpt2" in note
    (note,) = parse_preprocess([*common, "--tokenizer_name", str(tmp_path)]).notes
    assert f"{tmp_path} has no effect: the tokenizer of gpt2 is used" in note
    with pytest.raises(UsageError, match="BertTokenizer is a class without a vocabulary"):
        parse_preprocess([*common[:4], "--tokenizer_name", "BertTokenizer"])


def test_a_class_of_tokenizers_in_training(tmp_path):
    words = "--model_name_or_path gpt2 --input_dir x --output_dir y --do_train --max_steps 1".split()
    run = parse_pretrain([*words, "--tokenizer_name_or_path", "BertTokenizer"], {}, printing=True)
    assert run.model.tokenizer_name_or_path is None
    assert any("BertTokenizer has no effect: the files of gpt2 determine" in note for note in run.notes)
