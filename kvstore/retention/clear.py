"""Clearing a span: all its versions and tombstones are removed from the engine at once.

A delete keeps history and a clear destroys it. A clear frees the space of any amount of data at the
cost of one range delete in the engine and a compaction of the span.

Invariants
1. `kvstore.timeline.read_times` tells readers of the clear before the first byte goes. If an
   interrupt comes before the write, it tells them that the clear was called off. After an interrupt
   of the write it tells them what is stored.
2. One engine batch holds the removal, the cut range tombstones, the record of the clear and the new
   `upper`: a crash leaves all of them or none.
3. A clear is refused while a hold, an open reader or an import being added needs the history.

The change entries of the span stay until GC passes the time of the clear: they share records with
the changes of other spans.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterator, Sequence
from itertools import chain

from kvstore.base.notices import notice
from kvstore.base.span import Span
from kvstore.base.timestamp import Timestamp
from kvstore.codec.keys import encode_range_key, escape, span_bounds
from kvstore.engine.api import DATA, RANGES, WriteBatch
from kvstore.errors import HistoryHeldError, printable
from kvstore.limits import CLEAR_ATTEMPTS
from kvstore.mvcc import RangeTombstone
from kvstore.mvcc.meta import UPPER, Meta
from kvstore.mvcc.versions import stored_tombstones
from kvstore.timeline.parts import Parts
from kvstore.timeline.read_times import Clear
from kvstore.timeline.recent import Touched


class Clearing:
    """Clears spans of one store."""

    def __init__(self, parts: Parts) -> None:
        self._versions, self._committer = parts.versions, parts.committer
        self._holds, self._imports, self._clears = parts.holds, parts.imports, parts.clears
        self._oldest_lacking = parts.oldest_lacking
        self._engine = parts.versions.engine
        self._meta = Meta(self._engine)

    def clear(self, span: Span, *, compact: bool = True) -> Timestamp:
        """Destroy the history of `span`; returns the time from which the span reads as empty.

        Raises `HistoryHeldError`, with nothing done, while something needs that history. With
        `compact` the call gives the space back before it returns: O(bytes of the span).
        """
        timestamp = self._clear([span])
        if compact:
            self._engine.compact(DATA, *span_bounds(span.start, span.end))
        return timestamp

    def clear_found(self, within: Span, find: Callable[[], list[Span]]) -> Timestamp:
        """Destroy the history of the ascending, disjoint spans that `find` gives, at one time.

        No commit writes into `within` between the finding and the clear: `find` is called again,
        and the last time under the commit lock. Raises as `clear`.
        """
        committer = self._committer
        for _ in range(CLEAR_ATTEMPTS - 1):
            with committer.lock:
                committer.catch_up()
                seen = committer.upper - 1
                committer.recent.watch(seen)
            try:
                spans = find()
                with committer.lock:
                    touched = committer.recent.since(seen)
                    if touched is not None and not any(_meets(each, within) for each in touched):
                        return self._clear(spans)
            finally:
                with committer.lock:
                    committer.recent.unwatch()
        with committer.lock:
            committer.catch_up()
            return self._clear(find())

    def compact(self, span: Span) -> None:
        """Give the space of a span back. O(bytes of the span)."""
        self._engine.compact(DATA, *span_bounds(span.start, span.end))

    def _clear(self, spans: Sequence[Span]) -> Timestamp:
        committer = self._committer
        with committer.lock:
            self._holds.invalidate_overdue(committer.close_upto_now() - 1, self._oldest_lacking)
            if not spans:
                return Timestamp(committer.upper - 1)
            for span in spans:
                self._require_unneeded(span)
            try:
                timestamp = committer.commit_event(
                    lambda batch, at, _: self._stage(batch, spans, at),
                    events=0,
                    reload=self._clears.reload,
                )
            except BaseException:
                # An interrupt before the write calls the clear off: the span is unchanged.
                self._clears.withdraw(committer.upper)
                raise
            committer.meters.clears += len(spans)
        last = spans[-1].end
        assert last is not None, "the caller has asked for one"
        notice(
            "kvstore.retention.gc",
            "span cleared",
            store=committer.where,
            start=printable(spans[0].start),
            end=printable(last),
            spans=len(spans),
            timestamp=str(timestamp),
        )
        return timestamp

    def _require_unneeded(self, span: Span) -> None:
        holder = self._holds.holder()
        if holder is not None:
            raise HistoryHeldError((span.start, span.end), holder=holder)
        for record in self._imports.all():
            meets = any(part.intersect(span.start, span.end) for part in record.spans)
            if record.added is None and meets:
                raise HistoryHeldError(
                    (span.start, span.end), holder=f"import {record.import_id:016x}, being added"
                )

    def _stage(
        self, batch: WriteBatch, spans: Sequence[Span], timestamp: Timestamp
    ) -> Callable[[], None]:
        bounds: list[tuple[bytes, bytes]] = []
        for span in spans:
            begin, end = span_bounds(span.start, span.end)
            assert span.end is not None
            assert end is not None
            batch.delete_range(begin, end, self._engine.families[DATA])
            bounds.append((span.start, span.end))
        self._stage_cuts(batch, spans)
        clears = [Clear(span, timestamp) for span in spans]
        self._clears.stage(batch, clears)
        self._meta.stage_timestamp(batch, UPPER, timestamp + 1)
        # From here on a failure does harm: readers are told, and the write comes next.
        self._clears.announce(clears)
        self._committer.frontiers.raise_floor(timestamp)

        def publish() -> None:
            fragments = self._versions.view.fragments
            if fragments:
                for each in bounds:
                    fragments = fragments.clearing(*each)
                self._versions.publish_fragments(fragments)
            self._committer.recent.add(timestamp, {}, bounds)

        return publish

    def _stage_cuts(self, batch: WriteBatch, spans: Sequence[Span]) -> None:
        """Cut the stored range tombstones at the bounds of `spans`, which ascend and are disjoint.

        One pass over the tombstones that start in a span. Where others lie over its start, a pass
        back to the start of the longest.
        """
        ranges = self._engine.families[RANGES]
        starts = [span.start for span in spans]
        pieces: dict[bytes, bytes] = {}
        beside: dict[bytes, bytes] = {}
        met: set[bytes] = set()
        for span in spans:
            for tombstone in chain(self._starting_in(span), self._lying_over(span.start)):
                key = encode_range_key(tombstone.start, tombstone.timestamp)
                if key in met:
                    continue
                first = max(bisect_right(starts, tombstone.start) - 1, 0)
                last = bisect_left(starts, tombstone.end)
                cuts = [
                    each
                    for each in spans[first:last]
                    if each.intersect(tombstone.start, tombstone.end) is not None
                ]
                if not cuts:
                    beside[key] = tombstone.end
                    continue
                met.add(key)
                batch.delete(key, ranges)
                for start, end in _outside(tombstone, cuts):
                    piece = encode_range_key(start, tombstone.timestamp)
                    pieces[piece] = max(end, pieces.get(piece, b""))
        for piece, end in pieces.items():
            batch.put(piece, escape(max(end, beside.get(piece, b""))), ranges)

    def _starting_in(self, span: Span) -> Iterator[RangeTombstone]:
        """The stored range tombstones that start in `span` or at its end."""
        assert span.end is not None
        begin, _ = span_bounds(span.start, None)
        _, end = span_bounds(b"", span.end + b"\x00")
        return stored_tombstones(self._engine, begin, end)

    def _lying_over(self, key: bytes) -> Iterator[RangeTombstone]:
        """The stored range tombstones that start below `key` and lie over it."""
        missing = self._versions.view.fragments.across(key)
        if not missing:
            return
        begin, _ = span_bounds(key, None)
        for found in stored_tombstones(self._engine, b"", begin, reverse=True):
            if found.timestamp in missing and found.end >= key:
                if found.end > key:
                    yield found
                missing.remove(found.timestamp)
                if not missing:
                    return


def _outside(tombstone: RangeTombstone, spans: Sequence[Span]) -> Iterator[tuple[bytes, bytes]]:
    """The parts of a tombstone that lie outside of the ascending spans that it meets."""
    start = tombstone.start
    for span in spans:
        assert span.end is not None
        if start < span.start:
            yield start, span.start
        start = span.end
    if start < tombstone.end:
        yield start, tombstone.end


def _meets(touched: Touched, span: Span) -> bool:
    return any(key in span for key in touched.keys) or any(
        span.intersect(start, end) is not None for start, end in touched.spans
    )
