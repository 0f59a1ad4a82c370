"""Scripts beside the process that owns a store: the owner listens on a socket, and scripts ask it
for little.

`kvstore.open` opens a store that this process owns. A script that finds an owner works beside it:
it reads the files, and the owner takes its claims, imports and writes.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

from kvstore import opening
from kvstore.base.arguments import require_path
from kvstore.base.clock import WallClock
from kvstore.engine import Engine
from kvstore.engine.rocks import Options
from kvstore.errors import LockedError, NotListeningError, UsageError
from kvstore.limits import (
    CONTROL_TRIES,
    CONTROL_TRY_S,
)
from kvstore.retention.gc import GcPolicy
from kvstore.store import Store
from kvstore.timeline.durability import Durability

if TYPE_CHECKING:
    from kvstore.remote.client import Client

# --------------------------------------------------------------------------------------------------
# How a script reaches a store: by opening it, or beside the process that has it open.
#
# with opened(path) as store: ...          by its path
# with as_store(client) as store: ...      by a client of its owner

StoreOrClient: TypeAlias = "Store | Client"
"""A store of this process, or the client of one that another process of this machine owns."""


@contextmanager
def as_store(given: StoreOrClient) -> Iterator[Store]:
    """The store itself, or the store of which `given` is a client by its path.

    In the second case the store shows the moment of this call, for the time of the block. Costs an
    fsync of the owner, and the opening of a reader. Raises `UsageError` for the client of a URL:
    the files of its store are elsewhere.
    """
    if isinstance(given, Store):
        yield given
        return
    owner = client_of(given)
    assert owner is not None, "a client has an owner"
    # Imported late: a client brings TLS with it, and most programs need none.
    from kvstore.remote.beside import beside

    with beside(owner) as store:
        yield store


def client_of(given: StoreOrClient) -> Client | None:
    """The client of the owner; None for a store that this process owns, or only reads."""
    if isinstance(given, Store):
        found: Client | None = getattr(given, "owner", None)
        return found
    from kvstore.remote.client import Client  # see `as_store`

    if not isinstance(given, Client):
        raise UsageError(
            f"a Store or a Client is needed, not {type(given).__name__}",
            "open the store, or connect to its owner: kvstore.connect(path)",
        )
    return given


@contextmanager
def opened(
    path: str | os.PathLike[str], open_here: Callable[[Path], Store] | None = None
) -> Iterator[Store]:
    """The store at `path`, opened to write for the time of the block; if another process has it
    open and listens, the store as of now beside that process.

    Raises as `reached`.
    """
    with reached(path, open_here) as found, as_store(found) as store:
        yield store


@contextmanager
def reached(
    path: str | os.PathLike[str], open_here: Callable[[Path], Store] | None = None
) -> Iterator[StoreOrClient]:
    """The store at `path`, opened to write for the time of the block; if another process has it
    open and listens, a client of that process. A client keeps no file of the store open, so it
    suits work without an end.

    Raises as `kvstore.open`, and `LockedError` if the owner does not listen.
    """
    place = require_path(path)
    open_here = open_here or partial(opening.open, create=False)
    for attempt in range(CONTROL_TRIES):
        if attempt:
            time.sleep(CONTROL_TRY_S)  # an owner that opens or closes is between two states
        try:
            store = open_here(place)
        except LockedError as error:
            refusal = error
        else:
            with store:
                yield store
            return
        from kvstore.remote.client import connect  # see above

        try:
            client = connect(place)
        except NotListeningError:
            continue
        with client:
            yield client
        return
    raise LockedError(
        refusal.path,
        refusal.owner,
        "have it listen (kvstore.open(path, control=True)), or close it there",
    )


# --------------------------------------------------------------------------------------------------
# `kvstore.open`: a store that this process owns, and that listens to scripts if it is asked to.


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
    from kvstore.remote.server.http import require_extra

    require_extra()
    from kvstore.remote.server.running import ListeningStore

    store = opening.open_as(ListeningStore, path, engine, durability, clock, **how)
    try:
        store.listen()
    except BaseException:
        store.close()
        raise
    return store
