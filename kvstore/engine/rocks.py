"""RocksDB behind the `Engine` contract, through rocksdict.

Observed behaviour of rocksdict 0.3.29, and its consequences
* A synced `write` holds the interpreter lock for the whole fsync; `flush_wal(True)` releases it.
  So a batch is written unsynced and the log is flushed after it. Commits can then share an fsync.
* A `write` that RocksDB stops holds the interpreter lock: see `Stalls`.
* `set_iterate_lower_bound` sets the *upper* bound. So only the upper bound is used, and
  descending passes cut their own end.
* Iterators, family handles and family objects each keep the database, and its lock, open: `close`
  drops them all, cursors included.
* `Snapshot` iterators do not keep to the snapshot; plain iterators keep to their own view.
* Tailing iterators see later writes, but overlook range deletes, so they cannot be used here.
* A database that is opened again without a list of its families gets default options for them.
* Iteration over `items()` ends silently at a damaged block. So the end of every pass is checked
  with a second iterator, which has a status.
* An ingest that copies holds the interpreter lock throughout; a move takes 2 ms at any size.
* RocksDB opens silently although a log is lost, unless its MANIFEST tracks logs. The MANIFEST
  tracks all logs but the newest, whose loss stays silent.
* Opening a database read-only still rewrites a file of rocksdict's own. So a reader opens a
  private directory, see `kvstore.engine.moment`; `db_paths` names the place of the sorted files.
* Every failure is a bare `Exception`. `translated` recognises it by its text.
* `point_in_time` recovery silently cuts the log at the first bad byte, and loses synced records
  behind it. `tolerate_corrupted_tail_records` refuses such a log, but also refuses a tail that a
  power cut leaves (zeros in the place of bytes). `kvstore.engine.logs` decides between the two.
"""

from __future__ import annotations

import bisect
import ctypes
import os
import re
import tempfile
import threading
import time
import weakref
from bisect import bisect_left, bisect_right
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, fields
from itertools import groupby, repeat
from operator import attrgetter
from pathlib import Path
from typing import Any, Final, NamedTuple, NoReturn

import rocksdict as rocks

from kvstore.base.arguments import integer
from kvstore.base.forks import own, undivided
from kvstore.base.paths import require_syncable
from kvstore.engine.api import (
    CHANGES,
    DATA,
    FAMILIES,
    Cursor,
    EntryReader,
    FileSpan,
    HeldFiles,
    WriteBatch,
    chunks,
)
from kvstore.engine.held_files import Footers, OpenFiles, hold_files, live_files
from kvstore.engine.logs import cut, cut_manifest, find_damage, looks_recycled
from kvstore.engine.moment import Moment
from kvstore.errors import (
    AccessDeniedError,
    ClosedError,
    CorruptionError,
    ForkedError,
    FormatVersionError,
    KVStoreError,
    LockedError,
    NotAStoreError,
    OutOfSpaceError,
    StaleReaderError,
    StorageError,
    UsageError,
    storage_errors,
)
from kvstore.limits import (
    BESIDE_OPEN_FILES_MAX,
    BLOCK_BYTES,
    BLOCK_CACHE_BYTES,
    COLUMNS_FLUSH_BYTES_MIN,
    FLUSH_ROOM_FACTOR,
    FORK_WAIT_S_MAX,
    IDLE_READERS_MAX,
    INFO_LOG_BYTES_MAX,
    INGEST_FLUSH_BYTES,
    LOG_BYTES_MAX,
    MANIFEST_BYTES_MAX,
    NEWEST_MERGE_FACTOR,
    PASSING_CACHE_BYTES,
    PASSING_READAHEAD_BYTES,
    READ_ONLY_OPENINGS_MAX,
    READERS_BEHIND_BYTES_MAX,
    SCAN_CHUNK_BYTES,
    SMALL_FILE_BYTES,
    SMALL_FILES_MAX,
    SORTED_MERGE_BYTES_MAX,
    SORTED_MERGE_FILE_BYTES,
    STALL_LOOK_S,
    STALL_PAUSE_S,
    STALL_PAUSE_S_MAX,
    VALUE_CACHE_BYTES,
)
from kvstore.loops.live import Entries, Live, collect
from kvstore.loops.lookup import Readers
from kvstore.storage.os_files import OS_FILES

# --------------------------------------------------------------------------------------------------
# The few knobs of RocksDB that a store offers. None keeps the default of `kvstore.limits` or of
# RocksDB.

_LEAST = {"write_buffer_bytes": 64 << 10, "background_jobs": 1, "open_files": 16}
_MOST = {
    "cache_bytes": 1 << 46,
    "value_cache_bytes": 1 << 46,
    "write_buffer_bytes": 1 << 40,
    "background_jobs": 256,
    "open_files": (1 << 31) - 1,
}


@dataclass(frozen=True, slots=True)
class Options:
    """How a store uses memory, threads and files: `kvstore.open(path, options=Options(...))`.

    `cache_bytes` holds uncompressed blocks of files (512 MiB by default); a smaller cache costs
    reads of blocks that have to be fetched and unpacked again. `write_buffer_bytes` is the size at
    which the newest commits of a family of keys go to a file (64 MiB); up to two such buffers are
    in memory, for data and for changes, and smaller ones make more files to be merged.
    `value_cache_bytes` holds the newest values of keys that are read again and again (32 MiB; 0: no
    such cache). A `get` that finds its key there takes a tenth of the time.
    `background_jobs` is the number of threads that write and merge files (2). `open_files` bounds
    the files that are kept open (no bound); reads of other files open them again.
    Raises `UsageError` for a value that is no count, or too small to work.
    """

    cache_bytes: int | None = None
    write_buffer_bytes: int | None = None
    background_jobs: int | None = None
    open_files: int | None = None
    value_cache_bytes: int | None = None

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            if value is not None:
                least = _LEAST.get(field.name, 0)
                integer(least, _MOST[field.name]).check(field.name, value)

    def cache(self) -> int:
        """The bytes of the block cache."""
        return BLOCK_CACHE_BYTES if self.cache_bytes is None else self.cache_bytes

    def value_cache(self) -> int:
        """The bytes of the cache of newest values."""
        return VALUE_CACHE_BYTES if self.value_cache_bytes is None else self.value_cache_bytes

    def set_database(self, options: rocks.Options) -> None:
        """Set the knobs of the database."""
        if self.background_jobs is not None:
            options.set_max_background_jobs(self.background_jobs)
        if self.open_files is not None:
            options.set_max_open_files(self.open_files)

    def set_family(self, options: rocks.Options) -> None:
        """Set the knobs of one family."""
        if self.write_buffer_bytes is not None:
            options.set_write_buffer_size(self.write_buffer_bytes)


