"""Every kind of adapters: on the unchanged base, plain PEFT on stock GPT-2 computes what was trained here."""

import peft
import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from gptlm.errors import GptlmError
from gptlm.inference.loading import load_for_inference
from gptlm.model.adapter_files import read_adapter_config
from gptlm.model.adapter_kinds import AdapterKind, wrong_initialization
from gptlm.model.build import load_model
from gptlm.model.lora import StoredAdapters, add_adapters, save_adapters
from gptlm.model.tokenizer import train_tokenizer
from tests.model.test_lora import TARGETS, logits

KINDS = {
    "dora": AdapterKind(dora=True),
    "rslora": AdapterKind(rslora=True),
    "gaussian": AdapterKind(init="gaussian"),
    "orthogonal": AdapterKind(init="orthogonal"),
    "patterns": AdapterKind(rank_pattern={"c_fc": 2, "h.1.mlp.c_proj": 6}, alpha_pattern={"attn.c_proj": 3}),
    "pissa": AdapterKind(init="pissa", alpha_pattern={"c_fc": 3}, rank_pattern={"attn.c_proj": 6}),
    "pissa_niter": AdapterKind(init="pissa_niter_4", rslora=True, rank_pattern={"c_fc": 2}, alpha_pattern={"c_fc": 3}),
    "olora": AdapterKind(init="olora", dora=True),
    "bias": AdapterKind(bias="all"),
    "lora_only": AdapterKind(bias="lora_only", dora=True),
    "modules": AdapterKind(modules_to_save=("ln_f", "ln_1", "wpe")),
    "embedding": AdapterKind(modules_to_save=("wte",)),
    "head": AdapterKind(modules_to_save=("wte", "lm_head")),
}


def adapted(base, kind, **more):
    network = load_model(str(base))
    return add_adapters(
        network, rank=4, alpha=8, dropout=0.0, targets=TARGETS, base=str(base), kind=kind, **more
    ).eval()


def trained(model):
    return {name: value for name, value in model.named_parameters() if value.requires_grad}


@pytest.mark.parametrize("name", KINDS)
def test_the_folder_is_the_trained_model_on_the_unchanged_base(tiny_model, tmp_path, name):
    kind, before = KINDS[name], load_model(str(tiny_model)).eval()
    model = adapted(tiny_model, kind)
    assert torch.allclose(logits(model), logits(before), atol=1e-5)  # PiSSA and OLoRA: base + adapters is the base
    torch.manual_seed(1)
    for value in trained(model).values():
        value.data.add_(torch.randn_like(value), alpha=0.1)
    folder = tmp_path / "a"
    save_adapters(model, {name: value.detach() for name, value in trained(model).items()}, folder)
    stock = peft.PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(tiny_model), folder).eval()
    assert not torch.allclose(logits(stock), logits(before), atol=1e-2)
    assert torch.allclose(logits(stock), logits(model), atol=1e-5)

    train_tokenizer(["the cat sat on the mat " * 20], 290).save_pretrained(folder)
    merged = load_for_inference(str(tiny_model), lora_path=str(folder))[0]
    assert torch.allclose(logits(merged), logits(stock.merge_and_unload()), atol=1e-5)

    again = adapted(tiny_model, kind, initial=folder if kind.changes_base else None)  # as a resumed run
    stored = StoredAdapters(folder, again)
    for parameter, value in trained(again).items():
        value.data.copy_(stored.get(parameter))
    pairs = zip(model.state_dict().values(), again.state_dict().values(), strict=True)
    assert all(torch.equal(a, b) for a, b in pairs)


def test_the_saved_halves_are_those_of_peft_s_own_conversion(tiny_model, tmp_path):
    """PEFT writes [A; A0] and [B, -B0] with twice the rank and alpha."""
    config = peft.LoraConfig(
        task_type="CAUSAL_LM", r=4, lora_alpha=8, target_modules=["c_attn"], init_lora_weights="pissa",
        fan_in_fan_out=True,
    )  # fmt: skip
    stock = peft.get_peft_model(AutoModelForCausalLM.from_pretrained(tiny_model), config)
    stock.peft_config["default"].init_lora_weights = True
    stock.save_pretrained(tmp_path / "first")
    torch.manual_seed(2)
    for value in trained(stock).values():
        value.data.add_(torch.randn_like(value), alpha=0.1)
    stock.peft_config["default"].init_lora_weights = "pissa"
    stock.save_pretrained(tmp_path / "peft", path_initial_model_for_weight_conversion=str(tmp_path / "first"))
    ours = add_adapters(
        load_model(str(tiny_model)), rank=4, alpha=8, dropout=0.0, targets=["c_attn"], base=str(tiny_model),
        kind=AdapterKind(init="pissa"),
    )  # fmt: skip
    save_adapters(ours, trained(ours), tmp_path / "ours")
    a, b = (load_file(tmp_path / name / "adapter_model.safetensors") for name in ("peft", "ours"))
    assert {name: value.shape for name, value in a.items()} == {name: value.shape for name, value in b.items()}
    read = [peft.LoraConfig.from_pretrained(tmp_path / name) for name in ("peft", "ours")]
    assert [(c.r, c.lora_alpha, c.init_lora_weights) for c in read] == [(8, 16, True)] * 2


@pytest.mark.parametrize(
    ("text", "says"),
    [("loftq", "a quantized copy of the base"), ("eva", "a pass over the data"), ("pisa", "expected true"),
     ("orthogonal", "even rank, not 3")],
)  # fmt: skip
def test_initializations_that_are_not_there(text, says):
    assert says in wrong_initialization(text, 3)
    assert wrong_initialization("pissa_niter_16", 3) is None


def test_numbers_that_no_float_holds_are_refused(tmp_path):
    text = '{"peft_type": "LORA", "r": 2, "target_modules": ["c_attn"], "lora_alpha": %s}'
    for number in ("1" + "0" * 400, "NaN", "-Infinity"):
        (tmp_path / "adapter_config.json").write_text(text % number)
        with pytest.raises(GptlmError, match="is damaged"):
            read_adapter_config(tmp_path)
