"""The contract between the store and the engine that keeps its bytes.

An engine is a set of ordered maps (families) of bytes to bytes, written together in atomic
batches. It knows no timestamps. Everything a store does rests on these rules, which the
conformance suite (`kvstore.testing.engines`) checks on each implementation:

1. A batch is visible whole or not at all, and survives a crash whole or not at all.
2. After `sync()` returns, every batch written before the call survives a crash.
3. Batches survive in the order they were written: a lost batch loses all later ones.
4. A cursor or reader shows the state of the moment at which it was made.
5. After `close()`, a cursor or reader that is still held raises `ClosedError`; it never just ends.
6. Failures are raised as errors of the tree: `OutOfSpaceError`, `StorageError`, `CorruptionError`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final, NamedTuple, Protocol, TypeAlias

from kvstore.limits import SCAN_CHUNK, SCAN_CHUNK_BYTES
from kvstore.loops.files import Answers, Pass
from kvstore.loops.live import Live
from kvstore.loops.shapes import Found, Nearby

DATA: Final = "data"
RANGES: Final = "ranges"
CHANGES: Final = "changes"
META: Final = "meta"
FAMILIES: Final = (DATA, RANGES, CHANGES, META)

WHOLE_FIGURES: Final = (
    *("cache_bytes", "pending_compaction_bytes", "compactions_running", "flushes_running"),
    *("writes_stopped", "write_stops"),
)
"""The figures of `Engine.stats` that concern no family alone. An engine without a cache or files
has 0."""


ReadAt: TypeAlias = "tuple[int, Mapping[bytes, tuple[int, int]], Callable[[bytes], Nearby] | None]"
"""A time, the lifetimes of imports by their references, and how a pass learns of range tombstones:
see `kvstore.loops.live.Live`."""


class WriteBatch(Protocol):
    """Writes that become visible together. `family` is a handle from `Engine.families`."""

    def put(self, key: bytes, value: bytes, column_family: Any) -> None:
        """Set `key` to `value`; the last write to a key wins."""
        ...

    def delete(self, key: bytes, column_family: Any) -> None:
        """Remove `key`. Does nothing if it is absent."""
        ...

    def delete_range(self, begin: bytes, end: bytes, column_family: Any) -> None:
        """Remove the keys `begin <= key < end`."""
        ...


class EntryReader(Protocol):
    """A position in `data`, for look-ups that touch a few neighbouring entries."""

    def seek(self, key: bytes) -> None:
        """Go to the first entry at or above `key`."""
        ...

    def seek_for_prev(self, key: bytes) -> None:
        """Go to the last entry at or below `key`."""
        ...

    def next(self) -> None:
        """Go to the next entry."""
        ...

    def prev(self) -> None:
        """Go to the entry before."""
        ...

    def status(self) -> None:
        """Raise if the last move failed. Call this where `key` is None: a block may be damaged."""
        ...

    def key(self) -> bytes | None:
        """The key here, None behind the last entry and before the first."""
        ...

    def value(self) -> bytes:
        """The value here; `key` must not be None."""
        ...


class Cursor(Protocol):
    """A pass over one span of one family, taken in chunks."""

    def take(self, count: int) -> tuple[list[bytes], list[bytes]]:
        """The next keys and values: at most `count`, fewer where values are large, two empty lists
        at the end.

        Two lists take 0.35 us an entry; a list of pairs takes 0.46, because its tuples wake the
        cyclic garbage collector.
        """
        ...

    def feed(self, live: Live, count: int) -> bool:
        """Have `live` pass over the entries that `take` would return. False at the end.

        Saves 20 ns an entry, because no list is made.
        """
        ...

    def close(self) -> None:
        """Release the files and memory that the pass holds. Repeatable."""
        ...


def chunks(cursor: Cursor) -> Iterator[tuple[list[bytes], list[bytes]]]:
    """All entries of a pass, in chunks bounded in entries and in bytes. Closes the pass."""
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
    """All entries of a pass as pairs. Slower than `chunks`, see `Cursor.take`."""
    for keys, values in chunks(cursor):
        yield from zip(keys, values, strict=True)


def next_count(values: Sequence[bytes], count_max: int) -> int:
    """How many entries to take after a chunk with these values: four times as many, or fewer where
    values of this size would exceed `SCAN_CHUNK_BYTES`."""
    sample = values[:: len(values) // 16 + 1]
    size = sum(map(len, sample)) // (len(sample) or 1) + 1
    return max(min(len(values) * 4, count_max, SCAN_CHUNK_BYTES // size), 1)


_FIRST_CHUNK: Final = 4
"""Entries of a pass's first chunk: enough to estimate the size of values, few if they are large."""


class FileSpan(NamedTuple):
    """One sorted file: its first and last engine key (of whatever family) and its bytes."""

    first: bytes
    last: bytes
    size_bytes: int


