"""Reads Parquet, CSV, TSV, JSON lines, Arrow and Feather files: as keys and values, as events, or
as rows of a table. Text may be compressed by gzip or zstd.

Files are read batch by batch, so a file need not fit in memory. Keys and values are binary or text;
text becomes its UTF-8 bytes. Other types are refused, because a number has more than one text.
Events have keys, values and times; a time may be text. Rows of a table have the types of its
columns; a CSV file is read with these types.
"""

from __future__ import annotations

import io
import re
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Final, Literal, TypeAlias

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.csv as pa_csv
import pyarrow.parquet as pq

from bulk.json_lines import first_fields, read_lines
from bulk.progress import Reading
from kvstore.columns import decoded, due_column
from kvstore.errors import StorageError, UsageError
from kvstore.limits import ARROW_ROWS_MAX

FileFormat: TypeAlias = Literal["parquet", "csv", "tsv", "jsonl", "arrow"]

_SUFFIXES: Final[dict[str, FileFormat]] = {
    ".parquet": "parquet",
    ".pq": "parquet",
    ".csv": "csv",
    ".tsv": "tsv",
    ".jsonl": "jsonl",
    ".ndjson": "jsonl",
    ".arrow": "arrow",
    ".feather": "arrow",
    ".ipc": "arrow",
}
COMPRESSIONS: Final = {".gz": "gzip", ".zst": "zstd"}
"""The compression of a file of text, by the last ending of its name."""
_CSV_BLOCK_BYTES: Final = 8 << 20
_CONVERSION: Final = re.compile(r"In CSV column #(\d+): Row #(\d+): (.*)", re.DOTALL)
_AS_BYTES: Final = None
"""The types of columns that are read as bytes."""
_SCHEMA: Final = pa.schema([("key", pa.binary()), ("value", pa.binary())])


def format_of(path: Path) -> FileFormat:
    """The format, by the ending of the file's name. Raises `UsageError`."""
    is_compressed = compression_of(path) is not None
    found = _SUFFIXES.get((path.with_suffix("") if is_compressed else path).suffix.lower())
    if found is None:
        raise UsageError(f"{path}: unknown kind of file", f"name it one of {', '.join(_SUFFIXES)}")
    if is_compressed and found not in ("csv", "tsv", "jsonl"):
        remedy = f"unpack the file, or name it without {path.suffix}"
        raise UsageError(f"{path}: {found} has a compression of its own", remedy)
    return found


def compression_of(path: Path) -> str | None:
    """The compression, by the last ending of the file's name."""
    return COMPRESSIONS.get(path.suffix.lower())


@contextmanager
def _unpacked(path: Path, reading: Reading | None = None) -> Iterator[pa.NativeFile]:
    """The text of a file. `reading` follows the bytes that are read of it."""
    with pa.OSFile(str(path)) as file:
        size = max(path.stat().st_size, 1)
        if reading is not None:
            reading.follow(path, lambda: 1.0 if file.closed else file.tell() / size)
        compression = compression_of(path)
        if compression is None:
            yield file
            return
        with pa.CompressedInputStream(file, compression) as source:
            yield source


def column_names(path: Path) -> list[str]:
    """The names of the columns of a file; of JSON lines, the fields of the first one. Raises
    `UsageError` as `file_rows`."""
    kind = format_of(path)
    with _translated(path):
        if kind == "parquet":
            return list(pq.read_schema(path).names)
        if kind == "arrow":
            return next((list(batch.schema.names) for batch in _arrow(path, None, None, None)), [])
        if kind == "jsonl":
            with _unpacked(path) as source:
                return first_fields(io.BufferedReader(source), str(path))
        return next((list(batch.schema.names) for batch in _csv(path, None, _AS_BYTES, None)), [])


