"""Reads Parquet, CSV, TSV, JSON lines, Arrow and Feather files: as keys and values, as events, or
as rows of a table.

Files are read batch by batch, so a file need not fit in memory. Keys and values are binary or
text; text becomes its UTF-8 bytes. Other types are refused, because a number has more than one
text. Events have keys, values and times; a time may be text. Rows of a table have the types of
its columns; a CSV file is read with these types.
"""

from __future__ import annotations

import base64
import binascii
import io
import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from itertools import islice
from pathlib import Path
from types import MappingProxyType
from typing import Any, BinaryIO, Final, Literal, NamedTuple, TypeAlias

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from kvstore.base.timestamp import is_plain_number, to_timestamp
from kvstore.bulk.delimited import DelimitedFile, Quoting
from kvstore.bulk.progress import Reading
from kvstore.cli.options import Encoding, Encodings, to_bytes
from kvstore.codec.columns import decoded as decoded_column
from kvstore.codec.columns import due_column
from kvstore.errors import StorageError, UsageError
from kvstore.limits import ARROW_ROWS_MAX, KEY_BYTES_MAX, TEXT_ROW_BYTES_MAX
from kvstore.tables.exact import is_text
from kvstore.tables.words import NumberText, column_of, read_value

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
_NUMBER: Final = re.compile(r"-?\d+\Z")
_ARROW: Final = b"ARROW1"
_SCHEMA: Final = pa.schema([("key", pa.binary()), ("value", pa.binary())])


Nested: TypeAlias = Literal["error", "text", "columns"]
NESTED: Final[tuple[Nested, ...]] = ("error", "text", "columns")


class FileReads(NamedTuple):
    """How files are read. `reading` follows their bytes."""

    reading: Reading | None = None
    quoting: Quoting = "standard"
    """The quotes of CSV and TSV."""
    delimiter: str | None = None
    """What stands between the fields of CSV; None where the name of the file tells."""
    names: Sequence[str] | None = None
    """The columns of CSV that has no header."""
    nested: Nested = "error"
    """Fields of JSON lines that are no texts: refused; their JSON, as a text; or, of an object,
    columns called `outer.inner`, and the JSON of the others."""
    missing: Mapping[str, Any] = MappingProxyType({})
    """What a column of a table has where a line of JSON lacks it, if that is not null."""

    def require_fitting(self, paths: Iterable[Path]) -> None:
        """Raise `UsageError` for a choice that none of the files has a use for, and for a delimiter
        that is none."""
        kinds = {format_of(path) for path in paths}
        if kinds.isdisjoint(("csv", "tsv")):
            for option, is_given in (
                ("--quoting", self.quoting != "standard"),
                ("--delimiter", self.delimiter is not None),
                ("--no-header", self.names is not None),
            ):
                if is_given:
                    raise UsageError(f"{option} is for CSV and TSV", "leave it out")
        if self.nested != "error" and "jsonl" not in kinds:
            raise UsageError("--nested is for JSON lines", "leave it out")
        mark = self.delimiter
        if mark is not None and (len(mark) != 1 or not mark.isascii() or mark in '"\r\n\0'):
            raise UsageError(
                f"--delimiter {mark!r}", "pass one character of ASCII, and no quote and no end"
            )
        if self.names is not None and len(set(self.names)) < len(self.names):
            raise UsageError("two columns have one name", "name each column once")


PLAIN_READS: Final = FileReads()


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


def has_format(path: Path) -> bool:
    """Whether the name of a file tells a format."""
    inner = path if compression_of(path) is None else path.with_suffix("")
    return inner.suffix.lower() in _SUFFIXES


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


def first_row(path: Path, reads: FileReads = PLAIN_READS) -> int:
    """The number of the first row of a file, as errors tell it: the header of CSV is row 1."""
    return 2 if format_of(path) in ("csv", "tsv") and reads.names is None else 1