class HeldFiles(Protocol):
    """Sorted files of `data`, open for passes that read them itself, by any threads."""

    spans: Sequence[FileSpan]
    """The files, to cut a span by."""

    is_closed: bool
    """Whether they were let go, perhaps because the engine was closed."""

    has_flushed: bool
    """Whether there is a new small file for them."""

    def begin(
        self,
        begin: bytes,
        end: bytes | None,
        read: ReadAt,
        *,
        keys_only: bool = False,
        whole: bool = False,
        answers: Answers | None = None,
    ) -> Pass:
        """A pass over `begin <= stored key < end`: see `Pass`. One thread at a time may use it."""
        ...

    def take(self, one: Pass, rows: int, bytes_max: int, entries: int) -> bool:
        """Have a pass go on: see `Pass.take`. Raises `CorruptionError` that names a damaged
        file."""
        ...

    def close(self) -> None:
        """Let the files go, once no thread is inside `take`. Repeatable."""
        ...


class Engine(Protocol):
    """Ordered families of bytes, written in atomic batches. One process owns it."""

    families: Mapping[str, Any]
    """Handle of each family, to be passed to a `WriteBatch`."""

    def batch(self) -> WriteBatch:
        """A new, empty batch. It may block, under the lock of commits, while the engine takes no
        writes."""
        ...

    def write(
        self,
        batch: WriteBatch,
        points: Mapping[bytes, bytes | None] | None = None,
        *,
        logged: bool = True,
    ) -> None:
        """Make the batch visible, without waiting for the disk.

        `points`, if given, names the entries of `data` in the batch: it has a new version of each
        of these user keys, and no other entry that is read before the next call without `points`.
        `find` may then use older readers for other keys.

        A batch that is not logged may be lost in a crash, even after a sync. Use it for entries
        that can be made again.
        """
        ...

    def look_again(self) -> bool:
        """Have later reads see what is stored, after an interrupt of `write`. Returns whether the
        batch is there as a whole or not at all; False if nobody knows."""
        ...

    def sync(self) -> None:
        """Wait until all logged batches are on disk. Other threads may write meanwhile."""
        ...

    def get(self, family: str, key: bytes) -> bytes | None:
        """The value of `key`, None where there is none."""
        ...

    def cursor(
        self,
        family: str,
        start: bytes = b"",
        end: bytes | None = None,
        *,
        reverse: bool = False,
        keys_only: bool = False,
    ) -> Cursor:
        """A pass over `start <= key < end`, ascending, or descending if `reverse`. The caller of a
        pass with `keys_only` ignores the values: an engine may leave them empty."""
        ...

    def hold_files(self, begin: bytes, end: bytes | None) -> HeldFiles | None:
        """The sorted files of `data` that cross `begin <= key < end`, open for a pass that reads
        them itself; nothing of the span lies elsewhere. None where the pass has to go by `cursor`.
        The caller closes them, and has the view of its read already. Costs 30 us a file."""
        ...

    def find(self, key: bytes, rest: bytes, limit: bytes, /) -> Found:
        """The value of the first entry of `data` in a stretch, which begins at the escaped user key
        with `rest` behind it and ends below the escaped key with `limit`. None where the entry is a
        tombstone, `ABSENT` where the stretch is empty.

        Raises `CorruptionError` if that entry is not an entry of the key. One call, because
        `borrow`, a few moves and `give_back` take longer in the hottest look-up.
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
        """Raise the failure that left `reader` without an entry. Does nothing at the end of
        `data`."""
        ...

    def flush(self) -> None:
        """Write the entries of `data` that are in memory alone to a file, if they are many. Commits
        continue meanwhile; without it they wait while `ingest` does the same."""
        ...

    def ingest(self, files: Sequence[Path]) -> None:
        """Add sorted files to `data`, all or none. The files are moved, not copied: the cost does
        not depend on their size. They must lie on the engine's file system."""
        ...

    def checkpoint(self, target: Path) -> None:
        """Make `target` (which must not exist) a copy of the present state, sharing files."""
        ...

    def compact(self, family: str, start: bytes = b"", end: bytes | None = None) -> None:
        """Free the space of deleted entries in the span. Costs O(bytes of the span)."""
        ...

    def merges(self, rewritten: tuple[bytes, bytes] | None = None) -> Iterator[None]:
        """Merge small files where many lie together, one group of them for each step of the
        iterator. A step reads and writes at most `SORTED_MERGE_BYTES_MAX`. Reads and commits
        continue meanwhile. Ends at once while another thread merges.

        Entries of `data` between the two keys `rewritten` were just written once more. Their files
        are merged with the older ones there, if these have at most `NEWEST_MERGE_FACTOR` times
        their bytes."""
        ...

    def files(self) -> Sequence[FileSpan]:
        """The files and their rough spans: hints for cutting the key space. May be empty."""
        ...

    def stats(self) -> Mapping[str, int]:
        """Sizes in bytes and counts of entries, estimated, by family; and `WHOLE_FIGURES`."""
        ...

    def close(self) -> None:
        """Release all files, locks and memory. Repeatable."""
        ...
