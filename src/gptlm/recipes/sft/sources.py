"""Where the examples of a fine-tuning run are: files, folders of them, saved datasets, the HuggingFace hub."""

import hashlib
import logging
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

from gptlm.config.run import SftRun
from gptlm.data.documents import Batch, table_batches
from gptlm.data.examples import SUFFIXES, files_in, find_files, record_batches
from gptlm.data.text_files import COMPRESSED, format_of, is_dataset, list_files, size_of
from gptlm.errors import GptlmError, reason_of
from gptlm.model.hub import hub_dataset

if TYPE_CHECKING:
    from datasets import Dataset

logger = logging.getLogger(__name__)

HUB_SPLITS = {"train": "train", "dev": "validation"}
HASHED_ROWS = 1000  # of a dataset per chunk


@dataclass(frozen=True)
class Files:
    """Files with records, or saved datasets, read one after the other.

    Attributes:
        path: what the user named, for messages.
    """

    path: Path
    files: tuple[Path, ...]

    def __str__(self) -> str:
        return str(self.path)

    @property
    def size(self) -> int:
        """Bytes on disk."""
        return sum(map(size_of, self.files))

    def batches(self) -> Iterator[Batch]:
        return record_batches(self.files)

    def content(self) -> list[list[str]]:
        """Formats and hashes of all bytes. Raises GptlmError if a file cannot be read."""
        found = []
        for file in self.files:
            parts = sorted(part for part in file.iterdir() if part.is_file()) if file.is_dir() else [file]
            for part in parts:
                try:
                    with open(part, "rb") as stream:
                        digest = hashlib.file_digest(stream, "sha256").hexdigest()
                except OSError as error:
                    raise GptlmError(f"cannot read {part}: {reason_of(error)}") from error
                found.append(["".join(part.suffixes[-2:]) if part is file else part.name, digest])
        return found


@dataclass(frozen=True)
class HubDataset:
    """A dataset of the HuggingFace hub."""

    name: str
    split: str

    def __str__(self) -> str:
        return f"hub:{self.name}:{self.split}"

    @cached_property
    def table(self) -> "Dataset":
        """Raises GptlmError if it is neither in the cache nor on the hub."""
        return hub_dataset(self.name, self.split)

    @property
    def size(self) -> int:
        """Bytes of the table."""
        return self.table.data.nbytes

    def batches(self) -> Iterator[Batch]:
        return table_batches(self.table, f"{self.name} {self.split}", range(len(self.table)), self.size)

    def content(self) -> list[list[str]]:
        digest = hashlib.sha256(repr(self.table.features).encode())  # batches are serialized without their columns
        for part in self.table.with_format("arrow").iter(HASHED_ROWS):
            for batch in part.combine_chunks().to_batches():
                digest.update(batch.serialize())
        return [["dataset", digest.hexdigest()]]


Source = Files | HubDataset
Sources = dict[str, Source]  # of "train" and "dev"


def find_sources(run: SftRun) -> Sources:
    """Where the examples are.

    Raises:
        GptlmError: if there is no such file or folder, or nothing in it.
    """
    data = run.data
    found: Sources = {}
    if data.dataset_name_or_path is None:
        found = {split: HubDataset(data.task_name, hub) for split, hub in HUB_SPLITS.items()}
    else:
        path = Path(data.dataset_name_or_path)
        if path.is_file() or is_dataset(path):
            found["train"] = Files(path, (path,))
        elif path.is_dir():
            found = _sources_in(run, path)
        elif any(letter in str(path) for letter in "*?["):
            found["train"] = Files(path, tuple(list_files(str(path))))
        # no dataset of the hub has such a name
        elif _is_file_name(path) or path.is_absolute() or str(data.dataset_name_or_path).startswith("."):
            raise GptlmError(f"--dataset_name_or_path {path}: there is no such file or folder")
        else:
            found = {split: HubDataset(str(path), hub) for split, hub in HUB_SPLITS.items()}
    if data.eval_dataset_name_or_path:
        found["dev"] = _evaluation_files(Path(data.eval_dataset_name_or_path))
    return found


def _is_file_name(path: Path) -> bool:
    name = path.with_suffix("") if path.suffix in COMPRESSED else path
    return name.suffix in SUFFIXES


def _sources_in(run: SftRun, folder: Path) -> Sources:
    found: Sources = {split: files for split in ("train", "dev") if (files := _files_of(folder, split))}
    if not found:
        whole = files_in(folder)
        if not whole:
            raise GptlmError(f"{folder} has no train.json, train.jsonl, dev.json ... and is not a saved dataset")
        logger.info("%s has no train or dev file: all %d files in it are read", folder, len(whole))
        return {"train": Files(folder, whole)}
    if "train" not in found and run.training.do_train:
        dev = found["dev"]
        raise GptlmError(
            f"{folder} has {Path(str(dev)).name} but no train.json, train.jsonl or train.parquet; to train "
            f"on it: --dataset_name_or_path {dev}"
        )
    return found


def _evaluation_files(path: Path) -> Files:
    """`path`, or what is for evaluation (else the only files) if it is a folder."""
    if any(letter in str(path) for letter in "*?[") and not path.exists():
        return Files(path, tuple(list_files(str(path))))
    if not path.exists():
        raise GptlmError(f"--eval_dataset_name_or_path {path}: there is no such file or folder")
    if path.is_file() or is_dataset(path):
        return Files(path, (path,))
    found = _files_of(path, "dev") or _files_of(path, "train") or Files(path, files_in(path))
    if not found.files:
        raise GptlmError(
            f"--eval_dataset_name_or_path {path} has no dev.json, dev.jsonl, validation.json ... and is not a saved "
            "dataset"
        )
    return found


def _files_of(folder: Path, split: str) -> Files | None:
    """The files of "train" or "dev" in a folder; other candidates are logged."""
    candidates = find_files(folder, split)
    if len(candidates) > 1:
        others = ", ".join(file.name for file in candidates[1:])
        logger.warning("%s is read; %s in the same folder: ignored", candidates[0], others)
    for path in candidates[:1]:
        if format_of(path) is not None and path.exists():
            return Files(path, (path,))
        return Files(path, files_in(path) if path.is_dir() else tuple(list_files(str(path))))
    return None
