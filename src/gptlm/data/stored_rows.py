"""Rows of fine-tuning in an Arrow file: written in batches, read where they are needed.

`datasets.Dataset.from_file` opens the file, too. Columns, one entry for each example:

    ids                    token ids, int32
    targets                [start, stop, start, stop, ...] of the ids that are targets
    prompt_length, skipped_turns, truncated_prompts, truncated_responses, response, end_id: as in `Row`
    places, texts          the earlier responses: ids before each, and its text
    special                the first special token that the example's texts spell out, null if none
"""

import hashlib
from collections import Counter
from collections.abc import Iterator, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from gptlm.data.rows import Row
from gptlm.data.token_file import TokenFile

INT = pa.int32()
SCHEMA = pa.schema(
    {
        "ids": pa.list_(INT),
        "targets": pa.list_(INT),
        "prompt_length": INT,
        "skipped_turns": INT,
        "truncated_prompts": INT,
        "truncated_responses": INT,
        "end_id": INT,
        "response": pa.string(),
        "places": pa.list_(INT),
        "texts": pa.list_(pa.string()),
        "special": pa.string(),
    }
)
NUMBERS = ("prompt_length", "skipped_turns", "truncated_prompts", "truncated_responses", "end_id")
NO_END = -1  # in place of null, which `_view` cannot read


def to_arrow(rows: Sequence[Row], special: Sequence[str | None]) -> pa.RecordBatch:
    """`rows`, and for each the special token in its texts."""
    columns: dict[str, Any] = {name: pa.array([getattr(row, name) for row in rows], INT) for name in NUMBERS[:-1]}
    columns |= {
        "ids": _lists([row.ids for row in rows]),
        "targets": _lists([_runs(row.loss_mask) for row in rows]),
        "end_id": pa.array([NO_END if row.end_id is None else row.end_id for row in rows], INT),
        "response": pa.array([row.response for row in rows], pa.string()),
        "places": pa.array([[place for place, _ in row.earlier] for row in rows], pa.list_(INT)),
        "texts": pa.array([[text for _, text in row.earlier] for row in rows], pa.list_(pa.string())),
        "special": pa.array(special, pa.string()),
    }
    return pa.RecordBatch.from_arrays([columns[name] for name in SCHEMA.names], schema=SCHEMA)


def _lists(arrays: Sequence[np.ndarray]) -> pa.ListArray:
    offsets = np.cumsum([0, *map(len, arrays)], dtype=np.int32)
    values = np.concatenate(arrays) if arrays else np.empty(0)
    return pa.ListArray.from_arrays(pa.array(offsets), pa.array(values.astype(np.int32)))


def _runs(mask: np.ndarray) -> np.ndarray:
    return np.flatnonzero(np.diff(mask.astype(np.int8), prepend=0, append=0))


class _Lists:
    """Lists of a column in a batch: their offsets in memory, and the byte of the first value in the file."""

    def __init__(self, offsets: np.ndarray, values: pa.Buffer | None, begin: int):
        self.offsets = offsets.copy()
        self.first = values.address - begin if values is not None else 0

    @classmethod
    def of(cls, column: pa.ListArray, begin: int) -> "_Lists":
        return cls(_view(column.offsets), column.values.buffers()[1], begin)

    @classmethod
    def of_texts(cls, column: pa.StringArray, begin: int) -> "_Lists":
        _, offsets, content = column.buffers()
        return cls(np.frombuffer(offsets, np.int32, len(column) + 1), content, begin)

    def bounds(self, place: int) -> tuple[int, int]:
        return int(self.offsets[place]), int(self.offsets[place + 1])


