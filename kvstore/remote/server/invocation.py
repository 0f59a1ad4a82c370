"""One call of a verb: its work, its checked arguments, the changeset that it takes part in."""

from __future__ import annotations

import contextvars
import secrets
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from importlib import import_module
from typing import Any, Final, TypeAlias, TypeVar

import pyarrow as pa

from kvstore.base.span import Span
from kvstore.base.timestamp import TimeLike
from kvstore.changes.epochs import Changeset
from kvstore.errors import KVStoreError, RetryableError
from kvstore.limits import SERVER_CHANGESET_S, SERVER_CHANGESETS_MAX
from kvstore.remote.server.access import Grant
from kvstore.remote.verbs import UnknownChangesetError, Verb
from kvstore.store import Store
from kvstore.timeline.expiries import Expires
from kvstore.timeline.request_notes import RequestToken

# --------------------------------------------------------------------------------------------------
# Parts of a server that packages above bring. They are imported by name where they are asked for.
#
# A group has places by name: a module, and in it a function of what a person named.

PAGES: Final = {"collections": "kvstore.backup.page:collections"}
"""Sections of the page."""

ADDED_VERBS: Final = {"imports": "kvstore.bulk.served:import_verbs"}
"""Verbs of a server."""


def added(group: Mapping[str, str], name: str) -> Callable[[Sequence[str]], Any]:
    """The function `name` of `group`, whose module is imported: it lies above the server."""
    module, _, member = group[name].partition(":")
    found: Callable[[Sequence[str]], Any] = getattr(import_module(module), member)
    return found


# --------------------------------------------------------------------------------------------------
# The work of a verb.

Answer: TypeAlias = "Mapping[str, Any] | pa.RecordBatchReader"
"""JSON, or rows."""

RunVerb: TypeAlias = "Callable[[Invocation], Answer]"


@dataclass(frozen=True, slots=True)
class ServedVerb:
    """A verb and its work, which checked arguments come to."""

    declared: Verb[Any]
    run: RunVerb

    @property
    def text(self) -> str:
        """What the verb does, for people: the docstring of its work, on one line."""
        return " ".join((self.run.__doc__ or "").split())


SERVED: Final[dict[str, ServedVerb]] = {}
"""The verbs of every store, by name. `kvstore.remote.server.verbs` fills it."""


def serves(declared: Verb[Any]) -> Callable[[RunVerb], RunVerb]:
    """The decorator of the work of a verb."""

    def decorated(run: RunVerb) -> RunVerb:
        assert declared.name not in SERVED, declared.name
        SERVED[declared.name] = ServedVerb(declared, run)
        return run

    return decorated


# --------------------------------------------------------------------------------------------------
# Changesets of callers: each is open between the requests that take part in it.
#
# A caller opens a changeset and gets its name. Each write that carries the name belongs to the
# changeset, as if it stood in the block of `Store.changeset`.
#
# Invariants
# 1. A changeset ends by itself when no write has come for `SERVER_CHANGESET_S`, so a caller that
#    has gone holds back no epoch for longer. A later write with its name is refused.
# 2. A changeset does not end during a write that belongs to it.
# 3. A write that comes again after it was done gets its first answer, also when the changeset has
#    ended.

T = TypeVar("T")


@dataclass(slots=True)
class _Lent:
    """An open changeset, the context inside its block, and the changeset around it."""

    changeset: Changeset
    context: contextvars.Context
    outer: _Lent | None
    ends_at: float = 0.0
    writes: int = 0

    def renew(self) -> None:
        """Begin the time of this changeset anew, and the time of each changeset around it."""
        lent: _Lent | None = self
        while lent is not None:
            lent.ends_at = time.monotonic() + SERVER_CHANGESET_S
            lent = lent.outer

    def is_over(self, now: float) -> bool:
        """Whether the time is over, and no write is under way."""
        return not self.writes and self.ends_at <= now


