"""Token files: Megatron's `.bin/.idx` (MMIDIDX, and TNTIDX of `lazy` and `cached`), PaddleNLP's `_ids.npy/_idx.npz`,
and its older single `_ids.npz`.

All contain the ids of all tokens back to back, and the length of each sequence. Ids are read as they are needed, except
from the single .npz; so are numbers of a large index. Byte layouts: Megatron-LM `indexed_dataset.py`, PaddleNLP
`paddlenlp/data`.
"""

import hashlib
import logging
import os
from bisect import bisect_right
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from gptlm.checksums import ALGORITHM, Checksum
from gptlm.data.cache import IndexCache, content_hash
from gptlm.data.numpy_files import AGAIN, check_npy, load_npz
from gptlm.data.token_file import BLOCK, Ids, Numbers, OpenFile, StoredArray, TokenFile
from gptlm.errors import GptlmError, reason_of
from gptlm.json_text import parse_json

logger = logging.getLogger(__name__)

MAGIC = b"MMIDIDX\x00\x00"
HEADER = np.dtype([("version", "<u8"), ("dtype", "u1"), ("sequences", "<u8"), ("documents", "<u8")])
START = len(MAGIC) + HEADER.itemsize  # 34 bytes
TNT_MAGIC = b"TNTIDX\x00\x00"
TNT_HEADER = np.dtype([(name, "<u8") for name in ("version", "dtype", "width", "items", "sizes", "documents")])
TNT_START = len(TNT_MAGIC) + TNT_HEADER.itemsize  # 56 bytes
# Codes 6 and 7 are floats whose width differs between writers; no text corpus has them.
DTYPES = {1: np.uint8, 2: np.int8, 3: np.int16, 4: np.int32, 5: np.int64, 8: np.uint16}
UINT16_VOCABULARY = 65500  # the originals store ids of smaller vocabularies as uint16
FINGERPRINT_BLOCKS, FINGERPRINT_TOKENS = 64, 1 << 15  # 64 KiB of uint16 in each block
INDEX_IN_MEMORY = 1 << 20  # bytes of a .idx up to which it is read whole
SCAN_TOKENS = 1 << 24  # tokens in memory at a time when all ids are checked


class Pointers:
    """Numbers of an array in a file, divided by `unit`: the index of each sequence's first token.

    Args:
        array: (n,) int64.
        unit: bytes of a token where the file counts bytes.
        name: of the array, for messages.
    """

    def __init__(self, array: StoredArray, unit: int, name: str):
        self.array, self.unit, self.name = array, unit, name

    def __len__(self) -> int:
        return len(self.array)

    def __getitem__(self, places: Any) -> Any:
        return self.array[places] // self.unit


Starts = Pointers | Numbers


@dataclass(frozen=True)
class IndexedTokens:
    """A corpus on disk.

    Attributes:
        prefix: the path without suffix, as the user gave it.
        path: the file with the ids.
        tokens: (total,) ids of dtype uint8, int8, int16, uint16, int32 or int64.
        sizes: (n,) integers, tokens of each sequence. Sequences are shuffled and split, as in the originals; a document
            is one sequence unless it was preprocessed sentence by sentence.
        starts: (n,) int64, index into `tokens` of each sequence's first token.
        document_starts: (documents + 1,) int64, index of each document's first sequence, then n.
        noted_hash: `sizes_hash` where it is known.
        are_documents: every sequence is a document, as far as is known.
    """

    prefix: str
    path: Path
    tokens: Ids
    sizes: Numbers
    starts: Starts
    document_starts: Numbers
    noted_hash: str | None = None
    are_documents: bool = False

    def __len__(self) -> int:
        return len(self.sizes)

    @cached_property
    def sizes_hash(self) -> str:
        """A hash of all sizes, which does not depend on the file format."""
        return self.noted_hash or content_hash(self.sizes, np.dtype(np.int32))

    def tokens_before(self, sequence: int) -> int:
        """Tokens of the sequences [0, sequence)."""
        return int(self.starts[sequence]) if sequence < len(self) else len(self.tokens)

    def documents_of(self, sequences: list[int]) -> list[int]:
        """The document of each sequence, from 1."""
        if self.are_documents:
            return [sequence + 1 for sequence in sequences]
        if isinstance(self.document_starts, np.ndarray):
            return np.searchsorted(self.document_starts, sequences, side="right").tolist()
        return [bisect_right(self.document_starts, sequence) for sequence in sequences]

    def get(self, sequence: int, offset: int = 0, length: int | None = None) -> np.ndarray:
        """The tokens [offset, offset + length) of one sequence; `length` None means to its end."""
        start = int(self.starts[sequence]) + offset
        rest = int(self.sizes[sequence]) - offset
        return self.tokens[start : start + (rest if length is None else min(length, rest))]


