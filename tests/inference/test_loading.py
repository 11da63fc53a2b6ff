"""Adapters trained on stock GPT-2 by plain PEFT load here with PEFT's own result."""

import hashlib
import json
import shutil

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file, save_file
from transformers import GPT2LMHeadModel

from gptlm.errors import GptlmError
from gptlm.inference.loading import load_for_inference
from gptlm.model.adapter_files import base_and_adapters
from gptlm.model.tokenizer import load_tokenizer, train_tokenizer

CPU = torch.device("cpu")
IDS = torch.tensor([[5, 9, 100, 7, 3, 250, 41]])


@pytest.fixture(scope="module")
def base(tiny_model, tmp_path_factory):
    """The tiny model and a tokenizer of 300 entries."""
    folder = tmp_path_factory.mktemp("base")
    shutil.copytree(tiny_model, folder, dirs_exist_ok=True)
    train_tokenizer(["the cat sat on the mat and the dog sat on the log " * 20], 300).save_pretrained(folder)
    return folder


def adapters(base, folder, *, entries=None, targets=("c_attn", "c_proj", "c_fc"), **more):
    """Random adapters of stock GPT-2 in `folder`, B not zero; returns the folder."""
    torch.manual_seed(5)
    stock = GPT2LMHeadModel.from_pretrained(base)
    if entries:
        stock.resize_token_embeddings(entries)
    config = LoraConfig(
        task_type="CAUSAL_LM", r=4, target_modules=list(targets), init_lora_weights=False, fan_in_fan_out=True, **more
    )
    adapted = get_peft_model(stock, config)
    with torch.no_grad():
        for parameter in adapted.parameters():
            if parameter.requires_grad:
                parameter.add_(0.1 * torch.randn(parameter.shape))
    adapted.save_pretrained(folder)
    return folder


def plain(base, folder, entries=None):
    """Logits of plain PEFT on stock GPT-2."""
    stock = GPT2LMHeadModel.from_pretrained(base)
    if entries:
        stock.resize_token_embeddings(entries)
    with torch.no_grad():
        return PeftModel.from_pretrained(stock, folder).eval()(IDS).logits


def ours(base, folder=None, **more):
    model, _ = load_for_inference(str(base), CPU, lora_path=folder and str(folder), **more)
    with torch.no_grad():
        return model(IDS).logits


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    "more",
    [
        {},
        {"targets": ["attn.c_proj"]},
        {"bias": "all"},
        {"use_dora": True},
        {"use_rslora": True},
        {"targets": ["c_attn", "wte"]},
        {"modules_to_save": ["ln_1"]},
        {"modules_to_save": ["wte"]},
        {"layers_to_transform": [1]},
    ],
    ids=str,
)
def test_adapters_of_stock_gpt2_give_peft_s_logits(base, tmp_path, more):
    """attn.c_proj is square: transposed it would load without an error."""
    before = hashlib.sha256((base / "model.safetensors").read_bytes()).hexdigest()
    folder = adapters(base, tmp_path / "a", **more)
    wanted = plain(base, folder)
    torch.testing.assert_close(ours(base, folder), wanted, atol=2e-5, rtol=1e-5)
    assert (wanted - ours(base)).abs().max() > 0.01
    assert hashlib.sha256((base / "model.safetensors").read_bytes()).hexdigest() == before


@pytest.mark.filterwarnings("ignore")
def test_new_tokens_come_with_the_adapters(base, tmp_path):
    folder = adapters(base, tmp_path / "a", entries=501, modules_to_save=["wte", "lm_head"])
    tokenizer = load_tokenizer(str(base))
    tokenizer.add_tokens(["<user name>"])
    tokenizer.save_pretrained(folder)
    model, found = load_for_inference(str(base), CPU, lora_path=str(folder))
    assert found.decode(found("a<user name>b")["input_ids"]) == "a<user name>b"
    assert model.config.vocab_size == 501
    torch.testing.assert_close(ours(base, folder), plain(base, folder, 501), atol=2e-5, rtol=1e-5)


