"""Requests: what a server asks of a store. Writes are done once, however often they arrive, and
reads are bounded.

`kvstore.timeline.request_notes` has the notes by which a repetition is known.

Invariants
1. A request that was done gets its first answer, whatever would refuse it by now.
2. A request is answered when the commit that did it is durable, even if that was an earlier one.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, TypeVar

from kvstore.base.arguments import is_many
from kvstore.base.notices import SlowLog
from kvstore.base.span import Span
from kvstore.base.timestamp import TIMESTAMP_MAX, TimeLike, Timestamp
from kvstore.errors import HistoryGoneError, IndeterminateError, UsageError
from kvstore.mvcc import WriteSet
from kvstore.mvcc.lookup import SearchBounds
from kvstore.timeline.durability import Durability
from kvstore.timeline.expiries import Expires
from kvstore.timeline.parts import Parts
from kvstore.timeline.request_notes import RepeatedError, RequestToken
from kvstore.transaction import (
    Conditional,
    Expiry,
    ReadSet,
    Transactions,
    Unchecked,
    Updates,
    counted,
)

T = TypeVar("T")


class _TooManyBytesError(Exception):
    """Calls off a read."""


class Requests:
    """Writes for the callers of a server. Without a token a write is an ordinary one."""

    def __init__(
        self,
        parts: Parts,
        conditional: Conditional,
        transactions: Transactions,
        updates: Updates,
        expiry: Expiry,
    ) -> None:
        self.parts, self.transactions = parts, transactions
        self._committer, self._reads, self._versions = parts.committer, parts.reads, parts.versions
        self._reserve = parts.reserve
        self._conditional, self._updates, self._expiry = conditional, updates, expiry
        self.slow: SlowLog | None = None
        """Who wants to know of slow requests."""

    def watch(self, slow: SlowLog) -> None:
        """Have the server tell `slow` how long each request takes, and each commit that no watched
        call of the store has made."""
        self.slow = slow
        committer: Any = self._committer
        committer.commit = slow.watched(committer.commit, "commit")

    def count(self, *, failed: bool = False) -> None:
        """Count a request that was answered, or that `failed` by an error, for the metrics."""
        if failed:
            self._committer.meters.requests_failed += 1
        else:
            self._committer.meters.requests += 1

    def commit(
        self,
        writes: WriteSet,
        token: RequestToken | None,
        durability: Durability | None,
        *,
        check: Callable[[], None] | None = None,
    ) -> Timestamp:
        """Commit a write set. `check` is as in `Committer.commit`."""
        commit = partial(self._committer.commit, writes, durability=durability, check=check)
        return self._once(commit, token, durability)

    def write_if(
        self,
        writes: WriteSet,
        key: bytes,
        token: RequestToken | None,
        durability: Durability | None,
        *,
        expected: bytes | Unchecked | None,
        unchanged_since: int | None,
    ) -> Timestamp:
        """See `Store.put_if` and `Store.delete_if`."""
        commit = partial(
            self._conditional.write_if,
            writes,
            key,
            expected=expected,
            unchanged_since=unchanged_since,
            durability=durability,
        )
        return self._once(commit, token, durability)

    def delete_live_range(
        self,
        writes: WriteSet,
        span: Span,
        token: RequestToken | None,
        durability: Durability | None,
    ) -> Timestamp | None:
        """See `Store.delete_range` with `idempotent`."""
        commit = partial(self._conditional.delete_live_range, writes, span, durability=durability)
        return self._once(commit, token, durability)

    def pop(
        self, key: bytes, token: RequestToken | None, durability: Durability | None
    ) -> bytes | None:
        """See `Store.pop`. A repetition looks up the value that the first one has found."""
        found = self._once(partial(self._conditional.pop, key, durability=durability), token, None)
        return self.popped(key, found) if isinstance(found, Timestamp) else found

    def popped(self, key: bytes, at: Timestamp) -> bytes | None:
        """The value that the pop at the time `at` has found."""
        return self._found(key, at, before=True)

    def persist(
        self, key: bytes, token: RequestToken | None, durability: Durability | None
    ) -> Timestamp | None:
        """See `Store.persist`."""
        return self._once(partial(self._expiry.persist, key, durability=durability), token, None)

    def due_of(self, key: bytes) -> int | None:
        """The time at which `key` expires; None if it does not, or is absent."""
        return self._expiry.due(key)

    def is_done(self, token: RequestToken) -> bool:
        """Whether the store has the note of this request: it was done."""
        return self._committer.requests.done(token) is not None

    def done_at(self, token: RequestToken, durability: Durability | None) -> Timestamp | None:
        """The time of the commit that did this request, once it is as durable as the request asks
        for; None if no commit has done it."""
        done = self._committer.requests.done(token)
        if done is None:
            return None
        if durability != "async":
            self.wait_durable(done.timestamp + 1)
        return done.timestamp

    def due(self, expires: Expires, token: RequestToken | None) -> int:
        """The time at which a key of a request expires. Raises `UsageError` for a time that has
        passed, unless the request was done already."""
        try:
            return self._committer.expiries.due(expires)
        except UsageError:
            if token is None or not self.is_done(token):
                raise
            return TIMESTAMP_MAX  # the commit finds the note, and writes nothing

    def increment(
        self,
        key: bytes,
        by: int,
        token: RequestToken | None,
        durability: Durability | None,
        expires: Expires | None = None,
    ) -> int:
        """See `Store.increment`. A repetition looks up the sum that the first one has made."""
        due = None if expires is None else self.due(expires, token)
        add = partial(self._updates.increment, key, by, due=due, durability=durability)
        found = self._once(add, token, None)
        return self.summed(key, found) if isinstance(found, Timestamp) else found

    def summed(self, key: bytes, at: Timestamp) -> int:
        """The sum that the increment at the time `at` has made."""
        return counted(key, self._found(key, at))

    def commit_reads(
        self,
        writes: WriteSet,
        reads: ReadSet,
        read_at: int,
        token: RequestToken | None,
        durability: Durability | None,
    ) -> Timestamp:
        """Commit the writes of a transaction whose reads, at `read_at`, were made elsewhere.

        Raises `ConflictError` if another commit has written a key or span that was read, and
        `HistoryGoneError` if the history that would tell is gone: run the transaction again.
        """
        self._reads.require_kept(Span(), read_at)
        self._reads.require_indexed(read_at)
        commit = partial(
            self.transactions.commit_reads, writes, reads, read_at, durability=durability
        )
        return self._once(commit, token, durability)

    def write_set(self, whose: str = "the write set", size_max: int = sys.maxsize) -> WriteSet:
        """A write set for plain keys of this store."""
        return WriteSet(whose, size_max)

    def narrow(self, span: Span) -> Span:
        """The span without the reserved keys, unless it begins among them."""
        return self._reserve.narrow(span)

    @property
    def durability(self) -> Durability:
        """The durability of a write that names none."""
        return self._committer.durability

    def get_many(
        self,
        keys: list[bytes],
        as_of: TimeLike | Sequence[TimeLike] | None,
        bytes_max: int,
        first: int = 0,
    ) -> list[bytes | None] | None:
        """See `Store.get_many`. None where the values of several keys have more than `bytes_max`
        bytes. Errors number the keys from `first` on."""
        import numpy as np  # only servers read this way, and commands start faster without it

        from kvstore.tables import joins

        bounds = SearchBounds(bytes_max=bytes_max)
        if as_of is not None and is_many(as_of):
            return joins.values(self.parts, keys, as_of, bounds, first)

        def read(at: int) -> list[bytes | None]:
            found = self._versions.get_timed(keys, np.full(len(keys), at, np.int64).data, bounds)
            if found is None:
                raise _TooManyBytesError
            return found.values

        try:
            if as_of is None and self._committer.write_due(waits=False):
                return self._reads.late(keys, read)
            hull = Span(min(keys), max(keys) + b"\0") if keys else Span()
            return self._reads.read(as_of, hull, read)
        except _TooManyBytesError:
            return None

    def floors(
        self,
        keys: list[bytes],
        as_of: TimeLike | Sequence[TimeLike] | None,
        prefix: bytes | None,
        bytes_max: int,
        first: int = 0,
    ) -> list[tuple[bytes, bytes] | None] | None:
        """See `Store.floor_many`. None where the rows of several keys have more than `bytes_max`
        bytes. Errors number the keys from `first` on."""
        from kvstore.tables import joins

        return joins.floors(self.parts, keys, as_of, prefix, bytes_max, first)

    def require_history(self, key: bytes, bytes_max: int) -> None:
        """Raise if the values of the versions of `key` have more than `bytes_max` bytes."""
        if self._versions.has_more(key, bytes_max):
            raise UsageError(
                f"the values of the versions of {key[:40]!r} have more than {bytes_max} bytes",
                "read the changes of the key's span, which come as a stream",
            )

    @property
    def has_due(self) -> bool:
        """Whether the next read of the newest state, or the next write, has to write the deletes of
        keys that have expired."""
        committer = self._committer
        return not committer.frontiers.is_healthy and committer.has_due

    @contextmanager
    def unless_busy(self) -> Iterator[bool]:
        """Keep other commits away for the block; false if another thread is committing, or deletes
        are due. A commit inside the block waits for no lock, and writes nothing else."""
        taken = not self.has_due and self._committer.lock.acquire(blocking=False)
        try:
            yield taken
        finally:
            if taken:
                self._committer.lock.release()

    def wait_durable(self, upper: int) -> None:
        """Return once everything below `upper` is on disk. Commits that wait share an fsync."""
        self._committer.syncs.wait(upper)

    # -- inside -----------------------------------------------------------------------------

    def _once(
        self,
        commit: Callable[..., T],
        token: RequestToken | None,
        durability: Durability | None,
    ) -> T | Timestamp:
        try:
            return commit(token=token)
        except RepeatedError as repeated:
            if durability != "async":
                self.wait_durable(repeated.timestamp + 1)
            return repeated.timestamp

    def _found(self, key: bytes, at: Timestamp, *, before: bool = False) -> bytes | None:
        """The value of a key at the time of a request that was done, or right before it."""
        read = partial(self._versions.get, key)
        try:
            return self._reads.read(Timestamp(at - before), Span.of_key(key), read)
        except HistoryGoneError as error:
            raise IndeterminateError(
                f"a request that was done at {at}", f"the history of its result is gone: {error}"
            ) from error
