"""The feed of a table: each change of a row once, as Arrow rows with the names of Delta's change
feed (`kvstore.tables.changing`).

It is a feed of the keys of the table (`kvstore.feeds`), and has its positions, holds and workers.

Invariants
1. The rows of a batch are decoded by the definition at the end of the batch, so no row is of a
   newer layout.
2. A position counts changes of keys. The choice of images and columns may differ between two
   consumers that continue from one position.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from functools import partial
from typing import NamedTuple

import pyarrow as pa

from kvstore.changes.event import Event
from kvstore.feeds import Feed, FeedBatch, Position
from kvstore.span import Span
from kvstore.tables.changing import (
    ChangedRow,
    RowImages,
    images_of,
    require_images,
    rows_batch,
)
from kvstore.tables.codec import TableCodec
from kvstore.tables.sources import StoreRows
from kvstore.timestamp import TimeLike, Timestamp


class TableFeedBatch(NamedTuple):
    """Changes of rows, and the position after them. A batch without rows says that time has
    passed."""

    rows: pa.RecordBatch
    """The chosen columns of the table, and the columns that tell the change."""
    position: Position
    is_state: bool
    """Whether the rows are of the state that the feed begins with: each is an insert, at the time
    of the state."""

    @property
    def resolved(self) -> Timestamp:
        """All changes at or below this time are delivered and durable."""
        return self.position.timestamp


class TableFeed:
    """A consumer's handle on the changes of a table; `Table.feed` makes it. See `Feed`."""

    def __init__(
        self,
        feed: Feed,
        codec: Callable[[Timestamp], TableCodec],
        images: RowImages,
        columns: Sequence[str] | None,
    ) -> None:
        """`feed` delivers both images, `codec` is the definition at a time."""
        self._feed, self._codec = feed, codec
        self._images, self._columns = images, columns

    @property
    def position(self) -> Position:
        """See `Feed.position`."""
        return self._feed.position

    def batches(
        self, *, follow: bool = False, heartbeat: float | None = None
    ) -> Iterator[TableFeedBatch]:
        """See `Feed.batches`."""
        for batch in self._feed.batches(follow=follow, heartbeat=heartbeat):
            yield self._of(batch)

    def __iter__(self) -> Iterator[TableFeedBatch]:
        return self.batches()

    def ack(self, upto: TableFeedBatch | Position) -> None:
        """See `Feed.ack`."""
        self._feed.ack(upto.position if isinstance(upto, TableFeedBatch) else upto)

    def close(self) -> None:
        """See `Feed.close`."""
        self._feed.close()

    def __enter__(self) -> TableFeed:
        self._feed.__enter__()
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"<kvstore.TableFeed {self._feed.name!r}>"

    def _of(self, batch: FeedBatch) -> TableFeedBatch:
        at = batch.events[-1].timestamp if batch.events else batch.resolved
        changed = [row for event in batch.events for row in self._rows(event)]
        rows = rows_batch(self._codec(at), changed, self._columns)
        return TableFeedBatch(rows, batch.position, batch.is_state)

    def _rows(self, event: Event) -> Iterator[ChangedRow]:
        return images_of(event.timestamp, event.key, event.pre, event.post, self._images)


def open_feed(
    rows: StoreRows,
    table: str,
    name: str,
    start: TimeLike | Position | None = None,
    streams: tuple[int, int] | None = None,
    *,
    images: RowImages = "pre+post",
    columns: Sequence[str] | None = None,
    max_age: timedelta | None = None,
    batch_rows: int | None = None,
    batch_bytes: int | None = None,
) -> TableFeed:
    """See `Table.feed`."""
    require_images(images)
    codec = rows.codec(table)
    codec.schema_of(columns)  # refuses unknown ones before a hold is taken
    feed = rows.store.feed(
        name,
        start,
        streams,
        "pre+post",
        "all",
        span=Span.of_prefix(codec.key.prefix),
        max_age=max_age,
        batch_rows=batch_rows,
        batch_bytes=batch_bytes,
    )
    return TableFeed(feed, partial(rows.codec, table), images, columns)
