"""The range tombstones in the parts of a shard, found without a read of other rows.

Statistics tell which row groups have any. A part without range tombstones costs nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator

import pyarrow as pa
import pyarrow.compute as pc

from kvstore.backup.shard.rows.part_reader import OpenedPart, may_have_ranges, translated
from kvstore.backup.shard.rows.rules import OP_DELETE_RANGE, Window
from kvstore.backup.shard.state.trace import ShardBatch, ShardPart
from kvstore.base.span import Span
from kvstore.mvcc import RangeTombstone

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
            keys = meta.column(0).statistics
            is_above = keys is not None and keys.has_min_max and span.end is not None
            if not may_have_ranges(meta) or (is_above and keys.min >= span.end):
                continue
            with translated(part):
                rows = file.read_row_group(number, columns=_COLUMNS, use_threads=False)
                yield from _of(rows, span, view.since, view.upto)


def _of(rows: pa.Table, span: Span, since: int, upto: int) -> Iterator[RangeTombstone]:
    ranges = rows.filter(pc.equal(rows["op"], OP_DELETE_RANGE))
    columns = (ranges[name].to_pylist() for name in ("key", "end_key", "timestamp"))
    for start, end, timestamp in zip(*columns, strict=True):
        if end is None or start >= end:
            raise ValueError("a range delete has no end behind its start")
        is_inside = end > span.start and (span.end is None or start < span.end)
        if is_inside and since < timestamp <= upto:
            yield RangeTombstone(start, end, timestamp)