class StoredRows(Sequence[Row]):
    """The rows in `path`, none if it is None. Only a few numbers of each row are in memory.

    The file is mapped while it is opened, and read afterwards: see token_file.py.

    Attributes:
        forms: form of the records -> how many; whoever reads them fills it in.
        lengths: (n,) ids of each row.
        targets: (n,) ids of each that are targets.
        skipped_turns, truncated_prompts, truncated_responses: (n,) as in `Row`.
        end_ids: (n,) as in `Row`, `NO_END` where there is none.

    Raises:
        OSError, pyarrow.ArrowException: if the file cannot be read.
        GptlmError: later, if it has become shorter.
    """

    def __init__(self, path: str | Path | None):
        self.path = path and str(path)
        self.forms: Counter[str] = Counter()
        batches: list[pa.RecordBatch] = []
        begin = 0
        if self.path:
            content = pa.memory_map(self.path).read_buffer()
            begin, batches = content.address, list(pa.ipc.open_stream(content))
            self._file = TokenFile(Path(self.path), np.dtype(np.uint8), 0, content.size)
        self._starts = np.cumsum([0, *(batch.num_rows for batch in batches)])
        self._ids, self._runs, self._places, self._texts = (
            [_Lists.of(batch.column(name), begin) for batch in batches]
            for name in ("ids", "targets", "places", "texts")
        )
        self._responses = [_Lists.of_texts(batch.column("response"), begin) for batch in batches]
        contents = [batch.column("texts").values.buffers()[2] for batch in batches]
        self._contents = [content.address - begin if content is not None else 0 for content in contents]
        self.lengths = _joined([np.diff(lists.offsets) for lists in self._ids])
        self.targets = _joined([_sums(*map(_view, _parts(batch.column("targets")))) for batch in batches])
        self._prompt_lengths, self.skipped_turns, self.truncated_prompts, self.truncated_responses, self.end_ids = (
            _joined([_view(batch.column(name)) for batch in batches]) for name in NUMBERS
        )
        self._special = _special_tokens(batches)

    def __reduce__(self) -> tuple:
        return StoredRows, (self.path,)  # a worker process opens the file, too

    def __len__(self) -> int:
        return int(self._starts[-1])

    def __getitem__(self, index: Any) -> Any:
        number = range(len(self))[index]
        batch, place = self._find(number)
        end_id = int(self.end_ids[number])
        return Row(
            *self.tokens(number),
            prompt_length=int(self._prompt_lengths[number]),
            skipped_turns=int(self.skipped_turns[number]),
            response=self._text(self._responses[batch].first, *self._responses[batch].bounds(place)),
            truncated_prompts=int(self.truncated_prompts[number]),
            truncated_responses=int(self.truncated_responses[number]),
            earlier=tuple(self._earlier(batch, place)),
            end_id=None if end_id == NO_END else end_id,
        )

    def tokens(self, number: int) -> tuple[np.ndarray, np.ndarray]:
        """`ids` and `loss_mask` of a row."""
        batch, place = self._find(number)
        ids = self._numbers(self._ids[batch], place).copy()  # can be written
        mask = np.zeros(len(ids), dtype=bool)
        for start, stop in self._numbers(self._runs[batch], place).reshape(-1, 2).tolist():
            mask[start:stop] = True
        return ids, mask

    def _find(self, number: int) -> tuple[int, int]:
        """The batch of a row, and its place there."""
        batch = int(np.searchsorted(self._starts, number, side="right")) - 1
        return batch, number - int(self._starts[batch])

    def _earlier(self, batch: int, place: int) -> Iterator[tuple[int, str]]:
        texts = self._texts[batch]
        start, stop = texts.bounds(place)
        if start < stop:
            ends = self._file[texts.first + 4 * start : texts.first + 4 * (stop + 1)].view(np.int32).tolist()
            for number, (begin, end) in zip(self._numbers(self._places[batch], place), pairwise(ends), strict=True):
                yield int(number), self._text(self._contents[batch], begin, end)

    def _numbers(self, lists: _Lists, place: int) -> np.ndarray:
        start, stop = lists.bounds(place)
        if start == stop:
            return np.empty(0, np.int32)
        return self._file[lists.first + 4 * start : lists.first + 4 * stop].view(np.int32)

    def _text(self, first: int, start: int, stop: int) -> str:
        return self._file[first + start : first + stop].tobytes().decode() if start < stop else ""

    def special_tokens(self, examples: np.ndarray) -> list[str]:
        """The special token in the texts of each of `examples` that has one."""
        return [self._special[number] for number in np.intersect1d(examples, [*self._special]).tolist()]


