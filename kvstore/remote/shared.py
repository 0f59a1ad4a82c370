"""One store, many processes, no chosen owner: `kvstore.open(path, shared=True)`.

Whoever gets the kernel's lock of the store owns it, and answers at the socket in its directory. The
others are guests: they read by themselves, from the files, and write through the owner. When the
owner goes, the guest that writes next carries on.

                 the lock is free                   the handle is closed
    joining ------------------------> owner  -------------------------------> closed
       |  somebody else owns it         ^                                       ^
       `----------------------------> guest  -----------------------------------'
                                        the owner has gone, and this guest writes

Invariants
1. The kernel's lock decides who owns. An owner that is stopped keeps it, so there are never two.
2. Read your writes: a read that begins after the answer to a request of this handle shows what the
   owner had committed when it answered. Each answer makes the next read look at the files first.
3. A write of a guest has a name of its own. Its request is sent again to whoever owns then, and
   done once: the note of a request is in the commit that did it.
4. A handle has one state, an object that does not change. A call takes it once, so a change of the
   role shows in the next call. An owner never becomes a guest.
5. What a guest has handed out (scans, snapshots, transactions, feeds, changesets) does not depend
   on the role. A scan keeps its files. The others speak to the owner of the moment, which may be
   this process.
6. A forked child has no part in its parent's state. It joins at its first call, as a guest.

Rejected: a handle that becomes another class at a change of the role. A call in another thread
would read with the parts of two stores.
"""

from __future__ import annotations

import os
import pickle
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial, wraps
from inspect import signature
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Final, Literal, TypeAlias, TypeVar, cast

from typing_extensions import Self

from kvstore import opening
from kvstore.base.arguments import (
    INTEGER,
    SECONDS,
    WAIT,
    ArgumentKind,
    word,
)
from kvstore.base.notices import notice
from kvstore.base.paths import is_there, require_path, tell_of_parent
from kvstore.base.timestamp import TimeLike, Timestamp
from kvstore.engine.rocks import DEFAULTS, Options
from kvstore.errors import (
    ClosedError,
    DeterminateError,
    ForkedError,
    IndeterminateError,
    KVStoreError,
    LockedError,
    NotAStoreError,
    NotListeningError,
    NotYetWrittenError,
    OwnerAwayError,
    StaleReaderError,
    UsageError,
    storage_errors,
)
from kvstore.limits import (
    CLIENT_PATIENCE_S,
    CLIENT_TIMEOUT_S_MIN,
    KEEPER_IDLE_S,
    KEEPER_LOOK_S,
    KEEPER_START_S,
    SHARED_TRY_S,
    SHARED_TRY_S_MAX,
)
from kvstore.loops.lookup import NewestValues, PointRead
from kvstore.mvcc.meta import Meta
from kvstore.remote.live import LiveReader, follow_as
from kvstore.remote.presence import (
    Presence,
    Turn,
    guests,
    is_stopped,
    read_owner,
    require_local,
    sharing,
    wait_for_turn,
)
from kvstore.retention.gc import GcPolicy
from kvstore.snapshot import Snapshot
from kvstore.store import Store
from kvstore.timeline.durability import DURABILITY, Durability

if TYPE_CHECKING:
    from kvstore.feeds import Feeds
    from kvstore.metrics import Metric
    from kvstore.remote.client.guest import GuestClient
    from kvstore.remote.server.running import ListeningStore
    from kvstore.tables.joins import Side
    from kvstore.tasks import Tasks
    from kvstore.timeline.imports import Imports

T = TypeVar("T")

Role: TypeAlias = Literal["guest", "keeper"]
_ROLE: Final[ArgumentKind[Role]] = word("guest", "keeper", hint='pass "guest", "keeper" or nothing')


