"""A feed-forward layer with GELU and its gradient inside the matrix products.

cuBLASLt, which comes with torch, can apply GELU or GELU's gradient to a product before it is written (epilogues
GELU_AUX_BIAS and DGELU, cublasLt.h). As kernels of their own the two take some 3 % of a step on an H200. Python calls
the library through ctypes, with the signatures and constants of cublasLt.h 12 and 13; other versions use plain GELU.
"""

import ctypes
import functools
import logging
from ctypes import c_float, c_int, c_int32, c_int64, c_size_t, c_uint32, c_uint64, c_void_p
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from gptlm.errors import GptlmError

logger = logging.getLogger(__name__)

VERSIONS = range(120000, 140000)  # cublasLtGetVersion() of CUDA 12 and 13
CAPABILITY = (8, 0)  # the oldest GPUs that multiply bfloat16 and float16 alike (Ampere)
TYPES = {torch.float16: 2, torch.bfloat16: 14}  # CUDA_R_16F, CUDA_R_16BF
FLOAT32, COMPUTE_32F = 0, 68
TRANSA, EPILOGUE, BIAS_POINTER, AUX_POINTER, AUX_LD = 3, 7, 8, 11, 12  # cublasLtMatmulDescAttributes_t
WORKSPACE_BYTES, MIN_ALIGNMENTS = 1, (5, 6, 7, 8)  # cublasLtMatmulPreferenceAttributes_t
GELU_AUX_BIAS, DGELU = 164, 192  # cublasLtEpilogue_t
ALIGNMENT = 16  # bytes, of tensors and of rows
WORKSPACE = 1 << 25  # bytes for partial sums: NVIDIA's advice for Hopper (cuBLAS documentation, cublasSetWorkspace)
SIGNATURES = {  # all return a cublasStatus_t
    "cublasLtCreate": (c_void_p,),
    "cublasLtMatmulDescCreate": (c_void_p, c_int, c_int),
    "cublasLtMatmulDescSetAttribute": (c_void_p, c_int, c_void_p, c_size_t),
    "cublasLtMatrixLayoutCreate": (c_void_p, c_int, c_uint64, c_uint64, c_int64),
    "cublasLtMatmulPreferenceCreate": (c_void_p,),
    "cublasLtMatmulPreferenceSetAttribute": (c_void_p, c_int, c_void_p, c_size_t),
    "cublasLtMatmulPreferenceDestroy": (c_void_p,),
    "cublasLtMatmulAlgoGetHeuristic": (*(c_void_p,) * 7, c_int, c_void_p, c_void_p),
    # handle, product, alpha, A, layout, B, layout, beta, C, layout, D, layout, algorithm, workspace, size, stream
    "cublasLtMatmul": (*(c_void_p,) * 14, c_size_t, c_void_p),
}


class _Heuristic(ctypes.Structure):
    """cublasLtMatmulHeuristicResult_t; it begins with the algorithm, a cublasLtMatmulAlgo_t."""

    _fields_ = [
        ("algorithm", c_uint64 * 8),
        ("workspace", c_size_t),
        ("state", c_int),
        ("waves", c_float),
        ("reserved", c_int * 4),
    ]


def is_available() -> bool:
    """Whether torch's cuBLASLt and every visible GPU can do it; else one log line says why not."""
    if torch.version.cuda is None:
        return False
    try:
        _load_cublaslt()
        capability = min(map(torch.cuda.get_device_capability, range(torch.cuda.device_count())), default=(0, 0))
        if capability < CAPABILITY:
            raise OSError(f"compute capability {capability[0]}.{capability[1]}")
    except (OSError, AttributeError) as error:
        logger.info("GELU is not fused into matrix products: %s", error)
        return False
    return True


@functools.cache
def _load_cublaslt() -> Any:
    """cuBLASLt as torch has loaded it.

    Raises:
        OSError: if it is not there or of a version whose constants are not known here.
        AttributeError: if it lacks a function.
    """
    library = ctypes.CDLL(f"libcublasLt.so.{(torch.version.cuda or '0').split('.')[0]}")
    library.cublasLtGetVersion.restype, library.cublasLtGetVersion.argtypes = c_size_t, ()
    version = library.cublasLtGetVersion()
    if version not in VERSIONS:
        raise OSError(f"cuBLASLt {version} (tried: {VERSIONS.start} to {VERSIONS.stop - 1})")
    for name, parameters in SIGNATURES.items():
        function = getattr(library, name)
        function.restype, function.argtypes = c_int, parameters
    return library


