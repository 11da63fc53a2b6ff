"""Forward and backward pass of a micro-batch as one CUDA graph per shape, so that the GPU never waits for launches."""

import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from gptlm.errors import GptlmError, reason_of
from gptlm.training.step import EagerStep, Inputs

logger = logging.getLogger(__name__)

WARM_UP = 1  # eager calls of a shape before its capture: kernels are compiled, libraries choose plans and workspaces
MAX_SHAPES = 32  # graphs; each holds some MiB of kernel parameters on the GPU
ITEMS = "num_items_in_batch"

Flatten = Callable[[Any], Any]


class CudaGraphStep(EagerStep):
    """Forward and backward pass of a micro-batch; from the second micro-batch of a shape on a replay of its graph."""

    _captured: "CapturedPasses | None" = None

    def __call__(self, inputs: Inputs, num_items: Tensor | None) -> Tensor:
        if self._captured is None:
            self._captured = self._make()
        loss, flat = self._captured({**inputs, ITEMS: num_items}, self.weights.scale_value)
        if flat is not None:
            self._flat_target.flat = flat
        return loss

    def _make(self) -> "CapturedPasses":
        """Made at the first step: then optimizer and engine, whose buffers the gradients go to, are there."""
        self._flat_target: Any = self.grad_sync.flat_target or self.weights.flat_target
        is_single = self.accumulation == 1 or self.weights.float32_sums  # gradients are used after each pass
        parameters: list[Any] = [p for p in self.network.parameters() if p.requires_grad]
        sums = None
        if not is_single and self._flat_target is not None:
            parameters, sums = self._flat_target.parameters, self._flat_target.views
        elif not is_single:
            sums = [torch.zeros_like(parameter) for parameter in parameters]
        flattens = self._flat_target is not None and is_single and not self.weights.float32_sums
        return CapturedPasses(self._passes, parameters, sums, self._flat_target.flatten if flattens else None)

    def _passes(self, inputs: Inputs) -> Tensor:
        return super().__call__({name: value for name, value in inputs.items() if name != ITEMS}, inputs[ITEMS])

    def close(self) -> None:
        if self._captured is not None:
            self._captured.close()
            self._captured = None


@dataclass(frozen=True)
class Graph:
    """A captured pass: the tensors at whose addresses it reads and writes.

    Attributes:
        inputs: the captured inputs that are tensors.
        loss: of the micro-batch.
        flat: gradients as flat tensors, where flattening them belongs to the graph.
        gradients: of each parameter, or None.
    """

    cuda: torch.cuda.CUDAGraph
    inputs: dict[str, Tensor]
    loss: Tensor
    flat: Any
    gradients: list[Tensor | None]