@dataclass(frozen=True, slots=True)
class Joining:
    """How a shared store is opened, here and by whoever gets the handle."""

    path: Path
    durability: Durability
    create: bool
    gc: GcPolicy | None
    options: Options | None
    role: Role | None
    patience: float

    def own(self) -> ListeningStore:
        """Open the store as its owner, which answers guests. Raises as `kvstore.open`."""
        # Imported late: a server takes 20 MB of memory.
        from kvstore.remote.server.running import ListeningStore

        if self.create and not is_there(self.path):
            tell_of_parent(self.path)
            with storage_errors(str(self.path)):
                self.path.mkdir(parents=True, exist_ok=True)
        elif not self.path.is_dir():
            raise NotAStoreError(str(self.path), "no store is there", "check the path")
        turn, store = Turn(self.path), None
        try:
            how: dict[str, Any] = {"create": self.create, "gc": self.gc, "options": self.options}
            store = opening.open_as(
                ListeningStore, self.path, "rocksdb", self.durability, None, **how
            )
            store.listen(turn=turn, is_takeover=bool(guests(self.path)))
            return store
        except BaseException:
            if store is not None:
                store.close()
            turn.close()
            raise


# --------------------------------------------------------------------------------------------------
# What a handle is at a moment.


class _Owner:
    """This process owns the store."""

    role: Final = "owner"

    def __init__(self, store: ListeningStore, former: _Guest | None = None) -> None:
        self.store, self.former = store, former

    def close(self) -> None:
        self.store.close()
        if self.former is not None:
            self.former.close()


class _Guest:
    """Another process owns the store, or none does: its files are read here."""

    role: Final = "guest"

    def __init__(self, how: Joining, client: GuestClient) -> None:
        self._how, self.client = how, client
        self._lock = threading.RLock()
        self._told = self._seen = 0
        """Answers that the owner has given, and how many of them the reader has caught up with."""
        self._reads = self._reads_before = 0
        self._is_resting = False
        """Whether the reader looks seldom, because nobody reads. The next read looks first."""
        self.never_rests = False
        """Whether a part of the reader was handed out, whose reads this object does not see."""
        self.reader = self._followed()
        self._presence = Presence(how.path)
        # Imported late, with the client.
        from kvstore.remote.beside import HoldsBeside, ImportsBeside

        parts = self.reader._parts
        meta = Meta(self.reader._engine)
        self.holds = HoldsBeside(meta, parts.committer, parts.pins, owner=client)
        self._imports = ImportsBeside(parts.versions, parts.index, parts.committer, owner=client)
        client.pool.told = self.told
        client.pool.now_known = lambda: self.reader._committer.upper - 1
        self._note()

    @property
    def tasks(self) -> Tasks:
        """The queue of the owner."""
        return self.client.tasks

    @property
    def imports(self) -> Imports:
        """The imports as the files have them. The owner changes them."""
        reader = self.settled(time.monotonic() + self._how.patience)
        with reader._committer.lock:
            self._imports.reload()
        return self._imports

    @property
    def feeds(self) -> Feeds:
        """The feeds: those that are open are read here, and the owner drops one."""
        from kvstore.remote.client.guest import GuestFeeds

        return cast("Feeds", GuestFeeds(self.reader.feeds, self.client))

    @property
    def is_settled(self) -> bool:
        """Whether the reader shows what the owner has told of, and no key waits for its delete."""
        return self._told == self._seen and not self.reader.is_waiting

    def told(self) -> None:
        """Note an answer of the owner: the next read looks at the files first."""
        with self._lock:
            self._told += 1
            self._note()

    def _note(self) -> None:
        frontiers = self.reader._committer.frontiers
        behind = self._told != self._seen or self.reader._parts.reserve.has_expiries
        # The compiled look-up passes calls on to the handle meanwhile.
        frontiers.note_waiting(awaits_expiry=behind)

    def settled(self, deadline: float) -> LiveReader:
        """The reader, once it shows what the owner has told of. Raises as `LiveReader.refresh`;
        a state that cannot be shown now is waited for."""
        pause_s = SHARED_TRY_S
        self._reads += 1
        while True:
            told, reader = self._told, self.reader
            if self._is_resting:
                self._is_resting = False
                reader.pursuit.wake()
            try:
                if told != self._seen:
                    reader.refresh()
                if reader.is_waiting:
                    self.client.reach_owner()  # the owner writes the deletes that are due
                    reader.refresh()
            except StaleReaderError:
                if time.monotonic() > deadline:
                    raise
                time.sleep(pause_s)
                pause_s = min(pause_s * 2, SHARED_TRY_S_MAX)
                self._follow_anew(reader)
                continue
            with self._lock:
                if reader is self.reader:
                    self._seen = max(self._seen, told)
                    self._note()
                    return reader

    def _followed(self) -> LiveReader:
        reader = follow_as(self._how.path, self._how.options or DEFAULTS)
        reader.pursuit.may_rest = partial(self._may_rest, reader._versions.newest)
        return reader

    def _may_rest(self, newest: NewestValues) -> bool:
        """Whether nobody has read since the last call. The next read goes by `settled` then."""
        with self._lock:
            reads = self._reads + newest.hits + newest.misses
            is_idle = reads == self._reads_before and newest.most and not self.never_rests
            self._reads_before = reads
            if is_idle:
                self._told += 1
                self._note()
                self._is_resting = True
            return bool(is_idle)

    def _follow_anew(self, reader: LiveReader) -> None:
        """Follow the store again, where the reader has ended for good: it was put back."""
        if reader.has_ended:
            with self._lock:
                if self.reader is reader:
                    self.reader = self._followed()
            reader.retire()  # not under the lock, for which its thread may wait

    def retire(self) -> None:
        """Stop following: this process owns the store now. Scans that are open read on."""
        with self._lock:
            self._told, self._seen = 1, 0
            self._note()
        self.reader.retire()  # not under the lock, for which its thread may wait
        self._presence.close()

    def close(self) -> None:
        self._presence.close()
        self.client.close()
        self.reader.close()


