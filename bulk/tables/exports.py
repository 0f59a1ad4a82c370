"""A table's state as one Parquet file of typed columns.

Invariants
1. The file has the rows of one time, which stays readable while they are written.
2. The file appears under its name when it is whole and on disk.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, Final, NamedTuple

import pyarrow as pa
import pyarrow.parquet as pq

from bulk.places import appearing_file
from kvstore.errors import UsageError
from kvstore.errors.system import storage_errors
from kvstore.timestamp import TimeLike, Timestamp

_GROUP_ROWS: Final = 128 << 10
"""Rows of a row group: DuckDB's and Polars' own size, so that their threads each take one."""


class ExportReport(NamedTuple):
    """The rows of an export, and the time at which it has them."""

    as_of: Timestamp
    rows: int
    bytes: int


def export_parquet(
    store: Any,
    table: str,
    path: Path,
    as_of: TimeLike | None = None,
    *,
    columns: Sequence[str] | None = None,
    overwrite: bool = True,
    progress: Callable[[int], None] = lambda rows: None,
) -> ExportReport:
    """Write the rows of a table as of a time, in key order. A file that is there is replaced if
    `overwrite` is true, and else refused.

    Nanoseconds, decimals and zones stay as they are. The file's metadata has the time and the table
    (`kvstore.as_of`, `kvstore.table`). Memory is bounded. Raises as `Table.scan`.
    """
    with store.snapshot(as_of) as snapshot:
        reader = snapshot.table(table).scan(columns=columns)
        return write_parquet(
            path, reader.schema, reader, table, snapshot.as_of, progress, overwrite
        )


def write_parquet(
    path: Path,
    schema: pa.Schema,
    batches: Iterable[pa.RecordBatch],
    table: str,
    as_of: Timestamp,
    progress: Callable[[int], None],
    overwrite: bool = True,
) -> ExportReport:
    """Write batches of rows of `table` as of a time. See `export_parquet`."""
    for field in schema:
        if pa.types.is_decimal(field.type) and not 0 <= field.type.scale <= field.type.precision:
            raise UsageError(
                f"table {table!r}, column {field.name!r} is {field.type}, which Parquet lacks",
                "leave the column out: name the other columns in columns=",
            )
    rows = 0
    told = {"kvstore.as_of": str(int(as_of)), "kvstore.table": table}
    schema = schema.with_metadata(told)
    with (
        appearing_file(path, overwrite=overwrite) as passing,
        pq.ParquetWriter(passing, schema, compression="zstd") as writer,
    ):
        waiting: list[pa.RecordBatch] = []
        for batch in batches:
            waiting.append(batch)
            rows += batch.num_rows
            if sum(each.num_rows for each in waiting) >= _GROUP_ROWS:
                writer.write_table(pa.Table.from_batches(waiting).cast(schema))
                waiting = []
                progress(rows)
        if waiting:
            writer.write_table(pa.Table.from_batches(waiting).cast(schema))
    with storage_errors(str(path)):
        return ExportReport(as_of, rows, path.stat().st_size)
