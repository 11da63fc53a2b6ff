"""Which parallel layouts fit a job and a cluster, and which of them is probably the fastest.

The time is a rough estimate that ranks layouts. It adds up matrix products at a fraction of peak FLOP/s,
tensor-parallel all-reduces over the links of a node, gradient reduction over the slowest link between replicas, and
the pipeline's bubble.
"""

import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

from gptlm.planner.memory import GIB, Layout, Memory, Sizes, memory_of

EFFICIENCY = {"fp32": 0.35, "O1": 0.35, "O2": 0.40}  # fraction of peak FLOP/s that one GPU reaches
USABLE = 0.92  # fraction of GPU memory; CUDA's context and fragmentation take the rest


@dataclass(frozen=True)
class Cluster:
    """The GPUs to plan for.

    Attributes:
        cards: number of GPUs; `per_node` of them share fast links.
        memory: bytes of each.
        peak: FLOP/s of a GPU in half precision.
        link, network: bytes per second between GPUs of a node, and of each GPU between nodes.
    """

    cards: int
    per_node: int = 8
    memory: float = 80 * GIB
    peak: float = 989e12
    link: float = 300e9
    network: float = 25e9


@dataclass(frozen=True)
class Candidate:
    """A layout, its memory, and the estimated seconds of an optimizer step."""

    layout: Layout
    memory: Memory
    seconds: float

    def tokens_per_second(self, sizes: Sizes) -> float:
        layout = self.layout
        return layout.micro * layout.accumulation * layout.data * sizes.length / self.seconds


def nothing(layout: Layout) -> str:
    """Refuses no layout."""
    return ""


def candidates(
    sizes: Sizes, cluster: Cluster, global_batch: int, precision: str, refusal: Callable[[Layout], str] = nothing
) -> list[Candidate]:
    """The layouts that fit into memory, fastest first; equally fast ones by memory.

    Args:
        refusal: why a layout is not possible; "" if it is.
    """
    found = []
    for layout in layouts(sizes, cluster, global_batch, precision):
        memory = memory_of(sizes, layout)
        if memory.total <= cluster.memory * USABLE and not refusal(layout):
            found.append(Candidate(layout, memory, step_seconds(sizes, cluster, layout)))
    return sorted(found, key=lambda c: (float(f"{c.seconds:.9g}"), c.memory.total))


def smallest(
    sizes: Sizes, cluster: Cluster, global_batch: int, precision: str, refusal: Callable[[Layout], str] = nothing
) -> Candidate | None:
    """The possible layout that needs least memory, whether it fits or not; None if there is none."""
    possible = itertools.filterfalse(refusal, layouts(sizes, cluster, global_batch, precision))
    found = [(memory_of(sizes, layout), layout) for layout in possible]
    if not found:
        return None
    memory, layout = min(found, key=lambda pair: pair[0].total)
    return Candidate(layout, memory, step_seconds(sizes, cluster, layout))


def layouts(sizes: Sizes, cluster: Cluster, global_batch: int, precision: str) -> Iterator[Layout]:
    """Every valid layout: degrees divide what they split, the batch divides, a pipeline has ZeRO stage 0 or 1."""
    for tensor in _divisors(min(cluster.per_node, cluster.cards)):
        if sizes.heads % tensor or sizes.inner % tensor or cluster.cards % tensor:
            continue
        for pipeline in _divisors(cluster.cards // tensor):
            data = cluster.cards // (tensor * pipeline)
            if pipeline > sizes.layers or global_batch % data:
                continue
            base = Layout(tensor=tensor, pipeline=pipeline, data=data, precision=precision)
            base = replace(base, sequence=tensor > 1 and sizes.length % tensor == 0)
            yield from _batches(base, global_batch, sizes, inside=cluster.per_node // tensor)


def _batches(base: Layout, global_batch: int, sizes: Sizes, *, inside: int) -> Iterator[Layout]:
    """Batches, stages of ZeRO and recomputation; `inside`: replicas of a node, which may share the weights of stage 3.

    In stages 1 and 2, groups smaller than all replicas need more memory and are not estimated to be faster.
    """
    local = global_batch // base.data
    highest = 1 if base.pipeline > 1 else 3
    stages = range(highest + 1) if base.data > 1 else (0,)
    for micro in _divisors(local):
        if micro > 64:
            break
        steps = local // micro
        for stage in stages:
            for recompute in ("", "full_attn", "full"):
                layout = replace(base, micro=micro, accumulation=steps, stage=stage, recompute=recompute)
                layout = replace(layout, shards=base.data if stage else 1)
                yield layout
                if stage == 3 and 1 < inside < base.data and base.data % inside == 0:
                    yield replace(layout, shards=inside)
                if base.pipeline > 1 and sizes.layers % (2 * base.pipeline) == 0 and steps % base.pipeline == 0:
                    yield replace(layout, chunks=2)


def step_seconds(sizes: Sizes, cluster: Cluster, layout: Layout) -> float:
    """Seconds of an optimizer step."""
    tokens = layout.micro * layout.accumulation * sizes.length  # of a replica
    cards = layout.tensor * layout.pipeline
    forward = 2 * sizes.parameters + 2 * sizes.layers * sizes.length * sizes.width  # FLOPs per token, causal attention
    passes = {"": 3.0, "full_attn": 3.35, "full": 4.0}.get(layout.recompute, 3.1)
    small = min(1.0, (layout.micro * sizes.length / 4096) ** 0.25)  # few tokens do not fill a GPU
    peak = cluster.peak * (0.5 if layout.precision == "fp32" else 1.0) * EFFICIENCY[layout.precision] * small
    seconds = tokens * forward * passes / (cards * peak)
    seconds += _tensor_seconds(sizes, cluster, layout)
    bubble = (layout.pipeline - 1) / (layout.chunks * layout.accumulation)
    return seconds * (1 + bubble) + _data_seconds(sizes, cluster, layout)


def _tensor_seconds(sizes: Sizes, cluster: Cluster, layout: Layout) -> float:
    """Four all-reduces of the hidden states in each layer, forward and backward."""
    if layout.tensor == 1:
        return 0.0
    item = 4 if layout.precision == "fp32" else 2
    hidden = layout.micro * sizes.length * sizes.width * item
    each = 2 * (layout.tensor - 1) / layout.tensor * hidden / cluster.link + 20e-6
    return 4 * each * sizes.layers / layout.pipeline * layout.accumulation


def _data_seconds(sizes: Sizes, cluster: Cluster, layout: Layout) -> float:
    """Gradient reduction over the replicas, half of it overlapped with backward; stage 3 also gathers weights."""
    if layout.data == 1:
        return 0.0
    item = 2 if layout.precision == "O2" else 4
    own = sizes.parameters / (layout.tensor * layout.pipeline) * item

    def volume(replicas: int) -> float:
        inside = layout.tensor * replicas <= cluster.per_node
        return 2 * (replicas - 1) / replicas * own / (cluster.link if inside else cluster.network)

    fetched = volume(layout.shards) * layout.accumulation if layout.stage == 3 else 0.0
    return 0.5 * volume(layout.data) + fetched + (0.002 * layout.accumulation if layout.stage else 0.0)


def _divisors(number: int) -> list[int]:
    return [divisor for divisor in range(1, number + 1) if number % divisor == 0]
