"""PEFT's folders of adapters: what their configuration says, and to which model they belong. No torch here."""

import json
import math
import re
from pathlib import Path
from typing import Any

from gptlm.errors import GptlmError
from gptlm.model.files import ADAPTER_CONFIG, ADAPTER_WEIGHTS, GENERATION_CONFIG, has_weights
from gptlm.model.presets import Shape
from gptlm.model.safetensors_io import tensor_shapes

KINDS: dict[str, Any] = {
    "r": int,
    "lora_alpha": (int, float),
    "target_modules": (list, str),
}  # what LoRA's configuration must have
PLACE = re.compile(r"\.h\.(?P<layer>\d+)\.(?P<matrix>[\w.]+)\.lora_A\.weight$")


def is_adapter(folder: Path) -> bool:
    """Whether `folder` holds adapters instead of a model."""
    return (folder / ADAPTER_CONFIG).is_file() and not has_weights(folder)


def settings_of(folder: Path) -> dict[str, Any]:
    """The adapter configuration in `folder`.

    Raises:
        GptlmError: if there is none, or it is not LoRA's.
    """
    path = folder / ADAPTER_CONFIG
    if not path.is_file():
        there = "does not exist" if not folder.is_dir() else f"holds no adapters: {ADAPTER_CONFIG} is missing"
        raise GptlmError(f"{folder} {there}; give the output_dir of a run with --lora, or another PEFT folder")
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise GptlmError(f"{path} is damaged ({error}); copy the folder again") from error
    if not isinstance(config, dict):
        raise GptlmError(f"{path} is damaged: it holds no JSON object; copy the folder again")
    if config.get("peft_type") != "LORA":
        raise GptlmError(f"the adapters in {folder} are {config.get('peft_type')}; expected LORA")
    for key, kinds in KINDS.items():
        value = config.get(key)
        if not isinstance(value, kinds) or isinstance(value, bool) or value == []:
            raise GptlmError(f"{path} is damaged: {key} is {value!r}; copy the folder again")
    if config["r"] < 1 or not math.isfinite(config["lora_alpha"]):
        raise GptlmError(
            f"{path} is damaged: r is {config['r']}, lora_alpha {config['lora_alpha']}; copy the folder again"
        )
    return config


def check_tensors(folder: Path) -> dict[str, list[int]]:
    """Name -> shape of the tensors of the adapters in `folder`.

    Raises:
        GptlmError: if they cannot be read or are not those of the configuration: PEFT ignores what it does not name.
    """
    settings = settings_of(folder)
    shapes = tensor_shapes(folder / ADAPTER_WEIGHTS)
    rank, targets = settings["r"], settings["target_modules"]
    for name, sizes in shapes.items():
        found = PLACE.search(name)
        if found is None:
            continue
        place = name.removesuffix(".lora_A.weight")
        if isinstance(targets, list) and not any(place.endswith(f".{target}") for target in targets):
            raise GptlmError(
                f"the adapters in {folder} do not match their {ADAPTER_CONFIG}: the file has {name}, target_modules is "
                f"{' '.join(targets)}; copy the folder again"
            )
        if not settings.get("rank_pattern") and sizes[:1] != [rank]:
            raise GptlmError(
                f"the adapters in {folder} do not match their {ADAPTER_CONFIG}: {name} is of rank {sizes[0]}, r is "
                f"{rank}; copy the folder again"
            )
    return shapes


def base_of(folder: Path) -> str:
    """The model that the adapters in `folder` name as theirs.

    Raises:
        GptlmError: if they name none.
    """
    base = settings_of(folder).get("base_model_name_or_path")
    if not isinstance(base, str) or not base:
        raise GptlmError(
            f"{folder / ADAPTER_CONFIG} names no base model (base_model_name_or_path is {base!r}); give "
            f"--model_name_or_path BASE --lora_path {folder}"
        )
    return base


def ends_of(folder: Path) -> int | list[int] | None:
    """The ids that end an answer of the adapters' training, from their generation_config.json; None without one."""
    try:
        return json.loads((folder / GENERATION_CONFIG).read_text(encoding="utf-8")).get("eos_token_id")
    except FileNotFoundError:
        return None
    except (OSError, ValueError, AttributeError) as error:
        raise GptlmError(f"{folder / GENERATION_CONFIG} is damaged ({error}); copy the folder again") from error


def check_fit(folder: Path, shape: Shape) -> None:
    """Raises GptlmError if the adapters in `folder` are damaged, or of a model of another width or depth."""
    for name, sizes in check_tensors(folder).items():
        found = PLACE.search(name)
        if found is None:
            continue
        if int(found["layer"]) >= shape.num_hidden_layers:
            raise GptlmError(
                f"the adapters in {folder} are of another model: they have a layer {found['layer']}, this model has "
                f"{shape.num_hidden_layers} from 0 on"
            )
        if found["matrix"] != "mlp.c_proj" and sizes[1:] != [shape.hidden_size]:
            raise GptlmError(
                f"the adapters in {folder} are of another model: {name} is {sizes}, this model is {shape.hidden_size} "
                "wide"
            )


def base_and_adapters(name: str, lora_path: str | None) -> tuple[str, str | None]:
    """The model and the adapters that `--model_name_or_path name --lora_path lora_path` means.

    A folder of adapters alone names its model itself.

    Raises:
        GptlmError: if both are adapters, or the adapters' configuration cannot be read.
    """
    if not is_adapter(Path(name)):
        if lora_path:
            settings_of(Path(lora_path))
        return name, lora_path
    if lora_path:
        raise GptlmError(f"{name} and --lora_path {lora_path} are both adapters; merge one with scripts/merge_lora.py")
    return base_of(Path(name)), name


def base_hint(adapters: str | None) -> str:
    """What to add to the sentence that the adapters' model is not there."""
    return f"; give --model_name_or_path BASE --lora_path {adapters}" if adapters else ""
