"""The store: the face of everything below it, and what users have in their hands.

`Store` has the verbs. It checks what callers pass and picks the time of each read. The work is done
by parts that are built here, know nothing of the store, and can be built alone:

    imports       `kvstore.timeline.imports`   bulk loads
    holds         `kvstore.timeline.holds`     claims on history
    feeds         `kvstore.feeds`              consumers of changes
    replication   `kvstore.feeds.replica`      the reads of copies, and the role of a replica
    layout        `Layout`, below              where the keys lie
    browsing      `kvstore.browsing`           bounded looks, for people
    requests      `kvstore.requests`           writes of other processes, each done once
    upkeep        `Upkeep`, below              GC in the background, rewriting of files
    tasks         `kvstore.tasks`              a queue of work that survives the process

Private parts are commits, frontiers and whole reads (`kvstore.timeline`), windows
(`kvstore.feeds.history`), versions (`kvstore.mvcc`), transactions, garbage and clears
(`kvstore.retention`).

Most parts are given the parts that they need when they are made. Four calls go the other way, from
a part to one that is made after it. Each is an attribute that `Store.__init__` or `Parts.of` sets:

    `Versions.guard`         -> `Reads.guard`            asked before a long pass reads files itself
    `Versions.after_flush`   -> `Upkeep.merge_files`     called behind a flush of a long pass
    `Collector.tidy`         -> `_tidy`, below           called by each collection, for indexes
    `Expiries.on_first`      -> `Reserve.note_expiries`  called once the first key expires

Invariants
1. No part refers to the store.
2. `close` ends the parts in the opposite order of their making, each even if another one fails.
"""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, suppress
from datetime import timedelta
from functools import cached_property, partial
from itertools import chain, islice
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, TypeVar, cast, overload

from typing_extensions import Self

from kvstore.base.arguments import (
    AGE,
    INTEGER,
    LIMIT,
    SECONDS,
    SPAN,
    WAIT,
    instance,
    integer,
    is_many,
    key_list,
)
from kvstore.base.background import Failures
from kvstore.base.clock import WallClock
from kvstore.base.forks import own
from kvstore.base.notices import notice
from kvstore.base.paths import require_place_of_copy
from kvstore.base.span import Span, one_span, require_key
from kvstore.base.timestamp import AgeLike, TimeLike, Timestamp
from kvstore.batch import Batch, trim
from kvstore.browsing import Browsing
from kvstore.changes import Change, ChangeIndex, Order, Revisions
from kvstore.changes.epochs import Changeset, Epoch
from kvstore.changes.events import Event, Expand, Images
from kvstore.changes.streams import Generation
from kvstore.codec.keys import span_bounds
from kvstore.codec.shown import ROWS, ShownRows
from kvstore.codec.tuples import desc
from kvstore.engine import CHANGES, DATA, RANGES, Engine, FileSpan, WriteBatch
from kvstore.errors import (
    ClosedError,
    KVStoreError,
    PoisonedError,
    UsageError,
    storage_errors,
)
from kvstore.feeds import Feed, Feeds, Position
from kvstore.feeds.history import History
from kvstore.feeds.replica import Replication
from kvstore.limits import (
    QUIESCENCE_WAIT_S,
    SCAN_CHUNK,
    SCAN_PIECES_MAX,
    SCAN_WORKERS_MAX,
    STALE_IMPORT_S,
    STREAMS_MAX,
)
from kvstore.loops.lookup import PointRead, are_keys
from kvstore.mvcc import Version, Versions, WriteSet
from kvstore.mvcc.arrow import row_batches
from kvstore.mvcc.meta import FORMAT, Meta
from kvstore.mvcc.parallel_scan import split_span, user_spans
from kvstore.mvcc.scan import first_rows
from kvstore.mvcc.write_set import require_plain
from kvstore.readable import Readable
from kvstore.requests import Requests
from kvstore.retention.clear import Clearing
from kvstore.retention.gc import Collector, GcPolicy, GcReport, GcWorker
from kvstore.snapshot import Snapshot
from kvstore.storage.os_files import OS_FILES
from kvstore.timeline.changesets import Changesets
from kvstore.timeline.committer import Committer
from kvstore.timeline.durability import DURABILITY, Durability
from kvstore.timeline.expiries import Expires
from kvstore.timeline.holds import USER, Hold, HoldRecord
from kvstore.timeline.parts import Parts
from kvstore.timeline.reserved import Positions, Reserve
from kvstore.transaction import (
    UNCHECKED,
    Conditional,
    Expiry,
    Transaction,
    Transactions,
    Unchecked,
    Updates,
    revert_range,
    transact,
)

if TYPE_CHECKING:
    import pyarrow as pa

    from kvstore.mapping import MappingCodec, StoreMapping
    from kvstore.metrics import Metric
    from kvstore.tables.catalogue import IndexColumns
    from kvstore.tables.joins import Side
    from kvstore.tables.sources import PastRows, StoreRows
    from kvstore.tables.table import Row, Table
    from kvstore.tasks import QueueSize, Tasks
    from kvstore.verify import StoreReport

T = TypeVar("T")


