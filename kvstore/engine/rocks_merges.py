"""Merging the sorted files of a RocksDB database, beside the compactions that RocksDB picks itself.

`kvstore.engine.small_files` decides which files; this module merges them, one group in a step.

Invariants
1. One merge runs at a time. A call that finds another one under way leaves the work to it.
2. All entries of a group are read first. RocksDB takes no more writes after a merge that met a
   damaged block. Reads and `verify` tell of the damage, which is left in place.
3. Reads and commits continue during a merge.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from typing import Any

import rocksdict as rocks

from kvstore.engine.api import DATA, FAMILIES, Cursor, chunks
from kvstore.engine.rocks_errors import translated
from kvstore.engine.small_files import FileGroup, groups, is_worth_a_merge, sorted_files
from kvstore.errors import CorruptionError
from kvstore.limits import SMALL_FILES_MAX


class Merges:
    """The merges of one database. `family` gives a family of the open database, or raises."""

    def __init__(
        self, where: str, family: Callable[[str], Any], cursor: Callable[..., Cursor]
    ) -> None:
        self._where, self._family, self._cursor = where, family, cursor
        self._lock = threading.RLock()  # a signal handler may close the store inside a merge
        self._looked = dict.fromkeys(FAMILIES, 0)
        """The number of files of each family in which no small ones were found last."""

    def run(self, rewritten: tuple[bytes, bytes] | None) -> Iterator[None]:
        """Merge small files where many lie together, and in `data` the newest files of the span
        `rewritten` with the older ones, if that is worth its cost."""
        for name in FAMILIES:
            for group in self._crowded(name):
                if not self._merge(name, group):
                    return
                yield
        if rewritten is not None and self._flush(FileGroup(*rewritten)):
            self._merge(DATA, FileGroup(*rewritten))
            yield

    def finish(self) -> None:
        """Wait for the end of a merge: it keeps the database, and its lock, open."""
        with self._lock:
            pass

    def _crowded(self, name: str) -> list[FileGroup]:
        """The groups of small files of a family. Looks at all files, if several have come since it
        last found none: 3 us a file."""
        family = self._family(name)
        with translated(self._where):
            count = count_files(family)
            if count < self._looked[name] + SMALL_FILES_MAX // 2:
                return []
            found = list(groups(sorted_files(family.property_value("rocksdb.sstables") or "")))
        self._looked[name] = 0 if found else count
        return found

    def _flush(self, group: FileGroup) -> bool:
        """Whether the newest files of `data` in the span of `group` are worth a merge; they are
        complete then."""
        family = self._family(DATA)
        with translated(self._where):
            waiting = family.property_int_value("rocksdb.cur-size-all-mem-tables") or 0
            files = sorted_files(family.property_value("rocksdb.sstables") or "")
            if not is_worth_a_merge(files, group, waiting // _MEMTABLE_FACTOR):
                return False
            family.flush()
        return True

    def _merge(self, name: str, group: FileGroup) -> bool:
        """Merge a group, unless it is damaged. Returns False while another thread merges, or
        closes the database."""
        if not self._lock.acquire(blocking=False):
            return False
        try:
            if self._is_whole(name, group):
                self._compact(name, group)
        finally:
            self._lock.release()
        return True

    def _is_whole(self, name: str, group: FileGroup) -> bool:
        try:
            for _ in chunks(self._cursor(name, group.first, group.last + b"\x00")):
                pass
        except CorruptionError:
            self._looked[name] = count_files(self._family(name))
            return False
        return True

    def _compact(self, name: str, group: FileGroup) -> None:
        family = self._family(name)
        options = rocks.CompactOptions()
        options.set_exclusive_manual_compaction(False)  # commits may fill level 0 meanwhile
        options.set_bottommost_level_compaction(rocks.BottommostLevelCompaction.force_optimized())
        with translated(self._where):
            family.compact_range(group.first, group.last, options)


_MEMTABLE_FACTOR = 2
"""A memtable takes about twice the bytes of the file that it becomes."""


def count_files(family: rocks.Rdict) -> int:
    """The number of a family's sorted files. Takes some 5 us."""
    return sum(family.property_int_value(level) or 0 for level in _LEVELS)


_LEVELS = [f"rocksdb.num-files-at-level{level}" for level in range(7)]
