"""One transformer layer: attention, feed-forward layer, and the two together with their layer norms.

Shapes: width = n_embd = heads x head_dim.
"""

import math
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from transformers import GPT2Config
from transformers.cache_utils import Cache

from gptlm.kernels.attention import Documents, attention
from gptlm.kernels.float8 import Float8Block, linear_without_bias, normed_feed_forward, normed_linear
from gptlm.kernels.fused_gelu import fused_feed_forward, supports_fused
from gptlm.kernels.residual_norm import residual_norm


class AttendingCache(Protocol):
    """A cache that also knows which of its places a token attends to, and how."""

    def attend(self, q: Tensor, k: Tensor, v: Tensor, layer: int) -> Tensor:
        """Extend the past by `k` and `v`; the result of attention, all (batch, heads, length, head_dim)."""


AnyCache = Cache | AttendingCache


class Attention(nn.Module):
    """Causal multi-head self-attention."""

    def __init__(self, config: GPT2Config, layer: int):
        super().__init__()
        self.layer = layer
        self.head_dim = config.n_embd // config.n_head
        self.heads = config.n_head  # of this process: tensor parallelism splits them
        self.c_attn = nn.Linear(config.n_embd, 3 * config.n_embd)  # output: [q | k | v], each heads x head_dim
        self.c_proj = residual_projection(config.n_embd, config.n_embd)
        self.dropout = config.attn_pdrop
        # PaddleNLP uses attention_probs_dropout_prob for the attention output as well, GPT-2 uses resid_pdrop there.
        self.resid_dropout = nn.Dropout(getattr(config, "attn_resid_pdrop", config.resid_pdrop))
        self.recompute_core = False
        self.shapes_repeat = False
        # Tensor parallelism: each rank draws the dropout of its own heads, all other dropout is the same on all ranks.
        self.core_context: Callable[[], AbstractContextManager] | None = None

    def forward(
        self,
        x: Tensor,
        mask: Tensor | None,
        cache: AnyCache | None,
        documents: Documents | None,
        without_bias: bool = False,
    ) -> Tensor:
        """(batch, length, width) -> (batch, length, width).

        Args:
            mask: (batch, 1, length, past + length), or None for causal attention.
            cache: keys and values of the past, which this call extends.
            documents: limits attention to tokens of the same document; needs `mask` None.
            without_bias: leave out the last bias, which the caller adds.
        """
        out = self.attend(self.c_attn(x), mask, cache, documents)
        return F.linear(out, self.c_proj.weight) if without_bias else self.resid_dropout(self.c_proj(out))

    def attend(self, qkv: Tensor, mask: Tensor | None, cache: AnyCache | None, documents: Documents | None) -> Tensor:
        """(batch, length, 3 x width), the result of `c_attn` -> the input of `c_proj`, (batch, length, width)."""
        q, k, v = qkv.chunk(3, dim=-1)  # (batch, length, width)
        # (batch, heads, length, head_dim), where heads are those of this rank under tensor parallelism.
        q, k, v = (part.unflatten(-1, (-1, self.head_dim)).transpose(1, 2) for part in (q, k, v))
        if cache is not None and not isinstance(cache, Cache):
            return cache.attend(q, k, v, self.layer).transpose(1, 2).flatten(2)
        if cache is not None:
            k, v = cache.update(k, v, self.layer)
        repeat = self.shapes_repeat and cache is None  # with a cache each step is another shape
        if self.recompute_core and self.training:
            out = checkpoint(self._core, q, k, v, mask, documents, repeat, use_reentrant=False)
        else:
            out = self._core(q, k, v, mask, documents, repeat)
        return out.transpose(1, 2).flatten(2)

    def late_bias(self) -> Tensor | None:
        """The last bias, where the caller may add it."""
        return late_bias(self.c_proj, self.resid_dropout)

    def _core(
        self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, documents: Documents | None, repeat: bool
    ) -> Tensor:
        """dropout(softmax(q k^T / sqrt(head_dim))) v, (batch, heads, length, head_dim)."""
        dropout = self.dropout if self.training else 0.0
        attend = self._attend_in_context if dropout and self.core_context is not None else attention
        return attend(q, k, v, mask=mask, documents=documents, dropout=dropout, shapes_repeat=repeat)

    @torch.compiler.disable  # changing the RNG generator causes a graph break
    def _attend_in_context(self, *args: Any, **how: Any) -> Tensor:
        assert self.core_context is not None
        with self.core_context():
            return attention(*args, **how)


class MLP(nn.Module):
    """Feed-forward layer with GPT-2's tanh-approximated GELU."""

    def __init__(self, config: GPT2Config):
        super().__init__()
        inner = config.n_inner or 4 * config.n_embd
        self.c_fc = nn.Linear(config.n_embd, inner)
        self.c_proj = residual_projection(inner, config.n_embd)
        self.dropout = nn.Dropout(config.resid_pdrop)
        self.fused = False  # compute GELU in the epilogue of the matrix products, where compiled and supported

    def forward(self, x: Tensor, without_bias: bool = False) -> Tensor:
        """(batch, length, width) -> (batch, length, width); `without_bias` as in `Attention`."""
        if self.fused and torch.compiler.is_compiling() and supports_fused(x, self.c_fc, self.c_proj):
            return self.dropout(fused_feed_forward(x, self.c_fc, self.c_proj, without_bias=without_bias))
        hidden = gelu(self.c_fc(x))
        return F.linear(hidden, self.c_proj.weight) if without_bias else self.dropout(self.c_proj(hidden))

    def late_bias(self) -> Tensor | None:
        """The last bias, where the caller may add it."""
        return late_bias(self.c_proj, self.dropout)


