"""Token files on disk: Megatron's `.bin/.idx` (MMIDIDX, and TNTIDX of `lazy` and `cached`), PaddleNLP's
`_ids.npy/_idx.npz`, and its older single `_ids.npz`.

All hold the same thing: all token ids back to back, and the length of each sequence. One reader serves them; it maps
the tokens instead of loading them (the single .npz cannot be mapped). Byte layouts: Megatron-LM `indexed_dataset.py`,
PaddleNLP `paddlenlp/data`.
"""

import hashlib
import json
import logging
import os
import zipfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from gptlm.errors import GptlmError, reason_of

logger = logging.getLogger(__name__)

MAGIC = b"MMIDIDX\x00\x00"
HEADER = np.dtype([("version", "<u8"), ("dtype", "u1"), ("sequences", "<u8"), ("documents", "<u8")])
TNT_MAGIC = b"TNTIDX\x00\x00"
TNT_HEADER = np.dtype([(name, "<u8") for name in ("version", "dtype", "width", "items", "sizes", "documents")])
TNT_START = len(TNT_MAGIC) + TNT_HEADER.itemsize  # 56 bytes
START = len(MAGIC) + HEADER.itemsize  # 34 bytes
# Codes 6 and 7 are floats whose width differs from writer to writer; no text corpus has them.
DTYPES = {1: np.uint8, 2: np.int8, 3: np.int16, 4: np.int32, 5: np.int64, 8: np.uint16}
UINT16_VOCABULARY = 65500  # below this many entries every id fits uint16 with room, as in the originals
BLOCKS, BLOCK_TOKENS = 64, 2048  # of the ids that their fingerprint looks at
SCAN_TOKENS = 1 << 24  # tokens looked at in one piece when ids are checked


@dataclass(frozen=True)
class IndexedTokens:
    """A corpus on disk.

    Attributes:
        prefix: the path without suffix, as the user gave it.
        path: the file that holds the ids.
        tokens: (total,) memory-mapped ids of dtype uint8, int8, int16, uint16, int32 or int64.
        sizes: (n,) int32, tokens of each sequence. The originals shuffle and split sequences, and so do we;
            preprocessing without sentence splitting makes one sequence per document.
        starts: (n,) int64, index into `tokens` of each sequence's first token.
        document_starts: (documents + 1,) int64, index of each document's first sequence, then n.
    """

    prefix: str
    path: Path
    tokens: np.ndarray
    sizes: np.ndarray
    starts: np.ndarray
    document_starts: np.ndarray

    def __len__(self) -> int:
        return len(self.sizes)

    def get(self, sequence: int, offset: int = 0, length: int | None = None) -> np.ndarray:
        """View of the tokens [offset, offset + length) of one sequence; `length` None means to its end."""
        start = int(self.starts[sequence]) + offset
        rest = int(self.sizes[sequence]) - offset
        return self.tokens[start : start + (rest if length is None else min(length, rest))]


def open_tokens(prefix: str) -> IndexedTokens:
    """Open `prefix`; the npy/npz pair wins where several formats exist, as in PaddleNLP, then the single .npz.

    Raises:
        GptlmError: if files are missing, damaged, or not of one run.
    """
    formats = [name for name in ("_ids.npy", "_ids.npz", ".bin") if os.path.exists(prefix + name)]
    if len(formats) > 1:
        logger.warning("%s exists in several formats (%s): %s is read", prefix, ", ".join(formats), formats[0])
    if os.path.exists(f"{prefix}_ids.npy") or os.path.exists(f"{prefix}_idx.npz"):
        return _open_npy(prefix)
    if os.path.exists(f"{prefix}_ids.npz"):
        return _open_npz(prefix)
    return _open_bin(prefix)


def _open_bin(prefix: str) -> IndexedTokens:
    index_path, tokens_path = Path(f"{prefix}.idx"), Path(f"{prefix}.bin")
    _require(index_path, tokens_path)
    with open(index_path, "rb") as file:
        is_tnt = file.read(len(TNT_MAGIC)) == TNT_MAGIC
    return (_open_tnt if is_tnt else _open_mmap)(prefix, index_path, tokens_path)


