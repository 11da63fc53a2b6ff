"""Detect the format of a checkpoint from its file names, and the rank of each file. Does not import torch.

Where the names are defined: Megatron-LM `megatron/checkpointing.py`, Megatron-DeepSpeed and DeepSpeed
`runtime/engine.py` (`global_stepN`) and `runtime/pipe/module.py` (layer files), PaddleNLP `trainer/trainer.py`, FleetX
`core/engine/eager_engine.py`.
"""

import re
import zipfile
from dataclasses import dataclass, replace
from itertools import chain
from pathlib import Path

from gptlm.errors import GptlmError, named
from gptlm.model.files import CONFIG
from gptlm.model.safetensors_io import tensor_shapes, weight_files
from gptlm.model.shards_index import is_sharded

NAMES = {
    "hf": "HuggingFace GPT-2",
    "megatron": "Megatron-LM",
    "megatron-deepspeed": "Megatron-DeepSpeed",
    "paddle": "PaddleNLP",
    "fleetx": "FleetX",
}
ITERATION, DEEPSPEED_TAG = "latest_checkpointed_iteration.txt", "latest"
MEGATRON_FILES = ("model_optim_rng.pt", "model_rng.pt")
MEGATRON_RANK = re.compile(r"^mp_rank_(\d+)(?:_(\d+))?$")
DEEPSPEED_RANK = re.compile(r"^mp_rank_(\d+)_model_states\.pt$")
DEEPSPEED_LAYER = re.compile(r"^layer_(\d+)-model_(\d+)-model_states\.pt$")
FLEETX_RANK = re.compile(r"mp_(\d+)_sharding_(\d+)(?:_pp_(\d+))?")
PADDLE_FILE = re.compile(r"^model_state(?:\.(?:tp(\d+))?_?(?:pp(\d+))?)?\.pdparams$")
FLEETX_FOLDER = re.compile(r"^epoch_\d+_step_(\d+)$")
PADDLE_ADAPTERS = ("lora_model_state.pdparams", "lora_model_state.safetensors", "peft_model.safetensors")
UNSUPPORTED = {
    "*.distcp": "a distributed checkpoint of megatron-core; save it there with --ckpt-format torch",
    "*_snapshot": "a OneFlow snapshot, which only OneFlow reads; save its weights there in another format",
    "auto_dist*.pdparams": "a FleetX checkpoint of the auto-parallel engine; save it with the dynamic engine "
    "(tools/train.py)",
}


@dataclass(frozen=True)
class Found:
    """A detected checkpoint.

    Attributes:
        kind: a key of `NAMES`.
        folder: where its configuration is looked for.
        files: [pipeline stage or layer][tensor-parallel rank]; one row of safetensors or .bin files without ranks.
        arguments_file: the file with the training arguments, where it is not the first of `files`.
        step: from the folder names.
        others: formats of other checkpoints in the same folder, which are not used.
    """

    kind: str
    folder: Path
    files: tuple[tuple[Path, ...], ...]
    arguments_file: Path | None = None
    step: int | None = None
    others: tuple[str, ...] = ()

    def __str__(self) -> str:
        text = "gptlm, sharded" if is_sharded(self.folder) and self.kind == "hf" else NAMES[self.kind]
        if self.kind != "hf":
            text += f", tensor parallel {len(self.files[0])}"
            text += f", pipeline {len(self.files)}" if self.arguments_file is None else ""
        text += "" if self.step is None else f", step {self.step}"
        if self.others:
            names = " and ".join(NAMES[kind] for kind in self.others)
            text += f" (the folder also contains one of {names}; to use that, move it into a folder of its own)"
        return text


