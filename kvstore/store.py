"""The store: the face of everything below it.

It checks what callers pass, picks the time of each read, and leaves the work to the parts: commits
and frontiers to `commit`, versions to `mvcc`, changes to `changes`, bulk loads to `imports`, claims
on history to `holds`. It keeps no state of its own.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack
from datetime import timedelta
from functools import partial
from itertools import chain, islice
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Final, NamedTuple, TypeVar, overload

from kvstore.arrow import DEFAULT_BATCH_ROWS, row_batches
from kvstore.batch import Batch
from kvstore.changes import Change, ChangeIndex, ChangeReader, Order, Revisions
from kvstore.changes.changeset import Changeset
from kvstore.changes.columns import ColumnReader, record_batch_reader
from kvstore.changes.epoch import Epoch
from kvstore.changes.event import Event, Expand, Images, require_expand, require_images
from kvstore.changes.expand import EventReader, Wanted
from kvstore.changes.generation import Generation, require_stream_count
from kvstore.changes.read import require_choices
from kvstore.changesets import Changesets
from kvstore.clears import Clears
from kvstore.clock import WallClock
from kvstore.codec.keys import span_bounds
from kvstore.commit import Committer, Durability, require_durability
from kvstore.engine import CHANGES, DATA, RANGES, Engine, FileSpan
from kvstore.engine import Batch as EngineBatch
from kvstore.errors import ClosedError, UsageError
from kvstore.feeds import Feed, FeedBatch, Feeds, Position, QuiescentReader, Share
from kvstore.gc import Clearing, Collector, GcPolicy, GcReport, GcWorker
from kvstore.holds import Hold, HoldRecord, Holds
from kvstore.imports import ImportRecord, Imports
from kvstore.limits import FEED_BATCH_BYTES, FEED_BATCH_ROWS, QUIESCENCE_WAIT_S, TRANSACT_ATTEMPTS
from kvstore.meta import FORMAT, INDEX_FLOOR, Meta
from kvstore.mvcc import RangeTombstone, Version, Versions, WriteSet
from kvstore.mvcc.export import VersionColumns
from kvstore.replica import Replica, ReplicaCommitter
from kvstore.snapshot import Snapshot
from kvstore.span import Span, require_key
from kvstore.splits import split_span, user_spans
from kvstore.tasks import Tasks
from kvstore.timestamp import TimeLike, Timestamp, to_timestamp
from kvstore.txn import (
    UNCHECKED,
    Conditional,
    Transaction,
    Transactions,
    Unchecked,
    revert_range,
    transact,
)
from kvstore.verify import VerifyReport, verify

if TYPE_CHECKING:
    import pyarrow as pa

T = TypeVar("T")

TASKS_DIRECTORY: Final = "tasks"
"""In the store's directory, where the engines look at names of their own only."""


class Export(NamedTuple):
    """A window of history: `changes` where they are few, else `columns` and `tombstones`.

    Those are record batches of `kvstore.changes.columns.CHANGES_SCHEMA` in time order.
    """

    whole_since: int
    changes: list[pa.RecordBatch] | None
    columns: Iterator[VersionColumns]
    tombstones: list[RangeTombstone]


