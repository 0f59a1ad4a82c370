"""Opening a store: find out what is there, refuse what cannot be served, put the parts together."""

from __future__ import annotations

import os
import secrets
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Final

from kvstore.changes import ChangeIndex
from kvstore.changes.capture import open_domain
from kvstore.clock import Clock, Timeline, WallClock
from kvstore.codec.keys import encode_range_key
from kvstore.codec.ordered import escape
from kvstore.commit import Committer, Durability, require_durability
from kvstore.engine import DATA, RANGES, Batch, Engine
from kvstore.engine.rocks import RocksEngine
from kvstore.errors import FormatVersionError, NotAStoreError, UsageError
from kvstore.gc import GcPolicy
from kvstore.meta import FORMAT, INDEX_FLOOR, SINCE, UPPER, Meta
from kvstore.mvcc import RangeTombstone, Versions
from kvstore.store import Store

FORMAT_VERSION: Final = 1
ENGINES: Final = ("rocksdb",)


def open(  # noqa: A001  # kvstore.open is the public name
    path: str | os.PathLike[str],
    engine: str = "rocksdb",
    durability: Durability = "group",
    clock: WallClock | None = None,
    *,
    create: bool = True,
    gc: GcPolicy | None = None,
) -> Store:
    """Open the store at `path`, creating it where nothing is (unless `create=False`).

    `durability` is that of commits that name none: `"sync"` (an fsync each), `"group"` (an fsync
    shared by those that wait together) or `"async"` (none; `store.sync()` makes all durable).
    `clock` tells the time; the machine's by default. `gc` collects garbage in the background
    (`Store.start_gc`); without it history is kept until `store.gc` is called.

    Raises `LockedError` while another handle has it open, `NotAStoreError` where something else
    lies at `path`, `FormatVersionError` if a newer release wrote it, `CorruptionError` if bytes
    are damaged. Costs about 10 ms, and 1 us per range tombstone and import.
    """
    require_durability(durability)
    if engine not in ENGINES:
        raise UsageError(f"engine={engine!r}", f"pass one of {', '.join(ENGINES)}")
    directory = Path(path)
    opened = RocksEngine(directory, create=create)
    try:
        store = assemble(directory, opened, durability=durability, clock=clock or Clock())
        if gc is not None:
            store.start_gc(gc)
        return store
    except BaseException:
        opened.close()
        raise


def assemble(
    path: Path | None, engine: Engine, *, durability: Durability, clock: WallClock
) -> Store:
    """A store over an open engine."""
    meta = Meta(engine)
    _require_format(path, engine, meta)
    index = ChangeIndex(engine)
    since = meta.timestamp(SINCE)
    upper = max(meta.timestamp(UPPER), index.last() + 1, since + 1)
    committer = Committer(
        versions := Versions(engine),
        index,
        Timeline(clock, last=upper - 1),
        open_domain(engine, index, clock, since=since, upper=upper),
        upper=upper,
        since=since,
        durability=durability,
        where=str(path),
    )
    return Store(path, engine, versions, index, committer)


class Founding:
    """A store being built from versions with timestamps of their own: a restore, a replica.

    Nothing serves it yet; `found` makes it a store.
    """

    def __init__(self, engine: Engine) -> None:
        self._engine = engine

    def add(self, files: Sequence[Path], tombstones: Iterable[RangeTombstone]) -> None:
        """Take sorted files of `data` entries, which are moved in, and range tombstones."""
        if files:
            self._engine.ingest(files)
        batch = self._engine.batch()
        for start, end, timestamp in tombstones:
            key = encode_range_key(start, timestamp)
            batch.put(key, escape(end), self._engine.families[RANGES])
        self._engine.write(batch)


@contextmanager
def found(path: Path, *, since: int, newest: int) -> Iterator[Founding]:
    """Build a store at `path`, readable in `[since, newest]`; it is one when the block ends.

    Its change index starts above `newest`: changes in older windows are found by a pass.
    """
    engine = RocksEngine(path)
    try:
        yield Founding(engine)
        meta = Meta(engine)
        batch = engine.batch()
        meta.stage(batch, SINCE, {"timestamp": since})
        meta.stage(batch, UPPER, {"timestamp": newest + 1})
        meta.stage(batch, INDEX_FLOOR, {"timestamp": newest})
        _stage_format(meta, batch)
        engine.write(batch)
        engine.sync()
    finally:
        engine.close()


def _require_format(path: Path | None, engine: Engine, meta: Meta) -> None:
    """Read the format record, or write it where the store is new."""
    record = meta.read(FORMAT)
    if record is None:
        if engine.cursor(DATA).take(1)[0]:
            raise NotAStoreError(str(path), "data without a format record", "check the path")
        batch = engine.batch()
        _stage_format(meta, batch)
        engine.write(batch)
        engine.sync()
    elif record["version"] != FORMAT_VERSION:
        raise FormatVersionError(str(path), found=record["version"], supported=FORMAT_VERSION)


def _stage_format(meta: Meta, batch: Batch) -> None:
    store_id = f"{secrets.randbits(63):016x}"
    meta.stage(batch, FORMAT, {"version": FORMAT_VERSION, "store_id": store_id})
