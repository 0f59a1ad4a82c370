"""The rows of a table in a collection of backups or in a snapshot, with their history.

Such a table has one time. Beside it the collection, or the store of the snapshot, has older times,
which `history`, `changes`, `latest` and `join` ask for.

Invariant: no answer tells of a commit above the time of the table.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Protocol, TypeVar

import numpy as np
import pyarrow as pa

from kvstore.errors import NotYetWrittenError
from kvstore.joins.labels import reached_times
from kvstore.joins.side import Answers, Asked, Search, Side
from kvstore.limits import JOIN_VALUE_BYTES_MAX
from kvstore.mvcc import Version
from kvstore.parts import Parts
from kvstore.span import Span
from kvstore.tables.answers import AskedSpans, RowAnswers, RowsFound, StoredRowSource
from kvstore.tables.catalogue import Catalogue
from kvstore.tables.codec import TableCodec
from kvstore.tables.sources import SnapshotRows
from kvstore.timestamp import TIMESTAMP_MAX, TimeLike, Timestamp, reached, to_timestamp

_Labels = TypeVar("_Labels", Asked, AskedSpans)


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
        """A time that the caller gave, by default the time of the table. An age counts from it."""
        if time is None:
            return self._as_of
        at = reached(to_timestamp(time, name=name, now=lambda: self._as_of), self._as_of)
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

    @contextmanager
    def answers(self) -> Iterator[RowAnswers]:
        """See `RowSource.answers`."""
        with self.store.join_side().opened() as answers:
            yield _RowAnswersUpto(answers, self._as_of)


class PastRows(CollectedRows):
    """The rows of a snapshot of a store, and their history up to it."""

    def __init__(self, store: Any, snapshot: Any, catalogue: Catalogue, parts: Parts) -> None:
        super().__init__(store, snapshot, catalogue)
        self._parts = parts

    def time(self, time: TimeLike | None, name: str) -> Timestamp:
        """See `CollectedRows.time`. Raises `ClosedError` if the snapshot is closed."""
        self.side()
        return super().time(time, name)

    def side(self) -> Side:
        """The side of the snapshot in a join."""
        side: Side = self._snapshot.join_side()
        return side

    @contextmanager
    def answers(self) -> Iterator[RowAnswers]:
        """See `RowSource.answers`."""
        self.side()
        with StoredRowSource(self._parts).answers() as answers:
            yield _StoredAnswersUpto(answers, self._as_of)


class SpanAnswers(Answers, Protocol):
    """Answers of a collection that find rows in spans, too."""

    def first_alive(self, labels: AskedSpans) -> RowsFound | None:
        """See `RowAnswers.latest`."""
        ...


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
        return self._answers.answer(_upto(labels, self.newest), search)


class _RowAnswersUpto:
    """See `kvstore.tables.answers.RowAnswers`."""

    def __init__(self, answers: SpanAnswers, as_of: Timestamp) -> None:
        self._answers, self.newest = answers, as_of
        self.rows_first, self.rows_max = answers.rows_first, answers.rows_max

    def at(self, labels: Asked) -> RowsFound | None:
        """See `RowAnswers.at`."""
        labels = _upto(labels, self.newest)
        every_age = Search(TIMESTAMP_MAX, False, JOIN_VALUE_BYTES_MAX)
        found = self._answers.answer(labels, every_age)
        if found is None:
            return None
        values, times = found
        return RowsFound(labels.keys, values, times.cast(pa.int64()).fill_null(-1).to_numpy())

    def latest(self, labels: AskedSpans) -> RowsFound | None:
        """See `RowAnswers.latest`."""
        return self._answers.first_alive(_upto(labels, self.newest))


class _StoredAnswersUpto:
    """See `kvstore.tables.answers.RowAnswers`."""

    def __init__(self, answers: RowAnswers, as_of: Timestamp) -> None:
        self._answers, self.newest = answers, as_of
        self.rows_first, self.rows_max = answers.rows_first, answers.rows_max

    def at(self, labels: Asked) -> RowsFound | None:
        """See `RowAnswers.at`."""
        return self._answers.at(_upto(labels, self.newest))

    def latest(self, labels: AskedSpans) -> RowsFound | None:
        """See `RowAnswers.latest`."""
        return self._answers.latest(_upto(labels, self.newest))


def _upto(labels: _Labels, newest: int) -> _Labels:
    """The labels, if none asks for a later time. Raises `NotYetWrittenError`."""
    labels = labels._replace(times=reached_times(labels.times, newest))
    late = np.flatnonzero(labels.times > newest)
    if len(late):
        first = int(late[0])
        raise NotYetWrittenError(
            as_of=Timestamp(labels.times[first]),
            upper=Timestamp(newest + 1),
            remedy=f"row {labels.first + first} asks for it: the table ends at {Timestamp(newest)}",
        )
    return labels
