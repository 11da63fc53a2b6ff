"""Where the examples of a fine-tuning run are: files, folders of them, saved datasets, the HuggingFace hub."""

import logging
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from gptlm.config.run import SftRun
from gptlm.data.documents import Batch
from gptlm.data.examples import SUFFIXES, files_in, find_files, record_batches
from gptlm.data.folder_cache import hashes_of
from gptlm.data.text_files import COMPRESSED, format_of, is_dataset, list_files, size_of
from gptlm.errors import GptlmError
from gptlm.model.hub_datasets import HubDataset
from gptlm.recipes.common.remote_files import local_copy

logger = logging.getLogger(__name__)


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
        """See `hashes_of`."""
        return hashes_of(self.files)


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
        found = _hub_splits(run, data.task_name)
    else:
        path = Path(_local(run, "dataset_name_or_path"))
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
            found = _hub_splits(run, str(path))
    if data.eval_dataset_name_or_path:
        found["dev"] = _evaluation_files(Path(_local(run, "eval_dataset_name_or_path")))
    return found


def _local(run: SftRun, flag: str) -> str:
    data_cache, output_dir = run.data.data_cache, run.training.output_dir
    return local_copy(flag, getattr(run.data, flag), data_cache=data_cache, output_dir=output_dir)


def _hub_splits(run: SftRun, name: str) -> Sources:
    splits = {"train": run.data.dataset_split, "dev": "validation"}
    return {part: HubDataset(name, split, run.data.dataset_config) for part, split in splits.items()}


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
