"""Memory that a layout needs on each GPU: weights, gradients, optimizer state, activations and buffers, in bytes.

Activations of one layer and token, in units of the width D (half precision / float32), with the kernels used here
(attention keeps no scores): input of each layer norm 2 / 4, its output (a Linear's input) 2 / 4, q, k and v 6 / 12,
attention's output 2 / 4, feed-forward before and after GELU 8 + 8 / 16 + 16, a byte for each dropout mask. Under
autocast the residual stream is float32 and the Linears' inputs are half. Checked against `max_memory_allocated` of
H100 and H200 GPUs in `tests/planner/test_memory.py`.
"""

from dataclasses import dataclass

from gptlm.parallel.zero_config import BUCKET

GIB = 2**30
LOSS_CHUNK = 1024  # tokens whose logits exist at a time, see kernels/linear_cross_entropy.py
LARGE_BUCKET = 5 * 10**8  # DeepSpeed's default, with which the factors in `_buffers` were measured


@dataclass(frozen=True)
class Sizes:
    """A network and its samples: layers, width, feed-forward width, heads, vocabulary, positions, tokens a sample.

    Attributes:
        float8_layers: layers whose matrix products are float8 ones.
    """

    layers: int
    width: int
    inner: int
    heads: int
    vocabulary: int
    positions: int
    length: int
    float8_layers: int = 0

    @property
    def float8_copies(self) -> int:
        """Bytes of the matrices in float8, as they are and transposed (kernels/float8.py)."""
        return 2 * self.float8_layers * (4 * self.width**2 + 2 * self.width * self.inner)

    @property
    def layer_parameters(self) -> int:
        """Weights of one layer."""
        return 4 * self.width**2 + 2 * self.width * self.inner + 9 * self.width + self.inner

    @property
    def embedding_parameters(self) -> int:
        return self.vocabulary * self.width

    @property
    def parameters(self) -> int:
        """Weights of the network."""
        more = self.positions * self.width + 2 * self.width
        return self.layers * self.layer_parameters + self.embedding_parameters + more


@dataclass(frozen=True)
class Layout:
    """A parallel layout with its batch.

    Attributes:
        tensor, pipeline, data: degrees; `chunks`: pipeline stages per process.
        stage: of ZeRO, 0 for none; `shards`: replicas that share one optimizer state.
        micro: samples in one forward pass; `accumulation`: micro-batches per step.
        recompute: "", "full", "full_attn" or "core_attn".
        sequence: sequence parallelism.
        precision: "fp32", "O1" (autocast) or "O2" (half weights).
    """

    tensor: int = 1
    pipeline: int = 1
    data: int = 1
    chunks: int = 1
    stage: int = 0
    shards: int = 1
    micro: int = 1
    accumulation: int = 1
    recompute: str = ""
    sequence: bool = False
    precision: str = "O2"


@dataclass(frozen=True)
class Memory:
    """Bytes on the GPU that needs most. `update`: gradients during the optimizer step, without activations."""

    weights: float
    gradients: float
    optimizer: float
    activations: float
    output: float
    buffers: float
    update: float = 0.0

    @property
    def total(self) -> float:
        passes = (self.gradients, self.activations, self.output)
        return self.weights + self.optimizer + self.buffers + max(sum(passes), self.update)


