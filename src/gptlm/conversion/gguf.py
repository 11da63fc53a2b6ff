"""Write a model as one GGUF file, which llama.cpp and what is built on it read.

Keys, tensor names and token types are those of llama.cpp's `convert_hf_to_gguf.py` for GPT-2. Matrices are (out, in),
and the head shares the token embedding.
"""

from collections.abc import Callable, Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from gptlm.conversion.gpt2_names import FINAL_NORM, WPE, WTE, all_names, layer_and_part, shape_of
from gptlm.conversion.source import Source
from gptlm.errors import GptlmError, named
from gptlm.json_text import parse_json
from gptlm.model.files import CONV1D_WEIGHTS

TYPES = ("f32", "f16", "q8_0")  # of matrices and token embedding; the rest is float32, as in llama.cpp
PARTS = {
    "ln_1": "attn_norm", "attn.c_attn": "attn_qkv", "attn.c_proj": "attn_output",
    "ln_2": "ffn_norm", "mlp.c_fc": "ffn_up", "mlp.c_proj": "ffn_down",
}  # fmt: skip
OUTSIDE = {
    WTE: "token_embd.weight",
    WPE: "position_embd.weight",
    FINAL_NORM[0]: "output_norm.weight",
    FINAL_NORM[1]: "output_norm.bias",
}


def file_name(kind: str) -> str:
    """The file in the output folder."""
    return f"model-{kind}.gguf"


def tensor_name(name: str) -> str:
    """The name of a weight of stock GPT-2 in the file."""
    layer, part = layer_and_part(name)
    if layer is None:
        return OUTSIDE[name]
    module, _, suffix = part.rpartition(".")
    return f"blk.{layer}.{PARTS[module]}.{suffix}"


def check_writable(source: Source, tokenizer: PreTrainedTokenizerBase | None) -> None:
    """Raises GptlmError if gguf is not installed, or llama.cpp would compute or encode something else."""
    if find_spec("gguf") is None:
        raise GptlmError(f"{named('to')} gguf needs the package gguf: pip install 'gptlm[gguf]'")
    if source.activation == "gelu":
        raise GptlmError("llama.cpp's GPT-2 has the tanh approximation of GELU, the checkpoint has the exact one")
    if tokenizer is None:
        raise GptlmError(f"a GGUF file contains the tokenizer; give {named('tokenizer_name_or_path')}")
    if len(tokenizer) > source.shape.vocab_size:
        raise GptlmError(
            f"the tokenizer has {len(tokenizer)} entries, the model {source.shape.vocab_size}; give its own tokenizer"
        )
    parts = _tokenizer_parts(tokenizer)
    before = parts.get("pre_tokenizer") or {}
    plain = before.get("type") == "ByteLevel" and before.get("use_regex", True) and not before.get("add_prefix_space")
    if parts["model"].get("type") != "BPE" or not plain or parts.get("normalizer"):
        raise GptlmError(
            "the tokenizer is not GPT-2's byte-level BPE (without normalizer and added blank): llama.cpp would encode "
            "texts differently; use --to hf"
        )


def write_gguf(
    source: Source, folder: Path, tokenizer: PreTrainedTokenizerBase, *, kind: str, name: str, done: Callable[[], Any]
) -> None:
    """Write `model-KIND.gguf`, one tensor at a time.

    Args:
        kind: of TYPES.
        name: of the model, for people.
        done: called after each weight.
    """
    from gguf import GGUFWriter

    writer = GGUFWriter(folder / file_name(kind), "gpt2")
    _add_sizes(writer, source, kind, name)
    _add_tokenizer(writer, tokenizer, source.shape.vocab_size)
    for tensor, shape, number_type in _planned(source, kind):
        itemsize, rows = _row_bytes(number_type, shape)
        dtype = np.uint8 if number_type.name == "Q8_0" else np.dtype(np.float16 if number_type.name == "F16" else "f4")
        stored = (*shape[:-1], itemsize) if dtype == np.uint8 else shape
        writer.add_tensor_info(tensor, stored, np.dtype(dtype), rows * itemsize, raw_dtype=number_type)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    for weight in all_names(source.shape.num_hidden_layers):
        writer.write_tensor_data(_quantized(weight, source.get(weight), kind))
        done()
    writer.close()


def max_difference(source: Source, folder: Path, kind: str) -> float:
    """The largest difference of a weight in the file, relative to the largest of its tensor.

    Raises:
        GptlmError: if a tensor is missing.
    """
    from gguf import GGUFReader
    from gguf.quants import dequantize

    stored = {tensor.name: tensor for tensor in GGUFReader(folder / file_name(kind)).tensors}
    largest = 0.0
    for name in all_names(source.shape.num_hidden_layers):
        tensor = stored.get(tensor_name(name))
        if tensor is None:
            raise GptlmError(f"{folder / file_name(kind)} lacks {tensor_name(name)}")
        value = _as_stored(name, source.get(name))
        found = dequantize(tensor.data, tensor.tensor_type).reshape(value.shape)
        largest = max(largest, float(np.abs(found - value).max() / max(np.abs(value).max(), 1e-30)))
    return largest


