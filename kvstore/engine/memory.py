"""Ordered maps in memory behind the `Engine` contract, durable by the journal.

For stores that fit in memory: tests and caches without a directory (`path=None`), small services
with one. Each batch is a journal record before it is visible. Opening replays the snapshot and the
records, and writes a new snapshot after a long replay. `kvstore.engine.state` defines the records;
`kvstore.engine.editions` and `kvstore.engine.passes` let readers keep their state during writes.

Differences from RocksDB: opening, `checkpoint` and `compact` cost O(bytes), and an `ingest`
O(rows), because it journals them. The journal grows until it is compacted: by opening, by
`compact`, or by another process (`kvstore journal compact`).

Invariants
1. `_writing` orders writes: the batch journaled first is visible first. A writer holds it while it
   hands the record to the operating system; it covers an fsync only when a journal file is full.
2. `_lock` guards the editions that readers take. A thread holds it for the moment of taking an
   edition or of changing one in place. Lock order: `_writing`, then `_lock`.
3. If a journaled record could not be made visible, memory and journal differ: every call raises
   `PoisonedError` until the store is opened again.
"""

from __future__ import annotations

import os
import secrets
import shutil
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing, suppress
from itertools import count
from pathlib import Path
from typing import Any, Final

from kvstore.codec.keys import KEY_BYTES_LEAST, check_data_key
from kvstore.codec.ordered import escape
from kvstore.engine.api import (
    DATA,
    FAMILIES,
    WHOLE_FIGURES,
    EntryReader,
    FileSpan,
    WriteBatch,
)
from kvstore.engine.editions import Edition
from kvstore.engine.loose import LooseFiles
from kvstore.engine.memory_opening import require_memory_directory
from kvstore.engine.passes import MemoryCursor, MemoryReader
from kvstore.engine.state import (
    BATCH,
    CONTENT,
    DROPPED,
    FAMILY_MASK,
    FAMILY_NUMBERS,
    ROWS,
    TAKEN,
    Entries,
    MemoryState,
    bounded,
    encode,
    encode_ingest,
    encode_rows,
    state_records,
)
from kvstore.errors import (
    ClosedError,
    KVStoreError,
    LockedError,
    PoisonedError,
    RetryableError,
    StaleReaderError,
    StorageError,
)
from kvstore.errors.system import storage_errors
from kvstore.forks import own
from kvstore.journal import OS_FILES, Files, Journal, Sync, replay
from kvstore.limits import MEMORY_BATCH_IN_PLACE_MAX, READ_ONLY_OPENINGS_MAX
from kvstore.loops.contract import ABSENT, Found

_DATA: Final = FAMILY_NUMBERS[DATA]

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
        self._poison = ""
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
        return False

    def sync(self) -> None:
        self._require_usable()
        if self._journal is not None:
            self._journal.sync()

    def flush(self) -> None:
        self._require_usable()

    def ingest(self, files: Sequence[Path]) -> None:
        self._require_usable()
        if not files:
            return
        ingest_id = next(self._ingest_ids)
        try:
            with (
                storage_errors(str(files[0].parent)),
                LooseFiles(files) as loose,
                closing(loose.rows()) as rows,
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
        with self._lock:
            self._require_usable()
            return self._state.families[FAMILY_NUMBERS[family]].get(key)

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

    def find(self, key: bytes, rest: bytes, limit: bytes, /) -> Found:
        # Under the lock: writers change an edition without holders in place, and counting a holder
        # costs as much as the lock.
        escaped = escape(key)
        with self._lock:
            self._require_usable()
            edition = self._state.families[_DATA]
            at, index = edition.position(escaped + rest)
            chunk = edition.chunks[at]
            if index == len(chunk.keys) and at + 1 < len(edition.chunks):
                chunk, index = edition.chunks[at + 1], 0
            if index < len(chunk.keys) and (found := chunk.keys[index]) < escaped + limit:
                # As `require_entry`, without its call, which is 0.1 of 0.9 us.
                if len(found) != len(escaped) + KEY_BYTES_LEAST or found[-1] > 1:
                    check_data_key(found)
                return chunk.values[index] if found[-1] else None
            return ABSENT

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
        with self._lock:
            self._require_usable()
            editions = list(self._state.families)
            for edition in editions:
                edition.holders += 1
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
            self._require_usable()
            if self._journal is not None and self._journal.last > self._compacted:
                self._journal.snapshot(self._state.records())
                self._compacted = self._journal.last

    def merges(self, rewritten: tuple[bytes, bytes] | None = None) -> Iterator[None]:
        return iter(())

    def files(self) -> list[FileSpan]:
        with self._lock:
            self._require_usable()
            edition = self._state.families[_DATA]
            return [
                FileSpan(c.keys[0], c.keys[-1], sum(map(len, c.keys)) + sum(map(len, c.values)))
                for c in edition.chunks
                if c.keys
            ]

    def stats(self) -> Mapping[str, int]:
        with self._lock:
            self._require_usable()
            editions = list(self._state.families)
        figures = {}
        for name, edition in zip(FAMILIES, editions, strict=True):
            figures[f"{name}_bytes"] = edition.size_bytes()
            figures[f"{name}_memtable_bytes"] = 0
            figures[f"{name}_files"] = 0
            figures[f"{name}_entries"] = len(edition)
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
        with self._lock:
            self._require_usable()
            edition = self._state.families[family]
            edition.holders += 1
            return edition

    def _append(self, kind: int, payload: bytes | None, *, then: Callable[[], None]) -> None:
        """Journal `payload`, unless it is None, and call `then`, which applies it to memory. The
        caller holds `_writing`."""
        self._require_usable()
        try:
            if self._journal is not None and payload is not None:
                self._journal.append(payload, kind)
            then()
        except KVStoreError:  # the journal did not accept the record, or is poisoned itself
            raise
        except BaseException as error:
            self._poison = f"{type(error).__name__} between journal and memory"
            raise

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
                batch.apply(drafts)
                self._state.families = drafts

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
            add = self._state.add_rows
            self._append(ROWS, payload, then=lambda: add(ingest_id, keys, values))

    def _take(self, ingest_id: int) -> None:
        edition = self._state.with_ingest(ingest_id)
        with self._lock:
            self._state.families[_DATA] = edition

    def _drop(self, ingest_id: int) -> None:
        with self._writing:
            if self.is_closed or self._poison or ingest_id not in self._state.ingests:
                return
            del self._state.ingests[ingest_id]
            self._append(DROPPED, encode_ingest(ingest_id), then=lambda: None)

    def _require_usable(self) -> None:
        if self.is_closed:
            raise ClosedError(self._where)
        if self._poison:
            raise PoisonedError(self._where, self._poison)