def column_names(path: Path, reads: FileReads = PLAIN_READS) -> list[str]:
    """The names of the columns of a file; of JSON lines, the fields of the first one. Raises
    `UsageError` as `file_rows`."""
    kind = format_of(path)
    with _translated(path):
        if kind == "parquet":
            return list(pq.read_schema(path).names)
        if kind == "arrow":
            return list(_arrow_schema(path).names)
        with _unpacked(path) as source:
            if kind == "jsonl":
                return first_fields(io.BufferedReader(source), str(path), reads.nested)
            return _delimited(source, path, reads).names


def file_rows(
    paths: Iterable[Path],
    *,
    key: str,
    value: str,
    expires: str | None = None,
    op: str | None = None,
    reads: FileReads = PLAIN_READS,
) -> Iterator[pa.RecordBatch]:
    """Yield batches with the binary columns `key` and `value`, from the named columns of each file.
    If they are named, columns `expires` of times and `op` of text follow.

    Rows come in the order of the files and of the rows in them. A time that is text is as in
    `file_events`; an empty text is none. Raises `UsageError` if a file cannot be read, or lacks a
    column, or has a column of another type.
    """
    more = [name for name in (expires, op) if name is not None]
    for path, first, batch in _named_columns(paths, [*_distinct(key, value), *more], reads):
        with _translated(path):
            columns = [_binary(batch, name, path) for name in (key, value)]
            rows = pa.RecordBatch.from_arrays(columns, schema=_SCHEMA)
            if expires is not None:
                rows = rows.append_column("expires", due_times(batch, expires, path, first))
            if op is not None:
                rows = rows.append_column("op", _text(batch, op, path, first))
        yield rows


def file_events(
    paths: Iterable[Path],
    *,
    key: str,
    value: str,
    at: str,
    op: str | None = None,
    reads: FileReads = PLAIN_READS,
) -> Iterator[pa.RecordBatch]:
    """Yield batches with the named columns of each file: keys and values as `file_rows`, times, and
    operations if `op` is given, as `bulk.seed` takes them.

    A time that is text is ISO-8601 with a zone, a day (its midnight in UTC), or a number of
    nanoseconds. Raises `UsageError` as
    `file_rows`, and for a column that is named for two things.
    """
    names = [key, value, at] if op is None else [key, value, at, op]
    for path, first, batch in _named_columns(paths, names, reads):
        with _translated(path):
            columns = [_binary(batch, name, path) for name in (key, value)]
            columns.append(_times(batch, at, path, first))
            if op is not None:
                columns.append(_text(batch, op, path, first))
            rows = pa.RecordBatch.from_arrays(columns, names=names)
        yield rows


def _named_columns(
    paths: Iterable[Path], names: list[str], reads: FileReads
) -> Iterator[tuple[Path, int, pa.RecordBatch]]:
    """The columns `names` of each file, batch by batch, with the file and the number of the first
    row."""
    if len(set(names)) < len(names):
        raise UsageError(f"columns {', '.join(names)}: one is named twice", "name each column once")
    for path in paths:
        opener, first = _opener(path), first_row(path, reads)
        with _translated(path):
            for read in opener(path, names, _AS_BYTES, reads):
                batch = read.select(names)
                # Arrow trusts offsets and indices; a damaged file's lead out of its memory.
                batch.validate(full=True)
                yield path, first, batch
                first += batch.num_rows


def typed_batches(
    path: Path, schema: pa.Schema, reads: FileReads = PLAIN_READS
) -> Iterator[pa.RecordBatch]:
    """All columns of a file. `schema` gives the types of the columns of a file of text: CSV, TSV or
    JSON lines. Raises as `file_rows`."""
    opener = _opener(path)
    with _translated(path):
        for batch in opener(path, None, schema, reads):
            batch.validate(full=True)
            yield batch


def text_batches(path: Path, names: list[str], reads: FileReads) -> Iterator[pa.RecordBatch]:
    """The columns `names` of a CSV or TSV file, as the texts that stand there. Raises as
    `file_rows`."""
    with _translated(path), _unpacked(path, reads.reading) as source:
        yield from _delimited(source, path, reads).batches(names, {})


