"""A replica: a store that takes the versions of another, with their timestamps, and no others.

    meta record "replica" := {"source": store id, "pending": timestamp, 0 where nothing is}

Its history is the source's, version for version, so that a read as of a time gives the same in
both. Small windows are written commit by commit, each engine batch with the `upper` it completes,
and go into the change index. A large one is ingested as sorted files: nothing of it shows until
its `upper` is written; the change index begins anew above it, as in a restored store.

Invariants
1. A replica's `upper` moves only to where its source's history is complete in it: all that is
   below it is here. It does not follow the clock.
2. `pending` is durable before a file of its window is ingested, and goes with the batch that
   moves `upper` above it. Entries above `upper` exist only while it is set.
3. A promoted store has no entry above its `upper`, and commits above all it has.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any, Final

from kvstore.changes.index import ChangeIndex, FullEntry
from kvstore.clock import Timeline, WallClock
from kvstore.commit import Committer, Durability, Stage
from kvstore.engine.api import DATA, WriteBatch, chunks
from kvstore.errors import UsageError
from kvstore.meta import INDEX_FLOOR, UPPER, Meta, timestamp_of
from kvstore.mvcc import RangeTombstone, Versions, WriteSet
from kvstore.mvcc.columns import KeyColumns
from kvstore.mvcc.write import stage, stage_tombstones
from kvstore.timestamp import Timestamp

REPLICA: Final = "replica"


def stage_replica(meta: Meta, batch: WriteBatch, source: str, *, pending: int = 0) -> None:
    """Add the record that makes a store a replica of `source` to an engine batch."""
    meta.stage(batch, REPLICA, {"source": source, "pending": pending})


class ReplicaCommitter(Committer):
    """The frontiers of a store that follows another. Refuses every commit until promoted."""

    def __init__(
        self,
        versions: Versions,
        index: ChangeIndex,
        timeline: Timeline,
        *args: Any,
        clock: WallClock,
        **kwargs: Any,
    ) -> None:
        super().__init__(versions, index, timeline, *args, **kwargs)
        self._clock = clock
        record = self._meta.read(REPLICA)
        assert record is not None, "opening looked for it"
        self._source: str | None = record.text("source")
        self._pending: int = timestamp_of(record, "pending")

    @property
    def source(self) -> str | None:
        """The id of the store it follows; None once it is promoted."""
        return self._source

    @property
    def last_applied(self) -> int:
        """The newest of the source's commits that came one by one; 0: none did."""
        return self._index.last()

    @property
    def coming(self) -> int:
        return self._pending

    # -- what a replica refuses -------------------------------------------------------------

    def require_commits(self) -> None:
        if self._source is not None:
            raise UsageError(
                f"{self._where} is a replica of store {self._source}",
                "write to its source, or promote it",
            )
        super().require_commits()

    def commit_staged(
        self,
        stage_entries: Stage,
        *,
        durability: Durability | None = None,
        check: Callable[[], None] | None = None,
    ) -> Timestamp:
        self.require_commits()
        return super().commit_staged(stage_entries, durability=durability, check=check)

    def announce(self, stage_records: Stage) -> Timestamp:
        self.require_commits()
        return super().announce(stage_records)

    def close_upto_now(self) -> Timestamp:
        return super().close_upto_now() if self._source is None else self.upper

    # -- following --------------------------------------------------------------------------

    def apply(self, commits: Sequence[tuple[int, WriteSet]], upper: int) -> None:
        """Write the source's commits of `[self.upper, upper)`, and complete the time below it.

        Raises `UsageError`, with nothing written, unless their times ascend within the window.
        """
        with self.lock:
            self._require_window([timestamp for timestamp, _ in commits], upper)
            self._apply(commits, upper)
        self.wake()

    def _apply(self, commits: Sequence[tuple[int, WriteSet]], upper: int) -> None:
        with self.poisoning():
            batch = self._engine.batch()
            capture, index = self.capture, self._index
            full: list[FullEntry] = []
            for timestamp, writes in commits:
                writes.seal()
                index.changeset, index.staged = capture.begin_commit(), 0
                stage(writes, timestamp, batch, self._engine.families)
                full += index.stage(writes, timestamp, batch)
                capture.finish_commit(index.changeset[1], index.staged, timestamp + 1)
            if capture.is_due:
                capture.stage(batch)
            self._meta.stage_timestamp(batch, UPPER, upper)

            def publish() -> None:
                if full:
                    self._guarded(index.complete, full)
                tombstones = [found for t, writes in commits for found in writes.tombstones(t)]
                self._versions.publish_ranges(tombstones)
                for timestamp, writes in commits:
                    self.recent.add(timestamp, writes.points.keys(), writes.ranges)

            self._show(batch, publish, Timestamp(upper))

    def begin_window(self, upto: int) -> None:
        """Say durably that sorted files with times in `[upper, upto]` are coming."""
        with self.lock:
            self._require_window([], upto + 1)
            assert self._source is not None
            source, pending = self._source, max(upto, self._pending)
            self.write_meta(lambda batch: stage_replica(self._meta, batch, source, pending=pending))
            self._pending = pending

    def ingest(self, files: Sequence[Path]) -> None:
        """Take sorted files of `data` entries of the window that was begun; nothing shows."""
        with self.lock:
            assert self._pending
            self._guarded(lambda: self._engine.ingest(files))

    def end_window(
        self,
        tombstones: Sequence[RangeTombstone],
        upto: int,
        on_index_floor: Callable[[int], None],
    ) -> None:
        """Show the window `[upper, upto]`: all its entries are here. Durable.

        `on_index_floor` is told where the change index begins anew before a reader can see that
        anything is there which the index has not.
        """
        with self.lock:
            self._require_window([], upto + 1)
            assert self._source is not None
            assert self._pending <= upto
            batch = self._engine.batch()
            stage_tombstones(tombstones, batch, self._engine.families)
            self._meta.stage_timestamp(batch, UPPER, upto + 1)
            self._meta.stage_timestamp(batch, INDEX_FLOOR, upto)
            stage_replica(self._meta, batch, self._source)

            def publish() -> None:
                on_index_floor(upto)
                self._versions.publish_ranges(list(tombstones))
                self.recent.add(upto, (), [(b"", None)])  # any key may be in the files

            self._show(batch, publish, Timestamp(upto + 1))
            self._pending = 0
            self._sync_upto(self.upper)
        self.wake()

    def promote(self) -> Timestamp:
        """Become an ordinary store. Removes what a window that was not ended left: one pass."""
        with self.lock:
            self.require_healthy()
            if self._source is None:
                return self.upper
            if self._pending:
                self._remove_above(self.upper - 1, upto=self._pending)
                self._guarded(self._engine.sync)
            self.write_meta(lambda batch: self._meta.stage_delete(batch, REPLICA))
            self._timeline = Timeline(self._clock, last=self.upper - 1)
            self._source, self._pending = None, 0
            self._sync_upto(self.upper)
            return self.upper

    # -- inside -----------------------------------------------------------------------------

    def _require_window(self, timestamps: list[int], upper: int) -> None:
        self.require_healthy()
        if self._source is None:
            raise UsageError(f"{self._where} was promoted", "it follows nothing any more")
        bounds = [self.upper - 1, *timestamps, upper]
        if any(later <= earlier for earlier, later in pairwise(bounds)):
            raise UsageError(
                f"commits at {timestamps[:3]} up to {upper} do not follow {int(self.upper)}",
                "apply windows in order, each once",
            )

    def _remove_above(self, timestamp: int, *, upto: int) -> None:
        """Remove point versions in `(timestamp, upto]`. No range tombstone is there yet."""
        for doomed in self._entries_in(timestamp, upto):
            batch = self._engine.batch()
            for key in doomed:
                batch.delete(key, self._engine.families[DATA])
            self._guarded(self._engine.write, batch)

    def _entries_in(self, since: int, upto: int) -> Iterator[list[bytes]]:
        for keys, _ in chunks(self._engine.cursor(DATA)):
            times = KeyColumns(keys).times
            places = ((times > since) & (times <= upto)).nonzero()[0]
            if len(places):
                yield [keys[place] for place in places]


