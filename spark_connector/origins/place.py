"""Finding the origin at a path or URL: a store, checkpoints, a backup collection, or a server."""

from __future__ import annotations

import fcntl
from pathlib import Path
from typing import NamedTuple

from kvstore.errors import LockedError, NotAStoreError, UsageError
from kvstore.errors.system import storage_errors
from kvstore.opening import engine_at
from spark_connector.access import Access


class Place(NamedTuple):
    """The picklable address of an origin: a store, a checkpoint, one chain of a collection, or the
    store behind a server."""

    path: str
    access: Access | None = None
    """How to open the collection, or to call the server. None for the files of a store."""
    chain: str | None = None
    lease: str | None = None
    """The name of the lease that keeps the history of a live store while tasks read it."""

    @property
    def is_server(self) -> bool:
        return self.access is not None and self.access.is_server

    @property
    def is_collection(self) -> bool:
        return self.access is not None and not self.access.is_server


def find(access: Access | str) -> Place:
    """The place at a path or URL. In a directory of checkpoints it is the newest that is not open.

    Raises `LockedError` if another process has the store open, `NotAStoreError` if nothing readable
    lies there, and `UsageError` if a store lies there but options tell how to open a collection.
    """
    access = Access(access) if isinstance(access, str) else access
    with storage_errors(access.url):
        return _found(access)


def _found(access: Access) -> Place:
    path = access.url
    root = Path(path)
    if "://" in path or (root / "consensus").is_dir():
        return Place(path, access)
    if access != Access(path):
        options = ", ".join(access.as_options())
        raise UsageError(
            f"{path} is no collection; {options} are for collections and servers", "remove them"
        )
    found = [root] if engine_at(root) is not None else _checkpoints(root)
    free = next((each for each in found if not _is_open_to_write(each)), None)
    if free is not None:
        return Place(str(free))
    if found:
        raise LockedError(
            str(found[0]),
            "a process that writes; read a checkpoint of the store, or a collection",
        )
    what = "neither a store, a checkpoint nor a collection"
    raise NotAStoreError(path, what, "check the path, and that all machines see it")


def _checkpoints(directory: Path) -> list[Path]:
    """The stores in a directory, newest first. An unfinished one is hidden or ends in `.tmp`."""
    if not directory.is_dir():
        return []
    found = {
        each: made
        for each in directory.iterdir()
        if not each.name.startswith(".") and not each.name.endswith(".tmp")
        if (made := _made_at(each)) is not None
    }
    return sorted(found, key=found.__getitem__, reverse=True)


def _made_at(store: Path) -> int | None:
    """When a store was made, in nanoseconds. None if no store is there, or none any more."""
    current = store / "CURRENT"  # only RocksDB has it
    try:
        if engine_at(store) is None:
            return None
        return (current if current.exists() else store).stat().st_mtime_ns
    except FileNotFoundError:
        return None


def _is_open_to_write(store: Path) -> bool:
    """Whether another process has the store open.

    Call it only in a process that has no store open: closing the lock file would drop its own lock.
    It asks for a lock of either kind: RocksDB locks by `lockf`, and the memory engine by `flock`.
    Both locks are shared, because other readers may ask at the same time.
    """
    try:
        with (store / "LOCK").open("rb") as lock:
            fcntl.lockf(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
            fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:  # a checkpoint has no lock file, and a writer needs one
        return False
    return False