DEFAULTS = Options()


# --------------------------------------------------------------------------------------------------
# The engine.


class RocksEngine:
    """A RocksDB database with the store's column families.

    A `read_only` database shows the moment of its opening. A caller that has laid out such a moment
    passes its directory as `home`. A checkpoint is its own `home`. It is opened `beside` its source
    database: the two share a cache, which holds each common file once, and the checkpoint keeps few
    files open. A caller that opens the database in its own way passes a function as `database`.
    """

    def __init__(
        self,
        path: Path,
        *,
        read_only: bool = False,
        create: bool = True,
        home: Path | None = None,
        beside: RocksEngine | None = None,
        database: Callable[[rocks.Cache], rocks.Rdict] | None = None,
        knobs: Options = DEFAULTS,
    ) -> None:
        self.path = path
        self.is_read_only = read_only
        if not read_only:
            THREADS.require_own(str(path))
        THREADS.open(self)
        require_store_directory(path, create=create and not read_only)
        if not read_only:
            make_store_directory(path)
        self._is_passing = read_only and database is None
        """Whether most reads are passes that come once: they leave the cache alone."""
        size = PASSING_CACHE_BYTES if self._is_passing else knobs.cache()
        self._cache: rocks.Cache = rocks.Cache(size) if beside is None else beside._cache
        self._moment: Moment | None = None
        self._db: rocks.Rdict | None
        if database is not None:
            self._db = database(self._cache)
        elif read_only and home is None:
            self._db, self._moment = opened_at_once(path, self._cache)
        else:
            files_max = -1 if beside is None else BESIDE_OPEN_FILES_MAX
            try:
                self._db = opened(path, self._cache, home=home, files_max=files_max, knobs=knobs)
            except KVStoreError as error:
                if home is None or home == path or not lacks_a_file(error):
                    raise
                raise StaleReaderError(str(path)) from error
        self._take_families(self._db)
        note_opened(path, self, writes=not read_only)
        self._readers = Readers(self._new_reader, self.check, IDLE_READERS_MAX)
        self.find = self._readers.find
        self.borrow = self._readers.borrow
        self.give_back = self._readers.give_back
        self._unlogged = rocks.WriteOptions()
        self._unlogged.disable_wal = True  # type: ignore[method-assign,assignment]
        self._cursors: weakref.WeakSet[RocksCursor | OpenFiles] = weakref.WeakSet()
        self._footers = Footers(path)
        self._stalls = Stalls(lambda: self._family[DATA])
        self._look_at, self._is_stop_near = 0.0, False
        self._merges = Merges(str(path), self._opened, self.cursor)
        own(self, f"the database at {path}", endings=("close", "give_back"))

    def _take_families(self, database: rocks.Rdict) -> None:
        with translated(str(self.path)):
            self._family = {name: database.get_column_family(name) for name in FAMILIES}
            self.families: Mapping[str, Any] = {
                name: database.get_column_family_handle(name) for name in FAMILIES
            }

    # -- writing --------------------------------------------------------------------------

    def batch(self) -> WriteBatch:
        now = time.monotonic()
        if now >= self._look_at:
            self._look_at, self._is_stop_near = now + STALL_LOOK_S, self._has_signs()
        if self._is_stop_near:
            self._stalls.wait()
        return rocks.WriteBatch(True)  # raw_mode: by its name takes 0.1 us longer

    def _has_signs(self) -> bool:
        families = [*self._family.values()]
        with suppress(Exception):  # the database was closed meanwhile: the write tells that
            return any(each.property_int_value(sign) for each in families for sign in SIGNS)
        return False

    def write(
        self,
        batch: WriteBatch,
        points: Mapping[bytes, bytes | None] | None = None,
        *,
        logged: bool = True,
    ) -> None:
        """Hot, as `sync` is. Translating errors without the `translated` object saves 0.5 of a
        put's 10 us. The committer has checked that the store is open; a close since then is found
        by the failure."""
        how = None if logged else self._unlogged
        try:
            self._db.write(batch, how)  # type: ignore[arg-type,union-attr]  # from self.batch()
        except Exception as error:
            self._open()
            raise from_text(str(self.path), error) from error
        if points is None:
            self._readers.renew()
        else:
            self._readers.outlive(points, READERS_BEHIND_BYTES_MAX)

    def look_again(self) -> bool:
        self._open()
        self._readers.renew()
        return True

    def sync(self) -> None:
        try:
            self._open().flush_wal(True)
        except KVStoreError:
            raise
        except Exception as error:
            raise from_text(str(self.path), error) from error

    def flush(self) -> None:
        self._open()
        family = self._family[DATA]
        with translated(str(self.path)):
            if active_bytes(family) >= INGEST_FLUSH_BYTES:
                family.flush()

    def empty_memory(self) -> None:
        """Write large memtables to files, so that closing the database takes less. Does nothing
        where RocksDB would wait, or the disk has little room."""
        self._open()
        for name in (DATA, CHANGES):
            if active_bytes(self._family[name]) >= INGEST_FLUSH_BYTES:
                self._flushed(self._family[name])

    def ingest(self, files: Sequence[Path]) -> None:
        options = rocks.IngestExternalFileOptions()
        options.set_move_files(True)
        self._open()
        with translated(str(self.path)):
            self._family[DATA].ingest_external_file([str(file) for file in files], options)
        self._readers.renew()

    # -- reading --------------------------------------------------------------------------

    def get(self, family: str, key: bytes) -> bytes | None:
        self._open()
        with translated(str(self.path)):
            value: bytes | None = self._family[family].get(key)
        return value

    def cursor(
        self,
        family: str,
        start: bytes = b"",
        end: bytes | None = None,
        *,
        reverse: bool = False,
        keys_only: bool = False,
    ) -> RocksCursor:
        self._open()
        options = rocks.ReadOptions()
        if self._is_passing:  # saves 30 ns an entry; a pass reads no block twice
            options.fill_cache(False)  # type: ignore[call-arg]  # as it is, not as its stub has it
            options.set_readahead_size(PASSING_READAHEAD_BYTES)
        if end is not None:
            options.set_iterate_upper_bound(end)
        where = str(self.path)
        cursor = RocksCursor(
            self._family[family], options, start, reverse=reverse, where=where, keys_only=keys_only
        )
        self._cursors.add(cursor)
        if self._db is None:  # another thread has closed it, perhaps before the cursor was added
            cursor.close()
            raise ClosedError(where)
        return cursor

    def hold_files(self, begin: bytes, end: bytes | None) -> HeldFiles | None:
        where, family = str(self.path), self._opened(DATA)
        in_memory = self._in_memory()
        if in_memory and not self._is_worth_a_flush(begin, end):
            return None
        if in_memory and not self._flushed(family):
            return None
        with translated(where):
            held = hold_files(where, self._footers, lambda: live_files(family), (begin, end))
        if held is not None:
            held.has_flushed = in_memory
            self._cursors.add(held)
            if self._db is None:  # as in `cursor`
                held.close()
                raise ClosedError(where)
        return held

    def _in_memory(self) -> bool:
        """Whether rows lie in memory only."""
        family = self._opened(DATA)
        with translated(str(self.path)):
            return any(_value(family, name) for name in _ENTRIES_IN_MEMORY)

    def _is_worth_a_flush(self, begin: bytes, end: bytes | None) -> bool:
        """Whether a pass over a span is long enough to write first what lies in memory only."""
        size = sum(
            file.size_bytes
            for file in self.files()
            if file.last >= begin and (end is None or file.first < end)
        )
        return not self.is_read_only and size >= COLUMNS_FLUSH_BYTES_MIN

    def _flushed(self, family: rocks.Rdict) -> bool:
        """Have RocksDB write what lies in memory only; False where it would wait, or where the disk
        has little room. A read does not wait for merges. A flush that fails stops all writes."""
        if self._has_signs():
            return False
        try:
            with translated(str(self.path)), storage_errors(str(self.path)):
                room = os.statvfs(self.path)
                wanted = FLUSH_ROOM_FACTOR * _value(family, "rocksdb.cur-size-all-mem-tables")
                if room.f_bavail * room.f_frsize < wanted:
                    return False
                family.flush()  # gives the interpreter lock away
        except StorageError:
            return False
        return True

    def check(self, reader: EntryReader) -> None:
        with translated(str(self.path)):
            reader.status()

    # -- upkeep ---------------------------------------------------------------------------

    def checkpoint(self, target: Path) -> None:
        database = self._open()
        if self.is_read_only:
            raise UsageError(
                f"a checkpoint of {self.path}, which is open to read only",
                "ask the process that writes it: kvstore.connect(path).checkpoint(...)",
            )
        with translated(str(target)):
            rocks.Checkpoint(database).create_checkpoint(str(target))

    def compact(self, family: str, start: bytes = b"", end: bytes | None = None) -> None:
        self._open()
        self._readers.renew()
        options = rocks.CompactOptions()
        options.set_bottommost_level_compaction(rocks.BottommostLevelCompaction.force_optimized())
        with translated(str(self.path)):
            self._family[family].flush()
            self._family[family].compact_range(start or None, end, options)

    def merges(self, rewritten: tuple[bytes, bytes] | None = None) -> Iterator[None]:
        if self.is_read_only:
            return
        for _ in self._merges.run(rewritten):
            self._readers.renew()  # the kept readers would read the files from before the merge
            yield

    def files(self) -> list[FileSpan]:
        """The sorted files and the keys they lie between, of all families."""
        with translated(str(self.path)):
            found = self._open().live_files()
        return [
            FileSpan(bytes(file["start_key"]), bytes(file["end_key"]), int(file["size"]))
            for file in found
            if file["start_key"] is not None
        ]

    def stats(self) -> Mapping[str, int]:
        self._open()
        with translated(str(self.path)):
            return figures({name: self._family[name] for name in FAMILIES})

    def close(self) -> None:
        if self._db is None:
            return
        # First replace the fields that other threads read: from now on they open nothing.
        handles = [*self._family.values(), self._db]
        self._db = None
        self._cache = rocks.Cache(0)  # the old cache would keep its blocks in memory
        self._family = self.families = _Closed(str(self.path))
        self._readers.renew()
        self._merges.finish()
        if self._moment is not None:
            self._moment.close()
        for cursor in self._open_cursors():
            cursor.close()
        for handle in handles:
            # Closing flushes memtables, which fails on a full disk. Nothing is lost: the log has
            # their entries. The handle releases the database and its lock in any case.
            with suppress(Exception):
                handle.close()
        THREADS.close(self)

    def fork_parts(self) -> Sequence[object]:
        """Open cursors: each holds an iterator, whose destructor may remove files."""
        return self._open_cursors()

    def _open_cursors(self) -> list[RocksCursor | OpenFiles]:
        while True:
            with suppress(RuntimeError):  # another thread has added a cursor
                return list(self._cursors)

    def _opened(self, name: str) -> rocks.Rdict:
        self._open()
        return self._family[name]

    def _new_reader(self) -> EntryReader:
        self._open()
        reader: EntryReader = self._family[DATA].iter()
        return reader

    def _open(self) -> rocks.Rdict:
        if self._db is None:
            raise ClosedError(str(self.path))
        return self._db


