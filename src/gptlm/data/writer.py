"""Writing token files: no file gets its final name before everything is written."""

import json
import os
from array import array
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import IO

import numpy as np

from gptlm import owned
from gptlm.checksums import ALGORITHM, Checksum
from gptlm.data.indexed import (
    DTYPES,
    HEADER,
    MAGIC,
    TNT_HEADER,
    TNT_MAGIC,
    IndexedTokens,
    dtype_for,
    metadata_path,
    sequence_starts,
)
from gptlm.disk import make_folders, remove_empty, sync_folder
from gptlm.errors import GptlmError

COPY_TOKENS = 1 << 22  # tokens in memory at a time
LAYOUTS = ("mmap", "lazy", "cached", "npy")


def token_files(prefix: str, layout: str) -> list[Path]:
    """The files of a corpus: tokens, index, metadata."""
    suffixes = ("_ids.npy", "_idx.npz") if layout == "npy" else (".bin", ".idx")
    return [*(Path(prefix + suffix) for suffix in suffixes), metadata_path(prefix)]


class IndexedTokensWriter:
    """Writes one corpus, document by document. Memory: 4 bytes per sequence and 8 per document.

    Args:
        prefix: path without suffix.
        vocab_size: entries of the tokenizer; fixes the dtype, and every id must lie in [0, vocab_size).
        layout: "mmap" for `.bin/.idx`, "lazy" or "cached" for the same names in the TNTIDX format (whose ids are
            always int32), "npy" for `_ids.npy/_idx.npz`.
    """

    def __init__(self, prefix: str, vocab_size: int, layout: str = "mmap"):
        assert layout in LAYOUTS, layout
        self.prefix, self.vocab_size, self.layout = prefix, vocab_size, layout
        self.dtype = np.dtype(np.int32) if layout in ("lazy", "cached") else dtype_for(vocab_size)
        self.sizes = array("i")
        self.document_starts = array("q", [0])
        self.total = 0
        self.max_id = -1
        self._checksum = Checksum()
        self.tokens_path, self.index_path, _ = token_files(prefix, layout)
        self._made = make_folders(self.tokens_path.parent)
        try:
            owned.begin(self.tokens_path.parent, self._temporaries(), "preprocess")
            self._file = open(_temporary(self.tokens_path), "xb")
        except OSError:
            owned.end(self.tokens_path.parent, self._temporaries())
            remove_empty(self._made)
            raise
        if layout == "npy":
            self._file.write(self._npy_header())

    def add(self, ids: np.ndarray, lengths: Sequence[int] | np.ndarray, documents: np.ndarray | None = None) -> None:
        """Append sequences.

        Args:
            ids: (sum of lengths,) of all sequences back to back.
            documents: number of sequences of each document; None: one each.

        Raises:
            GptlmError: if an id lies outside [0, vocab_size).
        """
        if len(lengths) and max(lengths) > np.iinfo(np.int32).max:
            raise GptlmError(f"a document of {max(lengths)} tokens is too long for the format, which stores int32")
        self._write(ids)
        first = len(self.sizes)
        self.sizes.frombytes(np.asarray(lengths, np.int32).tobytes())
        ends = np.cumsum(documents) if documents is not None else np.arange(1, len(lengths) + 1)
        self.document_starts.frombytes((first + ends).astype(np.int64).tobytes())

    def copy(self, source: IndexedTokens) -> None:
        """Append all sequences and documents of another corpus.

        Raises:
            GptlmError: if an id lies outside [0, vocab_size).
        """
        for start in range(0, len(source.tokens), COPY_TOKENS):
            self._write(source.tokens[start : start + COPY_TOKENS])
        first = len(self.sizes)
        self.sizes.frombytes(source.sizes[:].astype(np.int32).tobytes())
        self.document_starts.frombytes((source.document_starts[1:].astype(np.int64) + first).tobytes())

    def _write(self, ids: np.ndarray) -> None:
        if len(ids):
            low, high = int(ids.min()), int(ids.max())
            if low < 0 or high >= self.vocab_size:
                raise GptlmError(
                    f"id {low if low < 0 else high} lies outside the vocabulary of {self.vocab_size} entries; "
                    f"ids would be stored wrongly in {self.dtype}"
                )
            self.max_id = max(self.max_id, high)
        stored = ids.astype(self.dtype).tobytes()
        self._file.write(stored)
        self._checksum.update(stored)
        self.total += len(ids)

    def finish(self, metadata: dict) -> list[Path]:
        """Write index and metadata, give all files their final names, and return their paths."""
        if self.layout == "npy":
            self._file.seek(0)
            self._file.write(self._npy_header())
        self._close()
        facts = {
            **metadata,
            "vocab_size": self.vocab_size,
            "dtype": str(self.dtype),
            "documents": len(self.document_starts) - 1,
            "tokens": self.total,
            "max_id": self.max_id,
            ALGORITHM: self._checksum.hexdigest(),
        }
        with open(_temporary(self.index_path), "xb") as file:
            self._write_index(file)
            _sync(file)
        with open(_temporary(metadata_path(self.prefix)), "xb") as file:
            # ASCII escapes: under a C locale a path can contain bytes that UTF-8 text cannot
            file.write((json.dumps(facts, indent=1) + "\n").encode())
            _sync(file)
        paths = [self.tokens_path, metadata_path(self.prefix), self.index_path]
        self.index_path.unlink(missing_ok=True)  # the index last: without it the pair does not open
        for path in paths:
            os.replace(_temporary(path), path)
            sync_folder(path.parent)
        return [self.tokens_path, self.index_path, metadata_path(self.prefix)]

    def abandon(self) -> None:
        """Remove the temporary files, and folders that were made for them."""
        with suppress(OSError):  # what is not written yet, on a full disk
            self._file.close()
        owned.end(self.tokens_path.parent, self._temporaries())
        remove_empty(self._made)

    def _temporaries(self) -> list[str]:
        return [_temporary(path).name for path in token_files(self.prefix, self.layout)]

    def _close(self) -> None:
        if not self._file.closed:
            _sync(self._file)
            self._file.close()

    def _write_index(self, file: IO[bytes]) -> None:
        sizes = np.frombuffer(self.sizes, dtype=np.int32) if self.sizes else np.empty(0, np.int32)
        documents = np.frombuffer(self.document_starts, dtype=np.int64)
        if self.layout == "npy":
            np.savez(file, lens=sizes, docs=documents)
            return
        starts = sequence_starts(sizes)
        code = next(code for code, dtype in DTYPES.items() if dtype == self.dtype)
        if self.layout == "mmap":
            file.write(MAGIC + np.array((1, code, len(sizes), len(documents)), dtype=HEADER).tobytes())
            arrays = [sizes, starts * self.dtype.itemsize, documents]
        else:
            counts = (1, code, self.dtype.itemsize, len(sizes), len(sizes), len(documents))
            file.write(TNT_MAGIC + np.array(counts, dtype=TNT_HEADER).tobytes())
            offsets = np.append(starts, np.int64(self.total))
            arrays = [np.arange(len(sizes) + 1, dtype=np.int64), offsets, sizes.astype(np.int64), documents]
        for part in arrays:
            file.write(part.tobytes())

    def _npy_header(self) -> bytes:
        """A version-1 .npy header for `total` tokens, always 128 bytes so that it can be rewritten at the end."""
        text = f"{{'descr': '{self.dtype.str}', 'fortran_order': False, 'shape': ({self.total},), }}"
        return b"\x93NUMPY\x01\x00" + (118).to_bytes(2, "little") + text.ljust(117).encode() + b"\n"


def _sync(file: IO) -> None:
    file.flush()
    os.fsync(file.fileno())


def _temporary(path: Path) -> Path:
    return path.with_name(path.name + ".incomplete")
