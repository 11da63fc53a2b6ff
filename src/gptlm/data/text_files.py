"""Files with text: which there are, opening, decoding and parsing them, and the messages where that fails.

Formats: .txt, .jsonl and .json (each also as .gz or .zst), .parquet, and datasets that `datasets` saved to disk.
"""

import glob
import gzip
import io
import json
import os
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO

import zstandard

from gptlm.disk import read_file
from gptlm.errors import GptlmError, reason_of
from gptlm.json_text import parse_json

SUFFIXES = (".jsonl", ".json", ".txt", ".parquet")
COMPRESSED = (".gz", ".zst")
PACKED = (*COMPRESSED, ".bz2", ".xz", ".zip", ".parquet")
MOST_OTHERS = 200_000  # files and folders
BOM = b"\xef\xbb\xbf"
RAW_DECODE = json.JSONDecoder().raw_decode  # json.loads without its search for white space


def list_files(path: str) -> list[Path]:
    """The readable files of a file, a folder (recursive) or a glob, sorted by name; a dataset is its folder.

    Raises:
        GptlmError: if there are none, or a single file has another suffix.
    """
    endings = ", ".join(SUFFIXES) + " (text also with .gz or .zst)"
    if os.path.isfile(path):
        refuse_table(Path(path))
        if format_of(Path(path)) is None:
            raise GptlmError(f"{path}: unknown format; expected a name that ends in {endings}")
        return [Path(path)]
    if os.path.isdir(path):
        if is_dataset(Path(path)):
            return [Path(path)]
        _refuse_several_splits(Path(path))
        # metadata and index caches of this library are JSON, but no text
        found = [f for f in _below(path) if not f.name.endswith(".meta.json") and "index-cache" not in f.parts]
    else:
        found = [Path(name) for name in glob.glob(path, recursive=True)]
    found = [file for file in found if is_dataset(file) or (file.is_file() and not is_dataset(file.parent))]
    files = sorted(file for file in found if format_of(file) is not None)
    if not files:
        what = f"{len(found)} files, none" if found else "no file"
        raise GptlmError(f"{path}: {what} ending in {endings}; give a file, a folder or a quoted glob")
    return files


def refuse_table(file: Path) -> None:
    """Raises GptlmError for a file of comma- or tab-separated values, with the command that makes JSON lines of it."""
    ending = file.suffix.lower()
    if ending in (".csv", ".tsv"):
        more = ", sep='\\t'" if ending == ".tsv" else ""
        code = f"from datasets import Dataset; Dataset.from_csv({str(file)!r}{more}).to_json({file.stem + '.jsonl'!r})"
        raise GptlmError(f"{file}: {ending} is not read; this makes a file that is: python -c {shlex.quote(code)}")


def _below(folder: str) -> Iterator[Path]:
    """Files and folders below `folder`; links to folders are not followed.

    Raises:
        GptlmError: if a folder cannot be listed, or most of what is there is no text: another folder is meant.
    """

    def fail(error: OSError) -> None:
        if not isinstance(error, FileNotFoundError):  # else removed while the others were listed
            raise GptlmError(f"cannot list {error.filename}: {reason_of(error)}") from error

    others = 0
    for parent, folders, files in os.walk(folder, onerror=fail):
        paths = [Path(parent, name) for name in (*folders, *files)]
        others += sum(not path.name.lower().endswith((*SUFFIXES, *COMPRESSED)) for path in paths)
        if others > MOST_OTHERS:
            raise GptlmError(f"{folder} holds more than {MOST_OTHERS:,} files that are no text; give a folder of texts")
        yield from paths


def is_dataset(path: Path) -> bool:
    """Whether `path` is a folder that `datasets.Dataset.save_to_disk` wrote."""
    return (path / "state.json").is_file() and (path / "dataset_info.json").is_file()


def _refuse_several_splits(folder: Path) -> None:
    if (folder / "dataset_dict.json").is_file():
        splits = sorted(part.name for part in folder.iterdir() if is_dataset(part))
        raise GptlmError(
            f"{folder} holds a dataset with the splits {', '.join(splits)}; give one: {folder}/{splits[0]}"
        )


def holds_records(path: str) -> bool:
    """Whether the name of a file means that texts are fields of records; otherwise the file itself is text."""
    return format_of(Path(path)) not in (None, ".txt")


def format_of(file: Path) -> str | None:
    """One of `SUFFIXES`, "dataset", or None."""
    if file.is_dir():
        return "dataset" if is_dataset(file) else None
    name = file.name.lower()
    for ending in COMPRESSED:
        name = name.removesuffix(ending)
    return next((suffix for suffix in SUFFIXES if name.endswith(suffix)), None)


