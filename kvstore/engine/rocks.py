"""RocksDB behind the `Engine` contract, through rocksdict.

What rocksdict 0.3.29 was seen to do, and what follows from it
* A synced `write` holds the interpreter lock for the whole fsync, `flush_wal(True)` releases it:
  so a batch is written unsynced and the log flushed after it, which also lets commits share one
  fsync.
* `set_iterate_lower_bound` sets the *upper* bound: only the upper one is used, and descending
  passes cut their own end.
* Iterators, family handles and family objects each keep the database, and its lock, open: `close`
  drops them all, cursors included.
* `Snapshot` iterators do not keep to the snapshot; plain iterators keep to their own view.
* Tailing iterators outlive writes, but overlook range deletes: they are of no use here.
* A database that is opened again without a list of its families gets default options for them.
* Iteration over `items()` ends early, without a word, at a damaged block: the end of every pass is
  checked with a second iterator, which has a status.
* An ingest that copies holds the interpreter lock throughout; a move takes 2 ms at any size.
* RocksDB opens without a log that is lost, and says nothing, unless its MANIFEST tracks logs. It
  tracks those that a newer one has followed; the newest may be lost in silence.
* A database that is opened read-only still gets rocksdict's own file rewritten, so a reader opens
  a private directory: see `kvstore.engine.moment`. `db_paths` tells where the sorted files lie.
* Every failure is a bare `Exception` whose text tells what it is: `_translated` reads it.
* `point_in_time` recovery cuts the log at the first bad byte without a word, synced records behind
  it included; `tolerate_corrupted_tail_records` refuses, but also refuses tails that a power cut
  leaves (zeros in the place of bytes): see `kvstore.engine.wal` for who decides.
"""

from __future__ import annotations

import bisect
import re
import weakref
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, NoReturn

import rocksdict as rocks

from kvstore.engine.api import DATA, FAMILIES, Batch, FileSpan, Reader
from kvstore.engine.moment import Moment
from kvstore.engine.threads import Threads
from kvstore.engine.wal import cut, cut_manifest, find_damage, looks_recycled
from kvstore.errors import (
    AccessDeniedError,
    ClosedError,
    CorruptionError,
    FormatVersionError,
    KVStoreError,
    LockedError,
    NotAStoreError,
    OutOfSpaceError,
    StaleReaderError,
    StorageError,
)
from kvstore.forks import own
from kvstore.journal.files import OS_FILES, storage_errors
from kvstore.limits import (
    BESIDE_OPEN_FILES_MAX,
    BLOCK_BYTES,
    BLOCK_CACHE_BYTES,
    IDLE_READERS_MAX,
    PASSING_CACHE_BYTES,
    PASSING_READAHEAD_BYTES,
    READ_ONLY_OPENINGS_MAX,
    SCAN_CHUNK_BYTES,
)
from kvstore.loops import Live, Readers, collect


def _set_threads(low: int, high: int) -> None:
    env = rocks.Env()
    env.set_low_priority_background_threads(low)
    env.set_high_priority_background_threads(high)


THREADS = Threads(_set_threads)


