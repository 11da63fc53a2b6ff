"""What every command saves beside the weights: a tokenizer and generation settings that stock transformers accepts."""

import json
import logging

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, GPT2Config, GPT2LMHeadModel, GPT2Tokenizer, pipeline

from gptlm.cli import main
from gptlm.commands.pretrain import parse_pretrain
from gptlm.commands.sft import parse_sft
from gptlm.model.tokenizer import fingerprint, fit_to_model, load_tokenizer, train_tokenizer
from gptlm.recipes.pretrain.run import pretrain
from gptlm.recipes.sft.run import sft
from tests.conftest import write_tokens
from tests.recipes.server_files import assert_servers_can_read

FEW = "--max_steps 1 --per_device_train_batch_size 1 --device cpu --disable_tqdm --report_to none --do_train".split()


@pytest.fixture(scope="module")
def work(tmp_path_factory):
    """`base`: 32 positions, a tokenizer without padding token or limit, settings that transformers does not save."""
    folder = tmp_path_factory.mktemp("saved")
    trained = train_tokenizer(["the cat sat on the mat " * 20], 280)
    plain = GPT2Tokenizer(tokenizer_object=trained.backend_tokenizer, eos_token="<|endoftext|>")
    plain.save_pretrained(folder / "base")
    torch.manual_seed(0)
    config = GPT2Config(vocab_size=len(plain), n_positions=32, n_embd=16, n_layer=1, n_head=2, eos_token_id=0)
    GPT2LMHeadModel(config).save_pretrained(folder / "base")
    (folder / "base/generation_config.json").write_text('{"temperature": 0.7, "eos_token_id": 0}')
    (folder / "d.jsonl").write_text("\n".join(['{"src": "the cat", "tgt": "sat on"}'] * 3))
    return folder


def save(work, how):
    """The folder that a command has saved."""
    words = [*FEW, "--model_name_or_path", str(work / "base"), "--output_dir", str(work / how)]
    data = ["--dataset_name_or_path", str(work / "d.jsonl")]
    if how == "pretrain":
        write_tokens(work / "c", vocab_size=250)
        new = ["--continue_training", "0", "--tokenizer_name_or_path", str(work / "base")]
        pretrain(parse_pretrain([*words, *new, "--input_dir", str(work / "c"), "--max_seq_length", "16"], {}))
    elif how == "sft":
        sft(parse_sft([*words, *data], {}))
    elif how == "merge":
        sft(parse_sft([*words, *data, "--lora", "--merge_weights"], {}))
        tokenizer = AutoTokenizer.from_pretrained(work / how)
        assert (tokenizer.model_max_length, tokenizer.pad_token) == (32, "<|endoftext|>")
        return work / how / "merged"
    else:
        assert main(["convert", "--from", str(work / "base"), "--to", "hf", "--output", str(work / how)]) == 0
    return work / how


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("how", ["pretrain", "sft", "merge", "convert"])
def test_stock_transformers_loads_the_folder_without_a_warning(work, how, caplog):
    """Batches of unlike length: without a padding token the pipeline refuses them, and `generate` warns."""
    folder = save(work, how)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    assert (tokenizer.model_max_length, tokenizer.pad_token) == (32, "<|endoftext|>")
    assert len(tokenizer) == len(AutoTokenizer.from_pretrained(work / "base"))
    settings = json.loads((folder / "generation_config.json").read_text())
    assert settings["pad_token_id"] == 0 and settings["eos_token_id"] in (0, [0])
    assert not any(name.startswith("_") for name in settings) and "temperature" not in settings
    assert_servers_can_read(folder)
    transformers_log = logging.getLogger("transformers")
    transformers_log.addHandler(caplog.handler)
    transformers_log.setLevel(logging.WARNING)
    caplog.clear()
    try:
        tokenizer.padding_side = "left"
        writer = pipeline("text-generation", model=str(folder), tokenizer=tokenizer, device="cpu")
        assert len(writer(["the cat", "the"], max_new_tokens=3, batch_size=2)) == 2
        model = AutoModelForCausalLM.from_pretrained(folder)
        model.generate(**tokenizer("the cat", return_tensors="pt"), max_new_tokens=3)
    finally:
        transformers_log.removeHandler(caplog.handler)
    assert not [record for record in caplog.records if record.name.startswith("transformers")]


def test_a_tokenizer_s_own_padding_and_ids_stay(tmp_path):
    trained = train_tokenizer(["the cat sat on the mat " * 20], 280)
    trained.add_special_tokens({"pad_token": "<pad>"})
    trained.save_pretrained(tmp_path)
    tokenizer = load_tokenizer(str(tmp_path))
    before = fingerprint(tokenizer)
    fit_to_model(tokenizer, 64)
    assert (tokenizer.pad_token, tokenizer.model_max_length, fingerprint(tokenizer)) == ("<pad>", 64, before)
