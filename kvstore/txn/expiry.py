"""The expiry of one key: how long until it comes, and its cancellation.

Invariant: `persist` looks and writes under the commit lock. So either the key expires before it,
and nothing is written, or the key stays.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from kvstore.commit import CommitNote, Durability
from kvstore.mvcc.dues import dues_at, may_expire
from kvstore.mvcc.expiry import carried_key, waiting_key
from kvstore.mvcc.write import OpenWriteSet
from kvstore.parts import Parts
from kvstore.span import Span, require_key
from kvstore.timestamp import Timestamp


class _NothingExpiresError(Exception):
    """Calls off the commit of a `persist` that finds no expiry."""


class Expiry:
    """The expiries of the keys of one store."""

    def __init__(self, parts: Parts) -> None:
        self._committer, self._reads = parts.committer, parts.reads
        self._versions, self._reserve = parts.versions, parts.reserve

    def due(self, key: bytes) -> int | None:
        """The time at which `key` expires; None if it does not, or is absent."""
        key = require_key(key)
        find = partial(self._committer.expiries.of, key)
        due = self._reads.read(None, Span.of_key(key), find)
        return None if due is None else due.time

    def may_be_in(self, span: Span) -> bool:
        """Whether a key in `span` may expire, or have expired. A seek."""
        return self._reserve.has_expiries and may_expire(self._versions, span)

    def due_times(self, keys: Sequence[bytes], as_of: Timestamp) -> list[int | None]:
        """The time at which each of `keys` expires, as of a time that the caller keeps readable.
        A look-up a key, and two more for a key that expires."""
        found = dues_at(self._versions, keys, as_of)
        return [None if due is None else due.time for due in found]

    def persist(
        self, key: bytes, *, durability: Durability | None, note: CommitNote | None = None
    ) -> Timestamp | None:
        """See `Store.persist`."""
        key = require_key(key)
        committer = self._committer
        committer.require_commits()
        writes = OpenWriteSet("the end of an expiry")

        def check() -> None:
            due = committer.expiries.of(key, committer.upper - 1)
            if due is None:
                raise _NothingExpiresError
            writes.delete_rows([carried_key(key), waiting_key(due, key)])

        try:
            return committer.commit(writes, durability=durability, check=check, note=note)
        except _NothingExpiresError:
            return None