# --------------------------------------------------------------------------------------------------
# The handle.


class SharedStore(Store):
    """A store that several processes have open; `kvstore.open(path, shared=True)` makes one. Use it
    from any thread, and in a forked child. It has the verbs of `Store`.

    `role` is "owner" or "guest"; code never needs it. Reads are answered here, also for a guest:
    they show each commit of this handle at once, and commits of other processes 50 ms later at
    most, or at once behind `refresh`. Writes of a guest travel to the owner, and are done once. If
    the owner has gone, this handle becomes the owner, in the call that needs one.

    A call that needs the owner raises `OwnerAwayError` if it does not answer within `patience`
    seconds: a stopped process keeps the store. A scan that is open when the role changes reads on,
    at its time. Snapshots, holds and feeds are with the store. A transaction commits at the new
    owner. A changeset ends with its owner: its next write raises `ClosedError`.

    These differ for a guest: `tasks` submits and does not claim, `upkeep`, `requests`,
    `replication` and `positions` refuse what changes the store (`UsageError`), and `metrics` and
    `stats` tell of this process.

    The handle pickles into "open me there": a process that gets it joins.
    """

    _all: ClassVar[weakref.WeakSet[SharedStore]] = weakref.WeakSet()

    def __init__(self, how: Joining) -> None:
        self.path = how.path
        self._how = how
        self._closed = False
        self._lock = threading.RLock()
        self._state: _Owner | _Guest | None = None
        self._is_child = False
        SharedStore._all.add(self)
        self._joined()

    # -- roles ------------------------------------------------------------------------------

    @property
    def role(self) -> Literal["owner", "guest"]:
        """Whether this process owns the store: for people and metrics."""
        return self._joined().role

    def refresh(self) -> Timestamp:
        """Have the reads that follow show every commit that had returned, in any process, before
        this call; returns `upper`. A guest looks at the files: some 0.2 ms."""
        state = self._joined()
        if isinstance(state, _Guest):
            state.told()
        return self.upper

    def reached(self) -> Store | GuestClient:
        """The store, if this process owns it, and else a client of its owner: for functions that
        work on a store with parts of their own."""
        state = self._joined()
        return state.store if isinstance(state, _Owner) else state.client

    def close(self) -> None:
        """Leave the store. An owner makes every change durable, and hands over: the guest that
        writes next owns the store. Repeatable."""
        with self._lock:
            self._closed = True
            state, self._state = self._state, None
            self.__dict__.pop("get", None)
        if state is not None:
            state.close()

    def __repr__(self) -> str:
        state = self._state
        told = "closed" if self._closed else "not joined" if state is None else state.role
        return f"<kvstore.SharedStore {self.path}, {told}>"

    def __enter__(self) -> Self:
        self._joined()
        return self

    def __reduce__(self) -> tuple[Any, ...]:
        return received, (replace(self._how, path=self._how.path.absolute()),)

    def __copy__(self) -> Self:
        return self

    def __deepcopy__(self, _: Any) -> Self:
        return self

    # -- verbs that are not passed on as they are -------------------------------------------

    def snapshot(self, as_of: TimeLike | None = None) -> Snapshot:
        """See `Store.snapshot`. A guest's has a lease with the store, and outlives a take-over."""
        state = self._joined()
        if isinstance(state, _Owner):
            return state.store.snapshot(as_of)
        from kvstore.remote.client.guest import GuestSnapshot

        return cast("Snapshot", GuestSnapshot(self, state.client, as_of))  # it has its verbs

    def wait_beyond(
        self, upper: int, *, timeout: float | None = None, stop: Callable[[], bool] = lambda: False
    ) -> None:
        """See `Store.wait_beyond`."""
        upper = INTEGER.check("upper", upper)
        seconds = WAIT.check("timeout", timeout)
        ends_at = None if seconds is None else time.monotonic() + seconds
        while True:
            state = self._joined()
            store = state.store if isinstance(state, _Owner) else state.reader
            changed = partial(self._has_changed, state, store, stop)
            left = None if ends_at is None else max(ends_at - time.monotonic(), 0.0)
            with suppress(StaleReaderError):
                store.wait_beyond(upper, timeout=left, stop=changed)
            if self.upper > upper or stop() or left == 0.0:
                return
            if ends_at is not None and time.monotonic() >= ends_at:
                return

    def _has_changed(self, state: object, store: object, stop: Callable[[], bool]) -> bool:
        return stop() or self._state is not state or getattr(state, "reader", store) is not store

    def stats(self) -> dict[str, Any]:
        """See `Store.stats`. Beside it: `role`, `owner_pid`, `role_age_s` (seconds since the owner
        became it), `takeovers`, and `guests`, the number of handles that are guests."""
        return self.answer(self._stats)

    def metrics(self) -> Mapping[str, Metric]:
        """See `Store.metrics`."""
        from kvstore.metrics import metrics_of

        return self.answer(
            lambda store: metrics_of(store._parts, self._stats(store), store._tasks.sizes())
        )

    def _stats(self, store: Store) -> dict[str, Any]:
        return {**store.stats(), **sharing(self._how.path), "role": self.role}

    def side_at(self, as_of: Timestamp) -> Side:
        """The side of this store at one time, in a join of several sources."""
        return cast("Side", self.answer(lambda store: store._side(as_of)))

    # -- inside -----------------------------------------------------------------------------

    def _joined(self) -> _Owner | _Guest:
        state = self._state
        if state is not None:
            return state
        with self._lock:
            if self._closed:
                raise ClosedError(f"the store at {self.path}")
            if self._state is None:
                self._become(self._join())
            assert self._state is not None
            return self._state

    def _become(self, state: _Owner | _Guest) -> None:
        self._state = state
        if isinstance(state, _Owner):
            shortcut = state.store.get
        else:
            reader = state.reader
            look_up, frontiers = reader._versions.lookup, reader._committer.frontiers
            shortcut = PointRead(look_up, frontiers, self._get).get
        self.get = shortcut  # type: ignore[method-assign]  # as in `Store`

    def _join(self) -> _Owner | _Guest:
        """Own the store if nobody does, and else be a guest."""
        from kvstore.remote.client.guest import GuestClient  # brings the client with it

        how, tries = self._how, _Tries(self._how)
        has_begun_keeper = False
        while True:
            refusal: KVStoreError | None = None
            if how.role is None:
                try:
                    return _Owner(how.own())
                except (LockedError, ForkedError) as error:
                    refusal = error
            if opening.engine_at(how.path) is not None:
                try:
                    client = GuestClient(how.path, how.patience, self._dial, partial(silent, how))
                    client.read_here(self)
                    return _Guest(how, client)
                except (NotListeningError, StaleReaderError, OwnerAwayError) as error:
                    refusal = refusal or error
            elif how.role == "guest" or not how.create:
                raise NotAStoreError(str(how.path), "no store is there", "check the path")
            if (how.role == "keeper" or isinstance(refusal, ForkedError)) and not has_begun_keeper:
                has_begun_keeper = True
                begin_keeper(how)
            if not tries.another():
                raise _away(how, refusal)

    def _dial(self, dial: Callable[[float], T], timeout: float) -> T:
        """The connection that `dial` makes to the owner. Where none listens, this process becomes
        the owner, unless another one is faster. The `timeout` bounds each attempt."""
        tries, has_begun_keeper = _Tries(self._how), False
        while True:
            try:
                return dial(timeout)
            except NotListeningError as error:
                refusal: KVStoreError = error
            if self._state is not None and self._how.role is None:
                try:
                    self._take_over()
                    continue
                except LockedError as error:
                    refusal = error
                except ForkedError as error:
                    refusal = error
            may_keep = self._how.role == "keeper" or isinstance(refusal, ForkedError)
            if self._state is not None and may_keep and not has_begun_keeper:
                has_begun_keeper = True
                begin_keeper(self._how)
            if self._state is None or not tries.another():
                raise refusal if self._state is None else _away(self._how, refusal)

    def _take_over(self) -> None:
        """Own the store, which nobody owns. Raises as `kvstore.open`."""
        with self._lock:
            state = self._state
            if isinstance(state, _Guest):
                began = time.perf_counter()
                store = replace(self._how, create=False).own()
                self._become(_Owner(store, state))
                state.retire()
                seconds = round(time.perf_counter() - began, 3)
                notice("kvstore.store", "taken over", store=str(self.path), seconds=seconds)

    def _get(self, key: bytes, as_of: TimeLike | None = None, default: Any = None) -> Any:
        """As `get`, behind the shortcut of a guest. Hot in a store whose keys expire."""
        state = self._state
        if isinstance(state, _Guest) and as_of is None and state.is_settled:
            with suppress(StaleReaderError, ClosedError):
                return Store.get(state.reader, key, None, default)
        return self._read("get", (key, as_of, default), {})

    def _read(self, name: str, args: tuple[Any, ...], given: Mapping[str, Any]) -> Any:
        """The answer of a reading verb."""
        return self.answer(lambda store: getattr(store, name)(*args, **given))

    def answer(self, ask: Callable[[Any], T]) -> T:
        """What `ask` gets from the store, or from the files: for parts that a guest has handed
        out. It may be called again."""
        deadline, has_looked = time.monotonic() + self._how.patience, False
        while True:
            state = self._joined()
            if isinstance(state, _Owner):
                return ask(state.store)
            try:
                return ask(state.settled(deadline))
            except StaleReaderError:
                if time.monotonic() > deadline:
                    raise
                time.sleep(SHARED_TRY_S)
                state.told()
            except NotYetWrittenError:
                # The time is of another process, or the present: the owner closes it.
                if has_looked:
                    return ask(state.client)
                has_looked = True
                state.told()
            except ClosedError:
                if self._state is state:
                    raise

    def _write(self, name: str, args: tuple[Any, ...], given: dict[str, Any]) -> Any:
        """The answer of a verb that needs the owner."""
        state = self._joined()
        if isinstance(state, _Guest):
            if name in _DURABLE and given.get("durability") is None:
                given["durability"] = self._how.durability
            return getattr(state.client, name)(*args, **given)
        if state.former is not None and state.former.client.has_changeset():
            return getattr(state.former.client, name)(*args, **given)  # it ended with its owner
        return getattr(state.store, name)(*args, **given)

    def _part(self, name: str) -> Any:
        if name in _LIVING and isinstance(state := self._joined(), _Guest):
            state.never_rests = True
        if name not in _AT_OWNER:
            return self.answer(lambda store: getattr(store, name))
        state = self._joined()
        if isinstance(state, _Owner):
            return getattr(state.store, name)
        return getattr(state, name)

    def _forked(self) -> None:
        self.__dict__.pop("get", None)
        self._lock = threading.RLock()
        self._state, self._is_child = None, True


