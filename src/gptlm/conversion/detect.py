"""Whose checkpoint a folder or file is, told from its file names, and which file belongs to which rank. No torch here.

Layouts: Megatron's `checkpointing.py`, DeepSpeed's `global_stepN` folders, PaddleNLP's Trainer, FleetX's engine.
"""

import re
import zipfile
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from gptlm.errors import GptlmError
from gptlm.model.safetensors_io import tensor_shapes, weight_files

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
OTHER = {
    "*.distcp": "a distributed checkpoint of megatron-core; save it there with --ckpt-format torch",
    "iter*_snapshot": "a OneFlow snapshot; OneFlow alone reads it",
    "*_snapshot": "a OneFlow snapshot; OneFlow alone reads it",
    "auto_dist*.pdparams": "FleetX's auto-parallel form; save it with the dynamic engine (tools/train.py)",
}


@dataclass(frozen=True)
class Found:
    """A recognised checkpoint.

    Attributes:
        kind: a key of `NAMES`.
        folder: where its configuration may lie.
        files: [stage][tensor rank] of the weights; one list of safetensors or .bin files where there are no ranks.
        facts: the file with the arguments, where it is not the first of `files`.
        step: as the names say.
        beside: other kinds of checkpoint in the same folder, which are not taken.
    """

    kind: str
    folder: Path
    files: tuple[tuple[Path, ...], ...]
    facts: Path | None = None
    step: int | None = None
    beside: tuple[str, ...] = ()

    def __str__(self) -> str:
        ranks = f", tensor parallel {len(self.files[0])}" if self.kind != "hf" else ""
        stages = f", pipeline {len(self.files)}" if self.kind != "hf" and self.facts is None else ""
        others = " and ".join(NAMES[kind] for kind in self.beside)
        beside = f" (not the one of {others} beside it; to take that, move it into a folder of its own)"
        step = "" if self.step is None else f", step {self.step}"
        return f"{NAMES[self.kind]}{ranks}{stages}{step}{beside if others else ''}"

    def holds(self, other: "Found") -> bool:
        """Whether the files of `other` are of this checkpoint."""
        own = {file for stage in self.files for file in stage}
        return all(file in own for stage in other.files for file in stage)


def recognise(path: Path) -> Found:
    """Whose checkpoint `path` is.

    Raises:
        GptlmError: if it is none, one that nothing here reads, or a rank's file is missing.
    """
    if not path.exists():
        raise GptlmError(f"the checkpoint {path} does not exist")
    for pattern, what in OTHER.items():
        if path.match(pattern) or (path.is_dir() and next(path.glob(pattern), None)):
            raise GptlmError(f"{path} is {what}")
    if holds_paddle_adapters(path):
        raise GptlmError(f"{path} holds adapters of PaddleNLP, not a model: give its model, and {path} as --lora_path")
    found = _file(path) if path.is_file() else _folder(path)
    if found is None and path.is_dir() and MEGATRON_RANK.match(path.name):
        raise GptlmError(f"{path} is the folder of one rank; give the folder above it, {path.parent}")
    if found is None:
        raise GptlmError(
            f"{path} is no checkpoint that is known: expected a HuggingFace folder, Megatron's "
            f"{ITERATION} or mp_rank_XX folders, DeepSpeed's global_stepN, or .pdparams files"
        )
    return found


def find_foreign(path: Path) -> Found | None:
    """The checkpoint in `path` if it is one of another library, which has to be converted."""
    try:
        found = recognise(path)
    except GptlmError:
        if not _looks_foreign(path):
            return None
        raise
    return None if found.kind == "hf" else found


def holds_paddle_adapters(folder: Path) -> bool:
    """Whether `folder` holds LoRA adapters that PaddleNLP wrote."""
    return any((folder / name).is_file() for name in PADDLE_ADAPTERS)


def is_zip_of_files(path: Path) -> bool:
    """Whether `path` is a zip of a checkpoint's folders, not the zip that torch.save writes."""
    if not (path.is_file() and zipfile.is_zipfile(path)):
        return False
    with zipfile.ZipFile(path) as archive:
        return any(Path(name).name in MEGATRON_FILES for name in archive.namelist())


def _looks_foreign(path: Path) -> bool:
    names = [path.name, *(child.name for child in path.iterdir())] if path.is_dir() else [path.name]
    marks = (ITERATION, "mp_rank_", "global_step", "mp_0", ".pdparams", ".distcp", "layer_0", "_snapshot")
    return any(mark in name for name in names for mark in marks)


