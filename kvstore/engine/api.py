"""The contract between the store and what keeps its bytes.

An engine is a set of ordered maps (families) of bytes to bytes, written together in atomic
batches. It knows no timestamps. Everything a store does rests on these rules, which the
conformance suite (`kvstore.testing.engines`) checks on each implementation:

1. A batch is visible whole or not at all, and survives a crash whole or not at all.
2. After `sync()` returns, every batch written before the call survives a crash.
3. Batches survive in the order they were written: a lost batch loses all that follow it.
4. A cursor or reader shows the state at the moment it was made, whatever is written later.
5. After `close()`, cursors and readers that are still held raise `ClosedError`, never end early.
6. Failures are raised as errors of the tree: `OutOfSpaceError`, `StorageError`, `CorruptionError`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final, NamedTuple, Protocol

from kvstore.limits import SCAN_CHUNK, SCAN_CHUNK_BYTES
from kvstore.loops import Found, Live

DATA: Final = "data"
RANGES: Final = "ranges"
CHANGES: Final = "changes"
META: Final = "meta"
FAMILIES: Final = (DATA, RANGES, CHANGES, META)


class WriteBatch(Protocol):
    """Writes that become visible together. `family` is a handle from `Engine.families`."""

    def put(self, key: bytes, value: bytes, column_family: Any) -> None:
        """Set `key` to `value`; the last write to a key wins."""
        ...

    def delete(self, key: bytes, column_family: Any) -> None:
        """Remove `key`, whether or not it is there."""
        ...

    def delete_range(self, begin: bytes, end: bytes, column_family: Any) -> None:
        """Remove the keys `begin <= key < end`."""
        ...


class EntryReader(Protocol):
    """A position in `data`, for look-ups that touch a few neighbouring entries."""

    def seek(self, key: bytes) -> None:
        """Go to the first entry at or above `key`."""
        ...

    def next(self) -> None:
        """Go to the next entry."""
        ...

    def status(self) -> None:
        """Raise if the last move failed: where `key` is None, a block may be damaged."""
        ...

    def key(self) -> bytes | None:
        """The key here, None behind the last entry."""
        ...

    def value(self) -> bytes:
        """The value here; `key` must not be None."""
        ...


class Cursor(Protocol):
    """A pass over one span of one family, taken in chunks."""

    def take(self, count: int) -> tuple[list[bytes], list[bytes]]:
        """The next keys and values, at most `count`, fewer where they are large; two empty lists
        at the end.

        Two lists of bytes rather than a list of pairs: tuples wake the cyclic garbage
        collector (0.35 against 0.46 us per entry).
        """
        ...

    def feed(self, live: Live, count: int) -> bool:
        """Have `live` pass over what `take` would give. False at the end.

        Entries are looked at as they come: 20 ns less each than by lists of them.
        """
        ...

    def close(self) -> None:
        """Let go of what the pass holds (files, memory). Repeatable."""
        ...


def chunks(cursor: Cursor) -> Iterator[tuple[list[bytes], list[bytes]]]:
    """All of a pass, chunk by chunk, which closes it: memory is bounded in entries and in bytes."""
    count = min(_FIRST_CHUNK, SCAN_CHUNK)
    try:
        while True:
            keys, values = cursor.take(count)
            if not keys:
                return
            count = next_count(values, SCAN_CHUNK)
            yield keys, values
    finally:
        cursor.close()


def pairs(cursor: Cursor) -> Iterator[tuple[bytes, bytes]]:
    """All of a pass, key and value together: slower than in chunks, see `Cursor.take`."""
    for keys, values in chunks(cursor):
        yield from zip(keys, values, strict=True)


def next_count(values: Sequence[bytes], count_max: int) -> int:
    """How many entries to take after a chunk with these values: four times as many, as far as
    values of this size leave room for them."""
    sample = values[:: len(values) // 16 + 1]
    size = sum(map(len, sample)) // (len(sample) or 1) + 1
    return max(min(len(values) * 4, count_max, SCAN_CHUNK_BYTES // size), 1)


_FIRST_CHUNK: Final = 4
"""Entries of a pass's first chunk: enough to tell how large values are, whatever they are."""


class FileSpan(NamedTuple):
    """One sorted file: its first and last engine key (of whatever family) and its bytes."""

    first: bytes
    last: bytes
    size_bytes: int


class Engine(Protocol):
    """Ordered families of bytes, written in atomic batches. One process owns it."""

    families: Mapping[str, Any]
    """Handle of each family, to be passed to a `WriteBatch`."""

    def batch(self) -> WriteBatch:
        """A new, empty batch."""
        ...

    def write(self, batch: WriteBatch, *, logged: bool = True) -> None:
        """Make the batch visible, without waiting for the disk.

        A batch that is not logged may be lost in a crash, even after a sync. Use it for entries
        that can be made again.
        """
        ...

    def sync(self) -> None:
        """Wait until all that was written is on disk. Other threads may go on meanwhile."""
        ...

    def get(self, family: str, key: bytes) -> bytes | None:
        """The value of `key`, None where there is none."""
        ...

    def cursor(
        self, family: str, start: bytes = b"", end: bytes | None = None, *, reverse: bool = False
    ) -> Cursor:
        """A pass over `start <= key < end`, ascending, or descending if `reverse`."""
        ...

    def find(self, key: bytes, rest: bytes, limit: bytes, /) -> Found:
        """The value of the first entry of `data` in a stretch, from the escaped user key with
        `rest` behind it on to that with `limit`: None where it is a tombstone, ABSENT where the
        stretch is empty.

        Raises `CorruptionError` if that entry is none of the key. The same as `borrow`, a few moves
        and `give_back`, in one call for the hottest of look-ups.
        """
        ...

    def borrow(self) -> tuple[Any, EntryReader]:
        """A reader of `data` that sees all writes so far, and a ticket to give it back with.

        Readers are kept for the next caller: positioning one costs less than making one.
        """
        ...

    def give_back(self, ticket: Any, reader: Any, /) -> None:
        """Return what `borrow` gave."""
        ...

    def check(self, reader: EntryReader) -> None:
        """Raise what kept `reader` from being valid, if it was a failure and not the end."""
        ...

    def ingest(self, files: Sequence[Path]) -> None:
        """Take sorted files into `data`, all or none; the files are moved, not copied.

        Costs the same whatever their size. They must lie on the engine's file system.
        """
        ...

    def checkpoint(self, target: Path) -> None:
        """Make `target` (which must not exist) a copy of the present state, sharing files."""
        ...

    def compact(self, family: str, start: bytes = b"", end: bytes | None = None) -> None:
        """Give back the space of what was deleted in the span. Costs O(bytes of the span)."""
        ...

    def files(self) -> Sequence[FileSpan]:
        """The files and their rough spans: hints for cutting the key space. May be empty."""
        ...

    def stats(self) -> Mapping[str, int]:
        """Sizes in bytes and counts of entries, estimated."""
        ...

    def close(self) -> None:
        """Let go of everything. Repeatable."""
        ...