# -- the verbs that are passed on -----------------------------------------------------------

READS: Final = (
    *("get", "get_many", "floor_many", "join_side", "scan", "keys", "count", "scan_batches"),
    *("history", "changes", "events", "changes_batches", "epochs", "generations", "tables"),
    *("now", "to_time", "verify"),
)
"""Verbs that a guest answers from the files."""

WRITES: Final = (
    *("put", "delete", "delete_range", "trim", "put_if", "delete_if", "pop", "update"),
    *("increment", "ttl", "persist", "put_many", "transaction", "transact", "batch"),
    *("revert_range", "table", "feed", "changeset", "force_quiescence"),
    *("reshard", "gc", "clear_range", "checkpoint", "sync"),
)
"""Verbs for which a guest asks the owner."""

_DURABLE: Final = frozenset(
    name for name in WRITES if "durability" in signature(getattr(Store, name)).parameters
)

PARTS: Final = (
    *("since", "whole_since", "indexed_since", "upper", "durable", "store_id"),
    *("imports", "holds", "positions", "feeds", "replication", "layout", "browsing", "requests"),
    *("upkeep", "tasks"),
)
"""Frontiers, and parts of the store."""

_LIVING: Final = frozenset({"positions", "replication", "layout", "browsing", "requests"})
"""Parts whose own reads come later."""

