"""GELU inside the matrix products: values and gradients of the plain layer (the kernels themselves: test_gpu.py)."""

import copy
import ctypes
import logging
from unittest.mock import Mock

import pytest
import torch
from torch._dynamo.backends.debugging import aot_eager
from transformers import GPT2Config

from gptlm.kernels import fused_gelu
from gptlm.kernels.compiling import compile_model
from gptlm.kernels.fused_gelu import SIGNATURES, fused_feed_forward, linear_gelu, supports_fused
from gptlm.model.block import MLP
from gptlm.model.gpt import GPTLMHeadModel


def test_values_and_gradients_are_those_of_the_plain_layer():
    """In float64 by the formulas: up to the last digits; compiled in bfloat16, as training uses it: up to rounding."""

    def listening(graph, inputs):
        listening.code = graph.print_readable(print_output=False)
        return aot_eager(graph, inputs)

    torch.manual_seed(0)
    config = GPT2Config(n_embd=32, n_head=2, resid_pdrop=0.0)
    for dtype, tolerance in ((torch.float64, 1e-12), (torch.bfloat16, 2e-2)):
        plain = MLP(config).to(dtype)
        fused = copy.deepcopy(plain)
        fused.fused = True
        x = torch.randn(2, 8, 32, dtype=dtype)
        inputs = [x.clone().requires_grad_() for _ in range(2)]
        wanted = plain(inputs[0])
        if dtype == torch.bfloat16:
            found = torch.compile(fused, backend=listening)(inputs[1])
            assert "linear_gelu" in listening.code
        else:
            found = fused_feed_forward(inputs[1], fused.c_fc, fused.c_proj)
        ones = torch.randn_like(wanted)
        wanted.backward(ones)
        found.backward(ones)
        pairs = [(found, wanted), (inputs[1].grad, inputs[0].grad)]
        pairs += [(a.grad, b.grad) for a, b in zip(fused.parameters(), plain.parameters(), strict=True)]
        for mine, theirs in pairs:
            torch.testing.assert_close(mine, theirs, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("change", ["float32", "mixed", "no bias", "another kind of layer"])
def test_other_layers_are_left_alone(change):
    up, down = torch.nn.Linear(8, 32).bfloat16(), torch.nn.Linear(32, 8).bfloat16()
    x = torch.zeros(1, 8, dtype=torch.float32 if change == "mixed" else torch.bfloat16)
    assert supports_fused(x.bfloat16(), up, down)
    if change == "float32":
        up, down, x = up.float(), down.float(), x.float()
    if change == "no bias":
        down.bias = None
    if change == "another kind of layer":
        up = torch.nn.Sequential(up)
    assert not supports_fused(x, up, down)


def test_blocks_that_are_recomputed_go_without(monkeypatch):
    """What a fused layer returns is kept for the backward pass, which recomputation is there to avoid."""
    monkeypatch.setattr("gptlm.kernels.fused_gelu.is_available", lambda: True)
    model = GPTLMHeadModel(GPT2Config(n_embd=8, n_head=2, n_layer=2, vocab_size=11))
    model.transformer.set_recompute("full", keep=[1])
    compile_model(model)
    assert [block.mlp.fused for block in model.transformer.h] == [False, True]


class CuBLASLt:
    """The functions of the library, of one version, without those `without`."""

    def __init__(self, version, without=""):
        for name in ("cublasLtGetVersion", *SIGNATURES):
            if name != without:
                setattr(self, name, Mock(return_value=version))


@pytest.mark.parametrize(
    ("version", "without", "capability", "reason"),
    [
        (130002, "", (9, 0), None),
        (120804, "", (8, 0), None),
        (140000, "", (9, 0), "cuBLASLt 140000 (tried: 120000 to 139999)"),
        (110904, "", (9, 0), "cuBLASLt 110904 (tried: 120000 to 139999)"),
        (130002, "cublasLtMatmulAlgoGetHeuristic", (9, 0), "cublasLtMatmulAlgoGetHeuristic"),
        (130002, "", (7, 5), "compute capability 7.5"),
        (None, "", (9, 0), "libcublasLt.so.13: not found"),
    ],
)
def test_plain_gelu_where_the_library_or_the_gpu_is_another(monkeypatch, caplog, version, without, capability, reason):
    def load(name):
        if version is None:
            raise OSError(f"{name}: not found")
        return library

    library = CuBLASLt(version, without)
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    monkeypatch.setattr(ctypes, "CDLL", load)
    fused_gelu._load_cublaslt.cache_clear()
    with caplog.at_level(logging.INFO):
        found = fused_gelu.is_available()
    fused_gelu._load_cublaslt.cache_clear()
    lines = [record.message for record in caplog.records]
    assert found == (reason is None) and len(lines) == (reason is not None)
    if reason:
        assert lines[0].startswith("GELU is not fused into matrix products: ") and reason in lines[0]
    else:
        assert library.cublasLtMatmul.argtypes[14] is ctypes.c_size_t and len(library.cublasLtMatmul.argtypes) == 16


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_each_stream_has_a_workspace_of_its_own():
    """Results on two streams at a time are those of one; a shared workspace mixes partial sums."""
    torch.manual_seed(0)
    x, weight = (torch.randn(256, 4096, device="cuda", dtype=torch.bfloat16) / 8 for _ in range(2))
    bias = torch.zeros(256, device="cuda", dtype=torch.bfloat16)
    wanted = linear_gelu(x, weight, bias)[0]
    streams = [torch.cuda.Stream() for _ in range(2)]
    torch.cuda.synchronize()
    found = []
    for _ in range(20):
        for stream in streams:
            with torch.cuda.stream(stream):
                found.append(linear_gelu(x, weight, bias)[0])
    torch.cuda.synchronize()
    assert all(torch.equal(one, wanted) for one in found)
    workspaces = fused_gelu._products(0).workspaces
    assert len({workspaces[stream.cuda_stream].data_ptr() for stream in streams}) == 2
