"""Create the network: with random weights, or with the weights in a folder."""

import os
import re
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import GenerationConfig, GPT2Config
from transformers.initialization import no_init_weights

from gptlm.errors import GptlmError, is_out_of_memory, named, reason_of
from gptlm.model.files import ADAPTER_CONFIG, CONFIG, CONV1D_WEIGHTS, GENERATION_CONFIG, shape_of_config
from gptlm.model.gpt import GPTLMHeadModel
from gptlm.model.presets import Shape
from gptlm.model.pretrained import load_pretrained
from gptlm.model.safetensors_io import LazyTensors, weight_files
from gptlm.model.shards import StockWeights, model_tensors
from gptlm.model.shards_index import is_sharded
from gptlm.pickles.torch_file import read_torch

SUPPORTED = {  # config key -> the values that our network implements
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
    initializer_range: float | None = None,
) -> GPTLMHeadModel:
    """A network of `shape` with random float32 weights from torch's global generator.

    Raises:
        GptlmError: if they need more memory than the machine has.
    """
    check_memory(shape)
    model = blank_model(new_config(shape, hidden_dropout, attention_dropout, eos_token_id, initializer_range))
    filled: set[nn.Parameter] = set()
    for module in model.modules():
        own = set(module.parameters(recurse=False)) - filled
        if own:  # the tied head is not initialized a second time, which would change all later random numbers
            model._init_weights(module)
            filled |= own
    return model


def check_memory(shape: Shape) -> None:
    """Raises GptlmError if float32 weights of `shape` need more memory than the machine has."""
    count = shape.weights
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    if 4 * count > memory:
        raise GptlmError(
            f"a model of these sizes has {count / 1e9:,.1f} billion weights, which take {4 * count / 1e9:,.0f} GB in "
            f"float32; this machine has {memory / 1e9:,.0f} GB of memory: give smaller sizes, or share the model out "
            "over several processes (gptlm plan finds layouts)"
        )


def check_size(folder: Path) -> None:
    """Raises GptlmError if the config has more weights than the files can hold, before memory is allocated for them."""
    files = [path for path in folder.iterdir() if path.suffix in (".safetensors", ".bin") and path.is_file()]
    count, size = shape_of_config(folder / CONFIG).weights, sum(path.stat().st_size for path in files)
    if files and count > size:  # no format takes less than a byte for a weight
        raise GptlmError(
            f"the config of {folder} has sizes of {count:,} weights, its files hold {size:,} bytes: config.json and "
            "weights are not of one model"
        )


def blank_model(config: GPT2Config) -> GPTLMHeadModel:
    """A network with uninitialized weights."""
    with no_init_weights():
        model = GPTLMHeadModel(config)
    model.tie_weights()
    return model


def new_config(
    shape: Shape,
    hidden_dropout: float,
    attention_dropout: float,
    eos_token_id: int | None,
    initializer_range: float | None = None,
) -> GPT2Config:
    """The configuration of a network of `shape`."""
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
    if initializer_range is not None:
        config.initializer_range = initializer_range
    return config


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
        vocab_size: extend the embedding to this many rows (new rows N(0, initializer_range)); None keeps it.
        hidden_dropout, attention_dropout: None keeps those of the config.

    Raises:
        GptlmError: if the weights are missing, unreadable, incomplete, of a variant that is not implemented, or lie
            beside adapters, which transformers would add to them.
    """
    if (Path(source) / ADAPTER_CONFIG).is_file():
        raise GptlmError(
            f"{source} holds a model and adapters ({ADAPTER_CONFIG}); move the adapters to a folder of their own, and "
            f"give it with {named('lora_path')} to use them"
        )
    try:
        config = loaded_config(source, hidden_dropout, attention_dropout)
        check_size(Path(source))
        _check_pickles(Path(source))
        loaded: Any
        if is_sharded(Path(source)):
            loaded = _load_sharded(Path(source), config, dtype)
        else:
            loaded = load_pretrained(GPTLMHeadModel, source, config=config, dtype=dtype, output_loading_info=True)
    except GptlmError:
        raise
    except Exception as error:  # safetensors, json, huggingface_hub and torch have error types of their own
        if is_out_of_memory(error):
            raise
        raise GptlmError(unreadable(source, error)) from error
    model, report = loaded
    check_complete(source, report)
    if vocab_size is not None and vocab_size > model.config.vocab_size:
        model.resize_token_embeddings(vocab_size, mean_resizing=False)
    return model


def check_complete(source: str, report: dict[str, Any]) -> None:
    """Raises GptlmError if the weights in `source` are not those of the network; `report` is transformers'."""
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


@torch.no_grad()
def _load_sharded(folder: Path, config: GPT2Config, dtype: torch.dtype) -> tuple[GPTLMHeadModel, dict[str, list[str]]]:
    """The network with the weights of a sharded checkpoint, and the names that do not fit, as transformers does it."""
    stored, model = StockWeights(folder), blank_model(config).to(dtype=dtype)  # type: ignore[call-arg]
    model.name_or_path = str(folder)
    own = dict(model.named_parameters())
    mismatched = [name for name in own if name in stored and stored.shape(name) != tuple(own[name].shape)]
    for name, weight in own.items():
        if name in stored and name not in mismatched:
            weight.copy_(stored.tensors[name])
    if (folder / GENERATION_CONFIG).is_file():
        model.generation_config = load_pretrained(GenerationConfig, str(folder))
    return model, {
        "missing_keys": [name for name in own if name not in stored],
        "mismatched_keys": mismatched,
        "unexpected_keys": [name for name in stored if name not in own],
    }