_AT_OWNER: Final = frozenset({"tasks", "holds", "imports", "feeds"})
"""Parts that ask the owner."""

MADE_OF_PARTS: Final = ("hold", "drop_hold", "revert_import", "floor", "join", "mapping")
"""Verbs of `Store` that are calls of other verbs, and of parts."""


def _passed_on(name: str) -> Callable[..., Any]:
    route = SharedStore._read if name in READS else SharedStore._write

    @wraps(getattr(Store, name))
    def verb(self: SharedStore, *args: Any, **given: Any) -> Any:
        return route(self, name, args, given)

    return verb


def _part_of(name: str) -> property:
    def part(self: SharedStore) -> Any:
        return self._part(name)

    return property(part, doc=getattr(getattr(Store, name, None), "__doc__", None))


for _name in (*READS, *WRITES):
    setattr(SharedStore, _name, _passed_on(_name))
for _name in PARTS:
    setattr(SharedStore, _name, _part_of(_name))


def _renew() -> None:
    for handle in list(SharedStore._all):
        handle._forked()


os.register_at_fork(after_in_child=_renew)


# --------------------------------------------------------------------------------------------------
# Waits, and what callers are told when they are over.


class _Tries:
    """Attempts for `patience` seconds from the first failure, the first ones close together. The
    end of the owner's turn brings the next one at once."""

    def __init__(self, how: Joining) -> None:
        self._path, self._ends_at = how.path, time.monotonic() + how.patience
        self._pause_s = SHARED_TRY_S

    def another(self) -> bool:
        left = self._ends_at - time.monotonic()
        if left <= 0:
            return False
        wait_for_turn(self._path, min(self._pause_s, left))
        self._pause_s = min(self._pause_s * 1.5, SHARED_TRY_S_MAX)
        return True