def open_tokens(prefix: str, cache: IndexCache | None = None) -> IndexedTokens:
    """Open `prefix`. Of several formats the npy/npz pair is read, as in PaddleNLP, then the single .npz.

    Args:
        cache: keeps what is known of a large index from reading it whole, which later starts need not do again.

    Raises:
        GptlmError: if files are missing, damaged, or not of one run.
    """
    formats = [name for name in ("_ids.npy", "_ids.npz", ".bin") if os.path.exists(prefix + name)]
    if len(formats) > 1:
        logger.warning("%s exists in several formats (%s): %s is read", prefix, ", ".join(formats), formats[0])
    if os.path.exists(f"{prefix}_ids.npy") or os.path.exists(f"{prefix}_idx.npz"):
        return _open_npy(prefix, cache or IndexCache([]))
    if os.path.exists(f"{prefix}_ids.npz"):
        return _open_npz(prefix)
    return _open_bin(prefix, cache or IndexCache([]))


def _open_bin(prefix: str, cache: IndexCache) -> IndexedTokens:
    index_path, tokens_path = Path(f"{prefix}.idx"), Path(f"{prefix}.bin")
    _require(index_path, tokens_path)
    file, stat = OpenFile(index_path), index_path.stat()
    size = stat.st_size
    is_tnt = file.read(0, min(size, len(MAGIC))).startswith(TNT_MAGIC)
    parse, start = (_parse_tnt, TNT_START) if is_tnt else (_parse_mmap, START)
    if size < start:
        raise GptlmError(f"{index_path} is {size} bytes long, an index has at least {start}; {AGAIN}")
    dtype, sizes, starts, documents = parse(file, size)
    found = _facts(index_path, stat, sizes, starts, documents, cache)
    expected, length = found.tokens * dtype.itemsize, tokens_path.stat().st_size
    if expected != length:
        raise GptlmError(
            f"{tokens_path} is {length} bytes long, {index_path} describes {expected}: "
            f"the pair is not of one run or was cut short; {AGAIN}"
        )
    tokens = TokenFile(tokens_path, dtype, 0, found.tokens)
    if size <= INDEX_IN_MEMORY:
        sizes, documents = sizes[:].astype(np.int32), documents[:]
        return IndexedTokens(prefix, tokens_path, tokens, sizes, sequence_starts(sizes), documents)
    return IndexedTokens(prefix, tokens_path, tokens, sizes, starts, documents, found.sizes_hash, found.are_documents)


Index = tuple[np.dtype, StoredArray, Pointers, StoredArray]  # dtype of the ids; sizes, starts, document_starts


def _parse_mmap(file: OpenFile, size: int) -> Index:
    """Header, n sizes as int32, n byte pointers as int64, the document index as int64."""
    path, raw = file.path, file.read(0, START)
    if raw[: len(MAGIC)] != MAGIC:
        raise GptlmError(
            f"{path} starts with {raw[:9]!r}, not with {MAGIC!r}: it is not an MMIDIDX index "
            "(are .bin and .idx swapped?)"
        )
    header: Any = np.frombuffer(raw[len(MAGIC) :], HEADER)[0]
    dtype = _dtype_of(path, int(header["version"]), int(header["dtype"]))
    n, m = int(header["sequences"]), int(header["documents"])
    expected = START + 12 * n + 8 * m
    if size not in (expected, expected + n):  # + n: one mode byte per sequence of multimodal writers
        raise GptlmError(
            f"{path} is {size} bytes long, its header announces {expected} "
            f"({n} sequences, {m} document entries): the file was cut short or damaged; {AGAIN}"
        )
    sizes = StoredArray(file, np.dtype("<i4"), START, (n,))
    pointers = StoredArray(file, np.dtype("<i8"), START + 4 * n, (n,))
    documents = StoredArray(file, np.dtype("<i8"), START + 12 * n, (m,))
    return dtype, sizes, Pointers(pointers, dtype.itemsize, "byte pointers"), documents


