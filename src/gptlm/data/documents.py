"""The documents of a corpus in batches, which worker processes parse: reading is streaming and cheap.

A shard is a range of bytes of all files end to end; a document belongs to the shard in which it begins. Lines and rows
of a dataset can be cut anywhere. Compressed files, .parquet, JSON arrays and .txt files with documents of several lines
are read whole by the shard that has their first byte.
"""

import io
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

import zstandard

from gptlm.data.json_arrays import BrokenArrayError, array_parts
from gptlm.data.text_files import (
    BOM,
    check_text,
    decode,
    decompressed,
    format_of,
    list_files,
    not_utf8,
    parse_array,
    parse_line,
    refuse_utf16,
    size_of,
)
from gptlm.errors import GptlmError, reason_of
from gptlm.json_text import parse_json

if TYPE_CHECKING:
    from datasets import Dataset

BATCH_BYTES = 1 << 18
BATCH_ROWS = 512  # of a table

Span = tuple[int, int]


@dataclass(frozen=True)
class Batch:
    """Consecutive documents of one file.

    Attributes:
        file: the path, for messages.
        numbers: line number (or position in an array or table, from 1) of each document, counted from byte `skipped`;
            only the first where lines are not split yet.
        records: bytes of a JSON line, an object of a JSON array or table, or bytes of plain text. Instead of a list
            it can be whole lines (or items of an array) that are not split yet, as bytes or as a range of the file's
            bytes.
        is_text: records are plain text.
        read: bytes of the file consumed since the previous batch, as they are on disk.
        skipped: bytes of the file before the first that `numbers` count.
        is_array: records that are not split yet are items of a JSON array.
    """

    file: str
    numbers: Sequence[int]
    records: list[Any] | bytes | Span
    is_text: bool
    read: int
    skipped: int = 0
    is_array: bool = False


def bytes_of_shard(files: Sequence[Path], shard: tuple[int, int] = (1, 1)) -> Span:
    """The range of bytes of shard (i, n), i from 1, of all `files` end to end."""
    part, parts = shard
    total = sum(size_of(file) for file in files)
    return total * (part - 1) // parts, total * part // parts


def read_batches(
    files: Sequence[Path],
    txt_split: str = "blank_line",
    *,
    keys: Sequence[str] | None = ("text",),
    shard: tuple[int, int] = (1, 1),
) -> Iterator[Batch]:
    """All documents of `files` in order, or those of shard i of n: shards 1 to n in order are all of them.

    Args:
        txt_split: what ends a document in a .txt file: "blank_line", "line" or "file".
        keys: columns to read from tables, None for all.

    Raises:
        GptlmError: with the file (and line) that cannot be read.
    """
    first, last = bytes_of_shard(files, shard)
    start = 0
    for file in files:
        size = size_of(file)
        span = (max(first - start, 0), min(last - start, size))
        start += size
        if span[0] >= span[1]:
            continue
        try:
            match format_of(file) or "":
                case "dataset":
                    yield from _dataset_batches(file, keys, span)
                case ".parquet":
                    yield from _parquet_batches(file, keys) if span[0] == 0 else ()
                case suffix:
                    yield from _text_batches(file, suffix, txt_split, span)
        except (OSError, EOFError, zlib.error, zstandard.ZstdError) as error:
            raise GptlmError(f"cannot read {file}: {reason_of(error)}; is the file complete?") from error


def _text_batches(file: Path, suffix: str, txt_split: str, span: Span) -> Iterator[Batch]:
    with open(file, "rb") as raw:
        stream = decompressed(raw, file)
        start = stream.peek(4)[:4]
        refuse_utf16(start, file)
        if start.startswith(BOM):
            stream.read(len(BOM))
            if not stream.peek(1):
                return
        is_array = suffix != ".txt" and stream.peek(1 << 12).lstrip()[:1] == b"["
        by_line = stream is raw and not is_array and (suffix != ".txt" or txt_split == "line")
        if span[0] > 0:
            if not by_line:
                return
            raw.seek(span[0] - 1)
            raw.readline()  # the rest of a line that begins before the span
        skipped = raw.tell() if span[0] > 0 else 0
        # A BOM is part of the first line, which belongs to the shard of byte 0 even where a cut falls into the BOM.
        end = (max(span[1], raw.tell() + 1) if span[0] == 0 else span[1]) if by_line else None
        if is_array:
            yield from _array_batches(stream, file, raw)
        elif suffix == ".txt":
            yield from _batched(_plain_documents(_lines(stream, end), txt_split), str(file), True, raw, skipped)
        elif end is not None:
            yield from _line_ranges(raw, str(file), end)
        else:
            yield from _line_batches(stream, str(file), raw)