def _away(how: Joining, refusal: KVStoreError | None) -> KVStoreError:
    """The error of a call that found no owner to serve it. Nothing was done."""
    if isinstance(refusal, LockedError):
        owner = read_owner(how.path)
        named = f"process {owner.pid}" if owner is not None and owner.is_there else refusal.owner
        return LockedError(
            str(how.path),
            f"{named}, which answers no guests",
            "open it there with shared=True (or control=True), or close it there",
        )
    if refusal is None or isinstance(refusal, NotListeningError):
        return NotListeningError(str(how.path))
    return refusal


def silent(how: Joining, error: KVStoreError) -> KVStoreError:
    """The error of a request that the owner did not answer within `patience`."""
    if not isinstance(error, IndeterminateError | DeterminateError):
        return error
    owner = read_owner(how.path)
    pid = owner.pid if owner is not None and owner.is_there else 0
    told = OwnerAwayError(
        str(how.path), pid, patience=how.patience, is_stopped=bool(pid) and is_stopped(pid)
    )
    told.__cause__ = error
    return told


# --------------------------------------------------------------------------------------------------
# Opening, also of a handle that came from another process.


def open_shared(
    path: str | os.PathLike[str] | None,
    durability: Durability,
    *,
    create: bool,
    gc: GcPolicy | None,
    options: Options | None,
    role: Role | None,
    patience: float | None,
) -> SharedStore:
    """Open as `kvstore.open` with `shared=True` does."""
    if path is None:
        raise UsageError("a store without a path cannot be shared", "pass a path")
    from kvstore.remote.server.http import require_extra

    require_extra()
    directory = require_path(path)
    if opening.engine_at(directory) == "memory":
        raise UsageError(
            f"the store at {directory} is in memory: its own process alone can read it",
            "share a store of the engine rocksdb",
        )
    require_local(directory)
    DURABILITY.check("durability", durability)
    wait = CLIENT_PATIENCE_S if patience is None else SECONDS.check("patience", patience)
    return SharedStore(
        Joining(
            directory.absolute(),
            durability,
            create,
            gc,
            options,
            None if role is None else _ROLE.check("role", role),
            max(wait, CLIENT_TIMEOUT_S_MIN),
        )
    )


