"""LoRA adapters (PEFT) on our network, their folders, and the check that they are used on their own base model.

Folders are exchangeable with plain PEFT on stock GPT-2. The adapters' matrices have the same shapes on GPT-2's Conv1D
(in, out) and our `nn.Linear` (out, in). Only PEFT's switch `fan_in_fan_out` differs: true in files, false in memory.
"""

import copy
import hashlib
import logging
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from huggingface_hub import ModelCardData
from safetensors import SafetensorError
from torch import Tensor, nn
from transformers import GenerationConfig

from gptlm import owned
from gptlm.errors import GptlmError, is_out_of_memory, named, reason_of
from gptlm.model.adapter_files import read_adapter_config
from gptlm.model.adapter_initial import INITIAL, converted, initial_half, initial_values, take_from_base, trained_half
from gptlm.model.adapter_initial import whole as with_initial_values
from gptlm.model.adapter_kinds import EMBEDDINGS, PLAIN, AdapterKind
from gptlm.model.files import ADAPTER_WEIGHTS
from gptlm.model.gpt import GPTLMHeadModel
from gptlm.model.pretrained import load_pretrained
from gptlm.model.quantization import known_to_peft
from gptlm.model.safetensors_io import LazyTensors, read_header, save_tensors
from gptlm.model.shards import model_tensors
from gptlm.parallel.process_groups import Mesh
from gptlm.parallel.sharding import local_shard
from gptlm.quiet import warnings_ignored
from gptlm.upstream.peft import keep_trained_rows

if TYPE_CHECKING:
    from peft import PeftModel  # slow to import, and a model without adapters does not need it

logger = logging.getLogger(__name__)

ADAPTER = "default"  # PEFT's name of a model's only adapter
FINGERPRINT = "base_fingerprint"  # key in the metadata of the adapter file, which PEFT ignores
SAMPLED = ("wte.weight", "wpe.weight", "ln_f.weight", "attn.c_attn.weight", "mlp.c_fc.weight", "mlp.c_proj.weight")
SAMPLED_LAYERS, SAMPLED_ROWS, SAMPLED_VOCABULARY = 4, 16, 256


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
    kind: AdapterKind = PLAIN,
    initial: Path | None = None,
    bits: int | None = None,
) -> "PeftModel":
    """`model` with new adapters as its only trainable parameters. They do not change its output.

    Args:
        alpha: adapters are scaled by alpha / rank.
        targets: names of matrices, such as "c_attn".
        base: folder or hub name of the base model, for the saved configuration.
        new_tokens: rows of the embedding that are trained and saved as well.
        base_fingerprint: of the base model's weights (see `fingerprint_of`), for the saved file.
        bits: those of a quantized `model` (see quantization.py); None: it is not.
        initial: a checkpoint, whose adapters began with the part of the base weights that is moved into these.
    """
    from peft import LoraConfig, get_peft_model

    settings = kind.settings() | ({"init_lora_weights": True} if initial else {})
    config = LoraConfig(
        **settings,
        task_type="CAUSAL_LM",
        base_model_name_or_path=base,
        r=rank,
        lora_alpha=alpha,  # type: ignore[arg-type]
        lora_dropout=dropout,
        target_modules=list(targets),
        trainable_token_indices={"wte": list(new_tokens)} if new_tokens else None,
    )
    # PEFT warns about a name that changes in transformers 6, and about a `base` that differs from where it loaded from.
    # And about the conversion of PiSSA with rsLoRA and patterns, which it cannot do (see adapter_initial.py).
    with (
        known_to_peft(model, bits),
        warnings_ignored(FutureWarning),
        warnings_ignored(message="The PEFT config's `base_model_name_or_path` was"),
        warnings_ignored(message="Using Rank-Stabilized LoRA with rank_pattern"),
        warnings_ignored(message="Model has `tie_word_embeddings=True` and a tied layer"),
    ):
        adapted: Any = get_peft_model(model, config, adapter_name=ADAPTER)
    adapted.peft_config[ADAPTER].base_model_name_or_path = base  # PEFT has replaced it by the folder of the weights
    if new_tokens:
        keep_trained_rows(adapted, ADAPTER)
    adapted.base_fingerprint = base_fingerprint
    adapted.initial_values = {}
    if kind.changes_base:
        adapted.initial_values = initial_values(adapted)
        if initial is not None:
            stored = StoredAdapters(initial)
            adapted.initial_values = {name: initial_half(name, stored.get(name)) for name in adapted.initial_values}
            take_from_base(adapted, adapted.initial_values, ADAPTER)
    return adapted


