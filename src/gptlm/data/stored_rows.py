"""Rows of fine-tuning in an Arrow file: written in batches, read through a memory map.

`datasets.Dataset.from_file` opens the file, too. Columns, one entry for each example:

    ids                    token ids, int32
    targets                [start, stop, start, stop, ...] of the ids that are targets
    prompt_length, skipped_turns, truncated_prompts, truncated_responses, response, end_id: as in `Row`
    places, texts          the earlier responses: ids before each, and its text
    special                the first special token that the example's texts spell out, null if none
"""

import hashlib
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from gptlm.data.rows import Row

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


class StoredRows(Sequence[Row]):
    """The rows in `path`, none if it is None. Only a few numbers of each row are in memory.

    Attributes:
        batches: the columns, in parts.
        lengths: (n,) ids of each row.
        targets: (n,) ids of each that are targets.
        skipped_turns, truncated_prompts, truncated_responses: (n,) as in `Row`.
        end_ids: (n,) as in `Row`, `NO_END` where there is none.
        forms: form of the records -> how many; whoever reads them fills it in.

    Raises:
        OSError, pyarrow.ArrowException: if the file cannot be read.
    """

    def __init__(self, path: str | Path | None):
        self.path = path and str(path)
        self.forms: Counter[str] = Counter()
        stream = pa.ipc.open_stream(pa.memory_map(self.path)) if self.path else []
        self.batches: list[pa.RecordBatch] = list(stream)
        self._starts = np.cumsum([0, *(batch.num_rows for batch in self.batches)])
        self._ids = [_views(batch.column("ids")) for batch in self.batches]
        self._runs = [_views(batch.column("targets")) for batch in self.batches]
        self.lengths = _joined([np.diff(offsets) for offsets, _ in self._ids])
        self.targets = _joined([_sums(offsets, runs) for offsets, runs in self._runs])
        self._prompt_lengths, self.skipped_turns, self.truncated_prompts, self.truncated_responses, self.end_ids = (
            _joined([_view(batch.column(name)) for batch in self.batches]) for name in NUMBERS
        )

    def __reduce__(self) -> tuple:
        return StoredRows, (self.path,)  # a worker process maps the file, too

    def __len__(self) -> int:
        return int(self._starts[-1])

    def __getitem__(self, index: Any) -> Any:
        number = range(len(self))[index]
        batch, place = self._find(number)
        columns = self.batches[batch]
        places, texts = (columns.column(name)[place].as_py() for name in ("places", "texts"))
        end_id = int(self.end_ids[number])
        return Row(
            *self.tokens(number),
            prompt_length=int(self._prompt_lengths[number]),
            skipped_turns=int(self.skipped_turns[number]),
            response=columns.column("response")[place].as_py(),
            truncated_prompts=int(self.truncated_prompts[number]),
            truncated_responses=int(self.truncated_responses[number]),
            earlier=tuple(zip(places, texts, strict=True)),
            end_id=None if end_id == NO_END else end_id,
        )

    def tokens(self, number: int) -> tuple[np.ndarray, np.ndarray]:
        """`ids` and `loss_mask` of a row."""
        batch, place = self._find(number)
        ids = _item(self._ids[batch], place).copy()  # not a view of a file that cannot be written
        mask = np.zeros(len(ids), dtype=bool)
        for start, stop in _item(self._runs[batch], place).reshape(-1, 2).tolist():
            mask[start:stop] = True
        return ids, mask

    def _find(self, number: int) -> tuple[int, int]:
        """The batch of a row, and its place there."""
        batch = int(np.searchsorted(self._starts, number, side="right")) - 1
        return batch, number - int(self._starts[batch])

    def special_tokens(self, examples: np.ndarray) -> list[str]:
        """The special token in the texts of each of `examples` that has one."""
        found: list[str] = []
        for start, batch in zip(self._starts.tolist(), self.batches, strict=False):
            if batch.column("special").null_count < batch.num_rows:  # nearly always all are null
                places = examples[(examples >= start) & (examples < start + batch.num_rows)] - start
                found += batch.column("special").take(pa.array(places)).drop_null().to_pylist()
        return found


def _views(column: pa.ListArray) -> tuple[np.ndarray, np.ndarray]:
    """Offsets and values of a column of lists, not copied."""
    return _view(column.offsets), _view(column.values)


def _view(numbers: pa.Array) -> np.ndarray:
    """Values without null, not copied; `to_numpy` would import pandas."""
    return np.from_dlpack(numbers)


def _item(views: tuple[np.ndarray, np.ndarray], place: int) -> np.ndarray:
    offsets, values = views
    return values[offsets[place] : offsets[place + 1]]


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