def detect(path: Path) -> Found:
    """The checkpoint in `path`.

    Raises:
        GptlmError: if there is none, its format is not supported, or the file of a rank is missing.
    """
    if not path.exists():
        raise GptlmError(f"the checkpoint {path} does not exist")
    for pattern, what in UNSUPPORTED.items():
        if path.match(pattern) or (path.is_dir() and next(path.glob(pattern), None)):
            raise GptlmError(f"{path} is {what}")
    if holds_paddle_adapters(path):
        raise GptlmError(
            f"{path} contains adapters of PaddleNLP, not a model: give its model, and {path} as {named('lora_path')}"
        )
    found = _in_folder(path) if path.is_dir() else None
    if path.is_file() and path.suffix in (".pdparams", ".pt", ".pth"):
        found = Found("paddle" if path.suffix == ".pdparams" else "megatron", path.parent, ((path,),))
    if found is None and path.is_dir() and MEGATRON_RANK.match(path.name):
        raise GptlmError(f"{path} is the folder of one rank; give the folder above it, {path.parent}")
    if found is None:
        raise GptlmError(
            f"{path} is not a known checkpoint: expected a HuggingFace folder, Megatron's {ITERATION} or mp_rank_XX "
            "folders, DeepSpeed's global_stepN, or .pdparams files"
        )
    return found


def find_external(path: Path) -> Found | None:
    """The checkpoint in `path` if it is one of another library than HuggingFace, which has to be converted.

    Raises:
        GptlmError: if it is such a checkpoint, but a rank is missing or the format is not supported.
    """
    try:
        found = detect(path)
    except GptlmError:
        names = [path.name, *(child.name for child in path.iterdir())] if path.is_dir() else [path.name]
        marks = (ITERATION, "mp_rank_", "global_step", "mp_0", ".pdparams", ".distcp", "layer_0", "_snapshot")
        if not any(mark in name for name in names for mark in marks):
            return None
        raise
    return None if found.kind == "hf" else found


def holds_paddle_adapters(folder: Path) -> bool:
    """Whether `folder` contains LoRA adapters in PaddleNLP's format."""
    return any((folder / name).is_file() for name in PADDLE_ADAPTERS)


def is_zip_of_files(path: Path) -> bool:
    """Whether `path` is a zip of a checkpoint's folders, such as NVIDIA's 345M release. torch.save writes zips, too."""
    if not (path.is_file() and zipfile.is_zipfile(path)):
        return False
    with zipfile.ZipFile(path) as archive:
        return any(Path(name).name in MEGATRON_FILES for name in archive.namelist())


def _in_folder(folder: Path) -> Found | None:
    found: Found | None = None
    others: list[str] = []
    for finder in (_megatron, _deepspeed, _paddle, _fleetx, _huggingface):
        try:
            other = finder(folder)
        except GptlmError:
            if found is None:
                raise
            continue  # damaged, so the user cannot mean this one
        if found is None:
            found = other
        elif other is not None and not {*chain(*other.files)} <= {*chain(*found.files)}:
            others.append(other.kind)
    return replace(found, others=tuple(others)) if found else None


def _megatron(folder: Path) -> Found | None:
    tracker = folder / ITERATION
    step = None
    if tracker.is_file():
        word = tracker.read_text(encoding="utf-8").strip()
        if not (word.isdigit() or word == "release"):
            raise GptlmError(f"{tracker} contains {word!r}; expected a number of iterations or release")
        step = int(word) if word.isdigit() else None
        folder = folder / (f"iter_{int(word):07d}" if word.isdigit() else word)
        if not folder.is_dir():
            raise GptlmError(f"{tracker} names {folder}, which does not exist; copy the checkpoint again")
    elif folder.name.startswith("iter_") and folder.name[5:].isdigit():
        step = int(folder.name[5:])
    elif (folder / "release").is_dir():
        folder = folder / "release"
    ranks: dict[tuple[int, int], Path] = {}
    for child in folder.iterdir():
        found = MEGATRON_RANK.match(child.name)
        if found and child.is_dir():
            file = next((child / name for name in MEGATRON_FILES if (child / name).is_file()), None)
            if file is None:
                raise GptlmError(f"{child} has no {MEGATRON_FILES[0]}; copy the checkpoint again")
            ranks[int(found[2] or 0), int(found[1])] = file
    return Found("megatron", folder, _grid(ranks, folder, "mp_rank_{1:02d}_{0:03d}"), step=step) if ranks else None