class _Closed(dict[str, Any]):
    """Stands for the families of a closed database."""

    def __init__(self, where: str) -> None:
        super().__init__()
        self._where = where

    def __missing__(self, name: str) -> NoReturn:
        raise ClosedError(self._where)


class RocksCursor:
    """A pass over a RocksDB iterator, in chunks. Its upper bound lies in `options`.

    It begins with an iterator that takes one call an entry and cannot seek. A second iterator, made
    beside the first, takes three calls an entry. It takes over where a scan skips entries.

    A write may come between the making of the two. The older iterator reads the references of a
    key. So a row of an import that settles in between is read once, or twice with the same value,
    and never missed.
    """

    def __init__(
        self,
        family: rocks.Rdict,
        options: rocks.ReadOptions,
        start: bytes,
        *,
        reverse: bool,
        where: str,
        keys_only: bool = False,
    ) -> None:
        self._where = where
        self._start = start
        self._reverse = reverse
        self._options = options  # owns the bound: the iterators have a pointer to its bytes
        with translated(where):
            # References are the first entries of a key, so a descending pass reads them last.
            older: Any = family.iter(options) if reverse else None
            make = family.keys if keys_only else family.items
            found: Any = make(
                backwards=reverse, from_key=None if reverse else start, read_opt=options
            )
            # Copying a value of 100 bytes takes a fifth of an entry's time.
            self._source: Iterator[Any] | None = (
                zip(found, _NO_VALUES, strict=False) if keys_only else found
            )
            self._seeker: Any = older or family.iter(options)
        self._last: bytes | None = None if reverse else start

    def take(self, count: int) -> tuple[list[bytes], list[bytes]]:
        keys: list[bytes] = []
        values: list[bytes] = []
        with translated(self._where):
            has_more = collect(self._open(), keys, values, count, SCAN_CHUNK_BYTES)
            if keys:
                self._last = keys[-1]
            if not has_more:
                self._end()
        if self._reverse and keys and keys[-1] < self._start:
            # `set_iterate_lower_bound` of rocksdict 0.3.29 sets the upper bound.
            inside = bisect.bisect_right(keys, -1, key=lambda key: -(key >= self._start))
            del keys[inside:], values[inside:]
            self._source = iter(())
        return keys, values

    def feed(self, live: Live, count: int) -> bool:
        if self._reverse:
            keys, values = self.take(count)
            live.pass_over(zip(keys, values, strict=True), len(keys))
            has_more = bool(keys)
        else:
            with translated(self._where):
                has_more = live.pass_over(self._open(), count, SCAN_CHUNK_BYTES)
                self._last = live.last or self._last
                if not has_more:
                    self._end()
        if live.ahead is not None:
            self._go(*live.ahead)
        return has_more

    def close(self) -> None:
        self._source = self._seeker = None

    def _open(self) -> Iterator[Any]:
        if self._source is None:
            raise ClosedError(f"a scan of {self._where}")
        return self._source

    def _open_seeker(self) -> Any:
        """The second iterator. Another thread may have closed the pass meanwhile."""
        seeker = self._seeker
        if seeker is None:
            raise ClosedError(f"a scan of {self._where}")
        return seeker

    def _go(self, target: bytes, is_floor: bool) -> None:
        seeker = self._open_seeker()
        with translated(self._where):
            seeker.seek_for_prev(target) if is_floor else seeker.seek(target)
        self._source = Entries(seeker, reverse=self._reverse)

    def _end(self) -> None:
        """Raise if the pass stopped at a damaged block and not at its end."""
        seeker = self._open_seeker()
        self._source = iter(())
        if self._last is None:
            seeker.seek_to_last()
        elif self._reverse:
            seeker.seek_for_prev(self._last)
        else:
            seeker.seek(self._last)
        if seeker.valid():
            seeker.prev() if self._reverse else seeker.next()
        seeker.status()


