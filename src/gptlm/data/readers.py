"""The documents of one file, in order. Reading is streaming and cheap; parsing is left to `corpus.texts_of`.

A file can be cut for several machines: `span` is a range of its bytes, and a document belongs to the range it begins
in. Lines and rows of a dataset are cut anywhere; compressed files, .parquet, JSON arrays and .txt with longer
documents are taken whole by whoever has their first byte.
"""

import gzip
import io
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, BinaryIO

import zstandard

from gptlm.errors import GptlmError, reason_of

COMPRESSED = (".gz", ".zst")
BATCH_BYTES = 1 << 18
ROWS = 512  # rows of a table in one batch
UTF8_MARK = b"\xef\xbb\xbf"

Span = tuple[int, int]


@dataclass(frozen=True)
class Batch:
    """Some consecutive documents of one file.

    Attributes:
        file: the path, for messages.
        numbers: line number (or position in an array or table) of each document, counted from byte `skipped`; only
            the first one where lines are still to be split.
        records: bytes of a JSON line, an object of a JSON array or table, or bytes of plain text; instead of a list
            whole lines still to be split, blank ones among them, as bytes or as a range of the file's bytes.
        is_text: records are plain text.
        read: bytes of the file consumed since the previous batch, as they lie on disk.
        skipped: bytes of the file before what `numbers` count.
    """

    file: str
    numbers: Sequence[int]
    records: list[Any] | bytes | Span
    is_text: bool
    read: int
    skipped: int = 0


def split_lines(batch: Batch) -> Batch:
    """`batch` with its lines in a list; left to the workers, so that one process can keep many busy.

    Raises:
        GptlmError: if the file cannot be read any more.
    """
    if isinstance(batch.records, list):
        return batch
    content = batch.records
    if isinstance(content, tuple):
        try:
            with open(batch.file, "rb") as file:
                file.seek(content[0])
                size = content[1] - content[0]
                content = file.read(size)
        except OSError as error:
            raise GptlmError(f"cannot read {batch.file}: {reason_of(error)}") from error
        if len(content) < size:
            raise GptlmError(f"{batch.file} became shorter while it was read; preprocess it again when it is whole")
    lines = [(number, line) for number, line in enumerate(content.split(b"\n"), start=batch.numbers[0]) if line.strip()]
    return replace(batch, numbers=[number for number, _ in lines], records=[line for _, line in lines])


def is_dataset(path: Path) -> bool:
    """Whether `path` is a folder that `datasets.Dataset.save_to_disk` wrote."""
    return (path / "state.json").is_file() and (path / "dataset_info.json").is_file()


def size_of(file: Path) -> int:
    """Bytes on disk of a file, or of all files of a dataset folder."""
    if file.is_dir():
        return sum(part.stat().st_size for part in file.iterdir() if part.is_file())
    return file.stat().st_size


def read_file(file: Path, kind: str, txt_split: str, keys: Sequence[str], span: Span) -> Iterator[Batch]:
    """The documents of `file` that begin in `span`.

    Args:
        kind: ".jsonl", ".json", ".txt", ".parquet" or "dataset".
        keys: columns of a table that are wanted.

    Raises:
        GptlmError: if the file is no text, or a table lacks a column.
        OSError and others: if the file is cut or damaged.
    """
    if kind == "dataset":
        yield from _read_dataset(file, keys, span)
    elif kind == ".parquet":
        yield from _read_parquet(file, keys) if span[0] == 0 else ()
    else:
        yield from _read_stream(file, kind, txt_split, span)


def _read_stream(file: Path, kind: str, txt_split: str, span: Span) -> Iterator[Batch]:
    with open(file, "rb") as raw:
        stream = _open(raw, file)
        _skip_mark(stream, file)
        array = kind == ".json" and _starts_array(stream)
        by_line = stream is raw and not array and (kind != ".txt" or txt_split == "line")
        if span[0] > 0 and not by_line:
            return
        if span[0] > 0:
            raw.seek(span[0] - 1)
            raw.readline()  # the rest of a line that begins before the span
        skipped = raw.tell() if span[0] > 0 else 0
        # a mark is part of the first line, which belongs to the shard of byte 0 even where a cut falls into the mark
        end = (max(span[1], raw.tell() + 1) if span[0] == 0 else span[1]) if by_line else None
        if array:
            yield from _batched(_array_documents(stream, file), str(file), False, raw, skipped)
        elif kind == ".txt":
            yield from _batched(_plain_documents(_lines(stream, end), txt_split), str(file), True, raw, skipped)
        elif end is not None:
            yield from _line_ranges(raw, str(file), end)
        else:
            yield from _line_batches(stream, str(file), raw)


