"""The history of one store, window by window: changes by key or time, events, record batches.

The readers below (`kvstore.changes`) know nothing of frontiers and pins.

Invariants
1. A window whose history is incomplete is refused when the read is asked for.
2. A pass pins the start of its window from its first row to its end, and looks for a clear once
   more under the pin. So GC and clears leave the window alone. `kept` alone pins nothing: it has no
   start.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import TYPE_CHECKING

from kvstore.base.arguments import SPAN
from kvstore.base.span import Span
from kvstore.base.timestamp import TimeLike, is_oldest
from kvstore.changes.batches import ColumnReader, record_batch_reader
from kvstore.changes.events import EXPAND_CHOICE, IMAGES_CHOICE, Change, Event, Expand, Images
from kvstore.changes.windows import (
    ORDER_CHOICE,
    REVISIONS_CHOICE,
    ChangeReader,
    DueTimes,
    EventReader,
    Order,
    Revisions,
    Wanted,
)
from kvstore.timeline.parts import Parts

if TYPE_CHECKING:
    import pyarrow as pa


class History:
    """Reads windows of the history of one store. See the verbs of `Store` for the arguments."""

    def __init__(self, parts: Parts) -> None:
        versions, index = parts.versions, parts.index
        self._reads, self._narrow = parts.reads, parts.reserve.narrow
        self._changes = ChangeReader(versions, index, parts.imports.rows_in)
        self.dues = DueTimes(versions, lambda: parts.reserve.has_expiries)
        self.event_reader = EventReader(versions, index, self._changes, self.dues)
        self.column_reader = ColumnReader(versions, index, self.event_reader)

    def changes(
        self,
        since: TimeLike,
        upto: TimeLike | None = None,
        *,
        span: Span,
        revisions: Revisions = "all",
        order: Order = "key",
        with_dues: bool = False,
    ) -> Iterator[Change]:
        """See `Store.changes`. The due times of changes are read only `with_dues`."""
        REVISIONS_CHOICE.check("revisions", revisions)
        ORDER_CHOICE.check("order", order)
        reads = self._reads
        low, high = reads.window(since, upto)
        needed = high if low == 0 and revisions == "latest" else low
        reads.require_kept(span, needed)

        def found() -> Iterator[Change]:
            changes = self._changes.changes(
                span,
                since=low,
                upto=high,
                revisions=revisions,
                order=order,
                index_floor=reads.indexed_since,
            )
            if not with_dues:
                return changes
            as_of = high if revisions == "latest" else None
            return self.dues.of_changes(changes, span, as_of=as_of)

        return reads.pinned(span, needed, found)

    def kept(self, upto: TimeLike) -> Iterator[Change]:
        """Everything up to `upto` that is kept, by key: one pass over the store."""
        high = self._reads.at(upto)
        return self._changes.changes(Span(), since=0, upto=high, index_floor=high)

    def latest(self, since: int, upto: int) -> Iterator[Change]:
        """The newest change of each key in `(since, upto]`, by key."""
        return self.changes(since, upto, span=self._narrow(Span()), revisions="latest")

    def events(
        self,
        since: TimeLike,
        upto: TimeLike | None,
        span: Span | None,
        images: Images,
        expand: Expand,
    ) -> Iterator[Event]:
        """See `Store.events`."""
        wanted, low, high = self.wanted(since, upto, span, images, expand)
        return self._reads.pinned(
            wanted.span, low, lambda: self.event_reader.events(wanted, since=low, upto=high)
        )

    def batches(
        self,
        since: TimeLike,
        upto: TimeLike | None,
        span: Span | None,
        images: Images,
        expand: Expand,
    ) -> pa.RecordBatchReader:
        """See `Store.changes_batches`."""
        wanted, low, high = self.wanted(since, upto, span, images, expand)
        found = self._reads.pinned(
            wanted.span, low, lambda: self.column_reader.batches(wanted, since=low, upto=high)
        )
        return record_batch_reader(found)

    def plain(self, wanted: Wanted) -> Wanted:
        """`wanted` without the reserved keys, unless its span begins among them."""
        span = self._narrow(wanted.span)
        return wanted if span is wanted.span else replace(wanted, span=span)

    def wanted(
        self,
        since: TimeLike,
        upto: TimeLike | None,
        span: Span | None,
        images: Images,
        expand: Expand,
    ) -> tuple[Wanted, int, int]:
        """The choice of events that the arguments make, and the bounds of its window.

        Raises unless history and the change index are whole above `since`.
        """
        if is_oldest(since):
            since = max(self._reads.whole_since, self._reads.indexed_since)
        wanted = Wanted(
            SPAN.check("span", span),
            IMAGES_CHOICE.check("images", images),
            EXPAND_CHOICE.check("expand", expand),
        )
        wanted = self.plain(wanted)
        low, high = self._reads.window(since, upto)
        self._reads.require_kept(wanted.span, low)
        self._reads.require_indexed(low)
        return wanted, low, high