@pytest.mark.filterwarnings("ignore")
def test_adapters_are_added_in_float32(base, tmp_path):
    folder = adapters(base, tmp_path / "a")
    model, _ = load_for_inference(str(base), CPU, dtype=torch.bfloat16, lora_path=str(folder))
    whole, _ = load_for_inference(str(base), CPU, lora_path=str(folder))
    weight = model.transformer.h[0].attn.c_attn.weight
    assert weight.dtype == torch.bfloat16
    assert torch.equal(weight, whole.transformer.h[0].attn.c_attn.weight.bfloat16())


def settings(**changed):
    """Damage the configuration of adapters, not their tensors."""

    def spoil(folder, tensors):
        path = folder / "adapter_config.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | changed))

    return spoil


def change(folder, tensors):
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, folder / "adapter_model.safetensors")


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    ("spoil", "says"),
    [
        (lambda folder, tensors: (folder / "adapter_config.json").unlink(), "adapter_config.json is missing"),
        (
            lambda folder, tensors: (folder / "adapter_model.safetensors").unlink(),
            "cannot read .*adapter_model.safetensors",
        ),
        (
            lambda folder, tensors: change(folder, {k.replace("h.1.", "h.7."): v for k, v in tensors.items()}),
            "no place for transformer.h.7",
        ),
        (lambda folder, tensors: change(folder, {k: v[:, :8] for k, v in tensors.items()}), "do not fit the model"),
        (lambda folder, tensors: change(folder, {"x": torch.zeros(1)}), "holds none"),
        (
            lambda folder, tensors: change(
                folder, tensors | {"base_model.model.transformer.h.0.attn.c_proj.weight": torch.zeros(32, 32)}
            ),
            "replace whole matrices",
        ),
        (
            lambda folder, tensors: (folder / "adapter_config.json").write_text(json.dumps({"peft_type": "IA3"})),
            "expected LORA",
        ),
        (lambda folder, tensors: (folder / "adapter_config.json").write_text("[]"), "it holds no JSON object"),
        (settings(r=2), r"lora_A.weight is of rank 4, r is 2"),
        (settings(r=True), "r is True"),
        (settings(r=0), "r is 0"),
        (settings(lora_alpha=float("nan")), "lora_alpha nan"),
        (settings(target_modules=[]), r"target_modules is \[\]"),
        (settings(target_modules=["c_attn"]), "the file has .*c_proj.lora_A.weight, target_modules is c_attn"),
        (
            lambda folder, tensors: (folder / "adapter_model.safetensors").rename(folder / "adapter_model.bin"),
            "are adapter_model.bin, which is not read; load them with PEFT's PeftModel",
        ),
        (settings(use_dora=True), r"lack 8 tensors \(first: .*lora_magnitude_vector\)"),
    ],
)
def test_adapters_that_do_not_fit_are_refused(base, tmp_path, spoil, says):
    folder = adapters(base, tmp_path / "a")
    spoil(folder, load_file(folder / "adapter_model.safetensors"))
    with pytest.raises(GptlmError, match=says):
        load_for_inference(str(base), CPU, lora_path=str(folder))


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("named", [None, ""])
def test_adapters_without_a_base_name_need_the_flag(base, tmp_path, named):
    folder = adapters(base, tmp_path / "a")
    settings(base_model_name_or_path=named)(folder, {})
    with pytest.raises(GptlmError, match="names no base model .* give --model_name_or_path BASE --lora_path"):
        base_and_adapters(str(folder), None)
    assert base_and_adapters(str(base), str(folder)) == (str(base), str(folder))


@pytest.mark.filterwarnings("ignore")
def test_a_base_name_that_is_no_text_is_damage(base, tmp_path):
    folder = adapters(base, tmp_path / "a")
    settings(base_model_name_or_path=5)(folder, {})
    with pytest.raises(GptlmError, match="adapter_config.json is damaged: base_model_name_or_path is 5"):
        base_and_adapters(str(folder), None)


@pytest.mark.filterwarnings("ignore")
def test_full_names_of_targets_are_accepted(base, tmp_path):
    folder = adapters(base, tmp_path / "a", targets=["transformer.h.1.mlp.c_fc", "attn.c_proj"])
    torch.testing.assert_close(ours(base, folder), plain(base, folder), atol=2e-5, rtol=1e-5)
