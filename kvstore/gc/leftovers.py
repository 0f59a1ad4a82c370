"""Leftovers of imports: records of imports whose rows are gone, imports that were never added, and
stray files.

Invariants
1. An import becomes past here only when no row refers to it and no change entry names it: it was
   added, or reverted, at or below `since`, and the index is trimmed.
2. Imports and files younger than a bound stay, because they may still be under way.
"""

from __future__ import annotations

import shutil
import time
from contextlib import suppress
from pathlib import Path

from kvstore.commit import Committer
from kvstore.errors.system import storage_errors
from kvstore.imports import INGEST_DIRECTORY, ImportRecord, Imports
from kvstore.limits import GC_KEYS_PER_STEP
from kvstore.timestamp import NS_PER_SECOND


class Leftovers:
    """Removes the leftovers of the imports of one store."""

    def __init__(self, imports: Imports, committer: Committer, path: Path | None) -> None:
        self._imports = imports
        self._committer = committer
        self._path = path
        self._rows: dict[int, bytes] = {}
        """For each import, the row that was found last. Usually two look-ups show that it still
        exists."""

    def forget_history(self, since: int) -> int:
        """Turn each import whose last change is at or below `since`, and whose rows are gone, into
        a past import; returns their number. Small imports that stand are left to settle.

        A search for an import's first row starts where the last search ended, so that all searches
        together pass over the import's spans once.
        """
        gone: list[ImportRecord] = []
        for record in self._imports.every():
            changed = record.added if record.reverted is None else record.reverted
            if changed is None or changed > since or record.settles(since):
                continue
            if not (record.spans and self._has_rows(record)):
                gone.append(record)
                self._rows.pop(record.import_id, None)
        for at in range(0, len(gone), GC_KEYS_PER_STEP):
            self._imports.retire(gone[at : at + GC_KEYS_PER_STEP])
        return len(gone)

    def abort_stale(self, age_s: float) -> int:
        """Abort imports that were prepared `age_s` ago or earlier, and neither added since nor
        being added now; returns how many."""
        oldest = self._oldest(age_s)
        stale = [
            record.import_id
            for record in self._imports.all()
            if record.added is None and record.prepared is not None and record.prepared < oldest
        ]
        return sum(self._imports.abort_idle(import_id) for import_id in stale)

    def remove_files(self, age_s: float) -> None:
        """Remove files older than `age_s` from `ingest/`, except the files that an import waits
        for."""
        if self._path is None:
            return
        # The machine's clock dates files, and the store's clock may be far ahead of it.
        oldest = min(self._oldest(age_s), time.time_ns() - int(age_s * NS_PER_SECOND))
        waiting = {f"{record.import_id:016x}" for record in self._imports.all() if not record.added}
        place = self._path / INGEST_DIRECTORY
        with storage_errors(str(place)):
            for left in place.iterdir() if place.is_dir() else ():
                with suppress(FileNotFoundError):  # its owner removed it meanwhile
                    if left.name not in waiting and left.lstat().st_mtime_ns < oldest:
                        _remove(left)

    def _has_rows(self, record: ImportRecord) -> bool:
        seen = self._rows.get(record.import_id, min(span.start for span in record.spans))
        if self._imports.stored.has(record, seen):
            return True
        first = self._imports.first_row(record, seen)
        if first is not None:
            self._rows[record.import_id] = first
        return first is not None

    def _oldest(self, age_s: float) -> int:
        return self._committer.now() - int(age_s * NS_PER_SECOND)


def _remove(left: Path) -> None:
    """Remove a directory or a file. If the disk refuses, it stays for the next run."""
    if left.is_dir() and not left.is_symlink():
        shutil.rmtree(left, ignore_errors=True)
    else:
        with suppress(OSError):
            left.unlink()
