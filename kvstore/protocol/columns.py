"""The Arrow columns and the media types in which rows travel.

    rows of a scan       kvstore.arrow.rows_schema
    changes and events   kvstore.changes.columns.changes_schema
    epochs               the fields of kvstore.changes.epoch.Epoch
    keys alone           key binary
    keys to be read      key binary, as_of int64 nullable (left out: one time for all)
    values               value binary, nullable
    labels of a join     key binary, at int64
    writes and reads     op uint8 (see `WriteOp`), key binary, end binary nullable, value binary
                         nullable, expires int64 nullable (left out: nothing expires)

A stream that fails after it has begun ends with a batch of no rows, whose custom metadata has the
error as JSON under `ERROR_NAME`, and without the end of the HTTP body.
"""

from __future__ import annotations

from enum import IntEnum
from typing import Final

import pyarrow as pa

ARROW_TYPE: Final = "application/vnd.apache.arrow.stream"
JSON_TYPE: Final = "application/json"
OCTETS_TYPE: Final = "application/octet-stream"

ERROR_NAME: Final = b"kvstore.error"
"""The key of the metadata that carries the error of a stream."""


POSITION_NAME: Final = b"kvstore.position"
"""The key of the metadata that carries the position of a feed behind a batch."""


class WriteOp(IntEnum):
    """The operation of a row of a batch. The codes of writes are the same as in the change
    index."""

    READ = 0
    PUT = 1
    READ_RANGE = 2
    DELETE = 3
    DELETE_RANGE = 5


READ_SCHEMA: Final = pa.schema(
    [pa.field("key", pa.binary(), nullable=False), pa.field("as_of", pa.int64())]
)
KEYS_SCHEMA: Final = pa.schema([pa.field("key", pa.binary(), nullable=False)])
LABELS_SCHEMA: Final = pa.schema(
    [pa.field("key", pa.binary(), nullable=False), pa.field("at", pa.int64(), nullable=False)]
)
EPOCHS_SCHEMA: Final = pa.schema(
    [
        ("domain", pa.uint64()),
        ("begin", pa.uint64()),
        ("end", pa.uint64()),
        ("events", pa.int64()),
        ("closed_at", pa.int64()),
        ("quiescent", pa.bool_()),
        ("ended", pa.bool_()),
    ]
)
VALUES_SCHEMA: Final = pa.schema([pa.field("value", pa.binary())])
WRITES_SCHEMA: Final = pa.schema(
    [
        pa.field("op", pa.uint8(), nullable=False),
        pa.field("key", pa.binary(), nullable=False),
        pa.field("end", pa.binary()),
        pa.field("value", pa.binary()),
        pa.field("expires", pa.int64()),
    ]
)
"""`expires` is a time, or below zero the nanoseconds from the time at which the server takes it."""