def _special_tokens(batches: Sequence[pa.RecordBatch]) -> dict[int, str]:
    """The numbers of rows that have a special token in their texts, nearly always none, and that token."""
    found, start = dict[int, str](), 0
    for batch in batches:
        if batch.column("special").null_count < batch.num_rows:
            tokens = enumerate(batch.column("special").to_pylist(), start)
            found |= {number: token for number, token in tokens if token is not None}
        start += batch.num_rows
    return found


def _parts(column: pa.ListArray) -> tuple[pa.Array, pa.Array]:
    return column.offsets, column.values


def _view(numbers: pa.Array) -> np.ndarray:
    """Values without null, not copied; `to_numpy` would import pandas."""
    return np.from_dlpack(numbers)


def _sums(offsets: np.ndarray, runs: np.ndarray) -> np.ndarray:
    """Numbers of targets of the rows of a batch."""
    ends = np.concatenate(([0], np.cumsum(runs[1::2] - runs[::2])))
    return np.diff(ends[offsets // 2])


def _joined(arrays: Sequence[np.ndarray]) -> np.ndarray:
    return np.concatenate([np.empty(0, dtype=np.int32), *arrays]).astype(np.int32)


NO_ROWS = StoredRows(None)


class Samples(Sequence[list[Row]]):
    """Samples of one or more rows each, which are read when they are asked for.

    Args:
        rows: all rows.
        members: which of them are used, in order.
        groups: the members of each sample, as places in `members`; None: one each.
    """

    def __init__(self, rows: StoredRows, members: np.ndarray, groups: Sequence[Sequence[int]] | None = None):
        self.rows = rows
        sizes = np.ones(len(members), dtype=np.int64) if groups is None else np.array([*map(len, groups)], np.int64)
        self._members = np.asarray(members, dtype=np.int64)
        if groups is not None and len(groups):
            self._members = self._members[np.concatenate([np.asarray(group, dtype=np.int64) for group in groups])]
        self._starts = np.concatenate((np.zeros(1, np.int64), np.cumsum(sizes)))

    def __len__(self) -> int:
        return len(self._starts) - 1

    def __getitem__(self, index: Any) -> Any:
        number = range(len(self))[index]
        return [self.rows[row] for row in self.members(number)]

    def members(self, number: int) -> list[int]:
        """The rows of a sample."""
        return self._members[self._starts[number] : self._starts[number + 1]].tolist()

    @property
    def examples(self) -> int:
        """Rows in all samples."""
        return len(self._members)

    def sums(self, values: np.ndarray) -> np.ndarray:
        """(len(self),) the sum of `values`, one for each of all rows, over the rows of each sample."""
        ends = np.concatenate((np.zeros(1, np.int64), np.cumsum(values[self._members], dtype=np.int64)))
        return np.diff(ends[self._starts])

    def used(self, values: np.ndarray) -> np.ndarray:
        """`values`, one for each of all rows, of the rows of all samples in order."""
        return values[self._members]

    def counts(self) -> np.ndarray:
        """(len(self),) rows of each sample."""
        return np.diff(self._starts)

    def digest(self) -> str:
        """16 hex digits: a hash of the ids and targets of all rows, and of where samples of several rows begin."""
        digest = hashlib.sha256()
        for number in range(len(self)):
            members = self.members(number)
            if len(members) > 1:
                digest.update(len(members).to_bytes(8, "little"))
            for row in members:
                ids, mask = self.rows.tokens(row)
                digest.update(ids.tobytes())
                digest.update(mask.tobytes())
        return digest.hexdigest()[:16]
