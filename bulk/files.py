"""Reads Parquet, CSV, TSV, JSON lines, Arrow and Feather files: as keys and values, as events, or
as rows of a table. Text may be compressed by gzip or zstd.

Files are read batch by batch, so a file need not fit in memory. Keys and values are binary or text;
text becomes its UTF-8 bytes. Other types are refused, because a number has more than one text.
Events have keys, values and times; a time may be text. Rows of a table have the types of its
columns; a CSV file is read with these types.
"""

from __future__ import annotations

import io
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Final, Literal, NamedTuple, TypeAlias

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from bulk.delimited import DelimitedFile, Quoting
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
_AS_BYTES: Final = None
"""The types of columns that are read as bytes."""
_ARROW: Final = b"ARROW1"
_SCHEMA: Final = pa.schema([("key", pa.binary()), ("value", pa.binary())])


class Reads(NamedTuple):
    """How files are read: `reading` follows their bytes, `quoting` is that of CSV and TSV."""

    reading: Reading | None = None
    quoting: Quoting = "standard"


PLAIN_READS: Final = Reads()


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


def first_row(path: Path) -> int:
    """The number of the first row of a file, as errors tell it: the header of CSV is row 1."""
    return 2 if format_of(path) in ("csv", "tsv") else 1


def require_quoting(paths: Iterable[Path], quoting: Quoting) -> None:
    """Raise `UsageError` unless one of the files has quotes to speak of."""
    if quoting != "standard" and not any(format_of(path) in ("csv", "tsv") for path in paths):
        raise UsageError("--quoting is for CSV and TSV", "leave it out")


def column_names(path: Path, reads: Reads = PLAIN_READS) -> list[str]:
    """The names of the columns of a file; of JSON lines, the fields of the first one. Raises
    `UsageError` as `file_rows`."""
    kind = format_of(path)
    with _translated(path):
        if kind == "parquet":
            return list(pq.read_schema(path).names)
        if kind == "arrow":
            return next((list(batch.schema.names) for batch in _arrow(path, None, None, reads)), [])
        with _unpacked(path) as source:
            if kind == "jsonl":
                return first_fields(io.BufferedReader(source), str(path))
            return DelimitedFile(source, str(path), _delimiter(path), reads.quoting).names


