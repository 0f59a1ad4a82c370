"""Searches that merge nothing: the versions that labels have at their times, and the range
tombstones of a window, found in the parts of a shard.

The batches of a shard are disjoint in time. So for labels the newest batch is asked first, and an
older one only for labels that no newer row has answered. In a batch each part is asked by itself,
and the newest row of all parts counts. Of a part the search reads the row groups whose keys the
labels name, and values only where a label needs one.

Invariants
1. A label gets the newest put at or below its time, unless a delete or a range tombstone is newer.
2. Memory is two row groups, and the values that the labels need, beside the labels.
3. Rows without a meaning are damage, and so is a put without a value.
4. Keys are read in a thread ahead of the caller, through a `ParquetFile` of its own.
"""

from __future__ import annotations

import bisect
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from typing import NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from kvstore.backup.shard.rows.part_reader import (
    OpenedPart,
    ahead,
    may_have_ranges,
    statistics_of,
    translated,
)
from kvstore.backup.shard.rows.rules import (
    OP_DELETE_RANGE,
    OP_PUT,
    Bools,
    Longs,
    Window,
    column_numpy,
    lower_bound,
)
from kvstore.backup.shard.state.trace import ShardBatch, ShardPart
from kvstore.base.span import Span
from kvstore.loops.matches import match
from kvstore.mvcc import RangeTombstone
from kvstore.mvcc.arrow import buffers_of
from kvstore.storage.contract import Blob
from kvstore.tables.joins import OrderedLabels

_FILTERED_MAX = 16
"""Keys of a row group that its filter is asked for, at most. More are likely to have one in it."""

_NOTHING = -1
"""Stands for a time that is older than every time, and for the place of a value that is null."""


class FindBounds(NamedTuple):
    """A version older than `age_max` ns has no value for its label. The search is given up once the
    values of several labels have more than `bytes_max` bytes."""

    age_max: int
    bytes_max: int


class Found(NamedTuple):
    """The values of labels, and the times of their versions: null and -1 where there is none."""

    values: pa.Array
    times: Longs


def find_versions(
    blob: Blob,
    batches: Sequence[ShardBatch],
    labels: OrderedLabels,
    bounds: FindBounds,
    *,
    renew: Callable[[], None] = lambda: None,
    opened: Callable[[ShardPart], OpenedPart] | None = None,
) -> Found | None:
    """The version of each label, in the order of `labels`; None where values have too many bytes.

    `renew` is called now and then. `opened` opens a part, for one thread. Raises `MissingPartError`
    and `CorruptionError`. Costs a read of the columns of keys, times and operations of each row
    group that a label touches, and of values where a label needs one.
    """
    search = _Search(labels, bounds)
    open_one = opened or partial(_open_fresh, blob)
    newest = int(labels.times.max()) if len(labels.times) else _NOTHING
    for batch in reversed(batches):
        if batch.lower > newest:
            continue
        for part in batch.parts:
            first, end = _touched(labels.keys, part.key_min, part.key_max)
            if first < end and part.time_min <= newest:
                keys = labels.keys.slice(first, end - first)
                for group in _groups(open_one(part), keys, first, one_thread=bool(opened)):
                    renew()
                    if not search.take(group):
                        return None
        if not search.end_batch():
            break
    return search.found()


class _Group(NamedTuple):
    """A row group whose keys the distinct keys `first` up to `end` of labels may be. Values are
    read from `file`."""

    file: pq.ParquetFile
    part: ShardPart
    number: int
    first: int
    end: int
    rows: pa.RecordBatch

    def ops(self) -> Longs:
        """The operations of all rows."""
        if "op" in self.rows.schema.names:
            return column_numpy(self.rows, "op")
        return np.full(self.rows.num_rows, OP_PUT, np.uint8)

    def values(self, rows: Longs) -> pa.Array:
        """The values of some rows."""
        with translated(self.part):
            column = _read(self.file, self.number, ["value"]).column("value")
            values = column.take(pa.array(rows))
            if values.null_count:
                raise ValueError("a put has no value")
        return values


def _touched(keys: pa.Array, low: bytes, high: bytes | None) -> tuple[int, int]:
    """The first of the sorted keys in `[low, high]`, and the first behind them."""
    end = len(keys) if high is None else lower_bound(keys, high + b"\0")
    return lower_bound(keys, low), end


def _open_fresh(blob: Blob, part: ShardPart) -> OpenedPart:
    return OpenedPart(blob, part)