def _deepspeed(folder: Path) -> Found | None:
    tag = folder / DEEPSPEED_TAG
    if tag.is_file() and (folder / CONFIG).is_file() and weight_files(folder):
        return None  # transformers' Trainer under DeepSpeed: the engine's files beside the whole weights
    if tag.is_file():
        folder = folder / tag.read_text(encoding="utf-8").strip()
        if not folder.is_dir():
            raise GptlmError(f"{tag} names {folder}, which does not exist; copy the checkpoint again")
    name = folder.name.removeprefix("global_step")
    step = int(name) if name.isdigit() else None
    children = sorted(folder.iterdir())
    layers = {(int(m[1]), int(m[2])): child for child in children if (m := DEEPSPEED_LAYER.match(child.name))}
    states = {(0, int(m[1])): child for child in children if (m := DEEPSPEED_RANK.match(child.name))}
    if not layers and not states:
        return None
    if not layers:
        return Found("megatron-deepspeed", folder, _grid(states, folder, "mp_rank_{1:02d}_model_states.pt"), step=step)
    if (0, 0) not in states:
        raise GptlmError(
            f"{folder} lacks mp_rank_00_model_states.pt with the model's arguments; copy the checkpoint again"
        )
    # numbers in the file names have gaps: pipeline layers without weights have no file
    numbers = {layer: place for place, layer in enumerate(sorted({layer for layer, _ in layers}))}
    rows = {(numbers[layer], rank): file for (layer, rank), file in layers.items()}
    files = _grid(rows, folder, "layer file {0}, model_{1:02d}")
    return Found("megatron-deepspeed", folder, files, states[0, 0], step)


def _paddle(folder: Path) -> Found | None:
    ranks: dict[tuple[int, int], Path] = {}
    for child in folder.iterdir():
        found = PADDLE_FILE.match(child.name)
        if found:
            ranks[int(found[2] or 0), int(found[1] or 0)] = child
    step = folder.name.removeprefix("checkpoint-")
    number = int(step) if step.isdigit() else None
    if ranks:
        files = _grid(ranks, folder, "model_state.tp{1:02d}_pp{0:02d}.pdparams")
        return Found("paddle", folder, files, step=number)
    unified = tuple(weight_files(folder))  # PaddleNLP's unified format has HuggingFace's file names
    stored = [name for path in unified if path.is_file() for name in tensor_shapes(path)]
    if any("decoder.layers." in name or name.startswith("gpt.") for name in stored):
        return Found("paddle", folder, (unified,), step=number)
    return None


def _fleetx(folder: Path) -> Found | None:
    named = FLEETX_FOLDER.match(folder.name)
    step = int(named[1]) if named else None
    if (folder / "model.pdparams").is_file():
        return Found("fleetx", folder, ((folder / "model.pdparams",),), step=step)
    ranks: dict[tuple[int, int], Path] = {}
    for child in sorted(folder.iterdir(), reverse=True):  # ends with sharding_00; each sharding rank has all weights
        found = FLEETX_RANK.search(child.name)
        file = child / "model.pdparams" if child.is_dir() else child
        if found and file.is_file() and file.name.endswith(".pdparams"):
            ranks[int(found[3] or 0), int(found[1])] = file
    return Found("fleetx", folder, _grid(ranks, folder, "mp_{1:02d}_..._pp_{0:02d}"), step=step) if ranks else None


def _huggingface(folder: Path) -> Found | None:
    files = tuple(weight_files(folder)) or tuple(sorted(folder.glob("pytorch_model*.bin")))
    return Found("hf", folder, (files,)) if files else None


def _grid(ranks: dict[tuple[int, int], Path], folder: Path, name: str) -> tuple[tuple[Path, ...], ...]:
    """The files of `ranks` by (stage, tensor-parallel rank) as [stage][rank]; raises GptlmError for a missing one."""
    stages, tensors = max(stage for stage, _ in ranks) + 1, max(rank for _, rank in ranks) + 1
    for stage in range(stages):
        for rank in range(tensors):
            if (stage, rank) not in ranks:
                raise GptlmError(
                    f"{folder} lacks {name.format(stage, rank)}: its other files have tensor parallel {tensors} x "
                    f"pipeline {stages}; copy the missing rank"
                )
    return tuple(tuple(ranks[stage, rank] for rank in range(tensors)) for stage in range(stages))
