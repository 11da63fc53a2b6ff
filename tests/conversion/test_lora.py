"""PaddleNLP's adapters, written by hand, on stock GPT-2 through plain PEFT, and back."""

import json
import pickle

import numpy as np
import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file, save_file

from gptlm.cli import main
from gptlm.conversion.lora import read_peft
from gptlm.errors import GptlmError
from tests.conversion.layouts import HEADS, LAYERS, PADDLE_CONFIG, SIZE, WIDE, column, logits, stock

RANK, SCALE = 3, 2.0
PLACES = {  # PaddleNLP's module -> (in, out)
    "self_attn.q_proj": (WIDE, WIDE), "self_attn.k_proj": (WIDE, WIDE), "self_attn.v_proj": (WIDE, WIDE),
    "self_attn.qkv_proj": (WIDE, 3 * WIDE), "self_attn.out_proj": (WIDE, WIDE), "linear1": (WIDE, 64),
    "linear2": (64, WIDE),
}  # fmt: skip


def write_adapters(folder, places, **more):
    """`lora_model_state.pdparams` with lora_A (in, r) and lora_B (r, out); returns the arrays."""
    rng = np.random.RandomState(1)
    arrays = {}
    for layer in range(LAYERS):
        for place in places:
            rows, columns = PLACES[place]
            name = f"gpt.decoder.layers.{layer}.{place}"
            arrays[f"{name}.lora_A"] = rng.randn(rows, RANK).astype(np.float32)
            arrays[f"{name}.lora_B"] = rng.randn(RANK, columns).astype(np.float32)
    folder.mkdir()
    (folder / "lora_model_state.pdparams").write_bytes(pickle.dumps(arrays, protocol=4))
    settings = {"r": RANK, "lora_alpha": SCALE * RANK, "target_modules": [".*"], "merge_weights": False, **more}
    (folder / "lora_config.json").write_text(json.dumps(settings))
    (folder / "config.json").write_text(json.dumps(PADDLE_CONFIG))
    return arrays


def merged_by_hand(arrays):
    """Stock GPT-2 with scale x A B added to its matrices."""
    model = stock()
    columns = {f"self_attn.{name}_proj": range(part * WIDE, (part + 1) * WIDE) for part, name in enumerate("qkv")}
    columns["self_attn.qkv_proj"] = [column(p, h, i) for h in range(HEADS) for p in range(3) for i in range(SIZE)]
    with torch.no_grad():
        for layer, block in enumerate(model.transformer.h):
            matrices = {"self_attn.out_proj": block.attn.c_proj, "linear1": block.mlp.c_fc, "linear2": block.mlp.c_proj}
            for place in PLACES:
                name = f"gpt.decoder.layers.{layer}.{place}"
                if f"{name}.lora_A" in arrays:
                    change = SCALE * torch.from_numpy(arrays[f"{name}.lora_A"] @ arrays[f"{name}.lora_B"])
                    if place in columns:
                        block.attn.c_attn.weight[:, list(columns[place])] += change
                    else:
                        matrices[place].weight += change
    return model


SPLIT = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")
FORMS = {
    "split": (*SPLIT, "self_attn.out_proj", "linear1", "linear2"),
    "fused": ("self_attn.qkv_proj", "self_attn.out_proj", "linear1", "linear2"),
    "some": ("self_attn.q_proj", "self_attn.v_proj", "linear1"),
    "one of the two": ("linear2",),
}


