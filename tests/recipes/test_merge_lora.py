"""Merging: results that are not finite, and folders that are not overwritten."""

import os

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from gptlm.commands.merge_lora import parse_merge
from gptlm.errors import GptlmError
from gptlm.model.build import load_model
from gptlm.model.lora import add_adapters, save_adapters
from gptlm.model.tokenizer import train_tokenizer
from gptlm.recipes.merge_lora import merge_lora


@pytest.fixture
def adapters(tiny_model, tmp_path):
    """A folder with adapters whose B is `fill`, and their tokenizer."""

    def make(fill):
        folder = tmp_path / "adapters"
        adapted = add_adapters(
            load_model(str(tiny_model)), rank=2, alpha=4.0, dropout=0.0, targets=["c_attn"], base=str(tiny_model)
        )
        weights = {name: value.detach() for name, value in adapted.named_parameters() if value.requires_grad}
        for name, value in weights.items():
            value.fill_(fill if "lora_B" in name else 1.0)
        save_adapters(adapted, weights, folder)
        train_tokenizer(["the cat sat on the mat " * 20], 290).save_pretrained(folder)
        return folder

    return make


def merge(adapters, output, *more):
    merge_lora(parse_merge(["--lora_path", str(adapters), "--output_path", str(output), *more]))


@pytest.mark.parametrize(
    ("fill", "more", "says"),
    [
        (float("nan"), (), "c_attn.weight has NaN or infinite values with the adapters in"),
        (float("inf"), (), "c_attn.weight has NaN or infinite values"),
        (1e6, ("--dtype", "float16"), r"values up to 4e\+06, which torch.float16 cannot hold; give --dtype bfloat16"),
    ],
)
def test_weights_that_are_not_finite_are_not_written(adapters, tmp_path, fill, more, says):
    """By arithmetic: 4 / 2 x (1e6 x 1 + 1e6 x 1) = 4e6, and float16 ends at 65504."""
    folder = adapters(fill)
    with pytest.raises(GptlmError, match=says):
        merge(folder, tmp_path / "merged", *more)
    assert not (tmp_path / "merged").exists()


def test_a_model_is_never_overwritten(adapters, tiny_model, tmp_path, capsys, monkeypatch):
    folder = adapters(0.5)
    merge(folder, tmp_path / "merged")
    weight = AutoModelForCausalLM.from_pretrained(tmp_path / "merged").transformer.h[0].attn.c_attn.weight
    before = load_file(tiny_model / "model.safetensors")["transformer.h.0.attn.c_attn.weight"]
    assert torch.allclose(weight - before, torch.full_like(before, 2 * 2 * 0.5), atol=1e-5)
    merge(folder, tmp_path / "merged")
    assert "replaced, the same command made it of the same input: " in capsys.readouterr().out
    with pytest.raises(GptlmError, match="of other arguments or another input; --overwrite replaces it"):
        merge(folder, tmp_path / "merged", "--dtype", "bfloat16")
    merge(folder, tmp_path / "merged", "--dtype", "bfloat16", "--overwrite")
    (tmp_path / "merged" / "notes.txt").write_text("mine")
    with pytest.raises(GptlmError, match="merged is not empty: notes.txt was not written by gptlm merge-lora"):
        merge(folder, tmp_path / "merged", "--overwrite")
    for output, says in ((folder, "holds .*adapters, which the command reads"), (tmp_path, "holds .*adapters, which")):
        with pytest.raises(GptlmError, match=says):
            merge(folder, output, "--overwrite")
    monkeypatch.chdir(tmp_path / "merged")
    for output, says in ((".", "working"), ("/", "root"), ("~", "home"), (os.path.relpath(folder), "holds")):
        with pytest.raises(GptlmError, match=says):
            merge(folder, os.path.expanduser(output))
    monkeypatch.chdir(tmp_path)
    merge(folder, folder / "merged")  # a folder in that of the adapters
    with pytest.raises(GptlmError, match="adapters holds no model weights .* give the adapters' base model"):
        merge(folder, tmp_path / "again", "--model_name_or_path", str(folder))
    save_file({}, folder / "adapter_model.safetensors")
    with pytest.raises(GptlmError, match="holds none"):
        merge(folder, tmp_path / "again")
