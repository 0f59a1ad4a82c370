"""Keys and values as files that `kvstore import` reads: JSON lines, CSV, TSV, Parquet or Arrow.

Invariants
1. The file has the rows of one time, which stays readable while they are written.
2. The file appears under its name when it is whole and on disk. A pipe gets rows as they come.
3. An import of the file gives the same keys and values. Bytes that a format cannot hold are
   refused.
"""

from __future__ import annotations

import os
import secrets
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final, NamedTuple

import pyarrow as pa
import pyarrow.csv as pa_csv
import pyarrow.parquet as pq

from bulk.files import FileFormat, compression_of, format_of
from bulk.json_lines import line_of
from kvstore.errors import UsageError, printable
from kvstore.errors.system import storage_errors
from kvstore.journal.files import OsFiles
from kvstore.snapshot import Snapshot
from kvstore.span import Span
from kvstore.timestamp import Timestamp

_TEXT: Final = pa.schema([("key", pa.string()), ("value", pa.string())])
_GROUP_ROWS: Final = 128 << 10
_GROUP_BYTES: Final = 64 << 20
"""A row group is held in memory until it is written."""


class RowsExported(NamedTuple):
    """The rows of an export, and the time at which it has them."""

    as_of: Timestamp
    rows: int
    bytes: int


def export_rows(
    snapshot: Snapshot,
    path: Path,
    span: Span,
    notation: Callable[[bytes, str], str] | None = None,
    *,
    progress: Callable[[int], None] = lambda rows: None,
) -> RowsExported:
    """Write the rows of a span to a file, whose name ends in its format. A file that is there is
    replaced. `notation` writes a key or a value (the second argument tells which) as text; by
    default it must be UTF-8. Raises `UsageError`.
    """
    if path.is_dir():
        raise UsageError(f"{path} is a directory", "name a file in it")
    if not path.parent.is_dir():
        raise UsageError(f"there is no directory {path.parent}", "make it first")
    kind = format_of(path)
    passing = path.with_name(f".{path.name}.{secrets.token_hex(4)}.tmp")
    with storage_errors(str(path)):
        try:
            with pa.output_stream(str(passing), compression=compression_of(path)) as sink:
                rows = write_rows(sink, kind, _batches(snapshot, span), notation, progress)
            with passing.open("rb") as file:
                os.fsync(file.fileno())
            os.replace(passing, path)
            OsFiles().sync_directory(str(path.parent))
        finally:
            passing.unlink(missing_ok=True)
        return RowsExported(snapshot.as_of, rows, path.stat().st_size)


def write_rows(
    sink: Any,
    kind: FileFormat,
    batches: Iterator[pa.RecordBatch],
    notation: Callable[[bytes, str], str] | None,
    progress: Callable[[int], None],
) -> int:
    """Write batches of keys and values to an open file, or a pipe; the number of rows."""
    rows = 0
    with _writer(sink, kind, notation) as write:
        for batch in batches:
            write(batch)
            rows += batch.num_rows
            progress(rows)
    return rows


def _batches(snapshot: Snapshot, span: Span) -> Iterator[pa.RecordBatch]:
    yield from snapshot.scan_batches(span.start, span.end)


@contextmanager
def _writer(
    sink: Any, kind: FileFormat, notation: Callable[[bytes, str], str] | None
) -> Iterator[Callable[[pa.RecordBatch], object]]:
    if kind == "jsonl":
        yield lambda batch: sink.write(_lines(batch, notation))
        return
    if kind in ("csv", "tsv"):
        options = pa_csv.WriteOptions(delimiter="\t" if kind == "tsv" else ",")
        with pa_csv.CSVWriter(sink, _TEXT, write_options=options) as csv:
            yield lambda batch: csv.write_batch(_as_text(batch, notation))
        return
    schema = pa.schema([("key", pa.binary()), ("value", pa.binary())])
    if kind == "parquet":
        with pq.ParquetWriter(sink, schema, compression="zstd") as parquet:
            groups = _Groups(parquet, schema)
            yield groups.add
            groups.write()
        return
    with pa.ipc.new_stream(sink, schema) as arrow:
        yield lambda batch: arrow.write_batch(batch.cast(schema))


class _Groups:
    """Gathers batches into row groups. A group for each batch would double the file."""

    def __init__(self, writer: pq.ParquetWriter, schema: pa.Schema) -> None:
        self._writer, self._schema = writer, schema
        self._waiting: list[pa.RecordBatch] = []
        self._rows = self._bytes = 0

    def add(self, batch: pa.RecordBatch) -> None:
        """Take a batch, and write a group when it is large enough."""
        self._waiting.append(batch.cast(self._schema))
        self._rows += batch.num_rows
        self._bytes += batch.nbytes
        if self._rows >= _GROUP_ROWS or self._bytes >= _GROUP_BYTES:
            self.write()

    def write(self) -> None:
        """Write the batches so far as one group."""
        if self._waiting:
            self._writer.write_table(pa.Table.from_batches(self._waiting))
        self._waiting, self._rows, self._bytes = [], 0, 0


def _lines(batch: pa.RecordBatch, notation: Callable[[bytes, str], str] | None) -> bytes:
    columns = {}
    for name, column in zip(("key", "value"), batch.columns, strict=True):
        raw = column.to_pylist()
        columns[name] = raw if notation is None else [notation(x, name).encode() for x in raw]
    return b"".join(
        line_of({"key": key, "value": value})
        for key, value in zip(columns["key"], columns["value"], strict=True)
    )


def _as_text(batch: pa.RecordBatch, notation: Callable[[bytes, str], str] | None) -> pa.RecordBatch:
    columns = []
    for name, column in zip(("key", "value"), batch.columns, strict=True):
        if notation is not None:
            texts = [notation(raw, name) for raw in column.to_pylist()]
        else:
            texts = [_text(raw, name) for raw in column.to_pylist()]
        columns.append(pa.array(texts, pa.string()))
    return pa.RecordBatch.from_arrays(columns, schema=_TEXT)


def _text(raw: bytes, name: str) -> str:
    try:
        return raw.decode()
    except UnicodeDecodeError as error:
        raise UsageError(
            f"{name} {printable(raw[:40])} is no text",
            "pass --encoding base64 here and to import, or export Parquet or JSON lines",
        ) from error
