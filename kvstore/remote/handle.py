"""A store by its address, which is reached when it is needed.

A framework makes its adapter from a line of configuration, pickles it, and forks with it. So the
adapter keeps a `Handle`, which has the address. The store is opened at the first use, and anew
in a process that unpickled the handle or was forked with it.

Invariants
1. The handles of one process that have the same path share one store, or one client.
2. A store at a path is shared (`kvstore.remote.shared`) if the extra `server` is installed: the
   handles of several processes find each other, and one of them carries on when the owner goes.
   Without the extra, a path that another process owns is reached through it, if it listens.
3. An open store or client that the user passed is never closed here, and never pickled.
"""

from __future__ import annotations

import os
import stat
import threading
import weakref
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any, ClassVar, TypeAlias

from kvstore.base.paths import require_absolute
from kvstore.errors import UsageError
from kvstore.opening import engine_at
from kvstore.remote import control
from kvstore.remote.control import StoreOrClient
from kvstore.remote.live import follow

Where: TypeAlias = "StoreOrClient | str | os.PathLike[str]"
"""What the user of an adapter passes: an open store or client, or an address. An address is the
directory of a store, the path of a server's Unix socket, or the URL of a server."""

_Place: TypeAlias = "tuple[str, str | None, bool]"


class Handle:
    """The way of an adapter to its store. Use it from any thread. Costs nothing until `store` is
    asked for. `token` goes with each call to a URL. A handle with `read_only` reads the files of a
    path, also while another process writes it, and owns nothing."""

    def __init__(self, where: Where, *, token: str | None = None, read_only: bool = False) -> None:
        self._given: StoreOrClient | None = None
        self._token, self._read_only = token, read_only
        self._shared: _Shared | None = None
        self._lock = threading.Lock()
        if isinstance(where, str | os.PathLike):
            text = os.fspath(where)
            if "://" not in text:
                text = os.path.realpath(require_absolute(text, name="where"))
            self.address = text
        elif callable(getattr(where, "scan_batches", None)):
            self._given, self.address = where, ""
        else:
            raise UsageError(
                f"{type(where).__name__} is no store",
                "pass an open store or client, the directory of a store, or the URL of a server",
            )

    @classmethod
    def of(
        cls, where: Where | Handle, *, token: str | None = None, read_only: bool = False
    ) -> Handle:
        """A handle for `where`, which may be one already."""
        return where if isinstance(where, Handle) else cls(where, token=token, read_only=read_only)

    @property
    def store(self) -> StoreOrClient:
        """The store, or a client of it. The first call opens it, and makes it where nothing is.
        Raises as `kvstore.open` and `kvstore.connect`; `LockedError` if another process owns the
        path and does not listen."""
        if self._given is not None:
            return self._given
        with self._lock:
            if self._shared is None or self._shared.process != os.getpid():
                self._shared = _Shared.at((self.address, self._token, self._read_only))
            return self._shared.store

    def close(self) -> None:
        """Let the store go. It is closed once no handle of this process has it; the next use of
        this handle opens it again. A store that the user passed stays open. Repeatable."""
        with self._lock:
            self._shared = None

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Handle):
            return NotImplemented
        return self._identity() == other._identity()

    def __hash__(self) -> int:
        return hash(self._identity())

    def __repr__(self) -> str:
        return repr(self._given) if self._given is not None else self.address

    def __reduce__(self) -> tuple[Any, ...]:
        if self._given is not None:
            raise UsageError(
                f"{self._given!r} belongs to this process",
                "give the adapter the path of the store, or the URL of its server",
            )
        made = partial(Handle, token=self._token, read_only=self._read_only)
        return made, (self.address,)

    def __copy__(self) -> Handle:
        return self

    def __deepcopy__(self, _: Any) -> Handle:
        return self

    def _identity(self) -> tuple[Any, ...]:
        return self.address, self._token, self._read_only, id(self._given)


class _Shared:
    """An open store or client, closed when the last handle has let it go, or at exit."""

    _all: ClassVar[weakref.WeakValueDictionary[tuple[int, _Place], _Shared]] = (
        weakref.WeakValueDictionary()
    )
    _lock = threading.Lock()

    def __init__(self, place: _Place) -> None:
        self.process = os.getpid()
        self.store = _opened(*place)
        weakref.finalize(self, _close, self.store, self.process)

    @classmethod
    def at(cls, place: _Place) -> _Shared:
        with cls._lock:
            key = os.getpid(), place
            found = cls._all.get(key)
            if found is None:
                found = cls._all[key] = cls(place)
            return found


def _close(store: StoreOrClient, process: int) -> None:
    if process == os.getpid():  # a forked child has no part in what its parent has open
        store.close()


def _renew_lock() -> None:
    _Shared._lock = threading.Lock()  # a thread of the parent may have held it


os.register_at_fork(after_in_child=_renew_lock)


def _opened(address: str, token: str | None, read_only: bool) -> StoreOrClient:
    if "://" in address or _is_socket(address):
        # Imported late: a client brings TLS with it, and most adapters need none.
        from kvstore.remote.client import connect

        return connect(address, token)
    engine = engine_at(Path(address)) or "rocksdb"
    if read_only and engine != "memory":  # whose rows are in its own process
        return follow(address)
    has_server = find_spec(control.SERVER) is not None
    if engine == "rocksdb" and has_server:
        return control.open(address, shared=True)
    return control.reach(address, partial(control.open, engine=engine, control=has_server))


def _is_socket(path: str) -> bool:
    try:
        return stat.S_ISSOCK(os.stat(path).st_mode)
    except OSError:
        return False