def file_rows(
    paths: Iterable[Path],
    *,
    key: str,
    value: str,
    expires: str | None = None,
    op: str | None = None,
    reads: Reads = PLAIN_READS,
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
        opener, first = _opener(path), first_row(path)
        with _translated(path):
            for read in opener(path, names, _AS_BYTES, reads):
                batch = read.select(names)
                # Arrow trusts offsets and indices; a damaged file's lead out of its memory.
                batch.validate(full=True)
                columns = [_binary(batch, name, path) for name in (key, value)]
                rows = pa.RecordBatch.from_arrays(columns, schema=_SCHEMA)
                if expires is not None:
                    rows = rows.append_column("expires", due_times(batch, expires, path, first))
                if op is not None:
                    rows = rows.append_column("op", _text(batch, op, path, first))
                yield rows
                first += batch.num_rows


def file_events(
    paths: Iterable[Path],
    *,
    key: str,
    value: str,
    at: str,
    op: str | None = None,
    reads: Reads = PLAIN_READS,
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
        opener, first = _opener(path), first_row(path)
        with _translated(path):
            for read in opener(path, names, _AS_BYTES, reads):
                batch = read.select(names)
                batch.validate(full=True)
                columns = [_binary(batch, name, path) for name in (key, value)]
                columns.append(_times(batch, at, path, first))
                if op is not None:
                    columns.append(_text(batch, op, path, first))
                yield pa.RecordBatch.from_arrays(columns, names=names)
                first += batch.num_rows


def typed_batches(
    path: Path, schema: pa.Schema, reads: Reads = PLAIN_READS
) -> Iterator[pa.RecordBatch]:
    """All columns of a file. `schema` gives the types of the columns of a CSV file. Raises as
    `file_rows`."""
    opener = _opener(path)
    with _translated(path):
        for batch in opener(path, None, schema, reads):
            batch.validate(full=True)
            yield batch


def due_times(batch: pa.RecordBatch, name: str, path: Path, first: int) -> pa.Array:
    """A column of due times as nanoseconds, null for rows that stay. Text is as in `file_rows`.
    `first` is the number of the first row. Raises `UsageError`."""
    _require_columns(path, batch.schema.names, [name])
    times = _times(batch, name, path, first, has_none=True)
    try:
        return due_column(times, name, first)
    except UsageError as error:
        raise UsageError(f"{path}: {error.what}", error.remedy) from None


Opener: TypeAlias = (
    "Callable[[Path, list[str] | None, pa.Schema | None, Reads], Iterator[pa.RecordBatch]]"
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
    path: Path, wanted: list[str] | None, types: pa.Schema | None, reads: Reads
) -> Iterator[pa.RecordBatch]:
    if wanted is None or types is not None:
        raise UsageError(f"{path}: rows of a table have types", "write them as CSV or Parquet")
    with _unpacked(path, reads.reading) as source:
        yield from read_lines(io.BufferedReader(source), str(path), wanted)


def _parquet(
    path: Path, wanted: list[str] | None, _: object, reads: Reads
) -> Iterator[pa.RecordBatch]:
    with pq.ParquetFile(path) as file:
        _require_columns(path, file.schema_arrow.names, wanted)
        _require_one_parquet(path, file.metadata)
        batches = file.iter_batches(batch_size=ARROW_ROWS_MAX, columns=wanted)
        yield from _counted(path, batches, file.metadata.num_rows, reads.reading)


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
    path: Path, wanted: list[str] | None, types: pa.Schema | None, reads: Reads
) -> Iterator[pa.RecordBatch]:
    with _unpacked(path, reads.reading) as source:
        file = DelimitedFile(source, str(path), _delimiter(path), reads.quoting)
        _require_columns(path, file.names, wanted)
        kinds = None if types is None else {field.name: field.type for field in types}
        # Without types, columns are read as bytes: a guessed type could lose digits. A name that
        # a table lacks is refused later, with the names that it has.
        yield from file.batches(file.names if wanted is None else wanted, kinds)


def _delimiter(path: Path) -> str:
    return "\t" if format_of(path) == "tsv" else ","


def _arrow(
    path: Path, wanted: list[str] | None, _: object, reads: Reads
) -> Iterator[pa.RecordBatch]:
    with pa.memory_map(str(path)) as source:
        size, reading = source.size(), reads.reading
        if source.read(len(_ARROW)) != _ARROW:
            source.seek(0)
            if reading is not None:
                reading.follow(path, lambda: 1.0 if source.closed else source.tell() / size)
            while source.tell() < size:  # streams may stand one behind the other
                stream = pa.ipc.open_stream(source)
                _require_columns(path, stream.schema.names, wanted)
                yield from stream
            return
        _require_one_arrow(path, source)
        file = pa.ipc.open_file(source)
        _require_columns(path, file.schema.names, wanted)
        last = 0
        if reading is not None:
            reading.follow(path, lambda: last / max(file.num_record_batches, 1))
        for number in range(file.num_record_batches):
            last = number + 1
            yield file.get_batch(number)


def _require_one_arrow(path: Path, source: pa.MemoryMappedFile) -> None:
    """Raise `UsageError` for two Arrow files, one behind the other: the last one's places count
    from its own start, so the rows of the first one would be read twice, or bytes that are none."""
    source.seek(8)
    with suppress(pa.ArrowException, EOFError, OSError):
        while pa.ipc.read_message(source) is not None:  # the end of the messages raises
            pass
    behind = source.tell()
    source.seek(behind)
    rest = source.read()
    if b"ARROW1ARROW1" in rest and behind > 8:
        raise _several(path)


def _require_one_parquet(path: Path, metadata: pq.FileMetaData) -> None:
    """Raise `UsageError` for two Parquet files, one behind the other, as `_require_one_arrow`.

    Between the pages and the footer lie indexes and filters at most. The whole first file fits
    there only if it is there."""
    end = 0
    for group in range(metadata.num_row_groups):
        for number in range(metadata.num_columns):
            chunk = metadata.row_group(group).column(number)
            begins = [chunk.data_page_offset]
            if chunk.has_dictionary_page:
                begins.append(chunk.dictionary_page_offset)
            end = max(end, min(begins) + chunk.total_compressed_size)
    spare = path.stat().st_size - metadata.serialized_size - 8 - max(end, 4)
    if spare < 12:  # no Parquet file is shorter
        return
    with pa.memory_map(str(path)) as source:
        head = source.read_buffer(spare + 8).to_pybytes()
    at = head.find(b"PAR1PAR1")
    while at >= 0:
        with suppress(pa.ArrowException, OSError):
            pq.read_metadata(pa.BufferReader(head[: at + 4]))
            raise _several(path)
        at = head.find(b"PAR1PAR1", at + 1)


def _several(path: Path) -> UsageError:
    return UsageError(f"{path} has several files, one behind the other", "pass them one by one")


def _times(
    batch: pa.RecordBatch, name: str, path: Path, first: int, *, has_none: bool = False
) -> pa.Array:
    """A column of times. Text becomes instants, all else stays as it is. With `has_none` an empty
    text becomes a null."""
    column = decoded(batch.column(name))
    if not _is_bytes(column.type):
        return column
    text = _text(batch, name, path, first)
    if has_none:
        text = pc.if_else(pc.equal(text, ""), pa.scalar(None, pa.string()), text)
    is_number = pc.match_substring_regex(text, r"^-?\d+$")
    try:
        if pc.all(is_number).as_py():
            return text.cast(pa.int64())
        return text.cast(pa.timestamp("ns", "UTC"))
    except pa.ArrowInvalid:
        raise _no_times(text, path, name, first) from None


def _no_times(text: pa.Array, path: Path, name: str, first: int) -> UsageError:
    """Names the first value that is no time."""
    remedy = "write ISO-8601 with a zone, or nanoseconds in all rows"
    for row, each in enumerate(text.to_pylist(), first):
        if each is not None:
            try:
                pa.scalar(each).cast(pa.timestamp("ns", "UTC"))
            except pa.ArrowInvalid:
                problem = f"{each[:100]!r} is no time"
                return UsageError(f"{path}: row {row}, column {name!r}: {problem}", remedy)
    return UsageError(f"{path}: column {name!r} has no times", remedy)


def _binary(batch: pa.RecordBatch, name: str, path: Path) -> pa.Array:
    column = decoded(batch.column(name))
    if not _is_bytes(column.type):
        raise UsageError(
            f"{path}: column {name} is {column.type}", "write it as text or binary first"
        )
    return column.cast(pa.binary())


def _text(batch: pa.RecordBatch, name: str, path: Path, first: int) -> pa.Array:
    """A column of bytes as text. Raises `UsageError` that names the row whose bytes are none."""
    column = _binary(batch, name, path)
    try:
        return column.cast(pa.string())
    except pa.ArrowInvalid as error:
        rows = enumerate(column.to_pylist(), first)
        row = next(row for row, each in rows if each is not None and not _is_utf8(each))
        where = f"{path}: row {row}, column {name!r}"
        raise UsageError(f"{where} is not UTF-8", "write the file in UTF-8") from error


def _is_utf8(raw: bytes) -> bool:
    try:
        raw.decode()
    except UnicodeDecodeError:
        return False
    return True


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