class Store(Readable):
    """A multi-version key-value store. Open one with `kvstore.open`; use it from any thread.

    Times (`as_of`, `since`, `upto`, `at`) are a `Timestamp`, an aware `datetime`, ISO-8601 text
    with a zone, `"now"`, `"-1h"` or a `timedelta` (that long ago), or nanoseconds as an int; None
    is the newest complete time. Keys and values are bytes, or a `bytearray` or `memoryview`, which
    is copied. A read below `since` raises `HistoryGoneError`, and one in the future raises
    `NotYetWrittenError`. Writes are visible to all readers when they return.

    Example:

        with kvstore.open("flights.db") as store:
            stamp = store.put(b"UA/1545", b"on time")
            store.put(b"UA/1545", b"late")
            assert store.get(b"UA/1545") == b"late"
            assert store.get(b"UA/1545", as_of=stamp) == b"on time"
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
        self._parts = parts = Parts.of(versions, index, committer)
        self._reads = parts.reads
        self._history = History(parts)
        self._changesets = Changesets(Meta(engine), committer)
        self._conditional = Conditional(parts)
        self._transactions = Transactions(parts)
        self._clearing = Clearing(parts)
        self._collector = Collector(parts, path)
        self._collector.tidy = partial(_tidy, parts, self._transactions)
        self._tasks = LazyTasks(path, committer, clock)
        self.imports, self.holds = parts.imports, parts.holds
        self.positions = Positions(versions, committer, parts.reserve)
        self.feeds = Feeds(parts, self._history, self._changesets)
        self.replication = Replication(parts, self._history)
        self.layout = Layout(engine, parts.reserve)
        self.browsing = Browsing(parts)
        self._updates, self._expiry = Updates(parts), Expiry(parts)
        self.requests = Requests(
            parts, self._conditional, self._transactions, self._updates, self._expiry
        )
        self.upkeep = Upkeep(engine, committer, self._collector, clock)
        versions.guard, versions.after_flush = self._reads.guard, self.upkeep.merge_files
        self._endings = ExitStack()
        first = (engine.close, self._changesets.wake)
        last = (self.upkeep.stop_gc, self._collector.stop, self._tasks.close)
        for ending in (*first, partial(_finish, committer), *last):
            self._endings.callback(ending)
        # `store.get(key)` runs `PointRead.get` of kvstore/loops/lookup.pyx: a look-up by one seek.
        # It calls the method `get` below for each case that it does not answer. A method of Python
        # that calls the look-up would take 0.3 us of a get's 3.
        if type(self).get is _GET:  # a subclass or a profiler may have replaced it
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
        """The oldest time at which events and feeds can begin.

        A restore brings back the versions without the change index, so in a restored store this is
        the time of the restore, and otherwise `since`. `changes` reads older windows as well.
        """
        return self._reads.indexed_since

    @property
    def upper(self) -> Timestamp:
        """The first time that is not complete: no later commit takes a time below it."""
        return self._committer.upper

    @property
    def durable(self) -> Timestamp:
        """Every change below this time survives a crash."""
        return self._committer.durable

    @cached_property
    def store_id(self) -> str:
        """The random name that this store got when it was made. A restored store gets a new one."""
        record = Meta(self._engine).read(FORMAT)
        assert record is not None, "opening wrote it"
        return record.hexed("store_id").hex()

    def now(self) -> Timestamp:
        """The time now, on this store's timeline. It reserves no time: a commit may get it that
        comes while the clock stands still. The `as_of` of a snapshot is complete, and stays."""
        return self._committer.now()

    def to_time(self, time: TimeLike, *, name: str = "time") -> Timestamp:
        """A time in any form that the verbs take. Errors call it `name`. Raises `UsageError`."""
        return self._committer.to_time(time, name=name)

    def sync(self) -> Timestamp:
        """Complete the time until now and make all changes in it durable; returns `upper`. One
        fsync."""
        return self._committer.sync()

    def close(self) -> None:
        """Make every change durable, and end all work on the store. Repeatable. An open scan gives
        the rows that it has read from the store, and raises `ClosedError` if it has not read all
        of them. A store that was poisoned writes nothing more, and closes without an error."""
        if self._closed:
            return
        self._collector.require_outside()
        self._closed = True
        self._endings.close()
        notice("kvstore.store", "closed", store=str(self.path or "in memory"))

    def __repr__(self) -> str:
        where = "in memory" if self.path is None else str(self.path)
        name = type(self).__name__
        if self._closed:
            return f"<kvstore.{name} {where}, closed>"
        kind = type(self._engine).__name__
        frontiers = self._committer.frontiers
        times = f"since {frontiers.since}, upper {frontiers.upper}"
        if not frontiers.is_sound:  # a live reader may look again; a poisoned store is opened anew
            times += ", cannot be read now"
        return f"<kvstore.{name} {where} ({kind}), {times}>"

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
        """The value of `key` at `as_of`; `default` if the key is absent or deleted. One seek.

        Each store has a shortcut of this name, which goes to the look-up directly. The shortcut
        calls this method for an unusual argument, for a time that is not complete, and where
        history goes away during the look-up.
        """
        # Hot while a key waits for its expiry: then the shortcut calls this method for each key.
        key = require_key(key)
        if as_of is None and self._committer.write_due(waits=False):
            found = self._reads.late([key], partial(self._versions.get_many, [key]))[0]
            return default if found is None else found
        at = self._committer.upper - 1 if as_of is None else self._reads.at(as_of)
        value = self._versions.get(key, at)
        if at < self._committer.frontiers.floor:
            value = self._reads.read(as_of, Span.of_key(key), partial(self._versions.get, key))
        return default if value is None else value

    def get_many(
        self, keys: Sequence[bytes], as_of: TimeLike | Sequence[TimeLike] | None = None
    ) -> list[bytes | None]:
        """The values of `keys`, in the order of `keys`; None for an absent key.

        `as_of` is one time for all keys, or a list that has a time for each key. With a list,
        `HistoryGoneError` and `NotYetWrittenError` name the first key whose time they concern.
        """
        if type(keys) is not list:
            keys = key_list(keys)
        if not are_keys(keys):
            keys = [require_key(key) for key in keys]
        if as_of is not None and is_many(as_of):
            from kvstore.tables import joins

            found = joins.values(self._parts, keys, as_of)
            assert found is not None, "no bound was given"
            return found
        read = partial(self._versions.get_many, keys)
        is_healthy = self._committer.frontiers.is_healthy
        if not is_healthy and as_of is None and self._committer.write_due(waits=False):
            return self._reads.late(keys, read)
        at = self._reads.at(as_of)
        values = read(at)
        if at < self._committer.frontiers.floor:
            hull = Span(min(keys), max(keys) + b"\x00") if keys else Span()
            return self._reads.read(as_of, hull, read)
        return values

    @cached_property
    def _floors(self) -> Callable[..., list[tuple[bytes, bytes] | None]]:
        # Imported once: asking for a module that is there takes 5 % of a `floor`.
        from kvstore.tables.joins import floors

        # Without a bound of bytes there is always an answer.
        return cast("Callable[..., list[tuple[bytes, bytes] | None]]", floors)

    def floor_many(
        self,
        keys: Sequence[bytes],
        as_of: TimeLike | Sequence[TimeLike] | None = None,
        prefix: bytes | None = None,
    ) -> list[tuple[bytes, bytes] | None]:
        """The `floor` of each of `keys`, in their order. `as_of` is as in `get_many`. Costs two
        seeks for each key, and a step for each entry of the keys in between that are deleted."""
        return self._floors(self._parts, key_list(keys), as_of, prefix)

    def join_side(self) -> Side:
        """The side of this store in a join of several sources: see `kvstore.join`."""
        return self._side(None)

    def scan(
        self,
        start: bytes | None = None,
        end: bytes | None = None,
        prefix: bytes | None = None,
        as_of: TimeLike | None = None,
        reverse: bool = False,
        limit: int | None = None,
    ) -> Iterator[tuple[bytes, bytes]]:
        """Live keys and values at one time, in ascending order, or descending with `reverse`.

        The span is `start <= key < end`, or all keys with `prefix`. Memory is bounded. The scan
        sees the same state to its end: later commits do not show. The first rows are read within
        the call, which then raises their errors. A notebook shows them.

        Example:

            stamp = store.put_many({b"AA/1": b"late", b"UA/7": b"on time"})
            store.delete(b"AA/1")
            assert list(store.scan()) == [(b"UA/7", b"on time")]
            assert dict(store.scan(prefix=b"AA/", as_of=stamp)) == {b"AA/1": b"late"}
        """
        LIMIT.check("limit", limit)
        span = self._parts.reserve.narrow(Span.of(start, end, prefix))
        scan = partial(self._versions.scan, span, reverse=reverse, limit=limit)
        chunks = self._reads.read(as_of, span, scan)
        rows: Iterator[tuple[bytes, bytes]] = chain.from_iterable(map(_pairs, chunks))
        return ShownRows("scan", ROWS, rows if limit is None else islice(rows, limit))

    def keys(
        self,
        start: bytes | None = None,
        end: bytes | None = None,
        prefix: bytes | None = None,
        as_of: TimeLike | None = None,
        reverse: bool = False,
        limit: int | None = None,
    ) -> Iterator[bytes]:
        """The live keys of `scan`, without their values, which are not read."""
        LIMIT.check("limit", limit)
        span = self._parts.reserve.narrow(Span.of(start, end, prefix))
        scan = partial(self._versions.scan, span, reverse=reverse, limit=limit, keys_only=True)
        keys = chain.from_iterable(keys for keys, _ in self._reads.read(as_of, span, scan))
        return keys if limit is None else islice(keys, limit)

    def count(
        self,
        start: bytes | None = None,
        end: bytes | None = None,
        prefix: bytes | None = None,
        as_of: TimeLike | None = None,
    ) -> int:
        """The number of live keys at one time. One pass over the entries of the span, in bounded
        memory; no value is read."""
        span = self._parts.reserve.narrow(Span.of(start, end, prefix))
        scan = partial(self._versions.scan_columns, span, chunk=SCAN_CHUNK, keys_only=True)
        return sum(len(keys) for keys, _ in self._reads.read(as_of, span, scan))

    def mapping(
        self,
        codec: str | MappingCodec = "bytes",
        *,
        prefix: bytes = b"",
        expires: Expires | None = None,
    ) -> StoreMapping:
        """The keys that begin with `prefix` as a `MutableMapping`, without the prefix.

        `codec` is `"bytes"`, `"text"`, `"json"` (keys are text, values JSON) or a `MappingCodec`.
        Each key that is set through the mapping expires as `expires` tells: see `put`.
        """
        from kvstore.mapping import StoreMapping

        return StoreMapping(self, codec, prefix, expires)

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

        A batch has at most `batch_rows` rows, by default as many as a scan reads at once.

        With `workers` above 1, this many threads read the files of the store side by side, which is
        faster from a hundred thousand rows on. Order and rows are the same. To end such a scan
        early, drop the reader: its `close` does not reach the scan. One thread reads alone if the
        store is in memory or another process writes it, if much of the span lies in memory only,
        and with `reverse` or `limit`.

        Costs a quarter of RocksDB's own pass where it reads the files itself: behind some thousand
        entries, see docs/explanation/passes.md.
        """
        LIMIT.check("limit", limit)
        span = self._parts.reserve.narrow(Span.of(start, end, prefix))
        batch_rows = SCAN_CHUNK if batch_rows is None else batch_rows
        integer(1, sys.maxsize).check("batch_rows", batch_rows)
        integer(1, SCAN_WORKERS_MAX).check("workers", workers)
        chunk = batch_rows if limit is None else max(min(batch_rows, limit), 1)
        if workers > 1 and limit is None and not reverse:
            scan = partial(self._versions.scan_by_threads, span, chunk=chunk, threads=workers)
        else:
            scan = partial(self._versions.scan_columns, span, chunk=chunk, reverse=reverse)
        chunks = self._reads.read(as_of, span, scan)
        return row_batches(chunks if limit is None else first_rows(chunks, limit))

    def history(self, key: bytes) -> list[Version]:
        """All kept versions of `key`, newest first. The value of a deletion is None.

        Example:

            store.put(b"k", b"v")
            store.delete(b"k")
            assert [version.value for version in store.history(b"k")] == [None, b"v"]
        """
        upto = self._reads.at(None)
        versions = self._versions.history(require_key(key))
        # A commit under way may have written versions that it has not shown yet.
        return [version for version in versions if version.timestamp <= upto]

    def snapshot(self, as_of: TimeLike | None = None) -> Snapshot:
        """Reads at one time, which stays readable until the snapshot is closed.

        Example:

            store.put(b"k", b"old")
            with store.snapshot() as snapshot:
                store.put(b"k", b"new")
                assert snapshot.get(b"k") == b"old"
        """
        pins = self._parts.pins  # a forked child closes the snapshot; its store has no fields
        with self._committer.lock:
            at, pin = Timestamp(self._reads.at(as_of)), pins.new()
            side = partial(self._side, at)
            rows = partial(_past_rows, self, self._transactions)
            snapshot = Snapshot(self, at, lambda: pins.let_go(pin, None), side, rows)
            pins.keep(pin, at, kind="snapshot")
        return snapshot

    # -- writing ----------------------------------------------------------------------------

    def put(
        self,
        key: bytes,
        value: bytes,
        *,
        expires: Expires | None = None,
        durability: Durability | None = None,
    ) -> Timestamp:
        """Set `key`; returns the timestamp of the commit. Never reads. `durability`: see `open`.

        With `expires`, a time or a timedelta from now (60 seconds are `timedelta(seconds=60)` or
        `"+60s"`: a number is nanoseconds since 1970), the key is deleted at that time, unless it
        was written again before: the history of the key has a deletion with exactly that timestamp.
        Reads of the newest state never show a key that has expired. Raises `UsageError` for a time
        that does not lie ahead. Costs up to as much as two puts.
        """
        writes = WriteSet()
        if expires is None:
            writes.put(key, value)
        else:
            writes.put_expiring(key, value, self._committer.expiries.due(expires))
        return self._committer.commit(writes, durability=durability)

    def delete(self, key: bytes, *, durability: Durability | None = None) -> Timestamp:
        """Delete `key`, whether or not it exists. Its history stays. Never reads."""
        writes = WriteSet()
        writes.delete(key)
        return self._committer.commit(writes, durability=durability)

    def delete_range(
        self,
        start: bytes | None = None,
        end: bytes | None = None,
        idempotent: bool = False,
        *,
        prefix: bytes | None = None,
        durability: Durability | None = None,
    ) -> Timestamp | None:
        """Delete all keys `start <= key < end`, or all with `prefix`, by one write; their history
        stays. The keys of tables stay too.

        With `idempotent` the write happens only if a key in the span is alive; otherwise the result
        is None. The check reads up to the first live key of the span.
        """
        writes = WriteSet()
        writes.delete_range(start, end, prefix)
        if idempotent:
            span = Span(*writes.ranges[0])
            return self._conditional.delete_live_range(writes, span, durability=durability)
        return self._committer.commit(writes, durability=durability)

    def trim(
        self,
        prefixes: bytes | Sequence[bytes],
        keep: int,
        *,
        durability: Durability | None = None,
    ) -> Timestamp | None:
        """Delete all but the last `keep` keys of each prefix, in one commit; None if nothing is
        deleted. Where the keys of a prefix end in a time, the last ones are the newest.

        A key that another call writes meanwhile stays. Costs `keep` keys and one range delete for
        each prefix, however much it deletes.

        Example:

            store.put_many({b"run/7/%02d" % step: b"" for step in range(10)})
            store.trim(b"run/7/", keep=2)
            assert list(store.keys(prefix=b"run/7/")) == [b"run/7/08", b"run/7/09"]
        """
        return trim(self, prefixes, keep, durability)

    def put_if(
        self,
        key: bytes,
        value: bytes,
        expected: bytes | Unchecked | None = UNCHECKED,
        *,
        unchanged_since: TimeLike | None = None,
        expires: Expires | None = None,
        durability: Durability | None = None,
    ) -> Timestamp:
        """Set `key` on a condition; raises `PreconditionError`, with nothing written, if it fails.

        The value of `key` must be `expected`; None requires that the key is absent. With
        `unchanged_since` the key must not have been written after that time. `expires` is as in
        `put`.
        """
        writes = WriteSet()
        if expires is None:
            writes.put(key, value)
        else:
            writes.put_expiring(key, value, self._committer.expiries.due(expires))
        return self._write_if(writes, key, expected, unchanged_since, durability)

    def delete_if(
        self,
        key: bytes,
        expected: bytes | Unchecked | None = UNCHECKED,
        *,
        unchanged_since: TimeLike | None = None,
        durability: Durability | None = None,
    ) -> Timestamp:
        """Delete `key` on a condition, as in `put_if`."""
        writes = WriteSet()
        writes.delete(key)
        return self._write_if(writes, key, expected, unchanged_since, durability)

    def pop(self, key: bytes, *, durability: Durability | None = None) -> bytes | None:
        """Delete `key` and return its value; None, with nothing written, if the key is absent."""
        return self._conditional.pop(key, durability=durability)

    def update(
        self,
        key: bytes,
        change: Callable[[bytes | None], bytes | None],
        *,
        expires: Expires | None = None,
        durability: Durability | None = None,
    ) -> bytes | None:
        """Set `key` to `change(value)` in one commit, and return the new value.

        `change` gets the newest value, None where the key is absent. If it returns None, the key is
        deleted. No other commit comes between the read and the write, so there is no conflict and
        no retry: `change` runs once, under the commit lock. It must be short, and must not write to
        the store (`UsageError`). An error that it raises is passed on, and nothing is written. The
        new value expires at `expires`, as in `put`; without it, the new value does not expire, even
        if the old one did.

        Example:

            def book(seats):
                return b"%d" % (int(seats or b"180") - 1)

            assert store.update(b"seats/UA/1545", book) == b"179"
        """
        due = None if expires is None else self._committer.expiries.due(expires)
        return self._updates.update(key, change, due=due, durability=durability)

    def increment(
        self,
        key: bytes,
        by: int = 1,
        *,
        expires: Expires | None = None,
        durability: Durability | None = None,
    ) -> int:
        """Add `by` to the counter at `key` in one commit, and return the sum.

        A counter is an integer of 64 bits in decimal text, such as `b"42"`; an absent key counts as
        0. The sum expires at `expires`, as in `put`; without it, the sum does not expire, even if
        the counter did. Raises `UsageError`, with nothing written, for a value that is no counter
        and for a sum of more than 64 bits.
        """
        due = None if expires is None else self._committer.expiries.due(expires)
        return self._updates.increment(key, by, due=due, durability=durability)

    def ttl(self, key: bytes) -> timedelta | None:
        """How long until `key` expires; None if it does not, or is absent. Two look-ups."""
        due = self._expiry.due(key)
        return None if due is None else timedelta(microseconds=(due - self.now()) // 1000)

    def persist(self, key: bytes, *, durability: Durability | None = None) -> Timestamp | None:
        """Cancel the expiry of `key`, whose value and version stay; returns the timestamp of the
        commit, None with nothing written if the key does not expire."""
        return self._expiry.persist(key, durability=durability)

    def put_many(
        self,
        rows: object,
        *,
        expires: Expires | None = None,
        durability: Durability | None = None,
    ) -> Timestamp | None:
        """Set many keys in one commit; returns its timestamp, None if there are no rows.

        `rows` is a mapping, an iterable of pairs of key and value, or Arrow data (also a frame of
        Polars, DuckDB or pandas) with the columns `key` and `value`. The last value of a key wins.
        `expires` is as in `put`, for all rows; without it no row expires, even if its key did. All
        rows are kept in memory: `bulk.Import` takes any number. Raises `UsageError` above
        `BATCH_BYTES_MAX`.
        """
        with self.batch(durability=durability) as batch:
            batch.put_many(rows, expires=expires)
        return batch.timestamp

    def transaction(self, *, durability: Durability | None = None) -> Transaction:
        """A serialisable transaction: `with store.transaction() as txn: ...` commits at its end.

        The commit raises `ConflictError`, with nothing written, if another commit has written
        keys or spans that the transaction read.
        """
        if durability is not None:
            DURABILITY.check("durability", durability)
        return self._transactions.begin(durability=durability)

    def transact(
        self,
        body: Callable[[Transaction], T],
        *,
        attempts: int | None = None,
        wait: Callable[[float], None] = time.sleep,
        durability: Durability | None = None,
    ) -> T:
        """Run `body` in a transaction, and again after each conflict; returns its result.

        Raises the last `ConflictError` after `attempts` runs, `TRANSACT_ATTEMPTS` by default.

        Example:

            def swap(txn):
                first, second = txn.get(b"gate/1"), txn.get(b"gate/2")
                txn.put(b"gate/1", second)
                txn.put(b"gate/2", first)

            store.put_many({b"gate/1": b"UA", b"gate/2": b"AA"})
            store.transact(swap)
            assert store.get(b"gate/1") == b"AA"
        """
        begin = partial(self.transaction, durability=durability)
        return transact(begin, body, attempts=attempts, wait=wait)

    def batch(self, *, durability: Durability | None = None) -> Batch:
        """Writes that take effect together, at one timestamp, or not at all.

        Example:

            with store.batch() as batch:
                batch.delete_range(b"UA/", b"UA0")
                batch.put(b"UA/1545", b"boarding")
            assert batch.timestamp == store.history(b"UA/1545")[0].timestamp
        """
        self._committer.health.require()
        if durability is not None:
            DURABILITY.check("durability", durability)
        committer = self._committer
        commit = partial(committer.commit, durability=durability)
        rows = partial(_table_rows, self, self._transactions, self._parts)
        return Batch(commit, WriteSet, rows=rows, due=committer.expiries.due)

    def revert_range(self, start: bytes, end: bytes | None, to: TimeLike) -> Timestamp | None:
        """Restore the state of `start <= key < end` at the time `to` by new versions.

        History keeps the undone versions. A key gets a new version only if its value differs from
        its value at `to`. All new versions are one commit of at most `REVERT_ROWS_MAX` keys; the
        result is None if no key differs. Costs what changed in the store since `to`, or what exists
        in the span if that is less. Raises `HistoryGoneError` if `to` is below `since`,
        `ConflictError` if others keep writing into the span.
        """
        span = self._parts.reserve.narrow(Span(start, end))
        at = self._committer.to_time(to, name="to")
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
        """Undo an import from now on. Its history stays. One record for an import of any size.

        Raises `UsageError` if no such import was added here, `HistoryGoneError` if it was added at
        or below `since`. A second revert returns the timestamp of the first.
        """
        return self.imports.revert(import_id)

    # -- tables -----------------------------------------------------------------------------

    @overload
    def table(
        self,
        name: str,
        schema: type[Row],
        key: str | desc | Sequence[str | desc],
        indexes: Mapping[str, IndexColumns] | None = None,
        event_time: str | None = None,
        expires: str | None = None,
        valid_to: str | None = None,
    ) -> Table[Row]: ...

    @overload
    def table(
        self,
        name: str,
        schema: pa.Schema | None = None,
        key: str | desc | Sequence[str | desc] | None = None,
        indexes: Mapping[str, IndexColumns] | None = None,
        event_time: str | None = None,
        expires: str | None = None,
        valid_to: str | None = None,
        *,
        row: type[Row],
    ) -> Table[Row]: ...

    @overload
    def table(
        self,
        name: str,
        schema: pa.Schema | None = None,
        key: str | desc | Sequence[str | desc] | None = None,
        indexes: Mapping[str, IndexColumns] | None = None,
        event_time: str | None = None,
        expires: str | None = None,
        valid_to: str | None = None,
    ) -> Table: ...

    def table(
        self,
        name: str,
        schema: pa.Schema | type | None = None,
        key: str | desc | Sequence[str | desc] | None = None,
        indexes: Mapping[str, IndexColumns] | None = None,
        event_time: str | None = None,
        expires: str | None = None,
        valid_to: str | None = None,
        *,
        row: type[Any] | None = None,
    ) -> Table[Any]:
        """The table `name`: typed rows with a composite key. With `schema` it is made if it is new.

        `schema` has the columns: an Arrow schema, or a class with annotated fields (a dataclass, a
        TypedDict, a model of pydantic, a struct of msgspec): then rows are instances of the class,
        and type checkers know it. `row` is such a class for a table that is there: its fields are
        columns of the table, and other columns are not read. `key` names
        the columns of the key in their order (`desc(name)` puts the greatest value first).
        `indexes` has the columns of each index by its name (`unique(name)` for a unique one).
        `event_time` names a column that is put last in the key, newest first. `expires` names a
        column of times with a zone: each row is deleted, with its index entries, at its time there.
        A row stays with a null, or with a time from 2262 on. A time that has passed deletes the row
        right behind the commit; one before 1978 is refused, because it is surely a mistake.
        `valid_to` names a column of the type of the event time: a row is valid from its event time
        to its time there, or to its successor's; a join gives no other row, and none behind the
        end. A null is no end.

        Tables lie above all other keys. Plain writes refuse their keys, and plain scans, feeds and
        counts leave them out unless they begin among them. Raises `UsageError` for a table that
        does not exist, if no `schema` is given; and for a table that has other columns, key,
        indexes, expiry or ends.

        Example:

            schema = pa.schema([("number", pa.int64()), ("gate", pa.string())])
            flights = store.table("flights", schema, "number", indexes={"by_gate": ["gate"]})
            flights.put({"number": 1545, "gate": "B7"})
            assert flights.get(1545)["gate"] == "B7"
            assert [row["number"] for row in flights.find("by_gate", "B7")] == [1545]
        """
        from kvstore.tables.table import open_table

        self._require_open()
        made = (name, schema, key, indexes, event_time, expires, valid_to, row)
        return open_table(self, self._parts, self._transactions.catalogue, *made)

    def tables(self) -> list[str]:
        """The names of the tables."""
        self._require_open()
        return self._transactions.catalogue.names()

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
        """The changes of the window `(since, upto]`. Chained windows neither skip nor repeat one.

        `revisions="latest"` gives the last change of each key only. From the beginning of time
        (`since=0`) that is the state at `upto`, without deletions. `order` is `"key"` (the changes
        of a key oldest first) or `"time"`. `expires` of a change tells when the value of a put
        expires. With `revisions="latest"` it is the due time as of `upto`. Costs what changed in
        the store, or in key order what exists in the span if that is less, and for each import in
        the window a pass over the spans of its files. Raises `HistoryGoneError` if `since` is below
        the `since` of the store: take a full read instead.

        Example:

            seen = store.put(b"k", b"old")
            store.put(b"k", b"new")
            assert [change.value for change in store.changes(since=seen)] == [b"new"]
        """
        span = self._parts.reserve.narrow(Span.of(start, end, prefix))
        found = self._history.changes(
            since, upto, span=span, revisions=revisions, order=order, with_dues=True
        )
        return ShownRows("changes", Change._fields, found)

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

        `images` is `"none"` (keys only), `"delta"` (the new values), `"pre"`, `"post"` or
        `"pre+post"` (the values of the key before and after, at the cost of a look-up each).
        `expand` turns imports and reverts (`"imports"`) and range deletes too (`"all"`) into events
        of their keys; `"none"` gives each as one event. `expires` of an event tells when the value
        of a put expires; `persist` is no event. Raises `HistoryGoneError` if history or the
        change index begins above `since`, `NotYetWrittenError` if `since` lies in the future.
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
        """The events of `(since, upto]` as Arrow record batches, made without a loop over rows.

        The schema is `kvstore.changes.batches.changes_schema`. Batches are in time order. A commit
        in several streams comes stream after stream: sort by `seq` for the order of its changes.
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
        prefix: bytes | None = None,
        max_age: AgeLike | None = None,
        batch_rows: int | None = None,
        batch_bytes: int | None = None,
    ) -> Feed:
        """A feed: every durable change once, in order, to the consumer called `name`.

        `start` begins the feed after a time, or after a `Position` that the consumer stored.
        `"now"` begins with the next change, `"oldest"` with the oldest change that is kept.
        `"state"` begins with the live rows at one time, in batches with `is_state` that are acked
        as all others, and then has each change after that time. Without `start` the feed continues
        after the last ack.

        `streams=(i, n)` makes this consumer worker i of n workers that share the feed; each worker
        gets whole streams, and the rows of the state whose changes it gets. If only the first
        worker passes `start`, all begin at one time. `images` and `expand` are as in `events`.

        The feed holds history above its last ack until it is dropped. A feed that falls behind
        further than `max_age` is lost when GC wants the space. A batch has at most `batch_rows`
        events and about `batch_bytes` bytes (defaults in `kvstore.limits`). `span` or `prefix`
        chooses keys.

        Opening a feed fences its former consumer. Raises `UsageError` for an unknown feed without
        `start` and for more workers than streams; `HistoryGoneError` for a `start` below `since`
        or before a clear of keys in `span`.
        """
        return self.feeds.open(
            name,
            start,
            streams,
            images,
            expand,
            span=one_span(span, prefix),
            max_age=max_age,
            batch_rows=batch_rows,
            batch_bytes=batch_bytes,
        )

    def wait_beyond(
        self, upper: int, *, timeout: float | None = None, stop: Callable[[], bool] = lambda: False
    ) -> None:
        """Return once `self.upper` is above `upper`, `stop()` is true, or after `timeout` seconds.

        Nothing is polled: commits and `replication.wake` wake the call. Raises `ClosedError` when
        the store is closed.
        """
        upper = INTEGER.check("upper", upper)
        committer = self._committer
        committer.health.require()
        committer.frontiers.wait(
            upper,
            timeout=WAIT.check("timeout", timeout),
            stop=lambda: not committer.frontiers.is_sound or stop(),
        )
        committer.health.require()

    def changeset(self) -> Changeset:
        """A group of changes that is not atomic: `with store.changeset() as cs: ...`.

        Commits made inside the block, in this context, carry `cs.id`; blocks nest. A commit
        outside any block is a changeset of its own. An exception in the block takes no commit
        back.
        """
        self._require_open()
        return self._changesets.new()

    def epochs(self, since: TimeLike = 0) -> Iterator[Epoch]:
        """The epochs that closed above `since`: runs of changesets, with counts of their events."""
        self._require_open()
        return self._changesets.epochs(self._committer.to_time(since, name="since"))

    def force_quiescence(
        self, after: AgeLike | None = None, *, timeout: float | None = None
    ) -> Timestamp:
        """A time at which no changeset was half done.

        The result is the last such time if it is no longer ago than `after`. Otherwise new
        changesets wait until the open ones have ended; commits outside changesets do not wait.
        Raises `BusyError` if changesets are still open after `timeout` seconds (ten minutes by
        default), `UsageError` inside a changeset.
        """
        age = AGE.or_none.check("after", after)
        seconds = QUIESCENCE_WAIT_S if timeout is None else SECONDS.check("timeout", timeout)
        return self._changesets.force_quiescence(age, seconds)

    def reshard(self, streams: int) -> Generation:
        """Split the change index over `streams` streams from now on. One synced record.

        Consumers read the old streams to their end, then the new ones. No change comes twice.
        """
        integer(1, STREAMS_MAX).check("streams", streams)
        generations = self._parts.index.generations
        opened: list[Generation] = []

        def stage(batch: WriteBatch, opened_at: Timestamp) -> Callable[[], None]:
            opened.append(generations.stage_next(batch, opened_at, count=streams))
            return lambda: generations.publish(opened[0])

        self._committer.announce(stage, generations.reload)
        return opened[0]

    def generations(self) -> list[Generation]:
        """The generations of streams: which streams take which keys, and when. The last is open."""
        self._require_open()
        return list(self._parts.index.generations.all())

    # -- keeping ----------------------------------------------------------------------------

    def hold(
        self,
        name: str,
        at: TimeLike | None = None,
        max_age: AgeLike | None = None,
        *,
        durable: bool = True,
        kind: str = USER,
        address: str = "",
    ) -> Hold:
        """Keep history from `at` on until the hold is moved or released, even over restarts.

        A new hold stands at `at`, by default the newest complete time. Taking an existing hold
        fences its owner, and leaves the hold where it is unless `at` is given. A hold that falls
        behind further than `max_age` is invalidated when GC wants the space. A hold without
        `max_age` keeps history for ever, even after its purpose is gone. If not `durable`, the call
        saves an fsync, and a crash before the next `sync` undoes the hold. `kind` and `address` say
        in lists of holds what the hold is for: neither may contain a secret. Raises
        `HistoryGoneError` if `at` is below `since`.

        Example:

            stamp = store.put(b"k", b"old")
            store.put(b"k", b"new")
            with store.hold("report", at=stamp, max_age=timedelta(days=30)):
                store.gc(keep=timedelta(0))
                assert store.get(b"k", as_of=stamp) == b"old"
        """
        return self.holds.take(name, at, max_age, durable=durable, kind=kind, address=address)

    def drop_hold(self, name: str) -> HoldRecord:
        """Remove the hold `name`, whoever owns it: a remedy if its owner is gone for good.

        Returns the removed record. Its `cost_of_dropping` says what happens to an owner that is
        still there. Raises `UsageError` if there is no such hold.
        """
        return self.holds.drop(name)

    def gc(
        self,
        before: TimeLike | None = None,
        keep: AgeLike | None = None,
        *,
        compact: bool = False,
        progress: Callable[[int], None] | None = None,
    ) -> GcReport:
        """Give up history below `before`, or older than `keep`, and remove its versions.

        The run goes as far as holds and open readers allow, and invalidates holds over their
        budget. Costs what changed since the last run. The files shrink as RocksDB compacts them, or
        at once with `compact`, which rewrites the spans that lost versions. `progress` is called
        with the number of versions removed so far. An error that it raises ends the run; the next
        run continues there.
        """
        when = None if before is None else self._committer.to_time(before, name="before")
        age = AGE.or_none.check("keep", keep)
        return self._collector.collect(when, age, compact=compact, progress=progress)

    def clear_range(self, start: bytes, end: bytes, *, compact: bool = True) -> Timestamp:
        """Destroy the history of `start <= key < end` physically.

        Returns the time from which the span reads as empty; earlier reads of the span raise
        `HistoryGoneError`. Raises `HistoryHeldError`, with nothing done, while a hold or an open
        reader needs the history, and `UsageError` for a span that begins among the keys of tables;
        a span that only reaches them ends before them. Costs O(bytes of the span). With
        `compact=False` the cost does not depend on the span, and the space comes back as RocksDB
        compacts. RocksDB's MANIFEST can name destroyed keys that were bounds of its files until the
        store is opened next.
        """
        self._committer.require_commits()
        span = Span(start, end)
        if span.end is None:
            raise UsageError("clear_range needs an end", "pass the least key that is to be kept")
        require_plain(span.start)
        return self._clearing.clear(span.plain(), compact=compact)

    def checkpoint(self, path: str | Path) -> Timestamp:
        """Make a durable copy of the store as of now at `path`, which must not exist, and must not
        lie inside the store's directory.

        The copy is independent, and shares files with the store by hard links: on the same file
        system it takes milliseconds at any size. Returns the newest complete time of the copy.
        Raises `UsageError` on a RocksDB store that is open to read only; a client of its owner
        makes checkpoints.
        """
        target = require_place_of_copy(path, store=self.path)
        committer = self._committer
        with committer.lock:
            upper = committer.sync()
            self._engine.checkpoint(target)
        with storage_errors(str(target)):
            OS_FILES.sync_directory(str(target.absolute().parent))
        self.upkeep.merge_files()
        return Timestamp(upper - 1)

    def verify(self, *, progress: Callable[[int], None] | None = None) -> StoreReport:
        """Walk the whole store and list every broken invariant. Memory is bounded.

        Commits continue meanwhile, and GC waits. A live reader stands still meanwhile. Costs one
        pass over all entries, and a look-up for each change in the index. `progress` is called with
        the number of versions and changes checked so far.
        """
        from kvstore.verify import verify

        self._committer.health.require()
        with self._collector.paused():
            return verify(self._parts, progress=progress)

    def stats(self) -> dict[str, Any]:
        """Counts and sizes, by name: frontiers, records, estimates of the engine
        (`<family>_bytes`, `<family>_memtable_bytes`, `<family>_entries`).

        `held_by` describes the claims that keep history, oldest first. `gc_failures`,
        `gc_last_error` and `gc_failed_at_ns` tell failures of background collection; the same names
        with `tasks` tell failures of tasks. Costs microseconds; a store in memory counts its sizes,
        0.03 us per entry.
        """
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

    def metrics(self) -> Mapping[str, Metric]:
        """The metrics of this store, by name: counters since it was opened, gauges, histograms.

        `kvstore.metrics.DEFINITIONS` has the name, kind, unit, labels and meaning of each. See
        `kvstore.metrics.prometheus` and `kvstore.metrics.opentelemetry` for collectors. Costs as
        much as `stats`: tens of microseconds.
        """
        from kvstore.metrics import metrics_of

        return metrics_of(self._parts, self.stats(), self._tasks.sizes())

    @property
    def tasks(self) -> Tasks:
        """The queue of tasks on this store, which survives the process. It is opened at first use.

        The queue lies in the directory of the store; a checkpoint does not contain it.
        `kvstore.upkeep`, `bulk.tasks` and `backup.tasks` submit tasks and have their handlers.
        Raises as `Tasks.open`: the store works without its queue.
        """
        return self._tasks.open()

    # -- inside -----------------------------------------------------------------------------

    def _side(self, upto: Timestamp | None) -> Side:
        from kvstore.tables.joins import Side, stored_answers

        return Side(partial(stored_answers, self._parts, upto))

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
            since = self._committer.to_time(unchanged_since, name="unchanged_since")
        return self._conditional.write_if(
            writes, key, expected=expected, unchanged_since=since, durability=durability
        )

    def _require_open(self) -> None:
        if self._closed:
            raise ClosedError(self._committer.where)


def _past_rows(store: Store, transactions: Transactions, snapshot: Snapshot) -> PastRows:
    from kvstore.tables.sources import PastRows

    return PastRows(store, snapshot, transactions.catalogue)


def _table_rows(store: Store, transactions: Transactions, parts: Parts) -> StoreRows:
    from kvstore.tables.sources import StoreRows

    return StoreRows(store, transactions.catalogue, parts)


def _tidy(
    parts: Parts, transactions: Transactions, since: int, require_running: Callable[[], None]
) -> int:
    """Delete the index entries that imports into tables left behind; see `Tidying.run`."""
    if not parts.reserve.has_tables:  # the catalogue would bring the modules of tables
        return 0
    from kvstore.tables.indexes import Tidying

    begin = partial(transact, transactions.begin)
    return Tidying(parts, begin, transactions.catalogue).run(since, require_running)


def _finish(committer: Committer) -> None:
    with committer.lock, suppress(PoisonedError):  # the call that poisoned the engine has raised
        committer.finish()


def _pairs(chunk: tuple[list[bytes], list[bytes]]) -> Iterator[tuple[bytes, bytes]]:
    return zip(*chunk, strict=True)


_GET: Final = Store.get
"""The look-up as it is defined here: `Store.get` may be replaced later."""


# --------------------------------------------------------------------------------------------------
# Where the keys of a store lie: its files, and spans of about equal size for work in parallel.


class Layout:
    """The layout of the keys of one store. Reads the bounds of the files, never a row."""

    def __init__(self, engine: Engine, reserve: Reserve) -> None:
        self._engine, self._reserve = engine, reserve

    def require_importable(self, span: Span, *, is_encoded: bool, has_expiries: bool) -> None:
        """Raise `UsageError` unless an import may bring keys of `span`: plain keys, or rows and
        entries of tables that the store has. `is_encoded` tells that the import names the
        definitions that encoded its rows, `has_expiries` that it has records of expiries."""
        self._reserve.require_importable(span, is_encoded=is_encoded, has_expiries=has_expiries)

    def files(self) -> list[FileSpan]:
        """The files that hold versions, by the user keys they lie between."""
        return list(user_spans(self._engine.files()))

    def splits(
        self, count: int, span: Span | None = None, *, with_tables: bool = False
    ) -> list[Span]:
        """Cut `span` (default: all keys) into at most `count` pieces of about equal size.

        As a scan does, the pieces leave out the keys of tables unless the span begins among them,
        or `with_tables` is set. Rows that are not on file yet do not count.
        """
        integer(1, SCAN_PIECES_MAX).check("count", count)
        span = SPAN.check("span", span)
        return split_span(span if with_tables else self._reserve.narrow(span), self.files(), count)


# --------------------------------------------------------------------------------------------------
# Upkeep of one store: garbage collection in the background, and the rewriting of files.
#
# The durable forms of the same work, as tasks, are in `kvstore.upkeep`.


class Upkeep:
    """Keeps one store small."""

    def __init__(
        self, engine: Engine, committer: Committer, collector: Collector, clock: WallClock
    ) -> None:
        self._engine = engine
        self._committer = committer
        self._collector = collector
        self._failures = Failures("kvstore.retention.gc", clock)
        self._worker: GcWorker | None = None

    def start_gc(
        self, policy: GcPolicy, *, after_run: Callable[[GcReport], None] | None = None
    ) -> GcWorker:
        """Collect in the background until the store is closed, or a new policy replaces this.

        A run that fails, or `after_run` that raises, is logged (`kvstore.retention.gc`) and shown
        by `Store.stats`; the worker continues.
        """
        with suppress(PoisonedError):  # the worker of such a store ends, and tells so
            self._committer.require_writable()
        self._collector.require_running()
        instance(GcPolicy, hint="pass a GcPolicy").check("gc", policy)
        self.stop_gc()
        self._worker = GcWorker(policy, self._run, failures=self._failures, after_run=after_run)
        return self._worker

    def stop_gc(self) -> None:
        """End the collection in the background, and wait for a run that is under way."""
        if self._worker is not None:
            self._worker.stop()

    def compact(self, span: Span | None = None) -> None:
        """Rewrite the files of a span's versions (default: all versions). That frees the disk space
        of versions that GC and clears removed. Costs a read and a write of these files; reads and
        commits continue meanwhile."""
        self._committer.require_writable()
        span = SPAN.check("span", span)
        self._engine.compact(DATA, *span_bounds(span.start, span.end))

    def compact_index(self) -> None:
        """Rewrite the files of the change index and of range tombstones, as `compact`."""
        self._committer.require_writable()
        self._engine.compact(RANGES)
        self._engine.compact(CHANGES)

    def merge_files(self) -> None:
        """Merge one group of small files, if many lie together. Each opening and checkpoint
        ends with this call, and so does a pass that flushes the memtables."""
        self._aside("merging small files", lambda: next(self._engine.merges(), None))

    def remove_leftovers(self) -> None:
        """Remove the files that imports left a day ago or earlier, when their process was killed.
        Each opening ends with this call, because a store may have no other upkeep."""
        leftovers = self._collector.leftovers
        self._aside("removing leftovers", lambda: leftovers.remove_files(STALE_IMPORT_S))

    def _aside(self, what: str, work: Callable[[], object]) -> None:
        """Do `work` after a call has done its own. A failure of `work` is noted, and the call
        succeeds."""
        try:
            work()
        except ClosedError:
            pass  # another thread closed the store meanwhile
        except KVStoreError as error:
            self._failures.note(what, error, delays=False)

    def watch(self, work: str, failures: Failures) -> None:
        """Have the metrics count the failures of `work` that another package does in the
        background."""
        self._committer.meters.watch(work, failures)

    def figures(self) -> dict[str, Any]:
        """The figures of `Store.stats` on garbage collection in the background."""
        runs = 0 if self._worker is None else self._worker.runs
        return {"gc_runs": runs, **self._failures.figures("gc")}

    def _run(self, policy: GcPolicy) -> GcReport:
        return self._collector.collect(keep=policy.keep, compact=policy.compact)


# --------------------------------------------------------------------------------------------------
# The task queue of a store, opened at its first use.
#
# The queue lies in a directory inside the store's directory. The engine ignores that name.
#
# Invariants
# 1. A store that never uses its queue has no directory for it.
# 2. Once closed, the queue is not opened again.

TASKS_DIRECTORY: Final = "tasks"


class LazyTasks:
    """Opens the task queue of one store at the first call, and closes it with the store."""

    def __init__(self, path: Path | None, committer: Committer, clock: WallClock) -> None:
        self._path = None if path is None else path / TASKS_DIRECTORY
        self._committer = committer
        self._clock = clock
        self._failures = Failures("kvstore.tasks", clock)
        self._lock = threading.Lock()
        self._is_closed = False
        self._tasks: Tasks | None = None

    def open(self) -> Tasks:
        """The queue. Raises as `Tasks.open`, and `UsageError` where the store takes no writes."""
        from kvstore.tasks import Tasks  # and the journal, which no other part of a store needs

        with self._lock:
            self._committer.require_writable()
            if self._is_closed:
                raise ClosedError("the task queue")
            if self._tasks is None:
                self._tasks = Tasks.open(self._path, clock=self._clock, failures=self._failures)
            return self._tasks

    def close(self) -> None:
        """Close the queue, if it was opened."""
        with self._lock:
            self._is_closed = True
            if self._tasks is not None:
                self._tasks.close()

    def sizes(self) -> Mapping[str, QueueSize]:
        """How many tasks each queue has; none where this process has not opened the queues."""
        with self._lock:
            if self._tasks is None or self._is_closed:
                return {}
            return self._tasks.sizes()

    def figures(self) -> dict[str, Any]:
        """Failures of the threads that work on tasks, for `Store.stats`."""
        return self._failures.figures("tasks")
