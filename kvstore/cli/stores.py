"""How commands open stores: to write, beside the owner of a store, or as its owner."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path

from kvstore.control.scripts import opened
from kvstore.errors import NotAStoreError, UsageError
from kvstore.opening import engine_at
from kvstore.opening import open as open_store
from kvstore.store import Store


def open_to_write(path: Path) -> AbstractContextManager[Store]:
    """Open a store by the engine that made it. If a process that listens has it open, the store is
    read from its files, and the process does the writes."""
    return opened(path, open_here)


def open_or_create(path: Path, engine: str, *, create: bool) -> AbstractContextManager[Store]:
    """Open a store as `open_to_write`. Where nothing is, make one of `engine` if `create`."""
    if create and engine_at(path) is None:
        return _created(path, engine)
    _require_store(path, create=create)
    return open_to_write(path)


def open_to_own(path: Path, engine: str, *, create: bool) -> Store:
    """Open or create a store in this process, which listens: scripts run beside it."""
    from kvstore.control.opening import open as open_control  # brings the server with it

    _require_store(path, create=create)
    return open_control(path, engine_at(path) or engine, create=create, control=True)


def _require_store(path: Path, *, create: bool) -> None:
    if not create and not path.exists():
        raise NotAStoreError(str(path), "no store is there", "check the path, or pass --create")


@contextmanager
def _created(path: Path, engine: str) -> Iterator[Store]:
    """A new store. A command that is refused or interrupted leaves none behind, unless something
    was written."""
    is_new = not path.exists()
    store = open_store(path, engine)
    try:
        with store:
            try:
                yield store
            except (UsageError, KeyboardInterrupt):
                is_new = is_new and next(store.changes(0), None) is None
                raise
    except (UsageError, KeyboardInterrupt):
        if is_new:
            shutil.rmtree(path, ignore_errors=True)
        raise


def open_here(path: Path) -> Store:
    """Open a store in this process, by the engine that made it."""
    made_by = engine_at(path)
    return open_store(path, create=False) if made_by is None else open_store(path, made_by)
