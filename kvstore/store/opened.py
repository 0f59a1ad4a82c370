"""An open store: its parts, its frontiers, its end, and how a read finds its time."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from functools import cached_property
from pathlib import Path
from typing import TypeVar

from typing_extensions import Self

from kvstore.background import Failures
from kvstore.changes import ChangeIndex, ChangeReader
from kvstore.changes.columns import ColumnReader
from kvstore.changes.expand import EventReader
from kvstore.changesets import Changesets
from kvstore.clears import Clears
from kvstore.clock import WallClock
from kvstore.commit import Committer
from kvstore.engine import Engine
from kvstore.engine.loose import Teller, told_once
from kvstore.engine.rocks import RocksEngine
from kvstore.errors import ClosedError
from kvstore.feeds import Feeds
from kvstore.forks import own
from kvstore.gc import Clearing, Collector, GcWorker
from kvstore.holds import Holds
from kvstore.imports import Imports
from kvstore.meta import FORMAT, INDEX_FLOOR, Meta
from kvstore.mvcc import Versions
from kvstore.parts import Parts
from kvstore.scanners import Scanners
from kvstore.span import Span
from kvstore.tasks import Tasks
from kvstore.timestamp import TimeLike, Timestamp, to_timestamp
from kvstore.txn import Conditional, Transactions

T = TypeVar("T")


class Opened:
    """What all of a store stands on: its parts and frontiers, and the time of a read."""

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
        # A memory engine keeps no RocksDB database open: that would concern forks.
        self._teller = Teller()
        tell = self._teller.told if isinstance(engine, RocksEngine) else told_once
        self.imports = Imports(versions, index, committer, tell)
        self._changes = ChangeReader(versions, index, self.imports.spans_of)
        self._holds = Holds(self._meta, committer)
        self._changesets = Changesets(self._meta, committer)
        self._clears = Clears(self._meta)
        committer.raise_floor(self._clears.newest)
        parts = Parts(versions, index, committer, self._holds, self.imports, self._clears)
        self._parts = parts
        self._collector = Collector(parts, path)
        self._gc_worker: GcWorker | None = None
        self._gc_failures = Failures("kvstore.gc", clock)
        self._tasks_failures = Failures("kvstore.tasks", clock)
        self._scanners = Scanners()
        self._clearing = Clearing(parts)
        self._conditional = Conditional(versions, committer, require_kept=self._require_kept)
        self._transactions = Transactions(parts)
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
            require_kept=self._require_kept,
        )
        self._tasks: Tasks | None = None
        self._tasks_lock = threading.Lock()
        self._closed = False
        own(self, f"the store at {path}" if path else "the store in memory", closed="_closed")

    @property
    def since(self) -> Timestamp:
        """The oldest readable time."""
        return self._committer.since

    @property
    def whole_since(self) -> Timestamp:
        """The oldest time at which all of the store is readable: `since`, or the newest clear."""
        return Timestamp(max(self._committer.since, self._clears.newest))

    @property
    def indexed_since(self) -> Timestamp:
        """The oldest time that events and feeds can begin at: `since`, or that of a restore, which
        brings back the versions and not the change index. `changes` reads those before as well."""
        return Timestamp(max(self._committer.since, self._index_floor))

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
        record = self._meta.read(FORMAT)
        assert record is not None, "opening wrote it"
        return record.hexed("store_id").hex()

    def now(self) -> Timestamp:
        """The time now, on this store's timeline."""
        return self._committer.now()

    def sync(self) -> Timestamp:
        """Complete the time until now and make all of it durable; returns `upper`. One fsync."""
        return self._live().sync()

    def close(self) -> None:
        """Make everything durable and let go. Repeatable; scans still open raise `ClosedError`."""
        if self._closed:
            return
        self._collector.require_outside()
        self._closed = True
        with ExitStack() as last:  # whatever fails, the engine is closed
            last.callback(self._engine.close)
            last.callback(self._scanners.close)
            last.callback(self._teller.close)
            last.callback(self._finish)
            with self._tasks_lock:
                if self._tasks is not None:
                    self._tasks.close()

    def __enter__(self) -> Self:
        self._live()
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # -- inside -----------------------------------------------------------------------------

    def _finish(self) -> None:
        """End what runs in the background, then make everything durable."""
        self._collector.stop()
        if self._gc_worker is not None:
            self._gc_worker.stop()
        with self._committer.lock:
            self._committer.finish()
        self._changesets.wake()

    def _live(self) -> Committer:
        if self._closed:
            raise ClosedError(f"the store at {self.path}" if self.path else "the store in memory")
        return self._committer

    def _raise_index_floor(self, timestamp: int) -> None:
        self._index_floor = self._feeds.index_floor = timestamp

    def _require_live(self) -> None:
        self._live().require_healthy()

    def _at(self, as_of: TimeLike | None) -> int:
        committer = self._committer
        if self._closed or not committer.is_healthy:
            self._live().require_healthy()
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
        holds = self._holds  # in a forked child, which ends the pass, the store has no fields
        pin = holds.new_pin()
        try:
            holds.pin(as_of, pin, kind="pass over changes")
            self._clears.require(span, as_of)
            yield from open_pass()
        finally:
            holds.let_go(pin, None)
