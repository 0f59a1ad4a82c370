"""How many changes each interval of a window has, and the marks of large events, in bounded work.

An interval is cut into `BROWSE_PARTS` parts. Each part reads `BROWSE_HEADERS_MAX` entries of the
change index, of their headers alone. A part with more entries is estimated: the rate of the entries
that were read, over the part.

Invariants
1. A window reads `BROWSE_SEEKS_MAX` streams of intervals, and in each `BROWSE_PARTS` times
   `BROWSE_HEADERS_MAX` entries, at most.
2. An interval `is_exact` if all of its entries were counted.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import islice, pairwise
from typing import Literal, NamedTuple, TypeAlias

from kvstore.changes.index import ChangeIndex
from kvstore.clears import Clears
from kvstore.collected import CollectionRun
from kvstore.imports import ImportRecord
from kvstore.limits import BROWSE_HEADERS_MAX, BROWSE_MARKS_MAX, BROWSE_PARTS, BROWSE_SEEKS_MAX
from kvstore.mvcc.fragments import Fragments
from kvstore.mvcc.stretches import between
from kvstore.positions import PushTold
from kvstore.span import Span

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