class StoredAdapters:
    """The adapters in a folder, read one at a time by parameter name.

    Args:
        model: the model that they are read for; None, or one whose base weights are unchanged, takes them as they are.

    Raises:
        GptlmError: if the file is missing or damaged, or lacks a parameter.
    """

    def __init__(self, folder: Path, model: Any = None):
        self.folder, self.halved = folder, bool(getattr(model, "initial_values", None))
        self.tensors = LazyTensors([folder / ADAPTER_WEIGHTS])

    def get(self, name: str) -> Tensor:
        key = file_name(name)
        if key not in self.tensors:
            raise GptlmError(f"the adapters in {self.folder} lack {key}: they have other targets or tokens")
        return trained_half(name, self.tensors[key]) if self.halved else self.tensors[key]


def file_name(parameter: str) -> str:
    """The name of a parameter in the file: PEFT omits the name of the adapter there."""
    name = parameter.replace(f".modules_to_save.{ADAPTER}.", ".").replace(f".{ADAPTER}.", ".")
    # DoRA's magnitude vectors have no ".weight" in the file
    return name.removesuffix(f".{ADAPTER}").replace(".lora_magnitude_vector.weight", ".lora_magnitude_vector")


@torch.no_grad()
def load_adapters(model: nn.Module, folder: Path, mesh: Mesh | None = None) -> None:
    """Load the adapters in `folder` into the trainable parameters of `model`.

    Args:
        mesh: which share of each tensor is this process's; None: all of it.

    Raises:
        GptlmError: if one is missing or of another shape.
    """
    stored = StoredAdapters(folder)
    for name, parameter in model.named_parameters():
        if not parameter.requires_grad:
            continue
        value = local_shard(mesh, name, stored.get(name))
        if value.shape != parameter.shape:
            raise GptlmError(
                f"the adapters in {folder} are of another rank or model: {file_name(name)} is {tuple(value.shape)}, "
                f"expected {tuple(parameter.shape)}"
            )
        parameter.copy_(value)


def merge_adapters(model: GPTLMHeadModel, folder: Path, entries: int | None = None) -> GPTLMHeadModel:
    """`model` with the adapters in `folder` added to its weights.

    Args:
        entries: size of the adapters' vocabulary, to which the embedding is extended.

    Raises:
        GptlmError: if the adapters cannot be read, or are of another model.
    """
    from peft import PeftModel

    read_adapter_config(folder)
    if entries is not None and entries > model.config.vocab_size:
        model.resize_token_embeddings(entries, mean_resizing=False)
    try:
        with warnings_ignored():  # PEFT expects Conv1D in a GPT-2 and warns about our nn.Linear
            adapted = load_pretrained(PeftModel, str(folder), onto=model)
    except Exception as error:  # PEFT raises many kinds
        if is_out_of_memory(error):
            raise
        raise GptlmError(f"the adapters in {folder} do not fit the model: {reason_of(error)}") from error
    names = LazyTensors([folder / ADAPTER_WEIGHTS]).keys()
    parts = (".lora_A.", ".lora_B.", ".lora_magnitude_vector.", ".modules_to_save.")
    wanted = [file_name(name) for name, _ in adapted.named_parameters() if any(part in name for part in parts)]
    missing = [name for name in wanted if name not in names]
    if missing:  # PEFT leaves these at their initial values, where they have no effect
        raise GptlmError(f"the adapters in {folder} lack {len(missing)} tensors (first: {missing[0]}); were they cut?")
    return adapted.merge_and_unload()  # type: ignore[operator]


def save_adapters(model: "PeftModel", weights: dict[str, Tensor], folder: Path) -> None:
    """Write the adapters of `model` into `folder`; `weights` are its full trainable parameters by name."""
    from peft import get_peft_model_state_dict

    folder.mkdir(parents=True, exist_ok=True)
    state = get_peft_model_state_dict(model, state_dict=weights, save_embedding_layers=False)
    state = {name: value for name, value in state.items() if ".modules_to_save." not in name}  # biases, a second time
    fingerprint, initial = getattr(model, "base_fingerprint", None), getattr(model, "initial_values", None)
    metadata = {"format": "pt"} | ({FINGERPRINT: fingerprint} if fingerprint else {})
    config: Any = copy.deepcopy(model.peft_config[ADAPTER])
    if initial:
        state = with_initial_values(state, {file_name(name): value for name, value in initial.items()})
        metadata[INITIAL] = "second half"
        for key, value in converted(config.to_dict()).items():
            setattr(config, key, value)
    save_tensors(folder / ADAPTER_WEIGHTS, state, metadata)
    config.inference_mode = config.fan_in_fan_out = True
    config.save_pretrained(str(folder))
    network: Any = model.get_base_model()
    # PEFT's folders have no generation configuration; ours say which ids end a response.
    GenerationConfig(eos_token_id=network.generation_config.eos_token_id).save_pretrained(folder)
    has_rows = config.trainable_token_indices or {*EMBEDDINGS} & {*(config.modules_to_save or ())}
    entries = network.config.vocab_size if has_rows else None
    write_card(folder, str(config.base_model_name_or_path), entries)


