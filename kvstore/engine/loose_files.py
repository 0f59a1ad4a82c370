"""The rows of sorted files that were built outside a database, and that no store has taken.

A pass reads the files as `held_files` does. A look-up needs more than an order of blocks: it goes
by a throw-away database, which takes links to the files. The links are symbolic: the files may lie
on any file system, and nothing is written beside them.

Invariants
1. A pass cuts the key space, so that it holds the files open that cross a piece. These are as many
   as a key is covered by, and at most `LOOSE_FILES_MAX` further ones.
2. The pieces ascend, share no key, and cover the span. Each file is open in the pieces that it
   crosses, and in no other.
"""

from __future__ import annotations

import fcntl
import heapq
import os
import shutil
import tempfile
import time
from collections.abc import Generator, Iterator, Sequence
from contextlib import closing, suppress
from pathlib import Path
from typing import Final

import rocksdict as rocks

from kvstore.base.forks import own
from kvstore.engine.api import FileSpan, chunks, next_count
from kvstore.engine.held_files import OpenFile, OpenFiles, close_all
from kvstore.engine.rocks import THREADS, RocksCursor, translated
from kvstore.engine.sorted_file import ends_of, require_footer
from kvstore.errors import StorageError, storage_errors
from kvstore.limits import BESIDE_OPEN_FILES_MAX, LOOSE_FILES_MAX, SCAN_CHUNK, SCAN_CHUNK_BYTES

_FIRST_CHUNK: Final = 4
_STEP_ENTRIES: Final = 1 << 17
"""Entries that a pass passes at once, in some milliseconds. Python delivers signals between two."""


class LooseFiles:
    """Sorted files of staging, merged. Nothing is open between two passes.

    Raises `CorruptionError` if a file is no sorted file that was built outside a database; a pass
    raises it for a block that is damaged. Making it costs 0.2 ms a file, and reads its index.
    """

    def __init__(self, files: Sequence[Path | str]) -> None:
        found = []
        for file in files:
            footer, (first, last, _) = ends_of(file)
            with storage_errors(str(file)):
                size = os.path.getsize(file)
            found.append(OpenFile(Path(file), FileSpan(first, last, size), footer, -1))
        self._files = sorted(found, key=lambda file: file.span.first)

    def rows(
        self, start: bytes = b"", last: bytes | None = None
    ) -> Generator[tuple[list[bytes], list[bytes]], None, None]:
        """Stored keys and values of all files from `start` to `last`, merged, in chunks. A stored
        key that comes twice is given once."""
        count = min(_FIRST_CHUNK, SCAN_CHUNK)
        for begin, end, held in self.pieces(start, None if last is None else last + b"\x00"):
            with closing(held):
                found, has_more = held.begin(begin, end, (0, {}, None), whole=True), True
                while has_more:
                    has_more = held.take(found, count, SCAN_CHUNK_BYTES, _STEP_ENTRIES)
                    keys, values = found.found_rows()
                    if keys:
                        count = next_count(values, SCAN_CHUNK)
                        yield keys, values

    def pieces(
        self, begin: bytes = b"", end: bytes | None = None
    ) -> Iterator[tuple[bytes, bytes | None, OpenFiles]]:
        """Cut `begin <= stored key < end`. Yields the pieces, each with the files that cross it,
        open: close them before the next piece is asked for."""
        left = [
            file
            for file in self._files
            if file.span.last >= begin and (end is None or file.span.first < end)
        ]
        while left:
            carried = sum(file.span.first <= begin for file in left)
            behind = left[carried + LOOSE_FILES_MAX :]
            cut = behind[0].span.first if behind else end
            inside = [file for file in left if cut is None or file.span.first < cut]
            yield begin, cut, _opened(inside)
            if not behind:
                return
            assert cut is not None, "a file begins there"
            begin, left = cut, [file for file in left if file.span.last >= cut]


def _opened(files: Sequence[OpenFile]) -> OpenFiles:
    """Open files, which ascend by their first keys, in as few runs as hold them."""
    runs: list[list[OpenFile]] = []
    free: list[tuple[bytes, int]] = []  # the last key of each run, the least first
    opened: list[OpenFile] = []
    try:
        for file in files:
            with storage_errors(str(file.path)):
                descriptor = os.open(file.path, os.O_RDONLY | os.O_CLOEXEC)
            opened.append(file._replace(descriptor=descriptor))
            if free and free[0][0] < file.span.first:
                _, number = heapq.heappop(free)
            else:
                number = len(runs)
                runs.append([])
            runs[number].append(opened[-1])
            heapq.heappush(free, (file.span.last, number))
        held = OpenFiles(str(files[0].path.parent) if files else "no file", runs)
        opened.clear()
        return held
    finally:
        close_all([one.descriptor for one in opened])


# --------------------------------------------------------------------------------------------------
# Look-ups.

IN_MEMORY: Final = "/dev/shm"
"""Making a throw-away database takes 1 ms there, and 5 ms on disk."""

_MANIFEST_BYTES: Final = 64 << 10
"""Preallocated for its MANIFEST. RocksDB's default of 4 MB is much for the 64 MB of `/dev/shm` that
a container has."""

_UNBORN_S: Final = 3600.0
"""Age of a throw-away directory without a lock file from which on no process makes a database in
it: a killed process left it."""

_PREFIX: Final = "kvstore-loose-"


class LooseDatabase:
    """Look-ups among sorted files, by a throw-away database. Use it as a context manager.

    Opening costs 2 ms, and 0.2 ms for each file of any size. Entries are read on demand.

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
        options = rocks.ReadOptions()
        if last is not None:
            options.set_iterate_upper_bound(last + b"\x00")
        cursor = RocksCursor(self._open(), options, start, reverse=False, where=self._where)
        yield from chunks(cursor)

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

    def __enter__(self) -> LooseDatabase:
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