_NO_VALUES = repeat(b"")


# --------------------------------------------------------------------------------------------------
# How a store's RocksDB database and its families are stored.


def database_options(cache: rocks.Cache, *, requires_logs: bool = True) -> rocks.Options:
    """With `requires_logs`, the MANIFEST lists each log that was closed and synced, and the
    database does not open where one of them is lost or shorter."""
    options = rocks.Options(raw_mode=True)
    if requires_logs:  # rocksdict has no call for this option; loading it from a file takes 90 us
        options, _ = rocks.Options.load_latest(str(_OPTIONS_DIRECTORY))
    _set_family(options, cache)
    options.create_if_missing(True)
    options.create_missing_column_families(True)
    options.set_max_background_jobs(2)
    options.set_keep_log_file_num(4)
    options.set_max_log_file_size(INFO_LOG_BYTES_MAX)
    options.set_max_manifest_file_size(MANIFEST_BYTES_MAX)
    options.set_max_total_wal_size(LOG_BYTES_MAX)
    # A crash leaves a torn record at the end of the log. A bad record before the end is damage.
    options.set_wal_recovery_mode(rocks.DBRecoveryMode.tolerate_corrupted_tail_records())
    return options


_OPTIONS_DIRECTORY = Path(__file__).with_name("options")


def release() -> str:
    """The release of RocksDB that rocksdict has built in, such as "10.4.2". rocksdict does not tell
    it, but the options file of a database does: an empty one is made, in some 10 ms."""
    with (
        tempfile.TemporaryDirectory(prefix="kvstore-") as place,
        translated(f"an empty database in {place}"),
    ):
        rocks.Rdict(place).close()
        told = [path.read_text() for path in Path(place).glob("OPTIONS-*")]
        found: str = re.findall(r"^\s*rocksdb_version=(\S+)$", "\n".join(told), re.MULTILINE)[0]
        return found


def family_options(family: str, cache: rocks.Cache) -> rocks.Options:
    """The options of one family. Benchmarks use them for plain rocksdict as well."""
    options = rocks.Options(raw_mode=True)
    _set_family(options, cache)
    return options


def table_options() -> rocks.BlockBasedOptions:
    """The layout of the sorted files of stores and of imports.

    They have no bloom filter. A filter of whole keys is no help for a seek to the versions of a
    key, and building one takes a tenth of the time of writing an SST.
    """
    table = rocks.BlockBasedOptions()
    table.set_format_version(5)
    table.set_block_size(BLOCK_BYTES)
    return table


def _set_family(options: rocks.Options, cache: rocks.Cache) -> None:
    table = table_options()
    table.set_block_cache(cache)
    options.set_block_based_table_factory(table)
    options.set_compression_type(rocks.DBCompressionType.lz4())


# --------------------------------------------------------------------------------------------------
# rocksdict's errors as errors of our tree. Each is a bare `Exception`, recognised by its text.


class translated:  # noqa: N801  # used as a statement: `with translated(where):`
    """Turn rocksdict's bare exceptions into errors of the tree. A message names the directory
    `where`, even if the database was opened in another directory, its `home`."""

    __slots__ = ("_home", "_where")

    def __init__(self, where: str, home: Path | None = None) -> None:
        self._where = where
        self._home = where if home is None else str(home)

    def __enter__(self) -> None:
        pass

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, _trace: object
    ) -> None:
        if isinstance(error, Exception) and not isinstance(error, KVStoreError):
            raise from_text(self._where, error, self._home) from error