class _Products:
    """Products with a GELU epilogue on one GPU. Matrices are row-major half precision; cuBLASLt sees transposes."""

    def __init__(self, device: int) -> None:
        self.calls = _load_cublaslt()
        self.handle = c_void_p()
        with torch.cuda.device(device):
            _check(self.calls.cublasLtCreate(ctypes.byref(self.handle)))
        self.plans: dict[Any, Any] = {}
        self.workspaces: dict[int, Tensor] = {}  # by stream: products on several streams may run at the same time

    def __call__(self, epilogue: int, weight: Tensor, x: Tensor, bias: Tensor | None, before: Tensor) -> Tensor | None:
        """GELU_AUX_BIAS: GELU(x weight^T + bias), with `before` the sum; DGELU: (x weight) GELU'(before).

        Args:
            weight: (N, K) with GELU_AUX_BIAS, (K, N) with DGELU.
            x: (M, K).
            before: (M, N), written or read.

        Returns:
            (M, N), or None where cuBLASLt has no kernel for it.
        """
        out = torch.empty_like(before)
        tensors = (weight, x, before, out, *(() if bias is None else (bias,)))
        if not all(tensor.is_contiguous() and tensor.dtype == x.dtype for tensor in tensors):
            return None
        if any(tensor.data_ptr() % ALIGNMENT or tensor.shape[-1] * 2 % ALIGNMENT for tensor in tensors):
            return None
        key = epilogue, weight.shape, x.shape, x.dtype
        if key not in self.plans:
            self.plans[key] = self._plan(epilogue, x.shape[0], x.shape[1], before.shape[1], TYPES[x.dtype])
        product, (a, b, d), heuristic = self.plans[key]
        if heuristic is None:
            return None
        for attribute, tensor in ((BIAS_POINTER, bias), (AUX_POINTER, before)):
            if tensor is not None:
                self._set(product, attribute, c_void_p(tensor.data_ptr()))
        stream = torch.cuda.current_stream().cuda_stream
        if stream not in self.workspaces:
            self.workspaces[stream] = torch.empty(WORKSPACE, dtype=torch.uint8, device=x.device)
        workspace = self.workspaces[stream].data_ptr()
        left, right, result = weight.data_ptr(), x.data_ptr(), out.data_ptr()
        one, zero = ctypes.byref(c_float(1)), ctypes.byref(c_float(0))
        factors = (one, left, a, right, b, zero, result, d, result, d)
        _check(
            self.calls.cublasLtMatmul(
                self.handle, product, *factors, ctypes.byref(heuristic), workspace, WORKSPACE, stream
            )
        )
        return out

    def _plan(self, epilogue: int, m: int, k: int, n: int, dtype: int) -> tuple[Any, tuple[Any, ...], Any]:
        """Description of the product, layouts of A, B and D, and the first algorithm of the heuristic, or None."""
        product = c_void_p()
        _check(self.calls.cublasLtMatmulDescCreate(ctypes.byref(product), COMPUTE_32F, FLOAT32))
        transposed = epilogue == GELU_AUX_BIAS
        self._set(product, TRANSA, c_int32(transposed))
        self._set(product, EPILOGUE, c_uint32(epilogue))
        self._set(product, AUX_LD, c_int64(n))
        a, b, d = (self._layout(dtype, *shape) for shape in ((k, n) if transposed else (n, k), (k, m), (n, m)))
        preference, found, count = c_void_p(), _Heuristic(), c_int()
        _check(self.calls.cublasLtMatmulPreferenceCreate(ctypes.byref(preference)))
        for attribute, value in ((WORKSPACE_BYTES, c_size_t(WORKSPACE)), *((a, c_uint32(16)) for a in MIN_ALIGNMENTS)):
            size = ctypes.sizeof(value)
            _check(self.calls.cublasLtMatmulPreferenceSetAttribute(preference, attribute, ctypes.byref(value), size))
        status = self.calls.cublasLtMatmulAlgoGetHeuristic(
            self.handle, product, a, b, d, d, preference, 1, ctypes.byref(found), ctypes.byref(count)
        )
        self.calls.cublasLtMatmulPreferenceDestroy(preference)
        return product, (a, b, d), found if status == 0 and count.value else None

    def _layout(self, dtype: int, rows: int, columns: int) -> c_void_p:
        layout = c_void_p()
        _check(self.calls.cublasLtMatrixLayoutCreate(ctypes.byref(layout), dtype, rows, columns, rows))
        return layout

    def _set(self, product: c_void_p, attribute: int, value: Any) -> None:
        size = ctypes.sizeof(value)
        _check(self.calls.cublasLtMatmulDescSetAttribute(product, attribute, ctypes.byref(value), size))


