"""Tensor names and layout of PaddleNLP's and FleetX's checkpoints.

Matrices are (in, out), as in stock GPT-2. The columns of the fused qkv_proj are [heads, 3, head size], so a slice
of a tensor-parallel rank has whole heads. bfloat16 is stored as the bits of uint16 (paddle.save).
"""

import re

import numpy as np
import torch
from torch import Tensor

from gptlm.conversion.gpt2_names import WPE, WTE

# Module of a layer there -> module of a layer of GPT-2.
MODULES = {
    "norm1": "ln_1",
    "self_attn.qkv_proj": "attn.c_attn",
    "self_attn.q_proj": "attn.q_proj",  # parts of c_attn
    "self_attn.k_proj": "attn.k_proj",
    "self_attn.v_proj": "attn.v_proj",
    "self_attn.out_proj": "attn.c_proj",
    "norm2": "ln_2",
    "linear1": "mlp.c_fc",
    "linear2": "mlp.c_proj",
}
WRITTEN = {ours: theirs for theirs, ours in MODULES.items()}
SPLIT_QKV = ("q_proj", "k_proj", "v_proj")
# Tensor parallelism splits these along the last dim, those along the first, and replicates the others.
COLUMN_PARALLEL = ("attn.c_attn", "mlp.c_fc", *(f"attn.{part}" for part in SPLIT_QKV))
ROW_PARALLEL = ("attn.c_proj.weight", "mlp.c_proj.weight", WTE)

EMBEDDINGS = {"embeddings.word_embeddings.weight": WTE, "embeddings.position_embeddings.weight": WPE}
LAYER = re.compile(r"^decoder\.layers\.(\d+)\.(.+)$")
FINAL_NORM = re.compile(r"^decoder\.norm\.(weight|bias)$")
# In FleetX's pipelines (PipelineLayer) 0 is the embedding, 1 to n are the layers, n + 1 is the final norm.
STAGE_LAYER = re.compile(r"^(\d+)\.(.+)$")
STAGE_NORM = re.compile(r"^\d+\.(?:norm\.)?(weight|bias)$")
HEADS = ("lm_head.weight", "lm_head.decoder.weight")  # copies of WTE

# Our name of a size -> keys of the configuration: PaddleNLP's, then FleetX's.
SIZES = {
    "num_hidden_layers": ("num_hidden_layers", "num_layers"),
    "hidden_size": ("hidden_size",),
    "num_attention_heads": ("num_attention_heads",),
    "intermediate_size": ("intermediate_size", "ffn_hidden_size"),
    "max_position_embeddings": ("max_position_embeddings",),
    "vocab_size": ("vocab_size",),
}
# Key of the configuration -> (values that mean GPT-2, what any other means).
VARIANTS: dict[str, tuple[tuple[object, ...], str]] = {
    "tie_word_embeddings": ((None, True), "an output head that is not the embedding (untied)"),
    "normalize_before": ((None, True), "norms after the residual connection"),
    "num_experts": ((None, 0, 1), "a mixture of experts"),
    "num_key_value_heads": ((None,), "grouped-query attention"),
}


def gpt2_name(name: str) -> str | None:
    """GPT-2's name of a tensor; separate q, k and v are called attn.q_proj and so on."""
    name = name.removeprefix("gpt.").removeprefix("model.").replace("shared_layers.embed.", "embeddings.", 1)
    if name in EMBEDDINGS:
        return EMBEDDINGS[name]
    if norm := FINAL_NORM.match(name) or STAGE_NORM.match(name):
        return f"transformer.ln_f.{norm[1]}"
    found, offset = (LAYER.match(name), 0) if LAYER.match(name) else (STAGE_LAYER.match(name), 1)
    if found is None:
        return None
    module, _, kind = found[2].rpartition(".")
    known = module in MODULES and kind in ("weight", "bias")
    return f"transformer.h.{int(found[1]) - offset}.{MODULES[module]}.{kind}" if known else None


def qkv_by_kind(tensor: Tensor, heads: int, dim: int) -> Tensor:
    """The fused qkv_proj along `dim`: [heads, 3, head size] -> [3, heads, head size]."""
    return tensor.unflatten(dim, (heads, 3, -1)).transpose(dim, dim + 1).flatten(dim, dim + 2)


def qkv_by_head(tensor: Tensor, heads: int, dim: int) -> Tensor:
    """The inverse of `qkv_by_kind`."""
    return tensor.unflatten(dim, (3, heads, -1)).transpose(dim, dim + 1).flatten(dim, dim + 2)


def to_array(tensor: Tensor) -> np.ndarray:
    """As paddle.save writes it: bfloat16 as its bits."""
    tensor = tensor.contiguous()
    if tensor.dtype == torch.bfloat16:
        return tensor.view(torch.int16).numpy().view(np.uint16)
    return tensor.numpy()
