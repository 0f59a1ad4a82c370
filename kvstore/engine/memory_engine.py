"""Ordered maps in memory behind the `Engine` contract, durable by the journal.

For stores that fit in memory: tests and caches without a directory (`path=None`), small services
with one. Each batch is a journal record before it is visible. Opening replays the snapshot and
the records, and writes a new snapshot after a long replay. Editions let readers keep their state
during writes.

Differences from RocksDB: opening, `checkpoint` and `compact` cost O(bytes), and an `ingest`
O(rows), because it journals them. The journal grows until it is compacted: by opening, by
`compact`, or by another process (`kvstore journal compact`).

Invariants
1. `_writing` orders writes: the batch journaled first is visible first. A writer holds it while
   it hands the record to the operating system; it covers an fsync only when a journal file is
   full.
2. `_lock` guards the editions that readers take. A thread holds it for the moment of taking an
   edition or of changing one in place. Lock order: `_writing`, then `_lock`.
3. An interrupt may come between the journal and memory, or in the middle of a change in place.
   The next call that needs the maps settles it: it asks the journal whether it has the record,
   mends the maps, and makes the change again. So each change may be made twice in a row. A write
   or an fsync that failed leaves nothing to be settled: the journal refuses every later write.
4. No reader sees rows of an ingest that are noted: an interrupted one is dropped.

An edition is a map whose readers keep the state that they began with; a writer copies what it
changes. The state of the engine is what the journal's records build.
"""

from __future__ import annotations

import itertools
import os
import secrets
import shutil
import struct
import threading
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import closing, suppress
from itertools import accumulate, count, islice
from operator import lt
from pathlib import Path
from typing import Any, Final, TypeAlias

from kvstore.base.forks import own
from kvstore.codec.keys import KEY_BYTES_LEAST, check_data_key, escape
from kvstore.engine.api import (
    DATA,
    FAMILIES,
    WHOLE_FIGURES,
    EntryReader,
    FileSpan,
    WriteBatch,
    next_count,
)
from kvstore.engine.loose_files import LooseFiles
from kvstore.errors import (
    ClosedError,
    CorruptionError,
    FormatVersionError,
    KVStoreError,
    LockedError,
    NotAStoreError,
    PoisonedError,
    RetryableError,
    StaleReaderError,
    StorageError,
    storage_errors,
)
from kvstore.limits import (
    CHUNK_ENTRIES_MAX,
    MEMORY_BATCH_IN_PLACE_MAX,
    MEMORY_RECORD_BYTES,
    READ_ONLY_OPENINGS_MAX,
    SCAN_CHUNK,
)
from kvstore.loops.live import Live
from kvstore.loops.shapes import ABSENT, Found
from kvstore.storage.journal import Journal, Record, Sync, replay
from kvstore.storage.journal.names import (
    COMPACTING_NAME,
    LOCK_NAME,
    is_journal_file,
    is_unborn,
    read_note,
)
from kvstore.storage.journal.repair import content_of
from kvstore.storage.os_files import OS_FILES, Files

_OPEN_HERE: Final[set[str]] = set()
"""Directories that this process has open. A message about a lock names this or another process."""


