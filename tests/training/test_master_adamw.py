"""Master weights: AdamW in float32 behind half-precision weights."""

import pytest
import torch

from gptlm.training.precision.loss_scale import LossScale
from gptlm.training.precision.master_adamw import MasterWeightAdamW, clip


def make(dtype, **settings):
    torch.manual_seed(0)
    weights = [torch.nn.Parameter(torch.randn(4, 3).to(dtype)), torch.nn.Parameter(torch.randn(3).to(dtype))]
    groups = [{"params": weights[:1], "weight_decay": 0.1}, {"params": weights[1:], "weight_decay": 0.0}]
    return weights, MasterWeightAdamW(groups, lr=1e-2, **settings)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_equals_adamw_on_float32_copies(dtype):
    """With the same (half-precision) gradients: clipping, decay groups and moments are those of plain AdamW."""
    weights, optimizer = make(dtype)
    plain = [torch.nn.Parameter(w.detach().float()) for w in weights]
    reference = torch.optim.AdamW(
        [{"params": plain[:1], "weight_decay": 0.1}, {"params": plain[1:], "weight_decay": 0.0}], lr=1e-2
    )
    for step in range(20):
        gradients = [torch.randn(w.shape, generator=torch.Generator().manual_seed(step)).to(dtype) for w in weights]
        for weight, copy, gradient in zip(weights, plain, gradients):
            weight.grad, copy.grad = gradient.clone(), gradient.float()
        optimizer.take_gradients()
        norm = clip(optimizer, 1.0)
        assert norm.item() == pytest.approx(torch.nn.utils.clip_grad_norm_(plain, 1.0).item(), rel=1e-6)
        optimizer.step()
        reference.step()
    for weight, master, copy in zip(weights, optimizer.masters, plain):
        torch.testing.assert_close(master, copy, rtol=1e-6, atol=1e-7)
        assert torch.equal(weight, master.to(dtype)) and weight.dtype == dtype


def test_small_updates_add_up():
    """1 + 1e-3 is 1 in bfloat16: without float32 copies the weight would never move."""
    weight = torch.nn.Parameter(torch.ones(1, dtype=torch.bfloat16))
    optimizer = MasterWeightAdamW([{"params": [weight]}], lr=1e-3, weight_decay=0.0)
    for _ in range(20):
        weight.grad = torch.full((1,), -1.0, dtype=torch.bfloat16)
        optimizer.take_gradients()
        optimizer.step()
    assert optimizer.masters[0].item() == pytest.approx(1.02, abs=1e-4) and weight.item() == pytest.approx(
        1.02, abs=4e-3
    )


def test_float32_sums_of_micro_batches():
    """256 + 1 is 256 in bfloat16, eight times over; in float32 it is not. The next step starts from zero."""
    weight = torch.nn.Parameter(torch.zeros(1, dtype=torch.bfloat16))
    optimizer = MasterWeightAdamW([{"params": [weight]}], lr=1e-3)
    for _ in range(2):
        for value in (256.0, *[1.0] * 8):
            weight.grad = torch.full((1,), value, dtype=torch.bfloat16)
            optimizer.add_gradients()
            assert weight.grad is None
        optimizer.take_gradients()
        assert optimizer.gradients[0].item() == 264.0
        optimizer.step()


def test_an_overflow_skips_the_step():
    weights, optimizer = make(torch.float16)
    before = [w.detach().clone() for w in weights]
    scale = LossScale(8.0)
    for value, moved in ((float("inf"), False), (8.0, True)):
        for weight in weights:
            weight.grad = torch.full_like(weight, value)
        optimizer.take_gradients()
        scale.unscale_(optimizer)
        clip(optimizer, 1.0)
        scale.step(optimizer)
        scale.update()
        assert all(torch.equal(w, b) for w, b in zip(weights, before)) != moved
    assert scale.get_scale() == 4.0 and weights[0].isfinite().all()


def test_a_weight_without_gradient_keeps_still():
    weights, optimizer = make(torch.bfloat16)
    for with_second in (True, False):
        weights[0].grad = torch.ones_like(weights[0])
        weights[1].grad = torch.ones_like(weights[1]) if with_second else None
        second = weights[1].detach().clone()
        optimizer.take_gradients()
        optimizer.step()
    assert torch.equal(weights[1], second)
