"""RocksDB behind the `Engine` contract, through rocksdict.

Observed behaviour of rocksdict 0.3.29, and its consequences
* A synced `write` holds the interpreter lock for the whole fsync; `flush_wal(True)` releases it. So
  a batch is written unsynced and the log is flushed after it. Commits can then share an fsync.
* A `write` that RocksDB stops holds the interpreter lock: see `kvstore.engine.rocks_stalls`.
* `set_iterate_lower_bound` sets the *upper* bound. So only the upper bound is used, and descending
  passes cut their own end.
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
* Opening a database read-only still rewrites a file of rocksdict's own. So a reader opens a private
  directory, see `kvstore.engine.moment`; `db_paths` names the place of the sorted files.
* Every failure is a bare `Exception`. `translated` recognises it by its text.
* `point_in_time` recovery silently cuts the log at the first bad byte, and loses synced records
  behind it. `tolerate_corrupted_tail_records` refuses such a log, but also refuses a tail that a
  power cut leaves (zeros in the place of bytes). `kvstore.engine.wal` decides between the two.
"""

from __future__ import annotations

import bisect
import time
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from itertools import repeat
from pathlib import Path
from typing import Any, NoReturn

import rocksdict as rocks

from kvstore.engine.api import DATA, FAMILIES, EntryReader, FileSpan, WriteBatch
from kvstore.engine.moment import Moment
from kvstore.engine.rocks_errors import from_text, translated
from kvstore.engine.rocks_figures import active_bytes, figures
from kvstore.engine.rocks_knobs import DEFAULTS, Options
from kvstore.engine.rocks_merges import Merges
from kvstore.engine.rocks_opening import (
    THREADS,
    lacks_a_file,
    make_store_directory,
    note_opened,
    opened,
    opened_at_once,
    require_store_directory,
)
from kvstore.engine.rocks_stalls import SIGNS, Stalls
from kvstore.errors import ClosedError, KVStoreError, StaleReaderError, UsageError
from kvstore.forks import own
from kvstore.limits import (
    BESIDE_OPEN_FILES_MAX,
    IDLE_READERS_MAX,
    INGEST_FLUSH_BYTES,
    PASSING_CACHE_BYTES,
    PASSING_READAHEAD_BYTES,
    READERS_BEHIND_BYTES_MAX,
    SCAN_CHUNK_BYTES,
    STALL_LOOK_S,
)
from kvstore.loops.live import Entries, Live, collect
from kvstore.loops.lookup import Readers


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
        self._cursors: weakref.WeakSet[RocksCursor] = weakref.WeakSet()
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
        return rocks.WriteBatch(raw_mode=True)

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

    def check(self, reader: EntryReader) -> None:
        with translated(str(self.path)):
            reader.status()

    # -- upkeep ---------------------------------------------------------------------------

    def lay_out(self, home: Path) -> None:
        """Make `home` a directory in which other processes can open the moment that this reader
        shows. Costs a copy of the logs."""
        self._open()
        assert self._moment is not None, "only a reader that found its own moment is asked"
        self._moment.lay_out(home)

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

    def _open_cursors(self) -> list[RocksCursor]:
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
