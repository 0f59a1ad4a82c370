"""Copies of a store's history: the reads that make them, and the store that takes versions with
their timestamps.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Final, NamedTuple, TypeAlias

import pyarrow as pa

from kvstore.base.span import Span
from kvstore.base.timestamp import TimeLike, Timestamp
from kvstore.changes import Change, Revisions
from kvstore.engine.api import DATA, WriteBatch, chunks
from kvstore.errors import HistoryGoneError, UsageError
from kvstore.feeds.history import History
from kvstore.mvcc import RangeTombstone, WriteSet
from kvstore.mvcc.meta import INDEX_FLOOR, UPPER, Meta, optional_timestamp_of, timestamp_of
from kvstore.mvcc.passes import KeyColumns, VersionColumns
from kvstore.mvcc.write_set import stage_tombstones
from kvstore.timeline.frontiers import OPEN, Policy, replica_policy
from kvstore.timeline.parts import Parts

# --------------------------------------------------------------------------------------------------
# A replica: a store that takes the versions of another, with their timestamps, and no others.
#
#     meta record "replica" := {"source": store id, "pending": timestamp, 0 where nothing is,
#                               "newest": timestamp of the newest commit that came in files}
#
# Its history is the source's, version for version, so that a read as of a time gives the same in
# both. Small windows are written commit by commit, each engine batch with the `upper` it completes,
# and go into the change index. A large one is ingested as sorted files: nothing of it shows until
# its `upper` is written; the change index begins anew above it, as in a restored store.
#
# Invariants
# 1. A replica's `upper` moves only to where its source's history is complete in it: everything
#    below it is here. It does not follow the clock.
# 2. `pending` is durable before a file of its window is ingested, and goes with the batch that
#    moves `upper` above it. Entries above `upper` exist only while it is set.
# 3. A promoted store has no entry above its `upper`, and commits above all it has.

_REPLICA: Final = "replica"


class FirstCopy(NamedTuple):
    """The id of the store that a new replica follows. `newest` gives the time of the newest commit
    in the files of the replica, once they are written."""

    source: str
    newest: Callable[[], int]


def stage_replica(
    batch: WriteBatch, meta: Meta, source: str, *, pending: int = 0, newest: int
) -> None:
    """Add the record that makes a store a replica of `source` to an engine batch."""
    meta.stage(batch, _REPLICA, {"source": source, "pending": pending, "newest": newest})


def stored_policy(meta: Meta, where: str) -> Policy:
    """The policy that a store's records ask for: the policy of a replica, or `OPEN`."""
    record = meta.read(_REPLICA)
    if record is None:
        return OPEN
    return replica_policy(where, record.text("source"), coming=timestamp_of(record, "pending"))


