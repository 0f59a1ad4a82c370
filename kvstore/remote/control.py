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
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Literal, TypeAlias, overload

from kvstore import opening
from kvstore.base.clock import WallClock
from kvstore.base.paths import require_path
from kvstore.engine import Engine
from kvstore.engine.rocks import Options
from kvstore.errors import ForkedError, KVStoreError, LockedError, NotListeningError, UsageError
from kvstore.limits import (
    CONTROL_TRIES,
    CONTROL_TRY_S,
)
from kvstore.remote.presence import guests
from kvstore.remote.shared import Role, SharedStore, open_shared
from kvstore.retention.gc import GcPolicy
from kvstore.store import Store
from kvstore.timeline.durability import Durability

if TYPE_CHECKING:
    from kvstore.remote.beside import ServedImports
    from kvstore.remote.client import Client
    from kvstore.timeline.imports import Imports

# --------------------------------------------------------------------------------------------------
# How a script reaches a store: by opening it, or beside the process that has it open.
#
# with reach(path) as store: ...           a store, a shared handle, or a client of its owner
# with as_store(store) as moment: ...      its files, for work that reads much

SERVER: Final = "uvicorn"
"""The package of the extra `server` by which a store listens."""

StoreOrClient: TypeAlias = "Store | Client"
"""A store of this process, or the client of one that another process of this machine owns."""


def present(given: StoreOrClient) -> StoreOrClient:
    """What a shared handle is at this moment: its store, or a client of the owner. Another object
    is given back as it is."""
    return given.reached() if isinstance(given, SharedStore) else given


@contextmanager
def as_store(given: StoreOrClient) -> Iterator[Store]:
    """The store itself, or the store of which `given` is a client by its path.

    In the second case the store shows the moment of this call, for the time of the block. Costs an
    fsync of the owner, and the opening of a reader. Raises `UsageError` for the client of a URL:
    the files of its store are elsewhere.
    """
    given = present(given)
    if isinstance(given, Store):
        yield given
        return
    owner = client_of(given)
    assert owner is not None, "a client has an owner"
    # Imported late: a client brings TLS with it, and most programs need none.
    from kvstore.remote.beside import beside

    with beside(owner) as store:
        yield store


def imports_of(given: StoreOrClient) -> Imports | ServedImports:
    """The imports of a store, of which a client can ask for a record, and abort one."""
    given = present(given)
    if isinstance(given, Store):
        return given.imports
    from kvstore.remote.beside import ServedImports  # see `as_store`

    owner = client_of(given)
    assert owner is not None, "a client has an owner"
    return ServedImports(owner)


def client_of(given: StoreOrClient) -> Client | None:
    """The client of the owner; None for a store that this process owns, or only reads."""
    given = present(given)
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


def reach(
    path: str | os.PathLike[str], open_here: Callable[[Path], Store] | None = None
) -> StoreOrClient:
    """The store at `path`, opened to write; if another process has it open and listens, a client of
    that process. The caller closes it. A client keeps no file of the store open, so it suits work
    without an end. A store that has guests is shared: the result is one of its handles.

    Raises as `kvstore.open`, and `LockedError` if the owner does not listen. In a child that was
    forked while RocksDB was in use, the owner alone can serve; without one `ForkedError` is raised.
    """
    place = require_path(path)
    if guests(place) and find_spec(SERVER) is not None:
        how: dict[str, Any] = {"create": False, "gc": None, "options": None}
        return open_shared(place, "group", **how, role=None, patience=None)
    open_here = open_here or partial(opening.open, create=False)
    for attempt in range(CONTROL_TRIES):
        if attempt:
            time.sleep(CONTROL_TRY_S)  # an owner that opens or closes is between two states
        try:
            return open_here(place)
        except ForkedError as error:  # this copy of RocksDB has no threads; the owner's has
            refusal: KVStoreError = error
        except LockedError as error:
            remedy = "open it there with shared=True or control=True, or close it there"
            refusal = LockedError(error.path, error.owner, remedy)
        from kvstore.remote.client import connect  # see above

        try:
            return connect(place)
        except NotListeningError:
            continue
    raise refusal


# --------------------------------------------------------------------------------------------------
# `kvstore.open`: a store that this process owns, and that listens to scripts if it is asked to.


@overload
def open(  # noqa: A001  # see below
    path: str | os.PathLike[str] | None,
    engine: str | Engine = "rocksdb",
    durability: Durability = "group",
    clock: WallClock | None = None,
    *,
    create: bool = True,
    gc: GcPolicy | None = None,
    options: Options | None = None,
    shared: Literal[True],
    role: Role | None = None,
    patience: float | None = None,
) -> SharedStore: ...


@overload
def open(  # noqa: A001  # see below
    path: str | os.PathLike[str] | None,
    engine: str | Engine = "rocksdb",
    durability: Durability = "group",
    clock: WallClock | None = None,
    *,
    create: bool = True,
    gc: GcPolicy | None = None,
    control: bool = False,
    options: Options | None = None,
    shared: bool = False,
    role: Role | None = None,
    patience: float | None = None,
) -> Store: ...


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
    shared: bool = False,
    role: Role | None = None,
    patience: float | None = None,
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

    With `shared=True` any number of processes of this user open the store, each with this call, and
    get a `SharedStore`. Whoever comes first owns it. The others are guests: they read the files by
    themselves and write through the owner, and when the owner goes, a guest that writes takes over.
    A call that needs the owner waits for `patience` seconds (`limits.CLIENT_PATIENCE_S`) and then
    raises `OwnerAwayError`, or `LockedError` if a process owns the store that was opened without
    `shared` and `control`. With `role="guest"` this process never owns; with `role="keeper"`
    neither, and a process of its own owns the store as long as a guest lives. `durability` is the
    default of this handle; `gc` and `options` take effect where it owns. Needs the extra `server`
    and a local file system: `UsageError` tells what is missing.

    Any other store belongs to the process that opens it: in a forked child each call raises
    `ForkedError`, and `close` does nothing. Servers that fork their workers open in each worker.
    A child forked while a RocksDB store is open can open others to read only (`open_read_only`),
    for its copy of RocksDB has no threads; spawn and forkserver start processes without that limit.

    Raises `LockedError` while another handle has it open, `NotAStoreError` where something else
    (or a store of another engine) lies at `path`, `FormatVersionError` if a newer release wrote
    it, `CorruptionError` if bytes are damaged. Costs some 7 ms, and 1 us per range tombstone
    and import; in memory some 5 us per entry.
    """
    if shared:
        if control or clock is not None or engine != "rocksdb":
            raise UsageError(
                "a shared store has its own socket, the machine's clock and the engine rocksdb",
                "leave out control=, clock= and engine=",
            )
        how: dict[str, Any] = {"create": create, "gc": gc, "options": options}
        return open_shared(path, durability, **how, role=role, patience=patience)
    if role is not None or patience is not None:
        raise UsageError("role= and patience= are of shared stores", "pass shared=True")
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
