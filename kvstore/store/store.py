"""The store: the face of everything below it.

`Store` has the verbs. It checks what callers pass and picks the time of each read. The work is done
by parts that are built here, know nothing of the store, and can be built alone:

    imports       `kvstore.imports`            bulk loads
    holds         `kvstore.holds`              claims on history
    feeds         `kvstore.feeds`              consumers of changes
    replication   `kvstore.store.replication`  what copies read, and being a copy
    layout        `kvstore.store.layout`       where the keys lie
    upkeep        `kvstore.store.upkeep`       GC in the background, rewriting of files
    tasks         `kvstore.tasks`              a queue of work that survives the process

    private: commits and frontiers (`commit`), whole reads (`reads`), windows (`history`), versions
    (`mvcc`), changesets, transactions (`txn`), garbage and clears (`gc`), scanners

Invariants
1. No part refers to the store. A part that needs another one is given it when it is built.
2. `close` ends the parts in the opposite order of their making, each even if another one fails.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from datetime import timedelta
from functools import cached_property, partial
from itertools import chain, islice
from pathlib import Path
from typing import Any, TypeVar, overload

import pyarrow as pa
from typing_extensions import Self

from kvstore.arguments import (
    key_list,
    require_age,
    require_count,
    require_limit,
    require_path,
    require_seconds,
)
from kvstore.arrow import ROWS_SCHEMA, row_batches
from kvstore.batch import Batch
from kvstore.changes import Change, ChangeIndex, Order, Revisions
from kvstore.changes.changeset import Changeset
from kvstore.changes.epoch import Epoch
from kvstore.changes.event import Event, Expand, Images
from kvstore.changes.generation import Generation
from kvstore.changesets import Changesets
from kvstore.claims import USER, HoldRecord
from kvstore.clock import WallClock
from kvstore.commit import Committer, Durability, require_durability
from kvstore.engine import Engine, WriteBatch
from kvstore.engine.loose import Teller, told_once
from kvstore.engine.rocks import RocksEngine
from kvstore.errors import ClosedError, UsageError
from kvstore.feeds import Feed, Feeds, Position
from kvstore.forks import own
from kvstore.gc import Clearing, Collector, GcReport
from kvstore.history import History
from kvstore.holds import Hold
from kvstore.journal import OS_FILES
from kvstore.journal.files import storage_errors
from kvstore.limits import (
    KEY_BYTES_MAX,
    QUIESCENCE_WAIT_S,
    SCAN_CHUNK,
    SCAN_WORKERS_MAX,
    STREAMS_MAX,
)
from kvstore.loops import PointRead
from kvstore.meta import FORMAT, Meta
from kvstore.mvcc import Version, Versions, WriteSet
from kvstore.mvcc.scan import first_rows
from kvstore.parts import Parts
from kvstore.scanners import ParallelScan, Scanners, is_worth_workers
from kvstore.snapshot import Snapshot
from kvstore.span import Span, require_key
from kvstore.store.layout import Layout
from kvstore.store.replication import Replication
from kvstore.store.tasks import TaskQueue
from kvstore.store.upkeep import Upkeep
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
from kvstore.verify import StoreReport, verify

T = TypeVar("T")


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
        self._closed = False
        self._engine, self._versions, self._committer = engine, versions, committer
        teller = Teller()
        # A memory engine keeps no RocksDB database open: that would concern forks.
        tell = teller.told if isinstance(engine, RocksEngine) else told_once
        self._parts = parts = Parts.of(versions, index, committer, tell)
        self._reads = parts.reads
        self._history = History(parts)
        self._changesets = Changesets(Meta(engine), committer)
        self._conditional = Conditional(parts)
        self._transactions = Transactions(parts)
        self._clearing = Clearing(parts)
        self._collector = Collector(parts, path)
        self._scanners = Scanners()
        self._tasks = TaskQueue(path, committer, clock)
        self.imports, self.holds = parts.imports, parts.holds
        self.feeds = Feeds(parts, self._history, self._changesets)
        self.replication = Replication(parts, self._history)
        self.layout = Layout(engine)
        self.upkeep = Upkeep(engine, committer, self._collector, clock)
        self._endings = ExitStack()
        for ending in (
            engine.close,
            self._scanners.close,
            teller.close,
            self._changesets.wake,
            partial(_finish, committer),
            self.upkeep.stop_gc,
            self._collector.stop,
            self._tasks.close,
        ):
            self._endings.callback(ending)
        # Hot: a method of Python that calls the look-up would take 0.3 us of a get's 3.
        if type(self).get is Store.get:  # not where somebody has put another in its place
            shortcut = PointRead(versions.lookup, committer.frontiers, self.get)
            self.get = shortcut.get  # type: ignore[method-assign]
        own(self, committer.where, closed="_closed")

    # -- frontiers, beginning and end -------------------------------------------------------

    @property
    def since(self) -> Timestamp:
        """The oldest readable time."""
        return self._committer.since

    @property
    def whole_since(self) -> Timestamp:
        """The oldest time at which all of the store is readable: `since`, or the newest clear."""
        return self._reads.whole_since

    @property
    def indexed_since(self) -> Timestamp:
        """The oldest time that events and feeds can begin at: `since`, or that of a restore, which
        brings back the versions and not the change index. `changes` reads those before as well."""
        return self._reads.indexed_since

    @property
    def upper(self) -> Timestamp:
        """The first time that is not complete: no later commit takes a time below it."""
        return self._committer.upper

    @property
    def durable(self) -> Timestamp:
        """Everything below it survives a crash."""
        return self._committer.durable

    @cached_property
    def store_id(self) -> str:
        """Random name of this store, given when it was made; a restored one gets its own."""
        record = Meta(self._engine).read(FORMAT)
        assert record is not None, "opening wrote it"
        return record.hexed("store_id").hex()

    def now(self) -> Timestamp:
        """The time now, on this store's timeline."""
        return self._committer.now()

    def sync(self) -> Timestamp:
        """Complete the time until now and make all of it durable; returns `upper`. One fsync."""
        return self._committer.sync()

    def close(self) -> None:
        """Make everything durable and let go. Repeatable; scans still open raise `ClosedError`."""
        if self._closed:
            return
        self._collector.require_outside()
        self._closed = True
        self._endings.close()

    def __enter__(self) -> Self:
        self._require_open()
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

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
        """The value of `key`, `default` where it is absent or deleted. One seek.

        An instance's own `get` is a shortcut to the look-up, which comes here where something is
        in its way: an unusual argument, a time that is not complete, history that goes meanwhile.
        """
        key = require_key(key)
        value = self._reads.read(as_of, Span.of_key(key), partial(self._versions.get, key))
        return default if value is None else value

    def get_many(self, keys: Sequence[bytes], as_of: TimeLike | None = None) -> list[bytes | None]:
        """The values of `keys`, in their order, all at one time; None where there is none."""
        if type(keys) is not list:
            keys = key_list(keys)
        if set(map(type, keys)) != {bytes} or max(map(len, keys)) > KEY_BYTES_MAX:
            keys = [require_key(key) for key in keys]
        read = partial(self._versions.get_many, keys)
        at = self._reads.at(as_of)
        values = read(at)
        if at < self._committer.frontiers.floor:
            hull = Span(min(keys), max(keys) + b"\x00") if keys else Span()
            return self._reads.read(as_of, hull, read)
        return values

    def scan(
        self,
        start: bytes | None = None,
        end: bytes | None = None,
        prefix: bytes | None = None,
        as_of: TimeLike | None = None,
        reverse: bool = False,
        limit: int | None = None,
    ) -> Iterator[tuple[bytes, bytes]]:
        """Live keys and values of a span, ascending (or descending), at one time.

        `start <= key < end`, or all keys with `prefix`. Memory is bounded; the scan sees the
        same state to its end, whatever is written meanwhile.
        """
        require_limit(limit)
        span = Span.of(start, end, prefix)
        chunks = self._reads.read(as_of, span, partial(self._versions.scan, span, reverse=reverse))
        rows = chain.from_iterable(map(_pairs, chunks))
        return rows if limit is None else islice(rows, limit)

    def scan_batches(
        self,
        start: bytes | None = None,
        end: bytes | None = None,
        prefix: bytes | None = None,
        as_of: TimeLike | None = None,
        reverse: bool = False,
        limit: int | None = None,
        *,
        batch_rows: int | None = None,
        workers: int = 1,
    ) -> pa.RecordBatchReader:
        """The rows of `scan` as Arrow record batches: columns `key` and `value`, both binary.

        A batch has at most `batch_rows` rows, by default as many as a scan passes over at once.

        With `workers` above 1 so many processes, this one among them, read a checkpoint, made now,
        side by side: for scans of a million rows and more. Each such scan costs some 10 ms; the
        others join the first one when they are up, 0.5 s later, and stay until the store is closed.
        Order and rows are the same. A worker that dies raises `StorageError`. To end such a scan
        early, let go of the reader: its own `close` does not reach it. Read by this process alone
        all the same: a store in memory, which has nothing to share, a span of less than
        24 MB, which several would not finish sooner, and scans with `reverse` or `limit`.
        """
        require_limit(limit)
        span = Span.of(start, end, prefix)
        batch_rows = SCAN_CHUNK if batch_rows is None else batch_rows
        require_count(batch_rows, name="batch_rows")
        require_count(workers, name="workers", most=SCAN_WORKERS_MAX)
        engine = self._engine
        whole = limit is None and not reverse
        if (
            workers > 1
            and whole
            and isinstance(engine, RocksEngine)
            and is_worth_workers(engine, span)
        ):

            def scan_beside(at: int) -> ParallelScan:
                # The view first: entries leave the engine before what covers them leaves it.
                view = self._versions.view
                return self._scanners.scan(engine, view, span, at, workers=workers, rows=batch_rows)

            batches = self._reads.read(as_of, span, scan_beside)
            return pa.RecordBatchReader.from_batches(ROWS_SCHEMA, batches)
        chunk = batch_rows if limit is None else max(min(batch_rows, limit), 1)
        scan = partial(self._versions.scan_columns, span, chunk=chunk, reverse=reverse)
        chunks = self._reads.read(as_of, span, scan)
        return row_batches(chunks if limit is None else first_rows(chunks, limit))

    def history(self, key: bytes) -> list[Version]:
        """All versions of `key` that are kept, newest first; a deletion has value None."""
        upto = self._reads.at(None)
        versions = self._versions.history(require_key(key))
        # A commit on its way may have written already what it has not yet shown.
        return [version for version in versions if version.timestamp <= upto]

    def snapshot(self, as_of: TimeLike | None = None) -> Snapshot:
        """Reads at one time that stays readable until the snapshot is closed."""
        holds = self.holds  # in a forked child, which closes the snapshot, the store has no fields
        with self._committer.lock:
            at, pin = Timestamp(self._reads.at(as_of)), holds.new_pin()
            snapshot = Snapshot(self, at, lambda: holds.unpin(pin))
            holds.pin(at, pin, kind="snapshot")
        return snapshot

    # -- writing ----------------------------------------------------------------------------

    def put(self, key: bytes, value: bytes, *, durability: Durability | None = None) -> Timestamp:
        """Set `key`; returns the commit's timestamp. Never reads. `durability` as in `open`."""
        writes = WriteSet()
        writes.put(key, value)
        return self._committer.commit(writes, durability=durability)

    def delete(self, key: bytes, *, durability: Durability | None = None) -> Timestamp:
        """Delete `key`, whether or not it is there; its history stays. Never reads."""
        writes = WriteSet()
        writes.delete(key)
        return self._committer.commit(writes, durability=durability)

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
        if idempotent:
            span = Span(start, end)
            return self._conditional.delete_live_range(writes, span, durability=durability)
        return self._committer.commit(writes, durability=durability)

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
        return self._conditional.pop(key, durability=durability)

    def transaction(self, *, durability: Durability | None = None) -> Transaction:
        """A serialisable transaction: `with store.transaction() as txn: ...` commits at its end.

        Raises `ConflictError` there, with nothing written, if others wrote what it read.
        """
        if durability is not None:
            require_durability(durability)
        return self._transactions.begin(durability=durability)

    def transact(
        self,
        body: Callable[[Transaction], T],
        *,
        attempts: int | None = None,
        wait: Callable[[float], None] = time.sleep,
        durability: Durability | None = None,
    ) -> T:
        """Run `body` in a transaction, again after each conflict; returns its result.

        `body` may run several times. Raises the last `ConflictError` after `attempts`, by default
        those of `kvstore.limits`.
        """
        begin = partial(self.transaction, durability=durability)
        return transact(begin, body, attempts=attempts, wait=wait)

    def batch(self, *, durability: Durability | None = None) -> Batch:
        """Writes that take effect together: `with store.batch() as b: b.put(...)`."""
        self._committer.require_healthy()
        if durability is not None:
            require_durability(durability)
        return Batch(partial(self._committer.commit, durability=durability))

    def revert_range(self, start: bytes, end: bytes | None, to: TimeLike) -> Timestamp | None:
        """Restore `start <= key < end` as it was at `to`, by new versions: history keeps both.

        Only keys whose value differs from the one at `to` get a version: equal values stay as they
        are, whatever was written or deleted between. So does a key that is absent at both times.

        One atomic commit of what differs, bounded by `REVERT_ROWS_MAX` keys; None if nothing
        does. Costs what changed in the span since `to`. Raises `HistoryGoneError` if `to` is
        below `since`, `ConflictError` if others keep writing into the span.
        """
        span, at = Span(start, end), to_timestamp(to, name="to")
        with self.snapshot(at):
            self._reads.require_kept(span, at)
            return revert_range(
                self.transaction,
                lambda upto: self._history.changes(at, upto, span=span, revisions="latest"),
                self._versions,
                span,
                at,
            )

    def revert_import(self, import_id: int) -> Timestamp:
        """Undo an import from now on; its history stays. One record, whatever its size.

        Raises `UsageError` for an import that was not added here, `HistoryGoneError` for one that
        was added at or below `since`. Reverting twice returns the first time.
        """
        return self.imports.revert(import_id)

    # -- changes ----------------------------------------------------------------------------

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
        oldest first) or `"time"`. Costs what changed, and for an import in the window a pass over
        the spans of its files. Raises `HistoryGoneError` if `since` is below the store's: take a
        full read instead.
        """
        span = Span.of(start, end, prefix)
        return self._history.changes(since, upto, span=span, revisions=revisions, order=order)

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
        return self._history.events(since, upto, span, images, expand)

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
        return self._history.batches(since, upto, span, images, expand)

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
        return self.feeds.open(
            name,
            start,
            streams,
            images,
            expand,
            span=span,
            max_age=max_age,
            batch_rows=batch_rows,
            batch_bytes=batch_bytes,
        )

    def wait_beyond(
        self, upper: int, *, timeout: float | None = None, stop: Callable[[], bool] = lambda: False
    ) -> None:
        """Return once `self.upper` is above `upper`, `stop()` is true, or after `timeout` seconds.

        A commit wakes it, and so does `replication.wake`: nothing is polled. Raises `ClosedError`
        on close.
        """
        committer = self._committer
        committer.require_healthy()
        committer.wait_published(
            upper, timeout=timeout, stop=lambda: not committer.is_healthy or stop()
        )
        committer.require_healthy()

    def changeset(self) -> Changeset:
        """A group of changes that is not atomic: `with store.changeset() as cs: ...`.

        Commits made inside the block, in this context, carry `cs.id`; blocks nest. A commit
        outside any block is a changeset of its own. Commits stay, however the block
        is left.
        """
        self._require_open()
        return self._changesets.new()

    def epochs(self, since: TimeLike = 0) -> Iterator[Epoch]:
        """Sealed stretches of changesets with their event counts, closed above `since`."""
        self._require_open()
        return self._changesets.epochs(to_timestamp(since, name="since"))

    def force_quiescence(
        self, after: timedelta | None = None, *, timeout: float | None = None
    ) -> Timestamp:
        """A time at which no changeset is half done; all changes until then are complete.

        Where the last such time is no longer ago than `after`, that. Else new changesets wait
        until the open ones have ended (bare commits go on). Raises `BusyError` if they have not
        after `timeout` seconds (ten minutes by default), `UsageError` inside a changeset.
        """
        require_age(after, name="after")
        seconds = QUIESCENCE_WAIT_S if timeout is None else require_seconds(timeout, name="timeout")
        return self._changesets.force_quiescence(after, seconds)

    def reshard(self, streams: int) -> Generation:
        """Split the change index over `streams` streams from now on. One synced record.

        Consumers read the old streams to their end, then the new ones: nothing twice.
        """
        require_count(streams, name="streams", most=STREAMS_MAX)
        generations = self._parts.index.generations
        opened: list[Generation] = []

        def stage(batch: WriteBatch, opened_at: Timestamp) -> Callable[[], None]:
            opened.append(generations.stage_next(batch, opened_at, count=streams))
            return lambda: generations.publish(opened[0])

        self._committer.announce(stage)
        return opened[0]

    def generations(self) -> list[Generation]:
        """Which streams took which keys, and from when to when; the last one is open."""
        self._require_open()
        return list(self._parts.index.generations.all())

    # -- keeping ----------------------------------------------------------------------------

    def hold(
        self,
        name: str,
        at: TimeLike | None = None,
        max_age: timedelta | None = None,
        *,
        durable: bool = True,
        kind: str = USER,
        address: str = "",
    ) -> Hold:
        """Keep history from `at` on until the hold is moved or released, over restarts too.

        Taking a hold that exists fences its owner. One that falls behind further than `max_age`
        is invalidated when GC wants the space; without `max_age` it keeps history for ever, also
        when what it was taken for is gone. If not `durable`, a crash before the next `sync`
        undoes it: saves an fsync where the caller syncs anyway. `kind` and `address` tell those
        who list the holds what it was taken for: neither may contain a secret.
        """
        return self.holds.take(name, at, max_age, durable=durable, kind=kind, address=address)

    def drop_hold(self, name: str) -> HoldRecord:
        """Remove the hold `name` whoever owns it: a remedy where its owner is gone for good.

        Returns what was removed; its `cost_of_dropping` says what the owner meets if there is one
        after all. Raises `UsageError` if there is no such hold.
        """
        return self.holds.drop(name)

    def gc(
        self,
        before: TimeLike | None = None,
        keep: timedelta | None = None,
        *,
        compact: bool = False,
        progress: Callable[[int], None] | None = None,
    ) -> GcReport:
        """Give up history below `before` (or older than `keep`), and remove what it held.

        Goes as far as holds and open readers allow; holds over their budget are invalidated.
        Costs what changed since the last run. The files shrink as RocksDB compacts them, or at
        once with `compact`, which rewrites what was touched. `progress` is called with the
        versions removed so far; what it raises ends the run, which the next makes good.
        """
        when = None if before is None else to_timestamp(before, name="before")
        require_age(keep, name="keep")
        return self._collector.collect(when, keep, compact=compact, progress=progress)

    def clear_range(self, start: bytes, end: bytes, *, compact: bool = True) -> Timestamp:
        """Destroy the history of `start <= key < end`, physically. Returns the time from which on
        the span reads as empty; earlier reads of it raise `HistoryGoneError`.

        Raises `HistoryHeldError`, with nothing done, while a hold or an open reader needs it.
        Costs O(bytes of the span), or the same whatever it holds with `compact=False`: then
        the space comes back as RocksDB compacts.
        """
        self._committer.require_commits()
        return self._clearing.clear(Span(start, end), compact=compact)

    def checkpoint(self, path: str | Path) -> Timestamp:
        """Make `path` (which must not exist) an independent, durable copy as of now, sharing files.

        Milliseconds at any size, on the same file system. Returns the newest complete time in it.
        """
        target = require_path(path)
        if target.exists():
            raise UsageError(f"{target} exists", "checkpoint into a path that does not")
        committer = self._committer
        with committer.lock:
            upper = committer.sync()
            self._engine.checkpoint(target)
        with storage_errors(str(target)):
            OS_FILES.sync_directory(str(target.absolute().parent))
        return Timestamp(upper - 1)

    def verify(self, *, progress: Callable[[int], None] | None = None) -> StoreReport:
        """Walk the whole store and list all that breaks an invariant. Bounded memory.

        Commits go on meanwhile, GC waits. Costs one pass over everything, and a look-up per
        change in the index. `progress` is called with the versions and changes looked at so far.
        """
        self._committer.require_healthy()
        with self._collector.paused():
            return verify(self._parts, progress=progress)

    def stats(self) -> dict[str, Any]:
        """Counts and sizes, by name: frontiers, what is held in memory, estimates of the engine
        (`<family>_bytes`, `<family>_memtable_bytes`, `<family>_entries`). `held_by` describes who
        keeps history, oldest first. Background work that failed is told by `gc_failures` (how
        often), `gc_last_error` and `gc_failed_at_ns`, and the same of `tasks`. Costs microseconds;
        in a store in memory, whose sizes are counted, 0.03 us per entry."""
        self._require_open()
        committer, parts = self._committer, self._parts
        imports, holds = self.imports.all(), self.holds.all()
        now = committer.now()
        return {
            "since": int(committer.since),
            "upper": int(committer.upper),
            "durable": int(committer.durable),
            "range_fragments": len(self._versions.view.fragments),
            "imports": len(imports),
            "imports_adding": sum(record.added is None for record in imports),
            "holds": len(holds),
            "holds_lost": sum(hold.lost for hold in holds),
            "clears": len(parts.clears.all()),
            "held_by": [claim.describe(now) for claim in self.holds.needing()],
            **self.upkeep.figures(),
            **self._tasks.figures(),
            **self._engine.stats(),
        }

    @property
    def tasks(self) -> Tasks:
        """The queue of work on this store, which survives the process; opened when first asked for.

        It lies in the store's directory and goes where that goes; a checkpoint has none of it.
        `kvstore.upkeep`, `bulk.tasks` and `backup.tasks` submit to it, and do what was submitted.
        Raises what `Tasks.open` raises: the store itself does not depend on it.
        """
        return self._tasks.open()

    # -- inside -----------------------------------------------------------------------------

    def _write_if(
        self,
        writes: WriteSet,
        key: bytes,
        expected: bytes | Unchecked | None,
        unchanged_since: TimeLike | None,
        durability: Durability | None,
    ) -> Timestamp:
        since = None
        if unchanged_since is not None:
            since = to_timestamp(unchanged_since, name="unchanged_since")
        return self._conditional.write_if(
            writes, key, expected=expected, unchanged_since=since, durability=durability
        )

    def _require_open(self) -> None:
        if self._closed:
            raise ClosedError(self._committer.where)


def _finish(committer: Committer) -> None:
    with committer.lock:
        committer.finish()


def _pairs(chunk: tuple[list[bytes], list[bytes]]) -> Iterator[tuple[bytes, bytes]]:
    return zip(*chunk, strict=True)
