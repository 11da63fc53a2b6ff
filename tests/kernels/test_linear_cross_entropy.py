"""The loss without logits equals cross-entropy computed the plain way, in value and gradient."""

import pytest
import torch
import torch.nn.functional as F

from gptlm.kernels import linear_cross_entropy as loss_module
from gptlm.kernels.linear_cross_entropy import chunk_loss, chunk_scores, linear_cross_entropy, token_scores


def problem(tokens=50, width=16, vocabulary=97, dtype=torch.float64):
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(tokens, width, generator=generator, dtype=dtype).requires_grad_()
    weight = torch.randn(vocabulary, width, generator=generator, dtype=dtype).requires_grad_()
    targets = torch.randint(0, vocabulary, (tokens,), generator=generator)
    targets[::7] = -100
    return hidden, weight, targets


@pytest.mark.parametrize("chunk", [7, 50, 1024])
def test_value_and_gradients(monkeypatch, chunk):
    monkeypatch.setattr(loss_module, "CHUNK_TOKENS", chunk)
    hidden, weight, targets = problem()
    plain = F.cross_entropy(hidden @ weight.T, targets, ignore_index=-100, reduction="sum")
    wanted = torch.autograd.grad(3 * plain, (hidden, weight))
    ours = linear_cross_entropy(hidden, weight, targets)
    found = torch.autograd.grad(3 * ours, (hidden, weight))
    assert ours.item() == pytest.approx(plain.item(), rel=1e-6)
    for a, b in zip(found, wanted):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-5)  # inside, sums are float32


@pytest.mark.parametrize(
    ("vocabulary", "compiled"), [(1, False), (127, False), (128, False), (509, False), (509, True)]
)
def test_float32_losses_and_gradients_equal_the_plain_formula(vocabulary, compiled):
    """All logits are far below zero, the logit of padding: it must not enter maximum, sum or gradient."""
    hidden, weight, targets = problem(vocabulary=vocabulary, dtype=torch.float32)
    hidden.data.abs_()
    weight.data.abs_().neg_().mul_(20)
    chunk = torch.compile(chunk_loss) if compiled else chunk_loss
    plain = F.cross_entropy(hidden @ weight.T, targets, ignore_index=-100, reduction="sum")
    ours = linear_cross_entropy(hidden, weight, targets, chunk=chunk)
    assert ours.item() == pytest.approx(plain.item(), rel=1e-6)
    wanted = torch.autograd.grad(plain, (hidden, weight))
    for found, other in zip(torch.autograd.grad(ours, (hidden, weight)), wanted):
        assert found.shape == other.shape
        torch.testing.assert_close(found, other, rtol=1e-5, atol=1e-6 * max(float(other.abs().max()), 1))
    with torch.no_grad():
        assert linear_cross_entropy(hidden, weight, targets, chunk=chunk).item() == pytest.approx(
            plain.item(), rel=1e-6
        )


def test_autocast_multiplies_in_half_precision_and_returns_float32_gradients():
    hidden, weight, targets = problem(dtype=torch.float32)
    half = [part.detach().bfloat16().float().requires_grad_() for part in (hidden, weight)]
    logits = (half[0].bfloat16() @ half[1].bfloat16().T).float()
    plain = F.cross_entropy(logits, targets, ignore_index=-100, reduction="sum")
    with torch.autocast("cpu", torch.bfloat16):
        ours = linear_cross_entropy(hidden, weight, targets)
    assert ours.item() == pytest.approx(plain.item(), rel=1e-5)
    found = torch.autograd.grad(ours, (hidden, weight))
    for mine, other in zip(found, torch.autograd.grad(plain, half)):
        assert mine.dtype == torch.float32
        torch.testing.assert_close(mine, other, rtol=2e-2, atol=5e-2)


