"""The side of a join that a reader of a collection answers.

Invariant: the snapshots of the reader stay open from the opening of the side until its end. Where a
lease has run out and parts are gone, the leases are taken anew, and the labels are asked again.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Protocol, TypeVar

import pyarrow as pa

from backup.reading.held import Held
from backup.reading.labels import CollectionAnswers
from kvstore.errors import LeaseExpiredError
from kvstore.joins.side import VALUE_FIELDS, Asked, Search
from kvstore.tables.answers import AskedSpans, RowsFound
from kvstore.timestamp import Timestamp

_T = TypeVar("_T")


class LeasingReader(Protocol):
    """See `CollectionReader`."""

    @property
    def as_of(self) -> Timestamp: ...

    def held(self) -> Sequence[Held]: ...

    def using(self, held: Held) -> AbstractContextManager[None]: ...

    def take_anew(self) -> None: ...


class ReaderSide:
    """See `kvstore.joins.side.Side`. No label may ask for a time at or above the reader's upper."""

    fields = VALUE_FIELDS

    def __init__(self, reader: LeasingReader) -> None:
        self._reader = reader

    @contextmanager
    def opened(self) -> Iterator[ReaderAnswers]:
        """Keep the snapshots of this moment open."""
        with ExitStack() as using:
            yield ReaderAnswers(self._reader, using)


class ReaderAnswers(CollectionAnswers):
    """See `kvstore.joins.side.Answers`."""

    def __init__(self, reader: LeasingReader, using: ExitStack) -> None:
        """`using` keeps snapshots open until the end of the side."""
        self._reader, self._using = reader, using
        self._newest = int(reader.as_of)
        super().__init__(self._taken())

    @property
    def newest(self) -> int:
        """The time of the reader."""
        return self._newest

    def answer(self, labels: Asked, search: Search) -> list[pa.Array] | None:
        """See `CollectionAnswers.answer`."""
        return self._repeated(lambda: super(ReaderAnswers, self).answer(labels, search))

    def first_alive(self, labels: AskedSpans) -> RowsFound | None:
        """See `CollectionAnswers.first_alive`."""
        return self._repeated(lambda: super(ReaderAnswers, self).first_alive(labels))

    def _repeated(self, ask: Callable[[], _T]) -> _T:
        try:
            return ask()
        except LeaseExpiredError:
            self._reader.take_anew()
            self._held = self._taken()
            return ask()

    def _taken(self) -> Sequence[Held]:
        held = list(self._reader.held())
        for each in held:
            self._using.enter_context(self._reader.using(each))
        return held