_RECEIVED: Final[dict[tuple[int, Path], SharedStore]] = {}
_received_lock = threading.Lock()


def received(how: Joining) -> SharedStore:
    """The handle of this process for a store that another process has sent. All that are sent share
    one, which stays open until the process ends."""
    with _received_lock:
        key = os.getpid(), how.path
        found = _RECEIVED.get(key)
        if found is None or found._closed:
            found = _RECEIVED[key] = SharedStore(replace(how, create=False))
        return found


def _renew_received() -> None:
    global _received_lock
    _received_lock = threading.Lock()


os.register_at_fork(after_in_child=_renew_received)


# --------------------------------------------------------------------------------------------------
# A keeper: a process of its own that owns the store as long as a guest lives.

_KEEPER: Final = """\
import os, sys
if os.fork():
    os._exit(0)
sys.path = [entry for entry in sys.path if entry]  # nothing of the working directory
from kvstore.remote.shared import keep
keep(sys.stdin.buffer.read())
"""


def begin_keeper(how: Joining) -> None:
    """Begin a process that owns the store, if none does. Returns before it does."""
    path = os.pathsep.join(os.path.abspath(entry) for entry in sys.path)
    quiet = subprocess.DEVNULL
    process = subprocess.Popen(
        [sys.executable, "-c", _KEEPER],
        env={**os.environ, "PYTHONPATH": path},
        stdin=subprocess.PIPE,
        stdout=quiet,
        stderr=quiet,
        start_new_session=True,
    )
    process.communicate(pickle.dumps(replace(how, role=None)))


def keep(pickled: bytes) -> None:
    """Own the store that `begin_keeper` tells of, until its last guest has gone."""
    how: Joining = pickle.loads(pickled)
    had_guests = bool(guests(how.path))  # one that is served by this process may go at once
    try:
        store = how.own()
    except LockedError:  # another process was faster
        return
    begins_until, left_at = 0.0 if had_guests else time.monotonic() + KEEPER_START_S, 0.0
    with store:
        begun_at = store.upper
        while True:
            time.sleep(KEEPER_LOOK_S)
            now = time.monotonic()
            are_there = bool(guests(how.path))
            if are_there or store.upper != begun_at:  # one may have gone between two looks
                begins_until = 0.0
            if are_there or now < begins_until:
                left_at = 0.0
            elif not left_at:
                left_at = now
            elif now - left_at > KEEPER_IDLE_S:
                return
