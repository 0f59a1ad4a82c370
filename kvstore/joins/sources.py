"""Labels as they arrive: Arrow batches with a column of keys and a column of times.

Labels are anything that speaks the Arrow C stream: tables, batches and readers of pyarrow, frames
of Polars and pandas, relations of DuckDB.

Invariants
1. A column that is missing, doubled or of a wrong type is refused before a row is read.
2. A null, a key that is too long and a time out of range are refused by column and row.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import numpy as np
import pyarrow as pa

from kvstore.arrow import batch_bytes, shown_bytes
from kvstore.columns import key_column, require_time_type, time_column
from kvstore.errors import UsageError
from kvstore.joins.labels import Numbers
from kvstore.limits import JOIN_LABEL_BYTES_MAX, JOIN_VALUE_BYTES_MAX


class Piece(NamedTuple):
    """Some neighbouring batches of labels. `first` is the row of the first label."""

    batches: list[pa.RecordBatch]
    first: int

    @property
    def rows(self) -> int:
        """The number of labels."""
        return sum(batch.num_rows for batch in self.batches)

    def behind(self, rows: int) -> Piece:
        """The piece without its first labels."""
        rest, left = [], rows
        for batch in self.batches:
            rest.append(batch.slice(min(left, batch.num_rows)))
            left -= batch.num_rows - rest[-1].num_rows
        return Piece(rest, self.first + rows)

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
    schema: pa.Schema,
    labels: pa.Schema,
    key: Sequence[str],
    at: str | None,
    added: tuple[str, ...],
) -> None:
    """Raise `UsageError` unless `labels` has the columns of keys and of times, and the columns
    `added` are new to `schema`, which has the columns of the labels and of other sources."""
    for name in (*key, at):
        count = 1 if name is None else labels.names.count(name)
        if count != 1:
            problem = f"{count} columns" if count else "no column"
            raise UsageError(
                f"labels have {problem} {name!r}", f"they have {', '.join(labels.names)}"
            )
    for name in added:
        if name in schema.names:
            whose = "labels have" if name in labels.names else "two sources add"
            raise UsageError(
                f"{whose} a column {name!r} already",
                "name the columns of the result: columns=(value, timestamp), or a prefix=",
            )
    if at is not None:
        require_time_type(labels.field(at))


def column_names(name: str, given: object) -> tuple[str, ...]:
    """The names of columns that the argument `name` has: one, or several."""
    if not isinstance(given, tuple | list):
        return (require_column_name(given, name),)
    return tuple(require_column_name(each, name) for each in given)


def require_column_name(given: object, name: str) -> str:
    """The argument `name`, if it is a text."""
    if not isinstance(given, str):
        raise UsageError(
            f"{name} must be a column's name, not {type(given).__name__}", "pass a text"
        )
    return given


def require_prefix(prefix: object) -> None:
    """Raise `UsageError` unless a prefix of names is a text."""
    if not isinstance(prefix, str):
        raise UsageError(f"prefix={prefix!r}", "pass text to stand before the names")


class Pieces:
    """The labels of a reader in pieces of bounded rows and bytes."""

    def __init__(
        self,
        reader: pa.RecordBatchReader,
        rows_first: int,
        rows_most: int,
        first: int = 0,
        bytes_max: int | None = None,
    ) -> None:
        """The first piece has `rows_first` labels at most, a later one `rows_most`. The first label
        is row `first` for its caller. The values of a piece may have `bytes_max` bytes, by default
        `JOIN_VALUE_BYTES_MAX`."""
        self._bytes_max = JOIN_VALUE_BYTES_MAX if bytes_max is None else bytes_max
        self._reader, self._first = reader, first
        self._rows_most = rows_most
        self._rows_max = min(rows_first, rows_most)

    def learn(self, rows: int, size: int) -> None:
        """Note that the values of `rows` labels have `size` bytes. The next pieces have so few
        labels that their values take about half of the allowed bytes, and at most four times as
        many: halving a piece whose values are larger answers its labels again."""
        fitting = rows * self._bytes_max // (2 * max(size, 1))
        self._rows_max = max(min(fitting, 4 * rows, self._rows_most), 1)

    def __iter__(self) -> Iterator[Piece]:
        batches: list[pa.RecordBatch] = []
        first, rows, size = self._first, 0, 0
        for arrived in self._reader:
            at = 0
            while at < arrived.num_rows:
                batch = arrived.slice(at, self._rows_max - rows)
                nbytes = batch_bytes(batch)
                while nbytes > JOIN_LABEL_BYTES_MAX and batch.num_rows > 1:
                    batch = batch.slice(0, batch.num_rows // 2)
                    nbytes = batch_bytes(batch)
                at += batch.num_rows
                rows += batch.num_rows
                size += nbytes
                batches.append(batch)
                if rows >= self._rows_max or size >= JOIN_LABEL_BYTES_MAX:
                    yield Piece(batches, first)
                    first, batches, rows, size = first + rows, [], 0, 0
        if rows:
            yield Piece(batches, first)


def keys_of(piece: Piece, name: str) -> pa.Array | None:
    """The column `name` of a piece as one binary array without nulls. None where several keys have
    too many bytes together: a dictionary or a view may show the same bytes in many rows."""
    columns = [batch.column(name) for batch in piece.batches]
    if piece.rows > 1 and sum(map(shown_bytes, columns)) > JOIN_LABEL_BYTES_MAX:
        return None
    arrays, first = [], piece.first
    for batch in piece.batches:
        arrays.append(key_column(batch.column(name), name, first))
        first += batch.num_rows
    return pa.concat_arrays(arrays)


def times_of_labels(piece: Piece, name: str, now: Callable[[], int]) -> Numbers:
    """The column `name` of a piece as nanoseconds. `now` is the newest time of the sources."""
    times, first = [], piece.first
    for batch in piece.batches:
        times.append(time_column(batch.column(name), name, first, now))
        first += batch.num_rows
    return np.concatenate(times)