def loaded_config(
    source: str, hidden_dropout: float | None, attention_dropout: float | None, vocab_size: int | None = None
) -> GPT2Config:
    """The configuration in the folder `source`, as `load_model` uses it.

    Raises:
        GptlmError: if it is missing, or of a variant that is not implemented.
    """
    try:
        config = load_pretrained(GPT2Config, source)
    except GptlmError:
        raise
    except Exception as error:  # huggingface_hub, json and OSError
        raise GptlmError(unreadable(source, error)) from error
    _check_supported(config, source)
    _set_dropout(config, hidden_dropout, attention_dropout)
    config.vocab_size = max(config.vocab_size, vocab_size or 0)
    return config


class StoredWeights:
    """The weights in a folder, read one at a time, with the names and tensor layout of the network.

    Raises:
        GptlmError: if a file is missing or damaged.
    """

    def __init__(self, source: str):
        self.source = source
        self.tensors = _pickled(Path(source)) or model_tensors(Path(source))

    def get(self, name: str) -> torch.Tensor:
        """One weight in float32.

        Raises:
            GptlmError: if it is not there.
        """
        stored = self._stored_name(name)
        if stored is None:
            raise GptlmError(f"the weights in {self.source} lack {name}; give a folder written by save_pretrained")
        tensor = self.tensors[stored].float()
        return tensor.t().contiguous() if name.endswith(CONV1D_WEIGHTS) else tensor

    def compared_with(self, model: GPTLMHeadModel) -> dict[str, list[str]]:
        """The names that do not fit the network, as transformers reports them; reads no weights."""
        own = {name: tuple(weight.shape) for name, weight in model.named_parameters()}
        found = {name: stored for name in own if (stored := self._stored_name(name)) is not None}
        unexpected = {*self.tensors} - {*found.values(), "lm_head.weight"}  # tied: a second copy
        buffers = model._keys_to_ignore_on_load_unexpected
        return {
            "missing_keys": [name for name in own if name not in found],
            "mismatched_keys": [name for name, stored in found.items() if self._shape(name, stored) != own[name]],
            "unexpected_keys": [name for name in unexpected if not any(re.search(end, name) for end in buffers)],
        }

    def _stored_name(self, name: str) -> str | None:
        names = (name, name.removeprefix("transformer."))  # the oldest files lack the prefix
        return next((stored for stored in names if stored in self.tensors), None)

    def _shape(self, name: str, stored: str) -> tuple[int, ...]:
        """The shape of a weight in the network, (out, in) for a matrix."""
        tensors = self.tensors
        if isinstance(tensors, StockWeights):
            return tensors.shape(stored)
        lazy = tensors.part(stored) if isinstance(tensors, LazyTensors) else None
        shape = tuple(tensors[stored].shape if lazy is None else lazy.get_shape())
        return shape[::-1] if name.endswith(CONV1D_WEIGHTS) else shape


def _pickled(folder: Path) -> dict[str, Tensor]:
    """The weights in torch's format by name; those of its newer files stay on disk until used."""
    if is_sharded(folder) or weight_files(folder):
        return {}
    return {name: one for path in sorted(folder.glob("pytorch_model*.bin")) for name, one in read_torch(path).items()}


def _check_supported(config: GPT2Config, source: str) -> None:
    for key, values in SUPPORTED.items():  # the weights alone would load without an error
        if getattr(config, key) not in values:
            raise GptlmError(
                f"{source}/config.json has {key}={getattr(config, key)!r}; this network implements "
                f"{key}={values[0]!r} only, its results would differ"
            )


def _set_dropout(config: GPT2Config, hidden: float | None, attention: float | None) -> None:
    """Set GPT-2's dropouts from PaddleNLP's two: `hidden` for embeddings and MLP output, `attention` for attention."""
    if hidden is not None:
        config.embd_pdrop = config.resid_pdrop = hidden
    if attention is not None:
        config.attn_pdrop = attention
        if attention != config.resid_pdrop:
            config.attn_resid_pdrop = attention


def _check_pickles(folder: Path) -> None:
    """Raises GptlmError if weights that transformers will read with torch are not plain tensors, or are damaged."""
    if not weight_files(folder):
        for path in sorted(folder.glob("pytorch_model*.bin")):
            read_torch(path)


def unreadable(source: str, error: Exception) -> str:
    return f"cannot load model weights from the folder {source}: {reason_of(error)}"


def check_finite(values: Tensor, model: Any) -> None:
    """Raises GptlmError with the model and the likely cause if `values` (logits or losses) has NaN or infinity."""
    if not bool(torch.isfinite(values).all()):
        raise GptlmError(f"the model {model.name_or_path or 'in memory'} computes NaN or infinity: {_cause(model)}")


def _cause(model: Any) -> str:
    weights = dict(model.named_parameters())
    damaged = [name for name, weight in weights.items() if not bool(torch.isfinite(weight).all())]
    if hasattr(model, "names_of_group"):  # other processes have other parts of the weights
        damaged = model.names_of_group(damaged)
    if damaged:
        return (
            f"{len(damaged)} of its {len(weights)} weight tensors contain them (first: {damaged[0]}); its training "
            "diverged or its file is damaged, take an earlier checkpoint or copy the folder again"
        )
    if any(weight.dtype == torch.float16 for weight in model.parameters()):
        return f"its activations overflow float16; use {named('bf16')}, or neither for float32"
    if any(weight.numel() == 0 for weight in weights.values()):  # ZeRO stage 3: the weights are partitioned
        return "its training diverged or its file is damaged, take an earlier checkpoint or copy the folder again"
    return "its weights are finite but so large that activations overflow; take an earlier checkpoint"
