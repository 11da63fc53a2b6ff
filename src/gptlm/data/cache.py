"""Index arrays kept on disk between runs.

The name of an entry is the hash of everything its arrays depend on. Its files are synced and renamed, the description
last, and an entry is valid only if all arrays have the form in the description. So readers never see half an entry, and
two processes can build the same entry at the same time. Arrays are written as they are built, and large ones are read
where they are needed: neither takes memory. The checksums of large arrays are compared where `verify` asks for it.
"""

import hashlib
import json
import logging
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

import numpy as np
from numpy.lib import format as npy

from gptlm.checksums import ALGORITHM, Checksum
from gptlm.data.numpy_files import check_npy
from gptlm.data.token_file import Numbers, OpenFile, StoredArray, blocks_of
from gptlm.disk import replacing
from gptlm.json_text import parse_json

logger = logging.getLogger(__name__)

IN_MEMORY = 1 << 18  # bytes up to which an array is read whole
ALWAYS_VERIFIED = 1 << 23  # bytes up to which every reader compares the checksum of an array

Arrays = dict[str, Numbers]


class Arrangement:
    """Takes the arrays of an entry, one after the other, and gives them back for reading.

    In memory here; `_Files` writes them.
    """

    def __init__(self) -> None:
        self.arrays: Arrays = {}

    def put(self, name: str, dtype: np.dtype, shape: tuple[int, ...], blocks: Iterable[np.ndarray]) -> Numbers:
        """The array `name`, whose rows come in `blocks`."""
        array, filled = np.empty(0, dtype), 0
        for block in blocks:
            if block.shape == shape and block.dtype == dtype:  # the only one
                array = block
            else:
                array = np.empty(shape, dtype) if filled == 0 else array
                array[filled : filled + len(block)] = block
            filled += len(block)
        self.arrays[name] = array.reshape(shape)
        return self.arrays[name]


Fill = Callable[[Arrangement], None]


class IndexCache:
    """Looks for entries in all `folders`, writes new ones to the first that can be written.

    Args:
        verify: compare the checksums of all arrays, whatever their size.
    """

    def __init__(self, folders: Sequence[str | Path], *, verify: bool = False):
        self.folders, self.verify = [Path(folder) for folder in folders], verify

    def load_or_build(self, what: dict, build: Callable[[], dict[str, np.ndarray]]) -> Arrays:
        """As `load_or_fill`, from arrays in memory."""

        def fill(entry: Arrangement) -> None:
            for key, array in build().items():
                entry.put(key, array.dtype, array.shape, [array])

        return self.load_or_fill(what, fill)

    def load_or_fill(self, what: dict, fill: Fill) -> Arrays:
        """The arrays described by `what`, read from the cache, or built by `fill` (and kept) now.

        Without folders everything is built, in memory, and nothing is kept.
        """
        if not self.folders:
            return _in_memory(fill)
        name = hashlib.sha256(json.dumps(what, sort_keys=True).encode()).hexdigest()[:32]
        for folder in self.folders:
            if (arrays := _load(folder, name, what, self.verify)) is not None:
                logger.info("index loaded from %s/%s", folder, name)
                return arrays
        for folder in self.folders:
            try:
                arrays = _store(folder, name, what, fill)
            except OSError as error:
                logger.warning("index not kept in %s: %s", folder, error.strerror)
                continue
            logger.info("index built and kept in %s/%s", folder, name)
            return arrays
        logger.warning("no folder for the index can be written; every run builds it again (--data_cache DIR)")
        return _in_memory(fill)


def _in_memory(fill: Fill) -> Arrays:
    entry = Arrangement()
    fill(entry)
    return entry.arrays


def content_hash(array: Numbers, dtype: np.dtype | None = None) -> str:
    """A hash of dtype (that of the array, or `dtype`), shape and bytes."""
    dtype = np.dtype(array.dtype if dtype is None else dtype)
    digest = hashlib.sha256(f"{dtype.str}{array.shape}".encode())
    for block in blocks_of(array):
        digest.update(np.ascontiguousarray(block, dtype).data)
    return digest.hexdigest()[:32]


def _load(folder: Path, name: str, what: dict, verify: bool) -> Arrays | None:
    """The arrays of an entry; None if it does not exist or, with a warning, if it is damaged."""
    description = folder / f"{name}.json"
    try:
        entry = parse_json(description.read_text(encoding="utf-8"))
        if entry["of"] != json.loads(json.dumps(what)) or not entry["arrays"]:
            raise ValueError("it describes something else")
        return {key: _load_array(folder / f"{name}_{key}.npy", key, entry, verify) for key in entry["arrays"]}
    except Exception as error:  # numpy and zipfile raise many kinds on damaged files
        if not (isinstance(error, FileNotFoundError) and error.filename == str(description)):
            logger.warning(
                "index %s is damaged (%s) and is built again", description, str(error) or type(error).__name__
            )
        return None


def _load_array(path: Path, key: str, entry: dict, verify: bool) -> Numbers:
    """One array, as in the description `entry`; those of older versions have names only, or no checksums."""
    try:
        with path.open("rb") as stream:
            first, shape, dtype = check_npy(stream, path.stat().st_size)
    except (EOFError, ValueError) as error:
        raise ValueError(f"{path.name}: {error}") from error
    stored = StoredArray(OpenFile(path), dtype, first, shape)
    if isinstance(entry["arrays"], dict) and entry["arrays"][key] != _form(stored):
        raise ValueError(f"{path.name} has {_form(stored)} instead of {entry['arrays'][key]}")
    size = path.stat().st_size - first
    array = stored[:] if size <= IN_MEMORY else stored
    if ALGORITHM in entry and (verify or size <= ALWAYS_VERIFIED):
        digest = Checksum()
        for block in blocks_of(array):
            digest.update(np.ascontiguousarray(block).data)
        if entry[ALGORITHM][key] != digest.hexdigest():
            raise ValueError(f"the content of {path.name} is not what was written")
    return array


def _form(array: Numbers) -> list:
    return [array.dtype.str, *array.shape]


class _Files(Arrangement):
    """Writes arrays of the entry `name` into `folder`."""

    def __init__(self, folder: Path, name: str):
        super().__init__()
        self.folder, self.name = folder, name
        self.sums: dict[str, str] = {}

    def put(self, name: str, dtype: np.dtype, shape: tuple[int, ...], blocks: Iterable[np.ndarray]) -> Numbers:
        path, digest = self.folder / f"{self.name}_{name}.npy", Checksum()
        header = {"descr": npy.dtype_to_descr(np.dtype(dtype)), "fortran_order": False, "shape": shape}
        with replacing(path) as file:
            npy.write_array_header_1_0(file, header)
            first = file.tell()
            for block in blocks:
                content = np.ascontiguousarray(block, dtype).reshape(-1).view(np.uint8).data
                file.write(content)
                digest.update(content)
        self.sums[name] = digest.hexdigest()
        stored = StoredArray(OpenFile(path), dtype, first, shape)
        self.arrays[name] = stored[:] if path.stat().st_size - first <= IN_MEMORY else stored
        return self.arrays[name]


def _store(folder: Path, name: str, what: dict, fill: Fill) -> Arrays:
    folder.mkdir(parents=True, exist_ok=True)
    files = _Files(folder, name)
    fill(files)
    what = json.loads(json.dumps(what, sort_keys=True))
    forms = {key: _form(array) for key, array in files.arrays.items()}
    entry = {"of": what, "arrays": forms, ALGORITHM: files.sums}
    with replacing(folder / f"{name}.json") as file:
        file.write((json.dumps(entry, indent=1) + "\n").encode())
    return files.arrays