@pytest.mark.parametrize(("vocabulary", "compiled"), [(127, False), (128, False), (509, True)])
def test_scores_are_those_of_each_token(vocabulary, compiled):
    hidden, weight, targets = problem(vocabulary=vocabulary, dtype=torch.float32)
    hidden, weight = hidden.detach().abs(), -weight.detach().abs()
    logits = hidden @ weight.T
    targets = torch.where(torch.arange(len(targets)) % 2 == 0, logits.argmax(-1), targets.clamp(min=0))
    chunk = torch.compile(chunk_scores) if compiled else chunk_scores
    losses, hits = token_scores(hidden, weight, targets, chunk=chunk, chunk_tokens=7)
    torch.testing.assert_close(losses, F.cross_entropy(logits, targets, reduction="none"), rtol=1e-6, atol=1e-6)
    assert torch.equal(hits, logits.argmax(-1) == targets) and hits.any() and not hits.all()


def test_a_batch_without_targets_is_zero():
    hidden, weight, targets = problem(dtype=torch.float32)
    loss = linear_cross_entropy(hidden, weight, torch.full_like(targets, -100))
    loss.backward()
    assert loss.item() == 0 and hidden.grad.abs().max() == 0 and weight.grad.abs().max() == 0


def test_large_logits_do_not_overflow():
    hidden, weight, targets = problem(dtype=torch.float32)
    loss = linear_cross_entropy(hidden * 1000, weight * 10, targets)
    assert torch.isfinite(loss)


def test_a_vocabulary_in_two_halves_gives_the_same():
    """The reduction two processes would do, done here by hand on two shards in one process."""
    hidden, weight, targets = problem()
    whole = linear_cross_entropy(hidden, weight, targets)
    logits = (hidden @ weight.T).float().detach()
    halves = [(0, 50), (50, 97)]
    per_shard = []
    for first, last in halves:
        collected = []

        def reduce(values, operation, collected=collected):
            collected.append(operation)
            if operation == "max":
                return logits.amax(-1, keepdim=True)
            if len(collected) == 2:
                return (logits - logits.amax(-1, keepdim=True)).exp().sum(-1, keepdim=True)
            return logits.gather(1, targets.clamp(min=0)[:, None])

        per_shard.append(linear_cross_entropy(hidden, weight[first:last], targets, first_id=first, reduce=reduce))
        assert collected == ["max", "sum", "sum"]
    for shard in per_shard:
        assert shard.item() == pytest.approx(whole.item(), rel=1e-6)
    (grad_whole,) = torch.autograd.grad(whole, weight)
    grads = [torch.autograd.grad(shard, weight)[0] for shard in per_shard]
    torch.testing.assert_close(grads[0] + grads[1], grad_whole, rtol=1e-5, atol=1e-5)


def test_logits_are_never_held_whole():
    """2048 tokens x 8192 entries are 67 MB of float32; the forward pass must stay well below two copies of it."""
    hidden = torch.randn(4096, 8, requires_grad=True)
    weight = torch.randn(8192, 8, requires_grad=True)
    targets = torch.randint(0, 8192, (4096,))
    sizes = []

    class Watch(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            out = function(*args, **(kwargs or {}))
            if isinstance(out, torch.Tensor):
                sizes.append(out.numel())
            return out

    with Watch():
        linear_cross_entropy(hidden, weight, targets).backward()
    assert max(sizes) <= loss_module.CHUNK_TOKENS * 8192 < hidden.shape[0] * 8192


def test_no_gradient_is_computed_where_none_is_taken():
    asked = []

    def chunk(product, targets, ignore_index, first_id, entries, reduce, with_gradient):
        asked.append(with_gradient)
        return chunk_loss(product, targets, ignore_index, first_id, entries, reduce, with_gradient)

    hidden, weight = torch.randn(4, 8), torch.randn(130, 8, requires_grad=True)
    linear_cross_entropy(hidden, weight, torch.arange(4), chunk=chunk)
    with torch.no_grad():
        linear_cross_entropy(hidden, weight, torch.arange(4), chunk=chunk)
    assert asked == [True, False]