class RocksEngine:
    """A RocksDB database with the store's column families.

    A database opened `read_only` shows the moment of its opening, whatever another process writes.
    A caller that has laid out such a moment names its directory as `home`. A checkpoint is its own
    `home`; it is opened `beside` the database it was made of: the two share a cache, in which a
    file that both have is one, and it holds few files open at once.
    """

    def __init__(
        self,
        path: Path,
        *,
        read_only: bool = False,
        create: bool = True,
        home: Path | None = None,
        beside: RocksEngine | None = None,
    ) -> None:
        self.path = path
        self.is_read_only = read_only
        if not read_only:
            THREADS.require_own(str(path))
        THREADS.open(self)
        require_store_directory(path, create=create and not read_only)
        if not read_only and not (path / "CURRENT").exists():
            _make_directory(path)
        size = PASSING_CACHE_BYTES if read_only else BLOCK_CACHE_BYTES
        self._cache: rocks.Cache = rocks.Cache(size) if beside is None else beside._cache
        self._moment: Moment | None = None
        self._db: rocks.Rdict | None
        if read_only and home is None:
            self._db, self._moment = _opened_at_once(path, self._cache)
        else:
            files_max = -1 if beside is None else BESIDE_OPEN_FILES_MAX
            try:
                self._db = _opened(path, self._cache, home=home, files_max=files_max)
            except KVStoreError as error:
                if home is None or home == path or not _lacks_a_file(error):
                    raise
                raise StaleReaderError(str(path)) from error
        with _translated(str(path)):
            self._family = {name: self._db.get_column_family(name) for name in FAMILIES}
            self.families: Mapping[str, Any] = {
                name: self._db.get_column_family_handle(name) for name in FAMILIES
            }
        self._readers = Readers(self._new_reader, self.check, IDLE_READERS_MAX)
        self.find = self._readers.find
        self.borrow = self._readers.borrow
        self.give_back = self._readers.give_back
        self._unlogged = rocks.WriteOptions()
        self._unlogged.disable_wal = True  # type: ignore[method-assign,assignment]
        self._cursors: weakref.WeakSet[RocksCursor] = weakref.WeakSet()
        own(self, f"the database at {path}", endings=("close", "give_back"))

    # -- writing --------------------------------------------------------------------------

    def batch(self) -> Batch:
        return rocks.WriteBatch(raw_mode=True)

    def write(self, batch: Batch, *, logged: bool = True) -> None:
        """Hot, as `sync` is: `_translated` without its object, 0.5 us less of a put's 10."""
        how = None if logged else self._unlogged
        try:
            self._open().write(batch, how)  # type: ignore[arg-type]  # it came from self.batch()
        except KVStoreError:
            raise
        except Exception as error:
            raise _from_text(str(self.path), error) from error
        self._readers.renew()

    def sync(self) -> None:
        try:
            self._open().flush_wal(True)
        except KVStoreError:
            raise
        except Exception as error:
            raise _from_text(str(self.path), error) from error

    def ingest(self, files: Sequence[Path]) -> None:
        options = rocks.IngestExternalFileOptions()
        options.set_move_files(True)
        self._open()
        with _translated(str(self.path)):
            self._family[DATA].ingest_external_file([str(file) for file in files], options)
        self._readers.renew()

    # -- reading --------------------------------------------------------------------------

    def get(self, family: str, key: bytes) -> bytes | None:
        self._open()
        with _translated(str(self.path)):
            value: bytes | None = self._family[family].get(key)
        return value

    def cursor(
        self, family: str, start: bytes = b"", end: bytes | None = None, *, reverse: bool = False
    ) -> RocksCursor:
        self._open()
        options = rocks.ReadOptions()
        if self.is_read_only:  # 30 ns less an entry; blocks of a pass are not read again
            options.fill_cache(False)  # type: ignore[call-arg]  # as it is, not as its stub has it
            options.set_readahead_size(PASSING_READAHEAD_BYTES)
        if end is not None and not reverse:
            options.set_iterate_upper_bound(end)
        cursor = RocksCursor(
            self._family[family], options, start, end, reverse=reverse, where=str(self.path)
        )
        self._cursors.add(cursor)
        if self._db is None:  # closed meanwhile by another thread, which may have overlooked it
            cursor.close()
            raise ClosedError(str(self.path))
        return cursor

    def check(self, reader: Reader) -> None:
        with _translated(str(self.path)):
            reader.status()

    # -- upkeep ---------------------------------------------------------------------------

    def lay_out(self, home: Path) -> None:
        """Make `home` a directory in which other processes can open what this reader shows.

        Costs a copy of the logs.
        """
        self._open()
        assert self._moment is not None, "only a reader that found its own moment is asked"
        self._moment.lay_out(home)

    def checkpoint(self, target: Path) -> None:
        database = self._open()
        with _translated(str(target)):
            rocks.Checkpoint(database).create_checkpoint(str(target))

    def compact(self, family: str, start: bytes = b"", end: bytes | None = None) -> None:
        self._open()
        self._readers.renew()
        options = rocks.CompactOptions()
        options.set_bottommost_level_compaction(rocks.BottommostLevelCompaction.force_optimized())
        with _translated(str(self.path)):
            self._family[family].flush()
            self._family[family].compact_range(start or None, end, options)

    def files(self) -> list[FileSpan]:
        """The sorted files and the keys they lie between, of all families."""
        with _translated(str(self.path)):
            found = self._open().live_files()
        return [
            FileSpan(bytes(file["start_key"]), bytes(file["end_key"]), int(file["size"]))
            for file in found
            if file["start_key"] is not None
        ]

    def stats(self) -> Mapping[str, int]:
        self._open()
        figures = {}
        with _translated(str(self.path)):
            for name in FAMILIES:
                family = self._family[name]
                for figure, prop in _FIGURES.items():
                    figures[f"{name}_{figure}"] = family.property_int_value(prop) or 0
        return figures

    def close(self) -> None:
        if self._db is None:
            return
        # First what other threads look at: whoever comes now makes nothing that stays open.
        handles = [*self._family.values(), self._db]
        self._db = None
        self._cache = rocks.Cache(0)  # kept for `beside` alone: here it would hold the blocks on
        self._family = self.families = _Closed(str(self.path))
        self._readers.renew()
        if self._moment is not None:
            self._moment.close()
        for cursor in self._open_cursors():
            cursor.close()
        for handle in handles:
            # Closing flushes memtables, which a full disk refuses. Nothing is lost by that: what
            # they hold is in the log. The handle lets go of the database, and its lock, anyway.
            with suppress(Exception):
                handle.close()
        THREADS.close(self)

    def fork_parts(self) -> Sequence[object]:
        """Open cursors: each holds an iterator, whose destructor may remove files."""
        return self._open_cursors()

    def _open_cursors(self) -> list[RocksCursor]:
        while True:
            with suppress(RuntimeError):  # another thread has added one meanwhile
                return list(self._cursors)

    def _new_reader(self) -> Reader:
        self._open()
        reader: Reader = self._family[DATA].iter()
        return reader

    def _open(self) -> rocks.Rdict:
        if self._db is None:
            raise ClosedError(str(self.path))
        return self._db


