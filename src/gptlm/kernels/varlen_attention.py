"""Attention inside documents, without a T x T mask.

Shapes: B batch, T tokens, H heads, E width of a head.
"""

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor


class Documents(NamedTuple):
    """Where documents begin in a flattened batch.

    Attributes:
        offsets: (n + 1,) int64, ascending from 0 to B x T; document k has tokens offsets[k] to offsets[k + 1] - 1.
            Every row of the batch begins a document.
        longest: tokens of the longest document.
    """

    offsets: Tensor
    longest: int


@torch.compiler.disable
def document_attention(q: Tensor, k: Tensor, v: Tensor, documents: Documents, dropout: float) -> Tensor:
    """Causal attention inside each document: three (B, H, T, E) -> (B, H, T, E).

    On a GPU one variable-length kernel (flash, or memory-efficient in float32) computes all documents. On a CPU plain
    attention runs document by document. Neither keeps more than a document squared.
    """
    rows, heads, length, width = q.shape
    flat = [x.transpose(1, 2).reshape(rows * length, heads, width) for x in (q, k, v)]
    out = _jagged(flat, documents, dropout) if q.is_cuda else _loop(flat, documents, dropout)
    return out.view(rows, length, heads, width).transpose(1, 2)


def _jagged(flat: list[Tensor], documents: Documents, dropout: float) -> Tensor:
    q, k, v = (
        torch.nested.nested_tensor_from_jagged(
            x, documents.offsets, min_seqlen=1, max_seqlen=documents.longest
        ).transpose(1, 2)
        for x in flat
    )
    return F.scaled_dot_product_attention(q, k, v, dropout_p=dropout, is_causal=True).transpose(1, 2).values()


def _loop(flat: list[Tensor], documents: Documents, dropout: float) -> Tensor:
    lengths = documents.offsets.diff().tolist()
    parts = zip(*(x.split(lengths) for x in flat), strict=True)
    done = []
    for part in parts:
        q, k, v = (x.transpose(0, 1)[None] for x in part)
        done.append(F.scaled_dot_product_attention(q, k, v, dropout_p=dropout, is_causal=True)[0].transpose(0, 1))
    return torch.cat(done)