class Replica:
    """The writing end of a replica: what `backup.replicate` drives. `store.replica()` gives it."""

    def __init__(
        self, committer: ReplicaCommitter, *, on_index_floor: Callable[[int], None]
    ) -> None:
        self._committer = committer
        self._on_index_floor = on_index_floor

    @property
    def source(self) -> str | None:
        """The id of the store it follows; None once it is promoted."""
        return self._committer.source

    @property
    def upper(self) -> Timestamp:
        """Where it goes on: all of the source's history below it is here."""
        return self._committer.upper

    @property
    def last_applied(self) -> int:
        """See `ReplicaCommitter.last_applied`."""
        return self._committer.last_applied

    def apply(self, commits: Sequence[tuple[int, WriteSet]], upper: int) -> None:
        """See `ReplicaCommitter.apply`. Not durable until `sync`."""
        self._committer.apply(commits, upper)

    def ingest(
        self, files: Iterable[Path], tombstones: Callable[[], list[RangeTombstone]], upper: int
    ) -> None:
        """Take a large window as sorted files, which are moved in, one after the other.

        `tombstones` is asked when the files are at their end. Durable when it returns.
        """
        self._committer.begin_window(upper - 1)
        for file in files:
            self._committer.ingest([file])
        self._committer.end_window(tombstones(), upper - 1, self._on_index_floor)

    def sync(self) -> Timestamp:
        """Make all that was applied durable; returns `upper`."""
        return self._committer.make_durable()

    def promote(self) -> Timestamp:
        """Make the store an ordinary one, which takes writes; returns the `upper` it begins at."""
        return self._committer.promote()
