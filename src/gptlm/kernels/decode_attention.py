"""Attention of one token per row to the keys and values of a static cache, as one Triton kernel.

It reads the length of each row on the device, so one captured launch serves all lengths, and reads no key behind a row.
The keys of a row and head are shared out to several programs; the last one to finish combines their results
(flash-decoding: Dao et al. 2023).

Shapes: B rows, H heads, E width of a head, C places of the cache.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

PROGRAMS = 512  # that keep a GPU busy; more parts of a row cost more to combine
MOST_PARTS = 16
KEYS = 32  # that a program reads together
LOWEST = -1e30  # a score below all others; with infinity, inf - inf would be NaN


class DecodeAttention:
    """Stores keys and values of one token per row behind the row, and attends to the row with them.

    softmax(q keys^T / sqrt(E)) values, with float32 sums. Calls share buffers, so they must run one after another.
    """

    def __init__(self, rows: int, heads: int, width: int, device: torch.device):
        self.parts = max(1, min(MOST_PARTS, PROGRAMS // triton.next_power_of_2(rows * heads)))
        self.padded = triton.next_power_of_2(width)
        self.partial = torch.empty((rows, heads, self.parts, self.padded + 2), device=device)
        self.arrived = torch.zeros((rows, heads), dtype=torch.int32, device=device)  # programs, 0 between calls

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, keys: Tensor, values: Tensor, lengths: Tensor) -> Tensor:
        """The result of attention, (B, H, 1, E).

        Args:
            q, k, v: (B, H, 1, E), parts of one product: their strides are the same, and 1 for E.
            keys, values: (B, H, C, E), contiguous; changed at place lengths[b] of row b.
            lengths: (B,) int64, tokens of each row before this one.
        """
        rows, heads, _, width = q.shape
        assert q.stride() == k.stride() == v.stride() and q.stride(3) == 1
        out = torch.empty((rows, 1, heads, width), dtype=q.dtype, device=q.device)
        _attend_one[(rows, heads, self.parts)](
            *(q, k, v, keys, values, lengths, out, self.partial, self.arrived),
            *(width**-0.5, q.stride(0), q.stride(1), heads, keys.shape[2]),
            WIDTH=width,
            PADDED=self.padded,
            KEYS=KEYS,
            PARTS=self.parts,
            LOWEST=LOWEST,
            num_warps=4,
        )
        return out.transpose(1, 2)


@triton.jit(do_not_specialize=["places"])
def _attend_one(  # type: ignore[no-untyped-def]  # Triton reads annotations as types of its own
    q_in,
    k_in,
    v_in,
    keys,
    values,
    lengths,
    out,
    partial,
    arrived,
    scale,
    row_stride,
    head_stride,
    heads,
    places,
    WIDTH: tl.constexpr,
    PADDED: tl.constexpr,
    KEYS: tl.constexpr,
    PARTS: tl.constexpr,
    LOWEST: tl.constexpr,
):
    row, head, part = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.program_id(2)
    length = tl.load(lengths + row)
    e = tl.arange(0, PADDED)
    inside = e < WIDTH
    given = row * row_stride + head * head_stride + e
    q = tl.load(q_in + given, mask=inside, other=0.0).to(tl.float32) * scale
    k = tl.load(k_in + given, mask=inside, other=0.0)
    v = tl.load(v_in + given, mask=inside, other=0.0)
    stored = (row * heads + head) * places * WIDTH
    if part == 0:
        tl.store(keys + stored + length * WIDTH + e, k, mask=inside)
        tl.store(values + stored + length * WIDTH + e, v, mask=inside)
    # Keys KEYS apart share a running maximum and sum, so that the loop reduces over the width only.
    lane = tl.arange(0, KEYS)
    largest = tl.full([KEYS], LOWEST, tl.float32)
    total = tl.zeros([KEYS], tl.float32)
    summed = tl.zeros([KEYS, PADDED], tl.float32)
    for start in range(part * KEYS, length, KEYS * PARTS):
        n = start + lane
        at = stored + n[:, None] * WIDTH + e[None, :]
        mask = (n < length)[:, None] & inside[None, :]
        some_keys = tl.load(keys + at, mask=mask, other=0.0).to(tl.float32)
        some_values = tl.load(values + at, mask=mask, other=0.0).to(tl.float32)
        scores = tl.where(n < length, tl.sum(some_keys * q[None, :], 1), LOWEST)
        larger = tl.maximum(largest, scores)
        weights = tl.where(n < length, tl.exp(scores - larger), 0.0)
        earlier = tl.exp(largest - larger)
        total = total * earlier + weights
        summed = summed * earlier[:, None] + weights[:, None] * some_values
        largest = larger
    # the new token's key is in the maximum of each part, its value in the first part's sum
    score = tl.sum(q * k.to(tl.float32), 0)
    top = tl.maximum(tl.max(largest, 0), score)
    factors = tl.exp(largest - top)
    weight = tl.where(part == 0, tl.exp(score - top), 0.0)
    part_total = tl.sum(total * factors, 0) + weight
    part_sum = tl.sum(summed * factors[:, None], 0) + weight * v.to(tl.float32)
    result = out + (row * heads + head) * WIDTH + e
    if PARTS == 1:
        tl.store(result, (part_sum / part_total).to(out.dtype.element_ty), mask=inside)
    else:
        own = partial + ((row * heads + head) * PARTS + part) * (PADDED + 2)
        tl.store(own + e, part_sum)
        tl.store(own + PADDED, top)
        tl.store(own + PADDED + 1, part_total)
        tl.debug_barrier()  # all threads have stored before the count tells it
        count = tl.atomic_add(arrived + row * heads + head, 1, sem="acq_rel")
        if count == PARTS - 1:
            p = tl.arange(0, PARTS)
            all_parts = partial + ((row * heads + head) * PARTS + p) * (PADDED + 2)
            maxima = tl.load(all_parts + PADDED, volatile=True)
            totals = tl.load(all_parts + PADDED + 1, volatile=True)
            sums = tl.load(all_parts[:, None] + e[None, :], volatile=True)
            shares = tl.exp(maxima - tl.max(maxima, 0))
            tl.store(arrived + row * heads + head, 0)
            combined = tl.sum(sums * shares[:, None], 0) / tl.sum(totals * shares, 0)
            tl.store(result, combined.to(out.dtype.element_ty), mask=inside)
