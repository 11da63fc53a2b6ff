"""Sums over all tokens, such as the gradient of a bias, as Triton kernels: partial sums, then the sum of these.

The order of additions depends on shapes only, so results repeat.
"""

import functools
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

COLUMNS, ROWS = 1024, 8  # of a tile; a program adds up tiles that lie below each other
PARTS = 128  # programs for the same columns


@functools.cache
def processors(device: int) -> int:
    """Multiprocessors of a GPU."""
    return torch.cuda.get_device_properties(device).multi_processor_count


@functools.cache
def stages(device: int) -> int:
    """How many iterations ahead a loop may load: three need some 150 KB of shared memory, as an A100 and newer have."""
    properties: Any = torch.cuda.get_device_properties(device)
    return 3 if properties.shared_memory_per_block_optin >= 160 * 1024 else 1


def column_sum(x: Tensor) -> Tensor:
    """(N, D) contiguous half precision -> (D,), added up in float32."""
    rows, columns = x.shape
    tiles = triton.cdiv(columns, COLUMNS)
    parts = torch.empty(PARTS, columns, dtype=torch.float32, device=x.device)
    _partial_sums[(tiles, PARTS)](
        x, parts, rows, columns, COLUMNS=COLUMNS, ROWS=ROWS, STAGES=stages(x.get_device()), num_warps=4
    )
    return add_parts(parts, x.dtype)


def add_parts(parts: Tensor, dtype: torch.dtype) -> Tensor:
    """(n, ...) contiguous float32 -> its sum over the first dimension, in `dtype`."""
    total = torch.empty(parts.shape[1:], dtype=dtype, device=parts.device)
    columns = total.numel()
    _add_parts[(triton.cdiv(columns, 32),)](parts, total, parts.shape[0], columns, COLUMNS=32, ROWS=32, num_warps=4)
    return total


@triton.jit(do_not_specialize=["rows"])
def _partial_sums(x, parts, rows, columns, COLUMNS: tl.constexpr, ROWS: tl.constexpr, STAGES: tl.constexpr):
    part, count = tl.program_id(1), tl.num_programs(1)
    column = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    inside = column < columns
    row = tl.arange(0, ROWS)
    total = tl.zeros([ROWS, COLUMNS], tl.float32)
    for start in tl.range(part * ROWS, rows, count * ROWS, num_stages=STAGES):
        n = start + row
        mask = (n < rows)[:, None] & inside[None, :]
        total += tl.load(x + n[:, None].to(tl.int64) * columns + column[None, :], mask=mask, other=0.0).to(tl.float32)
    tl.store(parts + part * columns + column, tl.sum(total, 0), mask=inside)


@triton.jit(do_not_specialize=["count"])
def _add_parts(parts, total, count, columns, COLUMNS: tl.constexpr, ROWS: tl.constexpr):
    column = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    inside = column < columns
    row = tl.arange(0, ROWS)
    summed = tl.zeros([ROWS, COLUMNS], tl.float32)
    for start in range(0, count, ROWS):
        n = start + row
        summed += tl.load(
            parts + n[:, None] * columns + column[None, :], mask=(n < count)[:, None] & inside[None, :], other=0.0
        )
    tl.store(total + column, tl.sum(summed, 0).to(total.dtype.element_ty), mask=inside)