class Replica:
    """The writing end of a replica, which `backup.replicate` drives. See `Replication.replica`."""

    def __init__(self, parts: Parts) -> None:
        self._versions, self._index, self._committer = parts.versions, parts.index, parts.committer
        self._reads, self._reserve = parts.reads, parts.reserve
        self._engine = parts.versions.engine
        self._meta = Meta(self._engine)

    @property
    def source(self) -> str | None:
        """The id of the store it follows; None once it is promoted."""
        return self._committer.policy.source

    @property
    def upper(self) -> Timestamp:
        """Where the next window begins: all of the source's history below it is here."""
        return self._committer.upper

    @property
    def last_applied(self) -> int:
        """The newest of the source's commits that are here; 0: there is none."""
        return max(self._index.last(), self._newest_in_files())

    def apply(self, commits: Sequence[tuple[int, WriteSet]], upper: int) -> None:
        """Write the source's commits of `[self.upper, upper)`, and complete the time below it.

        Not durable until `sync`. Raises `UsageError`, with nothing written, unless their times
        ascend within the window.
        """
        with self._committer.lock:
            self._require_window([timestamp for timestamp, _ in commits], upper)
            self._committer.apply(commits, upper)
            if not self._reserve.knows_all:  # the window may bring the first one
                self._reserve.look()

    def ingest(
        self,
        files: Iterable[Path],
        tombstones: Callable[[], list[RangeTombstone]],
        newest: Callable[[], int],
        upper: int,
    ) -> None:
        """Take a large window as sorted files, which are moved in, one after the other.

        `tombstones` and `newest`, the time of the window's newest commit, are asked when the files
        are at their end. Durable when it returns.
        """
        self._begin_window(upper - 1)
        for file in files:
            with self._committer.lock:
                assert self._committer.policy.coming
                self._committer.health.guarded(self._engine.ingest, [file])
        self._end_window(tombstones(), newest(), upper - 1)

    def sync(self) -> Timestamp:
        """Make every applied window durable; returns `upper`."""
        return self._committer.make_durable()

    def promote(self) -> Timestamp:
        """Make the store an ordinary one, which takes writes; returns the `upper` it begins at.

        Removes the entries of a window that was not ended: one pass.
        """
        committer = self._committer
        with committer.lock:
            committer.health.require()
            if committer.policy.source is not None:
                if committer.policy.coming:
                    self._remove_above(committer.upper - 1, upto=committer.policy.coming)
                    committer.health.guarded(self._engine.sync)
                committer.write_meta(
                    lambda batch: self._meta.stage_delete(batch, _REPLICA),
                    partial(committer.adopt, OPEN),
                )
                committer.sync_all()
            return committer.upper

    # -- inside -----------------------------------------------------------------------------

    def _newest_in_files(self) -> int:
        record = self._meta.read(_REPLICA)
        return 0 if record is None else optional_timestamp_of(record, "newest") or 0

    def _begin_window(self, upto: int) -> None:
        """Say durably that sorted files with times in `[upper, upto]` are coming."""
        committer = self._committer
        with committer.lock:
            source = self._require_window([], upto + 1)
            pending = max(upto, committer.policy.coming)
            coming = replica_policy(committer.where, source, coming=pending)
            newest = self._newest_in_files()
            committer.write_meta(
                lambda batch: stage_replica(
                    batch, self._meta, source, pending=pending, newest=newest
                ),
                partial(committer.adopt, coming),
            )

    def _end_window(self, tombstones: Sequence[RangeTombstone], newest: int, upto: int) -> None:
        """Show the window `[upper, upto]`: all its entries are here. Durable."""
        committer = self._committer
        with committer.lock:
            source = self._require_window([], upto + 1)
            assert committer.policy.coming <= upto
            batch = self._engine.batch()
            stage_tombstones(batch, tombstones, self._engine.families)
            self._meta.stage_timestamp(batch, UPPER, upto + 1)
            self._meta.stage_timestamp(batch, INDEX_FLOOR, upto)
            stage_replica(batch, self._meta, source, newest=max(newest, self._newest_in_files()))
            with committer.written(batch, Timestamp(upto + 1)):
                self._reads.raise_index_floor(upto)
                self._versions.publish_ranges(list(tombstones))
                self._reserve.look()
                committer.recent.add(upto, {}, [(b"", None)])  # any key may be in the files
            committer.adopt(replica_policy(self._committer.where, source))
            committer.sync_all()

    def _require_window(self, timestamps: list[int], upper: int) -> str:
        """The id of the source, if a window of these commits may come next."""
        self._committer.health.require()
        source = self.source
        if source is None:
            raise UsageError(f"{self._committer.where} was promoted", "it follows nothing any more")
        bounds = [self.upper - 1, *timestamps, upper]
        if any(later <= earlier for earlier, later in pairwise(bounds)):
            raise UsageError(
                f"commits at {timestamps[:3]} up to {upper} do not follow {int(self.upper)}",
                "apply windows in order, each once",
            )
        return source

    def _remove_above(self, timestamp: int, *, upto: int) -> None:
        """Remove point versions in `(timestamp, upto]`. No range tombstone is there yet."""
        for doomed in self._entries_in(timestamp, upto):
            batch = self._engine.batch()
            for key in doomed:
                batch.delete(key, self._engine.families[DATA])
            self._committer.health.guarded(self._engine.write, batch)

    def _entries_in(self, since: int, upto: int) -> Iterator[list[bytes]]:
        for keys, _ in chunks(self._engine.cursor(DATA)):
            times = KeyColumns(keys).times
            places = ((times > since) & (times <= upto)).nonzero()[0]
            if len(places):
                yield [keys[place] for place in places]


# --------------------------------------------------------------------------------------------------
# Copies of a store's history: the reads that make them, and the writing end of a replica.
#
# A backup and a replica read their source by `Replication`. A store that was made as a replica
# takes its source's history by `Replication.replica`, until it is promoted.


class SmallExport(NamedTuple):
    """A window with few changes.

    `changes` are record batches of `kvstore.changes.batches.version_changes_schema` in time order.
    """

    whole_since: int
    changes: list[pa.RecordBatch]


class PassExport(NamedTuple):
    """A window that one pass over the store reads: its point versions by key, and its range
    tombstones."""

    whole_since: int
    columns: Iterator[VersionColumns]
    tombstones: list[RangeTombstone]


Export: TypeAlias = "SmallExport | PassExport"


