"""A RocksDB directory that another process writes, followed by catching up again and again.

RocksDB calls such a database a secondary instance. It reads the MANIFEST and the logs of the
writer, and keeps the tail of the logs in memory. Nothing is written in the writer's directory:
the instance is opened in a home of its own, see `kvstore.engine.moment`.

    home/CURRENT, MANIFEST-%06d    links to the writer's files
    directory/%06d.sst, %06d.log   found by RocksDB's options `db_paths` and `wal_dir`

RocksDB reads the MANIFEST first and the logs after it. Beside a writer the logs may then be newer
than the list of files: the record of an import is there and its files are not, or a log was removed
because its entries had come into a file. If the end of the MANIFEST is the same before and after a
catch-up, no file came or went meanwhile.

The writer removes a log some time after the edit that made it useless. If RocksDB has listed such a
log and does not find it, it reads none of the newer logs either, and reports no error
(`DBImplSecondary`, rocksdict 0.3.29). So every log that was there before the catch-up must still be
there after it. Then the state is the one that killing the writer in that moment would have left.

Invariants
1. The state of the instance is proven when `catch_up` returns, by two equal ends of the MANIFEST,
   and by logs that were there all the time. If it raises, the state may be torn, and the caller
   answers no read until it returns.
2. Iterators are made under `lock`, and the caller holds `lock` from the catch-up until it has
   published the new frontiers. So an iterator never shows a state that readers have not been told
   of. RocksDB keeps the state of an iterator until the iterator ends.
3. The instance is opened anew after a flush of the writer (`kvstore.engine.logs` has the reason).
   The same holds for a new MANIFEST, and for a file that shrank or was replaced: the writer or the
   whole store was replaced, and RocksDB would mix old bytes with new.
"""

from __future__ import annotations

import threading
import time
from contextlib import suppress
from math import inf
from pathlib import Path
from typing import Any, Final, NamedTuple

import rocksdict as rocks

from kvstore.engine.api import FAMILIES, EntryReader
from kvstore.engine.logs import EditReader, FileEnd, file_end, looks_recycled
from kvstore.engine.moment import ManifestEnd, ReaderHome, log_names, manifest_end
from kvstore.engine.rocks import (
    RocksCursor,
    RocksEngine,
    database_options,
    family_options,
    sorted_files_at,
    translated,
)
from kvstore.errors import (
    CorruptionError,
    NotAStoreError,
    StaleReaderError,
    StorageError,
    storage_errors,
)
from kvstore.limits import DIRECTORY_TICK_S_MAX, FOLLOW_FAILURES_MAX, FOLLOW_LOOKS_MAX

_MARKS: Final = (
    "rocksdb.current-super-version-number",
    "rocksdb.num-entries-active-mem-table",
    "rocksdb.num-entries-imm-mem-tables",
)


_NO_FILE: Final = FileEnd(0, 0, 0, 0)


class _Look(NamedTuple):
    """The ends of a directory's files. Equal looks say that nothing was written in between."""

    manifest: ManifestEnd
    logs: tuple[str, ...]
    """The names of the logs, oldest first."""
    log_inode: int
    """The inode of the newest log."""
    log_size: int

    def continues(self, former: _Look) -> bool:
        """Whether the writer has only added bytes to the files since the look `former`."""
        now, then = self.manifest, former.manifest
        if now[:3] != then[:3] or now.size < then.size:
            return False
        return self.logs[-1:] != former.logs[-1:] or (
            self.log_inode == former.log_inode and self.log_size >= former.log_size
        )

    def proves(self, former: _Look) -> bool:
        """Whether what was read since the look `former` is one state."""
        return self.manifest == former.manifest and set(former.logs) <= set(self.logs)