class _Closed(dict[str, Any]):
    """In the place of the families of a database that was closed."""

    def __init__(self, where: str) -> None:
        super().__init__()
        self._where = where

    def __missing__(self, name: str) -> NoReturn:
        raise ClosedError(self._where)


class RocksCursor:
    """A pass over a RocksDB iterator, in chunks."""

    def __init__(
        self,
        family: rocks.Rdict,
        options: rocks.ReadOptions,
        start: bytes,
        end: bytes | None,
        *,
        reverse: bool,
        where: str,
    ) -> None:
        self._source: Iterator[Any] | None = family.items(
            backwards=reverse, from_key=end if reverse else start, read_opt=options
        )
        self._family: rocks.Rdict | None = family
        self._start = start
        self._end = end
        self._reverse = reverse
        self._where = where
        self._last = end if reverse else start

    def take(self, count: int) -> tuple[list[bytes], list[bytes]]:
        if self._source is None:
            raise ClosedError(f"a scan of {self._where}")
        if self._reverse and self._last == self._end is not None:
            # The first entry of a descending pass may be the end itself, which is cut.
            count += 1
        keys: list[bytes] = []
        values: list[bytes] = []
        with _translated(self._where):
            has_more = collect(self._source, keys, values, count, SCAN_CHUNK_BYTES)
        if keys:
            self._last = keys[-1]
        if not has_more:
            self._source = iter(())
            self._require_true_end()
        if self._reverse and keys:
            self._trim(keys, values)
        return keys, values

    def feed(self, live: Live, count: int) -> bool:
        if self._reverse:
            keys, values = self.take(count)
            live.pass_over(zip(keys, values, strict=True), len(keys))
            return bool(keys)
        if self._source is None:
            raise ClosedError(f"a scan of {self._where}")
        with _translated(self._where):
            has_more = live.pass_over(self._source, count, SCAN_CHUNK_BYTES)
        self._last = live.last or self._last
        if not has_more:
            self._source = iter(())
            self._require_true_end()
        return has_more

    def close(self) -> None:
        self._source = None
        self._family = None

    def _require_true_end(self) -> None:
        """Raise if the pass stopped at a damaged block rather than at its end."""
        if self._family is None:
            return
        with _translated(self._where):
            probe = self._family.iter()
            if not self._reverse:
                probe.seek(self._last or b"")
            elif self._last is None:
                probe.seek_to_last()
            else:
                probe.seek_for_prev(self._last)
            if probe.valid():
                probe.prev() if self._reverse else probe.next()
            probe.status()
        self._family = None

    def _trim(self, keys: list[bytes], values: list[bytes]) -> None:
        """Cut what a descending pass read outside `[start, end)`."""
        if self._end is not None and keys[0] == self._end:
            del keys[0], values[0]
        if keys and keys[-1] < self._start:
            inside = bisect.bisect_right(keys, -1, key=lambda key: -(key >= self._start))
            del keys[inside:], values[inside:]
            self._source = iter(())