def file_rows(
    paths: Iterable[Path],
    *,
    key: str,
    value: str,
    expires: str | None = None,
    op: str | None = None,
    reading: Reading | None = None,
) -> Iterator[pa.RecordBatch]:
    """Yield batches with the binary columns `key` and `value`, from the named columns of each file.
    If they are named, columns `expires` of times and `op` of text follow.

    Rows come in the order of the files and of the rows in them. A time that is text is as in
    `file_events`; an empty text is none. Raises `UsageError` if a file cannot be read, or lacks a
    column, or has a column of another type.
    """
    more = [name for name in (expires, op) if name is not None]
    names = [*_distinct(key, value), *more]
    if len(set(names)) < len(names):
        raise UsageError(f"columns {', '.join(names)}: one is named twice", "name each column once")
    for path in paths:
        opener, first = _opener(path), 0
        with _translated(path):
            for read in opener(path, names, _AS_BYTES, reading):
                batch = read.select(names)
                # Arrow trusts offsets and indices; a damaged file's lead out of its memory.
                batch.validate(full=True)
                columns = [_binary(batch, name, path) for name in (key, value)]
                rows = pa.RecordBatch.from_arrays(columns, schema=_SCHEMA)
                if expires is not None:
                    rows = rows.append_column("expires", due_times(batch, expires, path, first))
                if op is not None:
                    rows = rows.append_column("op", _binary(batch, op, path).cast(pa.string()))
                first += batch.num_rows
                yield rows


def file_events(
    paths: Iterable[Path],
    *,
    key: str,
    value: str,
    at: str,
    op: str | None = None,
    reading: Reading | None = None,
) -> Iterator[pa.RecordBatch]:
    """Yield batches with the named columns of each file: keys and values as `file_rows`, times, and
    operations if `op` is given, as `bulk.seed` takes them.

    A time that is text is ISO-8601 with a zone, or a number of nanoseconds. Raises `UsageError` as
    `file_rows`, and for a column that is named for two things.
    """
    names = [key, value, at] if op is None else [key, value, at, op]
    if len(set(names)) < len(names):
        raise UsageError(f"columns {', '.join(names)}: one is named twice", "name each column once")
    for path in paths:
        opener = _opener(path)
        with _translated(path):
            for read in opener(path, names, _AS_BYTES, reading):
                batch = read.select(names)
                batch.validate(full=True)
                columns = [_binary(batch, name, path) for name in (key, value)]
                columns.append(_times(batch, at, path))
                if op is not None:
                    columns.append(_binary(batch, op, path).cast(pa.string()))
                yield pa.RecordBatch.from_arrays(columns, names=names)


def typed_batches(
    path: Path, schema: pa.Schema, reading: Reading | None = None
) -> Iterator[pa.RecordBatch]:
    """All columns of a file. `schema` gives the types of the columns of a CSV file. Raises as
    `file_rows`."""
    opener = _opener(path)
    with _translated(path):
        for batch in opener(path, None, schema, reading):
            batch.validate(full=True)
            yield batch


def due_times(batch: pa.RecordBatch, name: str, path: Path, first: int) -> pa.Array:
    """A column of due times as nanoseconds, null for rows that stay. Text is as in `file_rows`.
    `first` is the number of the first row. Raises `UsageError`."""
    _require_columns(path, batch.schema.names, [name])
    times = _times(batch, name, path, has_none=True)
    try:
        return due_column(times, name, first)
    except UsageError as error:
        raise UsageError(f"{path}: {error.what}", error.remedy) from None


Opener: TypeAlias = (
    "Callable[[Path, list[str] | None, pa.Schema | None, Reading | None], Iterator[pa.RecordBatch]]"
)


def _opener(path: Path) -> Opener:
    openers: dict[FileFormat, Opener] = {
        "parquet": _parquet,
        "csv": _csv,
        "tsv": _csv,
        "jsonl": _json_lines,
        "arrow": _arrow,
    }
    return openers[format_of(path)]


def _json_lines(
    path: Path, wanted: list[str] | None, types: pa.Schema | None, reading: Reading | None
) -> Iterator[pa.RecordBatch]:
    if wanted is None or types is not None:
        raise UsageError(f"{path}: rows of a table have types", "write them as CSV or Parquet")
    with _unpacked(path, reading) as source:
        yield from read_lines(io.BufferedReader(source), str(path), wanted)


def _parquet(
    path: Path, wanted: list[str] | None, _: object, reading: Reading | None
) -> Iterator[pa.RecordBatch]:
    with pq.ParquetFile(path) as file:
        _require_columns(path, file.schema_arrow.names, wanted)
        batches = file.iter_batches(batch_size=ARROW_ROWS_MAX, columns=wanted)
        yield from _counted(path, batches, file.metadata.num_rows, reading)