def _file(path: Path) -> Found | None:
    if path.suffix == ".pdparams":
        return Found("paddle", path.parent, ((path,),))
    if path.suffix in (".pt", ".pth"):
        return Found("megatron", path.parent, ((path,),))
    return None


def _folder(folder: Path) -> Found | None:
    finders: tuple[Callable[[Path], Found | None], ...] = (_megatron, _deepspeed, _paddle, _fleetx, _huggingface)
    for number, finder in enumerate(finders):
        found = finder(folder)
        if found is not None:
            return replace(found, beside=tuple(_beside(found, folder, finders[number + 1 :])))
    return None


def _beside(found: Found, folder: Path, finders: Iterable[Callable[[Path], Found | None]]) -> Iterator[str]:
    """Kinds of the other checkpoints in `folder`."""
    for finder in finders:
        try:
            other = finder(folder)
        except GptlmError:
            continue  # what is not whole could not be taken instead
        if other is not None and not found.holds(other):
            yield other.kind


def _megatron(folder: Path) -> Found | None:
    tracker = folder / ITERATION
    step = None
    if tracker.is_file():
        word = tracker.read_text(encoding="utf-8").strip()
        if not (word.isdigit() or word == "release"):
            raise GptlmError(f"{tracker} holds {word!r}; expected a number of iterations or release")
        step = int(word) if word.isdigit() else None
        folder = folder / (f"iter_{int(word):07d}" if word.isdigit() else word)
        if not folder.is_dir():
            raise GptlmError(f"{tracker} names {folder}, which is not there; copy the checkpoint again")
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
                raise GptlmError(f"{child} holds no {MEGATRON_FILES[0]}; copy the checkpoint again")
            ranks[int(found[2] or 0), int(found[1])] = file
    return Found("megatron", folder, _grid(ranks, folder, "mp_rank_{1:02d}_{0:03d}"), step=step) if ranks else None


def _deepspeed(folder: Path) -> Found | None:
    tag = folder / DEEPSPEED_TAG
    if tag.is_file():
        folder = folder / tag.read_text(encoding="utf-8").strip()
        if not folder.is_dir():
            raise GptlmError(f"{tag} names {folder}, which is not there; copy the checkpoint again")
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
        raise GptlmError(f"{folder} lacks mp_rank_00_model_states.pt, which holds the model's arguments")
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
    files = tuple((path,) for path in weight_files(folder))
    if files and any("decoder.layers." in name or name.startswith("gpt.") for name in _names(files)):
        return Found("paddle", folder, (tuple(path for (path,) in files),), step=number)
    return None


def _names(files: Iterable[tuple[Path, ...]]) -> list[str]:
    return [name for (path,) in files if path.is_file() for name in tensor_shapes(path)]


def _fleetx(folder: Path) -> Found | None:
    named = FLEETX_FOLDER.match(folder.name)
    step = int(named[1]) if named else None
    if (folder / "model.pdparams").is_file():
        return Found("fleetx", folder, ((folder / "model.pdparams",),), step=step)
    ranks: dict[tuple[int, int], Path] = {}
    for child in sorted(folder.iterdir(), reverse=True):  # sharding 00 comes last: each of them holds all weights
        found = FLEETX_RANK.search(child.name)
        file = child / "model.pdparams" if child.is_dir() else child
        if found and file.is_file() and file.name.endswith(".pdparams"):
            ranks[int(found[3] or 0), int(found[1])] = file
    return Found("fleetx", folder, _grid(ranks, folder, "mp_{1:02d}_..._pp_{0:02d}"), step=step) if ranks else None


def _huggingface(folder: Path) -> Found | None:
    files = tuple(weight_files(folder)) or tuple(sorted(folder.glob("pytorch_model*.bin")))
    return Found("hf", folder, (files,)) if files else None


def _grid(ranks: dict[tuple[int, int], Path], folder: Path, name: str) -> tuple[tuple[Path, ...], ...]:
    """The files as [stage][tensor rank]; a gap is named."""
    stages, tensors = max(stage for stage, _ in ranks) + 1, max(rank for _, rank in ranks) + 1
    for stage in range(stages):
        for rank in range(tensors):
            if (stage, rank) not in ranks:
                raise GptlmError(
                    f"{folder} lacks {name.format(stage, rank)}: its other files are of tensor parallel {tensors} x "
                    f"pipeline {stages}; copy the missing rank"
                )
    return tuple(tuple(ranks[stage, rank] for rank in range(tensors)) for stage in range(stages))
