"""Sorted files that no store has taken, read where they lie.

rocksdict has no reader of single SST files. So a throw-away database takes links to them. RocksDB
checks their form as a store would, knows their bounds, and reads them merged. The links are
symbolic: the files may lie on any file system, and nothing is written beside them.

Opening costs 2 ms, and 0.2 ms for each file of any size. Entries are read on demand.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import struct
import tempfile
import threading
import time
from collections.abc import Generator, Iterator, Sequence
from contextlib import suppress
from itertools import islice
from pathlib import Path
from typing import Any, Final, NamedTuple, Protocol

import rocksdict as rocks

from kvstore.codec.varint import read_varint
from kvstore.engine.api import chunks
from kvstore.engine.rocks import RocksCursor
from kvstore.engine.rocks_errors import translated
from kvstore.engine.rocks_opening import THREADS
from kvstore.errors import CorruptionError, StorageError
from kvstore.errors.system import storage_errors
from kvstore.forks import own
from kvstore.limits import BESIDE_OPEN_FILES_MAX, TOLD_ENTRIES_MAX, TOLD_FILES_MAX

IN_MEMORY: Final = "/dev/shm"
"""Making a throw-away database takes 1 ms there, and 5 ms on disk."""

_MANIFEST_BYTES: Final = 64 << 10
"""Preallocated for its MANIFEST. RocksDB's default of 4 MB is much for the 64 MB of `/dev/shm` that
a container has."""

_UNBORN_S: Final = 3600.0
"""Age of a throw-away directory without a lock file from which on no process makes a database in
it: a killed process left it."""

_OPEN_FILES: Final = Path("/proc/self/fd")
_PREFIX: Final = "kvstore-loose-"
_FOOTER: Final = struct.Struct("<B40sIQ")
_MAGIC: Final = 0x88E241B785F4CFF7
_FORMAT: Final = 5
_TRAILER_BYTES: Final = 5


class LooseFile(NamedTuple):
    """The figures of a file, known without reading its entries. `deletions` of the `entries` are
    tombstones."""

    first: bytes
    last: bytes
    size_bytes: int
    entries: int
    deletions: int


class LooseFiles:
    """Sorted files opened for reading. Use it as a context manager.

    Raises `CorruptionError` if a file is no sorted file built outside a database, or if a block
    that is read is damaged.
    """

    def __init__(self, files: Sequence[Path | str]) -> None:
        self._where = ", ".join(map(str, files[:3])) + (", ..." if len(files) > 3 else "")
        THREADS.require_own(self._where)
        for file in files:
            _require_footer(file)
        linked = _may_be_linked(files)
        self._database: rocks.Rdict | None = None
        self._taken = 0
        self._descriptors: list[int] = []
        in_memory = linked and os.access(IN_MEMORY, os.W_OK | os.X_OK)
        try:
            self._take(files, IN_MEMORY if in_memory else None, move=linked)
        except StorageError:  # `/dev/shm` may be full
            if not in_memory:
                raise
            self._take(files, None, move=linked)
        own(self, self._where)

    def told(self) -> list[LooseFile]:
        """The figures of each file, by key. Reads no entry."""
        return self._figures(frozenset())

    def told_further(self, files: Sequence[Path | str]) -> list[LooseFile]:
        """Add further files. Returns the figures of these files only, by key."""
        for file in files:
            _require_footer(file)
        with translated(self._where):
            before = frozenset(file["name"] for file in self._open().live_files())
        self._ingest([self._held(file) for file in files], move=_may_be_linked(files))
        return self._figures(before)

    def _held(self, file: Path | str) -> Path | str:
        """A name of the same file that stays valid until `close`: RocksDB may open it again."""
        if not _OPEN_FILES.is_dir():
            return file
        with storage_errors(str(file)):
            self._descriptors.append(os.open(file, os.O_RDONLY))
        return _OPEN_FILES / str(self._descriptors[-1])

    def _figures(self, others: frozenset[str]) -> list[LooseFile]:
        with translated(self._where):
            found = [file for file in self._open().live_files() if file["name"] not in others]
        return sorted(
            LooseFile(
                bytes(file["start_key"]),
                bytes(file["end_key"]),
                int(file["size"]),
                int(file["num_entries"]),
                int(file["num_deletions"]),
            )
            for file in found
        )

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

    def keys(self, start: bytes, last: bytes, count_max: int) -> list[bytes]:
        """The keys of all files from `start` to `last`, merged, at most `count_max`. Reading 2,000
        keys takes 0.3 ms."""
        options = rocks.ReadOptions()
        options.set_iterate_upper_bound(last + b"\x00")
        family = self._open()
        with translated(self._where):
            keys: Iterator[Any] = family.keys(from_key=start, read_opt=options)
            found = list(islice(keys, count_max))
            seeker = family.iter(options)  # tells whether the keys end, or a damaged block follows
            seeker.seek(found[-1] if found else start)
            if found and seeker.valid():
                seeker.next()
            seeker.status()
        return found

    def cover(self) -> None:
        """Hide the entries of all files so far. Figures stay. Costs 0.4 ms."""
        with translated(self._where):
            database = self._open()
            last = max((bytes(file["end_key"]) for file in database.live_files()), default=b"")
            database.delete_range(b"", last + b"\x00")
            database.flush()  # else the next file would bring a second one into `live_files`

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
        while self._descriptors:
            os.close(self._descriptors.pop())
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
        with translated(self._where):
            self._database = rocks.Rdict(str(self._scratch / "db"), options)
        self._ingest(files, move=move)

    def _ingest(self, files: Sequence[Path | str], *, move: bool) -> None:
        links = []
        with storage_errors(self._where):
            for file in files:
                link = self._scratch / f"{self._taken:06d}.sst"
                link.symlink_to(os.path.abspath(file))
                links.append(str(link))
                self._taken += 1
        ingestion = rocks.IngestExternalFileOptions()
        ingestion.set_move_files(move)
        if links:
            with translated(self._where):
                self._open().ingest_external_file(links, ingestion)

    def _open(self) -> rocks.Rdict:
        assert self._database is not None, "used after close"
        return self._database


class LooseReader(Protocol):
    """Reads sorted files that no store has taken. Raises as `LooseFiles`."""

    def told(self, files: Sequence[Path | str]) -> list[LooseFile]:
        """The figures of each file, by key."""
        ...

    def entries(self, files: Sequence[Path | str]) -> list[bytes]:
        """The stored keys of the files, ascending, and perhaps some of other files between them.
        Costs a pass over the files."""
        ...


class Teller:
    """Reads loose files, again and again, with one throw-away database.

    Reading the figures of a file takes 0.4 ms. Making the database takes 1.3 ms, and is due once in
    `TOLD_FILES_MAX` files, which stay open until then.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._loose: LooseFiles | None = None
        self._last: tuple[list[Path | str], list[LooseFile]] = [], []
        """The files that were told last, and their figures."""
        self._files = self._shown = 0
        """The files of the database, and the entries in it that are not covered."""
        self._has_tidied = False

    def told(self, files: Sequence[Path | str]) -> list[LooseFile]:
        """The figures of each file, by key."""
        with self._lock:
            return self._further(files)

    def entries(self, files: Sequence[Path | str]) -> list[bytes]:
        """The stored keys of files that were told last, and perhaps some of other files between
        them: at most `TOLD_ENTRIES_MAX`, because more of them are covered."""
        with self._lock:
            try:
                told = self._last[1] if self._last[0] == list(files) else None
                if told is None or self._shown - _entries_of(told) > TOLD_ENTRIES_MAX:
                    self._cover()
                    told = self._further(files)
                found = _stored_keys(self._open(), told, self._shown)
                if self._shown > TOLD_ENTRIES_MAX:  # now, and not when the next files are there
                    self._cover()
                return found
            except BaseException:
                self._drop()
                raise

    def _further(self, files: Sequence[Path | str]) -> list[LooseFile]:
        if self._loose is None or self._files + len(files) > TOLD_FILES_MAX:
            self._drop()
            self._tidy()
            self._loose = LooseFiles(())
        self._files += len(files)
        try:
            told = self._loose.told_further(files)
        except BaseException:
            self._drop()
            raise
        self._shown += _entries_of(told)
        self._last = list(files), told
        return told

    def _cover(self) -> None:
        if self._loose is not None:
            self._loose.cover()
        self._last, self._shown = ([], []), 0

    def _tidy(self) -> None:
        if not self._has_tidied:
            _remove_left()
            self._has_tidied = True

    def _open(self) -> LooseFiles:
        assert self._loose is not None, "the files were told"
        return self._loose

    def close(self) -> None:
        """Release the files. Repeatable; the next call of `told` makes a new database."""
        with self._lock:
            self._drop()

    def _drop(self) -> None:
        if self._loose is not None:
            self._loose.close()
        self._loose, self._last = None, ([], [])
        self._files = self._shown = 0


