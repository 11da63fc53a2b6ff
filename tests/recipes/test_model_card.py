"""Model cards: the hub's metadata in every saved model, and nobody else's README.md is replaced."""

import json

import pytest
from huggingface_hub import ModelCard

from gptlm.commands.pretrain import parse_pretrain
from gptlm.commands.sft import parse_sft
from gptlm.recipes.common.model_card import card_of_folder
from gptlm.recipes.pretrain.run import pretrain
from gptlm.recipes.sft.run import sft
from tests.recipes.test_text_source import BASE, TEXTS, lines, model  # noqa: F401 - fixtures


@pytest.fixture
def words(model, tmp_path):  # noqa: F811
    argv = [*BASE, "--model_name_or_path", model, "--output_dir", tmp_path / "out", "--data_cache", tmp_path / "cache"]
    return [str(word) for word in argv if word not in ("--split", "80,10,10", "--max_seq_length", "8")]


def test_a_pretrained_model_has_a_card_that_the_hub_reads(words, lines, tmp_path):  # noqa: F811
    path, own = tmp_path / "out" / "README.md", "my own words"
    words += ["--max_seq_length", "8", "--split", "80,10,10", "--train_file", str(lines)]
    metrics = pretrain(parse_pretrain([*words, "--do_eval", "--eval_iters", "1"], {}))
    card = ModelCard.load(path)
    assert card.data.library_name == "transformers" and card.data.pipeline_tag == "text-generation"
    assert {"gptlm", "pretraining"} <= {*card.data.tags} and card.data.base_model is None
    assert f"| eval_loss | {metrics['eval_loss']:.4g} |" in card.text and str(tmp_path) not in str(card)
    path.write_text(own)
    pretrain(parse_pretrain([*words, "--overwrite_output_dir"], {}))
    assert path.read_text() == own


def test_adapters_and_their_merged_model_have_cards(words, tmp_path):
    data = tmp_path / "d.jsonl"
    data.write_text("".join(json.dumps({"src": text[:9], "tgt": text[9:]}) + "\n" for text in TEXTS))
    more = ["--dataset_name_or_path", str(data), "--lora", "--merge_weights", "--do_eval", "--generate_num", "0"]
    metrics = sft(parse_sft([*words, *more], {}))
    card = ModelCard.load(tmp_path / "out" / "README.md")
    assert card.data.library_name == "peft" and card.data.metrics == ["accuracy", "perplexity"]
    assert "PeftModel.from_pretrained" in card.text and f"| eval_loss | {metrics['eval_loss']:.4g} |" in card.text
    assert ModelCard.load(tmp_path / "out" / "merged" / "README.md").data.library_name == "transformers"


def test_names_of_the_hub_are_metadata_and_paths_are_not(tmp_path):
    card_of_folder(tmp_path, "converted", "openai-community/gpt2")
    assert ModelCard.load(tmp_path / "README.md").data.base_model == "openai-community/gpt2"
    card_of_folder(tmp_path, "converted", str(tmp_path))
    assert ModelCard.load(tmp_path / "README.md").data.base_model is None
