"""Changesets of callers: each is open between the requests that take part in it.

A caller opens a changeset and gets its name. Each write that carries the name belongs to the
changeset, as if it stood in the block of `Store.changeset`.

Invariants
1. A changeset ends by itself when no write has come for `SERVER_CHANGESET_S`, so a caller that
   has gone holds back no epoch for longer. A later write with its name is refused.
2. A changeset does not end during a write that belongs to it.
3. A write that comes again after it was done gets its first answer, also when the changeset has
   ended.
"""

from __future__ import annotations

import contextvars
import secrets
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import TypeVar

from kvstore.changes.epochs import Changeset
from kvstore.errors import KVStoreError, RetryableError
from kvstore.limits import SERVER_CHANGESET_S, SERVER_CHANGESETS_MAX
from kvstore.remote.verbs import UnknownChangesetError
from kvstore.store import Store
from kvstore.timeline.request_notes import RequestToken

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
