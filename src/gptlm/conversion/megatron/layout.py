"""Tensor names and layout of Megatron-LM's and Megatron-DeepSpeed's checkpoints.

Matrices are (out, in). query_key_value's rows on a rank with n heads of size h depend on `checkpoint_version`
(megatron/checkpointing.py, fix_query_key_value_ordering): version 0 [3, n, h], 1.0 [n, h, 3], from 2.0 on [n, 3, h].
"""

import re
from collections.abc import Mapping
from typing import Any

from torch import Tensor

from gptlm.conversion.gpt2_names import WPE, WTE

VERSIONS = (0, 1, 2, 3)
# Module of a layer there (older classic code, newer classic code, megatron-core) -> module of a layer of GPT-2.
MODULES = {
    "input_layernorm": "ln_1",
    "input_norm": "ln_1",
    "self_attention.linear_qkv.layer_norm": "ln_1",
    "attention.query_key_value": "attn.c_attn",
    "self_attention.query_key_value": "attn.c_attn",
    "self_attention.linear_qkv": "attn.c_attn",
    "attention.dense": "attn.c_proj",
    "self_attention.dense": "attn.c_proj",
    "self_attention.linear_proj": "attn.c_proj",
    "post_attention_layernorm": "ln_2",
    "post_attention_norm": "ln_2",
    "pre_mlp_layernorm": "ln_2",
    "mlp.linear_fc1.layer_norm": "ln_2",
    "mlp.dense_h_to_4h": "mlp.c_fc",
    "mlp.linear_fc1": "mlp.c_fc",
    "mlp.dense_4h_to_h": "mlp.c_proj",
    "mlp.linear_fc2": "mlp.c_proj",
}
# What is written: the names of version 3.0 in the classic code.
WRITTEN = {
    "ln_1": "input_layernorm",
    "attn.c_attn": "self_attention.query_key_value",
    "attn.c_proj": "self_attention.dense",
    "ln_2": "post_attention_layernorm",
    "mlp.c_fc": "mlp.dense_h_to_4h",
    "mlp.c_proj": "mlp.dense_4h_to_h",
}
# Tensor parallelism splits these along the output dim, those along the input dim, and replicates the others.
COLUMN_PARALLEL = ("attn.c_attn.weight", "attn.c_attn.bias", "mlp.c_fc.weight", "mlp.c_fc.bias", WTE)
ROW_PARALLEL = ("attn.c_proj.weight", "mlp.c_proj.weight")

LAYER = re.compile(r"^(?:transformer|encoder|decoder)\.layers\.(\d+)\.(.+)$")
FINAL_NORM = re.compile(r"^(?:transformer|encoder|decoder)\.(?:final_layernorm|final_norm)\.(weight|bias)$")
EMBEDDINGS = {"embedding.word_embeddings.weight": WTE, "embedding.position_embeddings.weight": WPE}
HEADS = ("word_embeddings_for_head.weight", "output_layer.weight")  # copies of WTE on the last stage
BUFFERS = re.compile(r"(\.bias_mask|attention\.bias|\.masked_bias|_extra_state)$")
FUSED_NORM = re.compile(r"\.layer_norm_(weight|bias)$")  # Transformer Engine's linear_qkv.layer_norm_weight

# Our name of a size -> Megatron's argument.
SIZES = {
    "num_hidden_layers": "num_layers",
    "hidden_size": "hidden_size",
    "num_attention_heads": "num_attention_heads",
    "intermediate_size": "ffn_hidden_size",
    "max_position_embeddings": "max_position_embeddings",
}
# Argument -> (values that mean GPT-2, what any other means).
VARIANTS: dict[str, tuple[tuple[object, ...], str]] = {
    "group_query_attention": ((None, False), "grouped-query attention"),
    "multi_query_attention": ((None, False), "multi-query attention"),
    "use_rotary_position_embeddings": ((None, False), "rotary position embeddings"),
    "position_embedding_type": (
        (None, "learned_absolute", "absolute", 2),  # 2: the enum's value in Megatron-DeepSpeed
        "position embeddings that are not learned",
    ),
    "swiglu": ((None, False), "SwiGLU"),
    "gated_linear_unit": ((None, False), "gated linear units"),
    "glu_activation": ((None,), "gated linear units"),
    "squared_relu": ((None, False), "squared ReLU"),
    "onnx_safe": ((None, False), "another GELU"),
    "untie_embeddings_and_output_weights": ((None, False), "an output head that is not the embedding (untied)"),
    "normalization": ((None, "LayerNorm", "layernorm"), "another norm than LayerNorm"),
    "add_bias_linear": ((None, True), "linear layers without bias"),
    "apply_residual_connection_post_layernorm": ((None, False), "residual connections after the norm"),
    "apply_layernorm_1p": ((None, False), "layer norms that add 1 to their weight"),
    "num_experts": ((None, 0, 1, [1]), "a mixture of experts"),
}


def gpt2_name(name: str, first_layer: int) -> str | None:
    """GPT-2's name of a tensor (given without `language_model.`) on the stage that starts with `first_layer`."""
    if name in EMBEDDINGS:
        return EMBEDDINGS[name]
    if found := FINAL_NORM.match(name):
        return f"transformer.ln_f.{found[1]}"
    layer = LAYER.match(name)
    part = layer_part(layer[2]) if layer else None
    return f"transformer.h.{first_layer + int(layer[1])}.{part}" if layer and part else None


def layer_part(name: str) -> str | None:
    """GPT-2's name of a tensor inside a layer, such as "attn.c_attn.weight"."""
    module, _, kind = FUSED_NORM.sub(r".layer_norm.\1", name).rpartition(".")
    return f"{MODULES[module]}.{kind}" if module in MODULES and kind in ("weight", "bias") else None


def split_qkv(rows: Tensor, heads: int, version: int) -> Tensor:
    """query_key_value of one rank: (3 n h, ...) -> (3, n, h, ...)."""
    rest, size = rows.shape[1:], rows.shape[0] // (3 * heads)
    if version == 0:
        return rows.reshape(3, heads, size, *rest)
    if version == 1:
        return rows.reshape(heads, size, 3, *rest).movedim(2, 0)
    return rows.reshape(heads, 3, size, *rest).movedim(1, 0)


def flatten(tree: Mapping[str, Any], prefix: str = "") -> dict[str, Tensor]:
    """The tensors of nested dicts by dotted names, in order."""
    found: dict[str, Tensor] = {}
    for key, value in tree.items():
        if isinstance(value, Mapping):
            found |= flatten(value, f"{prefix}{key}.")
        elif isinstance(value, Tensor):
            found[f"{prefix}{key}"] = value
    return found
