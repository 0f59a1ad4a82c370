"""Opening a store: find its engine, refuse a store that cannot be served, put the parts
together."""

from __future__ import annotations

import os
import secrets
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final, TypeVar

from kvstore.base.arguments import word
from kvstore.base.clock import Clock, Timeline, WallClock
from kvstore.base.notices import notice
from kvstore.base.paths import is_there, require_outside, require_path, tell_of_parent
from kvstore.base.timestamp import Timestamp
from kvstore.changes import ChangeIndex
from kvstore.changes.epochs import Capture, open_domain, passive_domain
from kvstore.engine import DATA, Engine, WriteBatch
from kvstore.engine.rocks import DEFAULTS, Options, RocksEngine
from kvstore.engine.rocks_secondary import SecondaryEngine
from kvstore.errors import (
    Argument,
    FormatVersionError,
    LockedError,
    NotAStoreError,
    UsageError,
    storage_errors,
)
from kvstore.feeds.replica import FirstCopy, stage_replica, stored_policy
from kvstore.mvcc import RangeTombstone, Versions
from kvstore.mvcc.meta import FORMAT, INDEX_FLOOR, SINCE, UPPER, Meta
from kvstore.mvcc.write_set import stage_tombstones
from kvstore.retention.gc import GcPolicy
from kvstore.store import Store
from kvstore.timeline.committer import Committer
from kvstore.timeline.durability import DURABILITY, Durability, DurableMark
from kvstore.timeline.frontiers import read_only_policy
from kvstore.timeline.pieces import remove_pieces

AnyStore = TypeVar("AnyStore", bound=Store)

FORMAT_VERSION: Final = 1
ENGINES: Final = ("rocksdb", "memory")
_READ_BESIDE: Final = "to read, kvstore.follow(path) or kvstore.open_read_only(path)"
_FROM_HERE: Final = f"use the Store that has it open, from any thread; {_READ_BESIDE}"
_FROM_ANOTHER: Final = (
    "open it with shared=True, here and there; or work beside it: kvstore.connect(path), if it was "
    f"opened with shared=True or control=True, or is served; {_READ_BESIDE}; or close it there"
)
_ENGINE: Final = word(*ENGINES, hint=f"pass one of {', '.join(ENGINES)}, or an Engine")


def open(  # noqa: A001  # named as the public call, which is in `kvstore.remote.control`
    path: str | os.PathLike[str] | None,
    engine: str | Engine = "rocksdb",
    durability: Durability = "group",
    clock: WallClock | None = None,
    *,
    create: bool = True,
    gc: GcPolicy | None = None,
    options: Options | None = None,
) -> Store:
    """Open as `kvstore.open` does; the process does not listen."""
    how: Any = {"create": create, "gc": gc, "options": options}
    return open_as(Store, path, engine, durability, clock, **how)


def open_as(
    face: type[AnyStore],
    path: str | os.PathLike[str] | None,
    engine: str | Engine,
    durability: Durability,
    clock: WallClock | None,
    *,
    create: bool,
    gc: GcPolicy | None,
    options: Options | None = None,
) -> AnyStore:
    """Open a store of the class `face`, as `kvstore.open` does."""
    DURABILITY.check("durability", durability)
    if path == ":memory:":
        raise UsageError(
            f"{path!r} would be a directory of that name",
            'for a store in memory: kvstore.open(None, engine="memory")',
        )
    began = time.perf_counter()
    directory = None if path is None else require_path(path)
    if clock is not None and not callable(getattr(clock, "wall_ns", None)):
        raise UsageError(Argument.of("clock", clock), "pass a Clock, or an object with wall_ns()")
    if options is not None and (not isinstance(options, Options) or engine != "rocksdb"):
        raise UsageError(Argument.of("options", options), 'pass Options, for engine="rocksdb" only')
    try:
        opened = _open_engine(directory, engine, create=create, knobs=options or DEFAULTS)
    except LockedError as error:
        remedy = _FROM_HERE if error.owner == "this process" else _FROM_ANOTHER
        raise LockedError(error.path, error.owner, remedy) from error
    try:
        store = assemble(
            face,
            directory,
            opened,
            durability=durability,
            clock=clock or Clock(),
            knobs=options or DEFAULTS,
            began=began,
        )
        store.upkeep.merge_files()
        store.upkeep.remove_leftovers()
        if gc is not None:
            store.upkeep.start_gc(gc)
        _tell_of_opening(store, time.perf_counter() - began)
        return store
    except BaseException:
        opened.close()
        raise


