"""Which passes are captured, what a replay leaves where, and errors; on a GPU: tests/recipes/test_gpu*.py.

`recorded` stands for torch's CUDA graphs: operators are recorded with the tensors they read and write, and a replay
runs them again on the same tensors. As in a capture, what was there before keeps its value.
"""

from contextlib import contextmanager

import pytest
import torch
import torch.nn.functional as F
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from gptlm.errors import GptlmError
from gptlm.training import cuda_graphs
from gptlm.training.cuda_graphs import WARM_UP, CapturedPasses, shape_of


class Recorder(TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.calls, self.before = [], {}

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        if function._schema.is_mutable:
            for place in tree_leaves(args[0]):
                self.before.setdefault(place.data_ptr(), (place, place.clone()))
        out = function(*args, **(kwargs or {}))
        self.calls.append((function, args, kwargs or {}, out))
        return out

    @torch.no_grad()
    def replay(self):
        for function, args, kwargs, out in self.calls:
            again = function(*args, **kwargs)
            for place, new in zip(tree_leaves(out), tree_leaves(again), strict=True):
                if isinstance(place, torch.Tensor) and place is not new:
                    place.copy_(new)


@pytest.fixture
def recorded(monkeypatch):
    """Captures in the order in which they are made."""
    made = []

    @contextmanager
    def capture(graph, *, pool, capture_error_mode):
        made.append((graph, pool))
        with graph:
            yield
        with torch.no_grad():
            for place, value in graph.before.values():
                place.copy_(value)

    monkeypatch.setattr(torch.cuda, "CUDAGraph", Recorder)
    monkeypatch.setattr(torch.cuda, "graph", capture)
    monkeypatch.setattr(torch.cuda, "graph_pool_handle", object)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (1, 1))
    return made


class Net:
    """Two weights; the second one has a gradient only where `inputs` ask for it."""

    def __init__(self, dropout=0.0):
        torch.manual_seed(0)
        self.weights = [torch.nn.Parameter(torch.randn(4, 4)), torch.nn.Parameter(torch.randn(4))]
        self.dropout, self.eager = dropout, 0

    def passes(self, inputs):
        self.eager += 1
        out = F.dropout(inputs["input_ids"] @ self.weights[0], self.dropout)
        if inputs.get("max_seqlen", 0) != 7:
            out = out + self.weights[1]
        loss = out.square().sum() * inputs.get("factor", 1)
        loss.backward()
        return loss.detach()


def batch(rows, **more):
    return {"input_ids": torch.randn(rows, 4), **more}


def gradients(weights):
    return [None if weight.grad is None else weight.grad.clone() for weight in weights]


def test_each_shape_is_captured_at_its_second_use_and_gives_what_eager_passes_give(recorded):
    """Shapes, another value that is not a tensor; and where a weight has no gradient it stays without."""
    net, plain = Net(), Net()
    captured = CapturedPasses(net.passes, net.weights, None)
    torch.manual_seed(1)
    shapes = [batch(3), batch(2), batch(3, max_seqlen=7), batch(3, factor=torch.tensor(2.0)), batch(3).copy()]
    for _ in range(4):
        for shape in shapes:
            inputs = {key: torch.randn_like(x) if torch.is_tensor(x) else x for key, x in shape.items()}
            loss, flat = captured(inputs)
            assert flat is None and loss.item() == plain.passes(inputs).item()
            for mine, other in zip(gradients(net.weights), gradients(plain.weights), strict=True):
                assert (mine is None) == (other is None)
                assert mine is None or torch.equal(mine, other)
            for weight in (*net.weights, *plain.weights):
                weight.grad = None
    assert len(recorded) == 4 and net.eager == 4 * WARM_UP + 4  # the eager ones, and the captures
    assert len({id(pool) for _, pool in recorded}) == 1


def test_gradients_of_all_graphs_have_one_place(recorded):
    net = Net()
    captured, places = CapturedPasses(net.passes, net.weights, None), set()
    for _ in range(3):
        for rows in (3, 2, 1):
            captured(batch(rows))
            places.add(tuple(weight.grad.data_ptr() for weight in net.weights))
            for weight in net.weights:
                weight.grad = None
    # the first calls ran eagerly, each with new tensors
    assert len(recorded) == 3 and len({tuple(p.data_ptr() for p in captured._gradients)} & places) == 1


def test_flat_gradients_of_all_graphs_have_one_place(recorded):
    net, given = Net(), []

    def flatten(into):
        given.append(into)
        flat = torch.empty(20) if into is None else into
        torch.cat([weight.grad.flatten() for weight in net.weights], out=flat)
        for weight in net.weights:
            weight.grad = None
        return flat

    captured, plain = CapturedPasses(net.passes, net.weights, None, flatten), Net()
    found = []
    for _ in range(3):
        for rows in (3, 2):
            inputs = batch(rows)
            found.append(captured(inputs)[1])
            plain.passes(inputs)
            assert torch.equal(found[-1], torch.cat([weight.grad.flatten() for weight in plain.weights]))
            assert all(weight.grad is None for weight in net.weights)
            for weight in plain.weights:
                weight.grad = None
    assert len({flat.data_ptr() for flat in found[2:]}) == 1
    assert len(recorded) == 2 and given[-1] is found[-1]