class _Once:
    """Reads loose files with a database that is gone when the call returns."""

    def told(self, files: Sequence[Path | str]) -> list[LooseFile]:
        return told_once(files)

    def entries(self, files: Sequence[Path | str]) -> list[bytes]:
        with LooseFiles(files) as loose:
            told = loose.told()
            return _stored_keys(loose, told, _entries_of(told))


LOOSE_ONCE: Final = _Once()
"""For a process that may fork: nothing of RocksDB stays open."""


def told_once(files: Sequence[Path | str]) -> list[LooseFile]:
    """The figures of each file, by key. Raises as `LooseFiles`."""
    with LooseFiles(files) as loose:
        return loose.told()


def _entries_of(told: Sequence[LooseFile]) -> int:
    return sum(file.entries for file in told)


def _stored_keys(loose: LooseFiles, told: Sequence[LooseFile], count: int) -> list[bytes]:
    """The stored keys from the first to the last of the files `told`. Stops behind `count` keys,
    which is one more than the files should have: a forged file may have any number."""
    if not told:
        return []
    return loose.keys(told[0].first, max(file.last for file in told), count + 1)


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
                if not lock.exists() and left.stat().st_mtime < oldest:
                    shutil.rmtree(left, ignore_errors=True)
                with lock.open("r+b") as file:
                    fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    shutil.rmtree(left, ignore_errors=True)