def _counted(
    path: Path, batches: Iterable[pa.RecordBatch], rows: int, reading: Reading | None
) -> Iterator[pa.RecordBatch]:
    """The batches of a file of `rows` rows. `reading` follows the rows."""
    read = 0
    if reading is not None:
        reading.follow(path, lambda: read / max(rows, 1))
    for batch in batches:
        read += batch.num_rows
        yield batch


def _csv(
    path: Path, wanted: list[str] | None, types: pa.Schema | None, reading: Reading | None
) -> Iterator[pa.RecordBatch]:
    try:
        yield from _csv_batches(path, wanted, types, reading)
    except pa.ArrowInvalid:
        _require_even_rows(path)
        _require_values(path, wanted, types)
        raise


def _require_values(path: Path, wanted: list[str] | None, types: pa.Schema | None) -> None:
    """Raise `UsageError` that names the first row with a value that its column cannot hold. The
    file is read again, as by `_require_even_rows`."""
    try:
        deque(_csv_batches(path, wanted, types, None, use_threads=False), maxlen=0)
    except pa.ArrowInvalid as error:
        found = _CONVERSION.match(str(error))
        if found is None:
            return
        raise UsageError(
            f"{path}: row {found[2]}, column {_csv_names(path)[int(found[1])]!r}: {found[3]}",
            "correct the row; the header is row 1",
        ) from error


def _require_even_rows(path: Path) -> None:
    """Raise `UsageError` that names the first row with more or fewer columns than the header.

    Arrow numbers rows only where one thread reads, so the file is read again.
    """

    def refuse(row: pa_csv.InvalidRow) -> str:
        # An error that a callback raises is printed rather than passed.
        wrong.append(row)
        return "skip"

    wrong: list[pa_csv.InvalidRow] = []
    read = pa_csv.ReadOptions(block_size=_CSV_BLOCK_BYTES, use_threads=False)
    with (
        _unpacked(path) as source,
        pa_csv.open_csv(source, read_options=read, parse_options=_parse(path, refuse)) as reader,
        suppress(pa.ArrowInvalid, StopIteration),
    ):
        while not wrong:
            reader.read_next_batch()
    if wrong:
        raise UsageError(
            f"{path}: row {wrong[0].number} has {wrong[0].actual_columns} columns, and the header "
            f"has {wrong[0].expected_columns}",
            "correct the row; the header is row 1",
        )


def _parse(
    path: Path, refuse: Callable[[pa_csv.InvalidRow], str] | None = None
) -> pa_csv.ParseOptions:
    delimiter = "\t" if format_of(path) == "tsv" else ","
    return pa_csv.ParseOptions(
        newlines_in_values=True, delimiter=delimiter, invalid_row_handler=refuse
    )


def _csv_names(path: Path) -> list[str]:
    """The names in the header."""
    read = pa_csv.ReadOptions(block_size=_CSV_BLOCK_BYTES)
    with _unpacked(path) as source, pa_csv.open_csv(source, read, _parse(path)) as reader:
        return list(reader.schema.names)


def _csv_batches(
    path: Path,
    wanted: list[str] | None,
    types: pa.Schema | None,
    reading: Reading | None,
    *,
    use_threads: bool = True,
) -> Iterator[pa.RecordBatch]:
    read = pa_csv.ReadOptions(block_size=_CSV_BLOCK_BYTES, use_threads=use_threads)
    names = _csv_names(path)
    _require_columns(path, names, wanted)
    if types is None:
        # The two columns are read as bytes: a guessed type could lose digits.
        chosen = dict.fromkeys(wanted or names, pa.binary())
    else:
        # A name that the table lacks is refused later, with the names that it has.
        kinds = {field.name: _readable(field.type) for field in types}
        chosen = {name: kinds.get(name, pa.string()) for name in names}
    convert = pa_csv.ConvertOptions(
        column_types=chosen, include_columns=list(chosen), strings_can_be_null=False
    )
    with (
        _unpacked(path, reading) as source,
        pa_csv.open_csv(
            source, read_options=read, parse_options=_parse(path), convert_options=convert
        ) as reader,
    ):
        yield from reader