class Store:
    """A multi-version key-value store. Open one with `kvstore.open`; use it from any thread.

    Times (`as_of`, `since`, `upto`, `at`) are a `Timestamp`, an aware `datetime` or ISO-8601
    text; None is the newest complete time. Reading below `since` raises `HistoryGoneError`, in
    the future `NotYetWrittenError`. Writes are visible to all readers when they return.
    """

    def __init__(
        self,
        path: Path | None,
        engine: Engine,
        versions: Versions,
        index: ChangeIndex,
        committer: Committer,
        *,
        clock: WallClock,
    ) -> None:
        self.path = path
        self._clock = clock
        self._engine = engine
        self._versions = versions
        self._committer = committer
        self._index = index
        self._meta = Meta(engine)
        self._imports = Imports(versions, index)
        self._changes = ChangeReader(versions, index, self._imports.spans_of)
        self._holds = Holds(self._meta, committer)
        self._changesets = Changesets(self._meta, committer)
        self._clears = Clears(self._meta)
        committer.raise_floor(self._clears.newest)
        self._collector = Collector(
            versions,
            index,
            committer,
            holds=self._holds,
            imports=self._imports,
            clears=self._clears,
            path=path,
        )
        self._gc_worker: GcWorker | None = None
        self._clearing = Clearing(
            versions, committer, holds=self._holds, imports=self._imports, clears=self._clears
        )
        self._conditional = Conditional(versions, committer)
        self._transactions = Transactions(
            versions, index, committer, holds=self._holds, imports=self._imports
        )
        self._index_floor = self._meta.timestamp(INDEX_FLOOR)
        self._events = EventReader(versions, index, self._changes)
        self._columns = ColumnReader(versions, index, self._events)
        self._feeds = Feeds(
            self._events,
            index,
            committer,
            self._holds,
            index_floor=self._index_floor,
            is_live=self._require_live,
        )
        self._tasks: Tasks | None = None
        self._tasks_lock = threading.Lock()
        self._closed = False

    # -- frontiers --------------------------------------------------------------------------

    @property
    def since(self) -> Timestamp:
        """The oldest readable time."""
        return self._committer.since

    @property
    def whole_since(self) -> Timestamp:
        """The oldest time at which all of the store is readable: `since`, or the newest clear."""
        return Timestamp(max(self._committer.since, self._clears.newest))

    @property
    def upper(self) -> Timestamp:
        """The first time that is not complete: no later commit takes a time below it."""
        return self._committer.upper

    @property
    def durable(self) -> Timestamp:
        """Everything below it survives a crash."""
        return self._committer.durable

    @property
    def store_id(self) -> str:
        """Random name of this store, given when it was made; a restored one gets its own."""
        record = self._meta.read(FORMAT)
        assert record is not None, "opening wrote it"
        return str(record["store_id"])

    def now(self) -> Timestamp:
        """The time now, on this store's timeline."""
        return self._committer.now()

    def sync(self) -> Timestamp:
        """Complete the time until now and make all of it durable; returns `upper`. One fsync."""
        return self._live().sync()

    # -- writing ----------------------------------------------------------------------------

    def put(self, key: bytes, value: bytes, *, durability: Durability | None = None) -> Timestamp:
        """Set `key`; returns the commit's timestamp. Never reads. `durability` as in `open`."""
        writes = WriteSet()
        writes.put(key, value)
        return self._live().commit(writes, durability=durability)

    def delete(self, key: bytes, *, durability: Durability | None = None) -> Timestamp:
        """Delete `key`, whether or not it is there; its history stays. Never reads."""
        writes = WriteSet()
        writes.delete(key)
        return self._live().commit(writes, durability=durability)

    def delete_range(
        self,
        start: bytes,
        end: bytes,
        idempotent: bool = False,
        *,
        durability: Durability | None = None,
    ) -> Timestamp | None:
        """Delete all keys `start <= key < end`; history stays. One write, whatever it covers.

        With `idempotent`, only if something in the span is alive; None if nothing was. That
        looks for the first live key of the span.
        """
        writes = WriteSet()
        writes.delete_range(start, end)
        committer = self._live()
        if idempotent:
            span = Span(start, end)
            return self._conditional.delete_live_range(writes, span, durability=durability)
        return committer.commit(writes, durability=durability)

    def put_if(
        self,
        key: bytes,
        value: bytes,
        expected: bytes | Unchecked | None = UNCHECKED,
        *,
        unchanged_since: TimeLike | None = None,
        durability: Durability | None = None,
    ) -> Timestamp:
        """Set `key` if its value is `expected` (None: if it is absent), and, where
        `unchanged_since` is given, if nothing was written to it after that time.

        Raises `PreconditionError`, with nothing written, if it is not so.
        """
        writes = WriteSet()
        writes.put(key, value)
        return self._write_if(writes, key, expected, unchanged_since, durability)

    def delete_if(
        self,
        key: bytes,
        expected: bytes | Unchecked | None = UNCHECKED,
        *,
        unchanged_since: TimeLike | None = None,
        durability: Durability | None = None,
    ) -> Timestamp:
        """Delete `key` on a condition, as `put_if`."""
        writes = WriteSet()
        writes.delete(key)
        return self._write_if(writes, key, expected, unchanged_since, durability)

    def pop(self, key: bytes, *, durability: Durability | None = None) -> bytes | None:
        """Delete `key` and return what it was; None, with nothing written, if it was absent."""
        self._live()
        return self._conditional.pop(key, durability=durability)

    def transaction(self, *, durability: Durability | None = None) -> Transaction:
        """A serialisable transaction: `with store.transaction() as txn: ...` commits at its end.

        Raises `ConflictError` there, with nothing written, if others wrote what it read.
        """
        self._live()
        if durability is not None:
            require_durability(durability)
        return self._transactions.begin(durability=durability)

    def transact(
        self,
        body: Callable[[Transaction], T],
        *,
        attempts: int = TRANSACT_ATTEMPTS,
        wait: Callable[[float], None] = time.sleep,
        durability: Durability | None = None,
    ) -> T:
        """Run `body` in a transaction, again after each conflict; returns its result.

        `body` may run several times. Raises the last `ConflictError` after `attempts`.
        """
        begin = partial(self.transaction, durability=durability)
        return transact(begin, body, attempts=attempts, wait=wait)

    def batch(self, *, durability: Durability | None = None) -> Batch:
        """Writes that take effect together: `with store.batch() as b: b.put(...)`."""
        self._live()
        if durability is not None:
            require_durability(durability)
        return Batch(lambda writes: self._live().commit(writes, durability=durability))

    # -- reading ----------------------------------------------------------------------------

    @overload
    def get(self, key: bytes, as_of: TimeLike | None = None) -> bytes | None: ...
    @overload
    def get(self, key: bytes, as_of: TimeLike | None, default: T) -> bytes | T: ...
    @overload
    def get(self, key: bytes, as_of: TimeLike | None = None, *, default: T) -> bytes | T: ...
    def get(
        self, key: bytes, as_of: TimeLike | None = None, default: T | None = None
    ) -> bytes | T | None:
        """The value of `key`, `default` where it is absent or deleted. One seek."""
        at = self._at(as_of)
        value = self._versions.get(require_key(key), at)
        if at < self._committer.floor:
            value = self._read(as_of, Span.of_key(key), partial(self._versions.get, key))
        return default if value is None else value

    def get_many(self, keys: Sequence[bytes], as_of: TimeLike | None = None) -> list[bytes | None]:
        """The values of `keys`, in their order, all at one time; None where there is none."""
        for key in keys:
            require_key(key)

        read = partial(self._versions.get_many, keys)
        at = self._at(as_of)
        values = read(at)
        if at < self._committer.floor:
            hull = Span(min(keys), max(keys) + b"\x00") if keys else Span()
            return self._read(as_of, hull, read)
        return values

    def scan(
        self,
        start: bytes | None = None,
        end: bytes | None = None,
        prefix: bytes | None = None,
        as_of: TimeLike | None = None,
        *,
        reverse: bool = False,
        limit: int | None = None,
    ) -> Iterator[tuple[bytes, bytes]]:
        """Live keys and values of a span, ascending (or descending), at one time.

        `start <= key < end`, or all keys with `prefix`. Memory is bounded; the scan sees the
        same state to its end, whatever is written meanwhile.
        """
        if limit is not None and (type(limit) is not int or limit < 0):
            raise UsageError(f"limit={limit}", "pass a count, or None for all")
        span = Span.of(start, end, prefix)
        chunks = self._read(as_of, span, partial(self._versions.scan, span, reverse=reverse))
        rows = chain.from_iterable(map(_pairs, chunks))
        return rows if limit is None else islice(rows, limit)

    def scan_batches(
        self,
        start: bytes | None = None,
        end: bytes | None = None,
        prefix: bytes | None = None,
        as_of: TimeLike | None = None,
        *,
        batch_rows: int = DEFAULT_BATCH_ROWS,
    ) -> pa.RecordBatchReader:
        """The rows of `scan` as Arrow record batches: columns `key` and `value`, both binary."""
        span = Span.of(start, end, prefix)
        if type(batch_rows) is not int or batch_rows < 1:
            raise UsageError(f"batch_rows={batch_rows}", "pass at least 1")
        scan = partial(self._versions.scan_columns, span, chunk=batch_rows)
        chunks = self._read(as_of, span, scan)
        return row_batches(chunks, batch_rows)

    def history(self, key: bytes) -> list[Version]:
        """All versions of `key` that are kept, newest first; a deletion has value None."""
        upto = self._at(None)
        versions = self._versions.history(require_key(key))
        # A commit on its way may have written already what it has not yet shown.
        return [version for version in versions if version.timestamp <= upto]

    def changes(
        self,
        since: TimeLike,
        upto: TimeLike | None = None,
        start: bytes | None = None,
        end: bytes | None = None,
        revisions: Revisions = "all",
        order: Order = "key",
        *,
        prefix: bytes | None = None,
    ) -> Iterator[Change]:
        """What changed in the window `(since, upto]`: chained windows neither skip nor repeat.

        `revisions="latest"` gives each key's last change only. From the beginning of time
        (`since=0`) that is the state at `upto`, without deletions. `order` is `"key"` (each key
        oldest first) or `"time"`. Costs what changed. Raises `HistoryGoneError` if `since` is
        below the store's: take a full read instead.
        """
        span = Span.of(start, end, prefix)
        require_choices(revisions, order)
        low, high = to_timestamp(since, name="since"), self._at(upto)
        if low > high and upto is not None:
            raise UsageError(f"since {low} is above upto {high}", "swap them")
        needed = high if low == 0 and revisions == "latest" else low
        self._require_kept(span, needed)
        return self._pinned(
            span,
            needed,
            lambda: self._changes.changes(
                span,
                since=low,
                upto=high,
                revisions=revisions,
                order=order,
                index_floor=max(self._index_floor, self.since),
            ),
        )

    def versions(self, *, since: TimeLike | None, upto: TimeLike) -> Iterator[Change]:
        """All revisions in `(since, upto]` by key, for copies of this store's history.

        `since=None` is everything that is kept, what lies below the store's `since` included:
        of that, what reads at `since` or later can see is complete. One pass over the store then.
        """
        if since is not None:
            return self.changes(since, upto)
        high = self._at(upto)
        return self._changes.changes(
            Span(), since=0, upto=high, revisions="all", order="key", index_floor=high
        )

    def export(self, *, since: TimeLike | None, upto: TimeLike, start: bytes = b"") -> Export:
        """All revisions in `(since, upto]` for a copy of this store's history.

        `since=None` is everything that is kept: whole from `Export.whole_since` on. A window that
        the change index shows to be small comes as changes, others as columns, by key, in one pass
        from the key `start` on.
        Raises `HistoryGoneError` if `since` lies below what is kept.
        """
        high = self._at(upto)
        if since is None:
            columns, tombstones = self._versions.export(since=0, upto=high, start=start)
            # The pass shows the entries of this moment: what GC and clears take later stays in it.
            return Export(self.whole_since, None, columns, tombstones)
        low = to_timestamp(since, name="since")
        floor = max(self._index_floor, self.since)
        few = None if low < floor else self._columns.few(since=low, upto=high)
        if few is None:
            columns, tombstones = self._versions.export(since=low, upto=high, start=start)
        self._require_kept(Span(), low)
        if few is None:
            return Export(low, None, columns, tombstones)
        return Export(low, few, iter(()), [])

    def range_deletes(
        self, since: TimeLike, upto: TimeLike, span: Span, revisions: Revisions = "all"
    ) -> list[Change]:
        """The range deletes that `changes` gives for `span`, each whole. Reads no row.

        For those who read the rest piece by piece: `changes` of a piece cuts them to it.
        """
        low, high = to_timestamp(since, name="since"), self._at(upto)
        found = self._versions.view.fragments.tombstones(
            span, since=low, upto=high, latest=revisions == "latest"
        )
        if low == 0 and revisions == "latest":
            return []
        return [Change(Timestamp(t), "delete_range", start, end, None) for start, end, t in found]

    def splits(self, count: int, span: Span | None = None) -> list[Span]:
        """Cut `span` (default: all keys) into at most `count` pieces of about equal size.

        From the bounds of the files alone; what is not on file yet does not count.
        """
        if count < 1:
            raise UsageError(f"count={count}", "ask for at least one piece")
        self._live()
        return split_span(span or Span(), self.files(), count)

    def files(self) -> list[FileSpan]:
        """The files that hold versions, by the user keys they lie between."""
        self._live()
        return list(user_spans(self._engine.files()))

    def snapshot(self, as_of: TimeLike | None = None) -> Snapshot:
        """Reads at one time that stays readable until the snapshot is closed."""
        with self._live().lock:
            at = Timestamp(self._at(as_of))
            pin = self._holds.pin(at)
        return Snapshot(self, at, lambda: self._holds.unpin(pin))

    # -- clear and revert -------------------------------------------------------------------

    def clear_range(self, start: bytes, end: bytes, *, compact: bool = True) -> Timestamp:
        """Destroy the history of `start <= key < end`, physically. Returns the time from which on
        the span reads as empty; earlier reads of it raise `HistoryGoneError`.

        Raises `HistoryHeldError`, with nothing done, while a hold or an open reader needs it.
        Costs O(bytes of the span), or the same whatever it holds with `compact=False`: then
        the space comes back as RocksDB compacts.
        """
        self._live().require_commits()
        return self._clearing.clear(Span(start, end), compact=compact)

    def revert_range(self, start: bytes, end: bytes | None, to: TimeLike) -> Timestamp | None:
        """Restore `start <= key < end` as it was at `to`, by new versions: history keeps both.

        One atomic commit of what differs, bounded by `REVERT_ROWS_MAX` keys; None if nothing
        does. Costs what changed in the span since `to`. Raises `HistoryGoneError` if `to` is
        below `since`, `ConflictError` if others keep writing into the span.
        """
        span, at = Span(start, end), to_timestamp(to, name="to")
        with self.snapshot(at):
            self._clears.require(span, at)
            return revert_range(
                self.transaction,
                lambda upto: self.changes(at, upto, start, end, "latest"),
                self._versions,
                span,
                at,
            )

    # -- change capture ---------------------------------------------------------------------

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
        self, after: timedelta | None = None, *, timeout: float = QUIESCENCE_WAIT_S
    ) -> Timestamp:
        """A time at which no changeset is half done; all changes until then are complete.

        Where the last such time is no longer ago than `after`, that. Else new changesets wait
        until the open ones have ended (bare commits go on). Raises `BusyError` if they have not
        after `timeout` seconds, `UsageError` inside a changeset.
        """
        self._live()
        return self._changesets.force_quiescence(after, timeout)

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
        Raises `HistoryGoneError` where history or the change index begins above `since`.
        """
        wanted, low, high = self._events_wanted(since, upto, span, images, expand)
        return self._pinned(
            wanted.span,
            min(low, high),
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
            wanted.span, min(low, high), lambda: self._columns.batches(wanted, since=low, upto=high)
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
        batch_rows: int = FEED_BATCH_ROWS,
        batch_bytes: int = FEED_BATCH_BYTES,
    ) -> Feed:
        """Every durable change once, in order, to the consumer called `name`.

        `start` begins the feed: changes after that time (0: all; `"now"`: from here on), or after a
        `Position` that the consumer has stored. None goes on where it last acked. `streams=(i, n)`
        makes this worker i of n that share the feed; it gets whole streams. `images` and
        `expand` are those of `events`. The feed holds history until it acks or is dropped; one
        that falls behind further than `max_age` is lost when GC wants the space.

        Opening a feed fences its former consumer. Raises `UsageError` for an unknown feed without
        `start` and for more workers than streams, `HistoryGoneError` below `since`.
        """
        wanted = Wanted(span or Span(), require_images(images), require_expand(expand))
        if batch_rows < 1 or batch_bytes < 1:
            raise UsageError(f"batches of {batch_rows} rows, {batch_bytes} bytes", "allow some")
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
        )

    def drop_feed(self, name: str) -> None:
        """Give up a feed, its position and its claim on history; `UsageError` if unknown."""
        self._require_live()
        self._feeds.drop(name)

    def reshard(self, streams: int) -> Generation:
        """Split the change index over `streams` streams from now on. One synced record.

        Consumers read the old streams to their end, then the new ones: nothing twice.
        """
        require_stream_count(streams)
        generations = self._changes.index.generations
        opened: list[Generation] = []

        def stage(batch: EngineBatch, opened_at: Timestamp) -> Callable[[], None]:
            opened.append(generations.stage_next(batch, opened_at, count=streams))
            return lambda: generations.publish(opened[0])

        self._live().announce(stage)
        return opened[0]

    def generations(self) -> list[Generation]:
        """Which streams took which keys, and from when to when; the last one is open."""
        self._live()
        return list(self._changes.index.generations.all())

    # -- imports ----------------------------------------------------------------------------

    def imports(self) -> list[ImportRecord]:
        """The bulk loads this store knows: those being added first, then in time order."""
        return self._imports.all()

    def find_import(self, record: ImportRecord) -> ImportRecord | None:
        """What is known of an import; raises `ImportRefusedError` if its id has other contents."""
        self._live()
        return self._imports.find(record)

    def prepare_import(self, record: ImportRecord) -> None:
        """Write down, durably, that an import is coming. The first step of `bulk.ingest`."""
        self._live().require_commits()
        self._imports.prepare(record, self._committer)

    def importing(self, import_id: int) -> AbstractContextManager[None]:
        """Have an import to oneself: `bulk.ingest` in another thread waits until the block ends."""
        self._live()
        return self._imports.alone(import_id)

    def link_import(self, files: Sequence[Path]) -> None:
        """Move sorted files into the engine, all or none; nothing becomes visible."""
        self._live()
        self._imports.link(files)

    def is_import_linked(self, record: ImportRecord) -> bool:
        """Whether the files of an import are in the engine."""
        self._live()
        return self._imports.is_linked(record)

    def is_imported(self, record: ImportRecord, key: bytes) -> bool:
        """Whether an import that is linked has a row for `key`."""
        self._live()
        return self._imports.has_row(record, key)

    def add_import(
        self, record: ImportRecord, *, check: Callable[[], None] | None = None
    ) -> Timestamp:
        """Make a linked import visible at one new timestamp: the commit of `bulk.ingest`.

        `check` runs under the commit lock and may raise to call it off.
        """
        return self._imports.add(record.import_id, self._live(), check=check)

    def abort_import(self, import_id: int) -> bool:
        """Forget an import that was left half added. O(entries in its spans)."""
        return self._imports.abort(import_id, self._live())

    def revert_import(self, import_id: int) -> Timestamp:
        """Undo an import from now on; its history stays. One record, whatever its size."""
        return self._imports.revert(import_id, self._live())

    # -- upkeep -----------------------------------------------------------------------------

    def hold(self, name: str, at: TimeLike | None = None, max_age: timedelta | None = None) -> Hold:
        """Keep history from `at` on until the hold is moved or released, over restarts too.

        Taking a hold that exists fences its owner. One that falls behind further than `max_age`
        is invalidated when GC wants the space.
        """
        when = None if at is None else to_timestamp(at, name="at")
        _require_age(max_age, name="max_age")
        self._live()
        return self._holds.take(name, at=when, max_age=max_age)

    def holds(self) -> list[HoldRecord]:
        """All holds, by name."""
        return self._holds.all()

    def gc(
        self,
        before: TimeLike | None = None,
        keep: timedelta | None = None,
        *,
        compact: bool = False,
    ) -> GcReport:
        """Give up history below `before` (or older than `keep`), and remove what it held.

        Goes as far as holds and open readers allow; holds over their budget are invalidated.
        Costs what changed since the last run. The files shrink as RocksDB compacts them, or at
        once with `compact`, which rewrites what was touched.
        """
        self._live()
        when = None if before is None else to_timestamp(before, name="before")
        _require_age(keep, name="keep")
        age = None if keep is None else keep.total_seconds()
        return self._collector.run(self._collector.target(before=when, keep_s=age), compact=compact)

    def start_gc(
        self, policy: GcPolicy, *, after_run: Callable[[GcReport], None] | None = None
    ) -> GcWorker:
        """Collect in the background until the store is closed, or a new policy replaces this."""
        self._live()
        if self._gc_worker is not None:
            self._gc_worker.stop()
        self._gc_worker = GcWorker(
            policy, lambda p: self.gc(keep=p.keep, compact=p.compact), after_run=after_run
        )
        return self._gc_worker

    def compact(self, span: Span | None = None) -> None:
        """Rewrite the files of a span's versions (default: of all), so that what GC and clears
        removed leaves the disk. Costs reading and writing them; everything else goes on."""
        self._live().require_writable()
        span = span or Span()
        self._engine.compact(DATA, *span_bounds(span.start, span.end))

    def compact_index(self) -> None:
        """Rewrite the files of the change index and of range tombstones, as `compact`."""
        self._live().require_writable()
        self._engine.compact(RANGES)
        self._engine.compact(CHANGES)

    @property
    def tasks(self) -> Tasks:
        """The queue of work on this store, which survives the process; opened when first asked for.

        It lies in the store's directory and goes where that goes; a checkpoint has none of it.
        `kvstore.upkeep`, `bulk.tasks` and `backup.tasks` submit to it, and do what was submitted.
        Raises what `Tasks.open` raises: the store itself does not depend on it.
        """
        with self._tasks_lock:
            self._live().require_writable()
            if self._tasks is None:
                path = None if self.path is None else self.path / TASKS_DIRECTORY
                self._tasks = Tasks.open(path, clock=self._clock)
            return self._tasks

    def verify(self) -> VerifyReport:
        """Walk the whole store and list all that breaks an invariant. Bounded memory.

        Commits go on meanwhile, GC waits. Costs one pass over everything, and a look-up per
        change in the index.
        """
        self._live()
        with self._collector.paused():
            return verify(
                self._versions,
                self._index,
                self._committer,
                holds=self._holds,
                imports=self._imports,
                clears=self._clears,
            )

    def stats(self) -> dict[str, int]:
        """Counts and sizes, by name: frontiers, what is held in memory, estimates of the engine
        (`<family>_bytes`, `<family>_memtable_bytes`, `<family>_entries`). Costs microseconds."""
        committer = self._live()
        imports, holds = self._imports.all(), self._holds.all()
        return {
            "since": int(committer.since),
            "upper": int(committer.upper),
            "durable": int(committer.durable),
            "range_fragments": len(self._versions.view.fragments),
            "imports": len(imports),
            "imports_adding": sum(record.added is None for record in imports),
            "holds": len(holds),
            "holds_lost": sum(hold.lost for hold in holds),
            "clears": len(self._clears.all()),
            "gc_runs": 0 if self._gc_worker is None else self._gc_worker.runs,
            **self._engine.stats(),
        }

    def checkpoint(self, path: str | Path) -> Timestamp:
        """Make `path` (which must not exist) an independent copy as of now, sharing files.

        Milliseconds at any size, on the same file system. Returns the newest complete time in it.
        """
        target = Path(path)
        if target.exists():
            raise UsageError(f"{target} exists", "checkpoint into a path that does not")
        committer = self._live()
        with committer.lock:
            upper = committer.sync()
            self._engine.checkpoint(target)
        return Timestamp(upper - 1)

    # -- following another store ------------------------------------------------------------

    @property
    def is_replica(self) -> bool:
        """Whether it follows another store, and refuses writes of its own until `promote`."""
        committer = self._committer
        return isinstance(committer, ReplicaCommitter) and committer.source is not None

    def replica(self) -> Replica:
        """The writing end of a replica. Raises `UsageError` if this is an ordinary store."""
        committer = self._live()
        if not isinstance(committer, ReplicaCommitter) or committer.source is None:
            raise UsageError(f"{self.path} is no replica", "make one with backup.replicate")
        return Replica(committer, on_index_floor=self._raise_index_floor)

    def promote(self) -> Timestamp:
        """Make a replica an ordinary store; returns the `upper` its commits begin at.

        What its source did after that is not in it, and never will be. Raises as `replica`.
        """
        return self.replica().promote()

    def wait_beyond(
        self, upper: int, *, timeout: float | None = None, stop: Callable[[], bool] = lambda: False
    ) -> None:
        """Return once `self.upper` is above `upper`, `stop()` is true, or after `timeout` seconds.

        Commits wake it, and `wake` does: nothing is polled. Raises `ClosedError` on close.
        """
        committer = self._live()
        committer.wait_published(upper, timeout=timeout, stop=lambda: self._closed or stop())
        self._require_live()

    def wake(self) -> None:
        """Have those in `wait_beyond` look again."""
        self._committer.wake()

    def close(self) -> None:
        """Make everything durable and let go. Repeatable; scans still open raise `ClosedError`."""
        if self._closed:
            return
        self._closed = True
        with ExitStack() as last:  # whatever fails, the engine is closed
            last.callback(self._engine.close)
            last.callback(self._finish)
            with self._tasks_lock:
                if self._tasks is not None:
                    self._tasks.close()
        if self._gc_worker is not None and self._gc_worker.error is not None:
            raise self._gc_worker.error

    def __enter__(self) -> Store:
        self._live()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None
    ) -> None:
        self.close()

    # -- inside -----------------------------------------------------------------------------

    def _finish(self) -> None:
        """End what runs in the background, then make everything durable."""
        self._collector.stop()
        if self._gc_worker is not None:
            self._gc_worker.stop()
        with self._committer.lock:
            self._committer.finish()

    def _live(self) -> Committer:
        if self._closed:
            raise ClosedError(f"the store at {self.path}")
        return self._committer

    def _events_wanted(
        self,
        since: TimeLike,
        upto: TimeLike | None,
        span: Span | None,
        images: Images,
        expand: Expand,
    ) -> tuple[Wanted, int, int]:
        """What `events` was asked for, checked, and its window."""
        wanted = Wanted(span or Span(), require_images(images), require_expand(expand))
        low, high = to_timestamp(since, name="since"), self._at(upto)
        if low > high and upto is not None:
            raise UsageError(f"since {low} is above upto {high}", "swap them")
        self._require_kept(wanted.span, min(low, high))
        self._feeds.require_indexed(min(low, high))
        return wanted, low, high

    def _raise_index_floor(self, timestamp: int) -> None:
        self._index_floor = self._feeds.index_floor = timestamp

    def _require_live(self) -> None:
        self._live().require_healthy()

    def _at(self, as_of: TimeLike | None) -> int:
        committer = self._committer if not self._closed else self._live()
        committer.require_healthy()
        if as_of is None:
            return committer.upper - 1
        if type(as_of) is Timestamp and committer.since <= as_of < committer.upper:
            return as_of
        return committer.readable(to_timestamp(as_of, name="as_of"))

    def _read(self, as_of: TimeLike | None, span: Span, read: Callable[[int], T]) -> T:
        """What `read` finds in `span` at `as_of`.

        History may go between the choice of the time and the read: GC and clears announce
        what they take before they take it, so looking again after the read tells whether what
        it found was whole. A read of the newest time is made again then.
        """
        while True:
            at = self._at(as_of)
            result = read(at)
            if at >= self._committer.floor:
                return result
            if as_of is not None:
                self._require_kept(span, at)
                return result
            if at >= self.since and self._clears.hit(span, at) is None:
                return result
            with self._committer.lock:
                pass  # The clear under way publishes its time before it lets go.

    def _require_kept(self, span: Span, as_of: int) -> None:
        """Raise unless the whole of `span` can be read as of `as_of`."""
        self._committer.readable(as_of)
        self._clears.require(span, as_of)

    def _pinned(self, span: Span, as_of: int, open_pass: Callable[[], Iterator[T]]) -> Iterator[T]:
        """A lazy pass that GC and clears leave alone, from its first row until it ends."""
        pin = self._holds.pin(as_of)
        try:
            self._clears.require(span, as_of)
            yield from open_pass()
        finally:
            self._holds.unpin(pin)

    def _write_if(
        self,
        writes: WriteSet,
        key: bytes,
        expected: bytes | Unchecked | None,
        unchanged_since: TimeLike | None,
        durability: Durability | None,
    ) -> Timestamp:
        self._live()
        since = None
        if unchanged_since is not None:
            since = to_timestamp(unchanged_since, name="unchanged_since")
            self._require_kept(Span.of_key(key), since)
        return self._conditional.write_if(
            writes, key, expected=expected, unchanged_since=since, durability=durability
        )


def _require_age(age: object, *, name: str) -> None:
    if age is not None and not isinstance(age, timedelta):
        raise UsageError(f"{name}={age!r}", "pass a timedelta")


def _pairs(chunk: tuple[list[bytes], list[bytes]]) -> Iterator[tuple[bytes, bytes]]:
    return zip(*chunk, strict=True)
