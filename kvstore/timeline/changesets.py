"""Changesets and epochs of an open store: beginning, ending, listing, and forced quiescence.

`kvstore.changes.epochs` keeps the records of changesets. This module adds the commit lock and the
waits.

Invariants
1. Every change of the capture is made under the commit lock. An interrupt of one takes the begin of
   a changeset back, and makes its end anew.
2. While quiescence is being forced, a new changeset waits, unless it is nested in an open one. A
   commit outside changesets never waits: it ends under the lock, so it is never half done.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import suppress
from datetime import timedelta
from typing import Final

from kvstore.base.forks import own
from kvstore.base.timestamp import NS_PER_SECOND, Timestamp
from kvstore.changes.epochs import Capture, Changeset, Epoch, ambient, written_epochs
from kvstore.errors import BusyError, ForkedError, UsageError
from kvstore.mvcc.meta import Meta
from kvstore.timeline.committer import Committer

INSIDE_CHANGESET: Final = (
    "quiescence was forced inside a changeset, which it would wait for",
    "call it outside",
)


class Changesets:
    """The changesets and epochs of one open store."""

    def __init__(self, meta: Meta, committer: Committer) -> None:
        self._meta = meta
        self._committer = committer
        self._capture: Capture = committer.capture
        # Methods enter the commit lock and not the condition: see `Frontiers` for the reason.
        self._turn = threading.Condition(committer.lock)
        self.forcing = 0
        """The number of threads that force quiescence."""
        own(self, "the changesets of a store")

    def new(self) -> Changeset:
        """A changeset, to be entered with `with`."""
        return Changeset(self._capture, self._begin, self._finish)

    def epochs(self, since: int = 0) -> Iterator[Epoch]:
        """All epochs that closed above `since` and are kept, oldest first."""
        with self._committer.lock:
            run, pending = self._capture.pending()
        for epoch in written_epochs(self._meta, upto_run=run):
            if epoch.closed_at > since:
                yield epoch
        yield from (epoch for epoch in pending if epoch.closed_at > since)

    def force_quiescence(self, after: timedelta | None, timeout: float) -> Timestamp:
        """See `Store.force_quiescence`."""
        if ambient(self._capture) is not None:
            raise UsageError(*INSIDE_CHANGESET)
        with self._committer.lock:
            self._committer.health.require()
            if self._capture.is_quiescent:
                return Timestamp(self._committer.upper - 1)
            recent = self._capture.quiet - 1
            age = self._committer.now() - recent
            if after is not None and age <= after.total_seconds() * NS_PER_SECOND:
                return Timestamp(recent)
            return self._drain(timeout)

    def _drain(self, timeout: float) -> Timestamp:
        """Hold new changesets back until the open ones have ended. The caller has the lock."""
        self.forcing += 1
        try:
            committer = self._committer
            # `quiet` stays the same where the open changesets end without a change.
            if not self._turn.wait_for(
                lambda: self._capture.is_quiescent or not committer.frontiers.is_sound, timeout
            ):
                what = f"{len(self._capture.open)} changesets still open"
                remedy = "end them, or wait longer (timeout=)"
                raise BusyError(what, waited_s=timeout, remedy=remedy)
        finally:
            self.forcing -= 1
            self._turn.notify_all()
        self._committer.health.require()
        return Timestamp(self._capture.quiet - 1)

    def wake(self) -> None:
        """Wake the threads that wait here, because the store was closed."""
        with self._committer.lock:
            self._turn.notify_all()

    def _begin(self, changeset: Changeset) -> None:
        with self._committer.lock:
            if ambient(self._capture) is None:
                self._turn.wait_for(lambda: not self.forcing)
            self._committer.health.require()
            take_back = self._capture.kept()
            with self._committer.health.poisoning(self._committer.mend_memory(take_back)):
                self._capture.begin_changeset(changeset, self._committer.now())

    def _finish(self, changeset: Changeset) -> None:
        with suppress(ForkedError), self._committer.lock:  # a forked child leaves the parent's open
            if changeset in self._capture.open:
                take_back, upper = self._capture.kept(), self._committer.upper

                def again() -> None:
                    take_back()
                    self._capture.finish_changeset(changeset, upper)

                with self._committer.health.poisoning(self._committer.mend_memory(again)):
                    self._capture.finish_changeset(changeset, upper)
            self._turn.notify_all()