def _line_ranges(raw: BinaryIO, file: str, end: int) -> Iterator[Batch]:
    """The lines that begin before byte `end`, as ranges of the file: who parses them also reads them."""
    begins = raw.tell()
    while begins < end:
        raw.seek(min(begins + BATCH_BYTES, end) - 1)
        raw.readline()
        ends = raw.tell()
        if ends < min(begins + BATCH_BYTES, end):
            raise GptlmError(f"{file} became shorter while it was read; preprocess it again when it is whole")
        yield Batch(file, [1], (begins, ends), False, ends - begins, begins)
        begins = ends


def _line_batches(stream: io.BufferedReader, file: str, raw: BinaryIO) -> Iterator[Batch]:
    """Whole lines of a compressed file in large pieces."""
    number, position = 1, 0
    while piece := stream.read(BATCH_BYTES):
        piece += b"" if piece.endswith(b"\n") else stream.readline()
        yield Batch(file, [number], piece, False, raw.tell() - position)
        number, position = number + piece.count(b"\n"), raw.tell()


def _lines(stream: io.BufferedReader, end: int | None) -> Iterator[tuple[int, bytes]]:
    """Numbered lines, as far as they begin before byte `end`."""
    begins = stream.tell() if end is not None else 0
    for number, line in enumerate(stream, start=1):
        if end is not None and begins >= end:
            return
        begins += len(line)
        yield number, line


def _read_parquet(file: Path, keys: Sequence[str]) -> Iterator[Batch]:
    import pyarrow.parquet  # heavy, and few corpora need it

    first, left = 1, file.stat().st_size
    try:
        with pyarrow.parquet.ParquetFile(file) as table:
            _require_columns(file, keys, table.schema_arrow.names)
            share = left // max(1, -(-table.metadata.num_rows // ROWS))
            for rows in table.iter_batches(ROWS, columns=list(keys)):
                records = rows.to_pylist()
                yield Batch(str(file), list(range(first, first + len(records))), records, False, share)
                first, left = first + len(records), left - share
    except pyarrow.ArrowException as error:
        raise OSError(str(error)) from error
    yield Batch(str(file), [], [], False, left)


def _read_dataset(folder: Path, keys: Sequence[str], span: Span) -> Iterator[Batch]:
    import pyarrow
    from datasets import Dataset  # heavy, and few corpora need it

    size = max(1, size_of(folder))
    try:
        try:
            table = Dataset.load_from_disk(str(folder))
        except IndexError:  # how `datasets` meets one without rows
            return
        _require_columns(folder, keys, table.column_names)
        first, last = (-(-edge * len(table) // size) for edge in span)  # row i lies at byte i x size / rows
        if first >= last:
            return
        rows = table.select_columns(list(keys)).select(range(first, last))
        for start in range(0, len(rows), ROWS):
            columns = rows[start : start + ROWS]
            records = [dict(zip(columns, row, strict=True)) for row in zip(*columns.values(), strict=True)]
            numbers = list(range(first + start + 1, first + start + 1 + len(records)))
            yield Batch(str(folder), numbers, records, False, len(records) * size // max(1, len(table)))
    except (ValueError, KeyError, pyarrow.ArrowException) as error:
        if isinstance(error, GptlmError):
            raise
        raise OSError(str(error)) from error


def _require_columns(file: Path, keys: Sequence[str], columns: Sequence[str]) -> None:
    for key in keys:
        if key not in columns:
            raise GptlmError(f"{file}: no column {key!r}, only {sorted(columns)[:8]}; name it with --json_key")


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
    content = stream.read()
    try:
        documents = json.loads(content)
    except UnicodeDecodeError as error:
        line = content.count(b"\n", 0, error.start) + 1
        raise GptlmError(
            f"{file}, line {line}: not UTF-8 (byte {content[error.start : error.start + 1].hex()}); convert the file, "
            "for example `iconv -f GB18030 -t UTF-8`"
        ) from error
    except (ValueError, RecursionError) as error:
        raise GptlmError(f"{file}: broken JSON array: {error}") from error
    yield from enumerate(documents, start=1)


def _plain_documents(lines: Iterator[tuple[int, bytes]], txt_split: str) -> Iterator[tuple[int, bytes]]:
    pending: list[bytes] = []
    first = 1
    for number, line in lines:
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


def _batched(
    documents: Iterator[tuple[int, Any]], file: str, is_text: bool, raw: BinaryIO, skipped: int
) -> Iterator[Batch]:
    numbers: list[int] = []
    records: list[Any] = []
    size, position = 0, skipped
    for number, record in documents:
        numbers.append(number)
        records.append(record)
        size += len(record) if isinstance(record, bytes) else 1 << 10
        if size >= BATCH_BYTES:
            yield Batch(file, numbers, records, is_text, raw.tell() - position, skipped)
            numbers, records, size, position = [], [], 0, raw.tell()
    yield Batch(file, numbers, records, is_text, raw.tell() - position, skipped)
