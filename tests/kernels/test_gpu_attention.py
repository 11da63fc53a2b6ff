"""On a CUDA device: the kernels behind `attention` give what the formula gives, compiled and as a CUDA graph too."""

import pytest
import torch

from gptlm.kernels.attention import Documents, attention
from tests.kernels.test_attention import by_hand, same_document

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]

OFFSETS = [0, 1, 40, 64, 128, 200, 256] + [256] * 57
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 3e-2, torch.float16: 4e-3}


def projection(dtype, rows=2, length=128, heads=4, width=64):
    """What c_attn returns: q, k and v side by side, (rows, length, 3 x heads x width)."""
    generator = torch.Generator("cuda").manual_seed(0)
    shape = rows, length, 3 * heads * width
    return torch.randn(shape, generator=generator, dtype=dtype, device="cuda").requires_grad_()


def split(x, width):
    return [part.unflatten(-1, (-1, width)).transpose(1, 2) for part in x.chunk(3, dim=-1)]


def documents_on_gpu(offsets=OFFSETS, longest=128):
    return Documents(torch.tensor(offsets, dtype=torch.int32, device="cuda"), longest)


@pytest.mark.parametrize("dtype", list(TOLERANCE))
@pytest.mark.parametrize("width", [64, 80, 20, 288])
def test_documents(dtype, width):
    x = projection(dtype, width=width)
    found = attention(*split(x, width), documents=documents_on_gpu())
    exact = x.detach().double().requires_grad_()
    wanted = by_hand(*split(exact, width), same_document(OFFSETS, 2, 128).cuda())
    gradient = torch.randn_like(wanted)
    (mine,), (other,) = (
        torch.autograd.grad(found, x, gradient.to(dtype)),
        torch.autograd.grad(wanted, exact, gradient),
    )
    torch.testing.assert_close(found.double(), wanted, rtol=0, atol=TOLERANCE[dtype])
    torch.testing.assert_close(mine.double(), other, rtol=TOLERANCE[dtype], atol=4 * TOLERANCE[dtype])


@pytest.mark.parametrize("dtype", list(TOLERANCE))
@pytest.mark.parametrize("repeat", [False, True])
def test_causal(dtype, repeat):
    x = projection(dtype)
    found = attention(*split(x, 64), shapes_repeat=repeat)
    wanted = by_hand(*split(x.detach().double(), 64), torch.ones(128, 128, dtype=torch.bool, device="cuda").tril())
    torch.testing.assert_close(found.double(), wanted, rtol=0, atol=TOLERANCE[dtype])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_dropout_inside_documents(dtype):
    """A quarter of the weights is dropped, the rest divided by what is kept; backward drops the same ones."""
    q, k, _ = split(projection(dtype, rows=8, length=256), 64)
    v = torch.ones_like(q, requires_grad=True)
    documents = documents_on_gpu([*range(0, 2048, 128), *[2048] * 48], 256)
    seen = []
    for seed in (1, 1, 2):
        torch.manual_seed(seed)
        seen.append(attention(q, k, v, documents=documents, dropout=0.25))
    assert torch.equal(seen[0], seen[1]) and not torch.equal(seen[0], seen[2])
    assert seen[0].float().mean().item() == pytest.approx(1, abs=0.02)
    first = seen[0][:, :, ::128].float().flatten()  # each sees itself alone: 0 or 4 / 3
    kept = first != 0
    assert kept.float().mean().item() == pytest.approx(0.75, abs=0.15)
    torch.testing.assert_close(first[kept], torch.full_like(first[kept], 4 / 3), rtol=0, atol=1e-2)
    # the gradient of sum(out) with respect to v sums the kept weights of each key, so both sums agree
    (gradient,) = torch.autograd.grad(seen[2].sum(), v, retain_graph=True)
    assert gradient.float().sum().item() == pytest.approx(seen[2].float().sum().item(), rel=1e-2)


@pytest.mark.parametrize("dropout", [0.0, 0.1])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_compiled_and_captured(dtype, dropout):
    """No graph break; other documents of the same shapes run in the captured graph."""

    def run(x, offsets):
        out = attention(*split(x, 64), documents=Documents(offsets, 128), dropout=dropout)
        out.float().square().sum().backward()
        return out.detach()

    compiled = torch.compile(
        lambda x, offsets: attention(*split(x, 64), documents=Documents(offsets, 128)), fullgraph=True
    )
    x, documents = projection(dtype), documents_on_gpu()
    torch.testing.assert_close(compiled(x, documents.offsets), attention(*split(x, 64), documents=documents))
    offsets = documents.offsets.clone()
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        run(x, offsets)
    torch.cuda.current_stream().wait_stream(stream)
    x.grad = None
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = run(x, offsets)
    other = torch.tensor([0, 100, 128, 250, 256] + [256] * 59, dtype=torch.int32, device="cuda")
    offsets.copy_(other)
    graph.replay()
    if dropout:
        assert captured.isfinite().all() and x.grad.isfinite().all()
        return
    wanted = projection(dtype)
    torch.testing.assert_close(captured, run(wanted, other))
    torch.testing.assert_close(x.grad, wanted.grad)
