"""Writes the removal of garbage, in batches.

Most removals delete one entry. Where the revert of an import brought a value back, the value moves
to the time of the revert, because GC takes the row that told this time.

Invariants
1. One engine batch removes the row, writes the value at its new time, and removes the old entry. So
   each reader sees the value once, and sees the time of the revert.
2. A clear between reading and writing a value takes the value: nothing that was cleared comes back.
3. A batch has a bounded number of entries and of bytes.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import chain
from typing import NamedTuple

from kvstore.clears import Clear
from kvstore.engine.api import DATA, WriteBatch
from kvstore.gc.search import Move, Removal
from kvstore.limits import SCAN_CHUNK_BYTES, SETTLE_STEP_ROWS
from kvstore.meta import nothing
from kvstore.parts import Parts


class _Moved(NamedTuple):
    move: Move
    value: bytes


class RemovalBatch(NamedTuple):
    """Entries to be removed, and values to be moved. `clears` are the clears that were known before
    the values were read."""

    entries: list[bytes]
    moved: list[_Moved]
    clears: tuple[Clear, ...]

    @property
    def removed(self) -> int:
        """The number of versions that go."""
        return len(self.entries) + len(self.moved)


class Removing:
    """Writes the removals of one store."""

    def __init__(self, parts: Parts) -> None:
        self._engine, self._committer = parts.versions.engine, parts.committer
        self._clears = parts.clears

    def batches(self, removals: Iterable[Removal], *, entries_max: int) -> Iterator[RemovalBatch]:
        """The removals in batches, in their order. Reads the values that move, one look-up each."""
        clears = self._clears.all()
        entries: list[bytes] = []
        moved: list[_Moved] = []
        size = 0
        for removal in removals:
            if isinstance(removal, bytes):
                entries.append(removal)
            else:
                value = self._engine.get(DATA, removal.stored)
                if value is None:
                    continue  # a clear took the key
                moved.append(_Moved(removal, value))
                size += len(value)
            is_full = len(entries) >= entries_max or len(moved) >= SETTLE_STEP_ROWS
            if is_full or size > SCAN_CHUNK_BYTES:
                yield RemovalBatch(entries, moved, clears)
                entries, moved, size = [], [], 0
        if entries or moved:
            yield RemovalBatch(entries, moved, clears)

    def write(self, batch: RemovalBatch) -> list[bytes]:
        """Write one batch. Returns the stored keys that it touched."""

        def stage(writes: WriteBatch) -> None:
            data = self._engine.families[DATA]
            for entry in batch.entries:
                writes.delete(entry, data)
            for move, value in moved:
                writes.put(move.plain, value, data)
                writes.delete(move.stored, data)
                writes.delete(move.row, data)

        with self._committer.lock:
            moved = batch.moved
            if self._clears.all() is not batch.clears:
                moved = [
                    each for each in moved if self._engine.get(DATA, each.move.stored) is not None
                ]
            mend = self._committer.mend_by(nothing)
            self._committer.write_meta(stage, durable=False, mend=mend)
        return [*batch.entries, *chain.from_iterable(each.move for each in batch.moved)]