def _parse_tnt(file: OpenFile, size: int) -> Index:
    """fairseq's format with Megatron's document index; each item is one sequence. All arrays are int64."""
    path, raw = file.path, file.read(0, TNT_START)
    header: Any = np.frombuffer(raw[len(TNT_MAGIC) :], TNT_HEADER)[0]
    dtype = _dtype_of(path, int(header["version"]), int(header["dtype"]))
    n, m = int(header["items"]), int(header["documents"])
    expected = TNT_START + 8 * (2 * (n + 1) + n + m)
    if int(header["sizes"]) != n or int(header["width"]) != dtype.itemsize or size != expected:
        raise GptlmError(
            f"{path} is {size} bytes long, its header announces {expected} ({n} items of one size each): "
            f"the file was cut short or damaged; {AGAIN}"
        )
    counts = (n + 1, n, 1, n, m)  # dimension offsets, data offsets and their end, sizes, documents
    places = [TNT_START + 8 * sum(counts[:k]) for k in range(5)]
    _, offsets, _, sizes, documents = (
        StoredArray(file, np.dtype("<i8"), place, (count,)) for place, count in zip(places, counts, strict=True)
    )
    return dtype, sizes, Pointers(offsets, 1, "offsets"), documents


class _Facts(NamedTuple):
    """What a whole reading of an index tells: the tokens, `sizes_hash`, and whether every sequence is a document."""

    tokens: int
    sizes_hash: str
    are_documents: bool


def _facts(
    path: Path, stat: os.stat_result, sizes: StoredArray, starts: Pointers, documents: StoredArray, cache: IndexCache
) -> _Facts:
    """Of an index that is right in all its parts, else GptlmError is raised; a large one is read once."""

    def read() -> dict[str, np.ndarray]:
        tokens = _check_sizes(path, sizes, starts)
        are_documents = check_documents(path, documents, len(sizes))
        numbers = np.array([tokens, are_documents], np.int64)
        return {"facts": numbers, "hash": np.frombuffer(content_hash(sizes, np.dtype(np.int32)).encode(), np.uint8)}

    if stat.st_size <= INDEX_IN_MEMORY:
        cache = IndexCache([])
    found = cache.load_or_build(_state("facts of", path, stat), read)
    tokens, are_documents = found["facts"][:].tolist()
    return _Facts(tokens, bytes(found["hash"][:]).decode(), bool(are_documents))


def _state(what: str, path: Path, stat: os.stat_result) -> dict[str, Any]:
    return {what: str(path.resolve()), "bytes": stat.st_size, "stamp": stat.st_mtime_ns}


def _check_sizes(path: Path, sizes: StoredArray, starts: Pointers) -> int:
    """The sum of all sizes. Raises GptlmError if one is negative, or `starts` are not their running sum."""
    total = 0
    for first in range(0, len(sizes), BLOCK):
        block = sizes[first : first + BLOCK]
        if int(block.min()) < 0:
            raise GptlmError(f"{path}: sequence {first + int(np.argmin(block))} has length {int(block.min())}; {AGAIN}")
        ends = np.cumsum(block, dtype=np.int64) + total
        if not np.array_equal(np.concatenate([[total], ends[:-1]]) * starts.unit, starts.array[first : first + BLOCK]):
            raise GptlmError(f"{path}: the {starts.name} are not the running sum of the lengths; {AGAIN}")
        total = int(ends[-1])
    return total


def _dtype_of(path: Path, version: int, code: int) -> np.dtype:
    if version != 1:
        raise GptlmError(f"{path} has format version {version}, only version 1 is supported")
    if code not in DTYPES:
        reason = "whose width differs between writers" if code in (6, 7) else "which is unknown"
        raise GptlmError(f"{path} has dtype code {code}, {reason}; token files have code 8 (uint16) or 4 (int32)")
    return np.dtype(DTYPES[code]).newbyteorder("<")