@pytest.mark.parametrize("form", FORMS)
def test_plain_peft_adds_what_paddle_adds(tmp_path, form, capsys):
    arrays = write_adapters(tmp_path / "old", FORMS[form])
    assert main(["convert", "--from", str(tmp_path / "old"), "--output", str(tmp_path / "new")]) == 0
    assert "what the adapters add to the weights differs by at most" in capsys.readouterr().out
    settings = json.loads((tmp_path / "new/adapter_config.json").read_text())
    assert settings["r"] == {"split": 3 * RANK, "some": 2 * RANK}.get(form, RANK)
    assert settings["lora_alpha"] / settings["r"] == SCALE
    adapted = PeftModel.from_pretrained(stock(), str(tmp_path / "new")).eval()
    assert torch.allclose(logits(adapted), logits(merged_by_hand(arrays)), rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize("form", ["split", "fused"])
@pytest.mark.parametrize("written", ["split", "fused"])
def test_back_to_paddle(tmp_path, form, written):
    arrays = write_adapters(tmp_path / "old", FORMS[form])
    words = ["--to", "paddle", "--paddle_qkv", written, "--num_attention_heads", str(HEADS)]
    assert main(["convert", "--from", str(tmp_path / "old"), "--output", str(tmp_path / "peft")]) == 0
    assert main(["convert", "--from", str(tmp_path / "peft"), "--output", str(tmp_path / "new"), *words]) == 0
    back = pickle.loads((tmp_path / "new/lora_model_state.pdparams").read_bytes())
    settings = json.loads((tmp_path / "new/lora_config.json").read_text())
    assert settings["lora_alpha"] / settings["r"] == SCALE
    assert {name.split(".")[-2] for name in back} == {place.split(".")[-1] for place in FORMS[written]}
    found, wanted = merged_by_hand(back).state_dict(), merged_by_hand(arrays).state_dict()
    for name, value in wanted.items():
        assert torch.allclose(found[name], value, rtol=1e-5, atol=1e-5), name


@pytest.mark.parametrize(
    ("more", "words", "message"),
    [
        ({"rslora": True}, [], "rslora = True; only plain LoRA"),
        ({"r": 0}, [], "is damaged: r is 0"),
        ({}, ["--to", "megatron"], "Megatron-LM has no format for adapters"),
        ({}, ["--to", "paddle", "--paddle_qkv", "fused"], "give --num_attention_heads"),
        ({}, ["--with_optimizer"], "--with_optimizer is for models, but "),
        ({}, ["--vocab_size", "9"], "--vocab_size is for models"),
        ({}, ["--activation", "gelu"], "--activation is for models"),
        ({}, ["--tokenizer_name_or_path", "t"], "--tokenizer_name_or_path is for models"),
    ],
)
def test_errors_and_wrong_arguments(tmp_path, capsys, more, words, message):
    write_adapters(tmp_path / "old", FORMS["split"], **more)
    assert main(["convert", "--from", str(tmp_path / "old"), "--output", str(tmp_path / "new"), *words]) in (1, 2)
    assert message in capsys.readouterr().err and not (tmp_path / "new").exists()


def test_a_missing_half_of_an_adapter_is_an_error(tmp_path, capsys):
    arrays = write_adapters(tmp_path / "old", FORMS["split"])
    arrays.pop("gpt.decoder.layers.1.linear1.lora_B")
    (tmp_path / "old/lora_model_state.pdparams").write_bytes(pickle.dumps(arrays))
    assert main(["convert", "--from", str(tmp_path / "old"), "--output", str(tmp_path / "new")]) == 1
    assert "lacks one half of transformer.h.1.mlp.c_fc" in capsys.readouterr().err


def test_a_missing_half_of_a_peft_adapter_is_an_error(tmp_path):
    write_adapters(tmp_path / "old", FORMS["split"])
    assert main(["convert", "--from", str(tmp_path / "old"), "--output", str(tmp_path / "peft")]) == 0
    path = tmp_path / "peft/adapter_model.safetensors"
    tensors = load_file(path)
    del tensors["base_model.model.transformer.h.2.mlp.c_fc.lora_B.weight"]
    save_file(tensors, path)
    with pytest.raises(GptlmError, match=f"{path} lacks one half of transformer.h.2.mlp.c_fc"):
        read_peft(tmp_path / "peft")
