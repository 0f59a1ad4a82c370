"""Labels as they arrive: Arrow batches with a column of keys and a column of times.

Labels are anything that speaks the Arrow C stream: tables, batches and readers of pyarrow, frames
of Polars and pandas, relations of DuckDB.

Invariants
1. A column that is missing, doubled or of a wrong type is refused before a row is read.
2. A null, a key that is too long and a time out of range are refused by column and row.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from kvstore.errors import UsageError
from kvstore.joins.labels import Numbers
from kvstore.limits import (
    JOIN_LABEL_BYTES_MAX,
    JOIN_VALUE_BYTES_MAX,
    KEY_BYTES_MAX,
)
from kvstore.timestamp import TIMESTAMP_MAX


class Piece(NamedTuple):
    """Some neighbouring batches of labels. `first` is the row of the first label."""

    batches: list[pa.RecordBatch]
    first: int

    @property
    def rows(self) -> int:
        """The number of labels."""
        return sum(batch.num_rows for batch in self.batches)

    def halves(self) -> tuple[Piece, Piece]:
        """The piece in two, of one label at least."""
        middle, at = self.rows // 2, 0
        left: list[pa.RecordBatch] = []
        right: list[pa.RecordBatch] = []
        for batch in self.batches:
            cut = min(max(middle - at, 0), batch.num_rows)
            left.append(batch.slice(0, cut))
            right.append(batch.slice(cut))
            at += batch.num_rows
        return Piece(left, self.first), Piece(right, self.first + middle)


def label_reader(labels: object) -> pa.RecordBatchReader:
    """The batches of `labels`. Raises `UsageError` for what does not speak Arrow."""
    try:
        if isinstance(labels, pa.RecordBatchReader):
            return labels
        if hasattr(labels, "__arrow_c_stream__"):
            return pa.RecordBatchReader.from_stream(labels)
        if hasattr(labels, "__arrow_c_array__"):
            batch = pa.record_batch(labels)
            return pa.RecordBatchReader.from_batches(batch.schema, [batch])
    except (pa.ArrowException, TypeError) as error:
        raise UsageError(f"labels are no table: {error}", "pass a table with columns") from error
    raise UsageError(
        f"labels must be Arrow data, not {type(labels).__name__}",
        "pass a table, a reader, or a frame of Polars, DuckDB or pandas",
    )


def require_columns(
    schema: pa.Schema, labels: pa.Schema, key: str, at: str | None, added: tuple[str, ...]
) -> None:
    """Raise `UsageError` unless `labels` has the columns of keys and of times, and the columns
    `added` are new to `schema`, which has the columns of the labels and of other sources."""
    for name in (key, at):
        found = [0] if name is None else labels.get_all_field_indices(name)
        if len(found) != 1:
            problem = "no column" if not found else f"{len(found)} columns"
            raise UsageError(
                f"labels have {problem} {name!r}", f"they have {', '.join(labels.names)}"
            )
    for name in added:
        if name in schema.names:
            whose = "labels have" if name in labels.names else "two sources add"
            raise UsageError(
                f"{whose} a column {name!r} already",
                "name the columns of the result: columns=(value, timestamp)",
            )
    _require_key_type(labels.field(key))
    if at is not None:
        _require_time_type(labels.field(at))


class Pieces:
    """The labels of a reader in pieces of bounded rows and bytes."""

    def __init__(self, reader: pa.RecordBatchReader, rows_first: int, rows_most: int) -> None:
        """The first piece has `rows_first` labels at most, a later one `rows_most`."""
        self._reader = reader
        self._rows_most = rows_most
        self._rows_max = min(rows_first, rows_most)

    def learn(self, rows: int, size: int) -> None:
        """Note that the values of `rows` labels have `size` bytes. The next pieces have so few
        labels that their values take about half of the allowed bytes."""
        fitting = rows * JOIN_VALUE_BYTES_MAX // (2 * max(size, 1))
        self._rows_max = max(min(fitting, self._rows_most), 1)

    def __iter__(self) -> Iterator[Piece]:
        batches: list[pa.RecordBatch] = []
        first = rows = size = 0
        for arrived in self._reader:
            at = 0
            while at < arrived.num_rows:
                batch = arrived.slice(at, self._rows_max - rows)
                while batch.nbytes > JOIN_LABEL_BYTES_MAX and batch.num_rows > 1:
                    batch = batch.slice(0, batch.num_rows // 2)
                at += batch.num_rows
                rows += batch.num_rows
                size += batch.nbytes
                batches.append(batch)
                if rows >= self._rows_max or size >= JOIN_LABEL_BYTES_MAX:
                    yield Piece(batches, first)
                    first, batches, rows, size = first + rows, [], 0, 0
        if rows:
            yield Piece(batches, first)


def keys_of(piece: Piece, name: str) -> pa.Array:
    """The column `name` of a piece as one binary array without nulls."""
    arrays, first = [], piece.first
    for batch in piece.batches:
        column = batch.column(name)
        _require_no_null(column, name, first)
        if pa.types.is_dictionary(column.type):
            column = column.dictionary_decode()
        arrays.append(column.cast(pa.binary()))
        _require_short(arrays[-1], name, first)
        first += batch.num_rows
    return pa.concat_arrays(arrays)


def _require_short(keys: pa.Array, name: str, first: int) -> None:
    if len(keys) and keys.nbytes > KEY_BYTES_MAX:
        lengths = pc.binary_length(keys).to_numpy()
        if lengths.max() > KEY_BYTES_MAX:
            at = int(np.argmax(lengths > KEY_BYTES_MAX))
            raise UsageError(
                f"column {name!r} has a key of {lengths[at]} bytes in row {first + at}",
                f"at most {KEY_BYTES_MAX} are allowed",
            )


def times_of_labels(piece: Piece, name: str) -> Numbers:
    """The column `name` of a piece as nanoseconds."""
    times, first = [], piece.first
    for batch in piece.batches:
        times.append(_times(batch.column(name), name, first))
        first += batch.num_rows
    return np.concatenate(times)


def _times(column: pa.Array, name: str, first: int) -> Numbers:
    _require_no_null(column, name, first)
    try:
        if pa.types.is_timestamp(column.type):
            column = column.cast(pa.timestamp("ns", column.type.tz))
        times: Numbers = column.cast(pa.int64()).to_numpy()
    except pa.ArrowInvalid as error:
        raise UsageError(f"column {name!r}: {error}", _times_are()) from error
    if len(times) and times.min() < 0:
        at = int(np.argmax(times < 0))
        raise UsageError(f"column {name!r} has {times[at]} in row {first + at}", _times_are())
    return times


def _times_are() -> str:
    return f"times are nanoseconds from 0 to {TIMESTAMP_MAX}"


def _require_no_null(column: pa.Array, name: str, first: int) -> None:
    if column.null_count:
        row = first + column.is_null().index(True).as_py()
        raise UsageError(f"column {name!r} has a null in row {row}", "drop such labels first")


def _require_key_type(field: pa.Field) -> None:
    kind = field.type.value_type if pa.types.is_dictionary(field.type) else field.type
    if kind not in _TEXTS and not pa.types.is_fixed_size_binary(kind):
        raise UsageError(
            f"column {field.name!r} has keys of type {field.type}", "pass binary or text, in UTF-8"
        )


def _require_time_type(field: pa.Field) -> None:
    is_time = pa.types.is_timestamp(field.type)
    if is_time and field.type.tz is None:
        raise UsageError(
            f"column {field.name!r} has times without a time zone", "convert them to UTC first"
        )
    if not is_time and not pa.types.is_integer(field.type):
        raise UsageError(
            f"column {field.name!r} has times of type {field.type}",
            "pass timestamps with a time zone, or integers of nanoseconds",
        )


_TEXTS = frozenset(
    [
        pa.binary(),
        pa.large_binary(),
        pa.binary_view(),
        pa.string(),
        pa.large_string(),
        pa.string_view(),
    ]
)
