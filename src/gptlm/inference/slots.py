"""Keys and values of the rows that are generated: a fixed number of slots, each holding a row of its own length."""

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import GPT2Config

from gptlm.kernels.attention import attention
from gptlm.kernels.compiling import compile_obstacle


class Slots:
    """The cache of a decode step, in which each slot adds one token to its row.

    Memory is allocated once, so that a CUDA graph can use it. Position p of a row is stored at place p of its slot;
    places behind the row hold anything, attention does not see them.

    Args:
        count, capacity: rows, and tokens of each.
        heads: of each layer on this process.

    Attributes:
        lengths: (slots,) int64, the tokens of each row that are stored.
        keys, values: (slots, heads, capacity, head_dim) of each layer.
    """

    def __init__(
        self,
        config: GPT2Config,
        count: int,
        capacity: int,
        *,
        heads: int,
        dtype: torch.dtype,
        device: torch.device,
    ):
        shape = (count, heads, capacity, config.n_embd // config.n_head)
        # zeros: attention multiplies hidden values by 0, and 0 x NaN is NaN
        self.keys, self.values = (
            [torch.zeros(shape, dtype=dtype, device=device) for _ in range(config.n_layer)] for _ in range(2)
        )
        self.lengths = torch.zeros(count, dtype=torch.int64, device=device)
        self._kernel = _kernel(self.keys[0])
        self._rows = torch.arange(count, device=device)
        self._places = torch.arange(capacity, device=device)
        self._span = capacity
        self._mask: Tensor | None = None

    def begin(self, lengths: Sequence[int] | None = None) -> None:
        """Called before each step.

        Args:
            lengths: of all rows, where the host knows them: attention then stops at the longest one.
        """
        if self._kernel is not None:
            return
        self._span = len(self._places) if lengths is None else max(lengths) + 1
        equal = lengths is not None and min(lengths) == max(lengths)
        self._mask = None if equal else (self._places[: self._span] <= self.lengths[:, None])[:, None, None]

    def attend(self, q: Tensor, k: Tensor, v: Tensor, layer: int) -> Tensor:
        """Store the keys and values of one token per row, attend to all of its row: (slots, heads, 1, head_dim)."""
        keys, values = self.keys[layer], self.values[layer]
        if self._kernel is not None:
            return self._kernel(q, k, v, keys, values, self.lengths)
        if self._mask is None:  # all rows have the same length
            keys[:, :, self._span - 1 : self._span], values[:, :, self._span - 1 : self._span] = k, v
        else:
            keys[self._rows, :, self.lengths], values[self._rows, :, self.lengths] = k[:, :, 0], v[:, :, 0]
        seen = (keys[:, :, : self._span], values[:, :, : self._span])
        return F.scaled_dot_product_attention(q, *seen, attn_mask=self._mask)

    def keep(self, chosen: Tensor) -> None:
        """Give up all slots but the `chosen` ones, (slots,) int64."""
        for layer in range(len(self.keys)):  # one by one: copies of all layers together would double the memory
            self.keys[layer], self.values[layer] = self.keys[layer][chosen], self.values[layer][chosen]
        self.lengths, self._rows = self.lengths[chosen], self._rows[: len(chosen)]
        self._kernel = _kernel(self.keys[0])


def _kernel(keys: Tensor) -> Any:
    """The attention kernel for one token per row, where there is Triton; else None."""
    if not keys.is_cuda or compile_obstacle("cuda"):
        return None
    from gptlm.kernels.decode_attention import DecodeAttention  # imports Triton

    rows, heads, _, width = keys.shape
    return DecodeAttention(rows, heads, width, keys.device)


class Prefill:
    """The cache of a forward pass over prompts, which stores their keys and values in `slots`.

    Prompts are padded on the right: causal attention needs no mask then, and the padding is behind the row.

    Args:
        chosen: (rows,) int64, the slot of each row.
    """

    def __init__(self, slots: Slots, chosen: Tensor):
        self.slots, self.chosen = slots, chosen

    def attend(self, q: Tensor, k: Tensor, v: Tensor, layer: int) -> Tensor:
        """Causal attention, (rows, heads, length, head_dim)."""
        length = k.shape[2]
        self.slots.keys[layer][self.chosen, :, :length] = k
        self.slots.values[layer][self.chosen, :, :length] = v
        return attention(q, k, v)
