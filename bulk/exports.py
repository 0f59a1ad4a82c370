"""Keys and values as files that `kvstore import` reads: JSON lines, CSV, TSV, Parquet or Arrow.

Invariants
1. The file has the rows of one time, which stays readable while they are written.
2. The file appears under its name when it is whole and on disk. A pipe gets rows as they come.
3. An import of the file gives the same keys and values, which expire at the same times. Bytes that
   a format cannot hold are refused, and so are rows too long for it.
4. The column `expires` is there only if a key of the span may expire, or has expired.
"""

from __future__ import annotations

import io
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO, Final, NamedTuple

import pyarrow as pa
import pyarrow.csv as pa_csv
import pyarrow.parquet as pq

from kvstore.base.span import Span
from kvstore.base.timestamp import Timestamp
from kvstore.bulk.row_files import FileFormat, compression_of, format_of, line_of
from kvstore.bulk.seed import appearing_file
from kvstore.errors import UsageError, printable, storage_errors
from kvstore.limits import TEXT_ROW_BYTES_MAX
from kvstore.mvcc.expiry_records import carried_of
from kvstore.readable import ReadableAt
from kvstore.remote.control import StoreOrClient
from kvstore.store import Store
from kvstore.transaction import Expiry

_ROWS: Final = pa.schema([("key", pa.binary()), ("value", pa.binary())])
_EXPIRES: Final = pa.field("expires", pa.timestamp("ns", "UTC"))
_GROUP_ROWS: Final = 128 << 10
_GROUP_BYTES: Final = 64 << 20
"""A row group is held in memory until it is written."""


class RowsExported(NamedTuple):
    """The rows of an export, and the time at which it has them."""

    as_of: Timestamp
    rows: int
    bytes: int


class SpanRows(NamedTuple):
    """The live rows of a span at one time: their columns, and their batches."""

    schema: pa.Schema
    batches: Iterator[pa.RecordBatch]


def live_rows(store: StoreOrClient, snapshot: ReadableAt, span: Span) -> SpanRows:
    """The rows of a span at the time of a snapshot, with their due times if keys may expire.
    Raises `UsageError` for such keys of a client, which does not learn their due times."""
    batches = iter(snapshot.scan_batches(span.start, span.end))
    if not isinstance(store, Store):
        records = carried_of(span)
        if next(store.scan(records.start, records.end, limit=1), None) is not None:
            raise UsageError(
                "keys of the span expire, and a server does not tell when",
                "export on the machine of the store, by its path",
            )
        return SpanRows(_ROWS, (batch.cast(_ROWS) for batch in batches))
    expiry = Expiry(store.requests.parts)
    if not expiry.may_be_in(span):
        return SpanRows(_ROWS, (batch.cast(_ROWS) for batch in batches))
    schema = _ROWS.append(_EXPIRES)

    def with_dues() -> Iterator[pa.RecordBatch]:
        for batch in batches:
            dues = expiry.due_times(batch.column("key").to_pylist(), snapshot.as_of)
            columns = [*batch.cast(_ROWS).columns, pa.array(dues, pa.int64()).cast(_EXPIRES.type)]
            yield pa.RecordBatch.from_arrays(columns, schema=schema)

    return SpanRows(schema, with_dues())


def export_rows(
    store: StoreOrClient,
    snapshot: ReadableAt,
    path: Path,
    span: Span,
    notation: Callable[[bytes, str], str] | None = None,
    *,
    overwrite: bool = True,
    progress: Callable[[int], None] = lambda rows: None,
) -> RowsExported:
    """Write the rows of a span to a file, whose name ends in its format. A file that is there is
    replaced if `overwrite` is true, and else refused. `notation` writes a key or a value (the
    second argument tells which) as text; by default it must be UTF-8. Raises `UsageError`.
    """
    with (
        appearing_file(path, overwrite=overwrite) as passing,
        pa.output_stream(str(passing), compression=compression_of(path)) as sink,
    ):
        found = live_rows(store, snapshot, span)
        rows = write_rows(sink, format_of(path), found, notation, progress)
    with storage_errors(str(path)):
        return RowsExported(snapshot.as_of, rows, path.stat().st_size)


def write_rows(
    sink: Any,
    kind: FileFormat,
    rows: SpanRows,
    notation: Callable[[bytes, str], str] | None,
    progress: Callable[[int], None],
) -> int:
    """Write rows to an open file, or a pipe; returns their number."""
    written = 0
    with _writer(sink, kind, rows.schema, notation) as write:
        for batch in rows.batches:
            write(batch)
            written += batch.num_rows
            progress(written)
    return written