def _readable(kind: pa.DataType) -> pa.DataType:
    """The type in which Arrow reads a column of CSV: UUIDs as text."""
    return pa.string() if isinstance(kind, pa.BaseExtensionType) else kind


def _arrow(
    path: Path, wanted: list[str] | None, _: object, reading: Reading | None
) -> Iterator[pa.RecordBatch]:
    with pa.memory_map(str(path)) as source:
        try:
            file = pa.ipc.open_file(source)
        except pa.ArrowInvalid:
            source.seek(0)
            stream = pa.ipc.open_stream(source)
            _require_columns(path, stream.schema.names, wanted)
            if reading is not None:
                size = source.size()
                reading.follow(path, lambda: 1.0 if source.closed else source.tell() / size)
            yield from stream
            return
        _require_columns(path, file.schema.names, wanted)
        last = 0
        if reading is not None:
            reading.follow(path, lambda: last / max(file.num_record_batches, 1))
        for number in range(file.num_record_batches):
            last = number + 1
            yield file.get_batch(number)


def _times(batch: pa.RecordBatch, name: str, path: Path, *, has_none: bool = False) -> pa.Array:
    """A column of times. Text becomes instants, all else stays as it is. With `has_none` an empty
    text becomes a null."""
    column = decoded(batch.column(name))
    if not _is_bytes(column.type):
        return column
    text = column.cast(pa.binary()).cast(pa.string())
    if has_none:
        text = pc.if_else(pc.equal(text, ""), pa.scalar(None, pa.string()), text)
    is_number = pc.match_substring_regex(text, r"^-?\d+$")
    try:
        if pc.all(is_number).as_py():
            return text.cast(pa.int64())
        return text.cast(pa.timestamp("ns", "UTC"))
    except pa.ArrowInvalid:
        raise _no_times(text, path, name) from None


def _no_times(text: pa.Array, path: Path, name: str) -> UsageError:
    """Names the first value that is no time."""
    remedy = "write ISO-8601 with a zone, or nanoseconds in all rows"
    for each in text.to_pylist():
        if each is not None:
            try:
                pa.scalar(each).cast(pa.timestamp("ns", "UTC"))
            except pa.ArrowInvalid:
                return UsageError(f"{path}: column {name}: {each[:100]!r} is no time", remedy)
    return UsageError(f"{path}: column {name} has no times", remedy)


def _binary(batch: pa.RecordBatch, name: str, path: Path) -> pa.Array:
    column = decoded(batch.column(name))
    if not _is_bytes(column.type):
        raise UsageError(
            f"{path}: column {name} is {column.type}", "write it as text or binary first"
        )
    return column.cast(pa.binary())


def _is_bytes(kind: pa.DataType) -> bool:
    return bool(
        pa.types.is_binary(kind)
        or pa.types.is_large_binary(kind)
        or pa.types.is_fixed_size_binary(kind)
        or pa.types.is_string(kind)
        or pa.types.is_large_string(kind)
        or pa.types.is_string_view(kind)
        or pa.types.is_binary_view(kind)
    )


def _distinct(key: str, value: str) -> list[str]:
    return list(dict.fromkeys((key, value)))


def _require_columns(path: Path, names: list[str], wanted: list[str] | None) -> None:
    for name in dict.fromkeys(names) if wanted is None else wanted:
        if name not in names:
            raise UsageError(f"{path} has no column {name!r}", f"choose from {', '.join(names)}")
        if names.count(name) > 1:
            raise UsageError(f"{path} has {names.count(name)} columns {name!r}", "rename one")


@contextmanager
def _translated(path: Path) -> Iterator[None]:
    try:
        yield
    except MemoryError as error:  # a damaged file may declare a size beyond all memory
        remedy = "check the file, or write it in smaller batches"
        raise UsageError(f"{path} needs more memory than there is: {error}", remedy) from error
    except FileNotFoundError as error:
        raise UsageError(f"{path} is not there", "check the path") from error
    except OSError as error:
        if error.errno is None:  # the library that unpacks a file, rather than the system
            raise UsageError(f"{path} cannot be unpacked: {error}", "check the file") from error
        raise StorageError(f"reading {path} failed: {error}", "look at the disk") from error
    except (pa.ArrowException, IndexError, OverflowError, UnicodeError) as error:
        raise UsageError(f"{path} cannot be read: {error}", "check the file") from error