def require_store_directory(path: Path, *, create: bool) -> None:
    """Raise `NotAStoreError` unless `path` holds a store or, if `create`, may become one."""
    with storage_errors(str(path)):
        if path.exists() and not path.is_dir():
            raise NotAStoreError(str(path), "a file, not a directory", "choose another path")
        if (path / "CURRENT").exists():
            return
        present = [file.name for file in path.iterdir()] if path.exists() else []
    if not all(map(_UNBORN.fullmatch, present)):
        raise NotAStoreError(str(path), "a directory of other files", "choose an empty one")
    if not create:
        raise NotAStoreError(str(path), "no store is there", "check the path")


def _make_directory(path: Path) -> None:
    """Make the directory of a new store, and its name durable, also if somebody has just made it:
    what is synced in a directory is lost with its name."""
    with storage_errors(str(path)):
        OS_FILES.make_directory(str(path))
        OS_FILES.sync_directory(str(path.absolute().parent))


def _require_families(path: Path, home: Path) -> None:
    """Raise unless the database at `path`, opened in `home`, has a store's families, or is a store
    that was killed while it was made."""
    with _translated(str(path), home):
        found = set(rocks.Rdict.list_cf(str(home), rocks.Options(raw_mode=True)))
    if found > {"default", *FAMILIES}:
        raise FormatVersionError(str(path), found=sorted(found), supported=list(FAMILIES))
    if not found <= {"default", *FAMILIES} or (found == {"default"} and not _is_blank(path, home)):
        raise NotAStoreError(str(path), "another RocksDB database", "choose another path")


_UNBORN = re.compile(
    r"LOCK|LOG(\.old\.\d+)?|IDENTITY|rocksdict-config\.json"
    r"|(MANIFEST-|OPTIONS-)?\d+(\.log|\.dbtmp)?"
)
"""What lies in a directory where RocksDB was killed before it had written `CURRENT`."""


def _is_blank(path: Path, home: Path) -> bool:
    """Whether a database without our families holds nothing: a store killed while it was made."""
    with _translated(str(path), home):
        options = rocks.Options(raw_mode=True)
        options.set_db_paths([_sorted_files(path)])
        database = rocks.Rdict(str(home), options, None, rocks.AccessType.read_only(False))
        try:
            return next(iter(database.items()), None) is None
        finally:
            database.close()


def _sorted_files(path: Path) -> rocks.DBPath:
    return rocks.DBPath(str(path.absolute()), 1 << 62)


def _require_torn(path: Path, home: Path) -> None:
    """Raise `CorruptionError` if a log is damaged, and not only torn at its end."""
    damage = find_damage(home)
    if damage is not None:
        raise CorruptionError(
            str(path / damage.file.name),
            f"it is broken at byte {damage.offset}, and goes on after it",
            "restore from a backup; `salvage` of this module keeps what precedes the damage",
        )


def _opened_at_once(path: Path, cache: rocks.Cache) -> tuple[rocks.Rdict, Moment]:
    """Open what the database at `path` holds at one moment, to be read.

    Its writer may remove a file before it is opened: then a later moment is opened.
    """
    for _ in range(READ_ONLY_OPENINGS_MAX):
        moment = Moment.of(path)
        try:
            with moment.home() as home:
                return _opened(path, cache, home=home, files_max=-1), moment
        except BaseException as error:
            moment.close()
            if not _lacks_a_file(error) or not moment.is_past():
                raise
    raise StaleReaderError(str(path))


def _lacks_a_file(error: BaseException) -> bool:
    return isinstance(error, KVStoreError) and "No such file or directory" in str(error)


