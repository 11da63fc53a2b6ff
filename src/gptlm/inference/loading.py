"""The one way to load a trained model and its tokenizer for inference."""

from pathlib import Path

import torch
from torch import nn
from transformers import PreTrainedTokenizerBase

from gptlm.errors import GptlmError, doing
from gptlm.inference.split_model import load_split
from gptlm.model.adapter_files import base_and_adapters, base_hint, check_tensors, read_eos_token_id
from gptlm.model.build import load_model
from gptlm.model.files import ADAPTER_WEIGHTS, CONFIG, CONV1D_WEIGHTS, PEFT_PREFIX, WEIGHTS, has_tokenizer, has_weights
from gptlm.model.gpt import GPTLMHeadModel
from gptlm.model.hub import model_folder
from gptlm.model.lora import merge_adapters, warn_if_other_base
from gptlm.model.safetensors_io import check_weights
from gptlm.model.tokenizer import load_tokenizer
from gptlm.parallel.process_groups import Mesh

CPU = torch.device("cpu")
EMBEDDINGS = ("wte.weight", "lm_head.weight")


def find_model(name: str, lora_path: str | None) -> tuple[str, str | None]:
    """The local folder of the model `name`, and the folder of its adapters or None.

    Args:
        name: a folder or a repository of the hub with a model or with adapters (which name their base model), or a
            built-in name.
        lora_path: a folder or a repository of the hub with adapters.

    Raises:
        GptlmError: if the model is not found, or the adapters' configuration cannot be read.
    """
    base, adapters = base_and_adapters(name, lora_path)
    return model_folder(base, base_hint((lora_path or name) if adapters else None)), adapters


def check_model_folder(source: str, lora_path: str | None = None) -> None:
    """Raises GptlmError if `source` lacks weights or config.json: random weights are never used."""
    folder = Path(source)
    if has_weights(folder) and (folder / CONFIG).is_file():
        return
    lacks = CONFIG if has_weights(folder) else f"model weights ({WEIGHTS})"
    advice = "the adapters' base model" if lora_path else "the output_dir of a training run"
    raise GptlmError(f"{folder} holds no {lacks}; give {advice}")


def tokenizer_folder(source: str, lora_path: str | None) -> str:
    """The adapters' folder if it holds a tokenizer, which may have added tokens; else the model's."""
    return lora_path if lora_path and has_tokenizer(Path(lora_path)) else source


@doing("loading the model")
def load_for_inference(
    source: str,
    device: torch.device = CPU,
    *,
    dtype: torch.dtype = torch.float32,
    lora_path: str | None = None,
    mesh: Mesh | None = None,
) -> tuple[GPTLMHeadModel, PreTrainedTokenizerBase]:
    """The model in evaluation mode on `device`, and its tokenizer.

    Args:
        source: a folder with both.
        dtype: of the weights in memory; adapters are added to them in float32.
        lora_path: a folder with adapters to add to the weights, and perhaps a tokenizer; excludes `mesh`.
        mesh: splits the layers over processes; each loads its part.

    Raises:
        GptlmError: if weights, tokenizer or adapters are missing or damaged, or do not fit each other.
    """
    check_model_folder(source, lora_path)
    check_weights(Path(source))
    if lora_path is None:
        tokenizer = load_tokenizer(source)
        model = load_model(source, dtype=dtype) if mesh is None else load_split(source, mesh, dtype)
    else:
        assert mesh is None
        shapes = _low_rank_shapes(Path(lora_path))
        warn_if_other_base(Path(lora_path), source)
        tokenizer = load_tokenizer(tokenizer_folder(source, lora_path))
        model = _with_adapters(load_model(source), Path(lora_path), shapes, len(tokenizer))
        model.to(dtype=dtype)  # type: ignore[call-arg]
        model.name_or_path = f"{source} with the adapters in {lora_path}"  # for messages
    return model.eval().to(device), tokenizer


def _low_rank_shapes(adapters: Path) -> dict[str, list[int]]:
    """The shapes of the adapters' tensors by their names in the model."""
    shapes = {name.removeprefix(PEFT_PREFIX): shape for name, shape in check_tensors(adapters).items()}
    full = [name for name in shapes if name.endswith(CONV1D_WEIGHTS)]
    if full:  # from stock GPT-2 they are (in, out); a square one would load into our (out, in) without an error
        raise GptlmError(
            f"the adapters in {adapters} replace whole matrices ({full[0]}); only low-rank adapters are added here, "
            "merge these with PEFT"
        )
    return shapes


def _with_adapters(model: GPTLMHeadModel, adapters: Path, shapes: dict[str, list[int]], entries: int) -> GPTLMHeadModel:
    """`model` with `adapters` added to its weights; `entries` is the size of the tokenizer's vocabulary."""
    eos_token_id = read_eos_token_id(adapters)
    if eos_token_id is not None:
        model.generation_config.eos_token_id = eos_token_id
    modules = dict(model.named_modules())
    targets = [name for name in shapes if ".lora_" in name]
    missing = [name for name in targets if name.partition(".lora_")[0] not in modules]
    if missing or not targets:  # PEFT ignores adapters of modules that the model lacks
        what = f"the model has no place for {missing[0]}" if missing else f"{ADAPTER_WEIGHTS} holds none"
        raise GptlmError(f"the adapters in {adapters} are of another model: {what}")
    if any("wte.lora_" in name for name in shapes):  # they change the input embedding only: untie the head
        model.lm_head.weight = nn.Parameter(model.lm_head.weight.detach().clone())
        model.config.tie_word_embeddings = False
    rows = [shape[0] for name, shape in shapes.items() if name.endswith(EMBEDDINGS)]
    return merge_adapters(model, adapters, max(rows, default=entries))
