"""Adapters: folders are exchangeable with plain PEFT on stock GPT-2, and merging does not change the output."""

import peft
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from gptlm.errors import GptlmError
from gptlm.model.build import load_model
from gptlm.model.lora import (
    StoredAdapters,
    add_adapters,
    fingerprint_of,
    load_adapters,
    merge_adapters,
    save_adapters,
)

IDS = torch.tensor([[1, 5, 499, 3, 498, 7], [9, 9, 2, 4, 8, 0]])
TARGETS = ["c_attn", "c_proj", "c_fc"]


def adapted(tiny_model, new_tokens=(), rank=4, seed=0):
    """Our network with adapters that change its output."""
    model = add_adapters(
        load_model(str(tiny_model)), rank=rank, alpha=8, dropout=0.0, targets=TARGETS, base=str(tiny_model),
        new_tokens=new_tokens,
    )  # fmt: skip
    torch.manual_seed(seed)
    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter.data.normal_(0, 0.2)
    return model.eval()


def save(model, folder):
    save_adapters(model, {n: p.detach() for n, p in model.named_parameters() if p.requires_grad}, folder)
    return folder


def logits(model):
    with torch.no_grad():
        return model(input_ids=IDS).logits


@pytest.mark.parametrize("new_tokens", [(), (498, 499)])
def test_stock_gpt2_with_plain_peft_reads_our_files(tiny_model, tmp_path, new_tokens):
    model = adapted(tiny_model, new_tokens)
    folder = save(model, tmp_path / "a")
    stock = peft.PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(tiny_model), folder).eval()
    assert torch.allclose(logits(stock), logits(model), atol=1e-5)
    base = AutoModelForCausalLM.from_pretrained(tiny_model)
    assert not torch.allclose(logits(base), logits(model), atol=1e-2)


def test_adapters_of_stock_gpt2_are_read_here(tiny_model, tmp_path):
    torch.manual_seed(3)
    config = peft.LoraConfig(task_type="CAUSAL_LM", r=4, lora_alpha=8, target_modules=TARGETS, fan_in_fan_out=True)
    stock = peft.get_peft_model(AutoModelForCausalLM.from_pretrained(tiny_model), config)
    for name, parameter in stock.named_parameters():
        if "lora_" in name:
            parameter.data.normal_(0, 0.2)
    stock.eval().save_pretrained(tmp_path / "a")
    ours = adapted(tiny_model, seed=9)
    load_adapters(ours, tmp_path / "a")
    assert torch.allclose(logits(stock), logits(ours), atol=1e-5)
    assert torch.allclose(logits(stock), logits(merge_adapters(load_model(str(tiny_model)), tmp_path / "a")), atol=1e-4)


@pytest.mark.parametrize("new_tokens", [(), (498, 499)])
def test_merged_weights_equal_base_plus_adapters(tiny_model, tmp_path, new_tokens):
    before = load_file(tiny_model / "model.safetensors")
    model = adapted(tiny_model, new_tokens)
    whole = merge_adapters(load_model(str(tiny_model)), save(model, tmp_path / "a"))
    assert torch.allclose(logits(whole), logits(model), atol=1e-4)
    whole.save_pretrained(tmp_path / "m")
    stock = AutoModelForCausalLM.from_pretrained(tmp_path / "m").eval()
    assert torch.allclose(logits(stock), logits(model), atol=1e-4)
    after = load_file(tiny_model / "model.safetensors")
    assert all(torch.equal(before[name], after[name]) for name in before)


def test_new_adapters_change_nothing_and_train_alone(tiny_model):
    model = add_adapters(load_model(str(tiny_model)), rank=2, alpha=4, dropout=0.0, targets=["c_attn"], base="b").eval()
    assert torch.equal(logits(model), logits(load_model(str(tiny_model)).eval()))
    trained = [name for name, parameter in model.named_parameters() if parameter.requires_grad]
    assert len(trained) == 2 * 2 and all("c_attn.lora_" in name for name in trained)
    shapes = [tuple(p.shape) for p in model.parameters() if p.requires_grad]
    assert shapes == [(2, 32), (96, 2)] * 2