def from_text(where: str, error: Exception, home: str = "") -> KVStoreError:
    """The error of our tree for an exception of rocksdict, in a database at `where` that was opened
    in `home`."""
    text = str(error).replace(home, where) if home else str(error)
    if isinstance(error, rocks.DbClosedError) or text.startswith("Already "):
        return ClosedError(where)  # "Already borrowed": another thread is closing the database
    if "lock hold by current process" in text or "While lock file" in text:
        return LockedError(
            where, "this process" if "current process" in text else "another process"
        )
    if "No space left" in text or "Disk quota" in text:
        return OutOfSpaceError(where)
    if lost := _LOST_LOG.search(text):
        return CorruptionError(
            str(Path(where) / f"{int(lost[1]):06d}.log"),
            "the log is lost, or shorter than it was when it was synced",
            "put it back, or restore the store from a backup",
        )
    if text.startswith("Corruption"):
        return CorruptionError(where, text)
    if any(refusal in text for refusal in _REFUSALS):
        return AccessDeniedError(where, text)
    return StorageError(f"storage of {where} failed: {text}", "look at the disk, then reopen")


_LOST_LOG = re.compile(r"(?:Missing WAL with log number|Size mismatch: WAL \(log number): (\d+)")
_REFUSALS = ("Permission denied", "Operation not permitted", "Read-only file system")


# --------------------------------------------------------------------------------------------------
# The figures that RocksDB tells of its files, memory and work.

_OF_A_FAMILY = {
    "bytes": "rocksdb.live-sst-files-size",
    "memtable_bytes": "rocksdb.cur-size-all-mem-tables",
    "entries": "rocksdb.estimate-num-keys",
}

_WHOLE: Mapping[str, tuple[str, Callable[[Iterable[int]], int]]] = {
    "cache_bytes": ("rocksdb.block-cache-usage", max),  # the families share one cache
    "pending_compaction_bytes": ("rocksdb.estimate-pending-compaction-bytes", sum),
    "compactions_running": ("rocksdb.num-running-compactions", max),  # counted by database
    "flushes_running": ("rocksdb.num-running-flushes", max),
    "writes_stopped": ("rocksdb.is-write-stopped", max),
}
"""The figures of the whole engine: the property, and how the values of the families become one."""

_STOPS = re.compile(r"\btotal-stops: (\d+)")


def figures(families: Mapping[str, rocks.Rdict]) -> dict[str, int]:
    """See `Engine.stats`."""
    found = {}
    for name, family in families.items():
        for figure, prop in _OF_A_FAMILY.items():
            found[f"{name}_{figure}"] = _value(family, prop)
        found[f"{name}_files"] = count_files(family)
    for figure, (prop, merge) in _WHOLE.items():
        found[figure] = merge(_value(family, prop) for family in families.values())
    found["write_stops"] = sum(map(_write_stops, families.values()))
    return found


def active_bytes(family: rocks.Rdict) -> int:
    """The bytes of the writes that no file has, and that no flush has begun to write."""
    return _value(family, "rocksdb.cur-size-active-mem-table")


def _write_stops(family: rocks.Rdict) -> int:
    """How often RocksDB has stopped the writes of a family since the database was opened."""
    told = _STOPS.search(family.property_value("rocksdb.cf-write-stall-stats") or "")
    return int(told[1]) if told else 0


def _value(family: rocks.Rdict, prop: str) -> int:
    return family.property_int_value(prop) or 0


# --------------------------------------------------------------------------------------------------
# Waiting for RocksDB outside RocksDB while it takes no writes.
#
# RocksDB stops writes while full memtables wait for a flush, or too many files for a compaction. A
# write of rocksdict that meets a stop keeps Python's interpreter lock until the stop ends, so all
# threads of the process stand still: readers, servers, heartbeats. So a writer that may meet one
# asks first, by an empty write that RocksDB refuses at once, and waits without the lock.
#
# Invariants
# 1. A stop for memtables begins with the write behind the one that filled a memtable or the log,
#    while an older memtable waits for its flush. The empty write comes between the two, because
#    filling takes longer than the time between two looks.
# 2. RocksDB slows writes down before files stop them, so no such stop comes unseen.
# 3. An empty write changes nothing: it has no sequence number and no record in the log.
#
# Source: `DelayWrite` and `RecalculateWriteStallConditions` of RocksDB.

_ENTRIES_IN_MEMORY: Final = (
    "rocksdb.num-entries-active-mem-table",
    "rocksdb.num-entries-imm-mem-tables",
)

_STOPPED: Final = "rocksdb.is-write-stopped"
SIGNS: Final = (
    "rocksdb.num-immutable-mem-table",  # a full memtable waits for its flush
    "rocksdb.actual-delayed-write-rate",  # of all families
    _STOPPED,  # of all families
)
"""Properties of families. One is above 0 where a write may meet a stop."""


class Stalls:
    """The stops of one database, as its writer meets them."""

    def __init__(self, family: Callable[[], rocks.Rdict]) -> None:
        """`family` gives a family of the database, and raises where that is closed."""
        self._family = family
        self._probe = rocks.WriteOptions()
        self._probe.no_slowdown = True
        self._probe.disable_wal = True  # type: ignore[method-assign,assignment]

    def wait(self) -> None:
        """Return once RocksDB takes writes, or fails them. Costs 3 us where it takes them."""
        pause = STALL_PAUSE_S
        while self._has_come():
            time.sleep(pause)
            pause = min(2 * pause, STALL_PAUSE_S_MAX)

    def _has_come(self) -> bool:
        """Whether a write would wait until a stop ends. A write that RocksDB only slows down does
        not: it waits for milliseconds."""
        with suppress(Exception):  # the write tells any failure
            family = self._family()
            return self._is_refused(family) and bool(family.property_int_value(_STOPPED))
        return False

    def _is_refused(self, family: rocks.Rdict) -> bool:
        try:
            family.write(rocks.WriteBatch(raw_mode=True), self._probe)
        except Exception as error:
            if "Write stall" in str(error):
                return True
            raise
        return False


