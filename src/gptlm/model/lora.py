"""Low-rank adapters (PEFT's LoRA) on our network, in files that plain PEFT loads onto stock GPT-2 and writes for us.

Stock GPT-2 keeps its matrices as Conv1D (in, out), ours are `nn.Linear` (out, in); the adapters' own matrices have one
shape for both, and only PEFT's switch `fan_in_fan_out` differs. Files say true, which stock GPT-2 needs.
"""

import hashlib
import logging
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import ModelCardData
from peft import LoraConfig, PeftModel, get_peft_model, get_peft_model_state_dict
from safetensors import SafetensorError
from torch import Tensor, nn
from transformers import GenerationConfig

from gptlm.errors import GptlmError, is_out_of_memory, reason_of
from gptlm.model.adapter_files import settings_of
from gptlm.model.files import ADAPTER_WEIGHTS
from gptlm.model.gpt import GPTLMHeadModel
from gptlm.model.safetensors_io import LazyTensors, read_header, save_tensors
from gptlm.quiet import warnings_ignored

logger = logging.getLogger(__name__)

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
        self.tensors = LazyTensors([folder / ADAPTER_WEIGHTS])

    def get(self, name: str) -> Tensor:
        key = file_name(name)
        if key not in self.tensors:
            raise GptlmError(f"the adapters in {self.folder} lack {key}: they have other targets or tokens")
        return self.tensors[key]


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
    names = LazyTensors([folder / ADAPTER_WEIGHTS]).keys()
    parts = (".lora_A.", ".lora_B.", ".lora_magnitude_vector.")  # the last one of DoRA, without ".weight" in the file
    found = [file_name(name) for name, _ in adapted.named_parameters() if any(part in name for part in parts)]
    wanted = [name.removesuffix(".weight") if "magnitude" in name else name for name in found]
    missing = [name for name in wanted if name not in names]
    if missing:  # PEFT would leave them at their start, where they add nothing
        raise GptlmError(f"the adapters in {folder} lack {len(missing)} tensors (first: {missing[0]}); were they cut?")
    return adapted.merge_and_unload()  # type: ignore[operator]


def save_adapters(model: PeftModel, weights: dict[str, Tensor], folder: Path) -> None:
    """Write the adapters of `model` into `folder`; `weights` are its trainable parameters, whole, by name."""
    folder.mkdir(parents=True, exist_ok=True)
    state = get_peft_model_state_dict(model, state_dict=weights, save_embedding_layers=False)
    fingerprint = getattr(model, "base_fingerprint", None)
    facts = {"format": "pt"} | ({KEY: fingerprint} if fingerprint else {})
    save_tensors(folder / ADAPTER_WEIGHTS, state, facts)
    config: Any = model.peft_config[ADAPTER]
    trained, config.inference_mode = config.inference_mode, True
    config.fan_in_fan_out = True
    config.save_pretrained(str(folder))
    config.inference_mode, config.fan_in_fan_out = trained, False
    network: Any = model.get_base_model()
    GenerationConfig(eos_token_id=network.generation_config.eos_token_id).save_pretrained(folder)  # what ends a turn
    entries = network.config.vocab_size if config.trainable_token_indices else None
    write_card(folder, str(config.base_model_name_or_path), entries)


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
        stored = LazyTensors.of_model(folder)
        names = {name.removeprefix("transformer."): name for name in stored}
        for name in sorted(_sampled(names)):
            tensor = stored.part(names[name])
            count = min(tensor.get_shape()[0], WORD_ROWS) if name == "wte.weight" else tensor.get_shape()[0]
            for row in range(0, count, max(1, count // ROWS)):
                values = tensor[row : row + 1].to(torch.bfloat16).flatten()
                digest.update(values.view(torch.int16).numpy().tobytes())
    except (GptlmError, OSError, SafetensorError):
        return None
    return digest.hexdigest()[:16] if names else None


def _sampled(names: dict[str, str]) -> Iterator[str]:
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
    return read_header(adapters / ADAPTER_WEIGHTS)[1].get(KEY)


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


OURS = "<!-- Written by gptlm when adapters are saved; without this line the file is left as it is. -->"


def resize_call(entries: int) -> str:
    """What plain PEFT needs before adapters with added tokens: `entries` is the size of their vocabulary."""
    return f"model.resize_token_embeddings({entries})"


def write_card(folder: Path, base: str, entries: int | None) -> None:
    """Write `folder`/README.md; one that somebody else wrote stays.

    Args:
        base: folder or hub name of the model that the adapters belong to.
        entries: size of the vocabulary if tokens were added; None: the model's own.
    """
    path = folder / "README.md"
    if path.exists() and not (path.is_file() and OURS in path.read_text(encoding="utf-8", errors="replace")):
        return
    on_hub = not Path(base).is_absolute()  # the hub refuses a card whose base_model is a local path
    data = ModelCardData(
        base_model=base if on_hub else None, library_name="peft", pipeline_tag="text-generation", tags=["lora"]
    )
    call = resize_call(entries or 0)
    added = f"Tokens were added to the vocabulary: plain PEFT needs `{call}` first.\n\n" if entries else ""
    lines = [
        "from peft import PeftModel",
        "from transformers import AutoModelForCausalLM",
        "",
        f"model = AutoModelForCausalLM.from_pretrained({base!r})",
        *([call] if entries else []),
        'model = PeftModel.from_pretrained(model, ".")',
    ]
    code = "\n".join(["```python", *lines, "```"])
    text = f"---\n{data.to_yaml()}\n---\n\n{OURS}\n\n# LoRA adapters\n\nFor the model `{base}`.\n\n{added}{code}\n"
    path.write_text(text, encoding="utf-8")
