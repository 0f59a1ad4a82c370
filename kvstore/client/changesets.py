"""Changesets of a client: the block is here, and the changeset is open at the server.

Invariants
1. A write inside the block carries the name of the innermost changeset of its context.
2. A changeset whose client has gone ends by itself: see `kvstore.server.changesets`.
"""

from __future__ import annotations

import os
from contextlib import suppress

from kvstore.changes.changeset import Changeset, ChangesetId, ambient
from kvstore.client.calls import verb
from kvstore.client.pool import Pool
from kvstore.client.reply import Reply
from kvstore.errors import KVStoreError


class ClientChangeset(Changeset):
    """See `Changeset`. `events` counts the changes once the block has ended. Raises `ClosedError`
    at a write if the server has ended the changeset: nothing was written for some minutes, or the
    server was started anew."""

    def __init__(self, pool: Pool) -> None:
        super().__init__(pool, _begin, _end)
        self._pool = pool
        self._process = os.getpid()

    def open(self) -> None:
        """Open it at the server, inside the changeset of this context. Repeatable."""
        if not self.name:
            around = ambient(self._pool)
            outer = None if around is None else around.name
            found = self._pool.send(verb("open_changeset", {"outer": outer}, Reply.json))
            self.id = ChangesetId(found["domain"], found["serial"])
            self.name = found["name"]

    def end(self) -> None:
        """End the changeset at the server. Repeatable. A forked child leaves its parent's changeset
        open."""
        name, self.name = self.name, ""
        if name and self._process == os.getpid():
            with suppress(KVStoreError):  # it ends by itself
                request = verb("end_changeset", {"name": name}, Reply.json)
                self.events = self._pool.send(request)["events"]


def _begin(changeset: Changeset) -> None:
    assert isinstance(changeset, ClientChangeset)
    changeset.open()


def _end(changeset: Changeset) -> None:
    assert isinstance(changeset, ClientChangeset)
    changeset.end()
