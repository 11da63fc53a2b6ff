"""Index arrays kept on disk between runs.

The name of an entry is the hash of everything its arrays depend on. Its files are synced and renamed, the description
last, and an entry is valid only if all arrays have the form and the checksum in the description. So readers never see
half an entry, and two processes can build the same entry at the same time.
"""

import hashlib
import json
import logging
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
from numpy.lib.format import read_array

from gptlm.checksums import ALGORITHM, checksum
from gptlm.data.numpy_files import check_npy
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
        return {key: _load_array(folder / f"{name}_{key}.npy", key, entry) for key in entry["arrays"]}
    except Exception as error:  # numpy and zipfile raise many kinds on damaged files
        if not (isinstance(error, FileNotFoundError) and error.filename == str(description)):
            logger.warning(
                "index %s is damaged (%s) and is built again", description, str(error) or type(error).__name__
            )
        return None


def _load_array(path: Path, key: str, entry: dict) -> np.ndarray:
    """One array, as in the description `entry`; those of older versions have names only, or no checksums."""
    try:
        with path.open("rb") as file:  # not a mapping, see token_file.py
            check_npy(file, path.stat().st_size)
            file.seek(0)
            array = read_array(file, allow_pickle=False)
    except (EOFError, ValueError) as error:
        raise ValueError(f"{path.name}: {error}") from error
    if isinstance(entry["arrays"], dict) and entry["arrays"][key] != _form(array):
        raise ValueError(f"{path.name} has {_form(array)} instead of {entry['arrays'][key]}")
    if ALGORITHM in entry and entry[ALGORITHM][key] != checksum(np.ascontiguousarray(array)):
        raise ValueError(f"the content of {path.name} is not what was written")
    return array


def _form(array: np.ndarray) -> list:
    return [array.dtype.str, *array.shape]


def _store(folder: Path, name: str, what: dict, arrays: Arrays) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for key, array in arrays.items():
        with replacing(folder / f"{name}_{key}.npy") as file:
            np.save(file, array)
    what = json.loads(json.dumps(what, sort_keys=True))
    sums = {key: checksum(np.ascontiguousarray(array)) for key, array in arrays.items()}
    entry = {"of": what, "arrays": {key: _form(array) for key, array in arrays.items()}, ALGORITHM: sums}
    with replacing(folder / f"{name}.json") as file:
        file.write((json.dumps(entry, indent=1) + "\n").encode())