@pytest.mark.parametrize("granularity", ["full", "full_attn", "core_attn"])
def test_gradients_with_and_without_recomputation(tiny_model, granularity):
    found = []
    for chosen in (None, granularity):
        model = adapted(tiny_model, (498, 499)).train()
        model.transformer.set_recompute(chosen)
        for module in model.modules():
            if isinstance(module, torch.nn.Dropout):
                module.p = 0.0
        model.get_base_model().transformer.h[0].attn.dropout = model.get_base_model().transformer.h[1].attn.dropout = (
            0.0
        )
        loss = model(input_ids=IDS, labels=IDS, shift_labels=IDS).loss
        loss.backward()
        found.append([loss, *(p.grad for p in model.parameters() if p.requires_grad)])
    assert all(torch.allclose(a, b, atol=1e-6) for a, b in zip(*found)) and found[0][1].abs().sum() > 0


def test_the_folder_holds_adapters_only(tiny_model, tmp_path):
    folder = save(adapted(tiny_model), tmp_path / "a")
    files = {"adapter_config.json", "adapter_model.safetensors", "generation_config.json", "README.md"}
    assert {path.name for path in folder.iterdir()} == files
    stored = load_file(folder / "adapter_model.safetensors")
    assert len(stored) == 2 * 2 * 4 and all(".lora_A.weight" in name or ".lora_B.weight" in name for name in stored)


def test_adapters_that_do_not_fit(tiny_model, tmp_path):
    folder = save(adapted(tiny_model), tmp_path / "a")
    with pytest.raises(GptlmError, match="of another rank or model"):
        load_adapters(adapted(tiny_model, rank=2), folder)
    with pytest.raises(GptlmError, match="they have other targets or tokens"):
        load_adapters(adapted(tiny_model, (1,)), folder)
    stored = load_file(folder / "adapter_model.safetensors")
    save_file(
        {name: value for name, value in stored.items() if ".h.1." not in name}, folder / "adapter_model.safetensors"
    )
    with pytest.raises(GptlmError, match=r"lack 8 tensors \(first: base_model.model.transformer.h.1"):
        merge_adapters(load_model(str(tiny_model)), folder)
    (folder / "adapter_model.safetensors").write_bytes(b"x" * 10)
    with pytest.raises(GptlmError, match="adapter_model.safetensors is damaged: it has 10 bytes"):
        StoredAdapters(folder)
    with pytest.raises(GptlmError, match="holds no adapters"):
        merge_adapters(load_model(str(tiny_model)), tmp_path)


@pytest.fixture
def stock(tiny_model):
    return AutoModelForCausalLM.from_pretrained(tiny_model)


def test_copies_of_a_model_have_one_fingerprint(tiny_model, stock, tmp_path):
    own = fingerprint_of(tiny_model)
    stock.save_pretrained(tmp_path / "shards", max_shard_size="50KB")
    assert (tmp_path / "shards" / "model.safetensors.index.json").is_file()
    stock.transformer.save_pretrained(tmp_path / "body")  # names without "transformer."
    stock.resize_token_embeddings(600)
    stock.save_pretrained(tmp_path / "rows")
    stock.to(torch.bfloat16).save_pretrained(tmp_path / "half")
    assert own and {fingerprint_of(tmp_path / name) for name in ("shards", "body", "rows", "half")} == {own}


def test_an_update_changes_the_fingerprint(tiny_model, stock, tmp_path):
    """Each weight by a thousandth of itself: a short fine-tuning."""
    with torch.no_grad():
        for weight in stock.parameters():
            weight.mul_(1.001)
    stock.save_pretrained(tmp_path)
    assert fingerprint_of(tmp_path) != fingerprint_of(tiny_model)


def test_without_readable_safetensors_there_is_no_fingerprint(tmp_path):
    assert fingerprint_of(tmp_path) is None
    (tmp_path / "model.safetensors").write_bytes(b"nonsense")
    assert fingerprint_of(tmp_path) is None