class MemoryEngine:
    """The store's families in memory; with a `path`, also in a journal there."""

    def __init__(
        self,
        path: Path | None,
        *,
        read_only: bool = False,
        create: bool = True,
        files: Files = OS_FILES,
        compact_bytes: int | None = None,
    ) -> None:
        self.path = path
        self._where = "the store in memory" if path is None else str(path)
        self.families: Mapping[str, Any] = FAMILY_NUMBERS
        self._state = MemoryState()
        self._writing = threading.Lock()
        self._lock = threading.Lock()
        self._ingest_ids = count(1)
        self._begun: tuple[int, Callable[[], None]] | None = None
        """The write under way, or interrupted: the ordinal of its record, 0 if it has none, and the
        change in memory."""
        self._is_torn = False
        """Whether a change in place is under way, or was interrupted."""
        self.is_closed = False
        self._compacted = 0
        self._journal: Journal | None = None
        if path is not None and read_only:
            self._replay(path, files)
        elif path is not None:
            self._journal = self._open_journal(path, create, files, compact_bytes)
        self._state.ingests.clear()  # of a killed process, or of a writer beside this reader
        endings = ("close", "give_back", "release")
        own(self, f"the database at {path}" if path else self._where, endings=endings)

    # -- writing --------------------------------------------------------------------------

    def batch(self) -> WriteBatch:
        return Entries()

    def write(
        self,
        batch: WriteBatch,
        points: Mapping[bytes, bytes | None] | None = None,
        *,
        logged: bool = True,
    ) -> None:
        assert isinstance(batch, Entries), "it came from self.batch()"
        if not batch.ops:
            return
        payload = None
        if self._journal is not None and logged:
            payload = encode(batch.ops, batch.keys, batch.values)
        with self._writing:
            self._append(BATCH, payload, then=lambda: self._show(batch))

    def look_again(self) -> bool:
        with self._writing:
            if self.is_closed:
                return False
            with suppress(PoisonedError):
                self._settle()
                return True
            return False

    def sync(self) -> None:
        self.require_open()
        if self._journal is not None:
            self._journal.sync()

    def flush(self) -> None:
        self.require_open()

    def ingest(self, files: Sequence[Path]) -> None:
        self.require_open()
        if not files:
            return
        ingest_id = next(self._ingest_ids)
        try:
            with (
                storage_errors(str(files[0].parent)),
                closing(LooseFiles(files).rows()) as rows,
            ):
                for keys, values in bounded(rows):
                    self._stage(ingest_id, keys, values)
        except BaseException:
            self._drop(ingest_id)
            raise
        with self._writing:
            self._append(TAKEN, encode_ingest(ingest_id), then=lambda: self._take(ingest_id))
        self.sync()  # before the files are removed, which may be the only other copy
        try:
            for file in files:
                file.unlink(missing_ok=True)
        except OSError as error:
            what = f"{file} was taken in and could not be removed: {error}"
            raise StorageError(what, "remove it; the rows are in the store") from error

    # -- reading --------------------------------------------------------------------------

    def get(self, family: str, key: bytes) -> bytes | None:
        while True:
            with self._lock:
                if not (self._is_torn or self.is_closed):
                    return self._state.families[FAMILY_NUMBERS[family]].get(key)
            self._require_whole()

    def cursor(
        self,
        family: str,
        start: bytes = b"",
        end: bytes | None = None,
        *,
        reverse: bool = False,
        keys_only: bool = False,
    ) -> MemoryCursor:
        edition = self._hold(FAMILY_NUMBERS[family])
        return MemoryCursor(self, edition, start, end, reverse=reverse)

    def hold_files(self, begin: bytes, end: bytes | None) -> None:
        return None

    def find(self, key: bytes, rest: bytes, limit: bytes, /) -> Found:
        # Writers change an edition without holders in place, so this look-up takes the lock. Taking
        # a hold would cost as much.
        escaped = escape(key)
        while True:
            with self._lock:
                if self._is_torn or self.is_closed:
                    pass  # see below
                else:
                    edition = self._state.families[_DATA]
                    at, index = edition.position(escaped + rest)
                    chunk = edition.chunks[at]
                    if index == len(chunk.keys) and at + 1 < len(edition.chunks):
                        chunk, index = edition.chunks[at + 1], 0
                    if index < len(chunk.keys) and (found := chunk.keys[index]) < escaped + limit:
                        # This repeats `require_entry`, whose call would take 0.1 of 0.9 us.
                        if len(found) != len(escaped) + KEY_BYTES_LEAST or found[-1] > 1:
                            check_data_key(found)
                        return chunk.values[index] if found[-1] else None
                    return ABSENT
            self._require_whole()

    def borrow(self) -> tuple[None, MemoryReader]:
        return None, MemoryReader(self, self._hold(_DATA))

    def give_back(self, ticket: Any, reader: Any, /) -> None:
        assert isinstance(reader, MemoryReader), "it came from self.borrow()"
        self.release(reader.edition)

    def check(self, reader: EntryReader) -> None:
        reader.status()

    def release(self, edition: Edition) -> None:
        """Count one holder of `edition` less. A holder that never calls this costs one copy."""
        with self._lock:
            edition.holders -= 1

    def require_open(self) -> None:
        """Raise `ClosedError` once the engine is closed."""
        if self.is_closed:
            raise ClosedError(self._where)

    # -- upkeep ---------------------------------------------------------------------------

    def checkpoint(self, target: Path) -> None:
        """Write a snapshot of all families into `target`. O(bytes); writers continue meanwhile."""
        editions = self._hold_all()
        building = target.with_name(f".{target.name}.{secrets.token_hex(4)}")
        try:
            with Journal.open(building, content=CONTENT, sync=Sync.never()) as journal:
                journal.snapshot(state_records(editions))
            with storage_errors(str(target)):
                os.rename(building, target)
                OS_FILES.sync_directory(str(target.absolute().parent))
        finally:
            shutil.rmtree(building, ignore_errors=True)
            for edition in editions:
                self.release(edition)

    def compact(self, family: str, start: bytes = b"", end: bytes | None = None) -> None:
        """Replace the journal by a snapshot of all families, if it has grown since the last one."""
        with self._writing:
            self._settle()
            if self._journal is not None and self._journal.last > self._compacted:
                self._journal.snapshot(self._state.records())
                self._compacted = self._journal.last

    def merges(self, rewritten: tuple[bytes, bytes] | None = None) -> Iterator[None]:
        return iter(())

    def files(self) -> list[FileSpan]:
        edition = self._hold(_DATA)
        try:
            return [
                FileSpan(c.keys[0], c.keys[-1], sum(map(len, c.keys)) + sum(map(len, c.values)))
                for c in edition.chunks
                if c.keys
            ]
        finally:
            self.release(edition)

    def stats(self) -> Mapping[str, int]:
        figures = {}
        for name, edition in zip(FAMILIES, self._hold_all(), strict=True):
            figures[f"{name}_bytes"] = edition.size_bytes()
            figures[f"{name}_memtable_bytes"] = 0
            figures[f"{name}_files"] = 0
            figures[f"{name}_entries"] = len(edition)
            self.release(edition)
        return {**figures, **dict.fromkeys(WHOLE_FIGURES, 0)}

    def fork_let_go(self) -> None:
        """A forked child has no directory open."""
        _OPEN_HERE.clear()

    def close(self) -> None:
        with self._writing:
            if self.is_closed:
                return
            self.is_closed = True
            with self._lock:
                self._state = MemoryState()
            if self._journal is not None:
                assert self.path is not None
                _OPEN_HERE.discard(str(self.path.resolve()))
                self._journal.close()

    # -- inside ---------------------------------------------------------------------------

    def _open_journal(
        self, path: Path, create: bool, files: Files, compact_bytes: int | None
    ) -> Journal:
        require_memory_directory(path, create=create, files=files)
        try:
            journal = Journal.open(
                path,
                restore=self._state.restore,
                apply=self._state.apply,
                snapshot=self._recovered,
                content=CONTENT,
                sync=Sync.never(),
                compact_bytes=compact_bytes,
                files=files,
            )
        except LockedError as error:
            here = str(path.resolve()) in _OPEN_HERE
            raise LockedError(str(path), "this process" if here else "another process") from error
        _OPEN_HERE.add(str(path.resolve()))
        self._compacted = journal.recovery.snapshot or 0
        return journal

    def _replay(self, path: Path, files: Files) -> None:
        """Replay the journal without writing to it, perhaps beside its writer.

        Starts over when the writer replaces files by a snapshot during the replay.
        """
        directory = str(path.absolute())
        for _ in range(READ_ONLY_OPENINGS_MAX):
            self._state = state = MemoryState()
            with suppress(RetryableError), storage_errors(directory):
                require_memory_directory(path, create=False, files=files)
                replay(files, directory, restore=state.restore, apply=state.apply, content=CONTENT)
                return
        raise StaleReaderError(str(path))

    def _recovered(self) -> Iterator[tuple[int, bytes]]:
        """The replayed state as records, without the unfinished ingests of a dead process."""
        self._state.ingests.clear()
        return self._state.records()

    def _hold(self, family: int) -> Edition:
        while True:
            with self._lock:
                if not (self._is_torn or self.is_closed):
                    edition = self._state.families[family]
                    edition.holders += 1
                    return edition
            self._require_whole()

    def _hold_all(self) -> list[Edition]:
        """The editions of one moment, each held."""
        while True:
            with self._lock:
                if not (self._is_torn or self.is_closed):
                    for edition in self._state.families:
                        edition.holders += 1
                    return list(self._state.families)
            self._require_whole()

    def _append(self, kind: int, payload: bytes | None, *, then: Callable[[], None]) -> None:
        """Journal `payload`, unless it is None, and call `then`, which applies it to memory, and
        may be called again. The caller holds `_writing`."""
        self._settle()
        journal = None if payload is None else self._journal
        if journal is None:
            self._begun = 0, then
        else:
            assert payload is not None
            self._begun = journal.last + 1, then
            try:
                journal.append(payload, kind)
            except KVStoreError:  # the journal has not accepted the record
                self._begun = None
                raise
        then()
        self._begun = None

    def _settle(self) -> None:
        """Finish or forget a write that was interrupted. The caller holds `_writing`. May be
        interrupted too. Raises `PoisonedError` if the journal cannot tell whether it has the
        record."""
        self.require_open()
        journal = self._journal
        if self._begun is None:
            if journal is not None and journal.is_interrupted:
                journal.look_again()
            return
        ordinal, then = self._begun
        if not ordinal or (journal is not None and journal.look_again() >= ordinal):
            with self._lock:
                for edition in self._state.families:
                    edition.mend()
            then()
        self._begun, self._is_torn = None, False

    def _note(self, kind: int, payload: bytes) -> None:
        """Journal what concerns an ingest alone. The caller holds `_writing`."""
        self._settle()
        if self._journal is not None:
            self._journal.append(payload, kind)

    def _show(self, batch: Entries) -> None:
        """Make a batch visible whole."""
        if len(batch.ops) > MEMORY_BATCH_IN_PLACE_MAX:
            drafts = self._drafts(batch, in_place=False)
            batch.apply(drafts)
            with self._lock:
                self._state.families = drafts
        else:
            with self._lock:
                drafts = self._drafts(batch, in_place=True)
                self._is_torn = True
                batch.apply(drafts)
                self._state.families = drafts
                self._is_torn = False

    def _drafts(self, batch: Entries, *, in_place: bool) -> list[Edition]:
        """Editions that may be changed, for the families that the batch touches."""
        drafts = list(self._state.families)
        for family in {op & FAMILY_MASK for op in set(batch.ops)}:
            if drafts[family].holders or not in_place:
                drafts[family] = drafts[family].fork()
        return drafts

    def _stage(self, ingest_id: int, keys: list[bytes], values: list[bytes]) -> None:
        payload = b"" if self._journal is None else encode_rows(ingest_id, keys, values)
        with self._writing:
            self._note(ROWS, payload)
            self._state.add_rows(ingest_id, keys, values)

    def _take(self, ingest_id: int) -> None:
        if ingest_id in self._state.ingests:
            edition = self._state.with_ingest(ingest_id)
            with self._lock:
                self._state.families[_DATA] = edition
            self._state.ingests.pop(ingest_id, None)

    def _drop(self, ingest_id: int) -> None:
        with self._writing:
            if self.is_closed:
                return
            self._settle()
            if ingest_id in self._state.ingests:
                del self._state.ingests[ingest_id]
                self._note(DROPPED, encode_ingest(ingest_id))

    def _require_whole(self) -> None:
        """Settle an interrupted write. Raises as `_settle`."""
        with self._writing:
            self._settle()