def _open_mmap(prefix: str, index_path: Path, tokens_path: Path) -> IndexedTokens:
    index_size = index_path.stat().st_size
    if index_size < START:
        raise GptlmError(f"{index_path} is {index_size} bytes long, an index has at least {START}; preprocess again")
    raw: np.ndarray = np.memmap(index_path, dtype=np.uint8, mode="r")
    if raw[: len(MAGIC)].tobytes() != MAGIC:
        raise GptlmError(
            f"{index_path} starts with {raw[:9].tobytes()!r}, not with {MAGIC!r}: it is no MMIDIDX index "
            "(are .bin and .idx swapped?)"
        )
    header: Any = raw[len(MAGIC) : START].view(HEADER)[0]
    dtype = _dtype_of(index_path, int(header["version"]), int(header["dtype"]))
    n, m = int(header["sequences"]), int(header["documents"])
    expected = START + 12 * n + 8 * m
    if index_size not in (expected, expected + n):  # + n: one mode byte per sequence of multimodal writers
        raise GptlmError(
            f"{index_path} is {index_size} bytes long, its header announces {expected} "
            f"({n} sequences, {m} document entries): the file was cut short or damaged; preprocess again"
        )
    sizes = raw[START : START + 4 * n].view("<i4")
    pointers = raw[START + 4 * n : START + 12 * n].view("<i8")
    documents = raw[START + 12 * n : expected].view("<i8")
    _check_sizes(index_path, sizes)
    _check_documents(index_path, documents, n)
    starts = sequence_starts(sizes)
    if not np.array_equal(starts * dtype.itemsize, pointers):
        raise GptlmError(f"{index_path}: the byte pointers are not the running sum of the lengths; preprocess again")
    return IndexedTokens(
        prefix, tokens_path, _map_tokens(tokens_path, index_path, dtype, sizes), sizes, starts, documents
    )


def _open_tnt(prefix: str, index_path: Path, tokens_path: Path) -> IndexedTokens:
    """fairseq's format with Megatron's document index; each item is one sequence."""
    raw: np.ndarray = np.memmap(index_path, dtype=np.uint8, mode="r")
    if len(raw) < TNT_START:
        raise GptlmError(f"{index_path} is {len(raw)} bytes long, an index has at least {TNT_START}; preprocess again")
    header: Any = raw[len(TNT_MAGIC) : TNT_START].view(TNT_HEADER)[0]
    dtype = _dtype_of(index_path, int(header["version"]), int(header["dtype"]))
    n, m = int(header["items"]), int(header["documents"])
    expected = TNT_START + 8 * (2 * (n + 1) + n + m)
    if int(header["sizes"]) != n or int(header["width"]) != dtype.itemsize or len(raw) != expected:
        raise GptlmError(
            f"{index_path} is {len(raw)} bytes long, its header announces {expected} ({n} items of one size each): "
            "the file was cut short or damaged; preprocess again"
        )
    offsets = raw[TNT_START + 8 * (n + 1) : TNT_START + 16 * (n + 1)].view("<i8")
    wide = raw[TNT_START + 16 * (n + 1) : TNT_START + 16 * (n + 1) + 8 * n].view("<i8")
    _check_sizes(index_path, wide)
    sizes = wide.astype(np.int32)
    starts = sequence_starts(sizes)
    if not np.array_equal(starts, offsets[:-1]):
        raise GptlmError(f"{index_path}: the offsets are not the running sum of the lengths; preprocess again")
    documents = raw[expected - 8 * m :].view("<i8")
    _check_documents(index_path, documents, n)
    return IndexedTokens(
        prefix, tokens_path, _map_tokens(tokens_path, index_path, dtype, sizes), sizes, starts, documents
    )


def _map_tokens(tokens_path: Path, index_path: Path, dtype: np.dtype, sizes: np.ndarray) -> np.ndarray:
    wanted, found = int(sizes.sum(dtype=np.int64)) * dtype.itemsize, tokens_path.stat().st_size
    if wanted != found:
        raise GptlmError(
            f"{tokens_path} is {found} bytes long, {index_path} describes {wanted}: "
            "the pair is not of one run or was cut short; preprocess again"
        )
    return np.memmap(tokens_path, dtype=dtype, mode="r") if found else np.empty(0, dtype)


