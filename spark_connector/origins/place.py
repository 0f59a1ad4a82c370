"""Finding what lies at a path: a store, a directory of checkpoints, or a backup collection."""

from __future__ import annotations

import fcntl
from pathlib import Path
from typing import NamedTuple

from kvstore.errors import LockedError, NotAStoreError, UsageError
from kvstore.opening import engine_at
from spark_connector.access import Access


class Place(NamedTuple):
    """What to open: picklable, pinned to one checkpoint of several, or one chain."""

    path: str
    access: Access | None = None
    """How to open it, if it is a collection."""
    chain: str | None = None

    @property
    def is_collection(self) -> bool:
        return self.access is not None


def find(access: Access | str) -> Place:
    """What lies there; of a directory of checkpoints the newest, open stores beside them left out.

    Raises `LockedError` if it is a store that another process has open, `NotAStoreError` if it
    is nothing that can be read, `UsageError` if it is a store and options say how to open a
    collection.
    """
    access = Access(access) if isinstance(access, str) else access
    path = access.url
    root = Path(path)
    if "://" in path or (root / "consensus").is_dir():
        return Place(path, access)
    if access != Access(path):
        options = ", ".join(access.as_options())
        raise UsageError(f"{path} is no collection; {options} are for collections", "remove them")
    found = [root] if engine_at(root) is not None else _checkpoints(root)
    free = next((each for each in found if not _is_open_to_write(each)), None)
    if free is not None:
        return Place(str(free))
    if found:
        raise LockedError(
            str(found[0]),
            "a process that writes; read store.checkpoint(path) of it, or a collection",
        )
    what = "neither a store, a checkpoint nor a collection"
    raise NotAStoreError(path, what, "check the path, and that all machines see it")


def _checkpoints(directory: Path) -> list[Path]:
    """The stores in a directory, newest first; what is being made is hidden, or ends in `.tmp`."""
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
    """In nanoseconds; None where no store is, or none any more."""
    current = store / "CURRENT"  # RocksDB's; the memory engine has only files that come and go
    try:
        if engine_at(store) is None:
            return None
        return (current if current.exists() else store).stat().st_mtime_ns
    except FileNotFoundError:
        return None


def _is_open_to_write(store: Path) -> bool:
    """Whether another process has it open.

    Only for a process that has no store open itself: closing the lock file would drop its lock. The
    lock asked for is a shared one, for others may ask at the same time; RocksDB's is of one kind,
    the memory engine's of the other.
    """
    try:
        with (store / "LOCK").open("rb") as lock:
            fcntl.lockf(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
            fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:  # a checkpoint has no lock file, and nobody writes where nothing can be locked
        return False
    return False
