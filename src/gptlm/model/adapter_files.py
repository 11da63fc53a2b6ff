"""PEFT's adapter folders: their configuration, tensor shapes and base model. This module does not import torch."""

import re
from pathlib import Path
from typing import Any

from gptlm.errors import GptlmError, named
from gptlm.model.files import (
    ADAPTER_CONFIG,
    ADAPTER_WEIGHTS,
    GENERATION_CONFIG,
    PEFT_PREFIX,
    has_weights,
    read_json,
)
from gptlm.model.hub import adapter_folder, hub_config, is_hub_id
from gptlm.model.presets import Shape
from gptlm.model.safetensors_io import tensor_shapes

OLD_WEIGHTS = "adapter_model.bin"  # a pickle, of PEFT before 0.5
REQUIRED: dict[str, Any] = {"r": int, "lora_alpha": (int, float), "target_modules": (list, str)}  # key -> types
LORA_A = re.compile(r"\.h\.(?P<layer>\d+)\.(?P<matrix>[\w.]+)\.lora_A\.weight$")


def is_adapter(folder: Path) -> bool:
    """Whether `folder` holds adapters instead of a model."""
    return (folder / ADAPTER_CONFIG).is_file() and not has_weights(folder)


def read_adapter_config(folder: Path) -> dict[str, Any]:
    """The configuration of the LoRA adapters in `folder`.

    Raises:
        GptlmError: if it is missing, damaged, or of another kind of adapters.
    """
    path = folder / ADAPTER_CONFIG
    if not path.is_file():
        found = "does not exist" if not folder.is_dir() else f"holds no adapters: {ADAPTER_CONFIG} is missing"
        raise GptlmError(
            f"{folder} {found}; give the output_dir of a run with --lora, another PEFT folder, or OWNER/NAME of the hub"
        )
    config = read_json(path)
    if config.get("peft_type") != "LORA":
        raise GptlmError(f"the adapters in {folder} are {config.get('peft_type')}; expected LORA")
    if config.get("alora_invocation_tokens") is not None:
        raise GptlmError(f"the adapters in {folder} are activated LoRA (alora_invocation_tokens); expected plain LoRA")
    for key, types in REQUIRED.items():
        value = config.get(key)
        is_names = not isinstance(value, list) or (value and all(isinstance(name, str) for name in value))
        if not isinstance(value, types) or isinstance(value, bool) or not is_names:
            raise GptlmError(f"{path} is damaged: {key} is {value!r}; copy the folder again")
    base = config.get("base_model_name_or_path")
    if not isinstance(base, str | None):
        raise GptlmError(f"{path} is damaged: base_model_name_or_path is {base!r:.60}; copy the folder again")
    if config["r"] < 1 or not abs(config["lora_alpha"]) < 1e300:
        raise GptlmError(
            f"{path} is damaged: r is {config['r']}, lora_alpha {config['lora_alpha']}; copy the folder again"
        )
    return config


def check_tensors(folder: Path) -> dict[str, list[int]]:
    """The shapes of the adapters' tensors by name.

    Raises:
        GptlmError: if the file is damaged, or does not match the configuration: PEFT ignores what that does not name.
    """
    config = read_adapter_config(folder)
    if not (folder / ADAPTER_WEIGHTS).is_file() and (folder / OLD_WEIGHTS).is_file():
        raise GptlmError(
            f"the adapters in {folder} are {OLD_WEIGHTS}, which is not read; load them with PEFT's PeftModel and save "
            f"them with its save_pretrained, which writes {ADAPTER_WEIGHTS}"
        )
    shapes = tensor_shapes(folder / ADAPTER_WEIGHTS)
    rank, targets = config["r"], config["target_modules"]
    mismatch = f"the adapters in {folder} do not match their {ADAPTER_CONFIG}"
    for name, sizes in shapes.items():
        if LORA_A.search(name) is None:
            continue
        module = name.removesuffix(".lora_A.weight")
        if isinstance(targets, list) and not any(module.endswith(f".{target}") for target in targets):
            raise GptlmError(
                f"{mismatch}: the file has {name}, target_modules is {' '.join(targets)}; copy the folder again"
            )
        if not config.get("rank_pattern") and sizes[:1] != [rank]:
            raise GptlmError(f"{mismatch}: {name} is of rank {sizes[0]}, r is {rank}; copy the folder again")
    return shapes


def check_fit(folder: Path, shape: Shape) -> None:
    """Raises GptlmError if the adapters in `folder` are damaged, or belong to a model of another width or depth."""
    for name, sizes in check_tensors(folder).items():
        found = LORA_A.search(name)
        if found is None:
            continue
        if int(found["layer"]) >= shape.num_hidden_layers:
            raise GptlmError(
                f"the adapters in {folder} are of another model: they have a layer {found['layer']}, this model has "
                f"{shape.num_hidden_layers} from 0 on"
            )
        if found["matrix"] != "mlp.c_proj" and sizes[1:] != [shape.hidden_size]:  # whose input is the inner width
            raise GptlmError(
                f"the adapters in {folder} are of another model: {name} is {sizes}, this model is {shape.hidden_size} "
                "wide"
            )


def matrices_in(folder: Path) -> list[str]:
    """The names of the matrices that have adapters in `folder`, in a model of the network."""
    names = (name for name in check_tensors(folder) if LORA_A.search(name))
    return sorted(name.removeprefix(PEFT_PREFIX).removesuffix(".lora_A.weight") for name in names)


def read_eos_token_id(folder: Path) -> int | list[int] | None:
    """The ids that end a response in the adapters' training, from generation_config.json; None without that file."""
    path = folder / GENERATION_CONFIG
    return read_json(path).get("eos_token_id") if path.exists() else None


def base_model_of(folder: Path) -> str:
    """The base model that the configuration of the adapters in `folder` names.

    Raises:
        GptlmError: if it names none.
    """
    base = read_adapter_config(folder).get("base_model_name_or_path")
    if not isinstance(base, str) or not base:
        raise GptlmError(
            f"{folder / ADAPTER_CONFIG} names no base model (base_model_name_or_path is {base!r}); give "
            f"{named('model_name_or_path')} BASE {named('lora_path')} {folder}"
        )
    return base


def base_and_adapters(name: str, lora_path: str | None) -> tuple[str, str | None]:
    """The base model and the folder of adapters that `--model_name_or_path name --lora_path lora_path` means.

    Args:
        name, lora_path: folders or repositories of the hub.

    Raises:
        GptlmError: if both are adapters, or the adapters cannot be downloaded, or their configuration cannot be read.
    """
    if is_adapter(hub_config(name).parent if is_hub_id(name) else Path(name)):
        if lora_path:
            raise GptlmError(
                f"{name} and {named('lora_path')} {lora_path} are both adapters; merge one with gptlm merge-lora"
            )
        folder = adapter_folder(name)
        return base_model_of(folder), str(folder)
    if not lora_path:
        return name, None
    folder = adapter_folder(lora_path)
    read_adapter_config(folder)
    return name, str(folder)


def base_hint(adapters: str | None) -> str:
    """The end of a message that the base model of `adapters` is not found."""
    return f"; give {named('model_name_or_path')} BASE {named('lora_path')} {adapters}" if adapters else ""