@contextmanager
def packed(pipe: BinaryIO, name: Path) -> Iterator[Any]:
    """A sink that compresses as the last ending of `name` says, and writes to `pipe`."""
    compression = compression_of(name)
    if compression is None:
        yield pipe
        return
    with pa.CompressedOutputStream(_Open(pipe), compression) as sink:
        yield sink


class _Open(io.RawIOBase):
    """Writes to a pipe, and leaves it open: the end of a compression closes what it writes to."""

    def __init__(self, pipe: BinaryIO) -> None:
        self._pipe = pipe

    def writable(self) -> bool:
        return True

    def write(self, data: Any) -> int:
        return self._pipe.write(data)


@contextmanager
def _writer(
    sink: Any, kind: FileFormat, schema: pa.Schema, notation: Callable[[bytes, str], str] | None
) -> Iterator[Callable[[pa.RecordBatch], object]]:
    if kind == "jsonl":
        yield lambda batch: sink.write(_lines(batch, notation))
        return
    if kind in ("csv", "tsv"):
        options = pa_csv.WriteOptions(delimiter="\t" if kind == "tsv" else ",")
        text = pa.schema([(name, pa.string()) for name in schema.names])
        with pa_csv.CSVWriter(sink, text, write_options=options) as csv:
            yield lambda batch: csv.write_batch(_as_text(batch, notation))
        return
    if kind == "parquet":
        with pq.ParquetWriter(sink, schema, compression="zstd") as parquet:
            groups = _Groups(parquet, schema)
            yield groups.add
            groups.write()
        return
    with pa.ipc.new_stream(sink, schema) as arrow:
        yield arrow.write_batch


class _Groups:
    """Gathers batches into row groups. A group for each batch would double the file."""

    def __init__(self, writer: pq.ParquetWriter, schema: pa.Schema) -> None:
        self._writer, self._schema = writer, schema
        self._waiting: list[pa.RecordBatch] = []
        self._rows = self._bytes = 0

    def add(self, batch: pa.RecordBatch) -> None:
        """Take a batch, and write a group when it is large enough."""
        self._waiting.append(batch)
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
    for name in ("key", "value"):
        raw = batch.column(name).to_pylist()
        columns[name] = raw if notation is None else [notation(x, name).encode() for x in raw]
    if _EXPIRES.name in batch.schema.names:
        columns[_EXPIRES.name] = [due and due.encode() for due in _instants(batch)]
    rows = zip(*columns.values(), strict=True)
    lines = [line_of(dict(zip(columns, row, strict=True))) for row in rows]
    for key, line in zip(batch.column("key").to_pylist(), lines, strict=True):
        _require_short(key, len(line))
    return b"".join(lines)


def _require_short(key: bytes, size: int) -> None:
    """Raise `UsageError` for a row that an import of text would refuse."""
    if size > TEXT_ROW_BYTES_MAX:
        raise UsageError(
            f"the row of key {printable(key)} has more than {TEXT_ROW_BYTES_MAX >> 20} MiB as text",
            "export Parquet or Arrow",
        )


def _as_text(batch: pa.RecordBatch, notation: Callable[[bytes, str], str] | None) -> pa.RecordBatch:
    columns = []
    keys = batch.column("key").to_pylist()
    for name in ("key", "value"):
        raws = batch.column(name).to_pylist()
        if notation is None:
            texts = [_text(raw, name, key) for raw, key in zip(raws, keys, strict=True)]
        else:
            texts = [notation(raw, name) for raw in raws]
        columns.append(pa.array(texts, pa.string()))
    if batch.nbytes > TEXT_ROW_BYTES_MAX // 4:
        for row in range(batch.num_rows):
            texts = [column[row].as_py() for column in columns]
            # Two quotes and a delimiter a field; a quote in a value is written twice.
            size = sum(len(text.encode()) + text.count('"') + 3 for text in texts)
            _require_short(keys[row], size + len(f'"{Timestamp(0)}",'))
    if _EXPIRES.name in batch.schema.names:
        columns.append(pa.array(_instants(batch), pa.string()))
    return pa.RecordBatch.from_arrays(columns, batch.schema.names)


def _instants(batch: pa.RecordBatch) -> list[str | None]:
    """The due times of rows as text that an import reads."""
    dues = batch.column(_EXPIRES.name).cast(pa.int64()).to_pylist()
    return [None if due is None else str(Timestamp(due)) for due in dues]


def _text(raw: bytes, name: str, key: bytes) -> str:
    try:
        return raw.decode()
    except UnicodeDecodeError as error:
        what = f"key {printable(key)}" if name == "key" else f"the value of key {printable(key)}"
        raise UsageError(
            f"{what} is no text",
            "pass --encoding base64 here and to import, or export Parquet or JSON lines",
        ) from error