def _require_footer(file: Path | str) -> None:
    """Raise `CorruptionError` unless the footer's blocks lie in the file.

        footer := | checksum type u8 | handles, padded to 40 | format u32 | magic u64 |
        handle := | offset varint | size varint |     of the metaindex, then of the index

    The footer has no checksum. RocksDB allocates the sizes in it, and a failed allocation ends the
    process.
    """
    where = str(file)
    with storage_errors(where), open(file, "rb") as opened:
        end = os.fstat(opened.fileno()).st_size - _FOOTER.size
        if end < 0:
            raise CorruptionError(where, f"{end + _FOOTER.size} bytes are no sorted file")
        opened.seek(end)
        _, handles, found, magic = _FOOTER.unpack(opened.read(_FOOTER.size))
    if magic != _MAGIC or found != _FORMAT:
        raise CorruptionError(where, "it does not end as a sorted file does")
    at = 0
    for _ in ("metaindex", "index"):
        try:
            offset, at = read_varint(handles, at)
            size, at = read_varint(handles, at)
        except (IndexError, ValueError) as error:
            raise CorruptionError(where, "its footer has no number where one is due") from error
        if offset + size + _TRAILER_BYTES > end:
            raise CorruptionError(where, f"a block of {size} bytes at {offset} lies outside of it")
