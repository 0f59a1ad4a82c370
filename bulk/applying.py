"""Rows as ordinary commits: puts and deletes in their order, or the differences to a span.

    apply_rows(store, rows)         columns key, value, op: each row is a put or a delete
    sync_rows(store, rows, span)    afterwards the span has exactly these rows

Many new rows come by an import (`bulk.loading`). These functions are for few writes: rows that
differ from the store, or rows that delete.

Invariants
1. `sync_rows` writes no key that has its value already, so rows that are all there cost a pass over
   the span and no commit.
2. A commit has at most `APPLY_BYTES_MAX` bytes of keys and values. Up to there all rows become
   visible at one time; more rows come in several commits of one changeset.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import nullcontext
from itertools import chain
from typing import Any, NamedTuple

import pyarrow as pa

from bulk.ingest import staging_beside
from bulk.sort import Duplicates, sorted_batches
from kvstore.control.scripts import client_of
from kvstore.errors import UsageError, printable
from kvstore.limits import APPLY_BYTES_MAX
from kvstore.span import Span
from kvstore.store import Store
from kvstore.timestamp import Timestamp

_ROW_BYTES = 64
"""A row's share of a commit beside its key and value: a file of empty rows is bounded as well."""


class RowsApplied(NamedTuple):
    """The writes that were made. `timestamp` is None if there were none."""

    timestamp: Timestamp | None
    puts: int
    deletes: int
    commits: int


def apply_rows(store: Store, rows: Iterable[pa.RecordBatch]) -> RowsApplied:
    """Put and delete the rows in their order. Column `op` has `put` or `delete`.

    The value of a delete is not read. Raises `UsageError` for another operation and for a null.
    """
    return _applied(store, _operations(rows))


def sync_rows(
    store: Store,
    rows: Iterable[pa.RecordBatch],
    span: Span,
    duplicates: Duplicates = "error",
    *,
    progress: Callable[[int], None] = lambda rows: None,
) -> RowsApplied:
    """Make `span` have exactly the rows, and write the differences alone.

    Rows come in any order; more than fit into memory are sorted on the store's disk. Costs a pass
    over the span. Raises `UsageError` for a key outside the span, for a key that comes twice,
    unless `duplicates` is `"last"`, and for no rows at all where the span has keys: they come from
    a pipe whose first command failed more often than from a wish to delete the span. Another
    writer of the span may leave a difference.
    """
    with staging_beside(store) as directory:
        directory.mkdir(parents=True)
        ordered = sorted_batches(rows, directory / "sorting", duplicates=duplicates)
        wanted = _not_empty(span, _inside(span, _pairs(ordered)), store)
        return _applied(store, _differences(wanted, store.scan(span.start, span.end), progress))


_Operation = tuple[bytes, "bytes | None"]
"""A key, and its new value; None deletes it."""


def _operations(rows: Iterable[pa.RecordBatch]) -> Iterator[_Operation]:
    number = 0
    for batch in rows:
        for key, value, op in zip(*(column.to_pylist() for column in batch.columns), strict=True):
            number += 1
            if key is None or (value is None and op == "put"):
                raise UsageError(f"row {number} has a null", "give it a key and a value")
            if op not in ("put", "delete"):
                raise UsageError(f"row {number}: operation {op!r}", "write put or delete")
            yield key, value if op == "put" else None


def _pairs(batches: Iterable[pa.RecordBatch]) -> Iterator[tuple[bytes, bytes]]:
    for batch in batches:
        keys, values = (column.to_pylist() for column in batch.columns[:2])
        yield from zip(keys, values, strict=True)


def _inside(span: Span, rows: Iterable[tuple[bytes, bytes]]) -> Iterator[tuple[bytes, bytes]]:
    before: bytes | None = None
    for key, value in rows:
        if key not in span:
            raise UsageError(
                f"key {printable(key)} is outside the span", "sync the span that the file has"
            )
        if key == before:
            raise UsageError(
                f"key {printable(key)} came twice",
                "remove one row of it, or pass --duplicates last",
            )
        yield key, value
        before = key


def _not_empty(
    span: Span, rows: Iterator[tuple[bytes, bytes]], store: Store
) -> Iterator[tuple[bytes, bytes]]:
    first = next(rows, None)
    if first is not None:
        return chain([first], rows)
    if next(store.scan(span.start, span.end), None) is not None:
        raise UsageError(
            "there are no rows, and a sync would delete every key of the span",
            "look why the input is empty, or delete the span by delete_range",
        )
    return rows


def _differences(
    wanted: Iterator[tuple[bytes, bytes]],
    present: Iterator[tuple[bytes, bytes]],
    progress: Callable[[int], None],
) -> Iterator[_Operation]:
    """The operations that turn `present` into `wanted`. Both ascend by key."""
    rows = 0
    row, old = next(wanted, None), next(present, None)
    while row is not None or old is not None:
        if old is None or (row is not None and row[0] < old[0]):
            assert row is not None
            yield row
            row = next(wanted, None)
        elif row is None or old[0] < row[0]:
            yield old[0], None
            old = next(present, None)
        else:
            if row[1] != old[1]:
                yield row
            row, old = next(wanted, None), next(present, None)
        rows += 1
        if rows % 10_000 == 0:
            progress(rows)


def _applied(store: Store, operations: Iterator[_Operation]) -> RowsApplied:
    """Write the operations. The owner of the store does it for a script beside it."""
    owner = client_of(store)
    target: Any = store if owner is None else owner
    stamp: Timestamp | None = None
    puts = deletes = commits = 0
    with store.changeset() if owner is None else nullcontext():
        waiting = next(operations, None)
        while waiting is not None:
            size = 0
            with target.batch(durability="sync") as batch:
                while waiting is not None and size < APPLY_BYTES_MAX:
                    key, value = waiting
                    if value is None:
                        batch.delete(key)
                        deletes += 1
                    else:
                        batch.put(key, value)
                        puts += 1
                    size += len(key) + len(value or b"") + _ROW_BYTES
                    waiting = next(operations, None)
            stamp, commits = batch.timestamp, commits + 1
    return RowsApplied(stamp, puts, deletes, commits)
