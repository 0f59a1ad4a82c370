"""Bounded looks at a store, for people: pages of keys, of versions, and of changes per interval.

A page of a browser or of a shell asks for what fits a screen. The work of each look is bounded in
entries and bytes, whatever the store holds, and the answer says where it stopped.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from functools import partial
from itertools import islice, pairwise
from typing import Final, Literal, NamedTuple, TypeAlias

from typing_extensions import Self

from kvstore.base.arguments import integer
from kvstore.base.span import Span, prefix_end, require_key
from kvstore.base.timestamp import TimeLike, Timestamp
from kvstore.changes.index import ChangeIndex
from kvstore.codec.keys import (
    FIRST_TIMED_SUFFIX,
    KEY_BYTES_LEAST,
    TAIL_BYTES,
    VALUE,
    decode_suffix,
    encode_suffix,
    frame,
    unescape,
)
from kvstore.limits import (
    BROWSE_BYTES_MAX,
    BROWSE_CHUNK,
    BROWSE_ENTRIES_MAX,
    BROWSE_HEADERS_MAX,
    BROWSE_INTERVALS_MAX,
    BROWSE_MARKS_MAX,
    BROWSE_PARTS,
    BROWSE_REFERENCES_MAX,
    BROWSE_ROWS_MAX,
    BROWSE_SEEKS_MAX,
    BROWSE_VALUE_BYTES,
)
from kvstore.mvcc import Versions
from kvstore.mvcc.fragments import Fragments, between
from kvstore.mvcc.key_history import Revision, Stamps, timeline
from kvstore.mvcc.meta import Meta
from kvstore.retention.gc import CollectionRun, collections
from kvstore.timeline.import_records import ImportRecord
from kvstore.timeline.parts import Parts
from kvstore.timeline.reads import Clears
from kvstore.timeline.reserved import PushTold, pushes_told

# --------------------------------------------------------------------------------------------------
# The beginning of a value: enough to show it, whatever its size.


class Excerpt(NamedTuple):
    """The first bytes of a value, and the size of the whole value in bytes."""

    head: bytes
    size: int

    @classmethod
    def of(cls, value: bytes, most: int) -> Self:
        """The first `most` bytes of `value`."""
        return cls(value[:most], len(value))

    @property
    def is_whole(self) -> bool:
        """Whether the excerpt is the value."""
        return len(self.head) == self.size


# --------------------------------------------------------------------------------------------------
# A page of live keys at one time, in a bounded number of entries and bytes.
#
# With a delimiter, keys that share the bytes up to it become one row, a group, as the folders of a
# file system. A group costs one seek, whatever it contains.
#
# Invariants
# 1. A page passes `BROWSE_ENTRIES_MAX` entries and `BROWSE_BYTES_MAX` bytes, and one chunk more.
# 2. Each page takes its reader further: its `next` is above its start, or it is the last one.


class KeyRow(NamedTuple):
    """A live key with the beginning of its value. A group of keys has no value: `key` is the bytes
    that they share, up to the delimiter."""

    key: bytes
    value: Excerpt | None


class KeyPage(NamedTuple):
    """Some rows in key order. `next` is the first key of the page behind, None behind the last one.
    A page `is_cut` if it met a bound before it was full."""

    rows: list[KeyRow]
    next: bytes | None
    is_cut: bool
    passed: int
    """The entries that were read for the page, at most."""


class Folders(NamedTuple):
    """How keys become groups: keys below `prefix` that contain the delimiter behind it."""

    prefix: bytes
    delimiter: bytes

    def group_of(self, key: bytes) -> bytes | None:
        """The group of `key`, None for a key that is its own row."""
        at = key.find(self.delimiter, len(self.prefix))
        return None if at < 0 else key[: at + len(self.delimiter)]


def key_page(
    versions: Versions, span: Span, as_of: int, *, limit: int, fold: Folders | None = None
) -> KeyPage:
    """The first `limit` rows of `span` at `as_of`."""
    return _Filling(versions, as_of, limit, fold).fill(span)


class _Filling:
    """A page that is being made."""

    def __init__(self, versions: Versions, as_of: int, limit: int, fold: Folders | None) -> None:
        self._versions, self._as_of, self._fold = versions, as_of, fold
        self._limit = limit
        self._rows: list[KeyRow] = []
        self._passed = self._bytes = 0

    def fill(self, span: Span) -> KeyPage:
        start: bytes | None = span.start
        while start is not None and len(self._rows) < self._limit:
            if span.end is not None and start >= span.end:
                start = None
            elif self._is_spent and (self._rows or start > span.start):
                return self._page(start, is_cut=True)
            else:
                start = self._pass(Span(start, span.end))
        return self._page(start)

    @property
    def _is_spent(self) -> bool:
        return self._passed >= BROWSE_ENTRIES_MAX or self._bytes >= BROWSE_BYTES_MAX

    def _page(self, following: bytes | None, *, is_cut: bool = False) -> KeyPage:
        return KeyPage(self._rows, following, is_cut, self._passed)

    def _pass(self, span: Span) -> bytes | None:
        """Take rows from the start of `span` on, up to the end of the page or of a group. Returns
        the key to continue at; None at the end of the span."""
        cursor, live = self._versions.live_pass(span, self._as_of)
        count = BROWSE_CHUNK if self._fold is None else BROWSE_CHUNK // 8 or 1
        try:
            while True:
                has_more = cursor.feed(live, count)
                self._passed += count
                count = BROWSE_CHUNK
                if not has_more:
                    live.end()
                for key, value in zip(*live.found(), strict=True):
                    self._bytes += len(value)
                    following = self._take(key, value)
                    if following != key or len(self._rows) == self._limit:
                        return following if following != key else key + b"\x00"
                if not has_more:
                    return None
                if self._is_spent:
                    return self._behind(live.last, span.start)
        finally:
            cursor.close()

    def _take(self, key: bytes, value: bytes) -> bytes | None:
        """Add the row of `key`. Returns `key`, or for a group the first key behind the group."""
        group = None if self._fold is None else self._fold.group_of(key)
        if group is None:
            self._rows.append(KeyRow(key, Excerpt.of(value, BROWSE_VALUE_BYTES)))
            return key
        self._rows.append(KeyRow(group, None))
        return prefix_end(group)

    def _behind(self, last: bytes | None, start: bytes) -> bytes | None:
        """Where to continue a pass whose last stored key is `last`: at its user key, of which the
        pass may have decided nothing yet. A key that takes a whole pass is looked up."""
        assert last is not None, "a pass with more entries has passed one"
        key = unescape(last[:-KEY_BYTES_LEAST])
        if key > start:
            return key
        value = self._versions.get(key, self._as_of)
        following = key if value is None else self._take(key, value)
        return following if following != key else key + b"\x00"


# --------------------------------------------------------------------------------------------------
# Some versions of one key, newest first, each with its origin, in bounded work.
#
# Invariants
# 1. A page has the versions that `Store.history` has in its window of times, in the same order.
# 2. A page reads `limit` timed versions, one more, and the key's rows of imports: one an import.

VersionOrigin: TypeAlias = Literal["put", "delete", "import", "revert", "range delete"]
_REFERENCE_MASK: Final = (1 << 63) - 1
_BEHIND: Final = b"\xff" * (TAIL_BYTES + 1)
"""Sorts behind every tail."""


class VersionRow(NamedTuple):
    """A version: its time, the beginning of its value (None for a deletion), and the kind of write
    that made it. `import_id` is the import that wrote the value."""

    timestamp: Timestamp
    value: Excerpt | None
    origin: VersionOrigin
    import_id: int | None


class VersionPage(NamedTuple):
    """Some versions, newest first. `next` is the time at which the page behind begins, None behind
    the last one. A page `is_cut` if the key has rows of more imports than a page reads."""

    rows: list[VersionRow]
    next: int | None
    is_cut: bool


def version_page(versions: Versions, key: bytes, upto: int, *, limit: int) -> VersionPage:
    """The newest `limit` versions of `key` at or below `upto`."""
    fragments, stamps = versions.view
    stored = _Stored.read(versions, frame(key), upto, limit)
    floor = stored.floor
    deletions = between(fragments.stack(key), floor - 1, upto)
    if len(deletions) > limit:  # then the older entries are of a later page
        deletions = deletions[: limit + 1]
        floor = max(floor, deletions[-1])
    entries = [(tail, tail) for tail in stored.excerpts]
    revisions = timeline(entries, stamps, deletions)
    rows = [stored.row(revision, stamps) for revision in revisions if floor <= revision[0] <= upto]
    following = None
    if len(rows) > limit:
        following = int(rows[limit - 1].timestamp) - 1
    elif floor > 0:
        following = floor - 1
    return VersionPage(rows[:limit], following, stored.is_cut)


class _Stored(NamedTuple):
    """The stored entries of a key that a page needs: by their tails, the beginnings of values. The
    page is whole at or above `floor`."""

    excerpts: dict[bytes, Excerpt]
    floor: int
    is_cut: bool

    @classmethod
    def read(cls, versions: Versions, stem: bytes, upto: int, limit: int) -> _Stored:
        found: dict[bytes, Excerpt] = {}
        ticket, reader = versions.engine.borrow()

        def take(most: int, below: bytes) -> int:
            """Read entries with tails below `below` from here on, `most` at most; their bytes."""
            size = 0
            for _ in range(most):
                stored = reader.key()
                if stored is None or not stored.startswith(stem) or stored[-TAIL_BYTES:] >= below:
                    break
                value = reader.value()
                found[stored[-TAIL_BYTES:]] = Excerpt.of(value, BROWSE_VALUE_BYTES)
                size += len(value)
                reader.next()
                if size >= BROWSE_BYTES_MAX:
                    break
            return size

        reader.seek(stem)
        size = take(BROWSE_REFERENCES_MAX, FIRST_TIMED_SUFFIX)
        is_cut = len(found) == BROWSE_REFERENCES_MAX or size >= BROWSE_BYTES_MAX
        reader.seek(stem + encode_suffix(upto))
        take(limit + 1, _BEHIND)
        stored = reader.key()
        has_more = stored is not None and stored.startswith(stem)
        if stored is None:
            versions.engine.check(reader)
        versions.engine.give_back(ticket, reader)
        timed = [tail for tail in found if tail >= FIRST_TIMED_SUFFIX]
        floor = decode_suffix(timed[-1][:-1]) if has_more and timed else 0
        return cls(found, floor, is_cut)

    def row(self, revision: Revision, stamps: Stamps) -> VersionRow:
        """The row of a revision whose value is the tail of its entry."""
        timestamp, tail = revision
        value = None if tail is None else self.excerpts[tail]
        import_id = None
        if tail is not None and tail < FIRST_TIMED_SUFFIX:
            import_id = int.from_bytes(tail[:-1], "big") & _REFERENCE_MASK
        return VersionRow(Timestamp(timestamp), value, self._origin(timestamp, stamps), import_id)

    def _origin(self, timestamp: int, stamps: Stamps) -> VersionOrigin:
        suffix = encode_suffix(timestamp)
        if suffix + VALUE in self.excerpts:
            return "put"
        if any(tail[:-1] == suffix for tail in self.excerpts):
            return "delete"
        lives = [stamps[tail[:-1]] for tail in self.excerpts if tail[:-1] in stamps]
        if any(life.added == timestamp for life in lives):
            return "import"
        return "revert" if any(life.reverted == timestamp for life in lives) else "range delete"


# --------------------------------------------------------------------------------------------------
# How many changes each interval of a window has, and the marks of large events, in bounded work.
#
# An interval is cut into `BROWSE_PARTS` parts. Each part reads `BROWSE_HEADERS_MAX` entries of the
# change index, of their headers alone. A part with more entries is estimated: the rate of the
# entries that were read, over the part.
#
# Invariants
# 1. A window reads `BROWSE_SEEKS_MAX` streams of intervals, and in each `BROWSE_PARTS` times
#    `BROWSE_HEADERS_MAX` entries, at most.
# 2. An interval `is_exact` if all of its entries were counted.

MarkKind: TypeAlias = Literal[
    "import",
    "revert",
    "push",
    "push reverted",
    "range delete",
    "clear",
    "collection",
    "history begins",
]


class Interval(NamedTuple):
    """The changes of the commits in `(since, upto]`."""

    since: int
    upto: int
    changes: int
    is_exact: bool


class Mark(NamedTuple):
    """An event at one time that concerns many keys."""

    at: int
    kind: MarkKind
    span: Span | None = None
    import_id: int | None = None
    rows: int | None = None
    push: str | None = None


class Activity(NamedTuple):
    """The intervals of a window, oldest first, and its marks. `has_more_marks` if there were more
    than `BROWSE_MARKS_MAX`."""

    intervals: list[Interval]
    marks: list[Mark]
    has_more_marks: bool


def intervals(index: ChangeIndex, since: int, upto: int, count: int) -> Iterator[Interval]:
    """The window `(since, upto]` in `count` intervals of about one length."""
    for low, high in _cut(since, upto, count):
        yield _counted(index, low, high, max(BROWSE_SEEKS_MAX // count, 1))


def total(index: ChangeIndex, since: int, upto: int, imports: Iterable[ImportRecord]) -> Interval:
    """The changes of the window `(since, upto]` as one interval.

    An import counts its rows. So does its revert, which changes fewer keys where other writes
    followed the import: the interval is not exact then.
    """
    found = _counted(index, since, upto, BROWSE_SEEKS_MAX)
    every = list(imports)
    added = [each.rows - 1 for each in every if since < (each.added or 0) <= upto]
    reverted = [each.rows - 1 for each in every if since < (each.reverted or 0) <= upto]
    changes = found.changes + sum(added) + sum(reverted)
    return found._replace(changes=changes, is_exact=found.is_exact and not reverted)


def _cut(since: int, upto: int, count: int) -> Iterator[tuple[int, int]]:
    """The window in `count` parts of about one length, without empty ones."""
    cuts = [since + (upto - since) * number // count for number in range(count + 1)]
    return ((low, high) for low, high in pairwise(cuts) if low < high)


def _counted(index: ChangeIndex, since: int, upto: int, streams_max: int) -> Interval:
    changes, is_exact = 0.0, True
    for window in index.generations.windows(since=since, upto=upto):
        streams = window.generation.every_stream()
        read = streams[:streams_max]
        found = 0.0
        for stream in read:
            part, is_whole = _of_stream(index, stream, window.since, window.upto)
            is_exact &= is_whole
            found += part
        is_exact &= len(read) == len(streams)
        changes += found * len(streams) / len(read)
    return Interval(since, upto, round(changes), is_exact)


def _of_stream(index: ChangeIndex, stream: bytes, since: int, upto: int) -> tuple[float, bool]:
    """The changes of one stream, and whether each entry was counted."""
    parts = [_of_part(index, stream, *part) for part in _cut(since, upto, BROWSE_PARTS)]
    return sum(count for count, _ in parts), all(is_whole for _, is_whole in parts)


def _of_part(index: ChangeIndex, stream: bytes, since: int, upto: int) -> tuple[float, bool]:
    count, newest = 0, since
    heads = index.heads(stream, since=since, upto=upto)
    for timestamp, rows in islice(heads, BROWSE_HEADERS_MAX):
        count, newest = count + rows, timestamp
    if next(heads, None) is None:
        return count, True
    return count * (upto - since) / max(newest - since, 1), False


def marks(
    since: int,
    upto: int,
    *,
    imports: Iterable[ImportRecord],
    fragments: Fragments,
    clears: Clears,
    begins: int,
    pushes: Iterable[PushTold] = (),
    collections: Iterable[CollectionRun] = (),
) -> tuple[list[Mark], bool]:
    """The marks in `(since, upto]`, oldest first, and whether there are more. `begins` is the
    oldest readable time. Costs a look at each import and clear, which are in memory."""
    found: list[Mark] = []
    pushed = {push.import_id: push for push in pushes if push.added is not None}
    rows = {}
    for record in imports:
        rows[record.import_id] = record.rows
        if record.import_id not in pushed:
            found += _of_load(record.added, "import", record.import_id, record.rows)
            found += _of_load(record.reverted, "revert", record.import_id, record.rows)
    for push in pushed.values():
        known = push.import_id, rows.get(push.import_id or 0), push.number
        found += _of_load(push.added, "push", *known)
        found += _of_load(push.reverted, "push reverted", *known)
    found = [mark for mark in found if since < mark.at <= upto]
    # A run that gave all history up began at the very time at which history begins now. A window
    # may start there, so its start is included.
    runs = (Mark(run.at, "collection", rows=run.versions) for run in collections)
    found += (mark for mark in runs if since <= mark.at <= upto)
    if 0 < begins <= upto and since <= begins:
        found.append(Mark(begins, "history begins"))
    found += (
        Mark(clear.timestamp, "clear", clear.span)
        for clear in clears.all()
        if since < clear.timestamp <= upto
    )
    room = BROWSE_MARKS_MAX + 1
    for start, end, stack in islice(fragments.pieces(Span(), since=since, upto=upto), room):
        times = between(stack, since, upto)[:room]
        found += (Mark(at, "range delete", Span(start, end)) for at in times)
    found.sort(key=lambda mark: mark.at)
    return found[-BROWSE_MARKS_MAX:], len(found) > BROWSE_MARKS_MAX


def _of_load(
    at: int | None,
    kind: MarkKind,
    import_id: int | None,
    rows: int | None,
    push: str | None = None,
) -> list[Mark]:
    return [] if at is None else [Mark(at, kind, None, import_id, rows, push)]


# --------------------------------------------------------------------------------------------------
# Bounded looks at one store (`Store.browsing`): a look checks its time as a read does.


class Browsing:
    """Looks at one store, each in bounded work: pages of keys, of versions, of changes."""

    def __init__(self, parts: Parts) -> None:
        self._parts = parts

    def keys(
        self,
        span: Span | None = None,
        as_of: TimeLike | None = None,
        *,
        limit: int | None = None,
        below: bytes = b"",
        delimiter: bytes | None = None,
    ) -> KeyPage:
        """The first live keys of `span` at `as_of`, each with the beginning of its value.

        With `delimiter`, keys that share the bytes behind `below` up to it come as one row without
        a value. Reads some `BROWSE_ENTRIES_MAX` entries at most, and may then be cut.
        """
        parts = self._parts
        limit = _limit(limit)
        span = parts.reserve.narrow(span or Span())
        fold = None if delimiter is None else Folders(below, delimiter)
        read = partial(_page_at, parts, span, limit, fold)
        return parts.reads.read(as_of, span, read)

    def versions(
        self, key: bytes, upto: TimeLike | None = None, *, limit: int | None = None
    ) -> VersionPage:
        """The newest versions of `key` at or below `upto`, each with the write that made it."""
        parts = self._parts
        limit = _limit(limit)
        at = parts.reads.at(upto)
        return version_page(parts.versions, require_key(key), at, limit=limit)

    def activity(
        self, since: TimeLike, upto: TimeLike | None = None, *, count: int = 60
    ) -> Activity:
        """The changes of the window `(since, upto]` in `count` intervals, and its marks."""
        parts = self._parts
        count = integer(1, BROWSE_INTERVALS_MAX).check("count", count)
        low, high = parts.reads.window(since, upto)
        found = list(intervals(parts.index, low, high, count))
        has_pushes, newest = parts.reserve.has_positions, parts.committer.upper - 1
        events, has_more = marks(
            low,
            high,
            imports=parts.imports.every(),
            fragments=parts.versions.view.fragments,
            clears=parts.clears,
            begins=parts.reads.whole_since,
            pushes=pushes_told(parts.versions, newest) if has_pushes else (),
            collections=collections(Meta(parts.versions.engine)),
        )
        return Activity(found, events, has_more)

    def count_changes(self, since: TimeLike, upto: TimeLike | None = None) -> Interval:
        """The number of changes in the window `(since, upto]`, rows of imports included. Changes
        that the change index no longer has are not counted, and the number is then inexact."""
        parts = self._parts
        low, high = parts.reads.window(since, upto)
        indexed = min(max(low, int(parts.reads.indexed_since)), high)
        found = total(parts.index, indexed, high, parts.imports.every())
        return found._replace(since=low, is_exact=found.is_exact and indexed == low)

    def oldest(self) -> Timestamp:
        """The oldest time that is worth a look: the beginning of history, or of the change index if
        nothing was given up. One seek a stream."""
        since = int(self._parts.committer.since)
        return Timestamp(since or self._parts.index.first() or since)


def _page_at(parts: Parts, span: Span, limit: int, fold: Folders | None, at: int) -> KeyPage:
    return key_page(parts.versions, span, at, limit=limit, fold=fold)


def _limit(limit: int | None) -> int:
    if limit is None:
        return BROWSE_ROWS_MAX
    return integer(1, BROWSE_ROWS_MAX).check("limit", limit)
