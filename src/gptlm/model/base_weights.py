"""Whether adapters are used on the weights that they were trained on: a hash of a sample of the weights."""

import hashlib
import logging
from collections.abc import Iterator
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open

from gptlm.errors import GptlmError
from gptlm.model.adapter_files import WEIGHTS, settings_of
from gptlm.model.files import weight_files

logger = logging.getLogger(__name__)

KEY = "base_fingerprint"  # in the header of the adapters' file, which PEFT passes over
ROWS = 16  # of each sampled tensor
WORD_ROWS = 256  # of the embedding: rows that are added to it change nothing
SAMPLED = ("wte.weight", "wpe.weight", "ln_f.weight", "attn.c_attn.weight", "mlp.c_fc.weight", "mlp.c_proj.weight")
LAYERS = 4  # of which matrices are sampled


def fingerprint_of(folder: Path) -> str | None:
    """16 hex digits that differ when weights of GPT-2 in `folder` do; None where they are not in safetensors.

    Sampled values are rounded to bfloat16, so that a copy in that precision is the same model.
    """
    digest = hashlib.sha256()
    try:
        places = {name.removeprefix("transformer."): (path, name) for path, name in _names(folder)}
        for name in sorted(_sampled(places)):
            path, stored = places[name]
            with safe_open(path, "pt") as file:
                tensor = file.get_slice(stored)
                count = min(tensor.get_shape()[0], WORD_ROWS) if name == "wte.weight" else tensor.get_shape()[0]
                for row in range(0, count, max(1, count // ROWS)):
                    values = tensor[row : row + 1].to(torch.bfloat16).flatten()
                    digest.update(values.view(torch.int16).numpy().tobytes())
    except (GptlmError, OSError, SafetensorError):
        return None
    return digest.hexdigest()[:16] if places else None


def _names(folder: Path) -> Iterator[tuple[Path, str]]:
    for path in weight_files(folder):
        with safe_open(path, "pt") as file:
            yield from ((path, name) for name in file.keys())


def _sampled(names: dict[str, tuple[Path, str]]) -> Iterator[str]:
    """The embeddings, the last norm, and the matrices of evenly spaced layers."""
    layers = sorted({int(name.split(".")[1]) for name in names if name.startswith("h.")})
    chosen = {f"h.{layer}" for layer in layers[:: max(1, len(layers) // LAYERS)]}
    for name in names:
        if name.endswith(SAMPLED) and (not name.startswith("h.") or ".".join(name.split(".")[:2]) in chosen):
            yield name


def check_base(checkpoint: Path, base: Path) -> None:
    """Raises GptlmError if the adapters in `checkpoint` were trained on other weights than those in `base`."""
    trained_on, found = _trained_on(checkpoint), fingerprint_of(base)
    if trained_on and found and trained_on != found:
        raise GptlmError(
            f"the adapters in the checkpoint {checkpoint} were trained on "
            f"{settings_of(checkpoint).get('base_model_name_or_path') or 'another model'}, the weights in {base} are "
            "others; give the same --model_name_or_path, or another --output_dir (--lora_path "
            f"{checkpoint} trains them on the new weights)"
        )


def _trained_on(adapters: Path) -> str | None:
    """The fingerprint of the weights that `adapters` were trained on, where it was noted."""
    with safe_open(adapters / WEIGHTS, "pt") as file:
        return (file.metadata() or {}).get(KEY)


def warn_of_other_base(adapters: Path, base: str) -> None:
    """Say so if the model in the folder `base` is not the one that `adapters` were trained on.

    Adapters of plain PEFT note a name only; it decides where the two models cannot be compared.
    """
    noted = settings_of(adapters).get("base_model_name_or_path") or ""
    trained_on = _trained_on(adapters)
    if trained_on is None and Path(noted).is_dir():
        trained_on = fingerprint_of(Path(noted))
    found = fingerprint_of(Path(base))
    if trained_on and found:
        if trained_on != found:
            logger.warning(
                "the adapters in %s were trained on %s; the weights in %s are others: texts and losses will not be "
                "those of the training",
                adapters, noted or "another model", base,
            )  # fmt: skip
    elif noted and not _is_same_name(noted, base):
        logger.warning(
            "the adapters in %s name %s as their model, %s is used: whether its weights are the same cannot be told",
            adapters, noted, base,
        )  # fmt: skip


def _is_same_name(noted: str, base: str) -> bool:
    """Whether a name of the hub or a folder is that of the folder `base`, which may be in the hub's cache."""
    cached = [part.rpartition("--")[2] for part in Path(base).parts if part.startswith("models--")]
    return Path(noted).name in (Path(base).absolute().name, *cached)
