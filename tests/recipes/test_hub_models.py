"""Models of the hub by OWNER/NAME, from its cache: every command takes them as it takes a folder."""

import json
import shutil

import pytest
import torch
from transformers import AutoModelForCausalLM

from gptlm.cli import main
from gptlm.model.tokenizer import train_tokenizer

TEXT = "the cat sat on a mat while two dogs ran far away from all those birds in our old garden"
TRAINED = (
    "--device cpu --max_steps 2 --save_steps 100 --per_device_train_batch_size 2 --do_train --report_to none "
    "--learning_rate 0 --disable_tqdm"
)


@pytest.fixture
def cached(tiny_model, tmp_path, monkeypatch):
    """A model with a tokenizer as `owner/name` in the hub's cache; returns its folder there. Nobody serves the hub."""
    repository = tmp_path / "cache" / "models--owner--name"
    snapshot = repository / "snapshots" / "607a30d783dfa663caf39e06633721c8d4cfcd7e"
    shutil.copytree(tiny_model, snapshot)
    train_tokenizer([TEXT] * 5, 330).save_pretrained(snapshot)
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text(snapshot.name)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", "http://127.0.0.1:9")
    monkeypatch.chdir(tmp_path)
    (tmp_path / "examples.json").write_text(json.dumps([{"src": f"{word} ", "tgt": word} for word in TEXT.split()]))
    (tmp_path / "text.jsonl").write_text("\n".join(json.dumps({"text": TEXT}) for _ in range(30)))
    return snapshot


def assert_same_weights(found, wanted):
    theirs = AutoModelForCausalLM.from_pretrained(found).state_dict()
    for name, weight in AutoModelForCausalLM.from_pretrained(wanted).state_dict().items():
        assert torch.equal(theirs[name], weight), name


def test_sft_starts_from_its_weights_and_names_it(cached, tmp_path):
    words = f"sft --model_name_or_path owner/name --dataset_name_or_path examples.json --output_dir out {TRAINED}"
    assert main(words.split()) == 0
    assert_same_weights("out", cached)
    assert "base_model: owner/name" in (tmp_path / "out" / "README.md").read_text()


def test_adapters_name_it_and_are_merged_with_it(cached, tmp_path):
    words = (
        f"sft --lora --model_name_or_path owner/name --dataset_name_or_path examples.json --output_dir out {TRAINED}"
    )
    assert main(words.split()) == 0
    settings = json.loads((tmp_path / "out" / "adapter_config.json").read_text())
    assert settings["base_model_name_or_path"] == "owner/name"
    assert main("merge-lora --lora_path out --output_path merged".split()) == 0
    assert (tmp_path / "merged" / "model.safetensors").is_file()


def test_pretraining_goes_on_with_it(cached, tmp_path):
    words = "preprocess --input_path text.jsonl --model_name_or_path owner/name --output_prefix data/text --append_eos"
    assert main(words.split()) == 0
    words = f"pretrain --continue_training --model_name_or_path owner/name --input_dir data --output_dir out {TRAINED}"
    assert main([*words.split(), "--max_seq_length", "16", "--split", "100,0,0"]) == 0
    assert_same_weights("out", cached)


@pytest.mark.parametrize(
    "words",
    [
        "predict --model_name_or_path owner/name --device cpu --tgt_length 2 --prompt the",
        "evaluate --task TEXT --eval_path text.jsonl --model_name_or_path owner/name --device cpu --max_seq_length 16",
        "convert --from owner/name --to hf --output_dir converted",
        "sft --print_config --model_name_or_path owner/name --dataset_name_or_path examples.json --output_dir o",
        "plan --model_name_or_path owner/name --num_gpus 2",
    ],
)
def test_other_commands_take_it_as_a_folder(cached, capsys, words):
    assert main(words.split()) == 0
    by_name = capsys.readouterr().out
    shutil.rmtree("converted", ignore_errors=True)
    assert main(words.replace("owner/name", str(cached)).split()) == 0
    if words.startswith("predict"):
        assert by_name == capsys.readouterr().out


@pytest.mark.parametrize(
    "command", ["sft --dataset_name_or_path examples.json --do_train", "predict --prompt a", "plan"]
)
def test_without_network_one_sentence_names_both_places(cached, capsys, command, monkeypatch):
    for name in ("https_proxy", "HTTPS_PROXY", "all_proxy", "ALL_PROXY"):
        monkeypatch.delenv(name, raising=False)
    more = {"sft": "--output_dir o", "predict": "", "plan": "--num_gpus 2"}[command.split()[0]]
    assert main([*command.split(), "--model_name_or_path", "other/name", *more.split()]) in (1, 2)
    (line,) = [line for line in capsys.readouterr().err.splitlines() if "error" in line]
    assert "other/name (no folder here has this name) are neither in the local cache" in line
    assert "hf download other/name --local-dir DIR" in line
