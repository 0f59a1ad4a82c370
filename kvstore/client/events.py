"""Changes as a client receives them: rows of Arrow batches become `Event` and `Change`."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any, Final

import pyarrow as pa

from kvstore.changes import Change
from kvstore.changes.change import Op
from kvstore.changes.changeset import ChangesetId
from kvstore.changes.columns import CHANGES_SCHEMA
from kvstore.changes.entry import OP_DELETE, OP_DELETE_RANGE, OP_PUT
from kvstore.changes.event import Event, Operation
from kvstore.timestamp import Timestamp

_OPS: Final[dict[int, Op]] = {
    OP_PUT: "put",
    OP_DELETE: "delete",
    OP_DELETE_RANGE: "delete_range",
}
_CHANGE: Final = ("timestamp", "op", "key", "end_key", "value")
_EVENT: Final = tuple(CHANGES_SCHEMA.names)


def changes_of(batches: Iterable[pa.RecordBatch]) -> Iterator[Change]:
    """The changes of batches, in their order."""
    for timestamp, op, key, end_key, value in _rows(batches, _CHANGE):
        yield Change(Timestamp(timestamp), _OPS[op], key, end_key, value)


def events_of(batches: Iterable[pa.RecordBatch], *, is_cut: bool = False) -> Iterator[Event]:
    """The events of batches, in their order; each commit's events follow each other. If `is_cut`,
    the last commit has more events than came."""
    before: tuple[Any, ...] | None = None
    for row in _rows(batches, _EVENT):
        if before is not None:
            yield _event(before, is_last=before[0] != row[0])
        before = row
    if before is not None:
        yield _event(before, is_last=not is_cut)


def _rows(batches: Iterable[pa.RecordBatch], names: Iterable[str]) -> Iterator[tuple[Any, ...]]:
    for batch in batches:
        yield from zip(*(batch.column(name).to_pylist() for name in names), strict=True)


def _event(row: tuple[Any, ...], *, is_last: bool) -> Event:
    time, sequence, op, key, end_key, value, pre, post, changeset, stream = row
    domain, serial = int.from_bytes(changeset[:8], "big"), int.from_bytes(changeset[8:], "big")
    return Event(
        Timestamp(time),
        sequence,
        Operation(op),
        key,
        end_key,
        value,
        pre,
        post,
        ChangesetId(domain, serial),
        stream,
        is_last,
    )
