import pytest
import torch

from gptlm.kernels.output_layer import FEW, OutputLayer, padded_rows


@pytest.mark.parametrize("count", [1, 127, 129, 509])
def test_rows_are_padded_with_zeros_to_a_multiple_of_128(count):
    weight = torch.randn(count, 3, requires_grad=True)
    padded = padded_rows(weight)
    assert padded.shape == (-(-count // 128) * 128, 3)
    assert torch.equal(padded[:count], weight) and not padded[count:].any()
    (gradient,) = torch.autograd.grad(padded.sum(), weight)
    assert torch.equal(gradient, torch.ones_like(weight))


def test_a_multiple_of_128_is_not_copied():
    weight = torch.randn(256, 3)
    assert padded_rows(weight) is weight


@pytest.mark.parametrize("count", [1, FEW, FEW + 1, 3 * FEW])
def test_logits_have_the_shape_and_values_of_a_linear_layer(count):
    torch.manual_seed(0)
    layer = OutputLayer(4, 130, bias=False)
    x = torch.randn(2, count, 4)
    logits = layer(x)
    assert logits.shape == (2, count, 130)
    torch.testing.assert_close(logits, x @ layer.weight.T)
    (gradient,) = torch.autograd.grad(logits.square().sum(), layer.weight)
    (wanted,) = torch.autograd.grad((x @ layer.weight.T).square().sum(), layer.weight)
    torch.testing.assert_close(gradient, wanted)
