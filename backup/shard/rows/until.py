"""Until: when a version stops being the newest of its key, so that readers need no merge.

    until int64    of a put or delete: the timestamp of the next newer put or delete of its key in
                   the same part; null where there is none, and at range tombstones

What a part says is alive at t is then a filter, which any program can apply to rows in any order:
`op = 1 and timestamp <= t and (until is null or until > t)`, and no newer range tombstone over
it. Where a key's versions lie in two parts, the older ones do not know the newer: look at the
parts' bounds before relying on the filter.
"""

from __future__ import annotations

from typing import Final

import numpy as np
import pyarrow as pa

from backup.shard.rows.rules import OP_DELETE_RANGE, column_numpy, same_as_previous

UNTIL: Final = pa.field("until", pa.int64())


class Until:
    """The column of one part, for one of its row groups after the other."""

    def __init__(self) -> None:
        self._key: bytes | None = None
        self._timestamp = 0

    def __call__(self, group: pa.RecordBatch, *, is_distinct: bool) -> pa.Array:
        """The column of `group`, which follows those before. O(rows) in Arrow, none by row.

        `is_distinct`: the caller knows that no two of its rows have the same key."""
        points = np.flatnonzero(column_numpy(group, "op") != OP_DELETE_RANGE)
        if not len(points):
            return pa.nulls(group.num_rows, pa.int64())
        keys = group.column("key")
        if len(points) < group.num_rows:
            keys = keys.take(pa.array(points))
        times = column_numpy(group, "timestamp")[points]
        older = np.zeros(len(points), np.bool_) if is_distinct else same_as_previous(keys)
        older[0] = keys[0].as_py() == self._key
        newer = np.concatenate([[self._timestamp], times[:-1]])
        self._key, self._timestamp = keys[-1].as_py(), int(times[-1])
        if not older.any():
            return pa.nulls(group.num_rows, pa.int64())
        until = np.zeros(group.num_rows, np.int64)
        until[points[older]] = newer[older]
        return pa.array(until, mask=until == 0)
