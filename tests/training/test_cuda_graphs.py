"""The error where the passes cannot be captured; graphs themselves need a GPU (tests/recipes/test_gpu.py)."""

from contextlib import contextmanager

import pytest
import torch

from gptlm.errors import GptlmError
from gptlm.training.cuda_graphs import WARM_UP, CapturedPasses


def test_a_refused_capture_ends_the_run_with_what_to_do(monkeypatch):
    """CUDA reports it twice, at what it refuses and at the end of the capture; the first one is the reason."""

    @contextmanager
    def capture(graph, **settings):
        try:
            yield
        finally:
            raise RuntimeError("CUDA error: operation failed due to a previous error during capture")

    def passes(inputs):
        calls.append(inputs["x"].item())
        if len(calls) > WARM_UP:
            raise RuntimeError("CUDA error: operation not permitted when stream is capturing\nCompile with ...")
        return inputs["x"], None

    calls = []
    monkeypatch.setattr(torch.cuda, "CUDAGraph", object)
    monkeypatch.setattr(torch.cuda, "graph", capture)
    captured = CapturedPasses(passes, [], None)
    for call in range(WARM_UP):
        assert captured({"x": torch.tensor(float(call))})[0] == call
    with pytest.raises(GptlmError, match=r"try again with --cuda_graphs 0: CUDA error: operation not permitted.*$"):
        captured({"x": torch.tensor(7.0)})
    assert calls == [0.0, 1.0, 7.0]
