"""Changes of rows as Arrow batches, with the names of the change feed of Delta.

the columns of the table
_change_type       "insert", "update_preimage", "update_postimage" or "delete"
_commit_version    the timestamp of the commit, in nanoseconds
_commit_timestamp  the same as a timestamp of microseconds, rounded up: a read as of it has the row
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import islice
from typing import Any, Final, Literal, TypeAlias

import pyarrow as pa

from kvstore.arrow import to_microseconds
from kvstore.changes import Change
from kvstore.errors import UsageError
from kvstore.limits import SCAN_CHUNK
from kvstore.span import Span
from kvstore.tables.codec import TableCodec
from kvstore.tables.evolve import two_named
from kvstore.timestamp import Timestamp

RowImages: TypeAlias = Literal["pre+post", "post", "pre"]
CHANGE_FIELDS: Final = [
    pa.field("_change_type", pa.string(), nullable=False),
    pa.field("_commit_version", pa.int64(), nullable=False),
    pa.field("_commit_timestamp", pa.timestamp("us", "UTC"), nullable=False),
]
ChangedRow: TypeAlias = tuple[str, int, bytes, bytes]
"""The type of a change, its time, and the key and value of the row."""


def change_schema(codec: TableCodec, columns: Sequence[str] | None) -> pa.Schema:
    """The schema of the changes. Raises `UsageError` for a column of an older table that has the
    name of an added one."""
    chosen = codec.schema_of(columns)
    for field in CHANGE_FIELDS:
        if field.name in chosen.names:
            raise two_named(codec.definition, field.name)
    return pa.schema([*chosen, *CHANGE_FIELDS])


def require_images(images: object) -> None:
    """Raise `UsageError` for an unknown choice."""
    if images not in ("pre+post", "post", "pre"):
        raise UsageError(f"images={images!r}", "pass 'pre+post', 'post' or 'pre'")


def changed_batches(
    store: Any,
    codec: TableCodec,
    changes: Iterator[Change],
    *,
    images: RowImages,
    columns: Sequence[str] | None,
) -> Iterator[pa.RecordBatch]:
    """The changes of rows, in batches. A look-up for each."""
    points = _points(store, changes)
    while chunk := list(islice(points, SCAN_CHUNK)):
        before = store.get_many([key for _, key, _ in chunk], [at - 1 for at, _, _ in chunk])
        rows: list[ChangedRow] = []
        for (at, key, after), old in zip(chunk, before, strict=True):
            rows += images_of(at, key, old, after, images)
        if rows:
            yield rows_batch(codec, rows, columns)


def rows_batch(
    codec: TableCodec, rows: Sequence[ChangedRow], columns: Sequence[str] | None
) -> pa.RecordBatch:
    """Changed rows as a batch of `change_schema`."""
    kinds, versions, keys, values = map(list, zip(*rows, strict=True)) if rows else ([],) * 4
    decoded = codec.decode(pa.array(keys, pa.binary()), pa.array(values, pa.binary()), columns)
    commits = pa.array(versions, pa.int64())
    added = [pa.array(kinds, pa.string()), commits, to_microseconds(commits)]
    schema = change_schema(codec, columns)
    return pa.RecordBatch.from_arrays([*decoded.columns, *added], schema=schema)


def images_of(
    at: int, key: bytes, old: bytes | None, new: bytes | None, images: RowImages
) -> Iterator[ChangedRow]:
    """The rows that tell the change of one row from `old` to `new`. None if it was not there."""
    if old is not None and new is not None:
        if images != "post":
            yield "update_preimage", at, key, old
        if images != "pre":
            yield "update_postimage", at, key, new
    elif new is not None:
        if images != "pre":
            yield "insert", at, key, new
    elif old is not None:
        yield "delete", at, key, old


def _points(
    store: Any, changes: Iterator[Change]
) -> Iterator[tuple[Timestamp, bytes, bytes | None]]:
    """Each change of a key: time, key and value. A range delete is one of each key that it hit."""
    for at, op, key, end, value in changes:
        if op == "delete_range":
            span = Span(key, end)
            for gone, _ in store.scan(span.start, span.end, as_of=Timestamp(at - 1)):
                if store.get(gone, as_of=at) is None:
                    yield at, gone, None
        else:
            yield at, key, value
