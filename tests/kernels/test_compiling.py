"""torch.compile of blocks."""

import pytest
import torch
from torch._dynamo.utils import counters
from transformers import GPT2Config

from gptlm.kernels.compiling import compile_model
from gptlm.model.gpt import GPTLMHeadModel


@pytest.mark.parametrize(("lengths_vary", "graphs"), [(True, 1), (False, 2)])
def test_lengths_that_vary_are_compiled_once(lengths_vary, graphs):
    """Without the hint the first length is compiled alone, then all others."""
    torch._dynamo.reset()
    counters.clear()
    model = GPTLMHeadModel(GPT2Config(n_layer=2, n_embd=16, n_head=2, vocab_size=40, bos_token_id=0, eos_token_id=0))
    eager = {length: model.eval().transformer(torch.arange(length)[None].repeat(3, 1)) for length in (5, 7, 12)}
    compile_model(model, lengths_vary=lengths_vary)
    with torch._dynamo.config.patch(fail_on_recompile_limit_hit=True):
        for length, expected in eager.items():
            found = model.transformer(torch.arange(length)[None].repeat(3, 1))
            torch.testing.assert_close(found.last_hidden_state, expected.last_hidden_state)
    assert counters["stats"]["unique_graphs"] == graphs