class LentChangesets:
    """The changesets that callers of one server have open. Any thread may use it."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._open: dict[str, _Lent] = {}
        lock = threading.RLock()
        self._turn = threading.Condition(lock)
        """Notified where a changeset has no write any more: calls that end it wait for that."""
        self._is_over = threading.Condition(lock)
        """Notified where no changeset is open, and where the last write of one took longer than its
        time: each ends the pause of the keeper."""
        self._keeper: threading.Thread | None = None

    def open(self, outer: str | None) -> tuple[str, Changeset]:
        """A new changeset, inside the one named `outer`, and its name. Waits while quiescence is
        being forced. Raises `UnknownChangesetError` if `outer` has ended, `RetryableError` if too
        many are open."""
        with self._turn:
            if len(self._open) >= SERVER_CHANGESETS_MAX:
                raise RetryableError(f"callers have {len(self._open)} changesets", "try again")
            around = None if outer is None else self._known(outer)
        context = contextvars.Context() if around is None else around.context.copy()
        lent = _Lent(self._store.changeset(), context, around)
        context.run(lent.changeset.__enter__)
        name = secrets.token_hex(16)
        with self._turn:
            lent.renew()
            self._open[name] = lent
            if self._keeper is None:
                self._keeper = threading.Thread(
                    target=self._keep, name="kvstore-changesets", daemon=True
                )
                self._keeper.start()
        return name, lent.changeset

    def within(self, name: str, token: RequestToken | None, write: Callable[[], T]) -> T:
        """Do a write that belongs to the changeset `name`. Raises `UnknownChangesetError`, with
        nothing done, if the changeset has ended."""
        with self._turn:
            lent = self._open.get(name)
            if lent is not None:
                lent.renew()
                lent.writes += 1
        if lent is None:
            if token is not None and self._store.requests.is_done(token):
                return write()
            raise UnknownChangesetError(name)
        try:
            return lent.context.copy().run(write)  # one context cannot be entered twice
        finally:
            with self._turn:
                lent.writes -= 1
                self._turn.notify_all()
                if lent.is_over(time.monotonic()):
                    self._is_over.notify_all()

    def end(self, name: str) -> Changeset:
        """End a changeset, behind the writes under way. Raises `UnknownChangesetError` if it has
        ended."""
        with self._turn:
            lent = self._known(name)
            self._turn.wait_for(lambda: not lent.writes)
            if self._open.pop(name, None) is None:
                raise UnknownChangesetError(name)
            self._turn.notify_all()
            if not self._open:
                self._is_over.notify_all()
        self._finish(lent)
        return lent.changeset

    def close(self) -> None:
        """End all changesets. Repeatable."""
        with self._turn:
            self._turn.wait_for(lambda: not any(lent.writes for lent in self._open.values()))
            gone, keeper = list(self._open.values()), self._keeper
            self._open.clear()
            self._turn.notify_all()
            self._is_over.notify_all()
        for lent in reversed(gone):
            self._finish(lent)
        if keeper is not None:
            keeper.join()

    def _known(self, name: str) -> _Lent:
        lent = self._open.get(name)
        if lent is None:
            raise UnknownChangesetError(name)
        return lent

    def _finish(self, lent: _Lent) -> None:
        with suppress(KVStoreError):  # a store that was closed has ended it
            lent.context.run(lent.changeset.__exit__)

    def _keep(self) -> None:
        """End the changesets whose time is over, until none is open. No changeset that is opened or
        written to during a pause ends before the pause does."""
        while True:
            with self._turn:
                now = time.monotonic()
                over = [name for name, lent in self._open.items() if lent.is_over(now)]
                gone = [self._open.pop(name) for name in over]
                if not self._open:
                    self._keeper = None
                elif not gone:
                    times = (lent.ends_at for lent in self._open.values() if lent.ends_at > now)
                    self._is_over.wait(min(times, default=now + SERVER_CHANGESET_S) - now)
                is_over = self._keeper is None
            for lent in gone:
                self._finish(lent)
            if is_over:
                return


# --------------------------------------------------------------------------------------------------
# One call of a verb: the arguments, which the verb's declaration has checked, and the access of
# the caller.
#
# Invariants
# 1. A verb reads keys and spans by the methods of this class only, which ask the caller's access.
#    So no verb can leave the check out.
# 2. An argument has the type that its verb declares, or was left out: see `Verb.read`.


class Invocation:
    """The arguments of one call."""

    __slots__ = ("_given", "access", "awaits_disk", "changesets", "store", "table", "token")

    def __init__(
        self,
        store: Store,
        changesets: LentChangesets,
        access: Grant,
        given: Mapping[str, Any],
        table: pa.Table | None = None,
        token: RequestToken | None = None,
    ) -> None:
        self.store, self.changesets, self.access, self._given = store, changesets, access, given
        self.table, self.token = table, token
        self.awaits_disk: bool | None = None
        """Whether the caller waits for the disk; None if the verb does. Set by `durability`."""

    # -- keys -------------------------------------------------------------------------------

    def key(self, name: str = "key") -> bytes:
        """The key `name`, which the caller may use."""
        key: bytes = self._given[name]
        return self.access.require_key(key)

    def keys(self) -> list[bytes]:
        """The keys of the Arrow column `key`, or of the list `keys`."""
        found = self._given["keys"] if self.table is None else self.column("key")
        return self.access.require_keys(found)

    def column(self, name: str) -> list[Any]:
        """The column `name` of the Arrow table, as a list. A column that was left out is null."""
        assert self.table is not None
        if name not in self.table.column_names:
            return [None] * self.table.num_rows
        return list(self.table.column(name).to_pylist())

    def span(self) -> Span:
        """The span of the arguments `start`, `end` and `prefix`, which the caller may use."""
        get = self._given.get
        return self.access.span(Span.of(get("start"), get("end"), get("prefix")))

    # -- other arguments --------------------------------------------------------------------

    def has(self, name: str) -> bool:
        """Whether the argument was given. It may be null."""
        return name in self._given

    def __getitem__(self, name: str) -> Any:
        """An argument that the verb requires."""
        return self._given[name]

    def value(self, name: str = "value") -> bytes | None:
        """The bytes `name`, which are no key; None where they are missing or null."""
        return self._given.get(name)

    def time(self, name: str) -> TimeLike | None:
        """A time; None where it is missing."""
        return self._given.get(name)

    def expiry(self) -> Expires | None:
        """The time `expires`, which may also count from now: `+1h`."""
        return self._given.get("expires")

    def count(self, name: str) -> int | None:
        """A number of things; None where it is missing."""
        return self._given.get(name)

    def seconds(self, name: str) -> float | None:
        """A duration in seconds; None where it is missing."""
        return self._given.get(name)

    def age(self, name: str) -> timedelta | None:
        """The same as `seconds`, as a timedelta."""
        seconds = self._given.get(name)
        # The greatest number that `seconds` takes is above the greatest timedelta, by rounding.
        return None if seconds is None else timedelta(seconds=min(seconds, 1e13))

    def flag(self, name: str) -> bool:
        """True or false; false where it is missing."""
        found: bool = self._given.get(name, False)
        return found

    def text(self, name: str) -> str | None:
        """A text; None where it is missing."""
        return self._given.get(name)

    def word(self, name: str, otherwise: str) -> Any:
        """One of the words that the verb declares; `otherwise` where it is missing."""
        return self._given.get(name, otherwise)

    def items(self, name: str) -> list[Any]:
        """The list `name`; empty where it is missing."""
        found: list[Any] = self._given.get(name, [])
        return found
