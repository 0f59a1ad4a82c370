"""`kvstore.open`: a store that this process owns, and that listens to scripts if it is asked to."""

from __future__ import annotations

import os
from typing import Any

from kvstore import opening
from kvstore.clock import WallClock
from kvstore.commit import Durability
from kvstore.engine import Engine
from kvstore.engine.rocks_knobs import Options
from kvstore.errors import UsageError
from kvstore.gc import GcPolicy
from kvstore.store import Store


def open(  # noqa: A001  # kvstore.open is the public name
    path: str | os.PathLike[str] | None,
    engine: str | Engine = "rocksdb",
    durability: Durability = "group",
    clock: WallClock | None = None,
    *,
    create: bool = True,
    gc: GcPolicy | None = None,
    control: bool = False,
    options: Options | None = None,
) -> Store:
    """Open the store at `path`, creating it where nothing is (unless `create=False`).

    `durability` is the default of commits: `"sync"` (an fsync each), `"group"` (an fsync shared by
    commits that wait together) or `"async"` (none; `store.sync()` makes all durable).
    `engine="memory"` keeps everything in memory, and in a journal at `path`; with `path=None`
    nothing is kept when the store is closed. With `path=None` an open `Engine` of your own may be
    the `engine` (see `kvstore.testing.engines`): the store closes it. `clock` tells the time; the
    machine's by default. `gc` collects garbage in the background (`Upkeep.start_gc`); without it
    history is kept until `store.gc` is called. `options` bounds memory, threads and files.

    With `control=True` other processes of this user can speak to the store while it is open, by a
    Unix socket in its directory: `kvstore.connect(path)`, and commands such as `kvstore backup run`
    (docs/how-to/scripts-beside-a-service.md). One thread answers them; reads and commits of this
    process cost the same. It needs the extra `server`, and a local file system.

    The store belongs to the process that opens it: in a forked child each call raises
    `ForkedError`, and `close` does nothing. Servers that fork their workers open in each worker.
    A child forked while a RocksDB store is open can open others to read only (`open_read_only`),
    for its copy of RocksDB has no threads; spawn and forkserver start processes without that limit.

    Raises `LockedError` while another handle has it open, `NotAStoreError` where something else
    (or a store of another engine) lies at `path`, `FormatVersionError` if a newer release wrote
    it, `CorruptionError` if bytes are damaged. Costs some 7 ms, and 1 us per range tombstone
    and import; in memory some 5 us per entry.
    """
    if not control:
        return opening.open(path, engine, durability, clock, create=create, gc=gc, options=options)
    return _open_listening(path, engine, durability, clock, create=create, gc=gc, options=options)


def _open_listening(
    path: str | os.PathLike[str] | None,
    engine: str | Engine,
    durability: Durability,
    clock: WallClock | None,
    **how: Any,
) -> Store:
    if path is None:
        raise UsageError("a store without a path has no place for a socket", "pass a path")
    # Imported late: a server takes 20 MB of memory, and most stores need none.
    from kvstore.server.extra import require_extra

    require_extra()
    from kvstore.control.listener import ListeningStore

    store = opening.open_as(ListeningStore, path, engine, durability, clock, **how)
    try:
        store.listen()
    except BaseException:
        store.close()
        raise
    return store