def _dtype_of(path: Path, version: int, code: int) -> np.dtype:
    if version != 1:
        raise GptlmError(f"{path} has format version {version}, this reader knows version 1")
    if code not in DTYPES:
        reason = "whose width differs between writers" if code in (6, 7) else "which is unknown"
        raise GptlmError(f"{path} has dtype code {code}, {reason}; token files have code 8 (uint16) or 4 (int32)")
    return np.dtype(DTYPES[code]).newbyteorder("<")


def _open_npy(prefix: str) -> IndexedTokens:
    tokens_path, index_path = Path(f"{prefix}_ids.npy"), Path(f"{prefix}_idx.npz")
    _require(tokens_path, index_path)
    try:
        tokens = np.load(tokens_path, mmap_mode="r", allow_pickle=False)
        if not isinstance(tokens, np.ndarray):
            raise ValueError("it is a .npz file")
    except (ValueError, OSError, EOFError) as error:
        raise GptlmError(f"{tokens_path} is no whole .npy file: {reason_of(error)}; preprocess again") from error
    try:
        index = np.load(index_path, allow_pickle=False)
        if not isinstance(index, np.lib.npyio.NpzFile):
            raise ValueError("it is a .npy file")
        with index:
            sizes, documents = index["lens"], index["docs"]
    except KeyError as error:
        raise GptlmError(f"{index_path} lacks an array: {error.args[0]}; it should hold 'lens' and 'docs'") from error
    except (ValueError, OSError, EOFError, zipfile.BadZipFile) as error:
        raise GptlmError(f"{index_path} is no whole .npz file: {reason_of(error)}; preprocess again") from error
    return _arrays(prefix, tokens_path, index_path, tokens, sizes, documents)


def _open_npz(prefix: str) -> IndexedTokens:
    """PaddleNLP's oldest form: `ids` and `lens` in one archive, which has to be read whole."""
    path = Path(f"{prefix}_ids.npz")
    try:
        with np.load(path, allow_pickle=False) as archive:
            tokens, sizes = archive["ids"], archive["lens"].astype(np.int32)
    except KeyError as error:
        raise GptlmError(f"{path} lacks an array: {error.args[0]}; it should hold 'ids' and 'lens'") from error
    except (ValueError, OSError, EOFError, TypeError, zipfile.BadZipFile) as error:
        raise GptlmError(f"{path} is no whole .npz file: {reason_of(error)}; preprocess again") from error
    return _arrays(prefix, path, path, tokens, sizes, np.arange(len(sizes) + 1))


def _arrays(
    prefix: str, tokens_path: Path, index_path: Path, tokens: np.ndarray, sizes: np.ndarray, documents: np.ndarray
) -> IndexedTokens:
    if tokens.ndim != 1 or tokens.dtype.kind not in "iu":
        raise GptlmError(f"{tokens_path} holds a {tokens.dtype} array of shape {tokens.shape}; expected 1-D integers")
    if sizes.dtype != np.int32 or sizes.ndim != 1:
        raise GptlmError(f"{index_path}: 'lens' is {sizes.dtype} of shape {sizes.shape}; expected 1-D int32")
    if documents.ndim != 1 or documents.dtype.kind not in "iu":
        raise GptlmError(f"{index_path}: 'docs' is {documents.dtype} of shape {documents.shape}; expected 1-D integers")
    _check_sizes(index_path, sizes)
    _check_documents(index_path, documents, len(sizes))
    if (total := int(sizes.sum(dtype=np.int64))) != len(tokens):
        raise GptlmError(
            f"{tokens_path} holds {len(tokens)} tokens, {index_path} describes {total}: "
            "the pair is not of one run; preprocess again"
        )
    return IndexedTokens(prefix, tokens_path, tokens, sizes, sequence_starts(sizes), documents.astype(np.int64))


def _require(*paths: Path) -> None:
    for path in paths:
        if not path.is_file():
            partner = next(other for other in paths if other is not path)
            beside = f"its partner {partner.name} is there" if partner.is_file() else f"{partner.name} neither"
            raise GptlmError(f"{path} does not exist ({beside}); give the folder or prefix preprocessing wrote")


def _check_sizes(path: Path, sizes: np.ndarray) -> None:
    if len(sizes) and int(sizes.min()) < 0:
        raise GptlmError(f"{path}: sequence {int(np.argmin(sizes))} has length {int(sizes.min())}; preprocess again")


