"""Index arrays kept on disk between runs.

An entry is named by the hash of everything its arrays depend on. Its files are written to the disk under temporary
names and renamed, the description last, and an entry counts only if all are as the description says. So readers never
see half an entry, and two builders of the same entry do not disturb each other.
"""

import hashlib
import json
import logging
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np

from gptlm.disk import replacing

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
            if (arrays := _load(folder, name, text)) is not None:
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


def _load(folder: Path, name: str, what: str) -> Arrays | None:
    """The arrays of an entry; None where it is missing, or (which is said) damaged."""
    description = folder / f"{name}.json"
    try:
        text = description.read_text(encoding="utf-8")
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:
        logger.warning("index %s is damaged (%s) and is built again", description, error)
        return None
    try:
        noted = json.loads(text)
        if noted["of"] != json.loads(what) or not noted["arrays"]:
            raise ValueError("it describes something else")
        return {key: _load_array(folder / f"{name}_{key}.npy", noted["arrays"]) for key in noted["arrays"]}
    except Exception as error:  # numpy and zipfile raise many kinds on bytes that mean nothing
        reason = str(error) or type(error).__name__
        logger.warning("index %s is damaged (%s) and is built again", description, reason)
        return None


def _load_array(path: Path, noted: list | dict) -> np.ndarray:
    """One array, of the type and shape that the description notes (entries of older versions list names only)."""
    try:
        array = np.load(path, mmap_mode="r", allow_pickle=False)
    except (EOFError, ValueError):  # numpy takes bytes that mean nothing for a pickle, and tells how to load it
        raise ValueError(f"{path.name} ({path.stat().st_size:,} bytes) is no array file") from None
    if not isinstance(array, np.ndarray):
        raise ValueError(f"{path.name} is no array")
    key = path.stem.partition("_")[2]
    if isinstance(noted, dict) and noted[key] != _form(array):
        raise ValueError(f"{path.name} holds {_form(array)} instead of {noted[key]}")
    return array


def _form(array: np.ndarray) -> list:
    return [array.dtype.str, *array.shape]


def _store(folder: Path, name: str, what: str, arrays: Arrays) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for key, array in arrays.items():
        with replacing(folder / f"{name}_{key}.npy") as file:
            np.save(file, array)
    noted = {"of": json.loads(what), "arrays": {key: _form(array) for key, array in arrays.items()}}
    with replacing(folder / f"{name}.json") as file:
        file.write((json.dumps(noted, indent=1) + "\n").encode())
