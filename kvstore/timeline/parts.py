"""The parts of an open store that its larger parts (feeds, GC, transactions, checks) work on."""

from __future__ import annotations

from dataclasses import dataclass

from typing_extensions import Self

from kvstore.changes.index import ChangeIndex
from kvstore.mvcc import Versions
from kvstore.mvcc.meta import INDEX_FLOOR, Meta
from kvstore.timeline.committer import Committer
from kvstore.timeline.holds import Holds, Pins
from kvstore.timeline.imports import Imports
from kvstore.timeline.read_times import Clears, Reads
from kvstore.timeline.reserved import Reserve


@dataclass(frozen=True, slots=True)
class Parts:
    """The parts of one store."""

    versions: Versions
    index: ChangeIndex
    committer: Committer
    pins: Pins
    holds: Holds
    imports: Imports
    clears: Clears
    reads: Reads
    reserve: Reserve

    @classmethod
    def of(cls, versions: Versions, index: ChangeIndex, committer: Committer) -> Self:
        """The parts over an engine, with the records that it has."""
        meta = Meta(versions.engine)
        pins, clears = Pins(committer), Clears(meta)
        holds = Holds(meta, committer, pins)
        imports = Imports(versions, index, committer)
        reads = Reads(committer, pins, clears, index_floor=meta.timestamp(INDEX_FLOOR))
        reserve = Reserve(versions.engine)
        committer.expiries.on_first = reserve.note_expiries
        return cls(versions, index, committer, pins, holds, imports, clears, reads, reserve)

    def oldest_lacking(self, since: int, upto: int) -> int | None:
        """The time of the oldest commit in `(since, upto]`, which a copy as of `since` lacks; None
        if there is none. `since` itself where the change index does not reach back to it. One seek
        per stream."""
        found = next((at for at, *_ in self.index.headers(since=since, upto=upto)), None)
        # Read `indexed_since` after the index: GC raises it before it trims entries.
        return since if since < self.reads.indexed_since else found
