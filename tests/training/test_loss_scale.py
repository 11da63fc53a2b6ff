"""The loss scale of float16: when it doubles, when it halves, and what an overflow does."""

import pytest
import torch

from gptlm.training.precision.loss_scale import LossScale


def drive(scale, overflows):
    """One step per entry, with an infinity in the gradient where it is true; the scale after each, and the weight."""
    weight = torch.nn.Parameter(torch.zeros(3))
    optimizer = torch.optim.SGD([weight], lr=1.0)
    found = []
    for overflow in overflows:
        loss = scale.scale((weight * torch.tensor([1.0, 2.0, 3.0])).sum())
        optimizer.zero_grad()
        loss.backward()
        if overflow:
            weight.grad[1] = float("inf")
        scale.unscale_(optimizer)
        scale.unscale_(optimizer)  # once per step, however often it is asked for
        scale.step(optimizer)
        scale.update()
        found.append(scale.get_scale())
    return found, weight.detach().tolist()


def test_doubles_after_the_window_and_halves_after_one_overflow():
    """PaddlePaddle's rule: x2 after `window` good steps in a row, x0.5 after one bad one, whose step is skipped."""
    found, weight = drive(LossScale(1024, window=3), [0, 0, 0, 1, 0, 0, 1, 0, 0, 0])
    assert found == [1024, 1024, 2048, 1024, 1024, 1024, 512, 512, 512, 1024]
    assert weight == [-8.0, -16.0, -24.0]  # eight good steps of the unscaled gradient


def test_hysteresis_needs_several_overflows():
    """DeepSpeed's rule with hysteresis 2: the first overflow is forgiven until the scale has doubled again."""
    found, _ = drive(LossScale(64, window=2, hysteresis=2), [1, 1, 0, 1, 0, 1, 0, 0, 1])
    assert found == [64, 32, 32, 16, 16, 8, 8, 16, 16]


def test_the_minimum_and_a_fixed_scale_are_exhausted_by_an_overflow():
    scale = LossScale(2, minimum=1)
    assert drive(scale, [1])[0] == [1] and not scale.exhausted
    assert drive(scale, [1])[0] == [1] and scale.exhausted
    fixed = LossScale(2, fixed=128, window=1)
    assert drive(fixed, [0, 0, 1])[0] == [128, 128, 128] and fixed.exhausted


def test_state_round_trip():
    first = LossScale(64, window=4, hysteresis=2)
    drive(first, [0, 1, 0, 0, 0])
    second = LossScale(1, window=4, hysteresis=2)
    second.load_state_dict(first.state_dict())
    assert drive(first, [0, 1, 0])[0] == drive(second, [0, 1, 0])[0] == pytest.approx([128, 128, 128])