def _line_ranges(raw: BinaryIO, file: str, end: int) -> Iterator[Batch]:
    """The lines that begin before byte `end`, as ranges of the file: the process that parses them also reads them."""
    start = raw.tell()
    while start < end:
        target = min(start + BATCH_BYTES, end)
        raw.seek(target - 1)
        raw.readline()
        stop = raw.tell()
        if stop < target:
            raise GptlmError(_shorter(file))
        yield Batch(file, [1], (start, stop), False, stop - start, start)
        start = stop


def _line_batches(stream: io.BufferedReader, file: str, raw: BinaryIO) -> Iterator[Batch]:
    """Whole lines of a compressed file in large pieces."""
    number, position = 1, 0
    while piece := stream.read(BATCH_BYTES):
        piece += b"" if piece.endswith(b"\n") else stream.readline()
        yield Batch(file, [number], piece, False, raw.tell() - position)
        number, position = number + piece.count(b"\n"), raw.tell()


def _array_batches(stream: io.BufferedReader, file: Path, raw: BinaryIO) -> Iterator[Batch]:
    """The items of a JSON array, as ranges of the file's bytes where it is not compressed."""
    skipped, position = (raw.tell(), 0) if stream is raw else (0, 0)
    try:
        for part in array_parts(stream, str(file), BATCH_BYTES):
            start, numbers = skipped + part.start, range(part.number, part.number + part.items)
            records = (start, start + len(part.content)) if stream is raw else part.content
            done = start + len(part.content) if stream is raw else raw.tell()
            yield Batch(str(file), numbers, records, False, done - position, is_array=True)
            position = done
    except BrokenArrayError as error:
        raise _broken(file) from error


def _broken(file: Path) -> GptlmError:
    """What is wrong with a JSON array, with line and column, from the whole file."""
    try:
        with open(file, "rb") as raw:
            parse_array(decode(decompressed(raw, file).read(), file), file)
    except GptlmError as error:
        return error
    return GptlmError(f"{file}: broken JSON array")


def _lines(stream: io.BufferedReader, end: int | None) -> Iterator[tuple[int, bytes]]:
    """Numbered lines that begin before byte `end`."""
    start = stream.tell() if end is not None else 0
    for number, line in enumerate(stream, start=1):
        if end is not None and start >= end:
            return
        start += len(line)
        yield number, line


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


def _parquet_batches(file: Path, keys: Sequence[str] | None) -> Iterator[Batch]:
    import pyarrow.parquet  # slow to import, and few corpora need it

    first, unread = 1, file.stat().st_size
    try:
        with pyarrow.parquet.ParquetFile(file) as table:
            keys = _columns(file, keys, table.schema_arrow.names)
            share = unread // max(1, -(-table.metadata.num_rows // BATCH_ROWS))
            for rows in table.iter_batches(BATCH_ROWS, columns=list(keys)):
                records = rows.to_pylist()
                yield Batch(str(file), range(first, first + len(records)), records, False, share)
                first, unread = first + len(records), unread - share
    except pyarrow.ArrowException as error:
        raise OSError(str(error)) from error
    yield Batch(str(file), [], [], False, unread)


