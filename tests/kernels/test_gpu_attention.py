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
    """A quarter of the weights is dropped, in every row, the rest divided by what is kept; a seed repeats it.

    With unit vectors for v the output is the dropped weights themselves: documents are as long as heads are wide.
    """
    count, width, share = 32, 64, 0.25
    q, k, _ = (x.detach().requires_grad_() for x in split(projection(dtype, rows=8, length=256), width))
    v = torch.eye(width, dtype=dtype, device="cuda").repeat(4, 1).expand_as(q).contiguous().requires_grad_()
    documents = documents_on_gpu([width * min(number, count) for number in range(64)], 256)
    seen = []
    for seed in (1, 1, 2):
        torch.manual_seed(seed)
        seen.append(attention(q, k, v, documents=documents, dropout=share))
    assert torch.equal(seen[0], seen[1]) and not torch.equal(seen[0], seen[2])

    apart = lambda x: x.double().unflatten(2, (4, width)).transpose(1, 2).flatten(0, 1)  # noqa: E731 - (32, 4, 64, 64)
    causal = torch.ones(width, width, dtype=torch.bool, device="cuda").tril()
    whole = by_hand(apart(q), apart(k), torch.eye(width, device="cuda").double(), causal)
    dropped = apart(seen[2])
    kept = dropped > 0
    for part in (kept[..., causal], kept[..., 0], kept[..., 0, 0], kept[..., -1, :], kept[0][..., causal]):
        assert part.double().mean().item() == pytest.approx(1 - share, abs=4 * (0.19 / part.numel()) ** 0.5)
    tolerance = TOLERANCE[dtype]
    weights = whole * kept / (1 - share)
    torch.testing.assert_close(dropped, weights, rtol=tolerance, atol=tolerance)

    gradient = torch.randn_like(seen[2])
    found = torch.autograd.grad(seen[2], (q, k, v), gradient)
    through = apart(gradient) * kept / (1 - share)  # v is the identity
    through = whole * (through - (through * whole).sum(-1, keepdim=True)) / width**0.5
    wanted = through @ apart(k), through.transpose(-1, -2) @ apart(q), weights.transpose(-1, -2) @ apart(gradient)
    for mine, other in zip(found, wanted, strict=True):
        torch.testing.assert_close(apart(mine), other, rtol=2 * tolerance, atol=4 * tolerance)


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
