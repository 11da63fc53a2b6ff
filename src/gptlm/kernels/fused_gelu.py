"""A feed-forward layer with GELU and its gradient inside the matrix products.

cuBLASLt, which torch brings along, can apply GELU to a product, or GELU's gradient, before it writes it ("epilogues"
GELU_AUX_BIAS and DGELU in its documentation). As passes of their own they take some 3 % of a step on an H200.
"""

import ctypes
import functools
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from gptlm.errors import GptlmError

TYPES = {torch.float16: 2, torch.bfloat16: 14}  # CUDA_R_16F, CUDA_R_16BF
FLOAT32, COMPUTE_32F = 0, 68
TRANSA, EPILOGUE, BIAS_POINTER, AUX_POINTER, AUX_LD = 3, 7, 8, 11, 12  # attributes of a product
WORKSPACE_BYTES, MIN_ALIGNMENTS = 1, (5, 6, 7, 8)  # attributes of a preference
GELU_AUX_BIAS, DGELU = 164, 192
ALIGNED = 16  # bytes at which tensors begin, and rows
SPACE = 1 << 25  # bytes that a product may use for partial sums


class _Algorithm(ctypes.Structure):
    """cublasLtMatmulHeuristicResult_t."""

    _fields_ = [
        ("algorithm", ctypes.c_uint64 * 8),
        ("workspace", ctypes.c_size_t),
        ("state", ctypes.c_int),
        ("waves", ctypes.c_float),
        ("reserved", ctypes.c_int * 4),
    ]


def load_cublaslt() -> Any:
    """cuBLASLt as torch has it, or None."""
    try:
        return ctypes.CDLL(f"libcublasLt.so.{(torch.version.cuda or '0').split('.')[0]}")
    except OSError:
        return None


class _Products:
    """Products with GELU in them, on one GPU.

    All matrices are in half precision and row-major; cuBLASLt sees their transposes.
    """

    def __init__(self, device: int) -> None:
        self.calls = load_cublaslt()
        self.handle = ctypes.c_void_p()
        with torch.cuda.device(device):
            _check(self.calls.cublasLtCreate(ctypes.byref(self.handle)))
            self.space = torch.empty(SPACE, dtype=torch.uint8, device="cuda")
        self.plans: dict[Any, Any] = {}

    def __call__(self, epilogue: int, weight: Tensor, x: Tensor, bias: Tensor | None, before: Tensor) -> Tensor | None:
        """GELU_AUX_BIAS: GELU(x weight^T + bias), with `before` the sum; DGELU: (x weight) GELU'(before).

        Args:
            weight: (N, K) with GELU_AUX_BIAS, (K, N) with DGELU.
            x: (M, K).
            before: (M, N), written or read.

        Returns:
            (M, N), or None where cuBLASLt has no kernel for it.
        """
        made = torch.empty_like(before)
        tensors = (weight, x, before, made, *(() if bias is None else (bias,)))
        if not all(tensor.is_contiguous() for tensor in tensors):
            return None
        if any(tensor.data_ptr() % ALIGNED or tensor.shape[-1] * 2 % ALIGNED for tensor in tensors):
            return None
        key = epilogue, weight.shape, x.shape, x.dtype
        if key not in self.plans:
            self.plans[key] = self._plan(epilogue, x.shape[0], x.shape[1], before.shape[1], TYPES[x.dtype])
        product, layouts, algorithm = self.plans[key]
        if algorithm is None:
            return None
        for attribute, tensor in ((BIAS_POINTER, bias), (AUX_POINTER, before)):
            if tensor is not None:
                self._set(product, attribute, ctypes.c_void_p(tensor.data_ptr()))
        a, b, d = layouts
        one, zero = ctypes.byref(ctypes.c_float(1)), ctypes.byref(ctypes.c_float(0))
        pointers = [ctypes.c_void_p(tensor.data_ptr()) for tensor in (weight, x, made, self.space)]
        stream = ctypes.c_void_p(torch.cuda.current_stream().cuda_stream)
        sizes = (ctypes.byref(algorithm), pointers[3], ctypes.c_size_t(SPACE), stream)
        _check(
            self.calls.cublasLtMatmul(
                self.handle, product, one, pointers[0], a, pointers[1], b, zero, pointers[2], d, pointers[2], d, *sizes
            )
        )
        return made

    def _plan(self, epilogue: int, m: int, k: int, n: int, kind: int) -> tuple[Any, tuple[Any, ...], Any]:
        """Description, layouts of both factors and of the product, and the algorithm cuBLASLt advises, or None."""
        product = ctypes.c_void_p()
        _check(self.calls.cublasLtMatmulDescCreate(ctypes.byref(product), COMPUTE_32F, FLOAT32))
        transposed = epilogue == GELU_AUX_BIAS
        self._set(product, TRANSA, ctypes.c_int32(transposed))
        self._set(product, EPILOGUE, ctypes.c_uint32(epilogue))
        self._set(product, AUX_LD, ctypes.c_int64(n))
        shapes = [(k, n) if transposed else (n, k), (k, m), (n, m)]
        layouts = tuple(self._layout(kind, *shape) for shape in shapes)
        preference, found, count = ctypes.c_void_p(), _Algorithm(), ctypes.c_int()
        _check(self.calls.cublasLtMatmulPreferenceCreate(ctypes.byref(preference)))
        for attribute, value in (
            (WORKSPACE_BYTES, ctypes.c_size_t(SPACE)),
            *((a, ctypes.c_uint32(ALIGNED)) for a in MIN_ALIGNMENTS),
        ):
            size = ctypes.c_size_t(ctypes.sizeof(value))
            _check(self.calls.cublasLtMatmulPreferenceSetAttribute(preference, attribute, ctypes.byref(value), size))
        a, b, d = layouts
        status = self.calls.cublasLtMatmulAlgoGetHeuristic(
            self.handle, product, a, b, d, d, preference, 1, ctypes.byref(found), ctypes.byref(count)
        )
        self.calls.cublasLtMatmulPreferenceDestroy(preference)
        return product, layouts, found if status == 0 and count.value else None

    def _layout(self, kind: int, rows: int, columns: int) -> ctypes.c_void_p:
        layout, sizes = ctypes.c_void_p(), (ctypes.c_uint64(rows), ctypes.c_uint64(columns), ctypes.c_int64(rows))
        _check(self.calls.cublasLtMatrixLayoutCreate(ctypes.byref(layout), kind, *sizes))
        return layout

    def _set(self, product: ctypes.c_void_p, attribute: int, value: Any) -> None:
        size = ctypes.c_size_t(ctypes.sizeof(value))
        _check(self.calls.cublasLtMatmulDescSetAttribute(product, attribute, ctypes.byref(value), size))