def _add_sizes(writer: Any, source: Source, kind: str, name: str) -> None:
    from gguf import LlamaFileType

    shape = source.shape
    types = {"f32": LlamaFileType.ALL_F32, "f16": LlamaFileType.MOSTLY_F16, "q8_0": LlamaFileType.MOSTLY_Q8_0}
    writer.add_type("model")
    writer.add_name(name)
    writer.add_block_count(shape.num_hidden_layers)
    writer.add_context_length(shape.max_position_embeddings)
    writer.add_embedding_length(shape.hidden_size)
    writer.add_feed_forward_length(shape.intermediate_size)
    writer.add_head_count(shape.num_attention_heads)
    writer.add_layer_norm_eps(source.epsilon)
    writer.add_file_type(types[kind])
    writer.add_quantization_version(2)


def _add_tokenizer(writer: Any, tokenizer: PreTrainedTokenizerBase, vocab_size: int) -> None:
    """Entries, merges and special tokens; rows of the embedding without an entry are unused tokens."""
    from gguf import TokenType

    entries = {number: token for token, number in tokenizer.get_vocab().items()}
    added: Any = tokenizer.added_tokens_decoder
    tokens, types = [], []
    for number in range(vocab_size):
        tokens.append(entries.get(number, f"[PAD{number}]"))
        if number not in entries:
            types.append(TokenType.UNUSED)
        elif number in added:
            types.append(TokenType.CONTROL if added[number].special else TokenType.USER_DEFINED)
        else:
            types.append(TokenType.NORMAL)
    merges = _tokenizer_parts(tokenizer)["model"]["merges"]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list(tokens)
    writer.add_token_types(types)
    writer.add_token_merges([merge if isinstance(merge, str) else " ".join(merge) for merge in merges])
    eos: Any = tokenizer.eos_token_id
    bos: Any = eos if tokenizer.bos_token_id is None else tokenizer.bos_token_id
    for add, token in (
        (writer.add_bos_token_id, bos),
        (writer.add_eos_token_id, eos),
        (writer.add_unk_token_id, tokenizer.unk_token_id),
        (writer.add_pad_token_id, tokenizer.pad_token_id),
    ):
        if token is not None:
            add(token)
    writer.add_add_bos_token(False)
    if isinstance(getattr(tokenizer, "chat_template", None), str):
        writer.add_chat_template(tokenizer.chat_template)


def _tokenizer_parts(tokenizer: PreTrainedTokenizerBase) -> dict[str, Any]:
    """The content of tokenizer.json."""
    backend: Any = tokenizer.backend_tokenizer  # type: ignore[attr-defined]
    return parse_json(backend.to_str())


def _number_type(name: str, width: int, kind: str) -> Any:
    """GGUF's type of a weight whose rows have `width` numbers: llama.cpp computes with the others in float32."""
    from gguf import GGMLQuantizationType

    if kind == "f32" or not (name == WTE or name.endswith(CONV1D_WEIGHTS)):
        return GGMLQuantizationType.F32
    blocks = kind == "q8_0" and width % 32 == 0  # of 32 numbers with one scale
    return GGMLQuantizationType.Q8_0 if blocks else GGMLQuantizationType.F16


def _planned(source: Source, kind: str) -> Iterator[tuple[str, tuple[int, ...], Any]]:
    for name in all_names(source.shape.num_hidden_layers):
        shape = shape_of(name, source.shape)
        shape = shape[::-1] if name.endswith(CONV1D_WEIGHTS) else shape
        yield tensor_name(name), shape, _number_type(name, shape[-1], kind)


def _row_bytes(number_type: Any, shape: tuple[int, ...]) -> tuple[int, int]:
    """The bytes of a row, and the number of rows."""
    from gguf import GGML_QUANT_SIZES

    numbers, size = GGML_QUANT_SIZES[number_type]
    return shape[-1] // numbers * size, int(np.prod(shape[:-1]))


def _as_stored(name: str, value: Tensor) -> np.ndarray:
    """The weight in float32, matrices as (out, in)."""
    value = value.float()
    return (value.t() if name.endswith(CONV1D_WEIGHTS) else value).contiguous().numpy()


def _quantized(name: str, value: Tensor, kind: str) -> np.ndarray:
    from gguf.quants import quantize

    stored = _as_stored(name, value)
    return quantize(stored, _number_type(name, stored.shape[-1], kind))
