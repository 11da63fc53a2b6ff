"""The one way to a model and its tokenizer for use after training."""

from pathlib import Path

import torch
from torch import nn
from transformers import PreTrainedTokenizerBase

from gptlm.errors import GptlmError, doing
from gptlm.model.adapter_files import base_and_adapters, base_hint, check_tensors, ends_of
from gptlm.model.build import load_model
from gptlm.model.files import ADAPTER_WEIGHTS, CONV1D_WEIGHTS, PEFT_PREFIX, has_weights
from gptlm.model.gpt import GPTLMHeadModel
from gptlm.model.hub import model_folder
from gptlm.model.lora import merged, warn_of_other_base
from gptlm.model.safetensors_io import check_weights
from gptlm.model.tokenizer import has_tokenizer, load_tokenizer


def find_model(name: str, lora_path: str | None) -> tuple[str, str | None]:
    """The local folder of the model `name`, and the folder of its adapters or None.

    Args:
        name: a folder with a model, a folder with adapters (which names its base model), or a built-in name.

    Raises:
        GptlmError: if the model is not found, or the adapters' configuration cannot be read.
    """
    base, adapters = base_and_adapters(name, lora_path)
    return model_folder(base, base_hint(adapters)), adapters


@doing("loading the model")
def load_for_inference(
    source: str, device: torch.device, *, dtype: torch.dtype = torch.float32, lora_path: str | None = None
) -> tuple[GPTLMHeadModel, PreTrainedTokenizerBase]:
    """The model in evaluation mode on `device`, and its tokenizer.

    Args:
        source: a folder that holds both.
        dtype: of the weights in memory.
        lora_path: a folder with adapters, which are added to the weights; a tokenizer in it is the one returned.

    Raises:
        GptlmError: if weights, tokenizer or adapters are missing; random weights are never used.
    """
    folder = Path(source)
    if not has_weights(folder) or not (folder / "config.json").is_file():
        lacks = "config.json" if has_weights(folder) else "model weights (model.safetensors)"
        raise GptlmError(f"{folder} holds no {lacks}; give the output_dir of a training run")
    if lora_path is None:
        check_weights(folder)
        tokenizer = load_tokenizer(source)
        model = load_model(source, dtype=dtype)
    else:
        model, tokenizer = load_adapted(source, Path(lora_path))
        model.to(dtype=dtype)  # type: ignore[call-arg]
        model.name_or_path = f"{source} with the adapters in {lora_path}"  # in messages
    return model.eval().to(device), tokenizer


EMBEDDINGS = ("wte.weight", "lm_head.weight")


def load_adapted(source: str, adapters: Path) -> tuple[GPTLMHeadModel, PreTrainedTokenizerBase]:
    """The model in the folder `source` with `adapters` added to its float32 weights, and the tokenizer.

    Raises:
        GptlmError: if something is missing, or the two do not fit.
    """
    if not has_weights(Path(source)):
        raise GptlmError(f"{source} holds no model weights (model.safetensors); give the adapters' base model")
    check_weights(Path(source))
    shapes = {name.removeprefix(PEFT_PREFIX): shape for name, shape in check_tensors(adapters).items()}
    whole = [name for name in shapes if name.endswith(CONV1D_WEIGHTS)]
    if whole:  # stored (in, out) by stock GPT-2, and the square ones would fit the wrong way round
        raise GptlmError(
            f"the adapters in {adapters} replace whole matrices ({whole[0]}); only low-rank adapters are added here, "
            "merge these with PEFT"
        )
    warn_of_other_base(adapters, source)
    tokenizer = load_tokenizer(tokenizer_folder(source, adapters))
    model = load_model(source)
    ends = ends_of(adapters)
    if ends is not None:
        model.generation_config.eos_token_id = ends
    _check_layers(model, shapes, adapters)
    if any("wte.lora_" in name for name in shapes):  # adapters of the embedding leave the head as it is
        model.lm_head.weight = nn.Parameter(model.lm_head.weight.detach().clone())
        model.config.tie_word_embeddings = False
    rows = [shape[0] for name, shape in shapes.items() if name.endswith(EMBEDDINGS)]
    return merged(model, adapters, max(rows, default=len(tokenizer))), tokenizer


def tokenizer_folder(source: str, adapters: Path) -> str:
    """The adapters' own folder if it holds a tokenizer, else the model's."""
    return str(adapters) if has_tokenizer(adapters) else source


def _check_layers(model: GPTLMHeadModel, shapes: dict[str, list[int]], adapters: Path) -> None:
    """PEFT passes over adapters of modules that the model lacks."""
    known = dict(model.named_modules())
    targets = {name: name.partition(".lora_")[0] for name in shapes if ".lora_" in name}
    missing = [name for name, module in targets.items() if module not in known]
    if missing or not targets:
        what = f"the model has no place for {missing[0]}" if missing else f"{ADAPTER_WEIGHTS} holds none"
        raise GptlmError(f"the adapters in {adapters} are of another model: {what}")
