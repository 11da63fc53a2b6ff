"""The loss without logits equals cross-entropy computed the plain way, in value and gradient."""

import pytest
import torch
import torch.nn.functional as F

from gptlm.kernels import linear_cross_entropy as loss_module
from gptlm.kernels.linear_cross_entropy import linear_cross_entropy


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