def _open_npy(prefix: str, cache: IndexCache) -> IndexedTokens:
    tokens_path, index_path = Path(f"{prefix}_ids.npy"), Path(f"{prefix}_idx.npz")
    _require(tokens_path, index_path)
    try:
        with tokens_path.open("rb") as file:
            first, shape, dtype = check_npy(file, tokens_path.stat().st_size)
        _check_ids(tokens_path, shape, dtype)
        tokens = TokenFile(tokens_path, dtype, first, shape[0])
    except GptlmError:
        raise
    except (ValueError, OSError, EOFError) as error:
        raise GptlmError(f"{tokens_path} is not a whole .npy file: {reason_of(error)}; {AGAIN}") from error
    stat = index_path.stat()

    def read() -> IndexedTokens:
        sizes, documents = load_npz(index_path, "lens", "docs")
        return _from_arrays(prefix, tokens_path, index_path, tokens, sizes, documents)

    if stat.st_size <= INDEX_IN_MEMORY or not cache.folders:
        return read()

    def unpack() -> dict[str, np.ndarray]:
        found = read()
        arrays = {name: np.asarray(getattr(found, name)) for name in ("sizes", "starts", "document_starts")}
        return {**arrays, "hash": np.frombuffer(found.sizes_hash.encode(), np.uint8)}

    arrays = cache.load_or_build(_state("arrays of", index_path, stat) | {"tokens": len(tokens)}, unpack)
    sizes, starts, documents, known = (arrays[name] for name in ("sizes", "starts", "document_starts", "hash"))
    return IndexedTokens(prefix, tokens_path, tokens, sizes, starts, documents, bytes(known[:]).decode())


def _open_npz(prefix: str) -> IndexedTokens:
    """PaddleNLP's oldest form: `ids` and `lens` in one archive, which has to be read whole."""
    path = Path(f"{prefix}_ids.npz")
    tokens, sizes = load_npz(path, "ids", "lens")
    _check_ids(path, tokens.shape, tokens.dtype)
    return _from_arrays(prefix, path, path, tokens, sizes.astype(np.int32), np.arange(len(sizes) + 1))


def _from_arrays(
    prefix: str, tokens_path: Path, index_path: Path, tokens: Ids, sizes: np.ndarray, documents: np.ndarray
) -> IndexedTokens:
    if sizes.dtype != np.int32 or sizes.ndim != 1:
        raise GptlmError(f"{index_path}: 'lens' is {sizes.dtype} of shape {sizes.shape}; expected 1-D int32")
    if documents.ndim != 1 or documents.dtype.kind not in "iu":
        raise GptlmError(f"{index_path}: 'docs' is {documents.dtype} of shape {documents.shape}; expected 1-D integers")
    if len(sizes) and int(sizes.min()) < 0:
        raise GptlmError(f"{index_path}: sequence {int(np.argmin(sizes))} has length {int(sizes.min())}; {AGAIN}")
    check_documents(index_path, documents, len(sizes))
    if (total := int(sizes.sum(dtype=np.int64))) != len(tokens):
        raise GptlmError(
            f"{tokens_path} contains {len(tokens)} tokens, {index_path} describes {total}: "
            f"the pair is not of one run; {AGAIN}"
        )
    return IndexedTokens(prefix, tokens_path, tokens, sizes, sequence_starts(sizes), documents.astype(np.int64))


def _check_ids(path: Path, shape: tuple[int, ...], dtype: np.dtype) -> None:
    if len(shape) != 1 or dtype.kind not in "iu":
        raise GptlmError(f"{path}: a {dtype} array of shape {shape}; expected 1-D integers")


def _require(*paths: Path) -> None:
    for path in paths:
        if not path.is_file():
            partner = next(other for other in paths if other is not path)
            found = f"its partner {partner.name} exists" if partner.is_file() else f"nor does {partner.name}"
            raise GptlmError(f"{path} does not exist ({found}); give the folder or prefix that preprocessing wrote")


def check_documents(path: Path, documents: Numbers, sequences: int) -> bool:
    """Whether every sequence is a document. The document index goes from 0 to `sequences` and never decreases.

    Raises:
        GptlmError: if it does not.
    """
    count = len(documents)
    if count == 0:
        raise GptlmError(f"{path}: the document index is empty, it must go from 0 to {sequences}; {AGAIN}")
    first, last = int(documents[0]), int(documents[-1])
    if first != 0:
        raise GptlmError(f"{path}: the document index starts at {first}, not at 0; {AGAIN}")
    empty, first_empty, are_documents = 0, (0, 0), count == sequences + 1
    for start in range(0, count - 1, BLOCK):
        part = documents[start : start + BLOCK + 1].astype(np.int64, copy=False)
        steps = np.diff(part)
        if int(steps.min()) < 0:
            fall = int(np.argmax(steps < 0)) + 1
            raise GptlmError(
                f"{path}: the document index decreases: document {start + fall} starts before the one before it "
                f"(at sequence {int(part[fall])} after {int(part[fall - 1])}); {AGAIN}"
            )
        if found := int((steps == 0).sum()):
            entry = int(np.argmax(steps == 0)) + 1
            first_empty = first_empty if empty else (start + entry, int(part[entry]))
            empty += found
        are_documents = are_documents and bool((steps == 1).all())
    if last != sequences:
        raise GptlmError(
            f"{path}: the document index ends at {last}, the file has {sequences} sequences "
            f"({count - 1} documents are listed); {AGAIN}, or merge its parts again"
        )
    if empty:  # megatron-core's preprocessing writes them for empty texts
        logger.warning(
            "%s: the document index repeats %d times (first at entry %d, value %d): these are documents without tokens",
            path, empty, *first_empty,
        )  # fmt: skip
    return are_documents


