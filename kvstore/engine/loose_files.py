"""The rows of sorted files that no store has taken, merged by RocksDB.

rocksdict has no reader of single SST files, and `sorted_file` reads no values. So a throw-away
database takes links to the files. RocksDB checks their form as a store would, and merges them.
The links are symbolic: the files may lie on any file system, and nothing is written beside them.

Opening costs 2 ms, and 0.2 ms for each file of any size. Entries are read on demand.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import tempfile
import time
from collections.abc import Generator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Final

import rocksdict as rocks

from kvstore.base.forks import own
from kvstore.engine.api import chunks
from kvstore.engine.rocks import THREADS, RocksCursor, translated
from kvstore.engine.sorted_file import require_footer
from kvstore.errors import StorageError, storage_errors
from kvstore.limits import BESIDE_OPEN_FILES_MAX

IN_MEMORY: Final = "/dev/shm"
"""Making a throw-away database takes 1 ms there, and 5 ms on disk."""

_MANIFEST_BYTES: Final = 64 << 10
"""Preallocated for its MANIFEST. RocksDB's default of 4 MB is much for the 64 MB of `/dev/shm` that
a container has."""

_UNBORN_S: Final = 3600.0
"""Age of a throw-away directory without a lock file from which on no process makes a database in
it: a killed process left it."""

_PREFIX: Final = "kvstore-loose-"


class LooseFiles:
    """Sorted files opened for reading. Use it as a context manager.

    Raises `CorruptionError` if a file is no sorted file built outside a database, or if a block
    that is read is damaged.
    """

    def __init__(self, files: Sequence[Path | str]) -> None:
        self._where = ", ".join(map(str, files[:3])) + (", ..." if len(files) > 3 else "")
        THREADS.require_own(self._where)
        for file in files:
            require_footer(file)
        linked = _may_be_linked(files)
        self._database: rocks.Rdict | None = None
        in_memory = linked and os.access(IN_MEMORY, os.W_OK | os.X_OK)
        if in_memory:
            _remove_left()
        try:
            self._take(files, IN_MEMORY if in_memory else None, move=linked)
        except StorageError:  # `/dev/shm` may be full
            if not in_memory:
                raise
            self._take(files, None, move=linked)
        own(self, self._where)

    def rows(
        self, start: bytes = b"", last: bytes | None = None
    ) -> Generator[tuple[list[bytes], list[bytes]], None, None]:
        """Keys and values of all files from `start` to `last`, merged, in chunks. A key that comes
        twice is given once."""
        yield from chunks(self.cursor(start, last))

    def cursor(self, start: bytes = b"", last: bytes | None = None) -> RocksCursor:
        """A pass over the entries of all files, merged, from `start` to `last`."""
        options = rocks.ReadOptions()
        if last is not None:
            options.set_iterate_upper_bound(last + b"\x00")
        return RocksCursor(self._open(), options, start, reverse=False, where=self._where)

    def get(self, key: bytes) -> bytes | None:
        """The value of `key`, None if no file has it."""
        with translated(self._where):
            found: bytes | None = self._open().get(key)
        return found

    def close(self) -> None:
        """Release the files. Repeatable."""
        if self._database is not None:
            self._database.close()
            self._database = None
        THREADS.close(self)
        shutil.rmtree(self._scratch, ignore_errors=True)

    def __enter__(self) -> LooseFiles:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _take(self, files: Sequence[Path | str], place: str | None, *, move: bool) -> None:
        with storage_errors(self._where):
            self._scratch = Path(tempfile.mkdtemp(prefix=f"{_PREFIX}{os.getpid()}-", dir=place))
        THREADS.open(self)
        try:
            self._link(files, move=move)
        except BaseException:
            self.close()
            raise

    def _link(self, files: Sequence[Path | str], *, move: bool) -> None:
        options = rocks.Options(raw_mode=True)
        options.create_if_missing(True)
        options.set_max_background_jobs(1)
        options.set_max_file_opening_threads(1)
        options.set_max_open_files(BESIDE_OPEN_FILES_MAX)
        options.set_disable_auto_compactions(True)
        options.set_manifest_preallocation_size(_MANIFEST_BYTES)
        links = []
        with storage_errors(self._where):
            for number, file in enumerate(files):
                link = self._scratch / f"{number:06d}.sst"
                link.symlink_to(os.path.abspath(file))
                links.append(str(link))
        ingestion = rocks.IngestExternalFileOptions()
        ingestion.set_move_files(move)
        with translated(self._where):
            self._database = rocks.Rdict(str(self._scratch / "db"), options)
            if links:
                self._database.ingest_external_file(links, ingestion)

    def _open(self) -> rocks.Rdict:
        assert self._database is not None, "used after close"
        return self._database


def _may_be_linked(files: Sequence[Path | str]) -> bool:
    """Whether RocksDB may take links to the files: it opens a linked file for writing, to sync it.
    It copies a file that may only be read, which needs space."""
    return all(os.access(file, os.W_OK) for file in files)


def _remove_left() -> None:
    """Remove the databases of killed processes: no process holds their locks."""
    own, oldest = f"{_PREFIX}{os.getpid()}-", time.time() - _UNBORN_S
    with suppress(OSError):
        for left in Path(IN_MEMORY).glob(f"{_PREFIX}*"):
            if left.name.startswith(own):
                continue  # closing our own lock file would drop the lock
            lock = left / "db" / "LOCK"
            with suppress(OSError):
                is_old = left.stat().st_mtime < oldest
                if not is_old and _runs(left.name.removeprefix(_PREFIX).partition("-")[0]):
                    continue  # RocksDB makes its lock file, and locks it a moment later
                if not lock.exists() and is_old:
                    shutil.rmtree(left, ignore_errors=True)
                with lock.open("r+b") as file:
                    fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    shutil.rmtree(left, ignore_errors=True)


def _runs(process: str) -> bool:
    """Whether a process of this id runs here; a container may show another one under the id."""
    return process.isdecimal() and os.path.exists(f"/proc/{process}")