def _check(status: int) -> None:
    if status:
        raise GptlmError(f"cuBLASLt refuses a matrix product (status {status}); --torch_compile 0 goes without it")


@functools.cache
def _products(device: int) -> _Products:
    return _Products(device)


@torch.library.custom_op("gptlm::linear_gelu", mutates_args=())
def linear_gelu(x: Tensor, weight: Tensor, bias: Tensor) -> tuple[Tensor, Tensor]:
    """(M, K), (N, K), (N,) -> h = GELU(x weight^T + bias), and what GELU was applied to; both (M, N)."""
    if x.is_cuda:
        before = x.new_empty(x.shape[0], weight.shape[0])
        made = _products(x.get_device())(GELU_AUX_BIAS, weight, x, bias, before)
        if made is not None:
            return made, before
    before = F.linear(x, weight, bias)
    return F.gelu(before, approximate="tanh"), before


@linear_gelu.register_fake
def _(x: Tensor, weight: Tensor, bias: Tensor) -> tuple[Tensor, Tensor]:
    made = x.new_empty(x.shape[0], weight.shape[0])
    return made, torch.empty_like(made)


@torch.library.custom_op("gptlm::linear_gelu_gradient", mutates_args=())
def linear_gelu_gradient(gradient: Tensor, weight: Tensor, before: Tensor) -> Tensor:
    """(M, K), (K, N), (M, N) -> (gradient weight) GELU'(before), (M, N)."""
    if gradient.is_cuda:
        made = _products(gradient.get_device())(DGELU, weight, gradient, None, before)
        if made is not None:
            return made
    return torch.ops.aten.gelu_backward(gradient @ weight, before, approximate="tanh")


@linear_gelu_gradient.register_fake
def _(gradient: Tensor, weight: Tensor, before: Tensor) -> Tensor:
    return torch.empty_like(before)


class _FeedForward(torch.autograd.Function):
    """GELU(x up^T + up_bias) down^T + down_bias."""

    @staticmethod
    def forward(ctx, x, up, up_bias, down, down_bias):  # type: ignore[override]
        hidden, before = linear_gelu(x, up, up_bias)
        ctx.save_for_backward(x, up, down, hidden, before)
        return F.linear(hidden, down, down_bias)

    @staticmethod
    def backward(ctx, gradient):  # type: ignore[override]
        x, up, down, hidden, before = ctx.saved_tensors
        gradient = gradient.contiguous()
        inner = linear_gelu_gradient(gradient, down, before)
        return inner @ up, inner.T @ x, inner.sum(0), gradient.T @ hidden, gradient.sum(0)


def fused_feed_forward(x: Tensor, up: nn.Linear, down: nn.Linear) -> Tensor:
    """`down(GELU(up(x)))`, (..., D) -> (..., D), in half precision."""
    flat = x.reshape(-1, x.shape[-1])
    return _FeedForward.apply(flat, up.weight, up.bias, down.weight, down.bias).view(x.shape)


def supports_fused(x: Tensor, up: nn.Module, down: nn.Module) -> bool:
    """Whether both are plain Linear layers in the half precision of `x`."""
    plain = type(up) is nn.Linear and type(down) is nn.Linear and up.bias is not None and down.bias is not None
    return plain and x.dtype in TYPES and up.weight.dtype == x.dtype == down.weight.dtype  # type: ignore[union-attr]