def _tell_of_opening(store: Store, seconds: float) -> None:
    records = store.imports.all()
    notice(
        "kvstore.store",
        "opened",
        store=str(store.path or "in memory"),
        since=str(store.since),
        upper=str(store.upper),
        imports_adding=sum(record.added is None for record in records),
        seconds=round(seconds, 3),
    )


def _taken_up(where: str, capture: Capture, began: float | None) -> Capture:
    """The capture. Logs that its opening took up the work of processes that died, if it did, and
    how long that took since the opening of the store `began`."""
    if ended := capture.recovered:
        facts: dict[str, Any] = {"processes": len(ended)}
        facts["changes"] = sum(epoch.events for epoch in ended)
        facts["upper"] = str(Timestamp(capture.quiet))
        if began is not None:
            facts["seconds"] = round(time.perf_counter() - began, 3)
        notice("kvstore.store", "recovered", store=where, **facts)
    return capture


def engine_at(path: Path) -> str | None:
    """Which engine made the store at `path`, None where there is none. Looks at names only."""
    with storage_errors(str(path)):
        if (path / "CURRENT").exists():
            return "rocksdb"
        from kvstore.engine.memory_engine import is_memory_store

        return "memory" if is_memory_store(path) else None


def _open_engine(
    path: Path | None, engine: str | Engine, *, create: bool, knobs: Options
) -> Engine:
    if callable(getattr(engine, "cursor", None)):
        assert not isinstance(engine, str)
        if path is not None:
            raise UsageError("a path and an open engine were given", "pass path=None")
        return engine
    engine = _ENGINE.check("engine", engine)
    if path is None:
        if engine != "memory" or not create:
            raise UsageError("no path was given", 'pass one, or engine="memory" and create=True')
        return _memory_engine(None)
    found = engine_at(path)
    if found not in (None, engine):
        raise NotAStoreError(
            str(path), f"a store of the engine {found!r}", f'open it with engine="{found}"'
        )
    if found is None and create:
        require_outside(path, name="path")
        if not is_there(path):
            tell_of_parent(path)
    if engine == "memory":
        return _memory_engine(path, create=create)
    return RocksEngine(path, create=create, knobs=knobs)


def _memory_engine(path: Path | None, **how: Any) -> Engine:
    # Imported late, with the journal: stores of RocksDB need neither.
    from kvstore.engine.memory_engine import MemoryEngine

    return MemoryEngine(path, **how)


def open_read_only(path: str | os.PathLike[str]) -> Store:
    """Open the store at `path` to be read: a checkpoint, or a store, even while another process
    writes it.

    The handle shows the state that the writer had at the handle's `upper`, which never moves: whole
    commits, imports and range deletes. Any number of processes may open it. Nothing is written at
    `path`, which may be read-only storage or another user's; the directory for temporary files
    (`TMPDIR`) takes a copy of the newest log for the moment of opening. Every write raises
    `UsageError`.

    Raises as `open`, `AccessDeniedError` if a file may not be read, and `StaleReaderError` if the
    writer removes files faster than they can be opened. Costs as `open`, and 3 to 50 ms per MB of
    unflushed log. Files that the writer removes later stay readable here, on disk too, until the
    handle is closed.
    """
    return read_as(Store, path)


def read_as(face: type[AnyStore], path: str | os.PathLike[str]) -> AnyStore:
    """Open a store of the class `face`, as `open_read_only` does."""
    directory = require_path(path)
    opened: Engine
    if engine_at(directory) == "memory":
        opened = _memory_engine(directory, read_only=True)
    else:
        opened = RocksEngine(directory, read_only=True)
    try:
        require_format(directory, opened)
        return assemble(face, directory, opened, durability="async", clock=Clock(), read_only=True)
    except BaseException:
        opened.close()
        raise


def require_format(path: Path, engine: Engine) -> None:
    """Raise `NotAStoreError` unless the engine at `path` has the format record of a store."""
    if Meta(engine).read(FORMAT) is None:
        raise NotAStoreError(str(path), "no format record", "open it with kvstore.open once")


