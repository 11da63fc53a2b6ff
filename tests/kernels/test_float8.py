"""Float8 products: near those of the plain network, scales that hold for any input, and kernels as plain operators."""

import copy
import math

import pytest
import torch
import torch.nn.functional as F

from gptlm.kernels import float8, float8_operators
from gptlm.kernels.compiling import compile_model
from gptlm.kernels.float8 import Float8Weights
from gptlm.kernels.float8_operators import LARGEST_GRADIENT, LARGEST_WEIGHT
from gptlm.model.build import load_model

CUDA = pytest.param(
    "cuda",
    marks=[pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")],
)
DEVICES = pytest.mark.parametrize("device", ["cpu", CUDA])
NO_DROPOUT = {"hidden_dropout": 0.0, "attention_dropout": 0.0}


def networks(folder, device, dtype=None, **how):
    """A network with float8 products in all blocks, the object that rounds its weights, and the same without."""
    torch._dynamo.reset()
    plain = load_model(str(folder), **(how or NO_DROPOUT)).train().to(device)
    plain = plain.to(dtype or (torch.float32 if device == "cpu" else torch.bfloat16))
    network = copy.deepcopy(plain)
    weights = Float8Weights(list(network.transformer.h))
    weights.refresh()
    network.transformer.chains_blocks = True
    return network, weights, plain


def tokens(device, rows=3, length=21):  # 63 tokens: no multiple of 16
    return torch.randint(0, 500, (rows, length), generator=torch.Generator().manual_seed(1)).to(device)


def gradients(network, ids):
    network.zero_grad()
    loss = network(ids, labels=ids).loss
    loss.backward()
    return loss.item(), {name: parameter.grad.float() for name, parameter in network.named_parameters()}


def assert_near(found, wanted):
    """Losses within 1 %, and gradients that point into the same direction."""
    assert found[0] == pytest.approx(wanted[0], rel=0.01) and found[0] != wanted[0]
    for name, gradient in wanted[1].items():
        assert F.cosine_similarity(found[1][name].flatten(), gradient.flatten(), dim=0) > 0.98, name
        assert found[1][name].norm().item() == pytest.approx(gradient.norm().item(), rel=0.1), name


@DEVICES
@pytest.mark.parametrize("recompute", [None, "full", "core_attn"])
def test_loss_and_gradients_are_near_those_of_the_plain_network(tiny_model, device, recompute):
    network, _, plain = networks(tiny_model, device)
    network.transformer.set_recompute(recompute)
    assert_near(gradients(network, tokens(device)), gradients(plain, tokens(device)))


@DEVICES
def test_compiled_blocks_compute_the_same(tiny_model, device):
    network, _, _ = networks(tiny_model, device)
    found = gradients(network, tokens(device))
    compile_model(network)
    again = gradients(network, tokens(device))
    assert again[0] == pytest.approx(found[0], rel=1e-5 if device == "cpu" else 1e-3)
    for name, gradient in found[1].items():
        assert F.cosine_similarity(again[1][name].flatten(), gradient.flatten(), dim=0) > 0.999, name


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_float32_weights_under_autocast(tiny_model):
    network, _, plain = networks(tiny_model, "cuda", torch.float32)
    with torch.autocast("cuda", torch.bfloat16):
        found, wanted = gradients(network, tokens("cuda")), gradients(plain, tokens("cuda"))
    assert_near(found, wanted)
    assert all(parameter.grad.dtype == torch.float32 for parameter in network.parameters())


@DEVICES
def test_dropout_is_that_of_the_blocks_without_float8(tiny_model, device):
    """The same random numbers, so that the losses are as near as without dropout."""
    network, _, plain = networks(tiny_model, device, hidden_dropout=0.1, attention_dropout=0.1)
    losses = []
    for one in (network, plain):
        torch.manual_seed(3)
        losses.append(one(tokens(device), labels=tokens(device)).loss.item())
    assert losses[0] == pytest.approx(losses[1], rel=0.01)


def test_evaluation_is_that_of_the_plain_network(tiny_model):
    network, _, plain = networks(tiny_model, "cpu")
    network.eval(), plain.eval()
    torch.testing.assert_close(network(tokens("cpu")).logits, plain(tokens("cpu")).logits)


def test_weights_are_rounded_again_when_they_have_changed(tiny_model):
    network, weights, _ = networks(tiny_model, "cpu")
    block = network.transformer.h[0]
    places = [tensor.data_ptr() for matrix in block.float8[:4] for tensor in matrix]
    with torch.no_grad():
        block.mlp.c_fc.weight.mul_(3).add_(0.1)
    weights.refresh()
    assert places == [tensor.data_ptr() for matrix in block.float8[:4] for tensor in matrix]
    up, weight = block.float8.up, block.mlp.c_fc.weight
    assert up.scale.item() == pytest.approx(weight.norm(dim=1).max().item() / 448)  # e4m3's largest is 2^8 x 1.75
    exact = up.values.float() * up.scale
    torch.testing.assert_close(exact, weight, rtol=2**-4, atol=2**-10 * up.scale.item())  # 3 bits after the first
    assert torch.equal(up.transposed.float(), up.values.float().T)


@DEVICES
def test_a_product_is_that_of_the_rounded_numbers(device):
    """By hand, in float64: (dequantized x) (dequantized weight)^T, and the same for both gradients."""
    torch.manual_seed(0)
    dtype = torch.float32 if device == "cpu" else torch.bfloat16
    x = torch.randn(37, 32, dtype=dtype, device=device, requires_grad=True)
    weight = torch.randn(48, 32, dtype=dtype, device=device, requires_grad=True)
    scale, weight_scale = (tensor.detach().abs().max().float() / LARGEST_WEIGHT for tensor in (x, weight))
    rounded = float8_operators.rounded(weight.detach(), weight_scale, torch.float8_e4m3fn)
    matrix = float8.Float8Matrix(rounded, rounded.T.contiguous(), weight_scale)
    out = float8.linear_without_bias(x, weight, matrix, scale)
    upper = torch.randn(37, 48, device=device).to(dtype)
    out.backward(upper)

    def exact(tensor, by, kind):
        return (tensor.detach().float() / by).to(kind).double() * by

    inputs = exact(x, scale, torch.float8_e4m3fn)
    outer = exact(upper, upper.abs().max().float() / LARGEST_GRADIENT, torch.float8_e5m2)
    by_hand = (
        (out, inputs @ exact(weight, weight_scale, torch.float8_e4m3fn).T),
        (x.grad, outer @ exact(weight, weight_scale, torch.float8_e4m3fn)),
        (weight.grad, outer.T @ inputs),
    )
    for found, wanted in by_hand:
        error = (found.double() - wanted).abs().max() / wanted.abs().max()
        assert error < (1e-5 if device == "cpu" else 5e-3)  # results are bfloat16 there


@DEVICES
def test_no_input_is_beyond_the_bounds(tiny_model, device):
    """Also inputs along the longest rows of the matrices: the scales let no number be cut off."""
    network, weights, _ = networks(tiny_model, device)
    with torch.no_grad():  # far from what training starts with
        for number, block in enumerate(network.transformer.h):
            for linear in (block.attn.c_attn, block.attn.c_proj, block.mlp.c_fc, block.mlp.c_proj):
                linear.weight.mul_(1 + 3 * torch.rand_like(linear.weight))
                linear.bias.add_(torch.randn_like(linear.bias))
            for norm in (block.ln_1, block.ln_2):
                norm.weight.add_(number * torch.randn_like(norm.weight))
                norm.bias.add_(torch.randn_like(norm.bias))
    weights.refresh()
    for block in network.transformer.h:
        width = block.ln_1.weight.shape[0]
        rows = torch.cat(
            [block.attn.c_attn.weight[2 * width :], block.mlp.c_fc.weight, torch.eye(width, device=device)]
        )
        x = torch.cat([rows.to(block.ln_1.weight), torch.randn_like(rows, dtype=block.ln_1.weight.dtype) ** 3])[None]
        normed = block.ln_1(x)
        attended = block.attn.attend(block.attn.c_attn(normed), None, None, None)
        before = block.mlp.c_fc(block.ln_2(x))
        pairs = (normed, "normed_1"), (attended, "attended"), (block.ln_2(x), "normed_2"), (F.gelu(before), "hidden")
        for values, name in pairs:
            assert values.float().abs().max() <= 1.01 * LARGEST_WEIGHT * getattr(block.float8, name), name
        outer = torch.randn(50, width, device=device).sign().to(x.dtype)  # each as large as the largest
        inner = torch.ops.aten.gelu_backward(outer @ block.mlp.c_proj.weight, before[0, :50], approximate="tanh")
        assert inner.float().abs().max() <= 1.01 * block.float8.slope * outer.abs().max()


@DEVICES
def test_no_gradient_and_nan_stay_what_they_are(tiny_model, device):
    network, weights, _ = networks(tiny_model, device)
    ids = tokens(device)
    (network(ids, labels=ids).loss * 0).backward()
    assert all(parameter.grad.abs().max() == 0 for parameter in network.parameters())
    with torch.no_grad():
        network.transformer.h[0].mlp.c_fc.weight[0, 0] = math.nan
    weights.refresh()
    assert math.isnan(network(ids, labels=ids).loss.item())


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.parametrize(("rows", "columns"), [(63, 48), (128, 64), (1000, 208)])
def test_kernels_compute_what_plain_operators_do(rows, columns):
    torch.manual_seed(0)
    x, outer = (torch.randn(rows, columns).bfloat16() * 3 for _ in range(2))
    scale = torch.tensor(2**-6)  # exact, so that ties are ties on both sides
    x_there, outer_there, scale_there = x.cuda(), outer.cuda(), scale.cuda()
    calls = (
        (float8_operators.activation, (x, scale), (x_there, scale_there)),
        (float8_operators.gradient, (x, True), (x_there, True)),
        (float8_operators.gelu, (x, scale), (x_there, scale_there)),
        (float8_operators.gelu_gradient, (outer, x, scale), (outer_there, x_there, scale_there)),
    )
    for operator, here, there in calls:
        for wanted, found in zip(operator(*here), operator(*there), strict=True):
            assert found.shape == wanted.shape and found.dtype == wanted.dtype
            if wanted.element_size() > 1:
                torch.testing.assert_close(found.cpu(), wanted, rtol=1e-3, atol=2e-2)
                continue
            differs = found.cpu().float() != wanted.float()
            assert differs.float().mean() < (
                0.05 if operator is not float8_operators.activation else 1e-6
            )  # scale and tanh
            step = 2**-2 if wanted.dtype == torch.float8_e5m2 else 2**-3
            torch.testing.assert_close(found.cpu().float(), wanted.float(), rtol=step, atol=0.02)
    values = float8_operators.activation(x_there, scale_there)[0]
    assert torch.equal(
        float8_operators.transpose(values).view(torch.uint8),
        float8_operators.activation(x_there, scale_there)[1].view(torch.uint8),
    )