class SecondaryEngine(RocksEngine):
    """A RocksDB database that another process writes, at a state that `catch_up` moves."""

    def __init__(self, path: Path) -> None:
        self.lock = threading.RLock()
        """Held while the state moves, and while an iterator is made."""
        self._home: ReaderHome | None = None
        self._seen: _Look | None = None
        """The files at the beginning of the last catch-up."""
        self._proven: _Look | None = None
        """The files at the beginning of the last catch-up whose state was proven."""
        self._where = str(path)
        self._current = self._listed_of = _NO_FILE
        self._settles_at = 0.0
        self._manifest_name = ""
        self._logs: tuple[str, ...] = ()
        self._edits = EditReader(path)
        super().__init__(path, read_only=True, database=self._first)

    def catch_up(self) -> bool:
        """Take the writer's state of now. Returns whether anything was written since the last call.

        The caller holds `lock`. Costs 20 us where nothing was written, and 4 us a commit otherwise.
        The interpreter lock is held meanwhile. Raises `StaleReaderError` if the writer changed its
        list of files during each of many attempts, `NotAStoreError` if the store was removed, and
        `StorageError` if a file cannot be read.
        """
        former = self._open()
        if self._look() == self._proven:
            return False
        database = self._advanced(former, self._cache)
        if database is not former:
            handles: list[Any] = [*self._family.values(), former]
            self._db = database
            self._take_families(database)
            for handle in handles:  # iterators keep the old database as long as they need it
                with suppress(Exception):
                    handle.close()
        self._readers.renew()
        return True

    @property
    def opened(self) -> object:
        """An object that is replaced at each opening. The instance is opened anew when the writer
        or the store was replaced."""
        return self._home

    def marks(self, family: str) -> tuple[int, ...]:
        """Numbers that change with each write to a family. Takes 5 us."""
        with translated(self._where):
            return tuple(self._family[family].property_int_value(name) or 0 for name in _MARKS)

    def keep_a_reader(self) -> None:
        """Make the reader of the next look-up now, so that it needs no `lock`."""
        self.give_back(*self.borrow())

    def get(self, family: str, key: bytes) -> bytes | None:
        with self.lock:
            return super().get(family, key)

    def cursor(
        self,
        family: str,
        start: bytes = b"",
        end: bytes | None = None,
        *,
        reverse: bool = False,
        keys_only: bool = False,
    ) -> RocksCursor:
        with self.lock:
            return super().cursor(family, start, end, reverse=reverse, keys_only=keys_only)

    def hold_files(self, begin: bytes, end: bytes | None) -> None:
        """The writer may remove history beside a pass, and only an iterator keeps what it saw."""
        return

    def close(self) -> None:
        with self.lock:
            super().close()
            if self._home is not None:
                self._home.close()

    # -- inside -----------------------------------------------------------------------------

    def _new_reader(self) -> EntryReader:
        with self.lock:
            return super()._new_reader()

    def _first(self, cache: rocks.Cache) -> rocks.Rdict:
        with storage_errors(self._where):
            is_torn = looks_recycled(self.path)  # RocksDB's reader would never return
        if is_torn:
            raise CorruptionError(
                self._where,
                "its log ends in bytes that are no record, as a power cut leaves them",
                "open it once with kvstore.open, which cuts them",
            )
        with self.lock:
            return self._advanced(None, cache)

    def _advanced(self, database: rocks.Rdict | None, cache: rocks.Cache) -> rocks.Rdict:
        """`database`, or a new one in its place, at a proven state."""
        self._proven, failures = None, 0
        for _ in range(FOLLOW_LOOKS_MAX):
            before = self._look()
            try:
                rearranged = self._only_rearranged(before)
                if database is None or not rearranged:
                    database = self._new_instance(cache)
                else:
                    with translated(self._where):
                        database.try_catch_up_with_primary()
            except (StorageError, CorruptionError):  # perhaps the writer has just removed a file
                database, failures = None, failures + 1
                if failures == FOLLOW_FAILURES_MAX:
                    self._seen = None
                    raise
                continue
            self._seen = before
            if self._look().proves(before):
                self._proven = before
                return database
        raise StaleReaderError(self._where)

    def _only_rearranged(self, look: _Look) -> bool:
        """Whether the instance, which has seen the files of the last look, may catch up with this
        look. See `kvstore.engine.logs`."""
        with storage_errors(self._where):  # a writer that was just opened removes the MANIFEST
            if self._seen is None or not look.continues(self._seen):
                self._edits = EditReader(self.path / look.manifest.name)
                self._edits.rearrange(look.manifest.size)
                return False
            return look.manifest == self._seen.manifest or self._edits.rearrange(look.manifest.size)

    def _new_instance(self, cache: rocks.Cache) -> rocks.Rdict:
        with storage_errors(self._where):
            manifest = manifest_end(self.path).name
        options = database_options(cache, requires_logs=False)
        options.set_max_open_files(-1)
        options.set_max_file_opening_threads(1)
        options.set_db_paths([sorted_files_at(self.path)])
        options.set_wal_dir(self._where)
        families = {name: family_options(name, cache) for name in FAMILIES}
        home = ReaderHome.made(self.path, manifest)
        try:
            with translated(self._where, home.path):
                access = rocks.AccessType.secondary(str(home.path / "info"))
                database = rocks.Rdict(str(home.path), options, families, access)
        except BaseException:
            home.close()
            raise
        former, self._home = self._home, home
        if former is not None:
            former.close()
        return database

    def _look(self) -> _Look:
        with storage_errors(self._where):
            for _ in range(FOLLOW_LOOKS_MAX):
                try:
                    manifest = self._manifest()
                    logs = self._listed_logs()
                    found = file_end(f"{self._where}/{logs[-1]}") if logs else _NO_FILE
                    return _Look(manifest, logs, found.inode, found.size)
                except FileNotFoundError:  # noqa: PERF203  # removed by the writer just now
                    self._current = self._listed_of = _NO_FILE
                    if not (self.path / "CURRENT").exists():
                        raise NotAStoreError(
                            self._where, "no store is there any more", "check the path"
                        ) from None
        raise StaleReaderError(self._where)

    def _manifest(self) -> ManifestEnd:
        """The end of the MANIFEST. `CURRENT` is read if it was replaced."""
        current = file_end(f"{self._where}/CURRENT")
        if current != self._current:
            self._manifest_name = manifest_end(self.path).name
            self._current = current
        name = self._manifest_name
        return ManifestEnd(name, *file_end(f"{self._where}/{name}")[:3])

    def _listed_logs(self) -> tuple[str, ...]:
        """The names of the logs, oldest first. The directory is listed only where it may have
        changed: its time moves in ticks of the clock, so a change may hide behind another one for a
        tick. The first listing behind that tick is the last one for this time of the directory."""
        directory, now = file_end(self._where), time.monotonic()
        if directory != self._listed_of:
            self._listed_of, self._settles_at = directory, now + DIRECTORY_TICK_S_MAX
        elif self._settles_at == inf:
            return self._logs
        elif now >= self._settles_at:
            self._settles_at = inf
        self._logs = tuple(log_names(self.path))
        return self._logs
