"""Changes as a client receives them: rows of Arrow batches become `Event` and `Change`."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any, Final

import pyarrow as pa

from kvstore.changes import Change
from kvstore.changes.change import ExpiringChange, Op
from kvstore.changes.changeset import ChangesetId
from kvstore.changes.columns import changes_schema
from kvstore.changes.entry import OP_DELETE, OP_DELETE_RANGE, OP_PUT
from kvstore.changes.event import Event, ExpiringEvent, Operation
from kvstore.timestamp import Timestamp

_OPS: Final[dict[int, Op]] = {
    OP_PUT: "put",
    OP_DELETE: "delete",
    OP_DELETE_RANGE: "delete_range",
}
_CHANGE: Final = ("timestamp", "op", "key", "end_key", "value", "expires")


def changes_of(batches: Iterable[pa.RecordBatch]) -> Iterator[Change]:
    """The changes of batches, in their order."""
    for timestamp, op, key, end_key, value, due in _rows(batches, _CHANGE):
        change = Change(Timestamp(timestamp), _OPS[op], key, end_key, value)
        yield change if due is None else ExpiringChange.of(change, due)


def events_of(batches: Iterable[pa.RecordBatch], *, is_cut: bool = False) -> Iterator[Event]:
    """The events of batches, in their order; each commit's events follow each other. If `is_cut`,
    the last commit has more events than came."""
    before: tuple[Any, ...] | None = None
    for row in _rows(batches, tuple(changes_schema().names)):
        if before is not None:
            yield _event(before, is_last=before[0] != row[0])
        before = row
    if before is not None:
        yield _event(before, is_last=not is_cut)


def _rows(batches: Iterable[pa.RecordBatch], names: Iterable[str]) -> Iterator[tuple[Any, ...]]:
    for batch in batches:
        yield from zip(*(_column(batch, name) for name in names), strict=True)


def _column(batch: pa.RecordBatch, name: str) -> list[Any]:
    if name == "expires" and name not in batch.schema.names:  # from a server that does not tell it
        return [None] * batch.num_rows
    found: list[Any] = batch.column(name).to_pylist()
    return found


def _event(row: tuple[Any, ...], *, is_last: bool) -> Event:
    time, sequence, op, key, end_key, value, pre, post, changeset, stream, due = row
    domain, serial = int.from_bytes(changeset[:8], "big"), int.from_bytes(changeset[8:], "big")
    event = Event(
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
    return event if due is None else ExpiringEvent.of(event, due)