def fields_of_lines(path: Path, reads: FileReads) -> Iterator[list[dict[str, Any]]]:
    """The fields of the lines of a file of JSON lines, some lines at a time. Raises as
    `file_rows`."""
    with _translated(path), _unpacked(path, reads.reading) as source:
        lines = json_objects(io.BufferedReader(source), str(path), reads.nested)
        while rows := [fields for _, _, fields in islice(lines, _ROWS)]:
            yield rows


def file_schema(path: Path) -> pa.Schema:
    """The schema of a Parquet or Arrow file, or of an Arrow stream. Raises as `file_rows`."""
    with _translated(path):
        return pq.read_schema(path) if format_of(path) == "parquet" else _arrow_schema(path)


def due_times(batch: pa.RecordBatch, name: str, path: Path, first: int) -> pa.Array:
    """A column of due times as nanoseconds, null for rows that stay. Text is as in `file_rows`.
    `first` is the number of the first row. Raises `UsageError`."""
    _require_columns(path, batch.schema.names, [name])
    times = _times(batch, name, path, first, has_none=True)
    try:
        return due_column(times, name, first)
    except UsageError as error:
        raise error.at(f"{path}: ") from None


Opener: TypeAlias = (
    "Callable[[Path, list[str] | None, pa.Schema | None, FileReads], Iterator[pa.RecordBatch]]"
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
    path: Path, wanted: list[str] | None, types: pa.Schema | None, reads: FileReads
) -> Iterator[pa.RecordBatch]:
    with _unpacked(path, reads.reading) as source:
        file = io.BufferedReader(source)
        if types is not None:
            yield from typed_lines(file, str(path), types, reads)
        else:
            assert wanted is not None, "the columns of rows without types are named"
            yield from read_lines(file, str(path), wanted, reads.nested)


def _parquet(
    path: Path, wanted: list[str] | None, types: pa.Schema | None, reads: FileReads
) -> Iterator[pa.RecordBatch]:
    with pq.ParquetFile(path) as file:
        _require_columns(path, file.schema_arrow.names, wanted)
        if types is not None:
            _require_no_index(path, file.schema_arrow, types)
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
    path: Path, wanted: list[str] | None, types: pa.Schema | None, reads: FileReads
) -> Iterator[pa.RecordBatch]:
    with _unpacked(path, reads.reading) as source:
        file = _delimited(source, path, reads)
        _require_columns(path, file.names, wanted)
        kinds = None if types is None else {field.name: field.type for field in types}
        # Without types, columns are read as bytes: a guessed type could lose digits. A name that
        # a table lacks is refused later, with the names that it has.
        yield from file.batches(file.names if wanted is None else wanted, kinds)


def _delimited(source: pa.NativeFile, path: Path, reads: FileReads) -> DelimitedFile:
    delimiter = reads.delimiter or ("\t" if format_of(path) == "tsv" else ",")
    return DelimitedFile(source, str(path), delimiter, reads.quoting, reads.names)