def _groups(
    opened: OpenedPart, keys: pa.Array, first: int, *, one_thread: bool
) -> Iterator[_Group]:
    """The row groups of a part that some of `keys` touch. `keys` begin with the distinct key
    `first` of labels."""
    file, values, part = opened.file, opened.values, opened.part
    wanted: list[tuple[int, int, int, list[str]]] = []
    for number in range(file.num_row_groups):
        meta = file.metadata.row_group(number)
        low, end = 0, len(keys)
        statistics = statistics_of(meta, "key")
        if statistics is not None:
            low, end = _touched(keys, statistics.min, statistics.max)
            if statistics.min > keys[-1].as_py():
                continue  # its range tombstones begin behind all keys too
        if end - low <= _FILTERED_MAX:
            places = range(low, end)
            end = end if any(opened.may_have(number, keys[at].as_py()) for at in places) else low
        # Range tombstones reach beyond the keys of their own row group.
        more = ["op", "end_key"] if may_have_ranges(meta) else ["op"]
        if low < end or "end_key" in more:
            more = [] if _has_puts_alone(meta) else more  # reading them is a tenth of the work
            wanted.append((number, first + low, first + end, ["key", "timestamp", *more]))
    made = (
        _Group(values, part, number, low, end, _sound(file, part, number, columns))
        for number, low, end, columns in wanted
    )
    return ahead(made) if len(wanted) > 1 and not one_thread else made


def _has_puts_alone(meta: pq.RowGroupMetaData) -> bool:
    """Whether the statistics say that all rows are puts."""
    ops = statistics_of(meta, "op")
    return ops is not None and ops.min == ops.max == OP_PUT


def _sound(
    file: pq.ParquetFile, part: ShardPart, number: int, columns: list[str]
) -> pa.RecordBatch:
    with translated(part):
        rows = _read(file, number, columns)
        if "op" in columns and column_numpy(rows, "op").max() > OP_DELETE_RANGE:
            raise ValueError("a row is neither put, delete nor range delete")
    return rows


def _read(file: pq.ParquetFile, number: int, columns: list[str]) -> pa.RecordBatch:
    table = file.read_row_group(number, columns=columns, use_threads=False)
    return pa.RecordBatch.from_arrays(
        [_whole(table.column(name)) for name in columns], names=columns
    )


def _whole(column: pa.ChunkedArray) -> pa.Array:
    return column.chunk(0) if column.num_chunks == 1 else pa.concat_arrays(column.chunks)


