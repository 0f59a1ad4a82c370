"""A DataFrame as rows of a table: encoded by the tasks that sort them, with their index entries.

Invariants
1. Types are checked before any task runs, values by the task that encodes them. A refusal names the
   column, and the row by its place in its partition.
2. A row and its index entries have one due time.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Final

import pyarrow as pa
from pyspark import TaskContext
from pyspark.sql import Column, DataFrame

from bulk.definitions import EncodedBy
from bulk.encoded import key_text, stored_batches, stored_schema
from bulk.pushes.rows import sharded_batches, sharded_schema
from bulk.sort import Duplicates
from kvstore.columns import due_column
from kvstore.errors import KeyOrderError, UsageError
from kvstore.tables import Table, TableCodec
from kvstore.tables.conform import conform
from kvstore.tables.definition import Definition
from spark_connector.interfaces import utc_schema
from spark_connector.loading.columns import column_of, require_time, selected
from spark_connector.loading.rows import ImportRows

_DUE: Final = "kvstore_due"
"""The last column of a DataFrame whose rows expire."""


@dataclass(frozen=True)
class RowEncoder:
    """Makes keys and values of the rows of a table, in a task. With `expires` the last column has
    the due times; errors call it by this name. With `shards` each row tells its shard."""

    table: str
    definition: bytes
    names: tuple[str, ...]
    """The names of the columns, without the due times. The batches of a task have numbers in their
    place: Spark reads a dot and a backquote in a name as parts of the name."""
    expires: str | None = None
    shards: int | None = None

    @property
    def schema(self) -> pa.Schema:
        """The columns of the batches that it makes."""
        stored = stored_schema(expires=self.expires is not None)
        return stored if self.shards is None else sharded_schema(stored)

    def __call__(self, batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        definition = Definition.from_bytes(self.table, self.definition)
        codec = TableCodec(definition)
        first = 0
        for batch in batches:
            try:
                given, dues = self._timed(batch, first)
                rows = conform(definition, _with_times(definition, given), first)
            except UsageError as error:
                raise UsageError(f"{error.what}{_place()}", error.remedy) from None
            first += batch.num_rows
            stored = stored_batches(codec, rows, dues)
            yield from stored if self.shards is None else sharded_batches(stored, self.shards)

    def _timed(self, batch: pa.RecordBatch, first: int) -> tuple[pa.RecordBatch, pa.Array | None]:
        """The columns of the table, and the due times as nanoseconds: null for rows that stay."""
        given = batch.select(range(len(self.names))).rename_columns(list(self.names))
        if self.expires is None:
            return given, None
        return given, due_column(batch.column(len(self.names)), self.expires, first)


def table_rows(
    df: DataFrame,
    codec: TableCodec,
    *,
    expires: Column | str | None = None,
    partitions: int | None = None,
    shards: int | None = None,
) -> ImportRows:
    """The rows of a load into the table of `codec`, or of a push of `shards`.

    Raises `UsageError` unless the DataFrame has columns of the table alone, in types that hold its
    values, and every column that takes no null. `expires` has the due times: an expression, or the
    name of one more column.
    """
    name, definition = None if expires is None else str(expires), codec.definition
    rows, names = _numbered(df, definition, expires)
    _require_columns(rows, definition, names)
    encoder = RowEncoder(definition.name, codec.stored, names, name, shards)
    made = [EncodedBy.of(codec)]
    return ImportRows(rows, "key", "value", partitions=partitions, encoder=encoder, tables=made)


def require_typed(table: Table, duplicates: Duplicates, *given: object) -> None:
    """Raise `UsageError` for the choices of a load of keys and values."""
    if any(each is not None for each in given) or duplicates != "error":
        raise UsageError(
            f"a load into table {table.name!r} with key, value, op, splits, duplicates or order_by",
            "leave them out: the table has a key",
        )


@contextmanager
def rows_once(codec: TableCodec | None) -> Iterator[None]:
    """Name a row of a table that came twice by the columns of its key."""
    try:
        yield
    except KeyOrderError as error:
        if codec is None:
            raise
        what = f"the row {key_text(codec, error.key)} came twice"
        raise UsageError(what, "remove duplicates: df.dropDuplicates") from error


def _numbered(
    df: DataFrame, definition: Definition, expires: Column | str | None
) -> tuple[DataFrame, tuple[str, ...]]:
    """The rows under numbers in the place of names, with their due times in the last column, and
    the names. A named column that the table lacks has due times alone."""
    rows, names = df, df.columns
    if expires is not None:
        what = "the times at which rows expire"
        rows = selected(df, [df["*"], column_of(df, expires, what).alias(_DUE)], what)
        require_time(str(expires), rows.schema.fields[-1].dataType)
    rows = rows.toDF(*(f"column_{number}" for number in range(len(rows.columns))))
    if isinstance(expires, str) and expires in names and expires not in definition.by_name:
        rows = rows.drop(f"column_{names.index(expires)}")
        names = [name for name in names if name != expires]
    return rows, tuple(names)


def _require_columns(df: DataFrame, definition: Definition, names: Sequence[str]) -> None:
    fields = list(utc_schema(df.schema))[: len(names)]
    empty = pa.RecordBatch.from_arrays([pa.array([], each.type) for each in fields], list(names))
    conform(definition, _with_times(definition, empty))


def _with_times(definition: Definition, batch: pa.RecordBatch) -> pa.RecordBatch:
    """The batch with times of day where it has what Spark reads them as: integers of
    nanoseconds."""
    columns = [
        column.cast(pa.int64()).view(pa.time64("ns"))
        if name in definition.by_name
        and pa.types.is_time(definition.by_name[name].type)
        and pa.types.is_signed_integer(column.type)
        else column
        for name, column in zip(batch.schema.names, batch.columns, strict=True)
    ]
    return pa.RecordBatch.from_arrays(columns, names=batch.schema.names)


def _place() -> str:
    task = TaskContext.get()
    return "" if task is None else f" of partition {task.partitionId()} of the DataFrame"