# --------------------------------------------------------------------------------------------------
# RocksDB's background threads at a fork.
#
# RocksDB has pools of threads in each process, and keeps them when a database is closed. A forked
# child gets the pools without the threads. Its flushes would wait for ever, and the C++ destructors
# that run at exit would join threads that do not exist, which crashes or hangs.
#
# Invariants
# 1. While no database is open, a fork ends the threads first, and the parent starts them again. The
#    child gets empty pools, which work.
# 2. While a database is open, its flushes and compactions continue during the fork. The child may
#    then open databases read-only, which needs no thread. Opening one for writing is refused.
# 3. A child that got pools without threads ends right after Python's own finalization: streams are
#    flushed, and the C++ destructors do not run.

_TASKS: Final = Path("/proc/self/task")
_LOW, _HIGH = "rocksdb:low", "rocksdb:high"
_PAUSE_S: Final = 0.0001

SetThreads = Callable[[int, int], None]
"""Sets how many threads of low and of high priority the pools have."""


class Threads:
    """The state of RocksDB's threads in this process: `THREADS`, below."""

    def __init__(self, set_threads: SetThreads) -> None:
        self._set_threads = set_threads
        self._open: weakref.WeakSet[object] = weakref.WeakSet()
        self._was_used = False
        self._ended: Counter[str] = Counter()
        self._is_known = False
        self._stay = False
        self._owner = 0
        self._process = os.getpid()
        os.register_at_fork(
            before=self._before, after_in_parent=self._in_parent, after_in_child=self._in_child
        )

    def require_own(self, where: str) -> None:
        """Raise `ForkedError` where this process got the pools without their threads."""
        if self._owner:
            raise ForkedError(
                f"RocksDB in memory, needed for {where},",
                owner=self._owner,
                remedy="fork before a store is opened, or when all are closed, or start a fresh "
                "process (spawn, forkserver, subprocess); open_read_only works here",
            )

    def open(self, database: object) -> None:
        """Note that `database` is about to be opened."""
        self._was_used = True
        self._open.add(database)

    def close(self, database: object) -> None:
        """Note that `database` was closed."""
        self._open.discard(database)

    def has_open(self, database: object) -> bool:
        """Whether `database` is open in this process."""
        return database is not None and database in self._open

    def _before(self) -> None:
        undivided().acquire()  # one fork at a time
        self._ended = Counter()
        self._is_known = True
        found = _running() if self._was_used and not self._owner else Counter()
        self._stay = bool(found)
        if not found or self._open:
            return
        self._ended = found
        self._set_threads(0, 0)
        deadline = time.monotonic() + FORK_WAIT_S_MAX
        while (stay := bool(_running())) and time.monotonic() < deadline:
            time.sleep(_PAUSE_S)
        self._stay = stay

    def _in_parent(self) -> None:
        self._is_known = False
        if self._ended:
            self._set_threads(self._ended[_LOW], self._ended[_HIGH])
        undivided().release()

    def _in_child(self) -> None:
        # Another thread may have opened a database since `_before`. A program that forks without
        # Python and tells it afterwards has skipped `_before`.
        stays = self._stay or bool(self._open) if self._is_known else self._was_used
        if stays and not self._owner:
            self._owner = self._process
            _end_behind_python()
        self._open = weakref.WeakSet()
        self._is_known = False
        self._process = os.getpid()


def _running() -> Counter[str]:
    """The numbers of RocksDB's threads by name. Where the system does not list threads, one is
    assumed."""
    try:
        tasks = list(_TASKS.iterdir())
    except OSError:
        return Counter([_LOW])
    found: Counter[str] = Counter()
    for task in tasks:
        try:
            name = (task / "comm").read_text().strip()
        except OSError:  # the thread has ended
            continue
        if name.startswith("rocksdb:"):
            found[name] += 1
    return found


def _end_behind_python() -> None:
    """Make the C library's `exit`, which Python calls last, flush its streams and end the process
    at once, with its status. Handlers run from the newest to the oldest."""
    library = ctypes.CDLL(None)
    try:
        on_exit, at_exit = library.on_exit, library["__cxa_atexit"]
    except AttributeError:  # another C library than GNU's: the destructors run
        return
    on_exit(ctypes.cast(library._exit, ctypes.c_void_p), None)
    at_exit(ctypes.cast(library.fflush, ctypes.c_void_p), None, None)


# --------------------------------------------------------------------------------------------------
# Small sorted files: the groups of a family's files that are worth a merge.
#
# RocksDB merges files whose spans of keys overlap. It moves files whose keys follow one another,
# such as files of the change index, down its levels as they are. Each checkpoint and opening, and
# many a long pass, flushes the memtables into files of their own. Without a merge a store would
# therefore have more files with each of them, and RocksDB has no option against it.
#
# Invariants
# 1. A group is a stretch of small neighbours on one level, of at least `SMALL_FILES_MAX` files. So
#    a family has at most one file per `SMALL_FILE_BYTES`, and fewer than `SMALL_FILES_MAX` small
#    files between two others.
# 2. A group never costs more than `SORTED_MERGE_BYTES_MAX`. The cost includes files of other levels
#    that RocksDB rewrites as well. A costlier group is left to RocksDB, whose levels overlap there.


class SortedFile(NamedTuple):
    """One sorted file of a family."""

    level: int
    first: bytes
    last: bytes
    size_bytes: int

    @property
    def cost(self) -> int:
        """The cost of merging it, in bytes."""
        return self.size_bytes + SORTED_MERGE_FILE_BYTES

    @property
    def is_small(self) -> bool:
        return self.level > 0 and self.size_bytes < SMALL_FILE_BYTES


class FileGroup(NamedTuple):
    """The first and the last key of small files to merge."""

    first: bytes
    last: bytes


def sorted_files(table: str) -> list[SortedFile]:
    """The files of a family, from RocksDB's property `rocksdb.sstables`:

        --- level 6 --- version# 16 ---
         9:1048[1 .. 1]['6B30' seq:1, type:1 .. '6B31' seq:1, type:1](0)

    Levels ascend. The files of a level below the first ascend by key, and do not overlap.
    """
    files, level = [], 0
    for line in table.splitlines():
        if found := _LEVEL.match(line):
            level = int(found[1])
        elif found := _FILE.match(line):
            first, last = bytes.fromhex(found[2]), bytes.fromhex(found[3])
            files.append(SortedFile(level, first, last, int(found[1])))
    return files


