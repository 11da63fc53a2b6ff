"""Product of a matrix with one vector, and what GPT-2 does before and after it, as one Triton kernel.

A product of one token reads the matrix once; all else is launches. cuBLAS needs two to four kernels for layer norm,
product, bias, GELU and residual. Here each program computes the layer norm of the whole vector anew, which costs less
than to wait for another kernel. On Hopper and newer GPUs a program loads its part of the matrix while the kernel before
still runs (programmatic dependent launch).
"""

import torch
import triton
import triton.language as tl
from torch import Tensor, nn
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

ROWS = 4  # of the matrix, for a program
HOPPER = (9, 0)


def vector_linear(
    x: Tensor,
    linear: nn.Linear,
    *,
    norm: nn.LayerNorm | None = None,
    gelu: bool = False,
    residual: Tensor | None = None,
) -> Tensor:
    """residual + gelu(linear(norm(x))): (1, inputs) -> (1, outputs), each part where asked for; sums are float32.

    GELU is GPT-2's, with tanh.
    """
    inputs, outputs = linear.in_features, linear.out_features
    y = torch.empty((1, outputs), dtype=x.dtype, device=x.device)
    overlaps = torch.cuda.get_device_capability(x.device) >= HOPPER
    _vector_linear[(triton.cdiv(outputs, ROWS),)](
        *(x, linear.weight, linear.bias, residual if residual is not None else x, y),
        *((norm.weight, norm.bias, norm.eps) if norm is not None else (x, x, 0.0)),
        outputs,
        INPUTS=inputs,
        PADDED=triton.next_power_of_2(inputs),
        ROWS=ROWS,
        OVERLAPS=overlaps,
        NORM=norm is not None,
        GELU=gelu,
        RESIDUAL=residual is not None,
        num_warps=4 if inputs <= 2048 else 8,
        **({"launch_pdl": True} if overlaps else {}),
    )
    return y


@triton.jit
def _vector_linear(  # type: ignore[no-untyped-def]  # Triton reads annotations as types of its own
    x,
    weight,
    bias,
    residual,
    y,
    norm_weight,
    norm_bias,
    eps,
    outputs,
    INPUTS: tl.constexpr,
    PADDED: tl.constexpr,
    ROWS: tl.constexpr,
    OVERLAPS: tl.constexpr,
    NORM: tl.constexpr,
    GELU: tl.constexpr,
    RESIDUAL: tl.constexpr,
):
    if OVERLAPS:
        gdc_launch_dependents()
    n = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    k = tl.arange(0, PADDED)
    in_rows, in_columns = n < outputs, k < INPUTS
    # weights first: nothing before this kernel changes them
    at = n[:, None].to(tl.int64) * INPUTS + k[None, :]
    matrix = tl.load(weight + at, mask=in_rows[:, None] & in_columns[None, :], other=0.0)
    offset = tl.load(bias + n, mask=in_rows, other=0.0).to(tl.float32)
    if NORM:
        slope = tl.load(norm_weight + k, mask=in_columns, other=0.0).to(tl.float32)
        shift = tl.load(norm_bias + k, mask=in_columns, other=0.0).to(tl.float32)
    if OVERLAPS:
        gdc_wait()  # for the kernels before to end
    vector = tl.load(x + k, mask=in_columns, other=0.0).to(tl.float32)
    if NORM:
        centred = tl.where(in_columns, vector - tl.sum(vector, 0) / INPUTS, 0.0)
        scale = 1 / tl.sqrt(tl.sum(centred * centred, 0) / INPUTS + eps)
        vector = (centred * scale * slope + shift).to(weight.dtype.element_ty).to(tl.float32)
    result = tl.sum(matrix.to(tl.float32) * vector[None, :], 1) + offset
    if GELU:  # (1 + tanh z) / 2 = sigmoid 2 z
        result = result * tl.sigmoid(1.5957691216057308 * (result + 0.044715 * result * result * result))
    if RESIDUAL:
        result += tl.load(residual + n, mask=in_rows, other=0.0).to(tl.float32)
    tl.store(y + n, result.to(y.dtype.element_ty), mask=in_rows)
