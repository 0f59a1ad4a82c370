"""The rows of a table in a collection of backups, with their history.

A table of a collection has one time, as a table of a snapshot has. Beside it the collection has
older times, which `history`, `changes`, `latest` and `join` ask for.

Invariant: no answer tells of a commit above the time of the table.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import Any, Protocol

import pyarrow as pa

from kvstore.errors import NotYetWrittenError, UsageError
from kvstore.joins.join import join
from kvstore.joins.side import Answers, Asked, Join, Search, Side
from kvstore.mvcc import Version
from kvstore.span import Span
from kvstore.tables.catalogue import Catalogue
from kvstore.tables.codec import TableCodec
from kvstore.tables.joining import asked_rows
from kvstore.tables.side import TableSide
from kvstore.tables.sources import SnapshotRows
from kvstore.timestamp import TimeLike, Timestamp, to_timestamp


class CollectedRows(SnapshotRows):
    """The rows of a collection as of a time, and their history up to it."""

    def __init__(self, reader: Any, snapshot: Any, catalogue: Catalogue) -> None:
        """`reader` reads the collection at any time, `snapshot` at the time of the table."""
        super().__init__(snapshot, catalogue)
        self.store = reader
        self._as_of = Timestamp(snapshot.as_of)

    def codec(self, name: str, as_of: TimeLike | None = None) -> TableCodec:
        """See `RowReader.codec`."""
        return self._catalogue.codec(name, self.time(as_of, "as_of"))

    def history(self, key: bytes) -> Sequence[Version]:
        """The kept versions of a key up to the time of the table."""
        return [found for found in self.store.history(key) if found.timestamp <= self._as_of]

    def time(self, time: TimeLike | None, name: str) -> Timestamp:
        """A time that the caller gave, by default the time of the table."""
        if time is None:
            return self._as_of
        at = to_timestamp(time, name=name)
        if at > self._as_of:
            raise NotYetWrittenError(as_of=Timestamp(at), upper=Timestamp(self._as_of + 1))
        return Timestamp(at)

    def first(self, span: Span, at: Timestamp) -> tuple[bytes, bytes] | None:
        """The first live key in `span` at `at`, with its value."""
        found: tuple[bytes, bytes] | None = next(
            self.store.scan(span.start, span.end, as_of=at, limit=1), None
        )
        return found

    def side(self) -> Side:
        """The side of the collection in a join, up to the time of the table."""
        return _SideUpto(self.store.join_side(), self._as_of)


class _SideUpto:
    """A side of a join that answers no label above a time."""

    def __init__(self, side: Side, as_of: Timestamp) -> None:
        self._side, self._as_of = side, as_of
        self.fields = side.fields

    @contextmanager
    def opened(self) -> Iterator[_AnswersUpto]:
        """Hold the history of this moment."""
        with self._side.opened() as answers:
            yield _AnswersUpto(answers, self._as_of)


class _AnswersUpto:
    """See `kvstore.joins.side.Answers`."""

    def __init__(self, answers: Answers, as_of: Timestamp) -> None:
        self._answers, self.newest = answers, as_of
        self.rows_first, self.rows_max = answers.rows_first, answers.rows_max

    def answer(self, labels: Asked, search: Search) -> list[pa.Array] | None:
        """The values of the labels. Raises `NotYetWrittenError` for a time above the table's."""
        latest = int(labels.times.max(initial=0))
        if latest > self.newest:
            raise NotYetWrittenError(as_of=Timestamp(latest), upper=Timestamp(self.newest + 1))
        return self._answers.answer(labels, search)


class Sided(Protocol):
    """A table that labels can be joined to."""

    def join_side(self) -> TableSide:
        """Its side of a join."""
        ...


def join_collected(
    table: Sided,
    codec: TableCodec,
    labels: object,
    *,
    on: str | Sequence[str],
    at: str | None,
    known_at: str | TimeLike | None,
    max_age: timedelta | None,
    columns: Sequence[str] | None,
    prefix: str,
) -> pa.RecordBatchReader:
    """See `Table.join`, for a table of a collection."""
    definition = codec.definition
    if definition.has_event_time:
        raise UsageError(
            f"{definition.where} has an event time, on which a collection joins no labels",
            "restore the collection and join its table, or ask for single rows by latest()",
        )
    reader, names, chosen, schema = asked_rows(codec, labels, on, at, known_at, columns, prefix)
    source = Join(table, key=names, max_age=max_age, columns=chosen, prefix=prefix)
    found = join(reader, [source], at=at)
    renamed = (pa.RecordBatch.from_arrays(batch.columns, schema=schema) for batch in found)
    return pa.RecordBatchReader.from_batches(schema, renamed)
