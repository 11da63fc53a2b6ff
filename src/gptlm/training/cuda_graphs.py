"""The passes of a micro-batch recorded as one CUDA graph, so that the GPU never waits for launches."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from gptlm.errors import GptlmError, reason_of

WARM_UP = 2  # calls before the recording: code is compiled, libraries make their plans and work spaces

Tensors = dict[str, Tensor]
Passes = Callable[[Tensors], tuple[Tensor, Any]]


class RecordedPasses:
    """Forward and backward pass of a micro-batch, from the third one on a replay of the recorded kernels.

    A recording holds addresses: inputs are copied to where they lay, gradients appear where they were. Torch moves
    its random numbers on at each replay, so dropout is that of passes which are not recorded.

    Args:
        passes: tensors of a micro-batch -> its loss and what else it made; it adds gradients to those of `parameters`.
        parameters: what has gradients.
        sums: where the gradients of several micro-batches are added up, one tensor per parameter; None where they
            are taken away after each.
    """

    def __init__(self, passes: Passes, parameters: list[Any], sums: list[Tensor] | None):
        self.passes, self.parameters, self.sums = passes, parameters, sums
        self._calls = 0
        self._form: Any = None  # shapes and constants of the recording
        self._graph: torch.cuda.CUDAGraph | None = None
        self._inputs: Tensors = {}
        self._made: tuple[Tensor, Any] = torch.zeros(()), None
        self._gradients = list[Tensor | None]()

    def __call__(self, inputs: Tensors, *constants: float) -> tuple[Tensor, Any]:
        """What `passes` returns, valid until the next call, as the gradients are.

        Args:
            inputs: on the GPU; other shapes than before are recorded anew.
            constants: numbers that `passes` uses; it is recorded anew when they change.

        Raises:
            GptlmError: where CUDA refuses the recording.
        """
        if self.sums is not None and any(parameter.grad is None for parameter in self.parameters):
            torch._foreach_zero_(self.sums)
            self._set_gradients(self.sums)
        self._calls += 1
        if self._calls <= WARM_UP:
            return self.passes(inputs)
        form = {name: (value.shape, value.dtype) for name, value in inputs.items()}, constants
        if form != self._form:
            self._record(inputs)
            self._form = form
        assert self._graph is not None
        for name, value in inputs.items():
            self._inputs[name].copy_(value)
        self._graph.replay()
        self._set_gradients(self._gradients)
        return self._made

    def _set_gradients(self, gradients: Any) -> None:
        for parameter, gradient in zip(self.parameters, gradients, strict=True):
            parameter.grad = gradient

    def _record(self, inputs: Tensors) -> None:
        self._graph, self._gradients, self._made = None, [], (self._made[0], None)  # the last one's memory goes first
        self._inputs = {name: value.clone() for name, value in inputs.items()}
        graph = torch.cuda.CUDAGraph()
        try:
            # other threads, which pin memory for the next samples, may go on meanwhile
            with torch.cuda.graph(graph, capture_error_mode="thread_local"):
                self._made = self.passes(self._inputs)
        except RuntimeError as error:  # torch cannot go on in this process
            reason = reason_of(error.__context__ or error)
            raise GptlmError(f"the passes cannot be recorded; try again with --cuda_graphs 0: {reason}") from error
        self._graph = graph
        self._gradients = [parameter.grad for parameter in self.parameters]