# --------------------------------------------------------------------------------------------------
# An ordered map of bytes to bytes whose readers keep the state they began with.
#
# Entries lie in chunks, each of which has two parallel sorted lists, keys and values. An edition is
# a list of chunks. A reader takes the present edition and counts itself in `holders`. A writer
# changes an edition without holders in place. Otherwise it forks the edition: it copies the list of
# chunks, and each chunk that it writes to.
#
#     firsts   b""        b"f"       b"p"         least key that belongs in the chunk
#     chunks   [a c d]    [f g k]    [p q]        at most CHUNK_ENTRIES_MAX each
#
# Chosen: sorted chunks with copy on write. A put costs about what it costs in a `SortedDict` (1 M
# random keys, one run: 7.8 against 6.6 us while filling, 1.4 us once filled); a cursor hands out
# slices, 0.08 against 1.5 us per entry, and later writes do not disturb it. The first write to each
# chunk after a cursor opened pays for the cursor, once: 7 us with 100,000 entries, 29 us with 1 M.
# An entry is two references and no container, so nothing wakes the cyclic garbage collector.
# Rejected: a `SortedDict` whose writers keep overwritten values for open cursors. Each cursor would
# filter its entries by all later writes, and the dictionary takes 100 bytes more per entry. A copy
# for each cursor: O(entries). A tree of immutable nodes: every put copies a path, with or without
# cursors, and the garbage collector counts a million small containers.
#
# Invariants (`check` walks them)
# 1. `firsts[0]` is empty, `firsts` and the keys of each chunk ascend strictly.
# 2. All keys of chunk i are at or above `firsts[i]` and below `firsts[i + 1]`.
# 3. No chunk is empty, unless it is the only one. (Chunks that shrink are not joined.)
# 4. An edition with holders, or one that was forked, never changes. A chunk changes only through
#    the edition whose number it carries.

