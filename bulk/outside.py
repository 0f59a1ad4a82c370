"""Columns of tables for the world outside: the types of other systems, and files."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final, NamedTuple

import pyarrow as pa
import pyarrow.csv as pa_csv
import pyarrow.parquet as pq

from kvstore.base.timestamp import TimeLike, Timestamp
from kvstore.bulk.row_files import FileFormat, compression_of, format_of
from kvstore.bulk.seed import appearing_file
from kvstore.errors import UsageError, storage_errors
from kvstore.limits import TEXT_ROW_BYTES_MAX
from kvstore.tables.exact import is_text, rebuilt
from kvstore.tables.nested import is_nested, mapped, only_lists
from kvstore.tables.row_codec import dicts
from kvstore.tables.words import cell_text, json_row

# --------------------------------------------------------------------------------------------------
# Columns of tables for systems that have fewer types: Spark, Delta, and programs that read them.
#
#     uint8, uint16, uint32     the next wider integer
#     uint64                    decimal(20,0)
#     UUID, fixed binary        binary
#     timestamps                of microseconds, in UTC or without a zone
#     time of day, and every type of nanoseconds      int64 of nanoseconds
#     large list, list of fixed size                  list
#     all other types           as they are
#
# Invariants
# 1. No value is changed. A value that the other type does not hold is refused.

PRECISION_MAX: Final = 38
"""Digits of a decimal in Spark and Delta."""

_WIDER: Final = {pa.uint8(): pa.int16(), pa.uint16(): pa.int32(), pa.uint32(): pa.int64()}


def outside_type(kind: pa.DataType) -> pa.DataType | None:
    """The type that holds the values of a column elsewhere. None if none does."""
    if is_nested(kind):
        found = mapped(kind, outside_type)
        return None if found is None else only_lists(found)
    if kind == pa.large_string():
        return pa.string()
    if is_binary(kind):
        return pa.binary()
    if getattr(kind, "unit", "") == "ns" or pa.types.is_time(kind):
        return pa.int64()
    if pa.types.is_timestamp(kind):
        return pa.timestamp("us", None if kind.tz is None else "UTC")
    if pa.types.is_uint64(kind):
        return pa.decimal128(20, 0)
    if pa.types.is_decimal(kind):
        is_held = 0 <= kind.scale <= kind.precision <= PRECISION_MAX
        return pa.decimal128(kind.precision, kind.scale) if is_held else None
    return _WIDER.get(kind, kind)


def is_binary(kind: pa.DataType) -> bool:
    """Whether values of the type are bytes."""
    return isinstance(kind, pa.UuidType) or bool(
        pa.types.is_binary(kind)
        or pa.types.is_large_binary(kind)
        or pa.types.is_fixed_size_binary(kind)
    )


def outside_values(array: pa.Array, wanted: pa.DataType, named: Callable[[int], str]) -> pa.Array:
    """A column of a table in another type. Raises `UsageError` for the first value that the type
    does not hold; `named` names the value by its number."""
    try:
        return _converted(array, wanted)
    except pa.ArrowInvalid:
        row = next(at for at in range(len(array)) if not _converts(array[at : at + 1], wanted))
        raise UsageError(
            f"{named(row)}: the value fits {array.type}, and not {wanted}",
            "leave the column out: name the other columns in columns",
        ) from None


def _converted(array: pa.Array, wanted: pa.DataType) -> pa.Array:
    kind = array.type
    if kind == wanted:
        return array
    if is_nested(kind):
        return rebuilt(array, wanted, _converted)
    if isinstance(kind, pa.UuidType):
        return array.storage.cast(pa.binary()).cast(wanted)
    if pa.types.is_time(kind):
        return array.cast(pa.time64("ns")).cast(pa.int64())
    if pa.types.is_fixed_size_binary(kind):
        return array.cast(pa.binary()).cast(wanted)
    return array.cast(wanted)


def _converts(array: pa.Array, wanted: pa.DataType) -> bool:
    try:
        _converted(array, wanted)
    except pa.ArrowInvalid:
        return False
    return True


# --------------------------------------------------------------------------------------------------
# A table's state as one file: Parquet or Arrow with the types of its columns, JSON lines or CSV.
#
# Invariants
# 1. The file has the rows of one time, which stays readable while they are written.
# 2. The file appears under its name when it is whole and on disk. A pipe gets rows as they come.
# 3. `kvstore table import` reads the same values from it. An exception is CSV, which tells no null
#    from an empty text; the report counts such nulls. Bytes that are no UTF-8 are refused there.

_GROUP_ROWS: Final = 128 << 10
"""Rows of a row group: DuckDB's and Polars' own size, so that their threads each take one."""


class ExportReport(NamedTuple):
    """The rows of an export, and the time at which it has them. `emptied` counts the nulls of text
    columns that CSV has as empty texts."""

    as_of: Timestamp
    rows: int
    bytes: int
    emptied: int = 0


def export_table(
    store: Any,
    table: str,
    path: Path,
    as_of: TimeLike | None = None,
    *,
    columns: Sequence[str] | None = None,
    overwrite: bool = True,
    progress: Callable[[int], None] = lambda rows: None,
) -> ExportReport:
    """Write the rows of a table as of a time, in key order. The name of the file tells the format.
    A file that is there is replaced if `overwrite` is true, and else refused.

    Parquet and Arrow keep nanoseconds, decimals and zones; their metadata has the time and the
    table (`kvstore.as_of`, `kvstore.table`). Memory is bounded. Raises as `Table.scan`, and
    `UsageError` for a value that the format does not hold.
    """
    kind = format_of(path)
    with store.snapshot(as_of) as snapshot:
        reader = snapshot.table(table).scan(columns=columns)
        if kind == "parquet":
            at = snapshot.as_of
            return write_parquet(path, reader.schema, reader, table, at, progress, overwrite)
        with (
            appearing_file(path, overwrite=overwrite) as passing,
            pa.output_stream(str(passing), compression=compression_of(path)) as sink,
        ):
            written = write_table(sink, kind, reader, table, snapshot.as_of, progress)
        with storage_errors(str(path)):
            return written._replace(bytes=path.stat().st_size)


def write_table(
    sink: Any,
    kind: FileFormat,
    reader: pa.RecordBatchReader,
    table: str,
    as_of: Timestamp,
    progress: Callable[[int], None] = lambda rows: None,
) -> ExportReport:
    """Write rows of `table` as of a time to an open file or a pipe. Raises as `export_table`."""
    if kind == "parquet":
        rows = _write_groups(sink, reader.schema, reader, table, as_of, progress)
        return ExportReport(as_of, rows, 0)
    rows, texts = 0, _Texts(table)
    with _writer(sink, kind, reader.schema.with_metadata(_facts(table, as_of)), texts) as write:
        for batch in reader:
            write(batch)
            rows += batch.num_rows
            progress(rows)
    return ExportReport(as_of, rows, 0, texts.emptied)


@contextmanager
def _writer(
    sink: Any, kind: FileFormat, schema: pa.Schema, texts: _Texts
) -> Iterator[Callable[[pa.RecordBatch], object]]:
    if kind == "jsonl":
        yield lambda batch: sink.write(texts.lines(batch))
    elif kind == "arrow":
        with pa.ipc.new_stream(sink, schema) as arrow:
            yield lambda batch: arrow.write_batch(batch.cast(schema))
    else:
        options = pa_csv.WriteOptions(delimiter="\t" if kind == "tsv" else ",")
        plain = pa.schema([(name, pa.string()) for name in schema.names])
        with pa_csv.CSVWriter(sink, plain, write_options=options) as csv:
            yield lambda batch: csv.write_batch(texts.columns(batch))


def _facts(table: str, as_of: Timestamp) -> dict[str, str]:
    return {"kvstore.as_of": str(int(as_of)), "kvstore.table": table}


class _Texts:
    """The rows of a table as text."""

    def __init__(self, table: str) -> None:
        self._table = table
        self._rows = 0
        self.emptied = 0
        """The nulls of text columns so far."""

    def lines(self, batch: pa.RecordBatch) -> bytes:
        """Rows as JSON lines."""
        found = []
        for number, row in enumerate(dicts(batch), self._rows + 1):
            line = json.dumps(json_row(batch.schema, row), ensure_ascii=False).encode()
            self._require_short(number, len(line))
            found.append(line + b"\n")
        self._rows += batch.num_rows
        return b"".join(found)

    def columns(self, batch: pa.RecordBatch) -> pa.RecordBatch:
        """Rows as columns of text."""
        texts = []
        for name, array in zip(batch.schema.names, batch.columns, strict=True):
            found = self._text(array, name)
            if is_text(array.type):
                self.emptied += array.null_count
            texts.append(found)
        if batch.nbytes > TEXT_ROW_BYTES_MAX // 4:
            for at in range(batch.num_rows):
                cells = (column[at].as_py() or "" for column in texts)
                # Two quotes and a delimiter a field; a quote in a value is written twice.
                size = sum(len(cell.encode()) + cell.count('"') + 3 for cell in cells)
                self._require_short(self._rows + at + 1, size)
        self._rows += batch.num_rows
        return pa.RecordBatch.from_arrays(texts, batch.schema.names)

    def _text(self, array: pa.Array, name: str) -> pa.Array:
        kind = array.type
        if isinstance(kind, pa.UuidType):
            return pa.array([value and str(value) for value in array.to_pylist()], pa.string())
        if is_nested(kind):
            values = (row[name] for row in dicts(pa.record_batch([array], [name])))
            return pa.array([cell_text(kind, value) for value in values], pa.string())
        if pa.types.is_duration(kind):
            return array.cast(pa.int64()).cast(pa.string())
        if not is_binary(kind):
            return array.cast(pa.string())
        raw = array.cast(pa.binary())
        try:
            return raw.cast(pa.string())
        except pa.ArrowInvalid:
            at = next(at for at in range(len(raw)) if not _is_utf8(raw[at].as_py()))
            raise UsageError(
                f"table {self._table!r}, column {name!r}: row {self._rows + at + 1} is no text",
                "export Parquet, Arrow or JSON lines, or leave the column out by --columns",
            ) from None

    def _require_short(self, number: int, size: int) -> None:
        if size > TEXT_ROW_BYTES_MAX:
            raise UsageError(
                f"table {self._table!r}: row {number} has more than {TEXT_ROW_BYTES_MAX >> 20} MiB "
                "as text",
                "export Parquet or Arrow",
            )


def _is_utf8(raw: bytes | None) -> bool:
    try:
        (raw or b"").decode()
    except UnicodeDecodeError:
        return False
    return True


def write_parquet(
    path: Path,
    schema: pa.Schema,
    batches: Iterable[pa.RecordBatch],
    table: str,
    as_of: Timestamp,
    progress: Callable[[int], None],
    overwrite: bool = True,
) -> ExportReport:
    """Write batches of rows of `table` as of a time. See `export_table`."""
    with appearing_file(path, overwrite=overwrite) as passing:
        rows = _write_groups(passing, schema, batches, table, as_of, progress)
    with storage_errors(str(path)):
        return ExportReport(as_of, rows, path.stat().st_size)


def _parquet_type(kind: pa.DataType) -> pa.DataType | None:
    """A flat type, if Parquet has it."""
    is_lacking = pa.types.is_decimal(kind) and not 0 <= kind.scale <= kind.precision
    return None if is_lacking else kind


def _write_groups(
    sink: Any,
    schema: pa.Schema,
    batches: Iterable[pa.RecordBatch],
    table: str,
    as_of: Timestamp,
    progress: Callable[[int], None],
) -> int:
    """Write Parquet, in row groups of many batches; returns the number of rows."""
    for field in schema:
        if mapped(field.type, _parquet_type) is None:
            raise UsageError(
                f"table {table!r}, column {field.name!r} is {field.type}, which Parquet lacks",
                "leave the column out: name the other columns in columns=",
            )
    rows, schema = 0, schema.with_metadata(_facts(table, as_of))
    with pq.ParquetWriter(sink, schema, compression="zstd") as writer:
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
    return rows
