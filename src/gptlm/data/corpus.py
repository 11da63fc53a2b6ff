"""Texts on disk, read as batches of documents: .jsonl, .json, .txt, each also as .gz or .zst, .parquet, datasets."""

import glob
import json
import os
import zlib
from collections.abc import Iterator, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

import zstandard

from gptlm.data.readers import COMPRESSED, Batch, is_dataset, read_file, size_of, split_lines
from gptlm.data.unicode import check_text
from gptlm.errors import GptlmError

RAW_DECODE = json.JSONDecoder().raw_decode  # json.loads without its search for white space
SUFFIXES = (".jsonl", ".json", ".txt", ".parquet")


def list_files(path: str) -> list[Path]:
    """The readable files behind a file, a folder (recursive) or a glob, sorted by name; a dataset is its folder.

    Raises:
        GptlmError: if there are none, or a single named file has another ending.
    """
    if os.path.isfile(path):
        if _kind(Path(path)) is None:
            raise GptlmError(f"{path}: cannot tell its format; expected an ending of {_endings()}")
        return [Path(path)]
    if os.path.isdir(path):
        if is_dataset(Path(path)):
            return [Path(path)]
        _refuse_several_splits(Path(path))
        found = [file for file in Path(path).rglob("*") if not _is_ours(file)]
    else:
        found = [Path(name) for name in glob.glob(path, recursive=True)]
    found = [file for file in found if is_dataset(file) or (file.is_file() and not is_dataset(file.parent))]
    files = sorted(file for file in found if _kind(file) is not None)
    if not files:
        what = f"{len(found)} files, none" if found else "no file"
        raise GptlmError(f"{path}: {what} ending in {_endings()}; give a file, a folder or a quoted glob")
    return files


def holds_records(path: str) -> bool:
    """Whether the name of a file says that texts are fields of its records; else the file itself is text."""
    return _kind(Path(path)) not in (None, ".txt")


def bytes_of_shard(files: Sequence[Path], shard: tuple[int, int] = (1, 1)) -> tuple[int, int]:
    """The range of bytes of shard (i, n), i from 1, when all `files` lie end to end."""
    part, parts = shard
    total = sum(size_of(file) for file in files)
    return total * (part - 1) // parts, total * part // parts


def read_batches(
    files: Sequence[Path],
    txt_split: str = "blank_line",
    *,
    keys: Sequence[str] = ("text",),
    shard: tuple[int, int] = (1, 1),
) -> Iterator[Batch]:
    """All documents of `files` in order, or those that begin in shard i of n: shards 1 to n in order are all of them.

    Args:
        txt_split: what ends a document in a .txt file: "blank_line", "line" or "file".
        keys: the columns of tables that are wanted.

    Raises:
        GptlmError: naming the file (and line) that cannot be read.
    """
    first, last = bytes_of_shard(files, shard)
    begins = 0
    for file in files:
        size = size_of(file)
        span = (max(first - begins, 0), min(last - begins, size))
        begins += size
        if span[0] >= span[1]:
            continue
        try:
            yield from read_file(file, _kind(file) or "", txt_split, keys, span)
        except (OSError, EOFError, zlib.error, zstandard.ZstdError) as error:
            raise GptlmError(f"cannot read {file}: {error}; is the file whole?") from error


def texts_of(batch: Batch, keys: Sequence[str]) -> list[tuple[str, ...]]:
    """The texts under `keys` of each document of `batch`; plain text serves every key.

    Raises:
        GptlmError: naming file and line of bytes that are not UTF-8, broken JSON, or a missing key.
    """
    batch = split_lines(batch)
    return [_texts_of_record(batch, number, keys) for number in range(len(batch.records))]


def good_texts_of(batch: Batch, keys: Sequence[str]) -> tuple[list[tuple[str, ...]], list[str]]:
    """As `texts_of`, but a bad document is left out; also returns what is wrong with each of those."""
    batch = split_lines(batch)
    texts, bad = [], []
    for number in range(len(batch.records)):
        try:
            texts.append(_texts_of_record(batch, number, keys))
        except GptlmError as error:
            bad.append(str(error))
    return texts, bad


def read_texts(path: str, key: str = "text", txt_split: str = "blank_line") -> Iterator[str]:
    """The texts under `key` of every document behind `path`, one after the other."""
    for batch in read_batches(list_files(path), txt_split, keys=[key]):
        for (text,) in texts_of(batch, [key]):
            yield text


def _texts_of_record(batch: Batch, i: int, keys: Sequence[str]) -> tuple[str, ...]:
    record: Any = batch.records[i]
    try:
        if batch.is_text:
            return (_decode(record),) * len(keys)
        return _select(_parse_line(_decode(record)) if isinstance(record, bytes) else record, keys)
    except GptlmError as error:
        kind = "line" if isinstance(record, bytes) else "document"
        number = batch.numbers[i] + _lines_before(batch.file, batch.skipped)
        raise GptlmError(f"{batch.file}, {kind} {number}: {error}") from error


@lru_cache(maxsize=1)
def _lines_before(file: str, position: int) -> int:
    if not position:
        return 0
    lines = 0
    with open(file, "rb") as stream:
        while position > 0 and (part := stream.read(min(position, 1 << 24))):
            lines += part.count(b"\n")
            position -= len(part)
    return lines


def _kind(file: Path) -> str | None:
    if file.is_dir():
        return "dataset" if is_dataset(file) else None
    name = file.name.lower()
    for ending in COMPRESSED:
        name = name.removesuffix(ending)
    return next((suffix for suffix in SUFFIXES if name.endswith(suffix)), None)


def _refuse_several_splits(folder: Path) -> None:
    if (folder / "dataset_dict.json").is_file():
        splits = sorted(part.name for part in folder.iterdir() if is_dataset(part))
        raise GptlmError(
            f"{folder} holds a dataset with the splits {', '.join(splits)}; give one: {folder}/{splits[0]}"
        )


def _is_ours(file: Path) -> bool:
    """JSON that preprocessing and training leave beside the data is no text."""
    return file.name.endswith(".meta.json") or "index-cache" in file.parts


def _endings() -> str:
    return ", ".join(SUFFIXES) + " (text also with .gz or .zst)"


def _decode(record: bytes) -> str:
    if b"\x00" in record:
        raise GptlmError("NUL bytes, so it is no UTF-8 text; convert it, for example `iconv -f UTF-16LE -t UTF-8`")
    try:
        return record.decode("utf-8")
    except UnicodeDecodeError as error:
        raise GptlmError(
            f"not UTF-8 (byte {record[error.start : error.start + 1].hex()} at column {error.start + 1}); "
            "convert the file, for example `iconv -f GB18030 -t UTF-8`"
        ) from error


def _parse_line(line: str) -> Any:
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


def _select(record: Any, keys: Sequence[str]) -> tuple[str, ...]:
    if not isinstance(record, dict):
        raise GptlmError(f'{type(record).__name__} instead of an object like {{"text": ...}}')
    texts = []
    for key in keys:
        text = record.get(key)
        if not isinstance(text, str):
            found = f"a {type(record[key]).__name__}" if key in record else f"only the keys {sorted(record)[:8]}"
            raise GptlmError(f"no text under {key!r}, found {found}; name the key with --json_key")
        texts.append(check_text(text, f"the text under {key!r}"))
    return tuple(texts)
