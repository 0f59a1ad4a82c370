"""The first live row of spans, each at a time of its own, found in one pass over the versions.

Labels are taken in the order of their keys. Versions are read from the first label on, and anew
from a label that lies behind the batch which answered the labels before it. So neighbouring labels
share what is read, and the rows between distant ones are not read.

Invariants
1. A row is live for a label if the newest version of its key at or below the label's time is a put,
   and no range delete is newer. Of one commit, a put counts more than a range delete.
2. Memory is one batch of versions, and the rows that labels have found.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterator, Sequence
from typing import Final, NamedTuple

import numpy as np
import pyarrow as pa

from backup.shard import OP_DELETE_RANGE, OP_PUT
from kvstore.joins.labels import Numbers
from kvstore.mvcc import Fragments
from kvstore.span import Span

_ROWS_AT_ONCE: Final = 256
"""A label compares the times of this many versions at once. Its row is mostly among the first
few."""


class SpanLabels(NamedTuple):
    """Labels in the order of `starts`. `ends` ascend with them."""

    starts: Sequence[bytes]
    ends: Sequence[bytes | None]
    times: Numbers


class RowFound(NamedTuple):
    """The row that a label has found."""

    key: bytes
    value: bytes
    timestamp: int


def first_rows(
    versions: Callable[[Span], Iterator[pa.RecordBatch]],
    cleared: Fragments,
    labels: SpanLabels,
    *,
    bytes_max: int,
) -> list[RowFound | None] | None:
    """The first live row of each label; None where values of several labels have more than
    `bytes_max` bytes. `versions` gives the versions of a span by key, newest first, and `cleared`
    has the range deletes over them.

    Costs a read of the versions between each label and its row.
    """
    found: list[RowFound | None] = [None] * len(labels.starts)
    waiting: list[_Label] = []
    next_at = size = 0
    while next_at < len(found):  # no label waits here
        span = Span(labels.starts[next_at], labels.ends[-1])
        for batch in versions(span):
            if not batch.num_rows:
                continue
            keys = batch.column("key")
            last = keys[len(keys) - 1].as_py()
            while next_at < len(found) and labels.starts[next_at] <= last:
                start, end = labels.starts[next_at], labels.ends[next_at]
                waiting.append(_Label(next_at, start, end, int(labels.times[next_at])))
                next_at += 1
            rows = _Rows(batch, cleared)
            asked, waiting = waiting, []
            for label in asked:
                if not _is_answered(label, rows, found):
                    waiting.append(label)
                elif (row := found[label.at]) is not None:
                    size += len(row.value)
            if size > bytes_max and len(found) > 1:
                return None
            if not waiting:
                break
        else:
            return found  # no version is left
    return found


class _Label:
    """A label that has no row yet. `dead` is the last key that it has looked at."""

    __slots__ = ("at", "dead", "end", "start", "time")

    def __init__(self, at: int, start: bytes, end: bytes | None, time: int) -> None:
        self.at, self.start, self.end, self.time = at, start, end, time
        self.dead: bytes | None = None


class _Rows:
    """The rows of a batch of versions. `is_point` tells them from range deletes."""

    def __init__(self, batch: pa.RecordBatch, cleared: Fragments) -> None:
        self.keys, self.values = batch.column("key"), batch.column("value")
        self.times = batch.column("timestamp").to_numpy()
        self.ops = batch.column("op").to_numpy()
        self.is_point = self.ops != OP_DELETE_RANGE
        self.cleared = cleared

    def key(self, row: int) -> bytes:
        found: bytes = self.keys[row].as_py()
        return found


def _is_answered(label: _Label, rows: _Rows, found: list[RowFound | None]) -> bool:
    """Whether a label has its row after these rows, or can have none."""
    count = len(rows.keys)
    row = bisect_left(range(count), label.start, key=rows.key)
    while row < count:
        some = slice(row, row + _ROWS_AT_ONCE)
        seen = np.flatnonzero((rows.times[some] <= label.time) & rows.is_point[some])
        for at in (seen + row).tolist():
            key = rows.key(at)
            if label.end is not None and key >= label.end:
                return True
            if key == label.dead:
                continue
            cleared = rows.cleared.newest(key, label.time)
            if rows.ops[at] == OP_PUT and rows.times[at] >= cleared:
                value = rows.values[at].as_py()
                found[label.at] = RowFound(key, value, int(rows.times[at]))
                return True
            label.dead = key
        row += _ROWS_AT_ONCE
    last = rows.key(count - 1)
    return label.end is not None and last >= label.end
