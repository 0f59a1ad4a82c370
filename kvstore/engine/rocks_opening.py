"""Opening a RocksDB database: checks its directory and its log, and finds the moment that a reader
sees.

Invariants
1. A directory that is no store and may not become one is refused before RocksDB touches it.
2. A torn log is cut, and a damaged log is refused. `kvstore.engine.wal` tells them apart.
3. Opening to read writes nothing in the database's directory.
"""

from __future__ import annotations

import re
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Final

import rocksdict as rocks

from kvstore.engine.api import FAMILIES
from kvstore.engine.moment import Moment
from kvstore.engine.rocks_errors import translated
from kvstore.engine.rocks_knobs import DEFAULTS, Options
from kvstore.engine.rocks_options import database_options, family_options
from kvstore.engine.threads import Threads
from kvstore.engine.wal import cut, cut_manifest, find_damage, looks_recycled
from kvstore.errors import (
    CorruptionError,
    FormatVersionError,
    KVStoreError,
    LockedError,
    NotAStoreError,
    StaleReaderError,
)
from kvstore.errors.system import storage_errors
from kvstore.limits import BLOCK_CACHE_BYTES, READ_ONLY_OPENINGS_MAX


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
        from kvstore.journal.files import OS_FILES  # a store that exists needs no journal

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
            "restore from a backup; `kvstore.engine.rocks_opening.salvage` keeps all before it",
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
            if not isinstance(error, KVStoreError) or not moment.is_past():
                raise
            if not (isinstance(error, CorruptionError) or lacks_a_file(error)):
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
