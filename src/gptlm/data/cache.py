"""Index arrays kept on disk between runs.

An entry is named by the hash of everything its arrays depend on, is written under a temporary name and renamed, and
counts only when its description, written last, is there. So readers never see half an entry, and two builders of the
same entry do not disturb each other.
"""

import hashlib
import json
import logging
import os
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np

logger = logging.getLogger(__name__)

Arrays = dict[str, np.ndarray]


class IndexCache:
    """Looks entries up in `folders`, writes new ones to the first of them that can be written."""

    def __init__(self, folders: Sequence[str | Path]):
        self.folders = [Path(folder) for folder in folders]

    def load_or_build(self, what: dict, build: Callable[[], Arrays]) -> Arrays:
        """The arrays described by `what`, memory-mapped from the cache or built (and kept) now.

        Without folders everything is built and nothing kept.
        """
        if not self.folders:
            return build()
        text = json.dumps(what, sort_keys=True)
        name = hashlib.sha256(text.encode()).hexdigest()[:32]
        for folder in self.folders:
            if (arrays := _load(folder, name)) is not None:
                logger.info("index loaded from %s/%s", folder, name)
                return arrays
        arrays = build()
        for folder in self.folders:
            try:
                _store(folder, name, text, arrays)
            except OSError as error:
                logger.warning("index not kept in %s: %s", folder, error.strerror)
                continue
            logger.info("index built and kept in %s/%s", folder, name)
            return arrays
        logger.warning("no folder for the index can be written; it is built anew in every run (--data_cache DIR)")
        return arrays


def content_hash(array: np.ndarray) -> str:
    """A hash of dtype, shape and bytes."""
    digest = hashlib.sha256(f"{array.dtype.str}{array.shape}".encode())
    digest.update(np.ascontiguousarray(array).data)
    return digest.hexdigest()[:32]


def _load(folder: Path, name: str) -> Arrays | None:
    description = folder / f"{name}.json"
    try:
        names = json.loads(description.read_text(encoding="utf-8"))["arrays"]
        return {key: np.load(folder / f"{name}_{key}.npy", mmap_mode="r") for key in names}
    except FileNotFoundError:
        return None
    except (OSError, ValueError, KeyError) as error:
        logger.warning("index %s is damaged (%s) and is built again", description, error)
        return None


def _store(folder: Path, name: str, what: str, arrays: Arrays) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for key, array in arrays.items():
        final = folder / f"{name}_{key}.npy"
        temporary = final.with_suffix(f".{os.getpid()}.incomplete")
        with open(temporary, "wb") as file:
            np.save(file, array)
        os.replace(temporary, final)
    description = json.dumps({"of": json.loads(what), "arrays": list(arrays)}, indent=1)
    temporary = folder / f"{name}.json.{os.getpid()}.incomplete"
    temporary.write_text(description + "\n", encoding="utf-8")
    os.replace(temporary, folder / f"{name}.json")
