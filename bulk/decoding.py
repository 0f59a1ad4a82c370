"""Rows of files whose keys and values are in a notation, such as hex, as columns of bytes."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path

import pyarrow as pa
import pyarrow.compute as pc

from bulk.files import Reads, column_names, file_rows, first_row
from kvstore.cli.options import Encoding, Encodings, to_bytes
from kvstore.errors import UsageError
from kvstore.limits import KEY_BYTES_MAX


def decoded_files(
    sources: list[Path],
    columns: Mapping[str, str | None],
    notation: Encodings,
    reads: Reads,
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
        first = first_row(source)
        for batch in decoded(rows, notation, str(source), first=first):
            _require_whole(batch, str(source), first)
            first += batch.num_rows
            if timed and not more:  # the batches of all files have the same columns
                yield batch.append_column("expires", pa.nulls(batch.num_rows, pa.int64()))
            else:
                yield batch


def _has_expiries(source: Path, named: dict[str, str], reads: Reads) -> bool:
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
        raise UsageError(f"{where}: row {number}: {error.what}", error.remedy) from error
