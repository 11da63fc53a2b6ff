"""Functions of the caller in a training."""

import logging

from gptlm.recipes.common.hooks import NO_HOOKS, Hooks


def test_label_smoothing_beside_a_loss_of_the_caller_is_named(caplog):
    caplog.set_level(logging.INFO)
    NO_HOOKS.log(0.1)
    Hooks(compute_loss_func=lambda *args: 0).log()
    assert "label_smoothing_factor" not in caplog.text
    Hooks(compute_loss_func=lambda *args: 0).log(0.1)
    assert "label_smoothing_factor 0.1 has no effect: compute_loss_func is the loss" in caplog.text