def _opened(path: Path, cache: rocks.Cache, *, home: Path | None, files_max: int) -> rocks.Rdict:
    """Open the database to be read in `home`, or to be written; cut a torn log, and refuse a
    damaged one."""
    is_read_only, home = home is not None, home or path
    families = {family: family_options(family, cache) for family in FAMILIES}
    options = _database_options(cache)
    options.set_max_file_opening_threads(_opening_threads(path))
    options.set_max_open_files(files_max)
    access = rocks.AccessType.read_write()
    if is_read_only:
        access = rocks.AccessType.read_only(False)
        options.set_db_paths([_sorted_files(path)])

    def open_whole() -> rocks.Rdict:
        if (home / "CURRENT").exists():
            _require_families(path, home)
        with _translated(str(path), home):
            return rocks.Rdict(str(home), options, families, access)

    with storage_errors(str(path)):
        if looks_recycled(home):  # 0.2 us a record
            _require_torn(path, home)
            cut(home)
    try:
        return open_whole()
    except CorruptionError:
        _require_torn(path, home)
    with storage_errors(str(path)):
        cut_manifest(home)
    options.set_wal_recovery_mode(rocks.DBRecoveryMode.point_in_time())
    return open_whole()


def _opening_threads(path: Path) -> int:
    """With how many threads to open the files of each family.

    RocksDB starts as many as it may, whatever there is to open: by its default of 16 four files
    take 4.7 ms, and 15 on a busy machine; by one thread 1.9, and 400 files 8.9.
    """
    files = len(list(path.glob("*.sst")))
    return max(1, min(files // _FILES_PER_OPENING_THREAD, 16))


_FILES_PER_OPENING_THREAD = 64
"""Files in the page cache take 20 us each, which no thread is worth; others wait for the disk."""


def salvage(path: Path) -> None:
    """Cut a damaged log where the damage begins: commits from there on are lost for good.

    Where a whole log is lost, the commits in it are, and later ones may be kept.
    """
    THREADS.require_own(str(path))
    if looks_recycled(path):
        cut(path)
    cache = rocks.Cache(BLOCK_CACHE_BYTES)
    options = _database_options(cache, requires_logs=False)
    options.set_wal_recovery_mode(rocks.DBRecoveryMode.point_in_time())
    families = {family: family_options(family, cache) for family in FAMILIES}
    with _translated(str(path)):
        rocks.Rdict(str(path), options, families).close()


_FIGURES = {
    "bytes": "rocksdb.live-sst-files-size",
    "memtable_bytes": "rocksdb.cur-size-all-mem-tables",
    "entries": "rocksdb.estimate-num-keys",
}


def _database_options(cache: rocks.Cache, *, requires_logs: bool = True) -> rocks.Options:
    """With `requires_logs`, the MANIFEST lists each log that was closed and synced, and the
    database does not open where one of them is lost or shorter."""
    options = rocks.Options(raw_mode=True)
    if requires_logs:  # rocksdict has no call for it: loaded from a file, in 90 us
        options, _ = rocks.Options.load_latest(str(_OPTIONS_DIRECTORY))
    _set_family(options, cache)
    options.create_if_missing(True)
    options.create_missing_column_families(True)
    options.set_max_background_jobs(2)
    options.set_keep_log_file_num(4)
    # A torn record at the end of the log is what a crash leaves; one before the end is damage.
    options.set_wal_recovery_mode(rocks.DBRecoveryMode.tolerate_corrupted_tail_records())
    return options


_OPTIONS_DIRECTORY = Path(__file__).with_name("options")


def family_options(family: str, cache: rocks.Cache) -> rocks.Options:
    """How one family is stored; benchmarks give them to plain rocksdict as well."""
    options = rocks.Options(raw_mode=True)
    _set_family(options, cache)
    return options


def _set_family(options: rocks.Options, cache: rocks.Cache) -> None:
    table = rocks.BlockBasedOptions()
    table.set_block_cache(cache)
    table.set_format_version(5)
    table.set_block_size(BLOCK_BYTES)
    # No bloom filter: one of whole keys cannot serve a seek to the versions of a key, and building
    # it takes a tenth of the time of writing an SST.
    options.set_block_based_table_factory(table)
    options.set_compression_type(rocks.DBCompressionType.lz4())


class _translated:  # noqa: N801  # used as a statement: `with _translated(where):`
    """Turn rocksdict's bare exceptions into the error tree. A database that is opened in another
    directory, its `home`, is named by its own."""

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
            raise _from_text(self._where, error, self._home) from error


def _from_text(where: str, error: Exception, home: str = "") -> KVStoreError:
    text = str(error).replace(home, where) if home else str(error)
    if isinstance(error, rocks.DbClosedError) or text.startswith("Already "):
        return ClosedError(where)  # or another thread is just closing it: "Already borrowed"
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
