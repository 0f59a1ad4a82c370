"""Changes of rows, as Arrow batches with the names of Delta's change feed, and the feed of a
table."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import islice
from typing import Any, Final, Literal, NamedTuple, TypeAlias

import pyarrow as pa

from kvstore.base.arguments import ArgumentKind, word
from kvstore.base.span import Span
from kvstore.base.timestamp import AgeLike, TimeLike, Timestamp
from kvstore.changes import Change
from kvstore.changes.events import Event
from kvstore.errors import CorruptionError
from kvstore.feeds import Feed, FeedBatch, Position
from kvstore.limits import SCAN_CHUNK
from kvstore.mvcc.arrow import to_microseconds
from kvstore.tables.catalogue import two_named
from kvstore.tables.row_codec import TableCodec, UnknownLayoutError, UnreadableRowError
from kvstore.tables.sources import StoreRows

# --------------------------------------------------------------------------------------------------
# Changes of rows as Arrow batches, with the names of the change feed of Delta.
#
#     the columns of the table
#     _change_type         "insert", "update_preimage", "update_postimage" or "delete"
#     _commit_version      the timestamp of the commit, in nanoseconds
#     _commit_timestamp    the same in microseconds, rounded up: a read as of it has the row
#
# A damaged or forged row may hold what its columns do not (`kvstore.tables.exact`). History keeps
# such a version also when the row was deleted or put anew, so a consumer must get past it. A change
# of such a row raises, and names it, or it is handed over as its stored bytes (`OnUnreadable`).

RowImages: TypeAlias = Literal["pre+post", "post", "pre"]
ROW_IMAGES: Final[ArgumentKind[RowImages]] = word("pre+post", "post", "pre")
CHANGE_FIELDS: Final = [
    pa.field("_change_type", pa.string(), nullable=False),
    pa.field("_commit_version", pa.int64(), nullable=False),
    pa.field("_commit_timestamp", pa.timestamp("us", "UTC"), nullable=False),
]
ChangedRow: TypeAlias = tuple[str, int, bytes, bytes]
"""The type of a change, its time, and the key and value of the row."""


class UnreadableRow(NamedTuple):
    """A row of a change, or a version in the history of a row, that its columns do not hold."""

    change_type: str
    """As in the column `_change_type`; "version" in the history of a row."""
    timestamp: Timestamp
    """The time of the change, or of the version."""
    key: bytes
    """The key of the row, as the store has it."""
    value: bytes
    """The value of the row, as the store has it."""
    problem: str
    """Names the row and its column."""


OnUnreadable: TypeAlias = "Callable[[UnreadableRow], object]"
"""Takes a row that cannot be read, and that is then left out."""


def change_schema(codec: TableCodec, columns: Sequence[str] | None) -> pa.Schema:
    """The schema of the changes. Raises `UsageError` for a column of an older table that has the
    name of an added one."""
    chosen = codec.schema_of(columns)
    for field in CHANGE_FIELDS:
        if field.name in chosen.names:
            raise two_named(codec.definition, field.name)
    return pa.schema([*chosen, *CHANGE_FIELDS])


def changed_batches(
    store: Any,
    codec: TableCodec,
    changes: Iterator[Change],
    *,
    images: RowImages,
    columns: Sequence[str] | None,
    on_unreadable: OnUnreadable | None,
) -> Iterator[pa.RecordBatch]:
    """The changes of rows, in batches. A look-up for each. A row that cannot be read raises behind
    the rows before it, unless `on_unreadable` takes it."""
    points = _points(store, changes)
    while chunk := list(islice(points, SCAN_CHUNK)):
        before = store.get_many([key for _, key, _ in chunk], [at - 1 for at, _, _ in chunk])
        rows: list[ChangedRow] = []
        for (at, key, after), old in zip(chunk, before, strict=True):
            rows += images_of(at, key, old, after, images)
        try:
            found = rows_batch(codec, rows, columns, on_unreadable)
        except UnreadableRowError as error:
            if error.row:
                yield rows_batch(codec, rows[: error.row], columns, None)
            raise
        if found.num_rows:
            yield found


def rows_batch(
    codec: TableCodec,
    rows: Sequence[ChangedRow],
    columns: Sequence[str] | None,
    on_unreadable: OnUnreadable | None,
) -> pa.RecordBatch:
    """Changed rows as a batch of `change_schema`. Raises `UnreadableRowError` for the first row
    that cannot be read, unless `on_unreadable` takes it."""
    kinds, versions, keys, values = map(list, zip(*rows, strict=True)) if rows else ([],) * 4
    try:
        decoded = codec.decode(pa.array(keys, pa.binary()), pa.array(values, pa.binary()), columns)
    except UnknownLayoutError:
        raise
    except CorruptionError:
        refused = {error.row: error for error in codec.refused(keys, values, columns)}
        for error in refused.values():
            hand_over(error, rows[error.row], on_unreadable)
        readable = [row for at, row in enumerate(rows) if at not in refused]
        return rows_batch(codec, readable, columns, None)
    commits = pa.array(versions, pa.int64())
    added = [pa.array(kinds, pa.string()), commits, to_microseconds(commits)]
    schema = change_schema(codec, columns)
    return pa.RecordBatch.from_arrays([*decoded.columns, *added], schema=schema)


def hand_over(
    error: UnreadableRowError, row: ChangedRow, on_unreadable: OnUnreadable | None
) -> None:
    """Hand a row that cannot be read to `on_unreadable`. Raises `UnreadableRowError`, which tells
    how to get past the row, if this is None."""
    kind, at, key, value = row
    if on_unreadable is None:
        raise UnreadableRowError(
            error.where,
            f"{error.problem}, in its {kind} of {Timestamp(at)}",
            error.row,
            "history keeps this version when the row is deleted or put anew: pass "
            "on_unreadable=..., which takes such rows aside, or choose other columns; a client "
            "asks in the process of the store",
        ) from error
    problem = f"{error.where}: {error.problem}"
    on_unreadable(UnreadableRow(kind, Timestamp(at), key, value, problem))


def images_of(
    at: int, key: bytes, old: bytes | None, new: bytes | None, images: RowImages
) -> Iterator[ChangedRow]:
    """The rows that tell the change of one row from `old` to `new`. None if it was not there."""
    if old is not None and new is not None:
        if images != "post":
            yield "update_preimage", at, key, old
        if images != "pre":
            yield "update_postimage", at, key, new
    elif new is not None:
        if images != "pre":
            yield "insert", at, key, new
    elif old is not None:
        yield "delete", at, key, old


def _points(
    store: Any, changes: Iterator[Change]
) -> Iterator[tuple[Timestamp, bytes, bytes | None]]:
    """Each change of a key: time, key and value. A range delete is one of each key that it hit."""
    for at, op, key, end, value in changes:
        if op == "delete_range":
            span = Span(key, end)
            for gone, _ in store.scan(span.start, span.end, as_of=Timestamp(at - 1)):
                if store.get(gone, as_of=at) is None:
                    yield at, gone, None
        else:
            yield at, key, value


# --------------------------------------------------------------------------------------------------
# The feed of a table: each change of a row once, as Arrow rows with the names of Delta's change
# feed.
#
# It is a feed of the keys of the table (`kvstore.feeds`), and has its positions, holds and workers.
#
# Invariants
# 1. The rows of a batch are decoded by the definition at the end of the batch, so no row is of a
#    newer layout.
# 2. A batch that was not made, because a row of it cannot be read or an interrupt came, is
#    delivered again: no `ack` releases it.
# 3. A position counts changes of keys. The choice of images and columns may differ between two
#    consumers that continue from one position.


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
        on_unreadable: OnUnreadable | None,
    ) -> None:
        """`feed` delivers both images, `codec` is the definition at a time."""
        self._feed, self._codec = feed, codec
        self._images, self._columns = images, columns
        self._on_unreadable = on_unreadable

    @property
    def position(self) -> Position:
        """See `Feed.position`."""
        return self._feed.position

    def batches(
        self, *, follow: bool = False, heartbeat: float | None = None
    ) -> Iterator[TableFeedBatch]:
        """See `Feed.batches`. A batch with a row that cannot be read raises `CorruptionError`,
        which names it; the feed stays in front of this batch. With `on_unreadable` the feed hands
        such a row over, again if the batch is delivered again, and leaves it out."""
        position = self._feed.position
        for batch in self._feed.batches(follow=follow, heartbeat=heartbeat):
            try:
                found = self._of(batch)
            except BaseException:
                self._feed.take_back(position)
                raise
            position = found.position
            yield found

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
        rows = rows_batch(self._codec(at), changed, self._columns, self._on_unreadable)
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
    on_unreadable: OnUnreadable | None = None,
    max_age: AgeLike | None = None,
    batch_rows: int | None = None,
    batch_bytes: int | None = None,
) -> TableFeed:
    """See `Table.feed`."""
    ROW_IMAGES.check("images", images)
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
    codec_at = partial(rows.catalogue.codec_of, table, codec.definition.number)
    return TableFeed(feed, codec_at, images, columns, on_unreadable)
