"""On a CUDA device: both passes of residual and layer norm against the formulas in float64, compiled and captured."""

import pytest
import torch

from gptlm.kernels.residual_norm import WIDEST, _ResidualNorm, residual_norm
from tests.kernels.test_residual_norm import operands, plain

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]

ROUNDING = {torch.bfloat16: 2**-8, torch.float16: 2**-11}


@pytest.mark.parametrize("with_bias", [True, False])
@pytest.mark.parametrize("dtype", list(ROUNDING))
@pytest.mark.parametrize("width", [32, 768, 1024, 1600, 2048, 2560, 4096, WIDEST])
def test_values_and_gradients(width, dtype, with_bias):
    """Numbers of rows that no program's share divides. The result repeats bit by bit."""
    given, outer = operands(with_bias, dtype, rows=1013, width=width, device="cuda")
    inputs = [part for part in given if part is not None]
    seen = []
    for _ in range(2):
        results = _ResidualNorm.apply(*given, 1e-5)
        seen.append([*results, *torch.autograd.grad(results, inputs, outer)])
    assert all(torch.equal(one, other) for one, other in zip(*seen, strict=True))
    exact = [None if part is None else part.detach().double().requires_grad_() for part in given]
    wanted = plain(*exact, 1e-5)
    inputs = [part for part in exact if part is not None]
    wanted = [*wanted, *torch.autograd.grad(wanted, inputs, [part.double() for part in outer])]
    for mine, other in zip(seen[0], wanted, strict=True):
        assert mine.dtype == dtype and (mine.double() - other).norm() / other.norm() < ROUNDING[dtype]


def test_compiled_and_captured():
    """One operator each way in the compiled code; a CUDA graph follows its inputs."""
    given, outer = operands(True, torch.bfloat16, rows=64, width=96, device="cuda")
    norm = torch.nn.LayerNorm(96).cuda().bfloat16()

    def run(x, branch, bias):
        total, normed = residual_norm(x, branch, bias, norm)
        return torch.autograd.grad((total, normed), (x, branch, bias, norm.weight), outer), total

    compiled = torch.compile(lambda *parts: residual_norm(*parts, norm), fullgraph=True)
    with torch.no_grad():  # no graph of the default stream is alive during the capture
        for mine, other in zip(compiled(*given[:3]), residual_norm(*given[:3], norm), strict=True):
            assert torch.equal(mine, other)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        run(*given[:3])
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = run(*given[:3])
    with torch.no_grad():
        given[0].mul_(3)
    graph.replay()
    wanted = run(*given[:3])
    assert torch.equal(captured[1], wanted[1])
    assert all(torch.equal(one, other) for one, other in zip(captured[0], wanted[0], strict=True))
