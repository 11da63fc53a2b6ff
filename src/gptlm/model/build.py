"""Make the network: with random weights of a given shape, or from a folder that holds weights."""

from typing import Any

import torch
from transformers import GPT2Config

from gptlm.errors import GptlmError
from gptlm.model.gpt import GPTLMHeadModel
from gptlm.model.presets import Shape

SUPPORTED = {  # config key -> the values our network computes
    "activation_function": ("gelu_new", "gelu_pytorch_tanh"),
    "scale_attn_weights": (True,),
    "scale_attn_by_inverse_layer_idx": (False,),
    "reorder_and_upcast_attn": (False,),
    "add_cross_attention": (False,),
}


def new_model(
    shape: Shape,
    *,
    hidden_dropout: float = 0.1,
    attention_dropout: float = 0.1,
    eos_token_id: int | None = None,
) -> GPTLMHeadModel:
    """A network of `shape` with random float32 weights, drawn from torch's global generator."""
    config = GPT2Config(
        vocab_size=shape.vocab_size,
        n_positions=shape.max_position_embeddings,
        n_embd=shape.hidden_size,
        n_layer=shape.num_hidden_layers,
        n_head=shape.num_attention_heads,
        n_inner=shape.intermediate_size,
        bos_token_id=eos_token_id,
        eos_token_id=eos_token_id,
    )
    _set_dropout(config, hidden_dropout, attention_dropout)
    return GPTLMHeadModel(config)


def load_model(
    source: str,
    *,
    vocab_size: int | None = None,
    hidden_dropout: float | None = None,
    attention_dropout: float | None = None,
    dtype: torch.dtype = torch.float32,
) -> GPTLMHeadModel:
    """The network with the weights in the local folder `source`.

    Args:
        vocab_size: grow the embedding to this many rows (new rows N(0, initializer_range)); None keeps it.
        hidden_dropout, attention_dropout: None keeps what the config says.

    Raises:
        GptlmError: if the weights are missing, unreadable, incomplete, or of a variant the network does not compute.
    """
    try:
        config = GPT2Config.from_pretrained(source)
        _check_supported(config, source)
        _set_dropout(config, hidden_dropout, attention_dropout)
        loaded: Any = GPTLMHeadModel.from_pretrained(source, config=config, dtype=dtype, output_loading_info=True)
    except GptlmError:
        raise
    except Exception as error:  # safetensors, json, huggingface_hub and torch each raise their own kinds
        raise GptlmError(_unreadable(source, error)) from error
    model, report = loaded
    missing = sorted(report["missing_keys"]) + [str(key) for key in report["mismatched_keys"]]
    unexpected = sorted(report["unexpected_keys"])
    if unexpected:
        raise GptlmError(
            f"the weights in {source} hold {len(unexpected)} tensors the config does not know "
            f"(first: {unexpected[0]}); config.json and weights are not of one model"
        )
    if missing:
        raise GptlmError(
            f"the weights in {source} do not fill the network: {len(missing)} tensors are missing or of another "
            f"shape (first: {missing[0]}); give a folder written by save_pretrained"
        )
    if vocab_size is not None and vocab_size > model.config.vocab_size:
        model.resize_token_embeddings(vocab_size, mean_resizing=False)
    return model


def _check_supported(config: GPT2Config, source: str) -> None:
    for key, values in SUPPORTED.items():
        if getattr(config, key) not in values:
            raise GptlmError(
                f"{source}/config.json has {key}={getattr(config, key)!r}; this network computes "
                f"{key}={values[0]!r} only, its results would differ"
            )


def _set_dropout(config: GPT2Config, hidden: float | None, attention: float | None) -> None:
    """PaddleNLP's two dropouts on GPT-2's three: `hidden` = embeddings and MLP output, `attention` = the rest."""
    if hidden is not None:
        config.embd_pdrop = config.resid_pdrop = hidden
    if attention is not None:
        config.attn_pdrop = attention
        if attention != config.resid_pdrop:
            config.attn_resid_pdrop = attention


def _unreadable(source: str, error: Exception) -> str:
    reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
    return f"cannot load model weights from the folder {source}: {reason}"
