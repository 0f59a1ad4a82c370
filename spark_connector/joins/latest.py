"""Labels that ask a table with an event time: each gets the newest row whose event time is not
above the label's time, among the rows that were known at another time.

A label moves with the bytes of its key, without the event time. Its task reads the columns of the
key back from these bytes, and joins them to the table of the origin.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from datetime import timedelta
from itertools import chain
from typing import Final

import pyarrow as pa

from bulk.tables.outside import outside_values
from kvstore.tables.side import ROW_TIMESTAMP
from spark_connector.joins.answers import time_column
from spark_connector.joins.table_rows import TIMES, VERSION, asked_key
from spark_connector.origins.origin import Origin
from spark_connector.reading.schema import arrow_schema
from spark_connector.reading.typed import TypedRows

_PART: Final = "kvstore_part_"
_ROW: Final = "kvstore_row_"


def latest_rows(
    origin: Origin,
    table: TypedRows,
    labels: Iterable[pa.RecordBatch],
    columns: Sequence[str],
    names: Sequence[str],
    max_age: timedelta | None,
    *,
    key: str,
    at: str,
    known_at: str,
) -> Iterator[pa.RecordBatch]:
    """The labels with `columns` of the rows that they ask for, all under `names`, and without their
    columns `key`, `at` and `known_at`. There is at least one batch of labels."""
    typed = [name for name in columns if name not in TIMES]
    schema = arrow_schema(table.offered(changes=False, columns=typed))
    parts = [f"{_PART}{number}" for number in range(len(asked_key(table, by_event=True).columns))]
    asked = (_with_parts(batch, table, key, parts) for batch in labels)
    first = next(asked)
    kept = [name for name in first.schema.names if name not in (key, at, known_at, *parts)]
    reader = pa.RecordBatchReader.from_batches(first.schema, chain([first], asked))
    with origin.rows_of(table.name) as rows:
        joined = rows.join(reader, parts, at, known_at, max_age, typed, prefix=_ROW)
        for batch in joined:
            times = batch.column(_ROW + ROW_TIMESTAMP)
            added = [
                time_column(times, is_exact=name == VERSION)
                if name in TIMES
                else _cast(table, batch.column(_ROW + name), schema.field(name))
                for name in columns
            ]
            yield pa.RecordBatch.from_arrays([*batch.select(kept).columns, *added], names=names)


def _with_parts(
    batch: pa.RecordBatch, table: TypedRows, key: str, parts: Sequence[str]
) -> pa.RecordBatch:
    """The labels with the columns of their keys."""
    found = asked_key(table, by_event=True).arrays(batch.column(key).cast(pa.binary()))
    return pa.RecordBatch.from_arrays([*batch.columns, *found], names=[*batch.schema.names, *parts])


def _cast(table: TypedRows, array: pa.Array, field: pa.Field) -> pa.Array:
    def named(_: int) -> str:
        return f"{table.where}, column {field.name!r}"

    return outside_values(array, field.type, named)
