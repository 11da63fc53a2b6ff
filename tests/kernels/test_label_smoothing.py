"""The chunked loss with label smoothing equals torch's own cross-entropy, whole and split over shards."""

import threading
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F

from gptlm.kernels.label_smoothing import smooth_labels, smoothed_chunk_loss
from gptlm.kernels.linear_cross_entropy import summed_loss


def operands():
    generator = torch.Generator().manual_seed(3)
    hidden = torch.randn(2, 9, 8, generator=generator)
    weight = torch.randn(130, 8, generator=generator)  # not a multiple of the padded rows
    targets = torch.randint(0, 130, (2, 9), generator=generator)
    targets[0, 3:5] = -100
    return hidden.requires_grad_(), weight.requires_grad_(), targets


@pytest.mark.parametrize("compiler", [None, pytest.param(torch.compile, marks=pytest.mark.slow)])
def test_loss_and_gradients_are_torch_s(compiler):
    hidden, weight, targets = operands()
    model = SimpleNamespace(output_loss=summed_loss)
    smooth_labels(model, 0.1, compiler)
    loss = model.output_loss(hidden, weight, targets)
    gradients = torch.autograd.grad(loss, (hidden, weight))
    logits = (hidden @ weight.T).flatten(0, 1)
    expected = F.cross_entropy(logits, targets.flatten(), label_smoothing=0.1, reduction="sum")
    torch.testing.assert_close(loss, expected)
    for ours, theirs in zip(gradients, torch.autograd.grad(expected, (hidden, weight)), strict=True):
        torch.testing.assert_close(ours, theirs, atol=1e-5, rtol=1e-5)
    with torch.no_grad():  # an evaluation
        plain = F.cross_entropy((hidden @ weight.T).flatten(0, 1), targets.flatten(), reduction="sum")
        torch.testing.assert_close(model.output_loss(hidden, weight, targets), plain)


def test_shards_of_the_vocabulary_have_the_loss_and_gradient_of_the_whole():
    hidden, weight, targets = operands()
    logits, flat = (hidden @ weight.T).flatten(0, 1).detach(), targets.flatten()
    whole = smoothed_chunk_loss(logits, flat, -100, 0, 130, lambda values, _: values, True, factor=0.2)
    barrier, shared, found = threading.Barrier(2), [None, None], [None, None]

    def shard(rank):
        def reduce(values, operation):
            shared[rank] = values
            barrier.wait()
            both = torch.stack(list(shared))
            barrier.wait()
            return both.amax(0) if operation == "max" else both.sum(0)

        part = slice(0, 64) if rank == 0 else slice(64, 130)
        size = part.stop - part.start
        found[rank] = smoothed_chunk_loss(logits[:, part], flat, -100, part.start, size, reduce, True, factor=0.2)

    threads = [threading.Thread(target=shard, args=(rank,)) for rank in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for loss, _ in found:
        torch.testing.assert_close(loss, whole[0])
    torch.testing.assert_close(torch.cat([found[0][1], found[1][1]], dim=1), whole[1])
