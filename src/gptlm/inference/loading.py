"""The one way to a model and its tokenizer for use after training."""

from pathlib import Path

import torch
from transformers import PreTrainedTokenizerBase

from gptlm.errors import GptlmError, doing
from gptlm.inference.adapters import load_adapted
from gptlm.model.build import load_model
from gptlm.model.files import check_weights
from gptlm.model.gpt import GPTLMHeadModel
from gptlm.model.presets import has_weights
from gptlm.model.tokenizer import load_tokenizer


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