def residual_projection(inputs: int, outputs: int) -> nn.Linear:
    """The last Linear of a residual branch; `_init_weights` scales it down."""
    linear = nn.Linear(inputs, outputs)
    linear.is_residual_projection = True  # type: ignore[assignment]
    return linear


def late_bias(linear: nn.Module, dropout: nn.Dropout) -> Tensor | None:
    """The bias of `linear`, unless it has to be added here: before a dropout, or inside another kind of layer."""
    drops = dropout.training and dropout.p > 0
    return linear.bias if type(linear) is nn.Linear and not drops else None


def gelu(x: Tensor) -> Tensor:
    """GPT-2's GELU, 0.5 x (1 + tanh(sqrt(2 / pi) (x + 0.044715 x^3))) (Hendrycks and Gimpel 2016)."""
    if not torch.compiler.is_compiling():
        return F.gelu(x, approximate="tanh")
    wide = x.float()  # (1 + tanh z) / 2 = sigmoid 2 z, which is faster in generated GPU code
    return (wide * torch.sigmoid(math.sqrt(8 / math.pi) * (wide + 0.044715 * wide * wide * wide))).to(x.dtype)


class Block(nn.Module):
    """One pre-norm transformer layer."""

    def __init__(self, config: GPT2Config, layer: int):
        super().__init__()
        self.ln_1 = nn.LayerNorm(config.n_embd, eps=config.layer_norm_epsilon)
        self.attn = Attention(config, layer)
        self.ln_2 = nn.LayerNorm(config.n_embd, eps=config.layer_norm_epsilon)
        self.mlp = MLP(config)
        self.recompute = ""  # "full", "full_attn", "core_attn" or nothing
        self.float8: Float8Block | None = None  # weights of float8 products, with which `chained` trains

    def forward(self, x: Tensor, mask: Tensor | None, cache: AnyCache | None, documents: Documents | None) -> Tensor:
        if self.recompute == "full" and self.training:
            return checkpoint(self._forward, x, mask, None, documents, use_reentrant=False)
        return self._forward(x, mask, cache, documents)

    def _forward(self, x: Tensor, mask: Tensor | None, cache: AnyCache | None, documents: Documents | None) -> Tensor:
        if self.recompute == "full_attn" and self.training:
            x = x + checkpoint(self.attn, self.ln_1(x), mask, None, documents, use_reentrant=False)
        else:
            x = x + self.attn(self.ln_1(x), mask, cache, documents)
        return x + self.mlp(self.ln_2(x))

    def chained(
        self, x: Tensor, branch: Tensor, branch_bias: Tensor | None, mask: Tensor | None, documents: Documents | None
    ) -> tuple[Tensor, Tensor]:
        """`forward` of x + branch + branch_bias, so that a sum and the norm after it are one kernel, across blocks.

        Returns:
            `x` and `branch` for the next block, whose `branch_bias` is this block's `mlp.late_bias()`.
        """
        if self.recompute == "full" and self.training:
            return checkpoint(self._chained, x, branch, branch_bias, mask, documents, use_reentrant=False)
        return self._chained(x, branch, branch_bias, mask, documents)

    def _chained(
        self, x: Tensor, branch: Tensor, branch_bias: Tensor | None, mask: Tensor | None, documents: Documents | None
    ) -> tuple[Tensor, Tensor]:
        if self.float8 is not None and self.training:
            return self._float8_chained(self.float8, x, branch, branch_bias, mask, documents)
        x, normed = residual_norm(x, branch, branch_bias, self.ln_1)
        bias = self.attn.late_bias()
        branch = self.attn(normed, mask, None, documents, without_bias=bias is not None)
        x, normed = residual_norm(x, branch, bias, self.ln_2)
        return x, self.mlp(normed, without_bias=self.mlp.late_bias() is not None)

    def _float8_chained(
        self,
        float8: Float8Block,
        x: Tensor,
        branch: Tensor,
        branch_bias: Tensor | None,
        mask: Tensor | None,
        documents: Documents | None,
    ) -> tuple[Tensor, Tensor]:
        attn, mlp = self.attn, self.mlp
        x, qkv = normed_linear(x, branch, branch_bias, self.ln_1, attn.c_attn, float8.attention, float8.normed_1)
        attended = attn.attend(qkv, mask, None, documents)
        branch = linear_without_bias(attended, attn.c_proj.weight, float8.projection, float8.attended)
        bias = attn.late_bias()
        if bias is None:
            branch = attn.resid_dropout(branch + attn.c_proj.bias)
        x, branch = normed_feed_forward(x, branch, bias, self.ln_2, mlp.c_fc, mlp.c_proj, float8)
        return x, branch if mlp.late_bias() is not None else mlp.dropout(branch + mlp.c_proj.bias)
