"""How commands open stores: to write, beside the owner of a store, or as its owner."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from functools import partial
from pathlib import Path

from kvstore.cli.interrupts import uninterrupted
from kvstore.control.scripts import StoreOrClient, opened, reached
from kvstore.errors import KVStoreError, NotAStoreError
from kvstore.opening import engine_at
from kvstore.opening import open as open_store
from kvstore.store import TASKS_DIRECTORY, Store


def open_to_write(path: Path) -> AbstractContextManager[Store]:
    """Open a store by the engine that made it. If a process that listens has it open, the store is
    read from its files, and the process does the writes."""
    return opened(path, open_here)


def reach(path: Path) -> AbstractContextManager[StoreOrClient]:
    """Open a store as `open_to_write`, for work without an end. If another process has the store
    open, the result is a client of that process."""
    return reached(path, open_here)


def open_or_create(path: Path, engine: str, *, create: bool) -> AbstractContextManager[Store]:
    """Open a store as `open_to_write`. Where nothing is, make one of `engine` if `create`."""
    if create and engine_at(path) is None:
        return _created(path, partial(open_store, path, engine))
    _require_store(path, create=create)
    return open_to_write(path)


def open_to_own(path: Path, engine: str, *, create: bool) -> AbstractContextManager[Store]:
    """Open or create a store in this process, which listens: scripts run beside it."""
    from kvstore.control.opening import open as open_control  # brings the server with it

    _require_store(path, create=create)
    made_by = engine_at(path)
    listening = partial(open_control, path, made_by or engine, create=create, control=True)
    return listening() if made_by is not None else _created(path, listening)


def _require_store(path: Path, *, create: bool) -> None:
    if not create and not path.exists():
        raise NotAStoreError(str(path), "no store is there", "check the path, or pass --create")


@contextmanager
def _created(path: Path, make: Callable[[], Store]) -> Iterator[Store]:
    """A new store at `path`. A command that is refused, fails or is interrupted leaves none behind,
    unless something was written.

    An interrupt waits until the store is open, which takes some 30 ms. A process that ended earlier
    would leave files, and nobody could tell whether another process had made them.
    """
    had_directory, is_free = path.exists(), _is_free(path)
    store: Store | None = None
    try:
        with uninterrupted():
            store = make()
        yield store
    except BaseException:
        with uninterrupted():
            if store is not None:
                is_free = is_free and _is_blank(path, store)
                store.close()
                if is_free:
                    _remove(path, keeps_directory=had_directory)
        raise
    else:
        store.close()


def _is_free(path: Path) -> bool:
    """Whether nothing is at `path`, or an empty directory."""
    try:
        return next(path.iterdir(), None) is None
    except FileNotFoundError:
        return True
    except OSError:  # the opening tells why
        return False


def _is_blank(path: Path, store: Store) -> bool:
    """Whether nobody has written to the store at `path`. An import that was begun is no write."""
    try:
        has_imports = any(each.added is not None for each in store.imports.all())
        is_used = has_imports or store.holds.all() or store.tables()
        has_tasks = (path / TASKS_DIRECTORY).exists()
        return not (is_used or has_tasks) and next(store.changes(0), None) is None
    except KVStoreError:  # the store has failed, so its contents are not known
        return False


def _remove(path: Path, *, keeps_directory: bool) -> None:
    if not keeps_directory:
        shutil.rmtree(path, ignore_errors=True)
        return
    for each in path.iterdir():
        if each.is_dir() and not each.is_symlink():
            shutil.rmtree(each, ignore_errors=True)
        else:
            with suppress(OSError):  # the error that led here is the one to tell
                each.unlink()


def open_here(path: Path) -> Store:
    """Open a store in this process, by the engine that made it."""
    made_by = engine_at(path)
    return open_store(path, create=False) if made_by is None else open_store(path, made_by)
