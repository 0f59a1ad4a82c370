"""The records of expiries in a backup: `kvstore.mvcc.expiry` has their keys.

They are ordinary rows of a collection. A restore of a few keys reads the records of these keys from
where they lie, beside the rows.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path

import pyarrow as pa

from backup.restore import Built, built_from
from backup.shard.rows.rules import AsOf, View, Window
from backup.shard.rows.tally import Tally
from backup.shard.snapshot import ShardSnapshot
from kvstore.errors import UsageError
from kvstore.mvcc.expiry import CARRIED, EXPIRY, carried_key, decode_waiting, waiting_from
from kvstore.span import Span, prefix_end

_RECORDS = Span.of_prefix(EXPIRY)


def has_expiries(snapshot: ShardSnapshot, span: Span) -> bool:
    """Whether `span`, if it holds the records of expiries, has any in a snapshot, alive or not."""
    found = span.intersect(_RECORDS.start, _RECORDS.end)
    return found is not None and _any(snapshot.view(Window(-1, snapshot.as_of), found))


def refuse_expiries(snapshot: ShardSnapshot, span: Span) -> None:
    """Raise `UsageError` if a key in `span` expires, as of the time of a snapshot."""
    if _any(snapshot.view(AsOf(snapshot.as_of), _carried_of(span))):
        raise UsageError(
            "the backup has keys that expire, and an import has no expiries",
            "restore into a new store, or choose keys that do not expire",
        )


def expiries_outside(
    snapshot: ShardSnapshot, view: View, span: Span, directory: Path, tally: Tally
) -> Iterator[Built]:
    """Build the files of the records of the keys in `span`, if they lie outside of it."""
    if span.intersect(_RECORDS.start, _RECORDS.end) is not None:
        return
    place = directory / "expiries"
    place.mkdir()
    yield from built_from(tally.over(_records(snapshot, view, span)), place)


def _records(snapshot: ShardSnapshot, view: View, span: Span) -> Iterator[pa.RecordBatch]:
    yield from snapshot.view(view, _carried_of(span))
    for batch in snapshot.view(view, waiting_from(0)):
        keys = batch.column("key").to_pylist()
        wanted = pa.array([decode_waiting(key).key in span for key in keys], pa.bool_())
        yield batch.filter(wanted)


def _carried_of(span: Span) -> Span:
    end = prefix_end(CARRIED) if span.end is None else carried_key(span.end)
    return Span(carried_key(span.start), end)


def _any(batches: Iterable[pa.RecordBatch]) -> bool:
    return any(batch.num_rows for batch in batches)
