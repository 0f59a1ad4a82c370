"""Bounded looks at one store (`Store.browsing`): a look checks its time as a read does."""

from __future__ import annotations

from functools import partial

from kvstore.arguments import require_count
from kvstore.browsing.activity import Activity, Interval, intervals, marks, total
from kvstore.browsing.keys import Folders, KeyPage, key_page
from kvstore.browsing.versions import VersionPage, version_page
from kvstore.collected import collections
from kvstore.limits import BROWSE_INTERVALS_MAX, BROWSE_ROWS_MAX
from kvstore.meta import Meta
from kvstore.parts import Parts
from kvstore.positions import pushes_told
from kvstore.span import Span, require_key
from kvstore.timestamp import TimeLike, Timestamp


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
        count = require_count(count, name="count", most=BROWSE_INTERVALS_MAX)
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
    return require_count(limit, name="limit", most=BROWSE_ROWS_MAX)
