"""Handles at a fork: a handle belongs to the process that opened it.

A fork copies memory and descriptors, and leaves threads behind. A copied handle would write into
files that the other process writes, wait for locks whose owners are gone, and flush its buffers
when it is destroyed. So in the child a handle turns into an object that raises `ForkedError` at
every call, and the native objects below it are leaked.

    own(handle, "the store at /d")      in the constructor of a class with files, locks, threads

Invariants
1. The child runs no method and no destructor of a handle: a reference that nobody gives back keeps
   the handle, and all it refers to, until the process has ended.
2. A handle turns by its class. So nothing asks for the process on a hot path, and a call raises
   before it touches a lock.
3. Endings (`close` and its like) do nothing in the child, so that it can leave `with` blocks.
4. The child gives back descriptors that would keep the parent's locks and pipes alive. Closing a
   copy of a descriptor leaves the parent's lock alone.
5. A handle that fails at a fork leaves no other handle unprotected: the system ignores errors of
   its hooks, so an error would end the turning of all handles behind it.

Rejected: a comparison of process ids in each call at the face. It takes 0.1 us of a get's 2, and
the destructors of RocksDB's objects would run in the child all the same: the handles must be kept
from them whatever the face asks. Locks that another thread held at the fork would never be free.

The parent keeps references to all handles from before a fork until the fork is done. Otherwise the
interpreter would destroy objects that only other threads refer to before it runs the child's hooks.
"""

from __future__ import annotations

import copyreg
import ctypes
import os
import threading
import weakref
from collections.abc import Collection, Iterable
from contextlib import suppress
from typing import Any, Final, NamedTuple, Protocol, runtime_checkable

from kvstore.errors import ForkedError, UsageError


@runtime_checkable
class HasParts(Protocol):
    """A handle with other objects that a child must not use either."""

    def fork_parts(self) -> Iterable[object]:
        """The objects that share the handle's fate. Called before a fork and after it."""
        ...


@runtime_checkable
class LetsGo(Protocol):
    """A handle with descriptors or exit handlers that a child must give up."""

    def fork_let_go(self) -> None:
        """Give them up, in the child. Takes no lock, and touches no file. An error is ignored: a
        handle that was closed has nothing to give up."""
        ...


class _Fate(NamedTuple):
    """How a handle answers in a child, and which process owns it."""

    where: str
    endings: Collection[str]
    closed: str
    owner: int
    remedy: str


class _Handle(weakref.ref[Any]):
    """A handle that this process owns."""

    __slots__ = ("fate", "key")

    fate: _Fate
    key: int


OPEN_ANEW: Final = (
    "open it with shared=True: that handle works in a forked child too; or after the fork, "
    "kvstore.follow(path) or kvstore.open_read_only(path) reads beside the owner, and "
    "kvstore.connect(path) writes through it (docs/how-to/workers.md)"
)

_HANDLES: Final[dict[int, _Handle]] = {}
"""The handles of this process, by id. Threads add and remove single items, each under the
interpreter lock."""

_FATES: Final[dict[int, _Fate]] = {}
"""The fates of the handles that this process got by a fork, by id. They live as long as it does."""

_CLASSES: Final[dict[type, type]] = {}
_KEPT: Final[dict[int, list[object]]] = {}
"""The references that forks under way keep, by thread."""

_keep_for_ever = ctypes.pythonapi.Py_IncRef
_keep_for_ever.argtypes = [ctypes.py_object]
_keep_for_ever.restype = None

_process = os.getpid()
_undivided = threading.RLock()


def own(
    handle: object,
    where: str,
    *,
    endings: Collection[str] = ("close",),
    closed: str = "",
    remedy: str = OPEN_ANEW,
) -> None:
    """Have `handle` raise `ForkedError` in every process that is forked from this one.

    `where` names it there. Its methods named in `endings` do nothing in a child. The field named
    `closed` reads True: a `close` that was bound before the fork looks at it first. Costs 1 us.
    """
    not_copied(type(handle))
    reference = _Handle(handle, _forget)
    reference.key = id(handle)
    reference.fate = _Fate(where, endings, closed, _process, remedy)
    _HANDLES[reference.key] = reference


def not_copied(kind: type) -> None:
    """Have `pickle` and `copy` raise `UsageError` for the objects of a class: a handle is no data.
    Another process opens its own. `own` says so of each class of handles."""
    copyreg.dispatch_table.setdefault(kind, _refuse_a_copy)


def _refuse_a_copy(handle: object) -> Any:
    raise UsageError(
        f"{type(handle).__name__} is a handle of this process, and cannot be pickled or copied",
        "a store that was opened with kvstore.open(path, shared=True) can be; or pass the path or "
        "URL, and open it there: kvstore.follow(path) or kvstore.open_read_only(path) reads beside "
        "the owner, kvstore.connect(path) writes through it, and backup.Collection(url) opens a "
        "collection",
    )


def undivided() -> threading.RLock:
    """The lock under which a descriptor is opened and owned: no fork comes in between."""
    return _undivided


def _forget(reference: weakref.ref[Any]) -> None:
    assert isinstance(reference, _Handle)
    if _HANDLES.get(reference.key) is reference:
        del _HANDLES[reference.key]


def _owned() -> list[tuple[object, _Fate]]:
    """All handles, and what shares their fate."""
    found: list[tuple[object, _Fate]] = []
    for reference in list(_HANDLES.values()):
        handle = reference()
        if handle is None:
            continue
        if isinstance(handle, HasParts):
            with suppress(Exception):  # of a handle that is half made: the other handles must turn
                found += [(part, reference.fate) for part in handle.fork_parts()]
        found.append((handle, reference.fate))
    return found


def _before() -> None:
    _undivided.acquire()
    _KEPT[threading.get_ident()] = [handle for handle, _ in _owned()]


def _in_parent() -> None:
    del _KEPT[threading.get_ident()]
    _undivided.release()


def _in_child() -> None:
    global _process, _undivided
    _undivided = threading.RLock()
    owned = _owned()
    for handle, _ in owned:
        _keep_for_ever(handle)
    _HANDLES.clear()
    _KEPT.clear()
    for handle, fate in owned:
        if id(handle) in _FATES:
            continue
        if isinstance(handle, LetsGo):
            with suppress(Exception):  # of a handle that was closed: the other handles must turn
                handle.fork_let_go()
        _FATES[id(handle)] = fate
        handle.__class__ = _forked(type(handle))
    _process = os.getpid()


class _Forked:
    """Mixed into the class of a handle that this process does not own."""

    def __getattribute__(self, name: str) -> Any:
        if name.startswith("__"):
            return object.__getattribute__(self, name)
        fate = _FATES[id(self)]
        if name in fate.endings:
            return _nothing
        if name == fate.closed:
            return True
        raise ForkedError(fate.where, owner=fate.owner, remedy=fate.remedy)

    def __repr__(self) -> str:  # debuggers and logs print handles, and must not fail
        fate = _FATES[id(self)]
        return f"<{fate.where}, of process {fate.owner}>"


def _nothing(*_: object, **__: object) -> None:
    """Stands for every ending in a child."""


def _forked(kind: type) -> type:
    """The class that a handle of class `kind` turns into: one by that name, and below it."""
    if kind not in _CLASSES:
        names = {"__module__": kind.__module__, "__qualname__": kind.__qualname__}
        _CLASSES[kind] = type(kind.__name__, (_Forked, kind), names)
        not_copied(_CLASSES[kind])
    return _CLASSES[kind]


os.register_at_fork(before=_before, after_in_parent=_in_parent, after_in_child=_in_child)
