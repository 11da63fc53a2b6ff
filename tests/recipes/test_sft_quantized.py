"""QLoRA: quantized matrices under adapters, the folder they leave, and what excludes them."""

from importlib.util import find_spec

import peft
import pytest
import torch
from transformers import AutoModelForCausalLM

from gptlm.commands.sft import parse_sft
from gptlm.errors import UsageError
from gptlm.inference.loading import load_for_inference
from gptlm.model.build import load_model
from gptlm.model.quantization import quantize
from gptlm.recipes.sft.adapters import check_package
from tests.recipes.test_sft import BASE, NO_DROPOUT, examples, losses, model, tune  # noqa: F401

needs_bitsandbytes = pytest.mark.skipif(find_spec("bitsandbytes") is None, reason="needs bitsandbytes")
IDS = torch.tensor([[5, 9, 200, 31]])


@needs_bitsandbytes
def test_matrices_are_those_that_bitsandbytes_gives_back(model):  # noqa: F811
    """The network with quantized matrices computes what stock GPT-2 does with the same rounding of its weights."""
    from bitsandbytes.functional import dequantize_4bit, quantize_4bit

    network = load_model(str(model)).eval()
    quantize(network, bits=4, dtype=torch.float32, device=torch.device("cpu"), kind="nf4", nested=False)
    stock = AutoModelForCausalLM.from_pretrained(model).eval()
    for block in stock.transformer.h:
        for layer in (block.attn.c_attn, block.attn.c_proj, block.mlp.c_fc, block.mlp.c_proj):
            rounded = quantize_4bit(layer.weight.data.t().contiguous(), quant_type="nf4")
            layer.weight.data = dequantize_4bit(*rounded).t().contiguous()
    with torch.no_grad():
        assert torch.allclose(network(input_ids=IDS).logits, stock(IDS).logits, atol=1e-4)


@needs_bitsandbytes
@pytest.mark.parametrize("words", [("--load_in_4bit",), ("--load_in_4bit", "--use_dora", "--use_bnb_nested_quant")])
def test_adapters_on_quantized_matrices(tune, model, tmp_path, words):  # noqa: F811
    """They learn, resume exactly, and are a plain folder for the model without quantization."""
    _, whole = tune(*NO_DROPOUT, "--lora", *words)
    assert losses(whole)[-1] < losses(whole)[0]
    _, resumed = tune(
        *NO_DROPOUT, "--lora", *words, "--resume_from_checkpoint", tmp_path / "out/checkpoint-3", output="again"
    )
    assert losses(resumed) == losses(whole)
    stock = peft.PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(model), tmp_path / "out").eval()
    ours = load_for_inference(str(model), lora_path=str(tmp_path / "out"))[0]
    with torch.no_grad():
        assert torch.allclose(stock(IDS).logits, ours(input_ids=IDS).logits, atol=1e-4)


@pytest.mark.skipif(find_spec("bitsandbytes") is not None, reason="it is installed")
def test_a_missing_package_is_named(model):  # noqa: F811
    argv = [*BASE, "--model_name_or_path", str(model), "--dataset_name_or_path", "d", "--output_dir", "o", "--lora"]
    with pytest.raises(UsageError, match=r"--load_in_4bit needs bitsandbytes.*pip install 'gptlm\[quantization\]'"):
        check_package(parse_sft([*argv, "--load_in_4bit"], {}).lora)


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["--load_in_4bit"], "load_in_4bit needs --lora"),
        (["--lora", "--load_in_4bit", "--load_in_8bit"], "load_in_8bit excludes --load_in_4bit"),
        (["--lora", "--load_in_8bit", "--sharding", "stage3"], "load_in_8bit does not work with --sharding"),
        (["--lora", "--load_in_4bit", "--init_lora_weights", "pissa"], "init_lora_weights pissa: with --load_in_4bit"),
        (["--lora", "--load_in_4bit", "--tensor_parallel_degree", "2"], "tensor"),
    ],
)
def test_what_excludes_quantized_matrices(model, words, says):  # noqa: F811
    argv = [*BASE, "--model_name_or_path", str(model), "--dataset_name_or_path", "d", "--output_dir", "o"]
    with pytest.raises(UsageError, match=says):
        parse_sft([*argv, *words], {})
