"""Attention, and the choice of its kernel: from shape, data type, mask and whether shapes repeat.

    documents           on a GPU in half precision flash by offsets, one kernel for all of them; on a CPU plain
                        attention, document by document. Neither makes a T x T mask. In float32 on a GPU a mask:
                        torch's memory-efficient kernel by offsets drops the same weights in all documents and heads.
    shapes repeat       torch's own choice. On Hopper that is cuDNN, the fastest, which plans for each new shape on the
                        CPU: 130 ms for forward and backward.
    shapes differ       flash, which needs no plan. With a mask, or where flash does not fit, torch's choice without
                        cuDNN.

Shapes: B batch, T tokens, H heads, E width of a head, N = B x T.
"""

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from gptlm.upstream.torch import flash_attention

WITHOUT_PLANS = [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]
HALF = (torch.bfloat16, torch.float16)
FLASH_WIDTH = 256  # the widest head of flash attention
ALIGNED = 8  # flash attention needs E to be a multiple of it


class Documents(NamedTuple):
    """Where documents begin in a flattened batch.

    Attributes:
        offsets: (n + 1,) int32 on the device of the batch, ascending from 0 to N; document k has tokens offsets[k] to
            offsets[k + 1] - 1, which can be none. Every row of the batch begins a document.
        longest: tokens of the longest document, or more.
    """

    offsets: Tensor
    longest: int


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    mask: Tensor | None = None,
    documents: Documents | None = None,
    dropout: float = 0.0,
    shapes_repeat: bool = False,
) -> Tensor:
    """dropout(softmax(q k^T / sqrt(E))) v: (B, H, T, E) -> (B, H, T, E), causal without a mask.

    Args:
        k, v: (B, H, S, E); S > T with a cache, then T is 1 or there is a mask.
        mask: broadcast to (B, H, T, S).
        documents: limits attention to tokens of the same document; excludes `mask`.
        shapes_repeat: there are few shapes, so that a plan for each costs little.
    """
    if documents is not None:
        return _document_attention(q, k, v, documents, dropout)
    # A single query sees the whole cache. The conditional makes a plain bool of the SymBool that torch.compile has for
    # a dynamic length, which scaled_dot_product_attention does not accept.
    causal = True if mask is None and q.shape[2] > 1 else False
    if shapes_repeat or not q.is_cuda or q.dtype not in HALF or q.shape[2] == 1:  # cuDNN takes none of the others
        return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, dropout_p=dropout, is_causal=causal)
    if causal and q.shape[2] == k.shape[2] and q.shape[3] % ALIGNED == 0 and _fits_flash(q):
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        return flash_attention(q, k, v, None, q.shape[1], dropout, q.shape[3] ** -0.5).transpose(1, 2)
    with sdpa_kernel(WITHOUT_PLANS):
        return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, dropout_p=dropout, is_causal=causal)


def _fits_flash(q: Tensor) -> bool:
    return q.dtype in HALF and q.shape[-1] <= FLASH_WIDTH and torch.cuda.get_device_capability(q.device) >= (8, 0)


def _document_attention(q: Tensor, k: Tensor, v: Tensor, documents: Documents, dropout: float) -> Tensor:
    rows, _, length, width = q.shape
    if q.is_cuda and not _fits_flash(q):
        mask = _same_document(documents.offsets, rows, length)
        return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, dropout_p=dropout)
    q, k, v = (x.transpose(1, 2).flatten(0, 1) for x in (q, k, v))  # (N, H, E)
    if not q.is_cuda:
        out = _loop(q, k, v, documents, dropout)
    else:
        if width % ALIGNED:
            q, k, v = (F.pad(x, (0, -width % ALIGNED)) for x in (q, k, v))
        offsets = documents.offsets.int()
        out = flash_attention(q, k, v, offsets, documents.longest, dropout, width**-0.5)[..., :width]
    return out.unflatten(0, (rows, length)).transpose(1, 2)


def _same_document(offsets: Tensor, rows: int, length: int) -> Tensor:
    """(B, 1, T, T) bool: key j is not after query i, and in the same document."""
    places = torch.arange(rows * length, device=offsets.device, dtype=offsets.dtype)
    document = torch.searchsorted(offsets, places, right=True).view(rows, 1, length)
    causal = torch.ones(length, length, dtype=torch.bool, device=offsets.device).tril()
    return causal & (document[..., :, None] == document[..., None, :])


@torch.compiler.disable  # reads the offsets
def _loop(q: Tensor, k: Tensor, v: Tensor, documents: Documents, dropout: float) -> Tensor:
    """Three (N, H, E) -> (N, H, E)."""
    lengths = [length for length in documents.offsets.diff().tolist() if length]
    parts = zip(*(x.split(lengths) for x in (q, k, v)), strict=True)
    done = []
    for part in parts:
        one, two, three = (x.transpose(0, 1)[None] for x in part)
        done.append(
            F.scaled_dot_product_attention(one, two, three, dropout_p=dropout, is_causal=True)[0].transpose(0, 1)
        )
    return torch.cat(done)