def test_micro_batches_of_several_shapes_add_up(recorded):
    net, plain = Net(), Net()
    sums = [torch.zeros_like(weight) for weight in net.weights]
    captured = CapturedPasses(net.passes, net.weights, sums)
    for _ in range(4):
        for rows in (3, 2, 3, 1):
            inputs = batch(rows)
            captured(inputs)
            plain.passes(inputs)
        for mine, place, other in zip(net.weights, sums, plain.weights, strict=True):
            assert mine.grad is place and torch.allclose(place, other.grad, atol=1e-4)
            mine.grad = other.grad = None
    assert len(recorded) == 3


def test_a_larger_shape_frees_the_smaller_ones_first(recorded):
    """The pool begins with the largest shape; a shape that has been captured needs no eager pass again."""
    net = Net()
    captured = CapturedPasses(net.passes, net.weights, None)
    for rows in (1, 1, 2, 1, 2, 1, 2):
        captured(batch(rows))
    order = [graph.calls[0][1][0].shape[0] for graph, _ in recorded]
    assert order == [1, 2, 1]
    pools = [pool for _, pool in recorded]
    assert pools[0] is not pools[1] and pools[1] is pools[2]
    assert net.eager == 2 * WARM_UP + 3


def test_a_new_shape_frees_the_graphs_where_memory_is_short(recorded, monkeypatch):
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda: 10 * len(recorded))
    net = Net()
    captured = CapturedPasses(net.passes, net.weights, None)
    for rows in (2, 2, 1, 2):  # 1 byte is free, the graph has 10
        captured(batch(rows))
    assert [graph.calls[0][1][0].shape[0] for graph, _ in recorded] == [2, 2]


def test_another_constant_captures_anew(recorded):
    net = Net()
    captured = CapturedPasses(net.passes, net.weights, None)
    for scale in (1.0, 1.0, 1.0, 2.0, 2.0):
        captured(batch(2), scale)
    assert len(recorded) == 2


def test_a_replay_draws_new_random_numbers(recorded):
    net = Net(dropout=0.5)
    captured, inputs = CapturedPasses(net.passes, net.weights, None), batch(64)
    assert len({captured(inputs)[0].item() for _ in range(6)}) == 6 and len(recorded) == 1


def test_shapes_beyond_the_limit_run_eagerly_and_are_spoken_of_once(recorded, monkeypatch):
    monkeypatch.setattr(cuda_graphs, "MAX_SHAPES", 2)
    said = []
    monkeypatch.setattr(cuda_graphs.logger, "handle", lambda record: said.append(record.getMessage()))
    monkeypatch.setattr(cuda_graphs.logger, "isEnabledFor", lambda level: True)
    net = Net()
    captured = CapturedPasses(net.passes, net.weights, None)
    for _ in range(3):
        for rows in (4, 3, 2, 1):
            captured(batch(rows))
    captured.close()
    assert len(recorded) == 2 and net.eager == 2 * (WARM_UP + 1) + 2 * 3
    assert said == [
        "CUDA graph 1: micro-batches of 4 x 4 tokens",
        "CUDA graph 2: micro-batches of 3 x 4 tokens",
        "micro-batches have more than 2 shapes: those of other shapes, such as 2 x 4 tokens, run kernel by kernel",
        f"CUDA graphs: 2, one per shape; {2 * WARM_UP + 6} micro-batches ran kernel by kernel",
    ]


def test_what_makes_a_shape():
    one = {"input_ids": torch.zeros(2, 3), "max_seqlen": 3, "num_items_in_batch": None}
    assert shape_of(one) == shape_of({**one, "input_ids": torch.ones(2, 3)})
    others = ({"input_ids": torch.zeros(3, 2)}, {"input_ids": torch.zeros(2, 3).long()}, {"max_seqlen": 4}, {"x": 1})
    assert len({shape_of(one), *(shape_of({**one, **other}) for other in others)}) == 5


def test_a_refused_capture_ends_the_run_with_what_to_do(monkeypatch, recorded):
    """CUDA reports it twice, at what it refuses and at the end of the capture; the first one is the reason."""

    @contextmanager
    def capture(graph, **settings):
        try:
            yield
        finally:
            raise RuntimeError("CUDA error: operation failed due to a previous error during capture")

    def passes(inputs):
        calls.append(inputs["input_ids"].item())
        if len(calls) > WARM_UP:
            raise RuntimeError("CUDA error: operation not permitted when stream is capturing\nCompile with ...")
        return inputs["input_ids"]

    calls = []
    monkeypatch.setattr(torch.cuda, "graph", capture)
    captured = CapturedPasses(passes, [], None)
    for call in range(WARM_UP):
        assert captured({"input_ids": torch.tensor(float(call))})[0] == call
    with pytest.raises(GptlmError, match=r"try again with --cuda_graphs 0: CUDA error: operation not permitted.*$"):
        captured({"input_ids": torch.tensor(7.0)})
    assert calls == [*range(WARM_UP), 7.0]
