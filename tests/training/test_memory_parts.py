"""The line after the first step that says what the memory of a run is used for."""

import logging

import pytest
import torch
from transformers import TrainerCallback

from gptlm.training.metrics.memory_parts import held_bytes, in_words
from tests.training.test_trainer import stock_trainer

CPU = torch.device("cpu")


class Gradients(TrainerCallback):
    """Notes the bytes of gradients before each update."""

    def __init__(self):
        self.seen = []

    def on_pre_optimizer_step(self, args, state, control, **kwargs):
        self.seen.append(held_bytes(self.trainer.weights.gradients, CPU))


def trained(model, folder, dtype):
    noted = Gradients()
    made = stock_trainer(model, folder, args={"max_steps": 2}, callbacks=[noted])
    made.model.to(dtype)
    if dtype != torch.float32:
        made.weights = made._default_weights()
    noted.trainer = made
    made.train()
    return made, noted.seen


@pytest.mark.parametrize(("dtype", "width"), [(torch.float32, 4), (torch.bfloat16, 2)])
def test_parts_are_bytes_per_parameter(tiny_model, tmp_path, dtype, width, caplog):
    caplog.set_level(logging.INFO, "gptlm")
    made, gradients = trained(tiny_model, tmp_path, dtype)
    sizes = [weight.numel() for weight in made.model.parameters()]
    total, tensors = sum(sizes), len(sizes)
    weights = held_bytes(made.model.parameters(), CPU)
    masters, moments = held_bytes(made.weights.masters, CPU), held_bytes(made.weights.moments, CPU)
    assert weights == width * total
    if dtype == torch.float32:
        assert masters == 0 and moments == 8 * total + 4 * tensors  # two moments, and the step of each weight
        assert gradients == [4 * total] * 2
    else:  # flat tensors, in which each weight begins at a multiple of 64 elements
        padded = sum(-(-size // 64) * 64 for size in sizes)
        assert (masters, moments, gradients) == (4 * padded, 8 * padded, [2 * padded] * 2)
    lines = [record.getMessage() for record in caplog.records if "memory after the first step" in record.getMessage()]
    parts = {"weights": weights, "master weights": masters, "moments": moments, "gradients": gradients[0]}
    expected = ", ".join(f"{name} {in_words(size)}" for name, size in parts.items() if size)
    assert lines == [f"memory after the first step: {expected}"]


def test_shared_memory_counts_once():
    whole = torch.zeros(1000)
    assert held_bytes([whole, whole[10:20], torch.zeros(5)], CPU) == 4020
    assert held_bytes([whole], torch.device("cuda")) == 0


def test_sizes_are_in_units_that_people_read():
    found = [in_words(size) for size in (0, 1 << 18, 3 << 20, 3 << 29)]
    assert found == ["0.00 KiB", "256.00 KiB", "3.00 MiB", "1.50 GiB"]
