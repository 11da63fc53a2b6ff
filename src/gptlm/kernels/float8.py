"""Float8 matrix products, by torchao."""

from typing import Any


def convert_to_float8(model: Any, *, emulated: bool) -> None:
    """Let the four Linear layers of each block of `model`, a GPTLMHeadModel, multiply in float8; parameters stay.

    Inputs, weights (e4m3) and gradients (e5m2) of a product are scaled by their largest absolute value, per tensor
    and step (Micikevicius et al. 2022, "FP8 formats for deep learning"). Embeddings and the output layer stay.

    Args:
        emulated: round to float8, but multiply in the precision of the weights, for devices without float8.
    """
    from torchao.float8 import Float8LinearConfig, convert_to_float8_training

    convert_to_float8_training(model.transformer.h, config=Float8LinearConfig(emulate=emulated))
