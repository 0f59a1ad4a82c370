"""The parts of an open store that its larger parts (feeds, GC, transactions, checks) work on."""

from __future__ import annotations

from dataclasses import dataclass

from typing_extensions import Self

from kvstore.changes.index import ChangeIndex
from kvstore.clears import Clears
from kvstore.commit import Committer
from kvstore.engine.loose import told_once
from kvstore.holds import Holds
from kvstore.imports import Imports, Tell
from kvstore.meta import INDEX_FLOOR, Meta
from kvstore.mvcc import Versions
from kvstore.pins import Pins
from kvstore.reads import Reads


@dataclass(frozen=True, slots=True)
class Parts:
    """One of each."""

    versions: Versions
    index: ChangeIndex
    committer: Committer
    pins: Pins
    holds: Holds
    imports: Imports
    clears: Clears
    reads: Reads

    @classmethod
    def of(
        cls,
        versions: Versions,
        index: ChangeIndex,
        committer: Committer,
        tell: Tell = told_once,
    ) -> Self:
        """The parts over an engine, with the records that it has. `tell` is that of `Imports`."""
        meta = Meta(versions.engine)
        pins, clears = Pins(committer), Clears(meta)
        holds = Holds(meta, committer, pins)
        imports = Imports(versions, index, committer, tell)
        reads = Reads(committer, pins, clears, index_floor=meta.timestamp(INDEX_FLOOR))
        return cls(versions, index, committer, pins, holds, imports, clears, reads)
