"""A replica: a store that takes the versions of another, with their timestamps, and no others.

    meta record "replica" := {"source": store id, "pending": timestamp, 0 where nothing is,
                              "newest": timestamp of the newest commit that came in files}

Its history is the source's, version for version, so that a read as of a time gives the same in
both. Small windows are written commit by commit, each engine batch with the `upper` it completes,
and go into the change index. A large one is ingested as sorted files: nothing of it shows until
its `upper` is written; the change index begins anew above it, as in a restored store.

Invariants
1. A replica's `upper` moves only to where its source's history is complete in it: everything below
   it is here. It does not follow the clock.
2. `pending` is durable before a file of its window is ingested, and goes with the batch that
   moves `upper` above it. Entries above `upper` exist only while it is set.
3. A promoted store has no entry above its `upper`, and commits above all it has.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Final, NamedTuple

from kvstore.commit import OPEN, Policy, replica_policy
from kvstore.engine.api import DATA, WriteBatch, chunks
from kvstore.errors import UsageError
from kvstore.meta import INDEX_FLOOR, UPPER, Meta, optional_timestamp_of, timestamp_of
from kvstore.mvcc import RangeTombstone, WriteSet
from kvstore.mvcc.columns import KeyColumns
from kvstore.mvcc.write import stage_tombstones
from kvstore.parts import Parts
from kvstore.timestamp import Timestamp

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
            if not self._reserve.is_in_use:  # the window may bring the first one
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
                committer.persist()
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

            def publish() -> None:
                self._reads.raise_index_floor(upto)
                self._versions.publish_ranges(list(tombstones))
                self._reserve.look()
                committer.recent.add(upto, {}, [(b"", None)])  # any key may be in the files

            committer.write_commits(batch, publish, Timestamp(upto + 1))
            committer.adopt(replica_policy(self._committer.where, source))
            committer.persist()

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
