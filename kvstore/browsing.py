"""Bounded looks at a store, for people: pages of keys, of rows of a table, of versions, of what
differs between two times, and of changes per interval.

A page of a browser or of a shell asks for what fits a screen. The work of each look is bounded in
entries and bytes, whatever the store holds, and the answer says where it stopped.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from functools import partial
from itertools import islice, pairwise
from typing import TYPE_CHECKING, Any, Final, Literal, NamedTuple, TypeAlias

from typing_extensions import Self

from kvstore.base.arguments import integer
from kvstore.base.span import Span, prefix_end, require_key
from kvstore.base.timestamp import TimeLike, Timestamp
from kvstore.changes.index import (
    OP_DELETE,
    OP_DELETE_RANGE,
    OP_IMPORT,
    OP_PUT,
    OP_PUT_LARGE,
    OP_REVERT,
    ChangeIndex,
    Row,
)
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
    BROWSE_COUNT_ENTRIES_MAX,
    BROWSE_ENTRIES_MAX,
    BROWSE_FILE_ROWS_MAX,
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
from kvstore.mvcc.parallel_scan import bytes_in, user_spans
from kvstore.retention.gc import CollectionRun, collections
from kvstore.timeline.import_records import ImportRecord
from kvstore.timeline.parts import Parts
from kvstore.timeline.read_times import Clears
from kvstore.timeline.reserved import PushLogTold, PushTold, push_logs

if TYPE_CHECKING:
    from kvstore.tables.looks import KeyCount, RowPage, RowSearch
    from kvstore.tables.row_codec import TableCodec

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
# The keys of a span that differ between two times, in bounded work.
#
# The change index names the keys that changed, if it has the window and the window has few changes.
# Otherwise two passes over the span, one at each time, are compared key by key.
#
# Invariants
# 1. A page has the keys of the span whose values at the two times differ, in key order. A key that
#    changed and took its old value again does not differ.
# 2. A page reads `BROWSE_ENTRIES_MAX` rows of the index, or as many entries of each pass, and
#    `BROWSE_BYTES_MAX` bytes of values, and one chunk more.
# 3. Each page takes its reader further, or it is the last one.


class ChangedKey(NamedTuple):
    """A key with its value at the earlier and at the later time; None where it is absent."""

    key: bytes
    before: bytes | None
    after: bytes | None


class ChangedPage(NamedTuple):
    """Some keys that differ, in key order. `next` is where the page behind begins, None behind the
    last one. A page `is_cut` if it met a bound before it was full."""

    rows: list[ChangedKey]
    next: bytes | None
    is_cut: bool


def changed_page(parts: Parts, span: Span, since: int, upto: int, *, limit: int) -> ChangedPage:
    """The first `limit` keys of `span` that differ between `since` and `upto`."""
    keys = _touched(parts, span, since, upto)
    if keys is None:
        return _Comparison(parts.versions, since, upto, limit).compare(span)
    return _differing(parts.versions, sorted(keys), since, upto, limit)


def _touched(parts: Parts, span: Span, since: int, upto: int) -> set[bytes] | None:
    """The keys of `span` that the change index names in a window. None if the index does not have
    the window, or the window has more rows than a look reads, or changes of whole spans."""
    index = parts.index
    if since < parts.reads.indexed_since:
        return None
    windows = index.generations.windows(since=since, upto=upto)
    if sum(len(window.generation.every_stream()) for window in windows) > BROWSE_SEEKS_MAX:
        return None
    found: set[bytes] = set()
    rows = index.rows(since=since, upto=upto)
    for placed in islice(rows, BROWSE_ENTRIES_MAX):
        row = placed.row
        if row.op in (OP_PUT, OP_DELETE, OP_PUT_LARGE):
            if row.key in span:
                found.add(row.key)
        elif _meets(parts, row, span):
            return None
    return found if next(rows, None) is None else None


def _meets(parts: Parts, row: Row, span: Span) -> bool:
    """Whether an event of whole spans may concern keys of `span`."""
    if row.op == OP_DELETE_RANGE:
        return span.intersect(row.key, row.value) is not None
    assert row.op in (OP_IMPORT, OP_REVERT), row.op
    record = parts.imports.get(int.from_bytes(row.key, "big"))
    if record is None:  # it became plain versions at a collection
        return True
    return any(span.intersect(each.start, each.end) is not None for each in record.spans)


def _differing(
    versions: Versions, keys: Sequence[bytes], since: int, upto: int, limit: int
) -> ChangedPage:
    rows: list[ChangedKey] = []
    size, at, count = 0, 0, _FIRST_COMPARED
    while at < len(keys):
        chunk = list(keys[at : at + count])
        before, after = (versions.get_many(chunk, time) for time in (since, upto))
        taken = sum(len(value or b"") for value in (*before, *after))
        count = min(2 * count, BROWSE_CHUNK) if taken < BROWSE_BYTES_MAX // 64 else 1
        size += taken
        for row in map(ChangedKey, chunk, before, after):
            if row.before != row.after:
                if len(rows) == limit:
                    return ChangedPage(rows, row.key, is_cut=False)
                rows.append(row)
        at += len(chunk)
        if size >= BROWSE_BYTES_MAX and at < len(keys):
            return ChangedPage(rows, keys[at], is_cut=True)
    return ChangedPage(rows, None, is_cut=False)


_FIRST_COMPARED: Final = 16
"""Keys of the first chunk: nothing tells yet how large their values are."""


class _Comparison:
    """Two passes over one span, one at each time, that are compared key by key."""

    def __init__(self, versions: Versions, since: int, upto: int, limit: int) -> None:
        self._versions, self._times, self._limit = versions, (since, upto), limit

    def compare(self, span: Span) -> ChangedPage:
        sides = [_LivePass(self._versions, span, time) for time in self._times]
        rows: list[ChangedKey] = []
        try:
            while True:
                for side in sides:
                    side.look()
                key = min((side.key for side in sides), key=_or_last)
                bound = min((side.bound for side in sides), key=_or_last)
                if _or_last(key) >= _or_last(bound):  # what lies behind may be there at both times
                    break
                assert key is not None, "nothing sorts before a bound"
                row = ChangedKey(key, *(side.take(key) for side in sides))
                if row.before != row.after:
                    if len(rows) == self._limit:
                        return ChangedPage(rows, key, is_cut=False)
                    rows.append(row)
        finally:
            for side in sides:
                side.close()
        if bound == span.start:  # its versions take a whole pass
            row = ChangedKey(bound, *(self._versions.get(bound, time) for time in self._times))
            rows += [row] if row.before != row.after else []
            bound += b"\x00"
        return ChangedPage(rows, bound, is_cut=bound is not None)


def _or_last(key: bytes | None) -> tuple[bool, bytes]:
    """Sorts None, the end of a pass, behind all keys."""
    return key is None, key or b""


class _LivePass:
    """The live rows of a span at one time, in a bounded number of entries and bytes."""

    def __init__(self, versions: Versions, span: Span, as_of: int) -> None:
        self._cursor, self._live = versions.live_pass(span, as_of)
        self._rows: deque[tuple[bytes, bytes]] = deque()
        self._passed = self._bytes = 0
        self._has_more = True

    def look(self) -> None:
        """Read until the next row is known, to the end, or to the bound of the work."""
        while not self._rows and self._has_more and not self._is_spent:
            self._has_more = self._cursor.feed(self._live, BROWSE_CHUNK)
            self._passed += BROWSE_CHUNK
            if not self._has_more:
                self._live.end()
            self._rows.extend(zip(*self._live.found(), strict=True))
            self._bytes += sum(len(value) for _, value in self._rows)

    @property
    def _is_spent(self) -> bool:
        return self._passed >= BROWSE_ENTRIES_MAX or self._bytes >= BROWSE_BYTES_MAX

    @property
    def key(self) -> bytes | None:
        """The key of the next row; None where none is known."""
        return self._rows[0][0] if self._rows else None

    @property
    def bound(self) -> bytes | None:
        """The first key of which this pass knows nothing more. None while it has a row, and at the
        end."""
        if self._rows or not self._has_more:
            return None
        last: bytes | None = self._live.last
        assert last is not None, "a pass with more entries has passed one"
        return unescape(last[:-KEY_BYTES_LEAST])

    def take(self, key: bytes) -> bytes | None:
        """The value of `key`, if it is the key of the next row."""
        return self._rows.popleft()[1] if self.key == key else None

    def close(self) -> None:
        """End the pass."""
        self._cursor.close()


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
    """The changes of the commits in `(since, upto]`, and the commits. A commit counts once in each
    stream of the index that it touches."""

    since: int
    upto: int
    changes: int
    is_exact: bool
    commits: int


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
    changes, commits, is_exact = 0.0, 0.0, True
    for window in index.generations.windows(since=since, upto=upto):
        streams = window.generation.every_stream()
        read = streams[:streams_max]
        for stream in read:
            found = _of_stream(index, stream, window.since, window.upto)
            is_exact &= found.is_exact
            changes += found.changes * len(streams) / len(read)
            commits += found.commits * len(streams) / len(read)
        is_exact &= len(read) == len(streams)
    return Interval(since, upto, round(changes), is_exact, round(commits))


class _PartCount(NamedTuple):
    """The changes and commits of a part of a stream, and whether each entry was counted."""

    changes: float
    commits: float
    is_exact: bool


def _of_stream(index: ChangeIndex, stream: bytes, since: int, upto: int) -> _PartCount:
    """The changes of one stream."""
    parts = [_of_part(index, stream, *part) for part in _cut(since, upto, BROWSE_PARTS)]
    changes, commits, exact = zip(*parts, strict=True) if parts else ((), (), ())
    return _PartCount(sum(changes), sum(commits), all(exact))


def _of_part(index: ChangeIndex, stream: bytes, since: int, upto: int) -> _PartCount:
    changes = commits = 0
    newest = since
    heads = index.heads(stream, since=since, upto=upto)
    for timestamp, rows in islice(heads, BROWSE_HEADERS_MAX):
        commits += timestamp > newest  # a large commit has several entries
        changes, newest = changes + rows, timestamp
    if next(heads, None) is None:
        return _PartCount(changes, commits, is_exact=True)
    share = (upto - since) / max(newest - since, 1)
    return _PartCount(changes * share, commits * share, is_exact=False)


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
    """Looks at one store, each in bounded work: pages of keys, rows, versions and changes."""

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

    def expired(self) -> tuple[int, bool]:
        """How many keys and rows have expired by the clock and still show, and whether more may:
        the next call of a writer deletes them. Looks at one step of deletes."""
        return self._parts.committer.expiries.passed()

    def versions(
        self, key: bytes, upto: TimeLike | None = None, *, limit: int | None = None
    ) -> VersionPage:
        """The newest versions of `key` at or below `upto`, each with the write that made it."""
        parts = self._parts
        limit = _limit(limit)
        at = parts.reads.at(upto)
        return version_page(parts.versions, require_key(key), at, limit=limit)

    def rows(
        self,
        codec: TableCodec,
        search: RowSearch | None = None,
        as_of: TimeLike | None = None,
        *,
        limit: int | None = None,
        after: bytes = b"",
        with_facets: bool = False,
    ) -> RowPage:
        """The first rows of a table that meet a search (`kvstore.tables.looks`), from `after` on,
        the `next` of a page. `codec` is that of the table at the same time.

        Passes some `BROWSE_ENTRIES_MAX` rows or entries at most, and may then be cut. `limit` is
        `BROWSE_ROWS_MAX` by default, and `BROWSE_FILE_ROWS_MAX` at most. With `with_facets` the
        look goes on to its bound behind the last row, and counts what the columns hold. Raises
        `UsageError` for an index that is not whole then.
        """
        parts = self._parts
        limit = BROWSE_ROWS_MAX if limit is None else limit
        integer(1, BROWSE_FILE_ROWS_MAX).check("limit", limit)
        # Late: a store is opened without the functions of Arrow.
        from kvstore.tables.definition import table_prefix
        from kvstore.tables.looks import RowSearch, row_page

        span = Span.of_prefix(table_prefix(codec.definition.number))
        how: dict[str, Any] = {"limit": limit, "after": after, "with_facets": with_facets}
        read = partial(row_page, parts.versions, codec, search or RowSearch(), **how)
        return parts.reads.read(as_of, span, read)

    def count(
        self, span: Span | None = None, as_of: TimeLike | None = None, *, most: int | None = None
    ) -> KeyCount:
        """The number of live keys of `span` and their bytes, counted in at most `most` entries."""
        parts = self._parts
        most = integer(1, BROWSE_COUNT_ENTRIES_MAX).or_none.check("most", most)
        span = parts.reserve.narrow(span or Span())

        from kvstore.tables.looks import counted  # late, as in `rows`

        def read(at: int) -> KeyCount:
            return counted(parts.versions, span, at, most or BROWSE_COUNT_ENTRIES_MAX)

        return parts.reads.read(as_of, span, read)

    def sizes(self, spans: Sequence[Span]) -> list[int]:
        """The bytes of each span in sorted files, all versions included, estimated. What is in
        memory alone does not count. Reads the bounds of the files, never a row."""
        files = list(user_spans(self._parts.versions.engine.files()))
        return [bytes_in(span, files) for span in spans]

    def changed(
        self,
        since: TimeLike,
        upto: TimeLike | None = None,
        span: Span | None = None,
        *,
        limit: int | None = None,
    ) -> ChangedPage:
        """The first keys of `span` whose values at `since` and at `upto` differ, with both values.

        Costs what changed in the window, if that is little, or else a part of what exists in the
        span; `BROWSE_ENTRIES_MAX` rows in either case, and the page may then be cut.
        """
        parts = self._parts
        limit = _limit(limit)
        span = parts.reserve.narrow(span or Span())
        low, high = parts.reads.window(since, upto)

        def read(at: int) -> ChangedPage:
            return changed_page(parts, span, at, high, limit=limit)

        return parts.reads.read(Timestamp(low), span, read)

    def activity(
        self, since: TimeLike, upto: TimeLike | None = None, *, count: int = 60
    ) -> Activity:
        """The changes of the window `(since, upto]` in `count` intervals, and its marks."""
        parts = self._parts
        count = integer(1, BROWSE_INTERVALS_MAX).check("count", count)
        low, high = parts.reads.window(since, upto)
        found = list(intervals(parts.index, low, high, count))
        events, has_more = marks(
            low,
            high,
            imports=parts.imports.every(),
            fragments=parts.versions.view.fragments,
            clears=parts.clears,
            begins=parts.reads.whole_since,
            pushes=[push for log in self.push_logs() for push in log.pushes],
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

    def push_logs(self) -> list[PushLogTold]:
        """The logs of pushes that the store follows, as of now: how far, and what became of the
        last pushes of each."""
        parts = self._parts
        if not parts.reserve.has_positions:
            return []
        return list(push_logs(parts.versions, parts.committer.upper - 1))

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