def assemble(
    face: type[AnyStore],
    path: Path | None,
    engine: Engine,
    *,
    durability: Durability,
    clock: WallClock,
    read_only: bool = False,
    knobs: Options = DEFAULTS,
    began: float | None = None,
) -> AnyStore:
    """A store over an open engine, of the class `face`. `began` is when its opening began."""
    meta = Meta(engine)
    _require_format(path, engine, meta)
    index = ChangeIndex(engine)
    if not read_only:
        remove_pieces(engine, index)
    since = meta.timestamp(SINCE)
    upper = max(meta.timestamp(UPPER), index.last() + 1, since + 1)
    where = _where(path, engine) if path is None else f"the store at {path}"
    policy = stored_policy(meta, where)
    mark = None
    if read_only:
        capture = passive_domain(engine, upper=upper)
        is_live = isinstance(engine, SecondaryEngine)
        policy = read_only_policy(where, coming=policy.coming, is_live=is_live)
    else:
        if path is not None and isinstance(engine, RocksEngine):
            mark = DurableMark(path)
        capture = _taken_up(where, open_domain(engine, index, since=since, upper=upper), began)
    committer = Committer(
        versions := Versions(engine, cache_bytes=knobs.value_cache()),
        index,
        Timeline(clock, last=upper - 1),
        capture,
        upper=upper,
        since=since,
        durability=durability,
        where=where,
        policy=policy,
        mark=mark,
    )
    store = face(path, engine, versions, index, committer, clock=clock)
    if policy.commits is None:
        committer.expiries.look()
    return store


class StoreBuilder:
    """A store being built from versions with timestamps of their own: a restore, a replica.

    Nothing serves it yet; `building` makes it a store.
    """

    def __init__(self, engine: Engine) -> None:
        self._engine = engine

    def add(self, files: Sequence[Path], tombstones: Iterable[RangeTombstone]) -> None:
        """Take sorted files of `data` entries, which are moved in, and range tombstones."""
        if files:
            self._engine.ingest(files)
        batch = self._engine.batch()
        stage_tombstones(batch, tombstones, self._engine.families)
        self._engine.write(batch)


@contextmanager
def building(
    path: Path, *, since: int, newest: int, replica_of: FirstCopy | None = None
) -> Iterator[StoreBuilder]:
    """Build a store at `path`, readable in `[since, newest]`. The path holds a store once the block
    has ended.

    Its change index starts above `newest`: changes in older windows are found by a pass. It
    follows the store `replica_of`, where that is given.
    """
    engine = RocksEngine(path)
    try:
        yield StoreBuilder(engine)
        meta = Meta(engine)
        batch = engine.batch()
        meta.stage_timestamp(batch, SINCE, since)
        meta.stage_timestamp(batch, UPPER, newest + 1)
        meta.stage_timestamp(batch, INDEX_FLOOR, newest)
        _stage_format(meta, batch)
        if replica_of is not None:
            stage_replica(batch, meta, replica_of.source, newest=replica_of.newest())
        engine.write(batch)
        engine.sync()
    finally:
        engine.close()


def _require_format(path: Path | None, engine: Engine, meta: Meta) -> None:
    """Read the format record, or write it where the store is new."""
    record = meta.read(FORMAT)
    if record is None:
        if engine.cursor(DATA).take(1)[0]:
            raise NotAStoreError(
                _where(path, engine), "data without a format record", "check the path"
            )
        batch = engine.batch()
        _stage_format(meta, batch)
        engine.write(batch)
        engine.sync()
    elif (version := record.field("version", int)) != FORMAT_VERSION:
        raise FormatVersionError(_where(path, engine), found=version, supported=FORMAT_VERSION)
    else:
        record.hexed("store_id")


def _where(path: Path | None, engine: Engine) -> str:
    if path is not None:
        return str(path)
    kind = type(engine).__name__
    return "the store in memory" if kind == "MemoryEngine" else f"the store over {kind}"


def _stage_format(meta: Meta, batch: WriteBatch) -> None:
    store_id = f"{secrets.randbits(63):016x}"
    meta.stage(batch, FORMAT, {"version": FORMAT_VERSION, "store_id": store_id})