def fingerprint_of(folder: Path) -> str | None:
    """16 hex digits that identify the GPT-2 weights in `folder`; None if they are not in readable safetensors.

    A hash of up to 16 rows of each sampled tensor: embeddings, final norm, and matrices of four evenly spaced layers.
    Values are rounded to bfloat16, so that a copy in that precision has the same fingerprint.
    """
    digest = hashlib.sha256()
    try:
        stored = model_tensors(folder)
        names = {name.removeprefix("transformer."): name for name in stored}  # the oldest files lack the prefix
        layers = sorted({int(name.split(".")[1]) for name in names if name.startswith("h.")})
        chosen = {str(layer) for layer in layers[:: max(1, len(layers) // SAMPLED_LAYERS)]}
        for name in sorted(names):
            if not name.endswith(SAMPLED) or (name.startswith("h.") and name.split(".")[1] not in chosen):
                continue
            tensor: Any = stored.part(names[name]) if isinstance(stored, LazyTensors) else stored[names[name]]
            count = (tensor.shape if isinstance(tensor, Tensor) else tensor.get_shape())[0]
            if name == "wte.weight":  # rows of added tokens do not change the fingerprint
                count = min(count, SAMPLED_VOCABULARY)
            for row in range(0, count, max(1, count // SAMPLED_ROWS)):
                values = tensor[row : row + 1].to(torch.bfloat16).flatten()
                digest.update(values.view(torch.int16).numpy().tobytes())
    except (GptlmError, OSError, SafetensorError):
        return None
    return digest.hexdigest()[:16] if names else None


def check_base(checkpoint: Path, base: Path) -> None:
    """Raises GptlmError if the adapters in `checkpoint` were trained on other weights than those in `base`."""
    trained_on, found = _trained_on(checkpoint), fingerprint_of(base)
    if trained_on and found and trained_on != found:
        raise GptlmError(
            f"the adapters in the checkpoint {checkpoint} were trained on {_base_name(checkpoint) or 'another model'}, "
            f"the weights in {base} are others; give the same {named('model_name_or_path')}, or another "
            f"{named('output_dir')} ({named('lora_path')} {checkpoint} trains them on the new weights)"
        )


def _trained_on(adapters: Path) -> str | None:
    """The fingerprint of the weights that `adapters` were trained on; None in files of plain PEFT."""
    return read_header(adapters / ADAPTER_WEIGHTS).metadata.get(FINGERPRINT)


def _base_name(adapters: Path) -> str:
    return read_adapter_config(adapters).get("base_model_name_or_path") or ""


def warn_if_other_base(adapters: Path, base: str) -> None:
    """Log a warning if the model in the folder `base` is not the one that `adapters` were trained on.

    The fingerprints decide; without them the names do.
    """
    noted, trained_on, found = _base_name(adapters), _trained_on(adapters), fingerprint_of(Path(base))
    if trained_on is None and Path(noted).is_dir():
        trained_on = fingerprint_of(Path(noted))
    if trained_on and found:
        if trained_on != found:
            logger.warning(
                "the adapters in %s were trained on %s; the weights in %s are others: texts and losses will not be "
                "those of the training",
                adapters, noted or "another model", base,
            )  # fmt: skip
    elif noted and not _is_same_name(noted, base):
        logger.warning(
            "the adapters in %s name %s as their model, %s is used; their weights cannot be compared",
            adapters, noted, base,
        )  # fmt: skip


def _is_same_name(noted: str, base: str) -> bool:
    """Whether `noted`, a hub name or a folder, has the name of the folder `base`, which may be in the hub's cache."""
    cached = [part.rpartition("--")[2] for part in Path(base).parts if part.startswith("models--")]
    return Path(noted).name in (Path(base).absolute().name, *cached)


def resize_call(entries: int) -> str:
    """The call that plain PEFT needs before adapters with added tokens; `entries` is the size of their vocabulary."""
    return f"model.resize_token_embeddings({entries})"


def write_card(folder: Path, base: str, entries: int | None) -> None:
    """Write the model card `folder`/README.md, unless it holds somebody else's text.

    Args:
        base: folder or hub name of the base model.
        entries: size of the vocabulary if tokens were added, else None.
    """
    path = folder / owned.CARD
    if not owned.is_own_card(path):
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
    head = f"---\n{data.to_yaml()}\n---\n\n{owned.CARD_MARK}\n\n# LoRA adapters\n\nFor the model `{base}`."
    path.write_text(f"{head}\n\n{added}{code}\n", encoding="utf-8")
