"""Copies of a store's history: the reads that make them, and the writing end of a replica.

A backup and a replica read their source by `Replication`. A store that was made as a replica takes
its source's history by `Replication.replica`, until it is promoted.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from typing import NamedTuple, TypeAlias

import pyarrow as pa

from kvstore.changes import Change, Revisions
from kvstore.errors import HistoryGoneError, UsageError
from kvstore.history import History
from kvstore.mvcc import RangeTombstone
from kvstore.mvcc.export import VersionColumns
from kvstore.parts import Parts
from kvstore.replica import Replica
from kvstore.span import Span
from kvstore.timestamp import TimeLike, Timestamp


class SmallExport(NamedTuple):
    """A window with few changes.

    `changes` are record batches of `kvstore.changes.columns.version_changes_schema` in time order.
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
        # Looked at last: GC moves `since` before it trims the index.
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
                "pass a replica, or a path at which nothing is: backup.replicate makes a replica",
            )
        return Replica(self._parts)

    def promote(self) -> Timestamp:
        """Make a replica an ordinary store; returns the `upper` its commits begin at.

        Later changes of its source are not in it, and never will be. Raises as `replica`.
        """
        return self.replica().promote()
