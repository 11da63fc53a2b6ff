"""Forward and backward pass of a micro-batch as one CUDA graph, so that the GPU never waits for kernel launches."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from gptlm.errors import GptlmError, reason_of
from gptlm.training.step import EagerStep, Inputs

WARM_UP = 2  # eager calls before the capture: kernels are compiled, libraries choose plans and allocate workspaces
ITEMS = "num_items_in_batch"

Tensors = dict[str, Tensor]
Passes = Callable[[Tensors], tuple[Tensor, Any]]


class CudaGraphStep(EagerStep):
    """Forward and backward pass of a micro-batch, from the third call on a replay of captured kernels.

    All micro-batches have to have the same shape; other shapes and another loss scale are captured anew.
    """

    _captured: "CapturedPasses | None" = None

    def __call__(self, inputs: Inputs, num_items: Tensor | None) -> Tensor:
        if self._captured is None:
            self._captured = self._make()
        loss, flat = self._captured({**inputs, ITEMS: num_items}, self.weights.scale_value)  # type: ignore[dict-item]
        if flat is not None:
            self._flat_target.flat = flat
        return loss

    def _make(self) -> "CapturedPasses":
        """Made at the first step: then optimizer and engine, whose buffers the gradients go to, are there."""
        self._flat_target: Any = self.grad_sync.flat_target or self.weights.flat_target
        self._is_single = self.accumulation == 1 or self.weights.float32_sums  # gradients are used after each pass
        parameters: list[Any] = [p for p in self.network.parameters() if p.requires_grad]
        sums = None
        if not self._is_single and self._flat_target is not None:
            parameters, sums = self._flat_target.parameters, self._flat_target.views
        elif not self._is_single:
            sums = [torch.zeros_like(parameter) for parameter in parameters]
        return CapturedPasses(self._passes, parameters, sums)

    def _passes(self, given: Tensors) -> tuple[Tensor, Any]:
        """The loss, and the gradients as flat tensors where flattening them belongs to the graph."""
        inputs = {name: value for name, value in given.items() if name != ITEMS}
        loss = super().__call__(inputs, given[ITEMS])
        flattens = self._flat_target is not None and self._is_single and not self.weights.float32_sums
        return loss, self._flat_target.flatten() if flattens else None


class CapturedPasses:
    """Calls `passes` twice, then captures it as a CUDA graph and replays that.

    A graph holds addresses: inputs are copied to the addresses of the captured ones, gradients appear at theirs.
    Torch advances its random numbers at each replay, so dropout is the same as without a graph.

    Args:
        passes: tensors of a micro-batch -> its loss and other results; it adds gradients to those of `parameters`.
        parameters: the trained parameters.
        sums: buffers in which gradients of several micro-batches are accumulated, one per parameter; None where
            gradients are used after each micro-batch.
    """

    def __init__(self, passes: Passes, parameters: list[Any], sums: list[Tensor] | None):
        self.passes, self.parameters, self.sums = passes, parameters, sums
        self._calls = 0
        self._key: Any = None  # shapes and constants of the captured graph
        self._graph: torch.cuda.CUDAGraph | None = None
        self._inputs: Tensors = {}
        self._results: tuple[Tensor, Any] = torch.zeros(()), None
        self._gradients = list[Tensor | None]()

    def __call__(self, inputs: Tensors, *constants: float) -> tuple[Tensor, Any]:
        """The results of `passes`, valid until the next call, as the gradients are.

        Args:
            inputs: on the GPU; other shapes than before are captured anew.
            constants: numbers that `passes` uses; a new value is captured anew.

        Raises:
            GptlmError: where CUDA refuses the capture.
        """
        if self.sums is not None and any(parameter.grad is None for parameter in self.parameters):
            torch._foreach_zero_(self.sums)
            self._set_gradients(self.sums)
        self._calls += 1
        if self._calls <= WARM_UP:
            return self.passes(inputs)
        key = {name: (value.shape, value.dtype) for name, value in inputs.items()}, constants
        if key != self._key:
            self._capture(inputs)
            self._key = key
        assert self._graph is not None
        for name, value in inputs.items():
            self._inputs[name].copy_(value)
        self._graph.replay()
        self._set_gradients(self._gradients)
        return self._results

    def _set_gradients(self, gradients: Any) -> None:
        for parameter, gradient in zip(self.parameters, gradients, strict=True):
            parameter.grad = gradient

    def _capture(self, inputs: Tensors) -> None:
        # frees the memory of the last graph before a new one is captured
        self._graph, self._gradients, self._results = None, [], (self._results[0], None)
        self._inputs = {name: value.clone() for name, value in inputs.items()}
        graph = torch.cuda.CUDAGraph()
        try:
            # thread_local: the threads that pin memory for the next batches may call CUDA during the capture
            with torch.cuda.graph(graph, capture_error_mode="thread_local"):
                self._results = self.passes(self._inputs)
        except RuntimeError as error:  # torch cannot continue in this process
            reason = reason_of(error.__context__ or error)
            raise GptlmError(
                f"the passes cannot be captured as a CUDA graph; try again with --cuda_graphs 0: {reason}"
            ) from error
        self._graph = graph
        self._gradients = [parameter.grad for parameter in self.parameters]