_numbers = itertools.count(1)

_FEW = 16
"""At most this many rows are put one by one into a chunk; more are merged with the whole chunk."""


class SortedChunk:
    """Some neighbouring entries, and the number of the edition that may change them."""

    __slots__ = ("edition", "keys", "values")

    def __init__(self, keys: list[bytes], values: list[bytes], edition: int) -> None:
        self.keys = keys
        self.values = values
        self.edition = edition


_COMING: Final = bytes(bytearray(b"coming"))  # an object of its own: it is compared by identity


class Edition:
    """One state of the map. Changed by its one writer only while `holders` is 0.

    A change in place that an interrupt has cut is told by its steps: `_COMING` stands for a value
    whose key is not there yet, or no more; `firsts` may lag behind `chunks`. `mend` makes a map of
    it, and the change is then made again.
    """

    __slots__ = ("chunks", "firsts", "holders", "number")

    def __init__(self) -> None:
        self.number = next(_numbers)
        self.firsts = [b""]
        self.chunks = [SortedChunk([], [], self.number)]
        self.holders = 0

    def fork(self) -> Edition:
        """A new edition with these entries. O(chunks)."""
        forked = Edition.__new__(Edition)
        forked.number = next(_numbers)
        forked.firsts = self.firsts.copy()
        forked.chunks = self.chunks.copy()
        forked.holders = 0
        return forked

    # -- reading ----------------------------------------------------------------------------

    def __len__(self) -> int:
        return sum(len(chunk.keys) for chunk in self.chunks)

    def size_bytes(self) -> int:
        """Bytes of all keys and values. O(entries), 0.03 us each."""
        return sum(sum(map(len, c.keys)) + sum(map(len, c.values)) for c in self.chunks)

    def get(self, key: bytes) -> bytes | None:
        """The value of `key`, None where there is none."""
        chunk = self.chunks[bisect_right(self.firsts, key) - 1]
        index = bisect_left(chunk.keys, key)
        if index < len(chunk.keys) and chunk.keys[index] == key:
            return chunk.values[index]
        return None

    def position(self, key: bytes) -> tuple[int, int]:
        """The chunk and the index in it where `key` is or would be inserted. The index may be one
        past the end of the chunk."""
        at = bisect_right(self.firsts, key) - 1
        return at, bisect_left(self.chunks[at].keys, key)

    def end(self) -> tuple[int, int]:
        """The position behind the last entry."""
        return len(self.chunks) - 1, len(self.chunks[-1].keys)

    # -- writing ----------------------------------------------------------------------------

    def put(self, key: bytes, value: bytes) -> None:
        """Set `key`. O(log entries)."""
        at = bisect_right(self.firsts, key) - 1
        chunk = self.chunks[at]
        if chunk.edition != self.number:
            chunk = self._own(at)
        keys = chunk.keys
        index = bisect_left(keys, key)
        if index < len(keys) and keys[index] == key:
            chunk.values[index] = value
            return
        chunk.values.insert(index, _COMING)
        keys.insert(index, key)
        chunk.values[index] = value
        if len(keys) > CHUNK_ENTRIES_MAX:
            # A writer of ascending keys, as the change index is, leaves full chunks behind.
            is_last = index == len(keys) - 1 and at == len(self.chunks) - 1
            self._split(at, index if is_last else len(keys) // 2)

    def delete(self, key: bytes) -> None:
        """Remove `key`. Does nothing if it is absent. O(log entries)."""
        at, index = self.position(key)
        keys = self.chunks[at].keys
        if index < len(keys) and keys[index] == key:
            self._cut(at, index, index + 1)
            self._drop_empty(at)

    def delete_range(self, begin: bytes, end: bytes) -> None:
        """Remove the keys `begin <= key < end`. O(chunks of the span)."""
        if begin >= end:
            return
        (first, low), (last, high) = self.position(begin), self.position(end)
        if first == last:
            self._cut(first, low, high)
            self._drop_empty(first)
            return
        self._cut(last, 0, high)
        self._drop_empty(last)
        del self.chunks[first + 1 : last], self.firsts[first + 1 : last]
        self._cut(first, low, len(self.chunks[first].keys))
        self._drop_empty(first)

    def merge(self, keys: list[bytes], values: list[bytes]) -> None:
        """Set many keys, which ascend strictly. 0.1 us each where they lie close together."""
        low = 0
        while low < len(keys):
            at = bisect_right(self.firsts, keys[low]) - 1
            is_last = at == len(self.chunks) - 1
            high = len(keys) if is_last else bisect_left(keys, self.firsts[at + 1], low)
            if high - low <= _FEW:
                for index in range(low, high):
                    self.put(keys[index], values[index])
            else:
                self._merge_into(at, keys[low:high], values[low:high])
            low = high

    def mend(self) -> None:
        """Make a map of what an interrupted change has left: the keys that the change concerns may
        be there or not, with any value. O(chunks)."""
        for chunk in self.chunks:
            if len(chunk.keys) != len(chunk.values):
                chunk.values = [value for value in chunk.values if value is not _COMING]
        full = [chunk for chunk in self.chunks if chunk.keys]
        self.chunks = full or [SortedChunk([], [], self.number)]
        self.firsts = [b"", *(chunk.keys[0] for chunk in self.chunks[1:])]

    def check(self) -> None:
        """Assert all invariants. O(entries)."""
        assert self.firsts[0] == b""
        assert len(self.firsts) == len(self.chunks)
        assert all(map(_ascends, [self.firsts, *(chunk.keys for chunk in self.chunks)]))
        for at, chunk in enumerate(self.chunks):
            assert len(chunk.keys) == len(chunk.values) <= CHUNK_ENTRIES_MAX
            assert chunk.keys or len(self.chunks) == 1
            assert not chunk.keys or chunk.keys[0] >= self.firsts[at]
            above = self.firsts[at + 1 : at + 2]
            assert not chunk.keys or not above or chunk.keys[-1] < above[0]

    # -- inside -----------------------------------------------------------------------------

    def _own(self, at: int) -> SortedChunk:
        """The chunk, copied if another edition may have it."""
        chunk = self.chunks[at]
        if chunk.edition != self.number:
            chunk = SortedChunk(chunk.keys.copy(), chunk.values.copy(), self.number)
            self.chunks[at] = chunk
        return chunk

    def _split(self, at: int, cut: int) -> None:
        keys, values = self.chunks[at].keys, self.chunks[at].values
        left = SortedChunk(keys[:cut], values[:cut], self.number)
        right = SortedChunk(keys[cut:], values[cut:], self.number)
        self.chunks[at : at + 1] = left, right
        self.firsts.insert(at + 1, right.keys[0])

    def _cut(self, at: int, low: int, high: int) -> None:
        if low < high:
            chunk = self._own(at)
            chunk.values[low:high] = [_COMING] * (high - low)
            del chunk.keys[low:high]
            del chunk.values[low:high]

    def _drop_empty(self, at: int) -> None:
        if not self.chunks[at].keys and len(self.chunks) > 1:
            # The chunk behind the first takes over the first one's bound, the empty key.
            del self.chunks[at], self.firsts[at or 1]

    def _merge_into(self, at: int, keys: list[bytes], values: list[bytes]) -> None:
        """Merge rows that belong in one chunk, and cut the result into full chunks."""
        chunk = self.chunks[at]
        if chunk.keys and keys[0] <= chunk.keys[-1]:
            rows = dict(zip(chunk.keys, chunk.values, strict=True))
            rows.update(zip(keys, values, strict=True))
            keys = sorted(rows)
            values = [rows[key] for key in keys]
        else:
            keys, values = chunk.keys + keys, chunk.values + values
        cuts = range(0, len(keys), CHUNK_ENTRIES_MAX)
        self.firsts[at + 1 : at + 1] = [keys[cut] for cut in cuts[1:]]
        self.chunks[at : at + 1] = [
            SortedChunk(
                keys[cut : cut + CHUNK_ENTRIES_MAX],
                values[cut : cut + CHUNK_ENTRIES_MAX],
                self.number,
            )
            for cut in cuts
        ]


def pieces(edition: Edition) -> Iterator[tuple[list[bytes], list[bytes]]]:
    """All entries of an edition, in order, as lists that must not be changed."""
    for chunk in edition.chunks:
        if chunk.keys:
            yield chunk.keys, chunk.values


def _ascends(keys: list[bytes]) -> bool:
    return all(before < after for before, after in itertools.pairwise(keys))


# --------------------------------------------------------------------------------------------------
# Readers and cursors of the memory engine: passes over an edition that they hold.
#
# Invariants
# 1. A pass shows the edition with which it was made. Later writes do not appear.
# 2. Once the engine is closed, every call raises `ClosedError`, so a pass never ends early.


class MemoryReader:
    """A position in one edition of `data`."""

    __slots__ = ("_at", "_engine", "_index", "_keys", "edition")

    def __init__(self, engine: MemoryEngine, edition: Edition) -> None:
        self.edition = edition
        self._engine = engine
        self._at = 0
        self._index = 0
        self._keys: list[bytes] = []

    def seek(self, key: bytes) -> None:
        if self._engine.is_closed:
            self._engine.require_open()
        # Every look-up runs this. It repeats `Edition.position` to save a call and a pair.
        edition = self.edition
        self._at = at = bisect_right(edition.firsts, key) - 1
        self._keys = keys = edition.chunks[at].keys
        self._index = index = bisect_left(keys, key)
        if index >= len(keys):
            self._settle()

    def seek_for_prev(self, key: bytes) -> None:
        self.seek(key)
        if self.key() != key:
            self.prev()

    def next(self) -> None:
        self._engine.require_open()
        self._index += 1
        self._settle()

    def prev(self) -> None:
        self._engine.require_open()
        if self._index > 0:
            self._index -= 1
        elif self._at > 0:
            self._at -= 1
            self._keys = self.edition.chunks[self._at].keys
            self._index = len(self._keys) - 1
        else:
            self._keys = []

    def status(self) -> None:
        self._engine.require_open()

    def key(self) -> bytes | None:
        keys, index = self._keys, self._index
        return keys[index] if index < len(keys) else None

    def value(self) -> bytes:
        return self.edition.chunks[self._at].values[self._index]

    def _settle(self) -> None:
        """Move from behind the last entry of a chunk to the first entry of the next chunk."""
        chunks = self.edition.chunks
        self._keys = chunks[self._at].keys
        if self._index >= len(self._keys) and self._at + 1 < len(chunks):
            self._at, self._index = self._at + 1, 0
            self._keys = chunks[self._at].keys


class MemoryCursor:
    """A pass over one span of one edition, in slices of its chunks."""

    def __init__(
        self,
        engine: MemoryEngine,
        edition: Edition,
        start: bytes,
        end: bytes | None,
        *,
        reverse: bool,
    ) -> None:
        self._engine = engine
        self._edition: Edition | None = edition
        self._low = edition.position(start)
        self._high = edition.end() if end is None else edition.position(end)
        self._reverse = reverse
        self._is_done = False
        self._fitting = SCAN_CHUNK  # entries, by the size of the values before

    def take(self, count: int) -> tuple[list[bytes], list[bytes]]:
        self._engine.require_open()
        keys: list[bytes] = []
        values: list[bytes] = []
        edition = self._edition
        if edition is None:
            if not self._is_done:
                raise ClosedError("the scan")
            return keys, values
        take_slice = self._descend if self._reverse else self._ascend
        while len(keys) < count and self._low < self._high:
            chunk, part = take_slice(edition, count - len(keys))
            keys += chunk.keys[part]
            values += chunk.values[part]
        if not keys and count > 0:
            self.close()
            self._is_done = True
        return keys, values

    def feed(self, live: Live, count: int) -> bool:
        keys, values = self.take(min(count, self._fitting))
        self._fitting = next_count(values, SCAN_CHUNK)
        live.pass_over(zip(keys, values, strict=True), len(keys))
        if live.ahead is not None:
            self._go(*live.ahead)
        return bool(keys)

    def _go(self, target: bytes, is_floor: bool) -> None:
        assert self._edition is not None
        at, index = self._edition.position(target)
        if not self._reverse:
            self._low = at, index
        elif is_floor:
            self._high = at, index
        else:
            chunk = self._edition.chunks[at]
            self._high = (at, index + 1) if index < len(chunk.keys) else (at + 1, 1)

    def close(self) -> None:
        edition, self._edition = self._edition, None
        self._is_done = False
        if edition is not None:
            self._engine.release(edition)

    def _ascend(self, edition: Edition, count: int) -> tuple[SortedChunk, slice]:
        (at, index), (last, end) = self._low, self._high
        chunk = edition.chunks[at]
        stop = min(index + count, end if at == last else len(chunk.keys))
        is_used_up = at < last and stop == len(chunk.keys)
        self._low = (at + 1, 0) if is_used_up else (at, stop)
        return chunk, slice(index, stop)

    def _descend(self, edition: Edition, count: int) -> tuple[SortedChunk, slice]:
        (first, start), (at, stop) = self._low, self._high
        chunk = edition.chunks[at]
        index = max(stop - count, start if at == first else 0)
        is_used_up = at > first and index == 0
        self._high = (at - 1, len(edition.chunks[at - 1].keys)) if is_used_up else (at, index)
        if not stop:  # the pass ends before the first key of this chunk
            return chunk, slice(0)
        return chunk, slice(stop - 1, index - 1 if index else None, -1)


# --------------------------------------------------------------------------------------------------
# The state of the memory engine, and the journal records from which it is built.
#
#     record type   payload                                  meaning
#     1 batch       entries                                  one engine batch
#     2 rows        ingest id u64 | entries                  rows of an ingest, not yet in `data`
#     3 taken       ingest id u64                            the rows of the ingest are in `data`
#     4 dropped     ingest id u64                            the rows of the ingest are discarded
#     5 state       entries                                  a piece of a snapshot
#
#     entries := | count u32 | op u8 x count | key bytes u32 x count | value bytes u32 x count
#                | keys | values |                           all integers little-endian
#     op      := family (2 bits, 0 data, 1 ranges, 2 changes, 3 meta) | kind << 2
#     kind    := 0 put | 1 delete | 2 delete range, whose value is the end of the range
#
# Entries are stored as columns, so that all lengths of a record are read in one step.
#
# Invariants
# 1. A batch is one record: the journal keeps it whole or not at all.
# 2. An ingest is many records, so that no record grows with its size. `taken` commits it. Rows
#    without `taken` or `dropped` belong to the process that wrote them: the first record of another
#    incarnation drops them.

CONTENT: Final = "kvstore-memory-1"
"""The content that a journal of these records names; the number is the format's version."""

BATCH: Final = 1
ROWS: Final = 2
TAKEN: Final = 3
DROPPED: Final = 4
STATE: Final = 5

PUT: Final = 0
DELETE: Final = 1
DELETE_RANGE: Final = 2
FAMILY_MASK: Final = 0b11
KIND_SHIFT: Final = 2

FAMILY_NUMBERS: Final = {family: number for number, family in enumerate(FAMILIES)}
_DATA: Final = FAMILY_NUMBERS[DATA]
SortedRows: TypeAlias = "tuple[list[bytes], list[bytes]]"
"""Keys and values, ascending by key."""

_COUNT = struct.Struct("<I")
_INGEST_ID = struct.Struct("<Q")


_BATCH_OPS = bytes(
    family | kind << KIND_SHIFT for family in range(len(FAMILIES)) for kind in range(3)
)
_SORTED_OPS = bytes(family | PUT << KIND_SHIFT for family in range(len(FAMILIES)))


class Entries:
    """Operations in the order in which they take effect, as three columns."""

    __slots__ = ("keys", "ops", "values")

    def __init__(self) -> None:
        self.ops = bytearray()
        self.keys: list[bytes] = []
        self.values: list[bytes] = []

    def put(self, key: bytes, value: bytes, column_family: int) -> None:
        """Set `key` to `value`; the last write to a key wins."""
        self.ops.append(column_family)
        self.keys.append(key)
        self.values.append(value)

    def delete(self, key: bytes, column_family: int) -> None:
        """Remove `key`, whether or not it is there."""
        self.ops.append(column_family | DELETE << KIND_SHIFT)
        self.keys.append(key)
        self.values.append(b"")

    def delete_range(self, begin: bytes, end: bytes, column_family: int) -> None:
        """Remove the keys `begin <= key < end`."""
        self.ops.append(column_family | DELETE_RANGE << KIND_SHIFT)
        self.keys.append(begin)
        self.values.append(end)

    def apply(self, editions: Sequence[Edition]) -> None:
        """Apply each operation to the edition of its family."""
        for op, key, value in zip(self.ops, self.keys, self.values, strict=True):
            edition, kind = editions[op & FAMILY_MASK], op >> KIND_SHIFT
            if kind == PUT:
                edition.put(key, value)
            elif kind == DELETE:
                edition.delete(key)
            else:
                edition.delete_range(key, value)


class MemoryState:
    """The families of an engine and the ingests under way: a fold over journal records."""

    def __init__(self) -> None:
        self.families = [Edition() for _ in FAMILIES]
        self.ingests: dict[int, list[SortedRows]] = {}
        self._incarnation = 0

    def restore(self, record: Record) -> None:
        """Take in one record of a snapshot."""
        if record.type == STATE:
            family, keys, values = decode_sorted(record.payload)
            self.families[family].merge(keys, values)
            self._incarnation = record.incarnation
        elif record.type == ROWS:
            self.apply(record)
        else:
            raise _broken(record, f"type {record.type} in a snapshot")

    def apply(self, record: Record) -> None:
        """Take in the journal's next record."""
        if record.incarnation != self._incarnation:
            self._incarnation = record.incarnation
            self.ingests.clear()
        payload = record.payload
        if record.type == BATCH:
            entries = Entries()
            ops, entries.keys, entries.values = decode(payload)
            if ops.translate(None, _BATCH_OPS):
                raise _broken(record, "an operation is not known")
            entries.ops = bytearray(ops)
            entries.apply(self.families)
        elif record.type == ROWS:
            ingest_id = _ingest_id(payload[: _INGEST_ID.size])
            family, keys, values = decode_sorted(payload, at=_INGEST_ID.size)
            if family != _DATA:
                raise _broken(record, f"rows of an ingest for family {family}")
            self.add_rows(ingest_id, keys, values)
        elif record.type == TAKEN:
            self.families[_DATA] = self.with_ingest(_ingest_id(payload))
            self.ingests.pop(_ingest_id(payload), None)
        elif record.type == DROPPED:
            self.ingests.pop(_ingest_id(payload), None)
        else:
            raise _broken(record, f"type {record.type} is not known")

    def records(self) -> Iterator[tuple[int, bytes]]:
        """The state as records for `restore`: (type, payload)."""
        yield from state_records(self.families)
        for ingest_id, rows in self.ingests.items():
            for keys, values in rows:
                yield ROWS, encode_rows(ingest_id, keys, values)

    def add_rows(self, ingest_id: int, keys: list[bytes], values: list[bytes]) -> None:
        """Keep rows of an ingest until it is taken or dropped."""
        self.ingests.setdefault(ingest_id, []).append((keys, values))

    def with_ingest(self, ingest_id: int) -> Edition:
        """A new edition of `data` with the rows of an ingest."""
        edition = self.families[_DATA].fork()
        for keys, values in self.ingests.get(ingest_id, ()):
            edition.merge(keys, values)
        return edition


def state_records(families: Iterable[Edition]) -> Iterator[tuple[int, bytes]]:
    """Snapshot records of these families, in their order."""
    for number, edition in enumerate(families):
        for keys, values in bounded(pieces(edition)):
            yield STATE, encode(bytes([number]) * len(keys), keys, values)


def bounded(rows: Iterable[SortedRows]) -> Iterator[SortedRows]:
    """The same rows in pieces of at most `MEMORY_RECORD_BYTES`, or one row that is larger."""
    for keys, values in rows:
        sizes = [len(key) + len(value) for key, value in zip(keys, values, strict=True)]
        first = size = 0
        for index, row in enumerate(sizes):
            if size + row > MEMORY_RECORD_BYTES and index > first:
                yield keys[first:index], values[first:index]
                first, size = index, 0
            size += row
        if first < len(keys):
            yield keys[first:], values[first:]


def encode(ops: bytes | bytearray, keys: Sequence[bytes], values: Sequence[bytes]) -> bytes:
    """The bytes of entries in a record."""
    count = len(ops)
    lengths = [len(key) for key in keys]
    lengths += map(len, values)
    head = struct.pack(f"<I{count}s{2 * count}I", count, bytes(ops), *lengths)
    return b"".join((head, *keys, *values))


def encode_rows(ingest_id: int, keys: Sequence[bytes], values: Sequence[bytes]) -> bytes:
    """The payload of a `ROWS` record."""
    return encode_ingest(ingest_id) + encode(bytes([_DATA]) * len(keys), keys, values)


def encode_ingest(ingest_id: int) -> bytes:
    """The payload of a `TAKEN` or `DROPPED` record."""
    return _INGEST_ID.pack(ingest_id)


def decode(payload: bytes, *, at: int = 0) -> tuple[bytes, list[bytes], list[bytes]]:
    """Ops, keys and values from byte `at` on. Raises `CorruptionError`."""
    try:
        (count,) = _COUNT.unpack_from(payload, at)
        at += _COUNT.size
        ops, *lengths = struct.unpack_from(f"<{count}s{2 * count}I", payload, at)
    except struct.error as error:
        raise CorruptionError("a journal record", f"its columns are cut: {error}") from error
    ends = list(accumulate(lengths, initial=at + 9 * count))
    if ends[-1] != len(payload) or not count:
        raise CorruptionError("a journal record", f"{len(payload)} bytes, not {ends[-1]}")
    parts = [payload[ends[i] : ends[i + 1]] for i in range(2 * count)]
    return ops, parts[:count], parts[count:]


def decode_sorted(payload: bytes, *, at: int = 0) -> tuple[int, list[bytes], list[bytes]]:
    """The family, keys and values of entries that put ascending keys into one family.

    Raises `CorruptionError` for other entries: merging them would break the order of the map.
    """
    ops, keys, values = decode(payload, at=at)
    if ops[0] not in _SORTED_OPS or ops.strip(ops[:1]):
        raise CorruptionError("a journal record", "its entries are not puts into one family")
    if not all(map(lt, keys, islice(keys, 1, None))):
        raise CorruptionError("a journal record", "its keys do not ascend")
    return ops[0] & FAMILY_MASK, keys, values


def _broken(record: Record, problem: str) -> CorruptionError:
    return CorruptionError(f"journal record {record.ordinal}", problem)


def _ingest_id(payload: bytes) -> int:
    if len(payload) != _INGEST_ID.size:
        raise CorruptionError("a journal record", f"{len(payload)} bytes hold no ingest id")
    (ingest_id,) = _INGEST_ID.unpack_from(payload)
    return int(ingest_id)


# --------------------------------------------------------------------------------------------------
# Directories of journals: whether one is at a path, and whether this release may open it.


def is_memory_store(path: Path) -> bool:
    """Whether `path` is a directory with a journal, or with the note of a journal that is lost."""
    if not path.is_dir():
        return False
    names = os.listdir(path)
    if any(map(is_journal_file, names)):
        return True
    return LOCK_NAME in names and read_note(OS_FILES, str(path)) is not None


def require_memory_directory(path: Path, *, create: bool, files: Files = OS_FILES) -> None:
    """Raise `NotAStoreError` unless `path` holds a memory engine's journal or, if `create`,
    may become one; `FormatVersionError` if a newer release wrote it."""
    with storage_errors(str(path)):
        _require_memory_directory(path, create=create, files=files)


def _require_memory_directory(path: Path, *, create: bool, files: Files) -> None:
    if path.exists() and not path.is_dir():
        raise NotAStoreError(str(path), "a file, not a directory", "choose another path")
    if path.exists() and is_memory_store(path):
        content = content_of(path, files=files)
        if content not in (None, CONTENT):
            _refuse(path, str(content))
        return
    present = set(os.listdir(path)) if path.exists() else set()
    if not {name for name in present if not is_unborn(name)} <= {LOCK_NAME, COMPACTING_NAME}:
        raise NotAStoreError(
            str(path), "a directory of other files", "check the path, or choose an empty directory"
        )
    if not create:
        raise NotAStoreError(str(path), "no store is there", "check the path")


def _refuse(path: Path, content: str) -> None:
    kind, _, version = content.rpartition("-")
    if kind == CONTENT.rpartition("-")[0]:
        raise FormatVersionError(str(path), found=version, supported=CONTENT.rpartition("-")[2])
    raise NotAStoreError(str(path), f"a journal of {content!r}", "choose another path")
