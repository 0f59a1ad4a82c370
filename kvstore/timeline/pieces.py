"""A large commit goes to the engine in pieces, and stays one commit.

The engine keeps Python's interpreter for the whole of one batch. A batch of 300,000 rows would stop
all other threads for half a second, and the process of a follower for two. A piece takes some
milliseconds, and between two pieces other threads have their turn.

    staged := timestamp      the time of the commit whose pieces are under way

The change entries come first. They name all rows of the commit, and so all versions that have to be
removed if its last piece never comes. The versions follow in the order of their keys, which takes
the memtable half the time of any other order. The last piece is the batch of the commit itself.

Invariants
1. The batch of the first piece brings the record `staged`, and the last one removes it. So a crash
   leaves the whole commit without the record, or the record and some of the pieces.
2. While the record is stored, nothing at its time is shown: no `upper` lies above this time,
   because `ChangeIndex.last` passes over it.
3. A store that is opened to write, or goes on after an interrupt, removes the pieces before it
   gives out a time. A handle that only reads leaves them where they are.
4. The last piece brings what counts for the whole: range deletes, the note of a request, epochs.
5. Nothing else is written while pieces are under way: others wait for the commit lock, and the
   thread that has it is refused.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any, NamedTuple

from kvstore.changes.index import OP_DELETE, OP_PUT, OP_PUT_LARGE, ChangeIndex, FullEntry
from kvstore.codec.keys import TOMBSTONE, VALUE, encode_suffix, frame
from kvstore.engine.api import CHANGES, DATA, Engine, WriteBatch
from kvstore.errors import CorruptionError, UsageError
from kvstore.limits import COMMIT_PIECE_BYTES, COMMIT_PIECE_ROWS
from kvstore.loops.writes import put_in_pieces
from kvstore.mvcc.meta import STAGED, UPPER, Meta
from kvstore.mvcc.write_set import WriteSet
from kvstore.timeline.durability import Health

_KINDS = {OP_PUT: VALUE, OP_PUT_LARGE: VALUE, OP_DELETE: TOMBSTONE}


class LargeCommit(NamedTuple):
    """A commit that is going to be written in pieces: its rows, the entries of the change index
    that name them, and the full forms of these, by their keys."""

    timestamp: int
    points: Mapping[bytes, bytes | None]
    entries: list[tuple[bytes, bytes]]
    full: dict[bytes, bytes]


class CommitPieces:
    """Writes the pieces of one store's commits, and removes them. The commit lock guards it."""

    def __init__(self, engine: Engine, index: ChangeIndex, health: Health) -> None:
        self._engine, self._index, self._health = engine, index, health
        self._meta = Meta(engine)
        self.is_under_way = False

    def require_none(self) -> None:
        """Raise `UsageError` while pieces are under way. The caller has the commit lock, so it is
        the thread that writes them: it handles a signal, or ends an object."""
        if self.is_under_way:
            raise UsageError(
                "a write inside a large commit, by the thread that commits",
                "write behind the commit: set a flag in the signal handler",
            )

    def begin(self, writes: WriteSet, timestamp: int, changeset: tuple[int, int]) -> LargeCommit:
        """The commit of a sealed write set, of which nothing is written yet."""
        entries = _Entries()
        full: list[FullEntry] = self._index.stage(entries, writes, timestamp, changeset)
        return LargeCommit(timestamp, writes.points, entries.found, dict(full))

    def write_pieces(self, commit: LargeCommit, last: WriteBatch) -> None:
        """Write the pieces of a commit, and then the batch `last`, which makes it whole.

        Other threads run between two pieces. A failed write poisons the store. After another
        exception the record may be there: the caller mends the store, or poisons it.
        """
        engine, families = self._engine, self._engine.families
        suffix = encode_suffix(commit.timestamp)
        bounds = COMMIT_PIECE_ROWS, COMMIT_PIECE_BYTES
        self.is_under_way = True
        try:
            for number, (key, packed) in enumerate(commit.entries):
                batch = engine.batch()
                if not number:
                    self._meta.stage_timestamp(batch, STAGED, commit.timestamp)
                batch.put(key, packed, families[CHANGES])
                self._write_piece(batch)
                if key in commit.full:
                    self._health.guarded(self._index.complete, [(key, commit.full.pop(key))])
                    _give_way()
            data = families[DATA]
            for batch in put_in_pieces(engine.batch, commit.points, suffix, data, *bounds):
                self._write_piece(batch)
            self._meta.stage_delete(last, STAGED)
            self._health.guarded(engine.write, last)
        finally:
            self.is_under_way = False

    def _write_piece(self, batch: WriteBatch) -> None:
        # No reader is to see the piece, so those that the engine keeps stay good: it has no points.
        self._health.guarded(self._engine.write, batch, {})
        _give_way()

    def remove(self) -> None:
        """Remove the pieces of a commit that has not become whole, after an interrupt."""
        self.is_under_way = False
        remove_pieces(self._engine, self._index)


def _give_way() -> None:
    """Let other threads run. They need not wait for the interval after which one may ask."""
    time.sleep(0)


class _Entries:
    """Takes entries of the change index in the place of an engine batch."""

    def __init__(self) -> None:
        self.found: list[tuple[bytes, bytes]] = []

    def put(self, key: bytes, value: bytes, _: Any) -> None:
        self.found.append((key, value))

    def delete(self, *_: Any) -> None:
        raise AssertionError("a commit removes no entry")

    delete_range = delete


def remove_pieces(engine: Engine, index: ChangeIndex) -> None:
    """Remove the pieces of a commit whose last piece never came: see invariant 3.

    Costs a look at one record where there is no such commit, else 2 us a row. A crash on the way
    leaves the record, so that the next opening removes the rest. Raises `CorruptionError` where the
    record names a time that is complete.
    """
    meta = Meta(engine)
    if meta.read(STAGED) is None:
        return
    timestamp = meta.timestamp(STAGED)
    if meta.timestamp(UPPER) > timestamp or index.last(passes_staged=False) > timestamp:
        raise CorruptionError("meta record staged", f"the time {timestamp} is complete")
    suffix, families = encode_suffix(timestamp), engine.families
    for key, entry in index.entries_at(timestamp):
        batch = engine.batch()
        for row in entry.rows():
            if row.op in _KINDS:  # a range delete comes with the last piece
                batch.delete(frame(row.key) + suffix + _KINDS[row.op], families[DATA])
        batch.delete(key, families[CHANGES])
        engine.write(batch)
    batch = engine.batch()
    meta.stage_delete(batch, STAGED)
    engine.write(batch)
