"""GELU inside the matrix products: values and gradients of the plain layer (the kernels themselves: test_gpu.py)."""

import copy

import pytest
import torch
from torch._dynamo.backends.debugging import aot_eager
from transformers import GPT2Config

from gptlm.kernels.compiling import compile_model
from gptlm.kernels.fused_gelu import fused_feed_forward, supports_fused
from gptlm.model.gpt import MLP, GPTLMHeadModel


def test_values_and_gradients_are_those_of_the_plain_layer():
    """In float64 by the formulas: up to the last digits; compiled in bfloat16, as training uses it: up to rounding."""

    def listening(graph, inputs):
        listening.code = graph.print_readable(print_output=False)
        return aot_eager(graph, inputs)

    torch.manual_seed(0)
    config = GPT2Config(n_embd=32, n_head=2, resid_pdrop=0.0)
    for dtype, tolerance in ((torch.float64, 1e-12), (torch.bfloat16, 2e-2)):
        plain = MLP(config).to(dtype)
        fused = copy.deepcopy(plain)
        fused.fused = True
        x = torch.randn(2, 8, 32, dtype=dtype)
        inputs = [x.clone().requires_grad_() for _ in range(2)]
        wanted = plain(inputs[0])
        if dtype == torch.bfloat16:
            found = torch.compile(fused, backend=listening)(inputs[1])
            assert "linear_gelu" in listening.code
        else:
            found = fused_feed_forward(inputs[1], fused.c_fc, fused.c_proj)
        ones = torch.randn_like(wanted)
        wanted.backward(ones)
        found.backward(ones)
        pairs = [(found, wanted), (inputs[1].grad, inputs[0].grad)]
        pairs += [(a.grad, b.grad) for a, b in zip(fused.parameters(), plain.parameters(), strict=True)]
        for mine, theirs in pairs:
            torch.testing.assert_close(mine, theirs, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("change", ["float32", "mixed", "no bias", "another kind of layer"])
def test_other_layers_are_left_alone(change):
    up, down = torch.nn.Linear(8, 32).bfloat16(), torch.nn.Linear(32, 8).bfloat16()
    x = torch.zeros(1, 8, dtype=torch.float32 if change == "mixed" else torch.bfloat16)
    assert supports_fused(x.bfloat16(), up, down)
    if change == "float32":
        up, down, x = up.float(), down.float(), x.float()
    if change == "no bias":
        down.bias = None
    if change == "another kind of layer":
        up = torch.nn.Sequential(up)
    assert not supports_fused(x, up, down)


def test_blocks_that_are_recomputed_go_without(monkeypatch):
    """What a fused layer returns is kept for the backward pass, which recomputation is there to avoid."""
    monkeypatch.setattr("gptlm.kernels.compiling.load_cublaslt", lambda: object())
    model = GPTLMHeadModel(GPT2Config(n_embd=8, n_head=2, n_layer=2, vocab_size=11))
    model.transformer.set_recompute("full", keep=[1])
    compile_model(model)
    assert [block.mlp.fused for block in model.transformer.h] == [False, True]