def _check(status: int) -> None:
    if status:
        raise GptlmError(f"cuBLASLt refuses a matrix product (status {status}); --torch_compile 0 runs without it")


@functools.cache
def _products(device: int) -> _Products:
    return _Products(device)


@torch.library.custom_op("gptlm::linear_gelu", mutates_args=())
def linear_gelu(x: Tensor, weight: Tensor, bias: Tensor) -> tuple[Tensor, Tensor]:
    """(M, K), (N, K), (N,) -> h = GELU(x weight^T + bias) and the input of GELU; both (M, N)."""
    if x.is_cuda:
        before = x.new_empty(x.shape[0], weight.shape[0])
        out = _products(x.get_device())(GELU_AUX_BIAS, weight, x, bias, before)
        if out is not None:
            return out, before
    before = F.linear(x, weight, bias)
    return F.gelu(before, approximate="tanh"), before


@linear_gelu.register_fake
def _(x: Tensor, weight: Tensor, bias: Tensor) -> tuple[Tensor, Tensor]:
    out = x.new_empty(x.shape[0], weight.shape[0])
    return out, torch.empty_like(out)


@torch.library.custom_op("gptlm::linear_gelu_gradient", mutates_args=())
def linear_gelu_gradient(gradient: Tensor, weight: Tensor, before: Tensor) -> Tensor:
    """(M, K), (K, N), (M, N) -> (gradient weight) GELU'(before), (M, N)."""
    if gradient.is_cuda:
        out = _products(gradient.get_device())(DGELU, weight, gradient, None, before)
        if out is not None:
            return out
    return torch.ops.aten.gelu_backward(gradient @ weight, before, approximate="tanh")


@linear_gelu_gradient.register_fake
def _(gradient: Tensor, weight: Tensor, before: Tensor) -> Tensor:
    return torch.empty_like(before)


class _FeedForward(torch.autograd.Function):
    """GELU(x up^T + up_bias) down^T + down_bias."""

    @staticmethod
    def forward(  # type: ignore[override]
        ctx: Any, x: Tensor, up: Tensor, up_bias: Tensor, down: Tensor, down_bias: Tensor | None
    ) -> Tensor:
        hidden, before = linear_gelu(x, up, up_bias)
        ctx.save_for_backward(x, up, down, hidden, before)
        return F.linear(hidden, down, down_bias)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        x, up, down, hidden, before = ctx.saved_tensors
        gradient = gradient.contiguous()
        inner = linear_gelu_gradient(gradient, down, before)
        down_bias = gradient.sum(0) if ctx.needs_input_grad[4] else None
        return inner @ up, inner.T @ x, inner.sum(0), gradient.T @ hidden, down_bias


def fused_feed_forward(x: Tensor, up: nn.Linear, down: nn.Linear, *, without_bias: bool = False) -> Tensor:
    """`down(GELU(up(x)))`, (..., D) -> (..., D), in half precision; `without_bias`: without that of `down`."""
    flat = x.reshape(-1, x.shape[-1])
    bias = None if without_bias else down.bias
    return _FeedForward.apply(flat, up.weight, up.bias, down.weight, bias).view(x.shape)


def supports_fused(x: Tensor, up: nn.Module, down: nn.Module) -> bool:
    """Whether both are plain Linear layers in the half precision of `x`."""
    plain = type(up) is nn.Linear and type(down) is nn.Linear and up.bias is not None and down.bias is not None
    return plain and x.dtype in TYPES and up.weight.dtype == x.dtype == down.weight.dtype  # type: ignore[union-attr]
