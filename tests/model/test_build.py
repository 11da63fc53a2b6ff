"""A network with random weights."""

import pytest

from gptlm.errors import GptlmError
from gptlm.model.build import check_memory, new_model
from gptlm.model.presets import Shape


def test_a_model_larger_than_the_machine_is_refused_before_it_is_built():
    billions = (2 * 12 * 2**40 + 2 * 2**10 * 2**20) / 1e9  # 12 D^2 weights in each layer, and the embeddings
    with pytest.raises(GptlmError, match=f"has {billions:,.1f} billion weights, which take {4 * billions:,.0f} GB"):
        new_model(Shape(2, 2**20, 2, 2**22, 2**10, 2**10))


def test_a_vocabulary_larger_than_the_machine_is_refused():
    with pytest.raises(GptlmError, match="give smaller sizes"):
        check_memory(Shape(1, 4096, 2, 4096, 2**31 - 1, 16))


def test_small_ones_are_allowed():
    check_memory(Shape(2, 64, 2, 256, 500, 64))
