"""A DataFrame as rows of a table: encoded by the tasks that sort them, with their index entries.

Invariants
1. Types are checked before any task runs, values by the task that encodes them. A refusal names the
   column, and the row by its place in its partition.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import pyarrow as pa
from pyspark import TaskContext
from pyspark.sql import DataFrame

from bulk.tables import stored_batches
from kvstore.errors import UsageError
from kvstore.tables import TableCodec
from kvstore.tables.conform import conform
from kvstore.tables.definition import Definition
from spark_connector.interfaces import utc_schema


@dataclass(frozen=True)
class RowEncoder:
    """Makes keys and values of the rows of a table, in a task."""

    table: str
    definition: bytes

    def __call__(self, batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        definition = Definition.from_bytes(self.table, self.definition)
        codec = TableCodec(definition)
        first = 0
        for batch in batches:
            try:
                rows = conform(definition, batch, first)
            except UsageError as error:
                raise UsageError(f"{error.what}{_place()}", error.remedy) from None
            first += batch.num_rows
            yield from stored_batches(codec, rows)


def require_columns(df: DataFrame, codec: TableCodec) -> None:
    """Raise `UsageError` unless the DataFrame has columns of the table alone, in types that hold
    its values, and every column that takes no null."""
    schema = utc_schema(df.schema)
    empty = pa.RecordBatch.from_arrays([pa.array([], f.type) for f in schema], schema=schema)
    conform(codec.definition, empty)


def _place() -> str:
    task = TaskContext.get()
    return "" if task is None else f" of partition {task.partitionId()} of the DataFrame"