_LEVEL: Final = re.compile(r"--- level (\d+) ---")
_FILE: Final = re.compile(r" \d+:(\d+)\[[^]]*\]\['([0-9A-F]*)' .* \.\. '([0-9A-F]*)' ")


def groups(files: Sequence[SortedFile]) -> Iterator[FileGroup]:
    """The groups of small files. `files`, and so the groups, are in the order of `sorted_files`."""
    levels = _by_level(files)
    for level in levels:
        for is_small, run in groupby(level, key=attrgetter("is_small")):
            if not is_small:
                continue
            found = list(run)
            if len(found) >= SMALL_FILES_MAX:
                yield from _affordable(found, levels)


def is_worth_a_merge(files: Sequence[SortedFile], group: FileGroup, waiting_bytes: int) -> bool:
    """Whether the newest files in the span of `group` should be merged with the older ones there.

    `waiting_bytes` of entries are in no file yet. A look-up seeks in each new file and in each
    level, so a store in one level answers twice as fast as one with three new files.
    """
    new = [file for file in files if file.level == 0 and _meets(file, group)]
    fresh = sum(file.cost for file in new) + waiting_bytes
    cost = _cost(group, _by_level(files)) + waiting_bytes
    are_many = cost > fresh or len(new) + bool(waiting_bytes) > 1
    return are_many and cost <= min(SORTED_MERGE_BYTES_MAX, fresh * NEWEST_MERGE_FACTOR)


def _meets(file: SortedFile, group: FileGroup) -> bool:
    return file.first <= group.last and file.last >= group.first


def _by_level(files: Sequence[SortedFile]) -> list[list[SortedFile]]:
    return [list(level) for _, level in groupby(files, key=attrgetter("level"))]


def _affordable(
    run: Sequence[SortedFile], levels: Sequence[Sequence[SortedFile]]
) -> Iterator[FileGroup]:
    """Cut a run of neighbours into groups that may be merged."""
    start = 0
    while start < len(run):
        end, cost = start, 0
        while end < len(run) and cost + run[end].cost <= SORTED_MERGE_BYTES_MAX:
            cost += run[end].cost
            end += 1
        group = FileGroup(run[start].first, run[end - 1].last)
        if end - start > 1 and _cost(group, levels) <= SORTED_MERGE_BYTES_MAX:
            yield group
        start = end


def _cost(group: FileGroup, levels: Sequence[Sequence[SortedFile]]) -> int:
    """The cost of all files that RocksDB rewrites when it merges `group`."""
    cost, (first, last) = 0, group
    for level in levels:
        # its files overlap each other: RocksDB takes every file that touches one
        if level[0].level == 0:
            touched = [file for file in level if file.first <= last and file.last >= first]
            first = min([first, *(file.first for file in touched)])
            last = max([last, *(file.last for file in touched)])
        else:
            begin = bisect_left(level, first, key=attrgetter("last"))
            touched = list(level[begin : bisect_right(level, last, key=attrgetter("first"))])
        cost += sum(file.cost for file in touched)
    return cost


# --------------------------------------------------------------------------------------------------
# Merging the sorted files of a RocksDB database, beside the compactions that RocksDB picks itself.
#
# The section above decides which files are merged. A step merges one group.
#
# Invariants
# 1. One merge runs at a time. A call that finds another one under way leaves the work to it.
# 2. All entries of a group are read first. RocksDB takes no more writes after a merge that met a
#    damaged block. Reads and `verify` tell of the damage, which is left in place.
# 3. Reads and commits continue during a merge.


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


# --------------------------------------------------------------------------------------------------
# Opening a RocksDB database: checks its directory and its log, and finds the moment that a reader
# sees.
#
# Invariants
# 1. A directory that is no store and may not become one is refused before RocksDB touches it.
# 2. A torn log is cut, and a damaged log is refused. `kvstore.engine.logs` tells them apart.
# 3. Opening to read writes nothing in the database's directory.


def _set_threads(low: int, high: int) -> None:
    env = rocks.Env()
    env.set_low_priority_background_threads(low)
    env.set_high_priority_background_threads(high)


THREADS = Threads(_set_threads)


def require_store_directory(path: Path, *, create: bool) -> None:
    """Raise `NotAStoreError` unless `path` holds a store or, if `create`, may become one;
    `CorruptionError` if it is a store whose `CURRENT` is gone."""
    with storage_errors(str(path)):
        if path.exists() and not path.is_dir():
            raise NotAStoreError(str(path), "a file, not a directory", "choose another path")
        if (path / "CURRENT").exists():
            return
        present = [file.name for file in path.iterdir()] if path.exists() else []
        logs = [name for name in present if name.endswith(".log") and _UNBORN.fullmatch(name)]
        is_begun = any((path / name).stat().st_size for name in logs)
    if not all(map(_UNBORN.fullmatch, present)):
        raise NotAStoreError(
            str(path), "a directory of other files", "check the path, or choose an empty directory"
        )
    if is_begun:  # RocksDB logs nothing before CURRENT is durable; it would make a new database
        raise CorruptionError(str(path), "CURRENT is gone, and a log holds entries")
    if not create:
        raise NotAStoreError(str(path), "no store is there", "check the path")


def make_store_directory(path: Path) -> None:
    """Make the directory of a new store, and make its name durable, even if the directory exists:
    files that were synced in it would be lost with the name. Makes nothing if a store exists.

    Raises `LockedError` if this process has the store open to write, also by another name. RocksDB
    compares names only, and its file lock does not refuse the process that holds it. Raises it too
    if an open store was moved away from `path`: it would write its next files into the directory.
    """
    with storage_errors(str(path)):
        is_there = (path / "CURRENT").exists()
        if THREADS.has_open(_WRITTEN.get(_place(path) if is_there else path)):
            raise LockedError(str(path), "this process")
        if is_there:
            return
        require_syncable(path)
        OS_FILES.make_directory(str(path))
        OS_FILES.sync_directory(str(path.absolute().parent))


def note_opened(path: Path, database: object, *, writes: bool) -> None:
    """Note that `database` was opened at `path`, if it `writes`."""
    if writes:
        with storage_errors(str(path)):
            _WRITTEN[_place(path)] = _WRITTEN[path] = database


