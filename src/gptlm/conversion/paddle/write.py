"""A checkpoint of PaddleNLP: fused or split q, k and v, in unified safetensors or one `.pdparams`."""

import json
import pickle
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from gptlm.conversion.gpt2_names import WPE, WTE, layer_and_part
from gptlm.conversion.paddle import names as words
from gptlm.conversion.paddle.read import CONFIG
from gptlm.conversion.source import Source
from gptlm.errors import GptlmError
from gptlm.model.safetensors_io import save_model_weights

THEIRS = {ours: theirs for theirs, ours in words.MODULES.items()}


def check_writable(source: Source) -> None:
    """Raises GptlmError if PaddleNLP's network cannot compute `source`'s."""
    if source.activation == "gelu":
        raise GptlmError(
            f"PaddleNLP's GPT computes the tanh form of GELU, {source.found.folder} has the erf form (gelu): it can be "
            "written --to hf or megatron only"
        )
    if source.epsilon != 1e-5:
        raise GptlmError(
            f"PaddleNLP's GPT has layer norms with epsilon 1e-05, {source.found.folder} {source.epsilon:g}: it can be "
            "written --to hf or megatron only"
        )


def write_paddle(
    source: Source, folder: Path, *, fused: bool, pdparams: bool, dtype: torch.dtype | None, done: Callable[[], Any]
) -> None:
    """Write `source` with its config.json into `folder`.

    Args:
        fused: one qkv_proj, its columns by head; else q_proj, k_proj and v_proj.
        pdparams: one pickle of arrays, which is built in memory; else safetensors, shard by shard.
        dtype: of the weights; None keeps theirs.
        done: called after each weight.
    """
    kept = dtype or source.get(WPE).dtype
    (folder / CONFIG).write_text(json.dumps(_config(source, fused, kept), indent=1) + "\n", encoding="utf-8")
    weights = named(source, fused, kept, done)
    if not pdparams:
        save_model_weights(folder, weights, library="np")
        return
    with (folder / "model_state.pdparams").open("wb") as file:
        pickle.dump({name: as_array(value) for name, value in weights}, file, protocol=4)


def named(source: Source, fused: bool, dtype: torch.dtype, done: Callable[[], Any]) -> Iterator[tuple[str, Tensor]]:
    """Every weight by PaddleNLP's name, in its layout."""
    for name, value in source.weights():
        layer, part = layer_and_part(name)
        module, _, kind = part.rpartition(".")
        value = value.to(dtype)
        if layer is None:
            yield f"gpt.{_outside(name)}", value
        elif module != "attn.c_attn":
            yield f"gpt.decoder.layers.{layer}.{THEIRS[module]}.{kind}", value
        elif fused:  # [3, heads, size] -> [heads, 3, size]
            columns = value.unflatten(-1, (3, source.shape.num_attention_heads, -1)).transpose(-3, -2).flatten(-3)
            yield f"gpt.decoder.layers.{layer}.{words.FUSED}.{kind}", columns
        else:
            for place, share in zip(words.SEPARATE, value.chunk(3, dim=-1)):
                yield f"gpt.decoder.layers.{layer}.{place}.{kind}", share.contiguous()
        done()


def as_array(tensor: Tensor) -> np.ndarray:
    """As paddle.save writes it: bfloat16 as its bits."""
    tensor = tensor.contiguous()
    if tensor.dtype == torch.bfloat16:
        return tensor.view(torch.int16).numpy().view(np.uint16)
    return tensor.numpy()


def _outside(name: str) -> str:
    if name in (WTE, WPE):
        return words.WORDS if name == WTE else words.POSITIONS
    return words.FINAL + name.rpartition(".")[2]


def _config(source: Source, fused: bool, dtype: torch.dtype) -> dict[str, Any]:
    shape = source.shape
    hidden, attention = source.dropouts
    end = source.arguments.get("eos_token_id")
    return {
        "architectures": ["GPTForCausalLM"],
        "model_type": "gpt",
        **{theirs[0]: getattr(shape, ours) for ours, theirs in words.SIZES.items()},
        "type_vocab_size": 16,
        words.ACTIVATION[0]: "gelu",
        words.DROPOUT: hidden,
        words.ATTENTION_DROPOUT: attention,
        words.FUSE: fused,
        "initializer_range": 0.02,
        "tie_word_embeddings": True,
        **({"bos_token_id": end, "eos_token_id": end} if end is not None else {}),
        "dtype": str(dtype).removeprefix("torch."),
    }
