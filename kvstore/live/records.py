"""The records that a store has in memory, brought up to the state of its engine.

A store reads its records once and then changes them with each commit of its own. In a live reader
the commits come from another process: the engine has caught up, and the records follow it here.

Invariants
1. `since` and clears are taken first and `upper` last. A read that began before learns afterwards
   whether its history is still whole.
2. The records are of the store that was opened, and it still has every commit that was shown. If
   the store was put back from an older copy, reads raise `StaleReaderError`: two readers would
   otherwise see two histories.
3. Records are read only if their family was written since.
"""

from __future__ import annotations

from collections.abc import Iterable

from kvstore.codec.keys import decode_range
from kvstore.commit import read_only_policy
from kvstore.engine import META, RANGES, chunks
from kvstore.engine.rocks_secondary import SecondaryEngine
from kvstore.errors import StaleReaderError
from kvstore.meta import FORMAT, INDEX_FLOOR, SINCE, UPPER, Meta
from kvstore.mvcc import RangeTombstone
from kvstore.mvcc.fragments import Fragments
from kvstore.parts import Parts
from kvstore.replica import stored_policy
from kvstore.timestamp import Timestamp


class LiveRecords:
    """The records of one live reader. The caller holds the locks of the committer and the
    engine."""

    def __init__(self, parts: Parts, engine: SecondaryEngine) -> None:
        """`parts` were made from the present state of `engine`."""
        self._parts = parts
        self._engine = engine
        self._meta = Meta(engine)
        self._opened = engine.opened
        self._format = self._meta.read(FORMAT)
        self._marks = {family: engine.marks(family) for family in (META, RANGES)}
        self._ranges = self._stored_ranges()
        self._stored_upper = self._meta.timestamp(UPPER)
        self._newest = parts.index.last()
        self.upper: int = parts.committer.upper
        """The first time that is not complete in the engine. Readers see it once it is
        published."""
        self.is_replaced = False
        """Whether the store was put back from an older copy."""

    def reload(self) -> None:
        """Take all records but `upper` as the engine has them now.

        Costs 0.1 ms. If any record was written, it costs also 2 us an import, 1 us a hold and 1 us
        a range tombstone, and 10 us for each import and hold that was written.
        """
        marks, self._marks = self._marks, {}  # an error leaves none: all is read again
        is_reopened = self._opened is not self._engine.opened
        now = {family: self._engine.marks(family) for family in (META, RANGES)}
        if is_reopened or marks.get(META) != now[META]:
            self._reload_meta()
        if is_reopened:
            self._require_same()
            self._opened = self._engine.opened
        if not self._parts.reserve.is_in_use:  # the writer may have made the first one
            self._parts.reserve.look()
        newest = self._parts.index.last()
        upper = max(self._stored_upper, newest + 1, self._parts.committer.since + 1)
        if upper < self.upper:
            raise self._put_back()
        if is_reopened or marks.get(RANGES) != now[RANGES]:
            self._reload_ranges()
        self._newest, self.upper, self._marks = newest, upper, now

    def _reload_meta(self) -> None:
        parts, meta = self._parts, self._meta
        frontiers, committer = parts.committer.frontiers, parts.committer
        since = meta.timestamp(SINCE)
        if since < frontiers.since or meta.read(FORMAT) != self._format:
            raise self._put_back()
        frontiers.move_since(since)
        parts.clears.reload()
        frontiers.raise_floor(parts.clears.newest)
        parts.reads.raise_index_floor(meta.timestamp(INDEX_FLOOR))
        coming = stored_policy(meta, committer.where).coming
        committer.policy = read_only_policy(committer.where, coming=coming, is_live=True)
        parts.index.generations.reload()
        committer.capture.reload()
        parts.imports.reload()
        parts.holds.reload()
        self._stored_upper = meta.timestamp(UPPER)

    def _require_same(self) -> None:
        """Raise `StaleReaderError` unless the store has the newest commit that was shown, or has
        given it up since."""
        index, newest = self._parts.index, self._newest
        if newest > self._parts.reads.indexed_since and not any(
            index.headers(since=newest - 1, upto=newest)
        ):
            raise self._put_back()

    def _put_back(self) -> StaleReaderError:
        path = str(self._engine.path)
        self.is_replaced = True
        return StaleReaderError(
            path,
            f"the store at {path} was replaced by another copy: it lacks history before "
            f"{Timestamp(self.upper)} that this reader has shown",
            "call kvstore.follow again, and forget the answers of the replaced copy",
        )

    def _reload_ranges(self) -> None:
        """Show the new range tombstones. If GC or a clear has removed or cut some, the whole map is
        built anew."""
        before, self._ranges = self._ranges, self._stored_ranges()
        versions = self._parts.versions
        if before.items() - self._ranges.items():
            versions.publish_fragments(Fragments.of(_decoded(self._ranges.items())))
        else:
            versions.publish_ranges(_decoded(self._ranges.items() - before.items()))

    def _stored_ranges(self) -> dict[bytes, bytes]:
        found: dict[bytes, bytes] = {}
        for keys, values in chunks(self._engine.cursor(RANGES)):
            found.update(zip(keys, values, strict=True))
        return found


def _decoded(stored: Iterable[tuple[bytes, bytes]]) -> list[RangeTombstone]:
    return [RangeTombstone(*decode_range(key, value)) for key, value in sorted(stored)]
