"""Passes over memory of `float8` as Triton kernels: each reads a tensor once and writes it in both orders of memory.

A float8 tensor holds multiples of its scale. Matrix products of float8 need both operands contiguous along the summed
dimension; the weight gradient sums over tokens, and so needs the transposed order. There, tokens are padded with zeros.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

ROWS, COLUMNS = 128, 64  # of a tile; measured on an H200
SMALLEST = tl.constexpr(1e-30)  # a scale of 0 would make 0 / 0


def cast(x: Tensor, scale: Tensor, values: Tensor, transposed: Tensor) -> None:
    """x / scale, (M, N), to `values` and to `transposed` (N, padded M), both of one float8 type."""
    _cast[_grid(transposed)](
        *(x, scale, values, transposed, scale, *x.shape, transposed.shape[1]),
        LARGEST=torch.finfo(values.dtype).max,
        SUMS=False,
        ROWS=ROWS,
        COLUMNS=COLUMNS,
        num_warps=4,
    )


def cast_and_sum(x: Tensor, scale: Tensor, values: Tensor, transposed: Tensor) -> Tensor:
    """As `cast`; returns the sums of the columns of `x`, (N,) float32."""
    grid = _grid(transposed)
    parts = torch.empty(grid[1], x.shape[1], dtype=torch.float32, device=x.device)
    _cast[grid](
        *(x, scale, values, transposed, parts, *x.shape, transposed.shape[1]),
        LARGEST=torch.finfo(values.dtype).max,
        SUMS=True,
        ROWS=ROWS,
        COLUMNS=COLUMNS,
        num_warps=4,
    )
    return parts.sum(0)


def gelu(x: Tensor, scale: Tensor, values: Tensor, transposed: Tensor) -> None:
    """GELU(x) / scale, to `values` and `transposed` as `cast`."""
    _gelu[_grid(transposed)](
        *(x, scale, values, transposed, *x.shape, transposed.shape[1]),
        LARGEST=torch.finfo(values.dtype).max,
        ROWS=ROWS,
        COLUMNS=COLUMNS,
        num_warps=4,
    )


def gelu_gradient(gradient: Tensor, x: Tensor, scale: Tensor, values: Tensor, transposed: Tensor) -> Tensor:
    """gradient x GELU'(x) / scale as `cast_and_sum`; the sums are those of gradient x GELU'(x)."""
    grid = _grid(transposed)
    parts = torch.empty(grid[1], x.shape[1], dtype=torch.float32, device=x.device)
    _gelu_gradient[grid](
        *(gradient, x, scale, values, parts, *x.shape),
        LARGEST=torch.finfo(values.dtype).max,
        ROWS=ROWS,
        COLUMNS=COLUMNS,
        num_warps=4,
    )
    transpose(values, transposed)  # Triton 3.6 mixes up the tiles where the kernel itself writes both orders
    return parts.sum(0)


def transpose(values: Tensor, transposed: Tensor) -> None:
    """(M, N) -> (N, padded M), both of 1 byte an element."""
    _transpose[_grid(transposed)](
        *(values.view(torch.uint8), transposed.view(torch.uint8), *values.shape, transposed.shape[1]),
        ROWS=ROWS,
        COLUMNS=COLUMNS,
        num_warps=4,
    )


def _grid(transposed: Tensor) -> tuple[int, int]:
    columns, rows = transposed.shape
    return triton.cdiv(columns, COLUMNS), triton.cdiv(rows, ROWS)


@triton.jit
def _tile(M, N, ROWS: tl.constexpr, COLUMNS: tl.constexpr):  # type: ignore[no-untyped-def]
    """Rows, columns, offsets and mask of this program's tile of an (M, N) matrix."""
    row = tl.program_id(1).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    column = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    inside = (row < M)[:, None] & (column < N)[None, :]
    return row, column, row[:, None] * N + column[None, :], inside


@triton.jit
def _rounded(value, scale, LARGEST: tl.constexpr, DTYPE: tl.constexpr):  # type: ignore[no-untyped-def]
    return tl.clamp(value * (1.0 / tl.maximum(tl.load(scale), SMALLEST)), -LARGEST, LARGEST).to(DTYPE)


@triton.jit
def _store(  # type: ignore[no-untyped-def]
    rounded,
    values,
    transposed,
    row,
    column,
    at,
    inside,
    N,
    PADDED,
):
    tl.store(values + at, rounded, mask=inside)
    place = transposed + column[:, None].to(tl.int64) * PADDED + row[None, :]
    tl.store(place, tl.trans(rounded), mask=(column < N)[:, None] & (row < PADDED)[None, :])


@triton.jit(do_not_specialize=["M"])
def _cast(  # type: ignore[no-untyped-def]
    x,
    scale,
    values,
    transposed,
    parts,
    M,
    N,
    PADDED,
    LARGEST: tl.constexpr,
    SUMS: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    row, column, at, inside = _tile(M, N, ROWS, COLUMNS)
    value = tl.load(x + at, mask=inside, other=0.0).to(tl.float32)
    if SUMS:
        tl.store(parts + tl.program_id(1) * N + column, tl.sum(value, 0), mask=column < N)
    rounded = _rounded(value, scale, LARGEST, values.dtype.element_ty)
    _store(rounded, values, transposed, row, column, at, inside, N, PADDED)


@triton.jit
def _tanh(x):  # type: ignore[no-untyped-def]
    # within 2^-11, where float8 rounds to 2^-4
    return tl.inline_asm_elementwise("tanh.approx.f32 $0, $1;", "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1)


@triton.jit(do_not_specialize=["M"])
def _gelu(  # type: ignore[no-untyped-def]
    x,
    scale,
    values,
    transposed,
    M,
    N,
    PADDED,
    LARGEST: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    row, column, at, inside = _tile(M, N, ROWS, COLUMNS)
    value = tl.load(x + at, mask=inside, other=0.0).to(tl.float32)
    value = 0.5 * value * (1 + _tanh(0.7978845608 * (value + 0.044715 * value * value * value)))
    rounded = _rounded(value, scale, LARGEST, values.dtype.element_ty)
    _store(rounded, values, transposed, row, column, at, inside, N, PADDED)


@triton.jit(do_not_specialize=["M"])
def _gelu_gradient(  # type: ignore[no-untyped-def]
    gradient,
    x,
    scale,
    values,
    parts,
    M,
    N,
    LARGEST: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    _, column, at, inside = _tile(M, N, ROWS, COLUMNS)
    value = tl.load(x + at, mask=inside, other=0.0).to(tl.float32)
    square = value * value
    tanh = _tanh(0.7978845608 * value * (1 + 0.044715 * square))
    slope = 0.5 * (1 + tanh) + 0.3989422804 * value * (1 - tanh * tanh) * (1 + 0.134145 * square)
    value = tl.load(gradient + at, mask=inside, other=0.0).to(tl.float32) * slope
    tl.store(parts + tl.program_id(1) * N + column, tl.sum(value, 0), mask=column < N)
    tl.store(values + at, _rounded(value, scale, LARGEST, values.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["M"])
def _transpose(  # type: ignore[no-untyped-def]
    values,
    transposed,
    M,
    N,
    PADDED,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    row, column, at, inside = _tile(M, N, ROWS, COLUMNS)
    value = tl.load(values + at, mask=inside, other=0)
    place = transposed + column[:, None].to(tl.int64) * PADDED + row[None, :]
    tl.store(place, tl.trans(value), mask=(column < N)[:, None] & (row < PADDED)[None, :])
