"""Residual sum and layer norm as one operator, alone and in the network: values and gradients by plain operators."""

import copy

import pytest
import torch
import torch.nn.functional as F
from torch._dynamo.utils import counters
from transformers import AutoModelForCausalLM

from gptlm.kernels.compiling import can_join_norms, compile_model
from gptlm.kernels.residual_norm import _ResidualNorm, gradients, residual_norm, summed_and_normed
from gptlm.model.build import load_model


def operands(with_bias, dtype=torch.float64, rows=7, width=12, device="cpu"):
    """x, branch, its bias or None, weight and bias of the norm, and gradients of both results."""
    torch.manual_seed(0)
    make = [torch.randn(*shape, dtype=torch.float64) for shape in [(rows, width)] * 2 + [(width,)] * 3]
    make[3] += 1
    given = [part.to(device, dtype).requires_grad_() for part in make]
    given[2] = given[2] if with_bias else None
    return given, [torch.randn(rows, width, dtype=torch.float64).to(device, dtype) for _ in range(2)]


def plain(x, branch, branch_bias, weight, bias, eps):
    total = x + (branch if branch_bias is None else branch + branch_bias)
    return total, F.layer_norm(total, weight.shape, weight, bias, eps)


@pytest.mark.parametrize("with_bias", [True, False])
def test_values_and_gradients_are_those_of_the_plain_operators(with_bias):
    given, outer = operands(with_bias)
    inputs = [part for part in given if part is not None]
    results = [function(*given, 1e-5) for function in (_ResidualNorm.apply, plain)]
    found, wanted = (torch.autograd.grad(result, inputs, outer) for result in results)
    for mine, other in zip((*results[0], *found), (*results[1], *wanted), strict=True):
        torch.testing.assert_close(mine, other, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("with_bias", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_compiler_sees_shapes_and_dtypes_of_the_results(with_bias, dtype):
    given, outer = operands(with_bias, dtype)
    given = [None if part is None else part.detach() for part in given]
    torch.library.opcheck(summed_and_normed, (*given, 1e-5))
    total, _, mean, scale = summed_and_normed(*given, 1e-5)
    torch.library.opcheck(gradients, (*outer, total, given[3], mean, scale, with_bias))


def test_other_devices_and_dtypes_use_the_plain_operators():
    given, _ = operands(True, torch.float32)
    norm = torch.nn.LayerNorm(12, eps=1e-3)
    found = residual_norm(*given[:3], norm)
    assert torch.equal(found[0], given[0] + (given[1] + given[2])) and torch.equal(found[1], norm(found[0]))
    assert "ResidualNorm" not in type(found[0].grad_fn).__name__


@pytest.mark.parametrize("dropout", [0.0, 0.1])
@pytest.mark.parametrize("compiled", [True, False])
def test_joined_blocks_train_as_the_stock_network(tiny_model, compiled, dropout):
    """Loss and gradients of stock GPT-2; with dropout those of the same blocks one by one, with the same numbers."""
    torch._dynamo.reset()
    counters.clear()
    ids = torch.randint(0, 500, (3, 20), generator=torch.Generator().manual_seed(1))
    how = {"hidden_dropout": dropout, "attention_dropout": dropout}
    model = load_model(str(tiny_model), **how).train()
    apart = copy.deepcopy(model)
    if compiled:
        compile_model(model, joins_norms=True)
        assert model.transformer.chains_blocks
    else:
        model.transformer.chains_blocks = True
    stock = AutoModelForCausalLM.from_pretrained(tiny_model, attn_pdrop=0.0, embd_pdrop=0.0, resid_pdrop=0.0).train()
    losses = []
    for network in (model, apart if dropout else stock):
        torch.manual_seed(3)
        losses.append(network(ids, labels=ids).loss)
        losses[-1].backward()
    torch.testing.assert_close(losses[0], losses[1], rtol=0, atol=1e-5)
    theirs = dict((apart if dropout else stock).named_parameters())
    for name, parameter in model.named_parameters():
        other = theirs[name].grad
        other = other.t() if not dropout and "c_" in name and name.endswith("weight") else other
        torch.testing.assert_close(parameter.grad, other, rtol=0, atol=1e-5, msg=name)
    if compiled:
        assert counters["stats"]["unique_graphs"] == 2  # one for all blocks, and the loss


def test_joined_blocks_of_open_lengths_are_compiled_once(tiny_model):
    torch._dynamo.reset()
    counters.clear()
    model = load_model(str(tiny_model)).eval()
    batches = [torch.arange(length)[None].repeat(rows, 1) for rows, length in ((3, 5), (3, 7), (2, 12))]
    wanted = [model.transformer(ids).last_hidden_state for ids in batches]
    compile_model(model, lengths_vary=True, joins_norms=True)
    with torch._dynamo.config.patch(fail_on_recompile_limit_hit=True):
        for ids, expected in zip(batches, wanted, strict=True):
            torch.testing.assert_close(model.transformer(ids).last_hidden_state, expected)
    assert counters["stats"]["unique_graphs"] == 1


def test_generation_with_a_cache_goes_block_by_block(tiny_model):
    model = load_model(str(tiny_model)).eval()
    ids = torch.arange(7)[None]
    how = {"max_new_tokens": 5, "do_sample": False, "pad_token_id": 0, "eos_token_id": None}
    wanted = model.generate(ids, attention_mask=torch.ones_like(ids), **how)
    model.transformer.chains_blocks = True
    assert torch.equal(model.generate(ids, attention_mask=torch.ones_like(ids), **how), wanted)


@pytest.mark.parametrize(
    ("change", "joins"),
    [
        (lambda body: None, True),
        (lambda body: body.set_recompute("core_attn"), True),
        (lambda body: body.set_recompute("full"), False),  # two inputs of each block would be kept
        (lambda body: body.set_recompute("full_attn", keep=[0]), False),
        (lambda body: setattr(body.h[1], "ln_1", torch.nn.Sequential(body.h[1].ln_1)), False),
    ],
)
def test_which_blocks_are_joined(tiny_model, change, joins):
    model = load_model(str(tiny_model))
    change(model.transformer)
    assert can_join_norms(model.transformer) == joins
