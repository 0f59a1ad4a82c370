"""The times at which the values of changes expire.

The due time of a put is no field of its tuple, but an attribute beside the fields, as the time zone
of `time.struct_time` is. So changes and events without expiries are the same tuples as ever, and
cost nothing. The due times are read from the records of expiries (`kvstore.mvcc.dues`).

Invariants
1. The due time of a change is the one with which its version was written. A later write, or
   `persist`, does not alter it: the delete at the due time comes as a change of its own, or never.
   The latest change of a key tells the due time that the key has at the end of the window.
2. A span in which nothing ever expired costs one seek a window.
3. `DUE_ROWS_MAX` changes are read ahead, or fewer that fill `EXPIRY_READ_BYTES`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import TypeVar

from kvstore.changes.change import Change, ExpiringChange
from kvstore.changes.event import Event, ExpiringEvent, Operation
from kvstore.limits import DUE_ROWS_MAX, EXPIRY_READ_BYTES
from kvstore.loops.columns import gather
from kvstore.mvcc.dues import dues_at, dues_of, may_expire
from kvstore.mvcc.expiry import Due
from kvstore.mvcc.versions import Versions
from kvstore.span import Span

_T = TypeVar("_T", Change, Event)

_CHANGE_BYTES = Change._fields.index("key"), len(Change._fields)
_EVENT_BYTES = Event._fields.index("key"), Event._fields.index("changeset")
"""The fields between which the bytes of a tuple are counted."""


class DueTimes:
    """Finds the due times of the changes of one store. `has_any` tells whether keys of the store
    expire, or have expired."""

    def __init__(self, versions: Versions, has_any: Callable[[], bool]) -> None:
        self._versions, self._has_any = versions, has_any

    def may_be_in(self, span: Span) -> bool:
        """Whether a version of a key in `span` may expire, or have expired."""
        return self._has_any() and may_expire(self._versions, span)

    def of_changes(
        self, changes: Iterator[Change], span: Span, *, as_of: int | None = None
    ) -> Iterator[Change]:
        """`changes` of keys in `span` with their due times, as of `as_of` if it is set, else as
        their versions were written."""
        if not self.may_be_in(span):
            return changes
        return self._told(changes, _CHANGE_BYTES, _is_put, ExpiringChange.of, as_of)

    def of_events(
        self, events: Iterator[Event], span: Span, *, as_of: int | None = None
    ) -> Iterator[Event]:
        """As `of_changes`, of events."""
        if not self.may_be_in(span):
            return events
        return self._told(events, _EVENT_BYTES, _is_update, ExpiringEvent.of, as_of)

    def of_keys(self, keys: Sequence[bytes], written: int) -> list[int | None]:
        """The due times of the versions of `keys` with the timestamp `written`."""
        return _times(dues_of(self._versions, keys, [written] * len(keys)))

    def _told(
        self,
        source: Iterator[_T],
        counted: tuple[int, int],
        is_put: Callable[[_T], bool],
        expiring: Callable[[_T, int], _T],
        as_of: int | None,
    ) -> Iterator[_T]:
        while True:
            rows: list[_T] = []
            gather(source, rows, DUE_ROWS_MAX, EXPIRY_READ_BYTES, *counted)
            if not rows:
                return
            places = [place for place, row in enumerate(rows) if is_put(row)]
            keys = [rows[place].key for place in places]
            if as_of is None:
                written = [rows[place].timestamp for place in places]
                dues = dues_of(self._versions, keys, written)
            else:
                dues = dues_at(self._versions, keys, as_of)
            for place, due in zip(places, dues, strict=True):
                if due is not None:
                    rows[place] = expiring(rows[place], due.time)
            yield from rows


def _times(dues: Sequence[Due | None]) -> list[int | None]:
    return [None if due is None else due.time for due in dues]


def _is_put(change: Change) -> bool:
    return change.op == "put"


def _is_update(event: Event) -> bool:
    return event.op is Operation.UPDATE