def _arrow(
    path: Path, wanted: list[str] | None, types: pa.Schema | None, reads: FileReads
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
        if types is not None:
            _require_no_index(path, file.schema, types)
        last = 0
        if reading is not None:
            reading.follow(path, lambda: last / max(file.num_record_batches, 1))
        for number in range(file.num_record_batches):
            last = number + 1
            yield file.get_batch(number)


def _arrow_schema(path: Path) -> pa.Schema:
    with pa.memory_map(str(path)) as source:
        is_file = source.read(len(_ARROW)) == _ARROW
        source.seek(0)
        opened = pa.ipc.open_file(source) if is_file else pa.ipc.open_stream(source)
        return opened.schema


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


def _require_no_index(path: Path, schema: pa.Schema, types: pa.Schema) -> None:
    """Raise `UsageError` for the index of a pandas frame that has no name: pandas writes it as a
    column if it is more than a count of rows, and a table has no such column."""
    for name in set(schema.names) - set(types.names):
        if re.fullmatch(r"__index_level_\d+__", name) and b"pandas" in (schema.metadata or {}):
            raise UsageError(
                f"{path}: column {name!r} is the index of a pandas frame",
                "write the frame with index=False, or give the index the name of a column",
            )


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
    column = decoded_column(batch.column(name))
    if not _is_bytes(column.type):
        return column
    text = _text(batch, name, path, first)
    if has_none:
        text = pc.if_else(pc.equal(text, ""), pa.scalar(None, pa.string()), text)
    is_number = pc.match_substring_regex(text, r"^-?\d+$")
    try:
        if pc.all(is_number).as_py():
            return text.cast(pa.int64())
        try:
            return text.cast(pa.timestamp("ns", "UTC"))
        except pa.ArrowInvalid:
            if pc.any(is_number).as_py():
                raise
            return _instants(text)
    except (pa.ArrowInvalid, UsageError):
        raise _no_times(text, path, name, first) from None


def _instants(text: pa.Array) -> pa.Array:
    """Times in all the forms of a time that stands still: Arrow takes no day, and no `UTC`."""
    given = text.to_pylist()
    found = [None if each is None else int(to_timestamp(each)) for each in given]
    return pa.array(found, pa.int64()).cast(pa.timestamp("ns", "UTC"))


def _no_times(text: pa.Array, path: Path, name: str, first: int) -> UsageError:
    """Names the first value that is no time; in a column that begins with nanoseconds, the first
    that is no number."""
    remedy = "write ISO-8601 with a zone, a day, or nanoseconds in all rows"
    given = [(row, each) for row, each in enumerate(text.to_pylist(), first) if each is not None]
    is_number = bool(given) and _NUMBER.match(given[0][1]) is not None
    for row, each in given:
        if not (_casts(each) if is_number else _is_instant(each)):
            problem = f"{each[:100]!r} is no time"
            return UsageError(f"{path}: row {row}, column {name!r}: {problem}", remedy)
    return UsageError(f"{path}: column {name!r} has no times", remedy)


def _casts(text: str) -> bool:
    try:
        pa.scalar(text).cast(pa.int64())
    except pa.ArrowInvalid:
        return False
    return True


def _is_instant(text: str) -> bool:
    try:
        return not is_plain_number(text) and to_timestamp(text) >= 0
    except UsageError:
        return False


def _binary(batch: pa.RecordBatch, name: str, path: Path) -> pa.Array:
    column = decoded_column(batch.column(name))
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


# --------------------------------------------------------------------------------------------------
# Rows of files whose keys and values are in a notation, such as hex, as columns of bytes.


def decoded_files(
    sources: list[Path],
    columns: Mapping[str, str | None],
    notation: Encodings,
    reads: FileReads,
    *,
    has_expiries: bool,
) -> Iterator[pa.RecordBatch]:
    """The rows of all files. A key or a value that is missing, or not in its notation, is named by
    file and row; a header is row 1. With `has_expiries` each file may have a column `expires`."""
    named = {name: column for name, column in columns.items() if column}
    timed = [source for source in sources if has_expiries and _has_expiries(source, named, reads)]
    for source in sources:
        more = {"expires": "expires"} if source in timed else {}
        rows = file_rows([source], reads=reads, **named, **more)
        first = first_row(source, reads)
        for batch in decoded(rows, notation, str(source), first=first):
            _require_whole(batch, str(source), first)
            first += batch.num_rows
            if timed and not more:  # the batches of all files have the same columns
                yield batch.append_column("expires", pa.nulls(batch.num_rows, pa.int64()))
            else:
                yield batch


def _has_expiries(source: Path, named: dict[str, str], reads: FileReads) -> bool:
    """Whether a file has a column `expires` that serves for nothing else."""
    return "expires" not in named.values() and "expires" in column_names(source, reads)


def _require_whole(batch: pa.RecordBatch, where: str, first: int) -> None:
    """Raise `UsageError` for a row without a key or with one that is too long, a row that puts no
    value, and a row whose operation is neither put nor delete. `first` is the number of the first
    row."""
    keys, values = batch.columns[:2]
    _refuse(pc.is_null(keys), where, first, "it has no key", "every row needs a key")
    too_long = pc.greater(pc.binary_length(keys), KEY_BYTES_MAX)
    remedy = f"keys have at most {KEY_BYTES_MAX} bytes"
    _refuse(too_long, where, first, "its key is too long", remedy)
    absent = pc.is_null(values)
    if "op" in batch.schema.names:
        ops = batch.column("op")
        known = pc.is_in(ops, pa.array(["put", "delete"]))
        _refuse(pc.invert(known), where, first, "its operation is unknown", "write put or delete")
        absent = pc.and_(absent, pc.equal(ops, "put"))
    remedy = "write a value; to delete, name a column by --op"
    _refuse(absent, where, first, "it has no value", remedy)


def _refuse(wrong: pa.Array, where: str, first: int, problem: str, remedy: str) -> None:
    at = pc.index(wrong, True).as_py()
    if at >= 0:
        raise UsageError(f"{where}: row {first + at}: {problem}", remedy)


def decoded(
    rows: Iterator[pa.RecordBatch], notation: Encodings, where: str, *, first: int = 1
) -> Iterator[pa.RecordBatch]:
    """Decode hex or base64 in the first two columns, keys and values. Text stays as it is, and so
    do nulls, which are refused later. `first` is the number of the first row."""
    if notation == (Encoding.TEXT, Encoding.TEXT):
        yield from rows
        return
    for batch in rows:
        columns = [
            pa.array(_cells(column, encoding, where, first), pa.binary())
            for column, encoding in zip(batch.columns[:2], notation, strict=True)
        ]
        yield pa.RecordBatch.from_arrays([*columns, *batch.columns[2:]], schema=batch.schema)
        first += batch.num_rows


def _cells(column: pa.Array, encoding: Encoding, where: str, first: int) -> Iterator[bytes | None]:
    number = first
    try:
        for number, raw in enumerate(column.to_pylist(), first):  # noqa: B007
            yield None if raw is None else to_bytes(raw.decode("latin-1"), encoding)
    except UsageError as error:
        raise error.at(f"{where}: row {number}: ") from error


# --------------------------------------------------------------------------------------------------
# Reads and writes JSON lines: an object a line, with keys and values as fields.
#
#     {"key": "AA1", "value": "on time"}
#     {"key": {"base64": "a/8="}, "value": null}
#     {"key": "AA2", "value": "late", "expires": "2013-01-01T06:00:00.000000000Z"}
#     {"op": "delete", "key": "AA3"}
#
# Bytes that are UTF-8 are text. Other bytes are an object `{"base64": "..."}`. `kvstore scan
# --json` and `kvstore export` print these lines.
#
# Invariants
# 1. A line that is written and read again gives the same bytes.
# 2. A row that cannot be read is refused by file and line.

_ROWS: Final = 10_000
_BYTES: Final = 8 << 20


def read_lines(
    file: BinaryIO, where: str, names: list[str], nested: Nested = "error"
) -> Iterator[pa.RecordBatch]:
    """Batches of binary columns: the fields `names` of each line. Raises `UsageError`.

    The first names are of the key and the value. A line that has `"delete"` in a later field needs
    no value.
    """
    columns: list[list[bytes | None]] = [[] for _ in names]
    size = 0
    for number, line in enumerate(_lines(file, where), 1):
        if not line.strip():
            continue
        fields = _object(line, f"{where}:{number}", nested)
        for name, column in zip(names, columns, strict=True):
            if name not in fields:
                if name == names[1] and "delete" in map(fields.get, names[2:]):
                    column.append(None)
                    continue
                raise UsageError(
                    f"{where}:{number} has no field {name!r}", f"choose from {', '.join(fields)}"
                )
            column.append(_bytes(fields[name], f"{where}:{number}: field {name!r}", nested))
        size += len(line)
        if len(columns[0]) == _ROWS or size > _BYTES:
            yield _batch(names, columns)
            columns, size = [[] for _ in names], 0
    yield _batch(names, columns)


def first_fields(file: BinaryIO, where: str, nested: Nested = "error") -> list[str]:
    """The names of the fields of the first line. Raises `UsageError`."""
    for number, line in enumerate(_lines(file, where), 1):
        if line.strip():
            return list(_object(line, f"{where}:{number}", nested))
    return []


def json_values(file: BinaryIO, where: str) -> Iterator[tuple[str, Any]]:
    """The JSON values of all lines, each with its place for errors. Raises `UsageError`."""
    for number, line in enumerate(_lines(file, where), 1):
        if line.strip():
            place = f"{where}:{number}"
            yield place, _parsed(line, place)


def json_objects(
    file: BinaryIO, where: str, nested: Nested = "error"
) -> Iterator[tuple[str, int, dict[str, Any]]]:
    """The objects of all lines, each with its place for errors and the size of its line. A number
    that is no integer is a `NumberText`. Raises `UsageError`."""
    for number, line in enumerate(_lines(file, where), 1):
        if line.strip():
            place = f"{where}:{number}"
            yield place, len(line), _object(line, place, nested)


def typed_lines(
    file: BinaryIO, where: str, schema: pa.Schema, reads: FileReads
) -> Iterator[pa.RecordBatch]:
    """Batches of columns in the types of `schema`. Fields that it lacks are columns of text.

    A batch has the columns of the lines so far. Raises `UsageError` that names line and column for
    a value that a column does not hold: see `kvstore.tables.words`.
    """
    types = {field.name: field.type for field in schema}
    names: dict[str, None] = {}
    rows: list[dict[str, Any]] = []
    size = 0

    def batch() -> pa.RecordBatch:
        columns = []
        for name in names:
            none, kind = reads.missing.get(name), types.get(name, pa.string())
            columns.append(column_of(kind, [row.get(name, none) for row in rows]))
        return pa.RecordBatch.from_arrays(columns, names=list(names))

    for place, length, fields in json_objects(file, where, reads.nested):
        row = {}
        for name, value in fields.items():
            at = f"{place}: column {name!r}"
            kind = types.get(name)
            if kind is None:
                found: Any = value if value is None else _as_text(value)
            elif reads.nested != "error" and is_text(kind) and not _is_plain_text(value):
                found = value if value is None else json_text(value)
            else:
                found = read_value(kind, value, at)
            row[name] = found
        names.update(dict.fromkeys(row))
        rows.append(row)
        size += length
        if len(rows) == _ROWS or size > _BYTES:
            yield batch()
            rows, size = [], 0
    if rows:
        yield batch()


def _is_plain_text(value: Any) -> bool:
    return isinstance(value, str) and not isinstance(value, NumberText)


def _as_text(value: Any) -> str:
    return str(value) if isinstance(value, str) else json_text(value)


def json_text(value: Any) -> str:
    """A value of JSON as JSON again, its numbers as they stood there. Its depth has no bound but
    the parser's."""
    parts: list[str] = []
    rest: list[Any] = [value]
    """What is to be written, the first last. Signs are `NumberText` too: a text that is written as
    it is."""
    while rest:
        each = rest.pop()
        if isinstance(each, NumberText):
            parts.append(str(each))
        elif isinstance(each, dict):
            rest.append(NumberText("}"))
            for at, (name, inner) in reversed(list(enumerate(each.items()))):
                sign = "," if at else "{"
                rest += [inner, NumberText(f"{sign}{json.dumps(name, ensure_ascii=False)}:")]
            if not each:
                rest.append(NumberText("{"))
        elif isinstance(each, list):
            rest.append(NumberText("]"))
            for at, inner in reversed(list(enumerate(each))):
                rest += [inner, NumberText("," if at else "[")]
            if not each:
                rest.append(NumberText("["))
        else:
            parts.append(json.dumps(each, ensure_ascii=False))
    return "".join(parts)


def line_of(fields: dict[str, bytes | None]) -> bytes:
    """A row as a line, with its end."""
    shown = {name: _field_text(raw) for name, raw in fields.items()}
    return json.dumps(shown, ensure_ascii=False).encode() + b"\n"


def _lines(file: BinaryIO, where: str) -> Iterator[bytes]:
    number = 0
    while line := file.readline(TEXT_ROW_BYTES_MAX + 1):
        number += 1
        if len(line) > TEXT_ROW_BYTES_MAX:
            size = f"{TEXT_ROW_BYTES_MAX >> 20} MiB"
            raise UsageError(
                f"{where}:{number} has more than {size}", "write it as Parquet or Arrow"
            )
        yield line


def _object(line: bytes, where: str, nested: Nested) -> dict[str, Any]:
    found = _parsed(line, where, nested)
    if not isinstance(found, dict):
        raise UsageError(f"{where} is no object", "write one object a line")
    return found


class _TwiceError(Exception):
    """An object has two fields of one name, of which Python would take the last."""


def _parsed(line: bytes, where: str, nested: Nested = "error") -> Any:
    try:
        found = json.loads(
            line,
            object_pairs_hook=_distinct_fields,
            parse_float=NumberText,
            parse_constant=NumberText,
        )
        if nested == "columns" and isinstance(found, dict):
            found = _distinct_fields(list(_flat(found)))
    except _TwiceError as error:
        raise UsageError(f"{where} has two fields {error.args[0]!r}", "remove one") from error
    except (ValueError, RecursionError) as error:
        raise UsageError(f"{where} is not JSON: {error}", "write one object a line") from error
    return found


def _flat(fields: dict[str, Any], before: str = "") -> Iterator[tuple[str, Any]]:
    """The fields of an object, and of the objects in it, with their names as columns."""
    for name, value in fields.items():
        if isinstance(value, dict) and value and list(value) != ["base64"]:
            yield from _flat(value, f"{before}{name}.")
        else:
            yield before + name, value


def _distinct_fields(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        names = [name for name, _ in pairs]
        raise _TwiceError(next(name for name in names if names.count(name) > 1))
    return found


def _bytes(field: Any, where: str, nested: Nested) -> bytes | None:
    if field is None:
        return None
    is_number = isinstance(field, NumberText)
    if nested != "error" and not _is_plain_text(field) and not _is_base64(field):
        field, is_number = json_text(field), False
    if isinstance(field, str) and not is_number:
        try:
            return field.encode()
        except UnicodeEncodeError as error:
            raise UsageError(f"{where} is not text: {error}", "write it as base64") from error
    if _is_base64(field):
        try:
            return base64.b64decode(field["base64"], validate=True)
        except (binascii.Error, TypeError, ValueError) as error:
            raise UsageError(f"{where} is not base64: {error}", "check the line") from error
    kind = "float" if is_number else type(field).__name__
    remedy = 'write text in quotes, or {"base64": "..."}, or take its JSON: --nested text'
    raise UsageError(f"{where} is of type {kind}", remedy)


def _is_base64(field: Any) -> bool:
    return isinstance(field, dict) and list(field) == ["base64"]


def _field_text(raw: bytes | None) -> str | dict[str, str] | None:
    if raw is None:
        return None
    try:
        return raw.decode()
    except UnicodeDecodeError:
        return {"base64": base64.b64encode(raw).decode()}


def _batch(names: list[str], columns: list[list[bytes | None]]) -> pa.RecordBatch:
    arrays = [pa.array(column, pa.binary()) for column in columns]
    return pa.RecordBatch.from_arrays(arrays, names=names)
