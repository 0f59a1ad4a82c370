"""Change capture: changesets, epochs, events, feeds, streams."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import TYPE_CHECKING

from kvstore.arguments import require_age, require_count, require_seconds, require_span
from kvstore.changes.changeset import Changeset
from kvstore.changes.columns import record_batch_reader
from kvstore.changes.epoch import Epoch
from kvstore.changes.event import Event, Expand, Images, require_expand, require_images
from kvstore.changes.expand import Wanted
from kvstore.changes.generation import Generation
from kvstore.engine import WriteBatch
from kvstore.errors import UsageError
from kvstore.feeds import Feed, FeedBatch, Position, QuiescentReader, Share
from kvstore.limits import FEED_BATCH_BYTES, FEED_BATCH_ROWS, QUIESCENCE_WAIT_S, STREAMS_MAX
from kvstore.span import Span
from kvstore.store.writing import Writing
from kvstore.timestamp import TimeLike, Timestamp, to_timestamp

if TYPE_CHECKING:
    import pyarrow as pa


class Capturing(Writing):
    """Change capture."""

    def changeset(self) -> Changeset:
        """A group of changes that is not atomic: `with store.changeset() as cs: ...`.

        Commits made inside the block, in this context, carry `cs.id`; blocks nest. A commit
        outside any block is a changeset of its own. What was committed stays, however the
        block is left.
        """
        self._live()
        return self._changesets.new()

    def epochs(self, since: TimeLike = 0) -> Iterator[Epoch]:
        """Sealed stretches of changesets with their event counts, closed above `since`."""
        self._live()
        return self._changesets.epochs(to_timestamp(since, name="since"))

    def force_quiescence(
        self, after: timedelta | None = None, *, timeout: float | None = None
    ) -> Timestamp:
        """A time at which no changeset is half done; all changes until then are complete.

        Where the last such time is no longer ago than `after`, that. Else new changesets wait
        until the open ones have ended (bare commits go on). Raises `BusyError` if they have not
        after `timeout` seconds (ten minutes by default), `UsageError` inside a changeset.
        """
        self._live()
        require_age(after, name="after")
        seconds = QUIESCENCE_WAIT_S if timeout is None else require_seconds(timeout, name="timeout")
        return self._changesets.force_quiescence(after, seconds)

    def events(
        self,
        since: TimeLike,
        upto: TimeLike | None = None,
        *,
        span: Span | None = None,
        images: Images = "delta",
        expand: Expand = "imports",
    ) -> Iterator[Event]:
        """Changes in `(since, upto]` in time order, with their place, changeset and images.

        `images`: `"none"` (keys only), `"delta"` (what was put), `"pre"`, `"post"` or `"pre+post"`
        (with the key's value before and after: exact, a look-up each). `expand`: imports and
        reverts as their keys (`"imports"`), range deletes too (`"all"`), or all whole (`"none"`).
        Raises `HistoryGoneError` where history or the change index begins above `since`,
        `NotYetWrittenError` where that lies in the future.
        """
        wanted, low, high = self._events_wanted(since, upto, span, images, expand)
        return self._pinned(
            wanted.span,
            low,
            lambda: self._events.events(wanted, since=low, upto=high),
        )

    def changes_batches(
        self,
        since: TimeLike,
        upto: TimeLike | None = None,
        *,
        span: Span | None = None,
        images: Images = "delta",
        expand: Expand = "imports",
    ) -> pa.RecordBatchReader:
        """The events of `(since, upto]` as Arrow record batches, without a row touched.

        The schema is `kvstore.changes.columns.CHANGES_SCHEMA`. Time order; within a commit that is
        spread over streams, stream after stream: sort by `seq` for the order made.
        """
        wanted, low, high = self._events_wanted(since, upto, span, images, expand)
        found = self._pinned(
            wanted.span, low, lambda: self._columns.batches(wanted, since=low, upto=high)
        )
        return record_batch_reader(found)

    def feed(
        self,
        name: str,
        start: TimeLike | Position | None = None,
        streams: tuple[int, int] | None = None,
        images: Images = "delta",
        expand: Expand = "imports",
        *,
        span: Span | None = None,
        max_age: timedelta | None = None,
        batch_rows: int | None = None,
        batch_bytes: int | None = None,
    ) -> Feed:
        """Every durable change once, in order, to the consumer called `name`.

        `start` begins the feed: changes after that time (0: all; `"now"`: from here on), or after a
        `Position` that the consumer has stored. None goes on where it last acked. `streams=(i, n)`
        makes this worker i of n that share the feed; it gets whole streams. `images` and
        `expand` are those of `events`. The feed holds history until it acks or is dropped; one
        that falls behind further than `max_age` is lost when GC wants the space.

        A batch has at most `batch_rows` events and about `batch_bytes` bytes, as `kvstore.limits`
        says by default. Opening a feed fences its former consumer. Raises `UsageError` for an
        unknown feed without `start` and for more workers than streams, `HistoryGoneError` below
        `since`, or before a clear of keys in `span`.
        """
        wanted = Wanted(require_span(span), require_images(images), require_expand(expand))
        batch_rows = FEED_BATCH_ROWS if batch_rows is None else batch_rows
        batch_bytes = FEED_BATCH_BYTES if batch_bytes is None else batch_bytes
        require_count(batch_rows, name="batch_rows")
        require_count(batch_bytes, name="batch_bytes")
        require_age(max_age, name="max_age")
        self._require_live()
        return self._feeds.open(
            name,
            start,
            Share.of(streams),
            wanted,
            max_age=max_age,
            rows_max=batch_rows,
            bytes_max=batch_bytes,
        )

    def follow(
        self,
        since: TimeLike,
        *,
        span: Span | None = None,
        images: Images = "delta",
        expand: Expand = "imports",
        heartbeat: float | None = None,
    ) -> Iterator[FeedBatch]:
        """Batches of durable changes after `since`, and then as they come: a feed without a name.

        History is kept for it while it is being read. Raises as `events`.
        """
        wanted, low, _ = self._events_wanted(since, None, span, images, expand)
        return self._feeds.follow(low, wanted, heartbeat=heartbeat)

    def quiescent_points(self, since: TimeLike = 0) -> QuiescentReader:
        """The times after `since` at which no changeset was half done, with the changes between.

        What lies between is checked: `EventsMissingError` where the epochs show a gap, or count
        other events than are there.
        """
        start = to_timestamp(since, name="since")
        self._require_kept(Span(), start)
        return QuiescentReader(
            self._changes.index,
            self._live(),
            self.epochs,
            lambda low, high: self.changes(low, high, revisions="latest"),
            since=start,
            index_floor=self._index_floor,
            holds=self._holds,
        )

    def drop_feed(self, name: str) -> None:
        """Give up a feed, its position and its claim on history; `UsageError` if unknown."""
        self._require_live()
        self._feeds.drop(name)

    def reshard(self, streams: int) -> Generation:
        """Split the change index over `streams` streams from now on. One synced record.

        Consumers read the old streams to their end, then the new ones: nothing twice.
        """
        require_count(streams, name="streams", most=STREAMS_MAX)
        generations = self._changes.index.generations
        opened: list[Generation] = []

        def stage(batch: WriteBatch, opened_at: Timestamp) -> Callable[[], None]:
            opened.append(generations.stage_next(batch, opened_at, count=streams))
            return lambda: generations.publish(opened[0])

        self._live().announce(stage)
        return opened[0]

    def generations(self) -> list[Generation]:
        """Which streams took which keys, and from when to when; the last one is open."""
        self._live()
        return list(self._changes.index.generations.all())

    def _events_wanted(
        self,
        since: TimeLike,
        upto: TimeLike | None,
        span: Span | None,
        images: Images,
        expand: Expand,
    ) -> tuple[Wanted, int, int]:
        """What `events` was asked for, checked, and its window."""
        wanted = Wanted(require_span(span), require_images(images), require_expand(expand))
        low, high = to_timestamp(since, name="since"), self._at(upto)
        if low > high and upto is not None:
            raise UsageError(f"since {low} is above upto {high}", "swap them")
        self._require_kept(wanted.span, low)
        self._feeds.require_indexed(low)
        return wanted, low, max(low, high)
