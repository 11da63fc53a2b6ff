"""On a CUDA device: losses, gradients and scores of a vocabulary that is no multiple of 128 equal those by hand."""

import pytest
import torch
import torch.nn.functional as F

from gptlm.kernels.linear_cross_entropy import (
    CHUNK_TOKENS,
    chunk_loss,
    chunk_scores,
    linear_cross_entropy,
    token_scores,
)
from gptlm.kernels.output_layer import padded_rows

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]

COMPILED = {chunk: torch.compile(chunk) for chunk in (chunk_loss, chunk_scores)}


def problem(dtype, vocabulary):
    torch.manual_seed(0)
    hidden = torch.randn(2500, 64, device="cuda").to(dtype).requires_grad_()
    weight = torch.randn(vocabulary, 64, device="cuda").to(dtype).requires_grad_()
    targets = torch.randint(0, vocabulary, (2500,), device="cuda")
    targets[::7] = -100
    return hidden, weight, targets


@pytest.mark.parametrize("vocabulary", [509, 50257])
@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_loss_and_gradients_are_those_of_cross_entropy(dtype, compiled, vocabulary):
    """By hand in float64, from the logits in the dtype that the product has."""
    hidden, weight, targets = problem(dtype, vocabulary)
    chunk = COMPILED[chunk_loss] if compiled else chunk_loss
    ours = linear_cross_entropy(hidden, weight, targets, chunk=chunk)
    found = torch.autograd.grad(ours, (hidden, weight))
    logits = (hidden @ weight.T).detach().double().requires_grad_()
    plain = F.cross_entropy(logits, targets, ignore_index=-100, reduction="sum")
    (by_logit,) = torch.autograd.grad(plain, logits)
    wanted = by_logit @ weight.double(), by_logit.T @ hidden.double()
    assert ours.item() == pytest.approx(plain.item(), rel=1e-6)
    for mine, other in zip(found, wanted):
        assert mine.shape == other.shape and mine.dtype == dtype
        error = (mine.double() - other).norm() / other.norm()
        assert error < (1e-5 if dtype == torch.float32 else 1e-2)


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_scores_are_those_of_each_token(dtype, compiled):
    """By hand from the same products: others are rounded otherwise, and in bfloat16 the largest are often equal."""
    hidden, weight, _ = (part.detach() for part in problem(dtype, 50257))
    products = [part @ padded_rows(weight).T for part in hidden.split(CHUNK_TOKENS)]
    logits = torch.cat(products)[:, :50257].float()
    targets = torch.where(torch.arange(2500, device="cuda") % 2 == 0, logits.argmax(-1), 50256)
    chunk = COMPILED[chunk_scores] if compiled else chunk_scores
    losses, hits = token_scores(hidden, weight, targets, chunk=chunk)
    torch.testing.assert_close(losses, F.cross_entropy(logits, targets, reduction="none"), rtol=1e-5, atol=1e-5)
    assert torch.equal(hits, logits.argmax(-1) == targets) and hits.any() and not hits.all()


def test_a_captured_loss_follows_its_inputs():
    """As a CUDA graph, without waiting for the device; the weight is padded anew at each replay."""
    hidden, weight, targets = problem(torch.bfloat16, 509)
    warm = linear_cross_entropy(hidden, weight, targets)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        warm = linear_cross_entropy(hidden, weight, targets)
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        loss = linear_cross_entropy(hidden, weight, targets)
    graph.replay()
    assert loss.item() == warm.item()
    weight.data.mul_(0.5)
    graph.replay()
    assert loss.item() == pytest.approx(linear_cross_entropy(hidden, weight, targets).item(), rel=1e-6)
    assert loss.item() < warm.item()