def size_of(file: Path) -> int:
    """Bytes on disk of a file, or of all files of a dataset folder."""
    if file.is_dir():
        return sum(part.stat().st_size for part in file.iterdir() if part.is_file())
    return file.stat().st_size


def decompressed(raw: BinaryIO, file: Path) -> io.BufferedReader:
    if file.name.lower().endswith(".gz"):
        return io.BufferedReader(gzip.GzipFile(fileobj=raw))  # type: ignore[arg-type]
    if file.name.lower().endswith(".zst"):
        return io.BufferedReader(_ZstdReader(raw))
    return raw  # type: ignore[return-value]


class _ZstdReader(io.RawIOBase):
    """Decompressed bytes of all frames. Unlike zstandard's own reader it raises EOFError if the file is cut short."""

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


def read_text(path: str | Path, name: str = "") -> str:
    """The text of a file that is not compressed, line ends included.

    Args:
        name: of the file where it cannot be opened, for the message.

    Raises:
        GptlmError: if it is missing or not UTF-8.
    """
    try:
        content = read_file(path)
    except OSError as error:
        raise GptlmError(f"cannot read {name or path}: {reason_of(error)}") from error
    return decode(content, path)


def decode(content: bytes, path: str | Path) -> str:
    """`content` of the file `path` as text, without a BOM.

    Raises:
        GptlmError: with line and column of the first byte that is not UTF-8.
    """
    refuse_utf16(content[:2], path)
    try:
        return content.removeprefix(BOM).decode("utf-8")
    except UnicodeDecodeError as error:
        line = error.object.count(b"\n", 0, error.start) + 1
        raise GptlmError(f"{path}, line {line}: {not_utf8(error, str(path))}") from error


def parse_array(text: str, path: str | Path) -> list[Any]:
    """The items of a JSON array.

    Raises:
        GptlmError: if it is not valid JSON.
    """
    try:
        return parse_json(text)
    except ValueError as error:
        raise GptlmError(f"{path}: broken JSON array: {error}") from error


def parse_line(line: str) -> Any:
    """The JSON value of a line.

    Raises:
        GptlmError: with the column where it is broken.
    """
    line = line.rstrip()
    try:
        value, end = RAW_DECODE(line, len(line) - len(line.lstrip()))
        if end < len(line):
            raise json.JSONDecodeError("Extra data", line, len(line) - len(line[end:].lstrip()))
        return value
    except json.JSONDecodeError as error:
        raise GptlmError(
            f'broken JSON at column {error.colno}: {error.msg}; expected one object per line like {{"text": ...}}'
        ) from error
    except RecursionError as error:
        raise GptlmError("the JSON is nested too deeply") from error
    except ValueError as error:
        raise GptlmError(f"the JSON cannot be read: {reason_of(error)}") from error


def refuse_utf16(start: bytes, path: str | Path) -> None:
    if start.startswith((b"\xff\xfe", b"\xfe\xff")):
        file = Path(path)
        raise GptlmError(
            f"{path}, line 1: not UTF-8 but UTF-16; convert it with "
            f"`iconv -f UTF-16 -t UTF-8 {file.name} > utf8{file.suffix}`"
        )


def not_utf8(error: UnicodeDecodeError, path: str = "") -> str:
    column = error.start - error.object.rfind(b"\n", 0, error.start)
    remedy = "convert the file, for example `iconv -f GB18030 -t UTF-8`"
    if path.lower().endswith(PACKED):
        remedy = "unpack it, or give .txt or .jsonl"
    return f"not UTF-8 (byte {error.object[error.start]:02x} at column {column}); {remedy}"


def check_text(text: str, place: str) -> str:
    """`text`, if it is valid Unicode: JSON can have half a surrogate pair (`"\\ud83d"`), on which tokenizers fail.

    Raises:
        GptlmError: with `place` and the character, counted from 1.
    """
    if text.isascii():
        return text
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise GptlmError(f"{place} is not valid Unicode (character {error.start + 1}); fix it there") from error
    return text


def check_record(record: Any, place: str) -> Any:
    """`record`, a JSON value, if all texts in it are valid Unicode.

    Raises:
        GptlmError: with `place`, the key and the character in the text under it.
    """
    pending = [(record, place)]  # not recursive: the parser accepts more levels than Python's functions
    while pending:
        value, where = pending.pop()
        if isinstance(value, str):
            check_text(value, where)
        elif isinstance(value, list):
            pending += [(item, where) for item in reversed(value)]
        elif isinstance(value, dict):
            for key in value:
                check_text(key, f"{where}, a key")
            start = where.partition(", under ")[0]
            pending += [(item, f"{start}, under {key!r}") for key, item in reversed(value.items())]
    return record
