"""The tokenizer of fine-tuning: that of the model and of the checkpoint."""

import pytest

from gptlm.commands.sft import parse_sft
from gptlm.errors import GptlmError
from gptlm.model.tokenizer import add_tokens, load_tokenizer, train_tokenizer
from gptlm.recipes.sft.tokenizer import check_tokenizer, find_sft_tokenizer


@pytest.fixture
def model(tiny_model, tmp_path):
    """A folder with the sizes of the tiny model and a tokenizer of its own."""
    folder = tmp_path / "model"
    train_tokenizer(["the cat sat on the mat " * 20], 280).save_pretrained(folder)
    for name in ("config.json", "model.safetensors"):
        (folder / name).write_bytes((tiny_model / name).read_bytes())
    return folder


def find(model, *words):
    argv = ["--model_name_or_path", str(model), "--dataset_name_or_path", "d", "--output_dir", "o", *map(str, words)]
    return find_sft_tokenizer(parse_sft(argv, {}))[0]


def test_a_checkpoint_of_another_tokenizer_is_refused(model, tmp_path):
    """As many entries as before, so that every size fits: only the meaning of the last row differs."""
    find(model, "--additional_special_tokens", "<x>").save_pretrained(tmp_path / "checkpoint-2")
    check_tokenizer(tmp_path / "checkpoint-2", find(model, "--additional_special_tokens", "<x>"))
    with pytest.raises(GptlmError, match=r"another tokenizer \(only there: <x>; only here: <y>\); give the same"):
        check_tokenizer(tmp_path / "checkpoint-2", find(model, "--additional_special_tokens", "<y>"))
    with pytest.raises(GptlmError, match=r"another tokenizer \(only there: <x>\)"):
        check_tokenizer(tmp_path / "checkpoint-2", find(model))
    check_tokenizer(tmp_path, find(model))  # no tokenizer there


def test_a_tokenizer_of_other_ids_than_the_model_s_is_warned_of(model, tmp_path, caplog):
    more = load_tokenizer(str(model))
    add_tokens(more, ["<user>"])
    more.save_pretrained(tmp_path / "more")
    find(model, "--tokenizer_name_or_path", tmp_path / "more")
    find(model)
    assert "entries of the model's own tokenizer" not in caplog.text
    train_tokenizer(["zebra quilt fox jumped over lazy rivers " * 20], 280).save_pretrained(tmp_path / "other")
    find(model, "--tokenizer_name_or_path", tmp_path / "other")
    assert "of the model's own tokenizer" in caplog.text and "have no or another id in that of" in caplog.text
