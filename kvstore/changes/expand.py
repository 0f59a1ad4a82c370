"""From rows of the change index to events: images, and imports and ranges as keys.

An image is a read of the versions just before the change, or at its time. Versions never change, so
concurrent writes do not affect an image. Each image costs one look-up.

The index stores range deletes, imports and reverts as one row. Expanding an import gives its keys,
by a pass over its spans; expanding a revert gives the values that these keys took; expanding a
range delete gives the keys that were alive just before it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import chain, groupby, repeat
from operator import itemgetter

from kvstore.changes.change import Change
from kvstore.changes.changeset import ChangesetId
from kvstore.changes.entry import OP_DELETE, OP_DELETE_RANGE, OP_IMPORT, OP_PUT, OP_REVERT
from kvstore.changes.event import Event, Expand, Images, Operation
from kvstore.changes.expiring import DueTimes
from kvstore.changes.index import ChangeIndex, Commit, PlacedRow, Select, placed
from kvstore.changes.windows import ChangeReader
from kvstore.loops.columns import tuples
from kvstore.mvcc.versions import Versions
from kvstore.span import Span
from kvstore.timestamp import Timestamp


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
        get, update, row_delete = self._versions.get, Operation.UPDATE, Operation.ROW_DELETE
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
                yield _event(placed, Operation.RANGE_DELETE, part.start, part.end)
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
        op = Operation.UPDATE if change.op == "put" else Operation.ROW_DELETE
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
        Operation.UPDATE,
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
