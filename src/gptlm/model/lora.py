"""Low-rank adapters (PEFT's LoRA) on our network, in files that plain PEFT loads onto stock GPT-2 and writes for us.

Stock GPT-2 keeps its matrices as Conv1D (in, out), ours are `nn.Linear` (out, in); the adapters' own matrices have one
shape for both, and only PEFT's switch `fan_in_fan_out` differs. Files say true, which stock GPT-2 needs.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, PeftModel, get_peft_model, get_peft_model_state_dict
from safetensors import safe_open
from torch import Tensor, nn
from transformers import GenerationConfig

from gptlm.disk import apply_umask
from gptlm.errors import GptlmError, is_out_of_memory, reason_of
from gptlm.model.adapter_card import write_card
from gptlm.model.adapter_files import WEIGHTS, settings_of
from gptlm.model.base_weights import KEY
from gptlm.model.files import check_safetensors
from gptlm.model.gpt import GPTLMHeadModel
from gptlm.quiet import warnings_ignored

ADAPTER = "default"  # PEFT's name of the one adapter of a model


def add_adapters(
    model: GPTLMHeadModel,
    *,
    rank: int,
    alpha: float,
    dropout: float,
    targets: Sequence[str],
    base: str,
    new_tokens: Sequence[int] = (),
    base_fingerprint: str | None = None,
) -> PeftModel:
    """`model` with new adapters, the only trainable parameters; the output does not change yet (B is zero).

    Args:
        alpha: adapters are scaled by alpha / rank.
        targets: names of matrices, such as "c_attn".
        base: where the model's own weights lie, noted in the files.
        new_tokens: rows of the embedding that are trained and saved, too.
        base_fingerprint: of the model's own weights, noted in the files as well.
    """
    config = LoraConfig(
        task_type="CAUSAL_LM",
        base_model_name_or_path=base,
        r=rank,
        lora_alpha=alpha,  # type: ignore[arg-type]
        lora_dropout=dropout,
        target_modules=list(targets),
        trainable_token_indices={"wte": list(new_tokens)} if new_tokens else None,
    )
    # a name that changes in transformers 6; `base`, which is more exact than PEFT's
    with warnings_ignored(FutureWarning), warnings_ignored(message="The PEFT config's `base_model_name_or_path` was"):
        adapted: Any = get_peft_model(model, config, adapter_name=ADAPTER)
    adapted.peft_config[ADAPTER].base_model_name_or_path = base  # PEFT takes where the weights were read from
    adapted.base_fingerprint = base_fingerprint
    return adapted


class StoredAdapters:
    """The adapters in a folder, read one at a time by the names of a model's parameters.

    Raises:
        GptlmError: if the file is missing, damaged, or lacks a parameter.
    """

    def __init__(self, folder: Path):
        self.folder = folder
        check_safetensors(folder / WEIGHTS)
        try:
            self.file = safe_open(folder / WEIGHTS, "pt")
        except Exception as error:  # FileNotFoundError and safetensors' own kinds
            raise GptlmError(f"{folder / WEIGHTS} cannot be read: {reason_of(error)}") from error
        self.names = set(self.file.keys())

    def get(self, name: str) -> Tensor:
        key = file_name(name)
        if key not in self.names:
            raise GptlmError(f"the adapters in {self.folder} lack {key}: they have other targets or tokens")
        return self.file.get_tensor(key)


def file_name(parameter: str) -> str:
    """PEFT's name in the file of a parameter of the model: without the adapter's name."""
    return parameter.replace(f".{ADAPTER}.", ".").removesuffix(f".{ADAPTER}")


@torch.no_grad()
def load_adapters(model: nn.Module, folder: Path) -> None:
    """Put the adapters in `folder` into the trainable parameters of `model`.

    Raises:
        GptlmError: if one is missing or of another shape.
    """
    stored = StoredAdapters(folder)
    for name, parameter in model.named_parameters():
        if not parameter.requires_grad:
            continue
        value = stored.get(name)
        if value.shape != parameter.shape:
            raise GptlmError(
                f"the adapters in {folder} are of another rank or model: {file_name(name)} is {tuple(value.shape)}, "
                f"expected {tuple(parameter.shape)}"
            )
        parameter.copy_(value)


def merged(model: GPTLMHeadModel, folder: Path, entries: int | None = None) -> GPTLMHeadModel:
    """`model` with the adapters in `folder` added to its weights.

    Args:
        entries: of the tokenizer that belongs to the adapters; the embedding grows to them.

    Raises:
        GptlmError: if the adapters cannot be read, or are of another model.
    """
    settings_of(folder)
    if entries is not None and entries > model.config.vocab_size:
        model.resize_token_embeddings(entries, mean_resizing=False)
    try:
        with warnings_ignored():  # PEFT expects Conv1D in a GPT-2 and warns about our nn.Linear
            adapted = PeftModel.from_pretrained(model, str(folder))
    except Exception as error:  # PEFT raises many kinds
        if is_out_of_memory(error):
            raise
        raise GptlmError(f"the adapters in {folder} do not fit the model: {reason_of(error)}") from error
    names = StoredAdapters(folder).names
    parts = (".lora_A.", ".lora_B.", ".lora_magnitude_vector.")  # the last one of DoRA, without ".weight" in the file
    found = [file_name(name) for name, _ in adapted.named_parameters() if any(part in name for part in parts)]
    wanted = [name.removesuffix(".weight") if "magnitude" in name else name for name in found]
    missing = [name for name in wanted if name not in names]
    if missing:  # PEFT would leave them at their start, where they add nothing
        raise GptlmError(f"the adapters in {folder} lack {len(missing)} tensors (first: {missing[0]}); were they cut?")
    return adapted.merge_and_unload()  # type: ignore[operator]


def save_adapters(model: PeftModel, weights: dict[str, Tensor], folder: Path) -> None:
    """Write the adapters of `model` into `folder`; `weights` are its trainable parameters, whole, by name."""
    from safetensors.torch import save_file

    folder.mkdir(parents=True, exist_ok=True)
    state = get_peft_model_state_dict(model, state_dict=weights, save_embedding_layers=False)
    fingerprint = getattr(model, "base_fingerprint", None)
    facts = {"format": "pt"} | ({KEY: fingerprint} if fingerprint else {})
    save_file({name: tensor.contiguous() for name, tensor in state.items()}, folder / WEIGHTS, facts)
    config: Any = model.peft_config[ADAPTER]
    trained, config.inference_mode = config.inference_mode, True
    config.fan_in_fan_out = True
    config.save_pretrained(str(folder))
    config.inference_mode, config.fan_in_fan_out = trained, False
    network: Any = model.get_base_model()
    GenerationConfig(eos_token_id=network.generation_config.eos_token_id).save_pretrained(folder)  # what ends a turn
    entries = network.config.vocab_size if config.trainable_token_indices else None
    write_card(folder, str(config.base_model_name_or_path), entries)
    apply_umask(folder / WEIGHTS)