class CapturedPasses:
    """Runs `passes` for each shape of a micro-batch first eagerly, then as a CUDA graph.

    A graph holds addresses: inputs are copied to the addresses of the captured ones, gradients appear at theirs.
    Torch advances its random numbers at each replay, so dropout is the same as without a graph.

    Memory: all graphs share one pool and one copy of the gradients. They may, because no two of them run at the same
    time, and what one leaves behind is used before the next one runs. A pool grows for good with a larger shape.
    Therefore such a shape first frees the graphs of the smaller ones, which are captured again behind it.

    Args:
        passes: a micro-batch -> its loss; it adds gradients to those of `parameters`.
        parameters: the trained parameters.
        sums: buffers in which gradients of several micro-batches are accumulated, one per parameter; None where
            gradients are used after each micro-batch.
        flatten: moves the gradients into flat tensors: the given ones, or new ones for None.
    """

    def __init__(
        self,
        passes: Callable[[Inputs], Tensor],
        parameters: list[Any],
        sums: list[Tensor] | None,
        flatten: Flatten | None = None,
    ):
        self.passes, self.parameters, self.sums, self.flatten = passes, parameters, sums, flatten
        self._calls: dict[Any, int] = {}  # eager ones of each shape
        self._shapes: set[Any] = set()  # that have been captured
        self._constants: Any = None
        self._is_full = False
        self._pool: Any = None
        self._largest = self._bytes = 0  # numbers of the pool's largest shape, and bytes of the pool
        self._free()

    def __call__(self, inputs: Inputs, *constants: float) -> tuple[Tensor, Any]:
        """The loss and the flat gradients, valid until the next call, as the gradients are.

        Args:
            inputs: tensors on the GPU, and others; each combination of shapes and of other values has its own graph.
            constants: numbers that `passes` uses; for a new value all shapes are captured anew.

        Raises:
            GptlmError: where CUDA refuses the capture.
        """
        if self.sums is not None and any(parameter.grad is None for parameter in self.parameters):
            torch._foreach_zero_(self.sums)
            self._set_gradients(self.sums)
        if constants != self._constants:
            self._free()
            self._constants = constants
        shape = shape_of(inputs)
        graph = self._graphs.get(shape) or self._captured_if_warm(shape, inputs)
        if graph is None:
            loss = self.passes(inputs)
            return loss, self.flatten(self._flat) if self.flatten is not None else None
        for name, value in graph.inputs.items():
            value.copy_(inputs[name])
        graph.cuda.replay()
        self._set_gradients(graph.gradients)
        return graph.loss, graph.flat

    def close(self) -> None:
        """Free the graphs; the log says how many shapes there were."""
        eager = sum(self._calls.values())
        logger.info("CUDA graphs: %d, one per shape; %d micro-batches ran kernel by kernel", len(self._shapes), eager)
        self._free()

    def _captured_if_warm(self, shape: Any, inputs: Inputs) -> Graph | None:
        """The new graph of `shape`; None where `inputs` are to be run eagerly."""
        calls = self._calls.get(shape, 0)
        if calls >= WARM_UP and (shape in self._shapes or len(self._shapes) < MAX_SHAPES):
            size = _size_of(inputs)
            if size > self._largest:
                self._free()
                self._largest = size
            self._graphs[shape] = graph = self._capture(inputs)
            if shape not in self._shapes:
                self._shapes.add(shape)
                logger.info("CUDA graph %d: micro-batches of %s", len(self._shapes), in_words(inputs))
            return graph
        if calls == WARM_UP and not self._is_full:
            self._is_full = True
            logger.warning(
                "micro-batches have more than %d shapes: those of other shapes, such as %s, run kernel by kernel",
                MAX_SHAPES,
                in_words(inputs),
            )
        self._calls[shape] = calls + 1
        if calls == 0 and self._graphs and not self._has_room():
            self._free()
        return None

    def _has_room(self) -> bool:
        """Whether as much memory as the graphs use is free for an eager pass."""
        torch.cuda.empty_cache()
        return torch.cuda.mem_get_info()[0] > self._bytes

    def _free(self) -> None:
        """Free all graphs and their memory."""
        self._graphs: dict[Any, Graph] = {}
        self._gradients: list[Tensor | None] = [None] * len(self.parameters)  # where all graphs leave them
        self._flat: Any = None
        self._largest, self._bytes, self._pool = 0, 0, None

    def _set_gradients(self, gradients: Any) -> None:
        for parameter, gradient in zip(self.parameters, gradients, strict=True):
            parameter.grad = gradient

    def _capture(self, inputs: Inputs) -> Graph:
        kept = {name: value.clone() for name, value in inputs.items() if isinstance(value, Tensor)}
        torch.cuda.empty_cache()
        before = torch.cuda.memory_reserved()
        if self._pool is None:
            self._pool = torch.cuda.graph_pool_handle()
        cuda = torch.cuda.CUDAGraph()
        try:
            # thread_local: the threads that pin memory for the next batches may call CUDA during the capture
            with torch.cuda.graph(cuda, pool=self._pool, capture_error_mode="thread_local"):
                loss = self.passes({**inputs, **kept})
                if self.flatten is not None:
                    self._flat = self.flatten(self._flat)
                elif self.sums is None:
                    self._share_gradients()
        except RuntimeError as error:  # torch cannot continue in this process
            reason = reason_of(error.__context__ or error)
            raise GptlmError(
                f"the passes cannot be captured as a CUDA graph; try again with --cuda_graphs 0: {reason}"
            ) from error
        self._bytes += torch.cuda.memory_reserved() - before
        return Graph(cuda, kept, loss, self._flat, [parameter.grad for parameter in self.parameters])

    @torch.no_grad()
    def _share_gradients(self) -> None:
        """Move the gradients to where those of earlier graphs are."""
        found = [parameter.grad for parameter in self.parameters]
        pairs = list(zip(self._gradients, found, strict=True))
        copied = [(place, new) for place, new in pairs if place is not None and new is not None]
        if copied:
            torch._foreach_copy_([place for place, _ in copied], [new for _, new in copied])
        self._gradients = [new if place is None else place for place, new in pairs]
        places = zip(self._gradients, found, strict=True)
        self._set_gradients([None if new is None else place for place, new in places])


def shape_of(inputs: Inputs) -> Any:
    """What a graph of `inputs` is for: shapes and dtypes of the tensors, and all other values."""
    return tuple(
        (name, value.shape, value.dtype) if isinstance(value, Tensor) else (name, value)
        for name, value in sorted(inputs.items())
    )


def in_words(inputs: Inputs) -> str:
    """`8 x 640 tokens` of a micro-batch, and the length of its longest document where it has documents."""
    rows, length = inputs["input_ids"].shape
    longest = inputs.get("max_seqlen")
    return f"{rows} x {length} tokens" + (f", documents of at most {longest}" if longest else "")


def _size_of(inputs: Inputs) -> int:
    return max(value.numel() for value in inputs.values() if isinstance(value, Tensor))