def _dataset_batches(folder: Path, keys: Sequence[str] | None, span: Span) -> Iterator[Batch]:
    import pyarrow
    from datasets import Dataset  # slow to import, and few corpora need it

    size = max(1, size_of(folder))
    _check_saved_files(folder)
    try:
        table = Dataset.load_from_disk(str(folder))
    except IndexError:  # raised by `datasets` where there are no rows
        return
    except (OSError, MemoryError):
        raise
    except Exception as error:  # of any type, where the JSON files hold other types
        raise OSError(reason_of(error)) from error
    try:
        keys = _columns(folder, keys, table.column_names)
        first, last = (-(-edge * len(table) // size) for edge in span)  # row i lies at byte i x size / rows
        yield from table_batches(table.select_columns(list(keys)), str(folder), range(first, last), size)
    except (ValueError, KeyError, pyarrow.ArrowException) as error:
        if isinstance(error, GptlmError):
            raise
        raise OSError(str(error)) from error


def _check_saved_files(folder: Path) -> None:
    """Raises OSError if a dataset that `datasets` saved names what is no file: reading a FIFO would wait forever."""
    try:
        names = [part["filename"] for part in parse_json((folder / "state.json").read_bytes())["_data_files"]]
    except (ValueError, LookupError, TypeError) as error:
        raise OSError(f"state.json names no data files ({reason_of(error)})") from error
    for name in names:
        if not isinstance(name, str) or not (folder / name).is_file():
            raise OSError(f"{name!r:.60} in state.json is no file of the dataset")


def table_batches(table: "Dataset", name: str, rows: range, size: int) -> Iterator[Batch]:
    """`rows` of a table of `datasets`, which takes `size` bytes in all; `name` is for messages."""
    for start in range(rows.start, rows.stop, BATCH_ROWS):
        columns = table[start : min(start + BATCH_ROWS, rows.stop)]
        records = [dict(zip(columns, row, strict=True)) for row in zip(*columns.values(), strict=True)]
        numbers = range(start + 1, start + 1 + len(records))
        yield Batch(name, numbers, records, False, len(records) * size // max(1, len(table)))


def _columns(file: Path, keys: Sequence[str] | None, columns: Sequence[str]) -> Sequence[str]:
    """`keys`, or all `columns` where `keys` is None."""
    for key in keys or ():
        if key not in columns:
            raise GptlmError(f"{file}: no column {key!r}, only {sorted(columns)[:8]}; name it with --json_key")
    return columns if keys is None else keys


def texts_of(batch: Batch, keys: Sequence[str], skipped: list[str] | None = None) -> list[tuple[str, ...]]:
    """The texts under `keys` of each document of `batch`; plain text is the text of every key.

    Args:
        skipped: documents that cannot be read are skipped, and this list gets the reason of each.

    Raises:
        GptlmError: with file and line of bytes that are not UTF-8, broken JSON, or a missing key.
    """
    batch = split_lines(batch)
    texts = []
    for i, record in enumerate(batch.records):
        try:
            if batch.is_text:
                texts.append((decode_document(record),) * len(keys))
                continue
            value = parse_line(decode_document(record)) if isinstance(record, bytes) else record
            texts.append(_select(value, keys))
        except GptlmError as error:
            kind = "line" if isinstance(record, bytes) else "record"
            number = batch.numbers[i] + _lines_before(batch.file, batch.skipped)
            reason = f"{batch.file}, {kind} {number}: {error}"
            if skipped is None:
                raise GptlmError(reason) from error
            skipped.append(reason)
    return texts


def split_lines(batch: Batch) -> Batch:
    """`batch` with its lines, or items of an array, in a list.

    Done in the workers, so that one process can feed many of them.

    Raises:
        GptlmError: if the file became shorter or unreadable since it was listed.
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
            raise GptlmError(_shorter(batch.file))
    if batch.is_array:
        return replace(batch, records=parse_json(b"[" + content + b"]"))
    lines = [(number, line) for number, line in enumerate(content.split(b"\n"), start=batch.numbers[0]) if line.strip()]
    return replace(batch, numbers=[number for number, _ in lines], records=[line for _, line in lines])


def read_texts(path: str, key: str = "text", txt_split: str = "blank_line") -> Iterator[str]:
    """The texts under `key` of all documents of `path`, see `list_files`."""
    for batch in read_batches(list_files(path), txt_split, keys=[key]):
        for (text,) in texts_of(batch, [key]):
            yield text


def _shorter(file: str) -> str:
    return f"{file} became shorter while it was read; start again when it is whole"


@lru_cache(maxsize=1)
def _lines_before(file: str, position: int) -> int:
    """Line ends in the first `position` bytes of a file."""
    lines = 0
    with open(file, "rb") as stream:
        while position > 0 and (part := stream.read(min(position, 1 << 24))):
            lines += part.count(b"\n")
            position -= len(part)
    return lines


def decode_document(record: bytes) -> str:
    """Raises GptlmError if `record` is not UTF-8 text."""
    if b"\x00" in record:
        raise GptlmError("NUL bytes, so it is not UTF-8 text; convert it, for example `iconv -f UTF-16LE -t UTF-8`")
    try:
        return record.decode("utf-8")
    except UnicodeDecodeError as error:
        raise GptlmError(not_utf8(error)) from error


def _select(record: Any, keys: Sequence[str]) -> tuple[str, ...]:
    if not isinstance(record, dict):
        raise GptlmError(f'{type(record).__name__} instead of an object like {{"text": ...}}')
    texts = []
    for key in keys:
        text = record.get(key)
        if not isinstance(text, str):
            found = f"a {type(record[key]).__name__}" if key in record else f"only the keys {sorted(record)[:8]}"
            raise GptlmError(
                f"no text under {key!r}, found {found}; name the key with --json_key (pretrain: --text_column)"
            )
        texts.append(check_text(text, f"the text under {key!r}"))
    return tuple(texts)
