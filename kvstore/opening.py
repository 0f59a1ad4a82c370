"""Opening a store: find out what is there, refuse what cannot be served, put the parts together."""

from __future__ import annotations

import os
import secrets
from pathlib import Path
from typing import Final

from kvstore.changes import ChangeIndex
from kvstore.changes.capture import Capture, last_run, recovered
from kvstore.changes.changeset import DOMAIN_MAX, Serials
from kvstore.changes.epoch import record_of, run_name
from kvstore.clock import Clock, Timeline, WallClock
from kvstore.commit import Committer, Durability, require_durability
from kvstore.engine import DATA, Engine
from kvstore.engine.rocks import RocksEngine
from kvstore.errors import FormatVersionError, NotAStoreError, UsageError
from kvstore.meta import FORMAT, INDEX_FLOOR, SINCE, UPPER, Meta
from kvstore.mvcc import Versions
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
) -> Store:
    """Open the store at `path`, creating it where nothing is (unless `create=False`).

    `durability` is that of commits that name none: `"sync"` (an fsync each), `"group"` (an fsync
    shared by those that wait together) or `"async"` (none; `store.sync()` makes all durable).
    `clock` tells the time; the machine's by default.

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
        return assemble(directory, opened, durability=durability, clock=clock or Clock())
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


def open_domain(
    engine: Engine, index: ChangeIndex, clock: WallClock, *, since: int, upper: int
) -> Capture:
    """Begin a domain of changesets, after ending those of processes that died.

    Reads the headers of the change entries since the last quiet time that was written down: none
    after a close, those of a few thousand commits after a crash.
    """
    meta = Meta(engine)
    run, quiet, last = last_run(meta)
    low = max(quiet - 1, since, meta.timestamp(INDEX_FLOOR), 0)
    ended = recovered(index.headers(since=low, upto=upper - 1), last, upper=upper)
    if ended:
        batch = engine.batch()
        for number, epoch in enumerate(ended, start=run):
            meta.stage(batch, run_name(number), record_of(epoch))
        engine.write(batch)
        run += len(ended)
    capture = Capture(
        meta, Serials(clock), domain=secrets.randbelow(DOMAIN_MAX) + 1, run=run, quiet=upper
    )
    index.trims.append(capture.stage_trim)
    return capture


def _require_format(path: Path | None, engine: Engine, meta: Meta) -> None:
    """Read the format record, or write it where the store is new."""
    record = meta.read(FORMAT)
    if record is None:
        if engine.cursor(DATA).take(1)[0]:
            raise NotAStoreError(str(path), "data without a format record", "check the path")
        batch = engine.batch()
        meta.stage(
            batch, FORMAT, {"version": FORMAT_VERSION, "store_id": f"{secrets.randbits(63):016x}"}
        )
        engine.write(batch)
        engine.sync()
    elif record["version"] != FORMAT_VERSION:
        raise FormatVersionError(str(path), found=record["version"], supported=FORMAT_VERSION)