class _Search:
    """The newest row of each label so far, and the newest range tombstone over it."""

    def __init__(self, labels: OrderedLabels, bounds: FindBounds) -> None:
        count = len(labels.times)
        self._labels = labels
        self._bounds = bounds
        self._is_open: Bools = np.ones(count, np.bool_)
        self._times = np.full(count, _NOTHING, np.int64)
        self._cover = np.full(count, _NOTHING, np.int64)
        self._sources = np.full(count, _NOTHING, np.int64)
        self._tombstones: list[RangeTombstone] = []
        self._values: list[pa.Array] = []
        self._rows = self._nbytes = 0

    def take(self, group: _Group) -> bool:
        """Take the rows of a row group. False where the search is given up."""
        times = column_numpy(group.rows, "timestamp")
        ops = group.ops()
        if "end_key" in group.rows.schema.names:
            with translated(group.part):
                self._tombstones += _tombstones(group.rows)
        labels, rows = self._matched(group, times, ops)
        better = self._is_open[labels] & (times[rows] > self._times[labels])
        labels, rows = labels[better], rows[better]
        self._times[labels] = times[rows]
        self._sources[labels] = _NOTHING
        is_shown = ops[rows] == OP_PUT
        is_shown &= self._labels.times[labels] - times[rows] <= self._bounds.age_max
        return self._take_values(group, labels[is_shown], rows[is_shown])

    def end_batch(self) -> bool:
        """Close the labels that a row has answered. Returns whether any label is open."""
        self._cover_labels()
        self._is_open &= (self._times == _NOTHING) & (self._cover == _NOTHING)
        return bool(self._is_open.any())

    def found(self) -> Found | None:
        """The answers. None where values have too many bytes."""
        hidden = (self._sources == _NOTHING) | (self._cover > self._times)
        self._times[hidden] = _NOTHING
        if not self._values:
            return Found(pa.nulls(len(hidden), pa.binary()), self._times)
        values = pa.concat_arrays(self._values)
        sources = pa.array(self._sources, mask=hidden)
        lengths = pc.sum(pc.binary_length(values).take(sources)).as_py() or 0
        if lengths > self._bounds.bytes_max and len(hidden) > 1:
            return None
        return Found(values.take(sources), self._times)

    def _matched(self, group: _Group, times: Longs, ops: Longs) -> tuple[Longs, Longs]:
        labels = self._labels
        keys = labels.keys.slice(group.first, group.end - group.first)
        found = match(
            buffers_of(group.rows.column("key")),
            times.data,
            ops.data,
            OP_DELETE_RANGE,
            buffers_of(keys),
            labels.starts[group.first : group.end + 1].data,
            labels.times.data,
        )
        return np.frombuffer(found[0], np.int64), np.frombuffer(found[1], np.int64)

    def _cover_labels(self) -> None:
        """Note for each label the newest range tombstone of the batch that its read sees.

        Between two borders of tombstones the same ones cover all keys. So a sort of the borders,
        and a binary search for each label, are enough however many tombstones lie over a key.
        """
        keys, starts, times = self._labels.keys, self._labels.starts, self._labels.times
        borders: list[tuple[int, bool, int]] = []
        for each in self._tombstones:
            first, last = lower_bound(keys, each.start), lower_bound(keys, each.end)
            if first < last:
                borders += [(first, True, each.timestamp), (last, False, each.timestamp)]
        self._tombstones = []
        active: list[int] = []
        before = 0
        for at, is_start, time in sorted(borders):
            if active and at > before:
                under = slice(starts[before], starts[at])
                place = np.searchsorted(active, times[under], side="right")
                newest = np.array([_NOTHING, *active])[place]
                np.maximum(self._cover[under], newest, out=self._cover[under])
            before = at
            if is_start:
                bisect.insort(active, time)
            else:
                active.remove(time)

    def _take_values(self, group: _Group, labels: Longs, rows: Longs) -> bool:
        if not len(rows):
            return True
        is_first = np.ones(len(rows), np.bool_)
        np.not_equal(rows[1:], rows[:-1], out=is_first[1:])
        self._sources[labels] = self._rows + np.cumsum(is_first) - 1
        values = group.values(rows[is_first])
        self._values.append(values)
        self._rows += len(values)
        self._nbytes += values.nbytes
        return self._nbytes <= self._bounds.bytes_max or len(self._times) == 1


# --------------------------------------------------------------------------------------------------
# The range tombstones of a window. Statistics tell which row groups have any; a part without range
# tombstones costs nothing.

_COLUMNS = ["key", "timestamp", "op", "end_key"]


def range_tombstones(
    batches: Iterable[ShardBatch],
    view: Window,
    span: Span,
    opened: Callable[[ShardPart], OpenedPart],
) -> Iterator[RangeTombstone]:
    """The range tombstones of the window that reach into `span`, whole, in no order.

    `opened` opens a part. Raises `MissingPartError` and `CorruptionError`. Costs a read of each row
    group that has range tombstones and begins below the end of `span`.
    """
    for part in (part for batch in batches for part in batch.parts if part.ranges):
        if part.time_max <= view.since or part.time_min > view.upto:
            continue
        if span.end is not None and part.key_min >= span.end:
            continue
        file = opened(part).file
        for number in range(file.num_row_groups):
            meta = file.metadata.row_group(number)
            keys = statistics_of(meta, "key")
            is_above = keys is not None and span.end is not None and keys.min >= span.end
            if is_above or not may_have_ranges(meta):
                continue
            with translated(part):
                found = _tombstones(_read(file, number, _COLUMNS))
            for each in found:
                is_inside = each.end > span.start and (span.end is None or each.start < span.end)
                if is_inside and view.since < each.timestamp <= view.upto:
                    yield each


def _tombstones(rows: pa.RecordBatch) -> list[RangeTombstone]:
    """The range tombstones among `rows`. Raises `ValueError` where one has no end."""
    places = pa.array(np.flatnonzero(column_numpy(rows, "op") == OP_DELETE_RANGE))
    starts, ends = (rows.column(name).take(places).to_pylist() for name in ("key", "end_key"))
    times = rows.column("timestamp").take(places).to_pylist()
    if not all(end is not None and start < end for start, end in zip(starts, ends, strict=True)):
        raise ValueError("a range delete has no end behind its start")
    return list(map(RangeTombstone, starts, ends, times))
