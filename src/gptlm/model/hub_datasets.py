"""Datasets by name: local folders, the caches of `datasets` and of huggingface_hub, and the hub."""

import hashlib
from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from huggingface_hub import HfApi, snapshot_download

from gptlm.data.documents import Batch, table_batches
from gptlm.data.text_files import is_dataset
from gptlm.errors import GptlmError, named, reason_of
from gptlm.model.hub import require_network
from gptlm.upstream.datasets import offline

if TYPE_CHECKING:
    from datasets import Dataset

HASHED_ROWS = 1000  # of a dataset per chunk
SAVED_SPLITS = "dataset_dict.json"


@dataclass(frozen=True)
class HubDataset:
    """A split of a dataset, read as a table.

    Attributes:
        flag: names it, for messages.
    """

    name: str
    split: str
    config: str | None = None
    flag: str = "dataset_name_or_path"

    def __str__(self) -> str:
        return f"hub:{self.name}:{self.split}"

    @cached_property
    def table(self) -> "Dataset":
        """Raises GptlmError if it is neither in the cache nor on the hub."""
        return hub_dataset(self.name, self.split, self.config, flag=self.flag)

    @property
    def size(self) -> int:
        """Bytes of the table."""
        return self.table.data.nbytes

    def batches(self) -> Iterator[Batch]:
        return table_batches(self.table, f"{self.name} {self.split}", range(len(self.table)), self.size)

    def content(self) -> list[list[str]]:
        """A hash of all rows."""
        digest = hashlib.sha256(repr(self.table.features).encode())  # batches are serialized without their columns
        for part in self.table.with_format("arrow").iter(HASHED_ROWS):
            for batch in part.combine_chunks().to_batches():
                digest.update(batch.serialize())
        return [["dataset", digest.hexdigest()]]


def hub_dataset(name: str, split: str, config: str | None = None, *, flag: str = "dataset_name_or_path") -> "Dataset":
    """A split of a dataset as a table; without a network, from a local folder or a cache.

    Args:
        config: name of one of its configurations.
        flag: named in messages; a local file is its remedy.

    Raises:
        GptlmError: if it is neither on this machine nor downloadable.
    """
    return _load(name, split, config, flag, streaming=False)


def _load(name: str, split: str, config: str | None, flag: str, *, streaming: bool) -> Any:
    """Code in a dataset is never run: versions of `datasets` that gptlm takes refuse it."""
    import datasets

    more: dict[str, Any] = {"streaming": True} if streaming else {}
    chosen = [config] if config else []
    folder = Path(name)
    if folder.is_dir():
        try:
            with offline():
                if is_dataset(folder):
                    return datasets.load_from_disk(name)
                if (folder / SAVED_SPLITS).is_file():
                    return datasets.load_from_disk(str(folder / split))
                return datasets.load_dataset(name, *chosen, split=split, **more)
        except Exception as error:  # datasets and its readers each raise their own kinds
            text = f"the {split} split of the dataset {name} cannot be read ({reason_of(error)})"
            raise GptlmError(f"{text}; give another {named(flag)} or split") from error
    reason = None
    try:
        require_network()
    except ConnectionError as error:
        reason = str(error)
    try:
        with offline() if reason else nullcontext():
            return datasets.load_dataset(name, *chosen, split=split, **more)
    except Exception as error:  # datasets, huggingface_hub and their HTTP library each raise their own kinds
        if (snapshot := _snapshot(name)) is not None:
            return _load(snapshot, split, config, flag, streaming=streaming)
        raise GptlmError(
            f"the dataset {name} is neither on this machine nor on the HuggingFace hub ({reason or reason_of(error)}); "
            f"give {named(flag)} a local {'file or folder' if flag == 'dataset_name_or_path' else 'folder'}"
        ) from error


def _snapshot(name: str) -> str | None:
    """The folder of `name` in the cache of huggingface_hub, where `hf download` puts it."""
    try:
        return snapshot_download(name, repo_type="dataset", local_files_only=True)
    except Exception:  # not cached; the type depends on the version of huggingface_hub
        return None


class StreamedDataset:
    """A split of a dataset that is read from beginning to end without keeping a table of it.

    Raises:
        GptlmError: as `hub_dataset`, when it is opened.
    """

    def __init__(self, name: str, split: str, config: str | None, flag: str):
        self.name, self.split, self.config, self.flag = name, split, config, flag

    @cached_property
    def rows(self) -> Any:
        return _load(self.name, self.split, self.config, self.flag, streaming=True)

    def identity(self) -> list[str]:
        """What its rows depend on: the content of local files, or the revision on the hub."""
        folder = self.name if Path(self.name).is_dir() else None
        revision = None
        if folder is None:
            try:
                require_network()
                revision = HfApi().dataset_info(self.name).sha
            except Exception:  # not reachable: only the cache can have it
                folder = _snapshot(self.name)
        if folder is not None:
            revision = _content(Path(folder))
        return [str(self.name) if revision is None else "", str(revision), self.split, str(self.config)]


def _content(folder: Path) -> str:
    digest = hashlib.sha256()
    for file in sorted(path for path in folder.rglob("*") if path.is_file()):
        digest.update(f"{file.relative_to(folder)}\0".encode())
        with open(file, "rb") as stream:
            digest.update(hashlib.file_digest(stream, "sha256").digest())
    return digest.hexdigest()
