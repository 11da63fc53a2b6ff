"""Checkpoints of other libraries given as the model: converted once into the HuggingFace cache, then used."""

import hashlib
import os
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from gptlm.config.parser import Parsed
from gptlm.conversion.detect import Found, find_external, holds_paddle_adapters
from gptlm.errors import GptlmError, named
from gptlm.model.files import ADAPTER_CONFIG

CONFIG = "config.json"
Result = TypeVar("Result")


class ConversionNeeded(GptlmError):
    """The command names a checkpoint that has to be converted first.

    Attributes:
        path: the checkpoint.
        result: the file that is there once it has been converted, in a folder of its own.
        heads, vocabulary: its attention heads and vocabulary size, if the command gives them.
    """

    def __init__(self, path: Path, what: str, result: Path, heads: int | None, vocabulary: int | None = None):
        super().__init__(
            f"{path} is {what}, which has to be converted first: start without --print_config, or use gptlm convert "
            f"--from {path} --output DIR, and give DIR"
        )
        self.path, self.result, self.heads, self.vocabulary = path, result, heads, vocabulary


def with_conversions(parse: Callable[[], Result], convert: Callable[[ConversionNeeded], None] | None) -> Result:
    """What `parse` returns, after `convert` has done what it needs; None: nothing is converted, the need is raised."""
    while True:
        try:
            return parse()
        except ConversionNeeded as needed:
            if convert is None:
                raise
            convert(needed)
            if not needed.result.is_file():
                raise


def take_external_model(parsed: Parsed) -> None:
    """Replace `model_name_or_path` by the converted folder if it names a checkpoint of another library.

    Raises:
        ConversionNeeded: if it has not been converted yet.
        GptlmError: if the checkpoint is not whole.
    """
    name = parsed.value("model_name_or_path")
    found = find_external(Path(name)) if name and Path(name).exists() else None
    if found is not None:
        folder = _converted(Path(name), found, parsed)
        parsed.note(f"{name} is a checkpoint of {found}; it is read from {folder}")
        parsed.set("model_name_or_path", str(folder), parsed.sources["model_name_or_path"])


def take_external_adapters(parsed: Parsed) -> None:
    """Replace `lora_path` by the converted folder if it names adapters of PaddleNLP.

    Raises:
        ConversionNeeded: if they have not been converted yet.
    """
    name = parsed.value("lora_path")
    path = Path(name or "")
    if not name or not holds_paddle_adapters(path):
        return
    folder = cache_folder(path, sorted(path.iterdir()), None)
    if not (folder / ADAPTER_CONFIG).is_file():
        heads = _size(parsed, "num_attention_heads")
        raise ConversionNeeded(path, "a folder of PaddleNLP's adapters", folder / ADAPTER_CONFIG, heads)
    parsed.note(f"{name} holds adapters of PaddleNLP; they are read from {folder}")
    parsed.set("lora_path", str(folder), parsed.sources["lora_path"])


def take_external_start(parsed: Parsed) -> None:
    """Start from the weights of another library's checkpoint that `load` or `resume_from_checkpoint` names.

    A run that has checkpoints of its own already resumes from those.

    Raises:
        as `take_external_model`.
    """
    for flag in ("load", "resume_from_checkpoint"):
        name = (parsed.value(flag) if flag in parsed.sources else None) or ""
        found = find_external(Path(name)) if name and Path(name).exists() else None
        if found is None:
            continue
        source = parsed.sources[flag]
        parsed.set(flag, None, source)
        folder = _converted(Path(name), found, parsed)
        parsed.note(
            f"{named(flag)} {name} is a checkpoint of {found}: where output_dir has no checkpoint yet, the run "
            f"starts at step 0 with its weights, read from {folder} (gptlm convert --with_optimizer also converts "
            "Adam's moments and the step)"
        )
        parsed.set("model_name_or_path", str(folder), source)
        parsed.set("continue_training", True, source)


def _converted(path: Path, found: Found, parsed: Parsed) -> Path:
    heads, vocabulary = _size(parsed, "num_attention_heads"), _size(parsed, "vocab_size")
    folder = cache_folder(path, [file for stage in found.files for file in stage], vocabulary)
    if not (folder / CONFIG).is_file():
        raise ConversionNeeded(path, f"a checkpoint of {found}", folder / CONFIG, heads, vocabulary)
    return folder


def _size(parsed: Parsed, name: str) -> int | None:
    """A size of the model, if the command has an argument for it."""
    return parsed.value(name) if name in parsed.sources else None


def cache_folder(path: Path, files: list[Path], vocabulary: int | None) -> Path:
    """Where the converted form of the checkpoint in `path` lies; another one when its files or entries change."""
    cache = Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache") / "huggingface"
    root = Path(os.environ.get("HF_HOME") or cache).expanduser()
    marks = [str(path.resolve()), str(vocabulary)]
    beside = path if path.is_dir() else path.parent
    files = [*files, *(beside / name for name in ("tokenizer.json", "tokenizer_config.json", "vocab.json"))]
    marks += [f"{file.name} {file.stat().st_size} {file.stat().st_mtime_ns}" for file in files if file.is_file()]
    mark = hashlib.sha256("\n".join(marks).encode()).hexdigest()[:12]
    return root / "gptlm" / "converted" / f"{path.resolve().name}-{mark}"