def sequence_starts(sizes: np.ndarray) -> np.ndarray:
    """Index of each sequence's first token, (n,) int64."""
    starts = np.zeros(len(sizes), dtype=np.int64)
    np.cumsum(sizes[:-1], dtype=np.int64, out=starts[1:])
    return starts


def id_range(ids: Ids) -> tuple[int, int]:
    """Lowest and highest of `ids`, from one pass over all of them; (0, -1) if there are none."""
    low, high = 0, -1
    for start in range(0, len(ids), SCAN_TOKENS):
        piece = ids[start : start + SCAN_TOKENS]
        low, high = min(low, int(piece.min())), max(high, int(piece.max()))
    return low, high


def first_bad_token(tokens: IndexedTokens, vocab_size: int) -> tuple[int, int, int] | None:
    """(sequence, offset in it, id) of the first id outside [0, vocab_size), or None."""
    for start in range(0, len(tokens.tokens), SCAN_TOKENS):
        piece = tokens.tokens[start : start + SCAN_TOKENS]
        bad = np.flatnonzero((piece < 0) | (piece >= vocab_size))
        if len(bad):
            position = start + int(bad[0])
            sequence = bisect_right(tokens.starts, position) - 1
            return sequence, position - int(tokens.starts[sequence]), int(piece[bad[0]])
    return None


def content_fingerprint(tokens: IndexedTokens) -> str:
    """A hash of the number of ids and of 64 evenly spaced blocks of them, independent of file format and dtype.

    The first and the last ids are included. It is a sample: a change between the blocks is not noticed.
    """
    digest = hashlib.sha256(str(len(tokens.tokens)).encode())
    last = max(0, len(tokens.tokens) - FINGERPRINT_TOKENS)
    for start in sorted({last * k // (FINGERPRINT_BLOCKS - 1) for k in range(FINGERPRINT_BLOCKS)}):
        digest.update(tokens.tokens[start : start + FINGERPRINT_TOKENS].astype("<i8").tobytes())
    return digest.hexdigest()[:16]


def full_checksum(tokens: IndexedTokens) -> str:
    """The checksum of all ids as they are stored; of a `.bin` it is what `xxh128sum` prints."""
    digest = Checksum()
    for start in range(0, len(tokens.tokens), SCAN_TOKENS):
        digest.update(np.ascontiguousarray(tokens.tokens[start : start + SCAN_TOKENS]).data)
    return digest.hexdigest()


def dtype_for(vocab_size: int) -> np.dtype:
    """The dtype in which the originals store ids: uint16 below 65500 entries, else int32."""
    return np.dtype(np.uint16 if vocab_size < UINT16_VOCABULARY else np.int32)


def metadata_path(prefix: str) -> Path:
    """The JSON beside the data with its tokenizer and counts."""
    return Path(f"{prefix}.meta.json")


def read_metadata(prefix: str) -> dict:
    """The metadata that preprocessing wrote beside `prefix`; an empty dict for data of other tools.

    Raises:
        GptlmError: if the file is damaged.
    """
    path = metadata_path(prefix)
    if not path.is_file():
        return {}
    try:
        facts = parse_json(path.read_text(encoding="utf-8"))
        if not isinstance(facts, dict):
            raise ValueError("it holds no JSON object")
        for name in ("max_id", "tokens", "vocab_size"):
            if not isinstance(facts.get(name, 0), int):
                raise ValueError(f"{name} is {facts[name]!r}")
        if not isinstance(facts.get(ALGORITHM, ""), str):
            raise ValueError(f"{ALGORITHM} is {facts[ALGORITHM]!r}")
        return facts
    except (ValueError, TypeError) as error:
        raise GptlmError(f"{path} is damaged ({error}); remove it or {AGAIN}") from error
