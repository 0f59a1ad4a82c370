"""Reading the changes of a window `(since, upto]`, by key or by time, all or the latest.

There are two ways with the same answer. A read through the index costs what changed in the store,
also outside the span. A pass over the versions (`kvstore.mvcc.passes`) costs what exists in the
span, in bounded memory and in key order. A read in time order uses the index wherever the index
is complete. A read in key order uses the index for windows that can be sorted in memory, unless
the span has fewer entries than the index has rows; it uses the pass for all others.

Invariants
1. Both ways give the same changes. In key order the changes of one key come oldest first.
2. A read in key order holds at most `SORTED_CHANGES_MAX` changes. It reads values again that do
   not fit into `SORTED_CHANGES_BYTES_MAX`.

The index stores an import as one event. A read expands it: the list of its keys or a pass over
its spans gives its rows, and a revert gives the value that each of their keys took.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import chain, groupby, islice, repeat
from operator import itemgetter
from typing import Final, Literal, TypeAlias, TypeVar

from kvstore.base.arguments import ArgumentKind, word
from kvstore.base.span import Span
from kvstore.base.timestamp import Timestamp
from kvstore.changes.epochs import ChangesetId
from kvstore.changes.events import (
    Change,
    Event,
    Expand,
    ExpiringChange,
    ExpiringEvent,
    Images,
    Operation,
)
from kvstore.changes.index import (
    OP_DELETE,
    OP_DELETE_RANGE,
    OP_IMPORT,
    OP_PUT,
    OP_PUT_LARGE,
    OP_REVERT,
    ChangeEntry,
    ChangeIndex,
    Commit,
    PlacedRow,
    Row,
    Select,
    placed,
)
from kvstore.errors import CorruptionError
from kvstore.limits import (
    DUE_ROWS_MAX,
    EXPIRY_READ_BYTES,
    INLINE_VALUE_BYTES,
    SCAN_CHUNK,
    SORTED_CHANGES_BYTES_MAX,
    SORTED_CHANGES_MAX,
)
from kvstore.loops.columns import arrange, gather, tuples
from kvstore.mvcc.expiry_records import Due, dues_at, dues_of, may_expire
from kvstore.mvcc.fragments import RangeTombstone
from kvstore.mvcc.key_history import newest_at
from kvstore.mvcc.passes import Difference
from kvstore.mvcc.versions import Versions

Revisions: TypeAlias = Literal["all", "latest"]
Order: TypeAlias = Literal["key", "time"]
REVISIONS_CHOICE: Final[ArgumentKind[Revisions]] = word("all", "latest")
ORDER_CHOICE: Final[ArgumentKind[Order]] = word("key", "time")
RowsOfImport: TypeAlias = "Callable[[bytes, Span], Iterator[tuple[bytes, bytes | None]]]"
"""The rows that an import has in a span, by key; the index stores its id in this form."""

_OP, _KEY = (itemgetter(Change._fields.index(name)) for name in ("op", "key"))


class ChangeReader:
    """Reads changes from an index and the versions beside it."""

    def __init__(self, versions: Versions, index: ChangeIndex, import_rows: RowsOfImport) -> None:
        self._versions = versions
        self.index = index
        self._import_rows = import_rows

    def changes(
        self,
        span: Span,
        *,
        since: int,
        upto: int,
        revisions: Revisions = "all",
        order: Order = "key",
        index_floor: int = 0,
    ) -> Iterator[Change]:
        """Changes in `(since, upto]`; the index is complete from `index_floor` on."""
        if since >= upto:
            return iter(())
        latest = revisions == "latest"
        indexed = since >= index_floor and not (latest and since == 0)
        if order == "time":
            if indexed:
                return self._by_time(span, since=since, upto=upto, latest=latest)
            return iter(sorted(self._pass(span, since, upto, latest=latest), key=_time_order))
        if indexed:
            small = self._sorted_by_key(span, since=since, upto=upto, latest=latest)
            if small is not None:
                return small
        return self._pass(span, since, upto, latest=latest)

    def _pass(self, span: Span, since: int, upto: int, *, latest: bool) -> Iterator[Change]:
        found = self._versions.diff(span, since=since, upto=upto, latest=latest)
        return map(_as_change, found)

    def _by_time(self, span: Span, *, since: int, upto: int, latest: bool) -> Iterator[Change]:
        changes = self._expanded(span, since=since, upto=upto)
        if not latest:
            return changes
        newest: dict[bytes, int] = {}
        points = (
            change
            for change in changes
            if change.op != "delete_range" and self._is_newest(change, upto, newest)
        )
        return heapq.merge(self._ranges(span, since, upto), points, key=_time_order)

    def _sorted_by_key(
        self, span: Span, *, since: int, upto: int, latest: bool
    ) -> Iterator[Change] | None:
        """The changes of the window, sorted in memory; None if they are too large for that, or if
        a pass costs less."""
        room = _Room(SORTED_CHANGES_BYTES_MAX)
        race = _Race(partial(self._versions.has_fewer, span)) if span != Span() else None
        expanded = self._expanded(span, since=since, upto=upto, room=room, race=race)
        found = list(islice(expanded, SORTED_CHANGES_MAX + 1))
        if len(found) > SORTED_CHANGES_MAX or (race is not None and race.is_lost):
            return None
        if latest:
            newest = {change.key: change for change in found if change.op != "delete_range"}
            found = list(newest.values())
            if fragments := self._versions.view.fragments:
                found = [
                    change
                    for key, change in newest.items()
                    if fragments.newest(key, upto) <= change.timestamp
                ]
                found.extend(self._ranges(span, since, upto))
        # The changes are in time order, and a stable sort keeps that order within a key.
        if "delete_range" in map(_OP, found):
            found.sort(key=_key_order)
        else:
            found = arrange(found, list(map(_KEY, found)))
        return iter(found) if room.left > 0 else map(self._with_value, found)

    def _with_value(self, change: Change) -> Change:
        """The change with its value, read again if there was no room to hold it."""
        if change.op != "put" or change.value is not None:
            return change
        return self.point(Row(OP_PUT_LARGE, change.key, b""), change.timestamp)

    def _ranges(self, span: Span, since: int, upto: int) -> list[Change]:
        """The newest range tombstone of each fragment in the window, oldest first."""
        fragments = self._versions.view.fragments
        tombstones = fragments.tombstones(span, since=since, upto=upto, latest=True)
        return sorted(map(_as_change, tombstones), key=_time_order)

    def _is_newest(self, change: Change, upto: int, known: dict[bytes, int]) -> bool:
        """Whether no later change of the key lies at or below `upto`. `known` keeps the time of the
        newest one, because the history of a key is read whole."""
        at = known.get(change.key)
        if at is None:
            if len(known) >= SORTED_CHANGES_MAX:
                known.clear()
            newest = newest_at(self._versions.revisions(change.key), upto)
            at = known[change.key] = 0 if newest is None else newest[0]
        return at == change.timestamp

    # -- from the index ---------------------------------------------------------------------

    def _expanded(
        self,
        span: Span,
        *,
        since: int,
        upto: int,
        room: _Room | None = None,
        race: _Race | None = None,
    ) -> Iterator[Change]:
        """The changes of a window, and only its first ones if the `race` is lost."""

        def pieces() -> Iterator[Iterator[Change]]:
            for window in self.index.generations.windows(since=since, upto=upto):
                if window.generation.is_split:
                    for timestamp, _, row, *_ in self.index.rows_in(window):
                        yield self._of_row(row, Timestamp(timestamp), span, room)
                        if race is not None and race.loses(1):
                            return
                else:
                    for commit in self.index.commits_in(window):
                        at = Timestamp(commit.timestamp)
                        yield self._of_entry(commit.entry, at, span, room)
                        if race is not None and race.loses(commit.entry.count):
                            return

        return chain.from_iterable(pieces())

    def _of_entry(
        self, entry: ChangeEntry, at: Timestamp, span: Span, room: _Room | None
    ) -> Iterator[Change]:
        """The changes of one entry in `span`.

        Hot: for small puts and the whole key space, the common case, no line of Python runs per
        change (0.13 us a change; row by row 1.0).
        """
        if span == Span() and entry.is_small_puts:
            keys, values = entry.columns()
            return tuples(Change, entry.count, [at, "put", keys, None, values])
        return chain.from_iterable(self._of_row(row, at, span, room) for row in entry.rows())

    def _of_row(self, row: Row, at: Timestamp, span: Span, room: _Room | None) -> Iterator[Change]:
        if row.op in (OP_PUT, OP_DELETE, OP_PUT_LARGE):
            if row.key in span:
                yield self.point(row, at, room)
        elif row.op == OP_DELETE_RANGE:
            part = span.intersect(row.key, row.value)
            if part is not None:
                yield Change(at, "delete_range", part.start, part.end, None)
        else:
            for change in self.import_event(row, at, span):
                yield change if room is None else room.take(change)

    def point(self, row: Row, at: Timestamp, room: _Room | None = None) -> Change:
        """The put or delete of a row, with its value from the index or the versions. A large value
        is left out if there is no `room` for it."""
        if row.op == OP_PUT:
            return Change(at, "put", row.key, None, row.value)
        if row.op == OP_DELETE:
            return Change(at, "delete", row.key, None, None)
        if room is not None and room.left <= 0:
            return Change(at, "put", row.key, None, None)
        value = self._versions.get(row.key, at)
        if value is None:
            raise CorruptionError(
                f"key {row.key!r} at {int(at)}", "in the change index, but not in the versions"
            )
        change = Change(at, "put", row.key, None, value)
        return change if room is None else room.take(change)

    def import_event(self, row: Row, at: Timestamp, span: Span) -> Iterator[Change]:
        """The changes that an import or its revert made to keys of `span`, in the order of its
        spans."""
        if row.op not in (OP_IMPORT, OP_REVERT):
            raise CorruptionError(f"change entry {int(at)}", f"unknown operation {row.op}")
        for key, value in self._import_rows(row.key, span):
            if row.op == OP_IMPORT:
                yield _point_change(at, key, value)
            else:
                yield from self._uncovered(key, at)

    def _uncovered(self, key: bytes, at: Timestamp) -> Iterator[Change]:
        """The change that a revert at `at` made to `key`; none if the import did not show there."""
        for timestamp, value in self._versions.revisions(key):
            if timestamp == at:
                yield _point_change(at, key, value)


class _Room:
    """How many bytes of large values may still be held."""

    __slots__ = ("left",)

    def __init__(self, left: int) -> None:
        self.left = left

    def take(self, change: Change) -> Change:
        """The change, without its value if the value is large and there is no room for it."""
        value = change.value
        if value is None or len(value) <= INLINE_VALUE_BYTES:
            return change
        if self.left <= 0:
            return change._replace(value=None)
        self.left -= len(value)
        return change


class _Race:
    """A read of a window in the index, against a pass over the entries of its span.

    The span is looked at each time that twice as many rows of the index were read. So both together
    cost a few times the cheaper one, whatever the window and the span.
    """

    __slots__ = ("_has_fewer", "_next", "_rows", "is_lost")

    def __init__(self, has_fewer: Callable[[int], bool]) -> None:
        self._has_fewer, self._rows, self._next = has_fewer, 0, SCAN_CHUNK
        self.is_lost = False

    def loses(self, rows: int) -> bool:
        """Whether a pass has fewer entries than there were `rows`, these and all before."""
        self._rows += rows
        if self._rows >= self._next:
            self._next = 2 * self._rows
            self.is_lost = self._has_fewer(self._rows)
        return self.is_lost


def _point_change(at: Timestamp, key: bytes, value: bytes | None) -> Change:
    return Change(at, "delete" if value is None else "put", key, None, value)


def _as_change(found: Difference) -> Change:
    if isinstance(found, RangeTombstone):
        return Change(Timestamp(found.timestamp), "delete_range", found.start, found.end, None)
    return _point_change(found.timestamp, found.key, found.value)


def _time_order(change: Change) -> tuple[int, bool]:
    return change.timestamp, change.op != "delete_range"


def _key_order(change: Change) -> tuple[bytes, bool, int]:
    return change.key, change.op != "delete_range", change.timestamp


# --------------------------------------------------------------------------------------------------
# The times at which the values of changes expire.
#
# The due time of a put is no field of its tuple, but an attribute beside the fields, as the time
# zone of `time.struct_time` is. So changes and events without expiries are the same tuples as ever,
# and cost nothing. The due times are read from the records of expiries
# (`kvstore.mvcc.expiry_records`).
#
# Invariants
# 1. The due time of a change is the one with which its version was written. A later write, or
#    `persist`, does not alter it: the delete at the due time comes as a change of its own, or
#    never. The latest change of a key tells the due time that the key has at the end of the window.
# 2. A span in which nothing ever expired costs one seek a window.
# 3. `DUE_ROWS_MAX` changes are read ahead, or fewer that fill `EXPIRY_READ_BYTES`.

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
    return event.op is Operation.PUT


# --------------------------------------------------------------------------------------------------
# From rows of the change index to events: images, and imports and ranges as keys.
#
# An image is a read of the versions just before the change, or at its time. Versions never change,
# so concurrent writes do not affect an image. Each image costs one look-up.
#
# The index stores range deletes, imports and reverts as one row. Expanding an import gives its
# keys, by a pass over its spans; expanding a revert gives the values that these keys took;
# expanding a range delete gives the keys that were alive just before it.


@dataclass(frozen=True, slots=True)
class Wanted:
    """The choices of a reader of events. `select=None` means every stream."""

    span: Span
    images: Images = "delta"
    expand: Expand = "imports"
    select: Select | None = None


class EventReader:
    """Reads events from an index and the versions beside it."""

    def __init__(
        self, versions: Versions, index: ChangeIndex, changes: ChangeReader, dues: DueTimes
    ) -> None:
        self._versions = versions
        self._index = index
        self._changes = changes
        self.dues = dues

    def events(self, wanted: Wanted, *, since: int, upto: int) -> Iterator[Event]:
        """Events in `(since, upto]` in time order; the events of a commit in the order it made
        them.

        The caller keeps history from `since` on, and makes sure that the index is complete.
        """

        def pieces() -> Iterator[Iterator[Event]]:
            for window in self._index.generations.windows(since=since, upto=upto):
                if window.generation.is_split:
                    rows = self._index.rows_in(window, wanted.select)
                    yield _marked(self.of_rows(rows, wanted))
                    continue
                chunks = self._index.commits_in(window, wanted.select)
                for _, commit in groupby(chunks, key=itemgetter(0)):
                    yield self._of_commit(commit, wanted)

        return self.dues.of_events(chain.from_iterable(pieces()), wanted.span)

    def _of_commit(self, chunks: Iterator[Commit], wanted: Wanted) -> Iterator[Event]:
        """The events of one commit, which lies in one stream.

        Hot: if the reader wants all of a commit of small puts, no line of Python runs per event
        (0.2 us an event, otherwise 2).
        """
        first = next(chunks)
        entry = first.entry
        is_plain = wanted.span == Span() and not wanted.images.startswith("pre")
        if is_plain and entry.is_last and entry.is_small_puts:
            return of_puts(first, wanted.images)

        def rows() -> Iterator[PlacedRow]:
            taken = 0
            for commit in chain((first,), chunks):
                yield from placed(commit, taken)
                taken += commit.entry.count

        return _marked(self.of_rows(rows(), wanted))

    def of_rows(self, rows: Iterable[PlacedRow], wanted: Wanted) -> Iterator[Event]:
        """The events of rows of the index, without marks at the ends of commits and without due
        times.

        Hot: a put or delete takes the short way (4 us against 9).
        """
        span, images = wanted.span, wanted.images
        is_whole_span, keys_only = span == Span(), images == "none"
        with_pre, with_post = images.startswith("pre"), images.endswith("post")
        get, update, row_delete = self._versions.get, Operation.PUT, Operation.DELETE
        for row in rows:
            timestamp, sequence, (op, key, stored), stream, changeset = row
            if op not in (OP_PUT, OP_DELETE):
                yield from self._of_row(row, wanted)
            elif is_whole_span or key in span:
                value = stored if op == OP_PUT else None
                yield Event(
                    Timestamp(timestamp),
                    sequence,
                    update if op == OP_PUT else row_delete,
                    key,
                    None,
                    None if keys_only else value,
                    get(key, timestamp - 1) if with_pre else None,
                    value if with_post else None,
                    ChangesetId(*changeset),
                    stream,
                    False,
                )

    def _of_row(self, placed: PlacedRow, wanted: Wanted) -> Iterator[Event]:
        at, op = Timestamp(placed.timestamp), placed.row.op
        span = wanted.span
        if op == OP_DELETE_RANGE:
            part = span.intersect(placed.row.key, placed.row.value)
            if part is None:
                return
            if wanted.expand == "all":
                for keys, _ in self._versions.scan(part, at - 1):
                    for key in keys:
                        yield self._of_change(placed, Change(at, "delete", key, None, None), wanted)
            else:
                yield _event(placed, Operation.DELETE_RANGE, part.start, part.end)
        elif op in (OP_IMPORT, OP_REVERT):
            if wanted.expand == "none":
                yield _event(placed, Operation(op), placed.row.key, None)
            else:
                expanded = self._changes.import_event(placed.row, at, span)
                for number, change in enumerate(expanded):
                    yield self._of_change(placed._replace(sequence=number), change, wanted)
        elif placed.row.key in span:
            yield self._of_change(placed, self._changes.point(placed.row, at), wanted)

    def _of_change(self, placed: PlacedRow, change: Change, wanted: Wanted) -> Event:
        images, key, at = wanted.images, change.key, change.timestamp
        op = Operation.PUT if change.op == "put" else Operation.DELETE
        value = None if images == "none" else change.value  # a large value, or one of an import
        pre = self._versions.get(key, at - 1) if images.startswith("pre") else None
        post = change.value
        if images.endswith("post"):
            # A put's value is the state after it. A key in a range delete may have been put again.
            post = post if change.op == "put" else self._versions.get(key, at)
        else:
            post = None
        return _event(placed, op, key, None, value, pre, post)


def of_puts(commit: Commit, images: Images) -> Iterator[Event]:
    """The events of an entry that is a whole commit of puts with their values."""
    timestamp, _, entry, stream = commit
    keys, values = entry.columns()
    fields = [
        Timestamp(timestamp),
        list(range(entry.count)),
        Operation.PUT,
        keys,
        None,
        None if images == "none" else values,
        None,
        values if images == "post" else None,
        ChangesetId(*entry.changeset),
        stream,
        [*repeat(False, entry.count - 1), True][: entry.count],
    ]
    return tuples(Event, entry.count, fields)


def _event(
    placed: PlacedRow,
    op: Operation,
    key: bytes,
    end_key: bytes | None,
    value: bytes | None = None,
    pre: bytes | None = None,
    post: bytes | None = None,
) -> Event:
    return Event(
        Timestamp(placed.timestamp),
        placed.sequence,
        op,
        key,
        end_key,
        value,
        pre,
        post,
        ChangesetId(*placed.changeset),
        placed.stream,
        end_of_batch=False,
    )


def _marked(events: Iterable[Event]) -> Iterator[Event]:
    """The events, with a mark at the last event of each commit. Reads one event ahead."""
    held: Event | None = None
    for event in events:
        if held is not None:
            ends = event.timestamp != held.timestamp
            yield held._replace(end_of_batch=True) if ends else held
        held = event
    if held is not None:
        yield held._replace(end_of_batch=True)
