"""Index arrays kept on disk between runs.

The name of an entry is the hash of everything its arrays depend on. Its files are synced and renamed, the description
last, and an entry is valid only if all arrays are as described. So readers never see half an entry, and two processes
can build the same entry at the same time.
"""

import hashlib
import json
import logging
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np

from gptlm.disk import replacing
from gptlm.json_text import parse_json

logger = logging.getLogger(__name__)

Arrays = dict[str, np.ndarray]


class IndexCache:
    """Looks for entries in all `folders`, writes new ones to the first that can be written."""

    def __init__(self, folders: Sequence[str | Path]):
        self.folders = [Path(folder) for folder in folders]

    def load_or_build(self, what: dict, build: Callable[[], Arrays]) -> Arrays:
        """The arrays described by `what`, read from the cache or built (and kept) now.

        Without folders everything is built and nothing is kept.
        """
        if not self.folders:
            return build()
        name = hashlib.sha256(json.dumps(what, sort_keys=True).encode()).hexdigest()[:32]
        for folder in self.folders:
            if (arrays := _load(folder, name, what)) is not None:
                logger.info("index loaded from %s/%s", folder, name)
                return arrays
        arrays = build()
        for folder in self.folders:
            try:
                _store(folder, name, what, arrays)
            except OSError as error:
                logger.warning("index not kept in %s: %s", folder, error.strerror)
                continue
            logger.info("index built and kept in %s/%s", folder, name)
            return arrays
        logger.warning("no folder for the index can be written; every run builds it again (--data_cache DIR)")
        return arrays


def content_hash(array: np.ndarray) -> str:
    """A hash of dtype, shape and bytes."""
    digest = hashlib.sha256(f"{array.dtype.str}{array.shape}".encode())
    digest.update(np.ascontiguousarray(array).data)
    return digest.hexdigest()[:32]


def _load(folder: Path, name: str, what: dict) -> Arrays | None:
    """The arrays of an entry; None if it does not exist or, with a warning, if it is damaged."""
    description = folder / f"{name}.json"
    try:
        entry = parse_json(description.read_text(encoding="utf-8"))
        if entry["of"] != json.loads(json.dumps(what)) or not entry["arrays"]:
            raise ValueError("it describes something else")
        return {key: _load_array(folder / f"{name}_{key}.npy", entry["arrays"]) for key in entry["arrays"]}
    except Exception as error:  # numpy and zipfile raise many kinds on damaged files
        if not (isinstance(error, FileNotFoundError) and error.filename == str(description)):
            logger.warning(
                "index %s is damaged (%s) and is built again", description, str(error) or type(error).__name__
            )
        return None


def _load_array(path: Path, arrays: list | dict) -> np.ndarray:
    """One array, of the type and shape in the description (entries of older versions list names only)."""
    try:
        array = np.load(path, allow_pickle=False)  # not a mapping, see token_file.py
    except (EOFError, ValueError):  # numpy takes damaged files for pickles and tells how to load those
        raise ValueError(f"{path.name} ({path.stat().st_size:,} bytes) is not an array file") from None
    if not isinstance(array, np.ndarray):
        raise ValueError(f"{path.name} is not an array")
    key = path.stem.partition("_")[2]
    if isinstance(arrays, dict) and arrays[key] != _form(array):
        raise ValueError(f"{path.name} has {_form(array)} instead of {arrays[key]}")
    return array


def _form(array: np.ndarray) -> list:
    return [array.dtype.str, *array.shape]


def _store(folder: Path, name: str, what: dict, arrays: Arrays) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for key, array in arrays.items():
        with replacing(folder / f"{name}_{key}.npy") as file:
            np.save(file, array)
    what = json.loads(json.dumps(what, sort_keys=True))
    entry = {"of": what, "arrays": {key: _form(array) for key, array in arrays.items()}}
    with replacing(folder / f"{name}.json") as file:
        file.write((json.dumps(entry, indent=1) + "\n").encode())
