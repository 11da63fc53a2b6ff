"""Texts on disk, read as batches of documents: .jsonl, .json, .txt, each also as .gz or .zst, and .parquet.

Reading is streaming and cheap; parsing a batch is left to `texts_of`, which worker processes may call.
"""

import glob
import gzip
import io
import json
import os
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import zstandard

from gptlm.errors import GptlmError

SUFFIXES = (".jsonl", ".json", ".txt", ".parquet")
COMPRESSED = (".gz", ".zst")
BATCH_BYTES = 1 << 18
PARQUET_ROWS = 512
UTF8_MARK = b"\xef\xbb\xbf"


@dataclass(frozen=True)
class Batch:
    """Some consecutive documents of one file.

    Attributes:
        file: the path, for messages.
        numbers: line number (or position in a JSON array) of each document.
        records: bytes of a JSON line, an object of a JSON array, or bytes of plain text.
        is_text: records are plain text.
        read: bytes of the file consumed since the previous batch, as they lie on disk.
    """

    file: str
    numbers: list[int]
    records: list[Any]
    is_text: bool
    read: int


def list_files(path: str) -> list[Path]:
    """The readable files behind a file, a folder (recursive) or a glob, sorted by name.

    Raises:
        GptlmError: if there are none, or a single named file has another ending.
    """
    if os.path.isfile(path):
        if _kind(Path(path)) is None:
            raise GptlmError(f"{path}: cannot tell its format; expected an ending of {_endings()}")
        return [Path(path)]
    if os.path.isdir(path):
        found = [file for file in Path(path).rglob("*") if file.is_file() and not _is_ours(file)]
    else:
        found = [Path(name) for name in glob.glob(path, recursive=True) if os.path.isfile(name)]
    files = sorted(file for file in found if _kind(file) is not None)
    if not files:
        what = f"{len(found)} files, none" if found else "no file"
        raise GptlmError(f"{path}: {what} ending in {_endings()}; give a file, a folder or a quoted glob")
    return files


def read_batches(files: Sequence[Path], txt_split: str = "blank_line") -> Iterator[Batch]:
    """All documents of `files` in order.

    Args:
        txt_split: what ends a document in a .txt file: "blank_line", "line" or "file".

    Raises:
        GptlmError: naming the file (and line) that cannot be read.
    """
    for file in files:
        try:
            yield from _read_file(file, txt_split)
        except (OSError, EOFError, zlib.error, zstandard.ZstdError) as error:
            raise GptlmError(f"cannot read {file}: {error}; is the file whole?") from error


def texts_of(batch: Batch, keys: Sequence[str]) -> list[tuple[str, ...]]:
    """The texts under `keys` of each document of `batch`; plain text serves every key.

    Raises:
        GptlmError: naming file and line of bytes that are not UTF-8, broken JSON, or a missing key.
    """
    return [_texts_of_record(batch, number, keys) for number in range(len(batch.records))]


def good_texts_of(batch: Batch, keys: Sequence[str]) -> tuple[list[tuple[str, ...]], list[str]]:
    """As `texts_of`, but a bad document is left out; also returns what is wrong with each of those."""
    texts, bad = [], []
    for number in range(len(batch.records)):
        try:
            texts.append(_texts_of_record(batch, number, keys))
        except GptlmError as error:
            bad.append(str(error))
    return texts, bad


def read_texts(path: str, key: str = "text", txt_split: str = "blank_line") -> Iterator[str]:
    """The texts under `key` of every document behind `path`, one after the other."""
    for batch in read_batches(list_files(path), txt_split):
        for (text,) in texts_of(batch, [key]):
            yield text


def _texts_of_record(batch: Batch, i: int, keys: Sequence[str]) -> tuple[str, ...]:
    record = batch.records[i]
    place = f"{batch.file}, {'document' if isinstance(record, dict) else 'line'} {batch.numbers[i]}"
    if isinstance(record, bytes):
        record = _decode(record, place)
    if not batch.is_text and isinstance(record, str):
        record = _parse_line(record, place)
    return (record,) * len(keys) if batch.is_text else _select(record, keys, place)


def _kind(file: Path) -> str | None:
    name = file.name.lower()
    for ending in COMPRESSED:
        name = name.removesuffix(ending)
    return next((suffix for suffix in SUFFIXES if name.endswith(suffix)), None)


def _is_ours(file: Path) -> bool:
    """JSON that preprocessing and training leave beside the data is no text."""
    return file.name.endswith(".meta.json") or "index-cache" in file.parts


def _endings() -> str:
    return ", ".join(SUFFIXES) + " (text also with .gz or .zst)"


def _read_file(file: Path, txt_split: str) -> Iterator[Batch]:
    kind = _kind(file)
    if kind == ".parquet":
        yield from _read_parquet(file)
        return
    with open(file, "rb") as raw:
        stream = _open(raw, file)
        _skip_mark(stream, file)
        if kind == ".txt":
            documents, is_text = _plain_documents(stream, txt_split), True
        elif kind == ".json" and _starts_array(stream):
            documents, is_text = _array_documents(stream, file), False
        else:
            lines = enumerate(stream, start=1)
            documents, is_text = ((n, line) for n, line in lines if line.strip()), False
        yield from _batched(documents, str(file), is_text, raw)


def _read_parquet(file: Path) -> Iterator[Batch]:
    import pyarrow.parquet  # heavy, and few corpora need it

    first, left = 1, file.stat().st_size
    try:
        with pyarrow.parquet.ParquetFile(file) as table:
            share = left // max(1, -(-table.metadata.num_rows // PARQUET_ROWS))
            for rows in table.iter_batches(PARQUET_ROWS):
                records = rows.to_pylist()
                yield Batch(str(file), list(range(first, first + len(records))), records, False, share)
                first, left = first + len(records), left - share
    except pyarrow.ArrowException as error:
        raise OSError(str(error)) from error
    yield Batch(str(file), [], [], False, left)


