"""Write a checkpoint of PaddleNLP: fused or separate q, k and v, in unified safetensors or one `.pdparams`."""

import json
import pickle
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from gptlm.conversion.gpt2_names import WPE, WTE, layer_and_part
from gptlm.conversion.paddle.layout import SIZES, SPLIT_QKV, WRITTEN, qkv_by_head, to_array
from gptlm.conversion.source import Source
from gptlm.errors import GptlmError, named
from gptlm.model.files import CONFIG
from gptlm.model.safetensors_io import save_model_weights


def check_writable(source: Source) -> None:
    """Raises GptlmError if PaddleNLP's network cannot compute what `source` computes."""
    instead = f"write it {named('to')} hf or megatron"
    if source.activation == "gelu":
        raise GptlmError(
            f"PaddleNLP's GPT computes the tanh form of GELU, {source.found.folder} has the erf form (gelu); {instead}"
        )
    if source.epsilon != 1e-5:
        raise GptlmError(
            f"PaddleNLP's GPT has layer norms with epsilon 1e-05, {source.found.folder} has {source.epsilon:g}; "
            f"{instead}"
        )


def write_paddle(
    source: Source, folder: Path, *, fused: bool, pdparams: bool, dtype: torch.dtype | None, done: Callable[[], Any]
) -> None:
    """Write `source` with its config.json into `folder`.

    Args:
        fused: one qkv_proj, its columns by head; else q_proj, k_proj and v_proj.
        pdparams: one pickle of arrays, built in memory; else safetensors, shard by shard.
        dtype: of the weights; None keeps theirs.
        done: called after each weight.
    """
    kept = dtype or source.get(WPE).dtype
    (folder / CONFIG).write_text(json.dumps(_config(source, fused, kept), indent=1) + "\n", encoding="utf-8")
    weights = _paddle_weights(source, fused, kept, done)
    if not pdparams:
        save_model_weights(folder, weights, library="np")
        return
    with (folder / "model_state.pdparams").open("wb") as file:
        pickle.dump({name: to_array(value) for name, value in weights}, file, protocol=4)


def _paddle_weights(
    source: Source, fused: bool, dtype: torch.dtype, done: Callable[[], Any]
) -> Iterator[tuple[str, Tensor]]:
    """Every weight in PaddleNLP's layout with its name there."""
    for name, value in source.weights():
        layer, part = layer_and_part(name)
        module, _, kind = part.rpartition(".")
        value = value.to(dtype)
        if layer is None:
            table = {WTE: "embeddings.word_embeddings", WPE: "embeddings.position_embeddings"}
            yield f"gpt.{table.get(name, 'decoder.norm')}.{kind}", value
        elif module == "attn.c_attn" and not fused:
            for separate, columns in zip(SPLIT_QKV, value.chunk(3, dim=-1)):
                yield f"gpt.decoder.layers.{layer}.self_attn.{separate}.{kind}", columns.contiguous()
        else:
            if module == "attn.c_attn":
                value = qkv_by_head(value, source.shape.num_attention_heads, value.ndim - 1)
            yield f"gpt.decoder.layers.{layer}.{WRITTEN[module]}.{kind}", value
        done()


def _config(source: Source, fused: bool, dtype: torch.dtype) -> dict[str, Any]:
    hidden, attention = source.dropouts
    eos = source.arguments.get("eos_token_id")
    return {
        "architectures": ["GPTForCausalLM"],
        "model_type": "gpt",
        **{theirs[0]: getattr(source.shape, ours) for ours, theirs in SIZES.items()},
        "type_vocab_size": 16,
        "hidden_act": "gelu",
        "hidden_dropout_prob": hidden,
        "attention_probs_dropout_prob": attention,
        "fuse_attention_qkv": fused,
        "initializer_range": 0.02,
        "tie_word_embeddings": True,
        **({"bos_token_id": eos, "eos_token_id": eos} if eos is not None else {}),
        "dtype": str(dtype).removeprefix("torch."),
    }
