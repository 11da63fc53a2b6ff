"""What is said where the passes cannot be recorded; recordings themselves need a GPU (tests/recipes/test_gpu.py)."""

from contextlib import contextmanager

import pytest
import torch

from gptlm.errors import GptlmError
from gptlm.training.cuda_graphs import WARM_UP, RecordedPasses


def test_a_refused_recording_ends_the_run_with_what_to_do(monkeypatch):
    """CUDA tells twice, at what it refuses and at the end of the recording; the first time is the reason."""

    @contextmanager
    def recording(graph, **settings):
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
    monkeypatch.setattr(torch.cuda, "graph", recording)
    recorded = RecordedPasses(passes, [], None)
    for call in range(WARM_UP):
        assert recorded({"x": torch.tensor(float(call))})[0] == call
    with pytest.raises(GptlmError, match=r"try again with --cuda_graphs 0: CUDA error: operation not permitted.*$"):
        recorded({"x": torch.tensor(7.0)})
    assert calls == [0.0, 1.0, 7.0]
