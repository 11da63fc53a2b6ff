"""The two passes of `residual_norm` as Triton kernels: a program holds whole rows, widths up to WIDEST.

Sums over all rows are partial sums of each program, and then the sum of these. The order of additions depends on shapes
and the GPU only, so results repeat.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

PIPELINED = 160 * 1024  # bytes of shared memory for a loop that loads two iterations ahead, as an A100 and newer have


def forward(
    x: Tensor, branch: Tensor, branch_bias: Tensor | None, weight: Tensor, bias: Tensor, eps: float
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """See `residual_norm.summed_and_normed`; all tensors are contiguous."""
    return float8_forward(x, branch, branch_bias, weight, bias, eps, None)


def float8_forward(
    x: Tensor,
    branch: Tensor,
    branch_bias: Tensor | None,
    weight: Tensor,
    bias: Tensor,
    eps: float,
    float8_scale: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """As `forward`, with the norm in float8 (e4m3) as numbers / `float8_scale`, a float32 scalar; None: as `x`."""
    rows, width = x.shape
    total = torch.empty_like(x)
    normed = torch.empty_like(x, dtype=x.dtype if float8_scale is None else torch.float8_e4m3fn)
    mean, scale = (torch.empty(rows, dtype=torch.float32, device=x.device) for _ in range(2))
    padded = triton.next_power_of_2(width)
    _forward[(rows,)](
        *(
            x,
            branch,
            x if branch_bias is None else branch_bias,
            weight,
            bias,
            x if float8_scale is None else float8_scale,
        ),
        *(total, normed, mean, scale, eps),
        WIDTH=width,
        PADDED=padded,
        BIAS=branch_bias is not None,
        FLOAT8=float8_scale is not None,
        num_warps=4 if padded <= 2048 else 8,
    )
    return total, normed, mean, scale


def backward(
    normed_gradient: Tensor,
    total_gradient: Tensor,
    total: Tensor,
    weight: Tensor,
    mean: Tensor,
    scale: Tensor,
    with_bias: bool,
) -> tuple[Tensor, Tensor]:
    """See `residual_norm.gradients`; all tensors are contiguous."""
    rows, width = total.shape
    device: Any = torch.cuda.get_device_properties(total.device)
    gradient = torch.empty_like(total)
    padded = triton.next_power_of_2(width)
    # measured on an H200: programs of a multiprocessor, rows of an iteration, warps of a program
    programs, step, warps = (3, 2, 4) if padded <= 1024 else (1, max(1, 8192 // padded), 8)
    programs *= device.multi_processor_count
    parts = torch.empty(programs, 3 if with_bias else 2, width, dtype=torch.float32, device=total.device)
    sums = torch.empty(parts.shape[1:], dtype=weight.dtype, device=total.device)
    _backward[(programs,)](
        *(normed_gradient, total_gradient, total, weight, mean, scale, gradient, parts, rows),
        WIDTH=width,
        PADDED=padded,
        ROWS=step,
        BIAS=with_bias,
        STAGES=3 if device.shared_memory_per_block_optin >= PIPELINED else 1,
        num_warps=warps,
    )
    _add_parts[(triton.cdiv(sums.numel(), 32),)](parts, sums, programs, sums.numel(), COLUMNS=32, ROWS=32, num_warps=4)
    return gradient, sums


@triton.jit
def _forward(  # type: ignore[no-untyped-def]  # Triton reads annotations as types of its own
    x,
    branch,
    branch_bias,
    weight,
    bias,
    float8_scale,
    total,
    normed,
    means,
    scales,
    eps,
    WIDTH: tl.constexpr,
    PADDED: tl.constexpr,
    BIAS: tl.constexpr,
    FLOAT8: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, PADDED)
    inside = column < WIDTH
    at = row * WIDTH + column
    value = tl.load(x + at, mask=inside, other=0.0).to(tl.float32)
    value += tl.load(branch + at, mask=inside, other=0.0).to(tl.float32)
    if BIAS:
        value += tl.load(branch_bias + column, mask=inside, other=0.0).to(tl.float32)
    rounded = value.to(total.dtype.element_ty)
    tl.store(total + at, rounded, mask=inside)
    value = rounded.to(tl.float32)
    mean = tl.sum(value, 0) / WIDTH
    centred = tl.where(inside, value - mean, 0.0)
    scale = tl.rsqrt(tl.sum(centred * centred, 0) / WIDTH + eps)
    slope = tl.load(weight + column, mask=inside, other=0.0).to(tl.float32)
    shift = tl.load(bias + column, mask=inside, other=0.0).to(tl.float32)
    result = centred * scale * slope + shift
    if FLOAT8:
        result = tl.clamp(result / tl.load(float8_scale), -448.0, 448.0)  # the largest number of e4m3
    tl.store(normed + at, result.to(normed.dtype.element_ty), mask=inside)
    tl.store(means + row, mean)
    tl.store(scales + row, scale)


@triton.jit(do_not_specialize=["rows"])
def _backward(  # type: ignore[no-untyped-def]  # Triton reads annotations as types of its own
    normed_gradient,
    total_gradient,
    total,
    weight,
    means,
    scales,
    gradient,
    parts,
    rows,
    WIDTH: tl.constexpr,
    PADDED: tl.constexpr,
    ROWS: tl.constexpr,
    BIAS: tl.constexpr,
    STAGES: tl.constexpr,
):
    program, programs = tl.program_id(0), tl.num_programs(0)
    column = tl.arange(0, PADDED)
    inside = column < WIDTH
    slope = tl.load(weight + column, mask=inside, other=0.0).to(tl.float32)[None, :]
    weight_sum = tl.zeros([ROWS, PADDED], tl.float32)
    bias_sum = tl.zeros([ROWS, PADDED], tl.float32)
    branch_sum = tl.zeros([ROWS, PADDED], tl.float32)
    for start in tl.range(program * ROWS, rows, programs * ROWS, num_stages=STAGES):
        row = start + tl.arange(0, ROWS)[:, None]
        mask = (row < rows) & inside[None, :]
        at = row.to(tl.int64) * WIDTH + column[None, :]
        outer = tl.load(normed_gradient + at, mask=mask, other=0.0).to(tl.float32)
        value = tl.load(total + at, mask=mask, other=0.0).to(tl.float32)
        direct = tl.load(total_gradient + at, mask=mask, other=0.0).to(tl.float32)
        mean = tl.load(means + row, mask=row < rows, other=0.0)
        scale = tl.load(scales + row, mask=row < rows, other=0.0)
        normal = tl.where(mask, (value - mean) * scale, 0.0)
        weight_sum += outer * normal
        bias_sum += outer
        inner = outer * slope
        along = tl.sum(inner * normal, 1, keep_dims=True) / WIDTH
        constant = tl.sum(inner, 1, keep_dims=True) / WIDTH
        result = ((inner - normal * along - constant) * scale + direct).to(gradient.dtype.element_ty)
        tl.store(gradient + at, result, mask=mask)
        if BIAS:
            branch_sum += tl.where(mask, result.to(tl.float32), 0.0)
    sums: tl.constexpr = 3 if BIAS else 2
    place = parts + program * sums * WIDTH + column
    tl.store(place, tl.sum(weight_sum, 0), mask=inside)
    tl.store(place + WIDTH, tl.sum(bias_sum, 0), mask=inside)
    if BIAS:
        tl.store(place + 2 * WIDTH, tl.sum(branch_sum, 0), mask=inside)


@triton.jit
def _add_parts(  # type: ignore[no-untyped-def]  # Triton reads annotations as types of its own
    parts,
    total,
    count,
    columns,
    COLUMNS: tl.constexpr,
    ROWS: tl.constexpr,
):
    column = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    inside = column < columns
    summed = tl.zeros([ROWS, COLUMNS], tl.float32)
    for start in range(0, count, ROWS):
        n = start + tl.arange(0, ROWS)
        mask = (n < count)[:, None] & inside[None, :]
        summed += tl.load(parts + n[:, None] * columns + column[None, :], mask=mask, other=0.0)
    tl.store(total + column, tl.sum(summed, 0).to(total.dtype.element_ty), mask=inside)