def _open(raw: BinaryIO, file: Path) -> io.BufferedReader:
    if file.name.lower().endswith(".gz"):
        return io.BufferedReader(gzip.GzipFile(fileobj=raw))  # type: ignore[arg-type]
    if file.name.lower().endswith(".zst"):
        return io.BufferedReader(_ZstdReader(raw))
    return raw  # type: ignore[return-value]


class _ZstdReader(io.RawIOBase):
    """Decompressed bytes of one frame after the other; unlike zstandard's own reader it notices a cut file."""

    def __init__(self, raw: BinaryIO):
        self.raw = raw
        self.frame: Any = None  # the frame being read
        self.ready = b""

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        while not self.ready:
            chunk = (self.frame.unused_data if self.frame and self.frame.eof else b"") or self.raw.read(1 << 17)
            if not chunk:
                if self.frame is not None and not self.frame.eof:
                    raise EOFError("the compressed data ends in the middle")
                return 0
            if self.frame is None or self.frame.eof:
                self.frame = zstandard.ZstdDecompressor().decompressobj()
            self.ready = self.frame.decompress(chunk)
        size = min(len(buffer), len(self.ready))
        buffer[:size], self.ready = self.ready[:size], self.ready[size:]
        return size


def _skip_mark(stream: io.BufferedReader, file: Path) -> None:
    start = stream.peek(4)[:4]
    if start.startswith((b"\xff\xfe", b"\xfe\xff")):
        raise GptlmError(
            f"{file}, line 1: the file is UTF-16; convert it with "
            f"`iconv -f UTF-16 -t UTF-8 {file.name} > utf8{file.suffix}`"
        )
    if start.startswith(UTF8_MARK):
        stream.read(len(UTF8_MARK))


def _starts_array(stream: io.BufferedReader) -> bool:
    return stream.peek(1 << 12).lstrip()[:1] == b"["


def _array_documents(stream: io.BufferedReader, file: Path) -> Iterator[tuple[int, Any]]:
    try:
        documents = json.loads(stream.read())
    except UnicodeDecodeError as error:
        raise GptlmError(f"{file}: not UTF-8 at byte {error.start}; convert the file to UTF-8") from error
    except ValueError as error:
        raise GptlmError(f"{file}: broken JSON array: {error}") from error
    yield from enumerate(documents, start=1)


def _plain_documents(stream: io.BufferedReader, txt_split: str) -> Iterator[tuple[int, bytes]]:
    pending: list[bytes] = []
    first = 1
    for number, line in enumerate(stream, start=1):
        line = line.removesuffix(b"\n").removesuffix(b"\r")
        if txt_split == "line" or (txt_split == "blank_line" and not line.strip()):
            if txt_split == "line":
                pending, first = [line], number
            if any(part.strip() for part in pending):
                yield first, b"\n".join(pending)
            pending = []
            continue
        if not pending:
            first = number
        pending.append(line)
    if any(part.strip() for part in pending):
        yield first, b"\n".join(pending)


def _batched(documents: Iterator[tuple[int, Any]], file: str, is_text: bool, raw: BinaryIO) -> Iterator[Batch]:
    numbers: list[int] = []
    records: list[Any] = []
    size, position = 0, 0
    for number, record in documents:
        numbers.append(number)
        records.append(record)
        size += len(record) if isinstance(record, bytes) else 1 << 10
        if size >= BATCH_BYTES:
            yield Batch(file, numbers, records, is_text, raw.tell() - position)
            numbers, records, size, position = [], [], 0, raw.tell()
    yield Batch(file, numbers, records, is_text, raw.tell() - position)


def _decode(record: bytes, place: str) -> str:
    if b"\x00" in record:
        raise GptlmError(
            f"{place}: NUL bytes, so it is no UTF-8 text; convert it, for example `iconv -f UTF-16LE -t UTF-8`"
        )
    try:
        return record.decode("utf-8")
    except UnicodeDecodeError as error:
        raise GptlmError(
            f"{place}: not UTF-8 (byte {record[error.start : error.start + 1].hex()} at column {error.start + 1}); "
            "convert the file, for example `iconv -f GB18030 -t UTF-8`"
        ) from error


def _parse_line(line: str, place: str) -> Any:
    try:
        return json.loads(line)
    except json.JSONDecodeError as error:
        raise GptlmError(
            f"{place}: broken JSON at column {error.colno}: {error.msg}; "
            'expected one object per line like {"text": ...}'
        ) from error
    except RecursionError as error:
        raise GptlmError(f"{place}: the JSON is nested too deeply") from error


def _select(record: Any, keys: Sequence[str], place: str) -> tuple[str, ...]:
    if not isinstance(record, dict):
        raise GptlmError(f'{place}: {type(record).__name__} instead of an object like {{"text": ...}}')
    for key in keys:
        if not isinstance(record.get(key), str):
            found = f"a {type(record[key]).__name__}" if key in record else f"only the keys {sorted(record)[:8]}"
            raise GptlmError(f"{place}: no text under {key!r}, found {found}; name the key with --json_key")
    return tuple(_whole_characters(record[key]) for key in keys)


def _whole_characters(text: str) -> str:
    """JSON can spell half a character (a lone surrogate, common in web data), which no encoding has: U+FFFD."""
    if text.isascii():
        return text
    return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