class Replication:
    """The reads from which copies of one store are made, and the store's own role as a replica."""

    def __init__(self, parts: Parts, history: History) -> None:
        self._parts = parts
        self._versions, self._pins, self._reads = parts.versions, parts.pins, parts.reads
        self._history = history

    # -- of a source ------------------------------------------------------------------------

    def versions(
        self,
        *,
        since: TimeLike | None,
        upto: TimeLike,
        revisions: Revisions = "all",
        span: Span | None = None,
    ) -> Iterator[Change]:
        """The revisions in `(since, upto]` by key, in `span` or of all keys, tables included.

        With `since=None` these are all kept revisions, in one pass over the store. They give the
        state at the store's `since` and at every later time, and not every earlier state.
        """
        if since is None:
            return self._history.kept(upto)
        return self._history.changes(since, upto, span=span or Span(), revisions=revisions)

    def export(self, *, since: TimeLike | None, upto: TimeLike, span: Span | None = None) -> Export:
        """All revisions in `(since, upto]` in the form that is fastest to copy.

        `since=None` exports everything that is kept; the export is whole from its `whole_since` on.
        A window that the change index shows to be small comes as changes. Any other window comes as
        columns by key, from one pass.
        A `span` cuts such a pass into pieces: a piece has the columns of the keys in its span, and
        the range tombstones that start there, whole. Raises `HistoryGoneError` if `since` lies
        below the kept history.
        """
        reads, whole = self._reads, span or Span()
        high = reads.at(upto)
        if since is None:
            columns, tombstones = self._versions.export(whole, since=0, upto=high)
            # The pass shows the entries of this moment, even if GC or a clear removes them later.
            return PassExport(reads.whole_since, columns, tombstones)
        low = self._parts.committer.to_time(since, name="since")
        pin = self._pins.new()
        try:
            # Without a pin, a large value that a clear takes meanwhile would look damaged.
            self._pins.keep(pin, low, kind="export")
            reads.require_kept(Span(), low)
            by_index = low >= reads.indexed_since and whole == Span()
            with reads.watched(Span(), low):  # another process does not see the pin
                few = self._history.column_reader.few(since=low, upto=high) if by_index else None
                if few is not None:
                    return SmallExport(low, few)
                return PassExport(low, *self._versions.export(whole, since=low, upto=high))
        finally:
            self._pins.let_go(pin, None)

    def has_commit(self, at: TimeLike) -> bool | None:
        """Whether there was a commit at `at`; None where the change index does not reach back.

        Serves owners of a copy of the history: a store that was put back from an older copy of
        itself lacks commits that they have. One seek per stream.
        """
        time = self._parts.committer.to_time(at, name="at")
        if time and any(self._parts.index.headers(since=time - 1, upto=time)):
            return True
        # Read `indexed_since` last: GC raises it before it trims entries.
        return None if time <= self._reads.indexed_since else False

    def may_have_commits(self, since: int, upto: int) -> bool:
        """Whether there may be a commit in `(since, upto]`: there is one, or the change index does
        not reach back. One seek per stream."""
        return self._parts.oldest_lacking(since, upto) is not None

    def first_change(self, since: int, upto: int) -> Timestamp | None:
        """The time of the oldest commit in `(since, upto]` that changed a key, as far back as the
        change index reaches.

        Serves owners of a copy of the history that has no commit in this window. One seek per
        stream, and a look at each commit that is found before one with a change.
        """
        low = max(since, self._reads.indexed_since)
        high = min(upto, self._parts.committer.frontiers.upper - 1)
        for at, *_ in self._parts.index.headers(since=low, upto=high):
            with suppress(HistoryGoneError):  # a span was cleared meanwhile, or history given up
                if any(self._history.changes(at - 1, at, span=Span())):
                    return Timestamp(at)
        return None

    def newest_change(self, below: int) -> tuple[Timestamp, bytes] | None:
        """The newest commit below the time `below` that changed a key, and such a key; None where
        the change index does not reach back to one. Costs as `first_change`."""
        while True:
            at = self._parts.index.last(below=below)
            if at <= self._reads.indexed_since:
                return None
            with suppress(HistoryGoneError):
                for change in self._history.changes(at - 1, at, span=Span()):
                    return Timestamp(at), change.key
            below = at

    def has_change(self, at: int, key: bytes) -> bool | None:
        """Whether the commit at `at` changed `key`; None where the history is gone."""
        with suppress(HistoryGoneError):
            return any(self._history.changes(at - 1, at, span=Span(key, key + b"\x00")))
        return None

    def range_deletes(
        self, since: TimeLike, upto: TimeLike, span: Span, revisions: Revisions = "all"
    ) -> list[Change]:
        """The range deletes that `Store.changes` gives for `span`, each whole. Reads no row.

        Serves readers of the window in pieces: `changes` cuts range deletes to each piece.
        """
        low, high = self._parts.committer.to_time(since, name="since"), self._reads.at(upto)
        if low == 0 and revisions == "latest":
            return []  # that window is the state at `upto`, without deletions
        found = self._versions.view.fragments.tombstones(
            span, since=low, upto=high, latest=revisions == "latest"
        )
        return [Change(Timestamp(t), "delete_range", start, end, None) for start, end, t in found]

    def wake(self) -> None:
        """Have every thread in `Store.wait_beyond` look at its `stop` again."""
        self._parts.committer.frontiers.wake()

    # -- of a replica -----------------------------------------------------------------------

    @property
    def is_replica(self) -> bool:
        """Whether the store follows another, and refuses writes of its own until `promote`."""
        return self._parts.committer.policy.source is not None

    def replica(self) -> Replica:
        """The writing end of a replica. Raises `UsageError` if this is an ordinary store."""
        committer = self._parts.committer
        committer.health.require()
        if committer.policy.source is None:
            raise UsageError(
                f"{committer.where} is no replica",
                "pass a replica; `kvstore backup replicate` makes one at a path where nothing is",
            )
        return Replica(self._parts)

    def promote(self) -> Timestamp:
        """Make a replica an ordinary store; returns the `upper` its commits begin at.

        Later changes of its source are not in it, and never will be. Raises as `replica`.
        """
        return self.replica().promote()
