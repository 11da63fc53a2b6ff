"""The one way to a model and its tokenizer for use after training."""

from pathlib import Path

import torch
from transformers import PreTrainedTokenizerBase

from gptlm.errors import GptlmError
from gptlm.model.build import load_model
from gptlm.model.gpt import GPTLMHeadModel
from gptlm.model.presets import has_weights
from gptlm.model.tokenizer import load_tokenizer


def load_for_inference(source: str, device: torch.device) -> tuple[GPTLMHeadModel, PreTrainedTokenizerBase]:
    """The model in evaluation mode on `device`, and its tokenizer.

    Args:
        source: a folder that holds both.

    Raises:
        GptlmError: if weights or tokenizer are missing; random weights are never used.
    """
    folder = Path(source)
    if not has_weights(folder) or not (folder / "config.json").is_file():
        lacks = "config.json" if has_weights(folder) else "model weights (model.safetensors)"
        raise GptlmError(f"{folder} holds no {lacks}; give the output_dir of a training run")
    tokenizer = load_tokenizer(source)
    model = load_model(source, dtype=torch.float32)
    return model.eval().to(device), tokenizer
