"""Bulk loads: the steps that `bulk.ingest` takes, and their undoing."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from pathlib import Path

from kvstore.engine.loose import LooseFile, told_once
from kvstore.engine.rocks import RocksEngine
from kvstore.imports import ImportRecord
from kvstore.store.capturing import Capturing
from kvstore.timestamp import Timestamp


class Loading(Capturing):
    """The steps of a bulk load."""

    def imports(self) -> list[ImportRecord]:
        """The bulk loads this store knows: those being added first, then in time order."""
        return self._imports.all()

    def find_import(self, record: ImportRecord) -> ImportRecord | None:
        """What is known of an import; raises `ImportRefusedError` if its id has other contents."""
        self._live()
        return self._imports.find(record)

    def prepare_import(self, record: ImportRecord) -> None:
        """Write down, durably, that an import is coming. The first step of `bulk.ingest`."""
        self._live().require_commits()
        self._imports.prepare(record, self._committer)

    def importing(self, import_id: int, *, adding: bool = False) -> AbstractContextManager[object]:
        """Have an import to oneself: `bulk.ingest` and `abort_import` in other threads wait until
        the block ends; while it is `adding`, this thread does not abort it either."""
        self._live()
        return self._imports.alone(import_id, adding=adding)

    def told_files(self, files: Sequence[Path | str]) -> list[LooseFile]:
        """The figures of sorted files that no store has taken, by key: bounds, entries."""
        self._live()
        if isinstance(self._engine, RocksEngine):
            return self._teller.told(files)
        return told_once(files)  # keeps no RocksDB database open, which would concern forks

    def link_import(self, files: Sequence[Path]) -> None:
        """Move sorted files into the engine, all or none; nothing becomes visible."""
        self._live()
        self._imports.link(files)

    def is_import_linked(self, record: ImportRecord) -> bool:
        """Whether the files of an import are in the engine."""
        self._live()
        return self._imports.is_linked(record)

    def is_imported(self, record: ImportRecord, key: bytes) -> bool:
        """Whether an import that is linked puts or deletes `key`."""
        self._live()
        return self._imports.has_row(record, key)

    def add_import(
        self, record: ImportRecord, *, check: Callable[[], None] | None = None
    ) -> Timestamp:
        """Make a linked import visible at one new timestamp: the commit of `bulk.ingest`.

        `check` runs under the commit lock and may raise to call it off.
        """
        return self._imports.add(record.import_id, self._live(), check=check)

    def abort_import(self, import_id: int) -> bool:
        """Forget an import that was left half added; returns whether there was one.

        O(entries in its spans). Waits while `bulk.ingest` adds it; raises `UsageError` if it was
        added: revert it then.
        """
        return self._imports.abort(import_id, self._live())

    def revert_import(self, import_id: int) -> Timestamp:
        """Undo an import from now on; its history stays. One record, whatever its size."""
        return self._imports.revert(import_id, self._live())
