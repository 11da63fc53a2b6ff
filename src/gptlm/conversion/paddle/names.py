"""PaddleNLP's and FleetX's words in a checkpoint: names of tensors, of files and of configurations."""

import re

# Part of a layer there -> part of a layer of GPT-2.
MODULES = {
    "norm1": "ln_1",
    "self_attn.qkv_proj": "attn.c_attn",
    "self_attn.out_proj": "attn.c_proj",
    "norm2": "ln_2",
    "linear1": "mlp.c_fc",
    "linear2": "mlp.c_proj",
}
SPLIT = ("q_proj", "k_proj", "v_proj")
FUSED, SEPARATE = "self_attn.qkv_proj", tuple(f"self_attn.{part}" for part in SPLIT)
LAYER = re.compile(r"^decoder\.layers\.(\d+)\.(.+)$")
STAGE_LAYER = re.compile(r"^(\d+)\.(.+)$")  # a layer of FleetX's pipelines: number 0 is the embedding
SHARED = "shared_layers.embed."
WORDS, POSITIONS = "embeddings.word_embeddings.weight", "embeddings.position_embeddings.weight"
FINAL = "decoder.norm."
HEADS = ("lm_head.weight", "lm_head.decoder.weight")  # copies of the embedding
NAME_TABLE, BIG = "StructuredToParameterName@@", "UnpackBigParamInfor@@"

SIZES = {
    "num_hidden_layers": ("num_hidden_layers", "num_layers"),
    "hidden_size": ("hidden_size",),
    "num_attention_heads": ("num_attention_heads",),
    "intermediate_size": ("intermediate_size", "ffn_hidden_size"),
    "max_position_embeddings": ("max_position_embeddings",),
    "vocab_size": ("vocab_size",),
}
ACTIVATION = ("hidden_act", "hidden_activation")
DROPOUT, ATTENTION_DROPOUT = "hidden_dropout_prob", "attention_probs_dropout_prob"
FUSE = "fuse_attention_qkv"
# Key of a configuration -> (values that mean GPT-2, what any other means).
VARIANTS: dict[str, tuple[tuple[object, ...], str]] = {
    "tie_word_embeddings": ((None, True), "a head that is not the embedding (untied)"),
    "normalize_before": ((None, True), "norms after the residual"),
    "num_experts": ((None, 0, 1), "a mixture of experts"),
    "num_key_value_heads": ((None,), "grouped-query attention"),
}
