"""The feed-forward layer of a block."""

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import GPT2Config

from gptlm.kernels.fused_gelu import feed_forward, fits


def residual_projection(inputs: int, outputs: int) -> nn.Linear:
    """The last Linear of a residual branch, initialised smaller (see `GPTPreTrainedModel._init_weights`)."""
    linear = nn.Linear(inputs, outputs)
    linear.is_residual_projection = True  # type: ignore[assignment]
    return linear


def gelu(x: Tensor) -> Tensor:
    """GPT-2's GELU, 0.5 x (1 + tanh(sqrt(2 / pi) (x + 0.044715 x^3))) (Hendrycks and Gimpel 2016)."""
    if not torch.compiler.is_compiling():
        return F.gelu(x, approximate="tanh")
    wide = x.float()  # (1 + tanh z) / 2 is sigmoid 2 z, which GPUs compute faster
    return (wide * torch.sigmoid(math.sqrt(8 / math.pi) * (wide + 0.044715 * wide * wide * wide))).to(x.dtype)


class MLP(nn.Module):
    """Feed-forward layer with GPT-2's tanh-approximated GELU."""

    def __init__(self, config: GPT2Config):
        super().__init__()
        inner = config.n_inner or 4 * config.n_embd
        self.c_fc = nn.Linear(config.n_embd, inner)
        self.c_proj = residual_projection(inner, config.n_embd)
        self.dropout = nn.Dropout(config.resid_pdrop)
        self.fused = False  # GELU may be computed inside the matrix products, where they are compiled

    def forward(self, x: Tensor) -> Tensor:
        if self.fused and torch.compiler.is_compiling() and fits(x, self.c_fc, self.c_proj):
            return self.dropout(feed_forward(x, self.c_fc, self.c_proj))
        return self.dropout(self.c_proj(gelu(self.c_fc(x))))
