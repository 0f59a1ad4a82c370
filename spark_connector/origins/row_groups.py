"""Row groups of a collection's parts: their statistics, and reading rows of them.

Statistics may be wider than the rows of a group, never narrower. So skipping a group by its
statistics loses no row.
"""

from __future__ import annotations

import bisect
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from backup.shard import OP_DELETE_RANGE, UNTIL, ShardPart
from backup.shard.rows.part_reader import translated
from kvstore.mvcc import Cover
from kvstore.span import Span
from kvstore.timestamp import TIMESTAMP_MAX


class Group(NamedTuple):
    """One row group: its place and its statistics, where None is unknown."""

    part: ShardPart
    file: pq.ParquetFile
    number: int
    first: bytes | None
    last: bytes | None
    oldest: int
    newest: int
    op_min: int
    op_max: int
    replaced: int
    """Before this time each version of the group is the newest of its key in the part."""
    rows: int
    size_bytes: int

    def may_hold(self, span: Span) -> bool:
        """Whether a key of `span` can be in it."""
        above = self.last is not None and self.last < span.start
        below = self.first is not None and span.end is not None and self.first >= span.end
        return not above and not below

    def begins_before(self, end: bytes | None) -> bool:
        """Whether a key below `end` may be in it, so that a range delete may reach below `end`."""
        return self.first is None or end is None or self.first < end

    def lies_in(self, span: Span) -> bool:
        """Whether all its keys are known to lie in `span`."""
        if self.first is None or self.last is None:
            return False
        return span.start <= self.first and (span.end is None or self.last < span.end)

    def read(self, columns: Sequence[str]) -> pa.Table:
        """These columns of all rows, in one chunk each.

        Raises `CorruptionError` if their bytes differ from the written ones.
        """
        with translated(self.part):
            found = self.file.read_row_group(self.number, columns=list(columns))
        return found.combine_chunks()

    def times(self, since: int, upto: int) -> npt.NDArray[np.int64]:
        """The times of the rows in the window `(since, upto]`, in no order."""
        found: npt.NDArray[np.int64] = self.read(["timestamp"])["timestamp"].to_numpy()
        return found[(found > since) & (found <= upto)]


def row_group(part: ShardPart, file: pq.ParquetFile, index: int) -> Group:
    """One row group of a part, by its footer."""
    found = file.metadata.row_group(index)
    columns = {
        found.column(number).path_in_schema: found.column(number)
        for number in range(found.num_columns)
    }
    keys, times, ops = (columns[name].statistics for name in ("key", "timestamp", "op"))
    has_keys = keys is not None and keys.has_min_max
    assert times is not None, "numbers have statistics"
    assert ops is not None
    return Group(
        part=part,
        file=file,
        number=index,
        first=keys.min if has_keys else None,
        last=keys.max if has_keys else None,
        oldest=times.min,
        newest=times.max,
        op_min=ops.min,
        op_max=ops.max,
        replaced=_first_replaced(columns.get(UNTIL.name)),
        rows=found.num_rows,
        size_bytes=found.total_byte_size,
    )


def _first_replaced(until: pq.ColumnChunkMetaData | None) -> int:
    if until is None or (statistics := until.statistics) is None:
        return 0
    if statistics.has_min_max:
        return int(statistics.min)
    return TIMESTAMP_MAX + 1 if statistics.null_count == until.num_values else 0


def columns_with(columns: Sequence[str], *more: str) -> list[str]:
    """The columns, and behind them the names of `more` that are new."""
    return [*columns, *(name for name in more if name not in columns)]


def points(group: Group, columns: Sequence[str], span: Span, *, since: int, upto: int) -> pa.Table:
    """The puts and deletes of the window and the span in a row group."""
    table = group.read(columns)
    keys, times = table["key"], table["timestamp"]
    keep = pc.and_(pc.greater(times, since), pc.less_equal(times, upto))
    keep = pc.and_(keep, pc.not_equal(table["op"], OP_DELETE_RANGE))
    if span.start:
        keep = pc.and_(keep, pc.greater_equal(keys, pa.scalar(span.start, pa.binary())))
    if span.end is not None:
        keep = pc.and_(keep, pc.less(keys, pa.scalar(span.end, pa.binary())))
    return table.filter(keep)


def first_of_each_key(table: pa.Table, previous: bytes | None) -> pa.Table:
    """The first row of each key, but none of the key `previous`. Equal keys must lie together."""
    keys = table["key"].combine_chunks()
    if isinstance(keys, pa.ChunkedArray):
        keys = keys.chunk(0) if keys.num_chunks else pa.array([], pa.binary())
    if not len(keys):
        return table
    fresh = np.ones(len(keys), dtype=bool)
    fresh[0] = previous is None or keys[0].as_py() != previous
    fresh[1:] = pc.not_equal(keys[1:], keys[:-1]).to_numpy(zero_copy_only=False)
    return table if fresh.all() else table.filter(pa.array(fresh))


def uncovered(table: pa.Table, cover: Cover) -> pa.Table:
    """The rows that no newer range delete covers. Costs one binary search per row."""
    newest = np.array([0, *cover.newest], dtype=np.int64)
    at = [bisect.bisect_right(cover.starts, key) for key in table["key"].to_pylist()]
    keep = newest[np.array(at, dtype=np.int64)] <= table["timestamp"].to_numpy()
    return table.filter(pa.array(keep))
