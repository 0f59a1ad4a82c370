"""Write sets on their way: entries of an engine batch first, then what readers must be told.

Invariants
1. The versions of a write set and its change entries go into one batch: neither is there without
   the other.
2. Nothing is published before its batch is written.
"""

from __future__ import annotations

from collections.abc import Sequence

from kvstore.changes.index import ChangeIndex, FullEntry
from kvstore.commit.durability import Health
from kvstore.engine.api import WriteBatch
from kvstore.mvcc.versions import Versions
from kvstore.mvcc.write import WriteSet, stage
from kvstore.recent import RecentCommits


class Writes:
    """Stages and publishes the write sets of one store. The caller holds the commit lock."""

    def __init__(
        self, versions: Versions, index: ChangeIndex, recent: RecentCommits, health: Health
    ) -> None:
        self.versions = versions
        self._engine = versions.engine
        self.index = index
        self._recent = recent
        self._health = health

    def stage(
        self, batch: WriteBatch, writes: WriteSet, timestamp: int, changeset: tuple[int, int]
    ) -> tuple[int, list[FullEntry]]:
        """Add a sealed write set to a batch.

        Returns its events, and the entries that `publish` writes once the batch is written.
        """
        stage(batch, writes, timestamp, self._engine.families)
        full = self.index.stage(batch, writes, timestamp, changeset)
        return len(writes.points) + len(writes.ranges), full

    def publish(self, commits: Sequence[tuple[int, WriteSet]], full: Sequence[FullEntry]) -> None:
        """Tell readers and transactions of write sets that are stored, each with its time."""
        if full:
            self._health.guarded(self.index.complete, full)
        tombstones = []
        for timestamp, writes in commits:
            if writes.ranges:
                tombstones += writes.tombstones(timestamp)
            self._recent.add(timestamp, writes.points, writes.ranges)
        if tombstones:
            self.versions.publish_ranges(tombstones)
