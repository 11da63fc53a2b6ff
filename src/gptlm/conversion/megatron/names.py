"""Megatron's and Megatron-DeepSpeed's words in a checkpoint: names of tensors and of arguments."""

import re
from collections.abc import Mapping
from typing import Any

# Part of a layer there (older classic code, newer classic code, megatron-core) -> part of a layer of GPT-2.
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
LAYER = re.compile(r"^(?:transformer|encoder|decoder)\.layers\.(\d+)\.(.+)$")
FINAL = re.compile(r"^(?:transformer|encoder|decoder)\.(?:final_layernorm|final_norm)\.(weight|bias)$")
WORDS, POSITIONS = "embedding.word_embeddings.weight", "embedding.position_embeddings.weight"
HEADS = ("word_embeddings_for_head.weight", "output_layer.weight")  # copies of the embedding on the last stage
BUFFERS = re.compile(r"(\.bias_mask|attention\.bias|\.masked_bias|_extra_state)$")
PARTS_OF_LAYER_NORM = re.compile(r"\.layer_norm_(weight|bias)$")

# Sizes of a model -> their arguments, in the order they are looked up.
SIZES = {
    "num_hidden_layers": ("num_layers",),
    "hidden_size": ("hidden_size",),
    "num_attention_heads": ("num_attention_heads",),
    "intermediate_size": ("ffn_hidden_size",),
    "max_position_embeddings": ("max_position_embeddings",),
}
TENSOR_DEGREE = ("tensor_model_parallel_size", "model_parallel_size")
PIPELINE_DEGREE = ("pipeline_model_parallel_size",)
EPSILON = ("layernorm_epsilon", "norm_epsilon")
DROPOUT, ATTENTION_DROPOUT = "hidden_dropout", "attention_dropout"
ROWS, TRUE_ROWS, DIVISIBLE = "padded_vocab_size", "vocab_size", "make_vocab_size_divisible_by"
GPT2_TOKENIZER = ("tokenizer_type", "GPT2BPETokenizer")
FUSED_GELU, TANH_GELU = "bias_gelu_fusion", "openai_gelu"
VIRTUAL = "virtual_pipeline_model_parallel_size"

# Argument -> (values that mean GPT-2, what any other means).
VARIANTS: dict[str, tuple[tuple[object, ...], str]] = {
    "group_query_attention": ((None, False), "grouped-query attention"),
    "multi_query_attention": ((None, False), "multi-query attention"),
    "use_rotary_position_embeddings": ((None, False), "rotary positions"),
    "position_embedding_type": ((None, "learned_absolute", "absolute", 2), "positions that are not learned"),
    "swiglu": ((None, False), "SwiGLU"),
    "gated_linear_unit": ((None, False), "gated linear units"),
    "glu_activation": ((None,), "gated linear units"),
    "squared_relu": ((None, False), "squared ReLU"),
    "onnx_safe": ((None, False), "another GELU"),
    "untie_embeddings_and_output_weights": ((None, False), "a head that is not the embedding (untied)"),
    "normalization": ((None, "LayerNorm", "layernorm"), "another norm than LayerNorm"),
    "add_bias_linear": ((None, True), "matrices without biases"),
    "apply_residual_connection_post_layernorm": ((None, False), "residuals taken after the norm"),
    "apply_layernorm_1p": ((None, False), "layer norms that add 1 to their weight"),
    "num_experts": ((None, 0, 1, [1]), "a mixture of experts"),
}


def consumed(arguments: Mapping[str, Any], iterations: int) -> int | None:
    """Samples that training has read: noted, or iterations of one batch size."""
    noted, batch = arguments.get("consumed_train_samples"), arguments.get("global_batch_size")
    if noted is not None and (noted or not iterations):
        return int(noted)
    return iterations * int(batch) if batch and not arguments.get("rampup_batch_size") else None


def written_arguments(
    sizes: dict[str, int],
    rows: int,
    degrees: tuple[int, int],
    epsilon: float,
    activation: str,
    dropouts: tuple[float, float],
    dtype: object,
) -> dict[str, object]:
    """The arguments of a checkpoint of version 3.0.

    Args:
        sizes: of the model, our words; with the true `vocab_size`.
        rows: of the padded embedding.
        degrees: of tensor and pipeline parallelism.
    """
    return {
        **{theirs[0]: sizes[ours] for ours, theirs in SIZES.items()},
        TRUE_ROWS: sizes["vocab_size"],
        ROWS: rows,
        DIVISIBLE: 128,
        "kv_channels": sizes["hidden_size"] // sizes["num_attention_heads"],
        "seq_length": sizes["max_position_embeddings"],
        TENSOR_DEGREE[0]: degrees[0],
        PIPELINE_DEGREE[0]: degrees[1],
        VIRTUAL: None,
        EPSILON[0]: epsilon,
        "tokenizer_type": "GPT2BPETokenizer",
        FUSED_GELU: activation != "gelu",
        TANH_GELU: False,
        DROPOUT: dropouts[0],
        ATTENTION_DROPOUT: dropouts[1],
        "position_embedding_type": "learned_absolute",
        "untie_embeddings_and_output_weights": False,
        "add_position_embedding": True,
        "params_dtype": dtype,
        "consumed_train_samples": 0,
        "consumed_valid_samples": 0,
    }