def memory_of(sizes: Sizes, layout: Layout, bucket: int = BUCKET) -> Memory:
    """The memory of the GPU that needs most.

    In a pipeline that is the first stage, with most micro-batches in flight, or the last one, with the output layer.

    Args:
        bucket: elements that DeepSpeed reduces at a time.
    """
    stage_layers = -(-sizes.layers // layout.pipeline)
    body = stage_layers * sizes.layer_parameters + sizes.embedding_parameters + sizes.positions * sizes.width
    own = body / layout.tensor
    first = _activations(sizes, layout, stage_layers, in_flight(layout))
    output = _output(sizes, layout)
    if layout.pipeline > 1:
        last = _activations(sizes, layout, stage_layers, min(1.0 * layout.chunks, in_flight(layout))) + output
        activations, output = max(first, last), 0.0
    else:
        activations = first
    buffers = _buffers(own, layout, bucket)
    more = {"activations": activations, "output": output, "update": _update(own, layout)}
    # --fp8 allows no split layers
    return Memory(**_states(own, layout), **more, buffers=buffers + sizes.float8_copies)


def in_flight(layout: Layout) -> float:
    """Micro-batches whose activations the first stage holds (1F1B: arXiv 2104.04473, section 2.2)."""
    if layout.pipeline == 1:
        return 1.0
    if layout.accumulation < layout.pipeline:
        return float(layout.accumulation)
    more = (layout.pipeline - 1) / (layout.pipeline * layout.chunks) if layout.chunks > 1 else 0.0
    return layout.pipeline * (1 + more)


def _states(own: float, layout: Layout) -> dict[str, float]:
    half = layout.precision == "O2"
    shared = layout.shards if layout.stage else 1
    weights = own * (2 if half else 4) / (shared if layout.stage == 3 else 1)
    gradients = own * (2 if half else 4) / (shared if layout.stage >= 2 else 1)
    masters = own * 4 if half or layout.stage else 0.0
    return {"weights": weights, "gradients": gradients, "optimizer": (own * 8 + masters) / shared}


def _update(own: float, layout: Layout) -> float:
    """With half-precision weights: gradients and their flat copy, or DeepSpeed's float32 shard of them."""
    if layout.precision != "O2":
        return 0.0
    share = own / (layout.shards if layout.stage else 1)
    if layout.stage == 3:
        return share * (2 + 2 + 4)
    zero = layout.stage or layout.tensor > 1 or layout.pipeline > 1
    return max(own * (2 + 2), share * (2 + 4) if zero else 0.0)


def _activations(sizes: Sizes, layout: Layout, layers: int, batches: float) -> float:
    tokens = layout.micro * sizes.length
    whole = _layer_bytes(sizes, layout, "")
    kept = _layer_bytes(sizes, layout, layout.recompute)
    again = whole if layout.recompute in ("full", "full_attn") else 0.0  # the layer that is being recomputed
    return tokens * (layers * kept * batches + again)


def _layer_bytes(sizes: Sizes, layout: Layout, recompute: str) -> float:
    """Bytes per token that one layer keeps for backward."""
    width, inner, tensor = sizes.width, sizes.inner, layout.tensor
    split = tensor if layout.sequence else 1
    residual = 4 if layout.precision in ("fp32", "O1") else 2
    item = 4 if layout.precision == "fp32" else 2
    if recompute == "full":
        return residual * width / split
    norms = 2 * (residual + item) * width / split
    masks = 2 * width / split
    attention = (3 * width + width) * item / tensor
    feed_forward = 2 * inner * item / tensor
    if recompute == "full_attn":
        return norms + masks / 2 + feed_forward
    return norms + masks + attention + feed_forward


def _output(sizes: Sizes, layout: Layout) -> float:
    """The loss: a chunk's logits three times in float32 and once in half precision, and the gradients it keeps.

    An embedding whose rows are no multiple of 128 is copied (kernels/output_layer.py).
    """
    tokens = layout.micro * sizes.length
    rows = sizes.vocabulary / layout.tensor
    item = 4 if layout.precision == "fp32" else 2
    chunk = min(tokens, LOSS_CHUNK) * rows * (3 * 4 + item)
    copy = rows * sizes.width * item if rows % 128 else 0.0
    return chunk + copy + rows * sizes.width * 4 + 2 * tokens * sizes.width * item


def _buffers(own: float, layout: Layout, bucket: int) -> float:
    """Communication buffers, and under autocast the half-precision copies of the weights."""
    item = 2 if layout.precision == "O2" else 4
    copies = own * 2 if layout.precision == "O1" else 0.0
    if layout.tensor > 1 or layout.pipeline > 1:
        if layout.precision == "O2" and layout.stage < 3:
            return copies  # flat gradient sync needs none
        return copies + 2 * bucket * item  # one fills while the other is reduced
    if layout.data == 1:
        return copies
    if layout.stage == 0:
        return copies + own * item  # DistributedDataParallel's buckets
    if layout.stage == 3:
        return copies + own * item  # gathered weights
    filled = min(own, LARGE_BUCKET) * item
    return copies + (4 if layout.precision == "O1" else 0.25) * filled  # measured; float32 under autocast
