"""Products with the output embedding on a number of rows that suits the GPU.

The logits of 50257 entries have rows of 50257 numbers, which begin at addresses that are not multiples of 16 bytes.
For them cuBLAS has only kernels that load and store single numbers (`cutlass_..._align1`), which are much slower. With
zero rows up to a multiple of 128 (50304), copied once per call, the products take the fast kernels. Columns of the
added rows must not enter anything: mask them, or cut them off.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

ROWS = 128  # tiles of matrix products have as many rows or a part of it
FEW = 128  # vectors: reading the weight for their product takes no longer than copying it


def padded_rows(weight: Tensor) -> Tensor:
    """The (V, D) rows of an output embedding, with zero rows up to a multiple of 128; `weight` itself if it is one.

    Differentiable. Where `weight` stays the same for many small products, as in generation, keep the result.
    """
    missing = -weight.shape[0] % ROWS
    return torch.cat((weight, weight.new_zeros(missing, weight.shape[1]))) if missing else weight


class OutputLayer(nn.Linear):
    """A Linear without bias from hidden states (..., D) to logits (..., V).

    The logits of many vectors are a view of padded ones.
    """

    def forward(self, x: Tensor) -> Tensor:
        if x.shape[:-1].numel() <= FEW:
            return F.linear(x, self.weight)
        return F.linear(x, padded_rows(self.weight))[..., : self.weight.shape[0]]