def _check_documents(path: Path, documents: np.ndarray, sequences: int) -> None:
    """The document index runs from 0 to `sequences` and never goes back. An entry that repeats is a document without
    tokens, as megatron-core's preprocessing writes for empty texts."""
    if len(documents) == 0:
        raise GptlmError(f"{path}: the document index is empty, it must run from 0 to {sequences}; preprocess again")
    first, last = int(documents[0]), int(documents[-1])
    if first != 0:
        raise GptlmError(f"{path}: the document index starts at {first}, not at 0; preprocess again")
    steps = np.diff(documents.astype(np.int64, copy=False))
    if len(steps) and int(steps.min()) < 0:
        fall = int(np.argmax(steps < 0)) + 1
        raise GptlmError(
            f"{path}: the document index goes back: document {fall} begins before the one before it (at sequence "
            f"{int(documents[fall])} after {int(documents[fall - 1])}); preprocess again"
        )
    if last != sequences:
        raise GptlmError(
            f"{path}: the document index ends at {last}, the file has {sequences} sequences "
            f"({len(documents) - 1} documents are listed); preprocess again, or merge its parts again"
        )
    if empty := int((steps == 0).sum()):
        entry = int(np.argmax(steps == 0)) + 1
        logger.warning(
            "%s: the document index repeats %d times (first at entry %d, value %d): these are documents without tokens",
            path, empty, entry, int(documents[entry]),
        )  # fmt: skip


def sequence_starts(sizes: np.ndarray) -> np.ndarray:
    starts = np.zeros(len(sizes), dtype=np.int64)
    np.cumsum(sizes[:-1], dtype=np.int64, out=starts[1:])
    return starts


def id_range(tokens: IndexedTokens) -> tuple[int, int]:
    """Smallest and largest id of the corpus, found by reading all of it once; (0, -1) when it is empty."""
    low, high = 0, -1
    for start in range(0, len(tokens.tokens), SCAN_TOKENS):
        piece = tokens.tokens[start : start + SCAN_TOKENS]
        low, high = min(low, int(piece.min())), max(high, int(piece.max()))
    return low, high


def content_fingerprint(tokens: IndexedTokens) -> str:
    """A hash of the number of ids and of 64 evenly spaced blocks of them, whatever the format they are stored in."""
    digest = hashlib.sha256(str(len(tokens.tokens)).encode())
    last = max(0, len(tokens.tokens) - BLOCK_TOKENS)
    for start in sorted({last * k // (BLOCKS - 1) for k in range(BLOCKS)}):
        digest.update(tokens.tokens[start : start + BLOCK_TOKENS].astype("<i8").tobytes())
    return digest.hexdigest()[:16]


def first_bad_token(tokens: IndexedTokens, vocab_size: int) -> tuple[int, int, int] | None:
    """(sequence, offset in it, id) of the first id outside [0, vocab_size), or None."""
    for start in range(0, len(tokens.tokens), SCAN_TOKENS):
        piece = tokens.tokens[start : start + SCAN_TOKENS]
        bad = np.flatnonzero((piece < 0) | (piece >= vocab_size))
        if len(bad):
            position = start + int(bad[0])
            sequence = int(np.searchsorted(tokens.starts, position, side="right")) - 1
            return sequence, position - int(tokens.starts[sequence]), int(piece[bad[0]])
    return None


def dtype_for(vocab_size: int) -> np.dtype:
    """The dtype the originals store ids in: uint16 below 65500 entries, else int32."""
    return np.dtype(np.uint16 if vocab_size < UINT16_VOCABULARY else np.int32)


def metadata_path(prefix: str) -> Path:
    """The JSON beside the data that names its tokenizer."""
    return Path(f"{prefix}.meta.json")


def read_metadata(prefix: str) -> dict:
    """What preprocessing noted about `prefix`; an empty dict for data of other tools."""
    path = metadata_path(prefix)
    if not path.is_file():
        return {}
    try:
        facts = dict(json.loads(path.read_text(encoding="utf-8")))
        for name in ("max_id", "tokens", "vocab_size"):
            if not isinstance(facts.get(name, 0), int):
                raise ValueError(f"{name} is {facts[name]!r}")
        return facts
    except (ValueError, TypeError) as error:
        raise GptlmError(f"{path} is damaged ({error}); remove it or preprocess again") from error
