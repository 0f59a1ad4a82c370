"""The change index: every commit's changes, in time order, beside the versions.

It is written in the same engine batch as the versions, so neither can be there without the other,
and it is what makes an incremental read cost what changed. Large values do not travel in it: the
reader fetches them from the versions, which are kept as long as the index is.

Invariants
1. A commit at t has exactly one run of chunks (stream, t, 0..n), the last one marked.
2. The index is complete for windows `(since, upto]` whose `since` is at or above its floor: the
   store's own `since`, or the time a restored store was restored at.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, Final, NamedTuple

from kvstore.changes.entry import (
    CHANGESET_NONE,
    OP_DELETE,
    OP_DELETE_RANGE,
    OP_PUT,
    OP_PUT_LARGE,
    Entry,
    pack,
    unpack,
)
from kvstore.codec.keys import decode_change_key, encode_change_key
from kvstore.engine.api import CHANGES, Batch, Engine
from kvstore.limits import CHANGE_CHUNK_BYTES, INLINE_VALUE_BYTES
from kvstore.mvcc.write import WriteSet

FIRST_STREAM: Final = bytes(15) + b"\x01"
"""The stream of a store that has one: token 0, version 1 (see DESIGN: stream ids)."""

_CHUNKS_MAX = (1 << 32) - 1
_ENTRIES_PER_TAKE = 16


class Commit(NamedTuple):
    """One chunk of one commit, as stored."""

    timestamp: int
    chunk: int
    entry: Entry


class ChangeIndex:
    """Writes and reads the change entries of one engine."""

    def __init__(self, engine: Engine, *, inline_value_bytes: int = INLINE_VALUE_BYTES) -> None:
        self._engine = engine
        self._inline = inline_value_bytes

    def stage(
        self,
        writes: WriteSet,
        timestamp: int,
        batch: Batch,
        *,
        changeset: tuple[int, int] = CHANGESET_NONE,
    ) -> None:
        """Add the entry of a sealed write set to the engine batch that holds its versions."""
        chunks = list(_columns(writes, self._inline))
        for number, (ops, keys, values) in enumerate(chunks):
            packed = pack(ops, keys, values, is_last=number == len(chunks) - 1, changeset=changeset)
            self._put(batch, timestamp, number, packed)

    def stage_event(self, op: int, key: bytes, timestamp: int, batch: Batch) -> None:
        """Add the entry of a commit that is one event (an import, a revert)."""
        self._put(batch, timestamp, 0, pack(bytes([op]), [key], [b""]))

    def read(self, *, since: int, upto: int) -> Iterator[Commit]:
        """Entries of the commits in `(since, upto]`, oldest first. Costs what it yields."""
        cursor = self._engine.cursor(
            CHANGES,
            encode_change_key(FIRST_STREAM, since, _CHUNKS_MAX) + b"\x00",
            encode_change_key(FIRST_STREAM, upto + 1),
        )
        try:
            while True:
                keys, values = cursor.take(_ENTRIES_PER_TAKE)
                if not keys:
                    return
                for key, value in zip(keys, values, strict=True):
                    _, timestamp, chunk = decode_change_key(key)
                    entry = unpack(value, where=f"change entry {timestamp}/{chunk}")
                    yield Commit(timestamp, chunk, entry)
        finally:
            cursor.close()

    def stage_trim(self, upto: int, batch: Batch) -> None:
        """Add the removal of all entries at or below `upto`. One range delete per stream."""
        changes = self._engine.families[CHANGES]
        for stream in self._stored_streams():
            begin = encode_change_key(stream, 0)
            batch.delete_range(begin, encode_change_key(stream, upto + 1), changes)

    def _stored_streams(self) -> Iterator[bytes]:
        """The streams that have entries. One seek each."""
        start = b""
        while True:
            cursor = self._engine.cursor(CHANGES, start)
            keys, _ = cursor.take(1)
            cursor.close()
            if not keys:
                return
            stream, _, _ = decode_change_key(keys[0])
            yield stream
            start = stream + b"\xff" * (len(keys[0]) - len(stream) + 1)

    def last(self) -> int:
        """Timestamp of the newest commit in the index, 0 if it is empty."""
        cursor = self._engine.cursor(CHANGES, reverse=True)
        keys, _ = cursor.take(1)
        cursor.close()
        return decode_change_key(keys[0])[1] if keys else 0

    def _put(self, batch: Batch, timestamp: int, chunk: int, packed: bytes) -> None:
        families: Mapping[str, Any] = self._engine.families
        batch.put(encode_change_key(FIRST_STREAM, timestamp, chunk), packed, families[CHANGES])


def _columns(writes: WriteSet, inline: int) -> Iterator[tuple[bytes, list[bytes], list[bytes]]]:
    """Columns of a write set's entries, cut where a chunk would grow too large."""
    keys = [start for start, _ in writes.ranges]
    values = [end for _, end in writes.ranges]
    ops = bytearray([OP_DELETE_RANGE]) * len(keys)
    size = 0
    for key, value in writes.points.items():
        if value is None:
            ops.append(OP_DELETE)
            values.append(b"")
        elif len(value) <= inline:
            ops.append(OP_PUT)
            values.append(value)
            size += len(value)
        else:
            ops.append(OP_PUT_LARGE)
            values.append(b"")
        keys.append(key)
        size += len(key)
        if size >= CHANGE_CHUNK_BYTES:
            yield bytes(ops), keys, values
            ops, keys, values, size = bytearray(), [], [], 0
    if keys:
        yield bytes(ops), keys, values