def _place(path: Path) -> tuple[int, int]:
    """The directory, whatever its name. The database keeps it open, so its number is not given to
    another one."""
    found = path.stat()
    return found.st_dev, found.st_ino


_WRITTEN: Final[weakref.WeakValueDictionary[tuple[int, int] | Path, object]] = (
    weakref.WeakValueDictionary()
)
"""Databases that this process has opened to write, by place and by name."""


def _require_families(path: Path, home: Path) -> None:
    """Raise unless the database at `path`, opened in `home`, has a store's families, or is a store
    whose creation was interrupted."""
    with translated(str(path), home):
        found = set(rocks.Rdict.list_cf(str(home), rocks.Options(raw_mode=True)))
    if found > {"default", *FAMILIES}:
        raise FormatVersionError(str(path), found=sorted(found), supported=list(FAMILIES))
    if not found <= {"default", *FAMILIES} or (found == {"default"} and not _is_blank(path, home)):
        raise NotAStoreError(str(path), "another RocksDB database", "choose another path")


_UNBORN = re.compile(
    r"LOCK|LOG(\.old\.\d+)?|IDENTITY|rocksdict-config\.json"
    r"|(MANIFEST-|OPTIONS-)?\d+(\.log|\.dbtmp)?"
)
"""Names of files that RocksDB leaves if it is killed before it has written `CURRENT`."""


def _is_blank(path: Path, home: Path) -> bool:
    """Whether a database without our families is empty: a store whose creation was interrupted."""
    with translated(str(path), home):
        options = rocks.Options(raw_mode=True)
        options.set_db_paths([sorted_files_at(path)])
        database = rocks.Rdict(str(home), options, None, rocks.AccessType.read_only(False))
        try:
            return next(iter(database.items()), None) is None
        finally:
            database.close()


def sorted_files_at(path: Path) -> rocks.DBPath:
    """The directory in which a database finds its sorted files."""
    return rocks.DBPath(str(path.absolute()), 1 << 62)


def _require_torn(path: Path, home: Path) -> None:
    """Raise `CorruptionError` if a log is damaged before its end."""
    damage = find_damage(home)
    if damage is not None:
        raise CorruptionError(
            str(path / damage.file.name),
            f"it is broken at byte {damage.offset}, and whole records follow it",
            "restore from a backup; `kvstore.engine.rocks.salvage` keeps all before it",
        )


def opened_at_once(path: Path, cache: rocks.Cache) -> tuple[rocks.Rdict, Moment]:
    """Open the database at `path` read-only, at one moment.

    If the writer removes a file of that moment before it is opened, a later moment is opened. What
    looks like damage is looked into once the list of files stands still, because that takes seconds
    where logs are large.
    """
    found: KVStoreError | None = None
    for _ in range(READ_ONLY_OPENINGS_MAX):
        moment = Moment.of(path)
        try:
            with moment.home() as home:
                database = opened(path, cache, home=home, files_max=-1, is_past=moment.is_past)
                return database, moment
        except BaseException as error:
            moment.close()
            if not isinstance(error, KVStoreError):
                raise
            if not (isinstance(error, CorruptionError) or lacks_a_file(error)):
                raise
            if not moment.is_past():
                raise
            found = error
    if found is not None and not lacks_a_file(found):
        raise found
    raise StaleReaderError(str(path))


def lacks_a_file(error: BaseException) -> bool:
    """Whether an opening failed because the writer had just removed a file."""
    return isinstance(error, KVStoreError) and "No such file or directory" in str(error)


def opened(
    path: Path,
    cache: rocks.Cache,
    *,
    home: Path | None,
    files_max: int,
    knobs: Options = DEFAULTS,
    is_past: Callable[[], bool] = lambda: False,
) -> rocks.Rdict:
    """Open the database read-only in `home`, or for writing if `home` is None. Cuts a torn log, and
    refuses a damaged one. If `is_past()`, files have gone meanwhile, and the error of RocksDB is
    raised as it is."""
    is_read_only, home = home is not None, home or path
    families = {family: family_options(family, cache) for family in FAMILIES}
    options = database_options(cache)
    with storage_errors(str(path)):
        options.set_max_file_opening_threads(_opening_threads(path))
    options.set_max_open_files(files_max)
    knobs.set_database(options)
    for family in families.values():
        knobs.set_family(family)
    access = rocks.AccessType.read_write()
    if is_read_only:
        access = rocks.AccessType.read_only(False)
        options.set_db_paths([sorted_files_at(path)])

    def open_whole() -> rocks.Rdict:
        with storage_errors(str(path)):
            if (home / "CURRENT").exists():
                _require_families(path, home)
        with translated(str(path), home):
            return rocks.Rdict(str(home), options, families, access)

    with storage_errors(str(path)):
        if looks_recycled(home):  # 0.2 us a record
            _require_torn(path, home)
            cut(home)
    try:
        return open_whole()
    except CorruptionError:
        if is_past():
            raise
        _require_torn(path, home)
    with storage_errors(str(path)):
        cut_manifest(home)
    options.set_wal_recovery_mode(rocks.DBRecoveryMode.point_in_time())
    return open_whole()


def _opening_threads(path: Path) -> int:
    """The number of threads that open the files of each family.

    RocksDB starts all threads that it may, also for few files. With its default of 16 threads four
    files take 4.7 ms, and 15 ms on a busy machine; with one thread they take 1.9 ms, and 400 files
    8.9 ms.
    """
    files = len(list(path.glob("*.sst")))
    return max(1, min(files // _FILES_PER_OPENING_THREAD, 16))


_FILES_PER_OPENING_THREAD = 64
"""A file in the page cache takes 20 us, which is not worth a thread; other files wait for the
disk."""


def salvage(path: Path) -> None:
    """Cut a damaged log where the damage begins. Commits behind that place are lost for good.

    If a whole log is lost, its commits are lost; later commits may be kept.
    """
    THREADS.require_own(str(path))
    if looks_recycled(path):
        cut(path)
    cache = rocks.Cache(BLOCK_CACHE_BYTES)
    options = database_options(cache, requires_logs=False)
    options.set_wal_recovery_mode(rocks.DBRecoveryMode.point_in_time())
    families = {family: family_options(family, cache) for family in FAMILIES}
    with translated(str(path)):
        rocks.Rdict(str(path), options, families).close()
