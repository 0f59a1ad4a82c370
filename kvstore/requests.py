"""Writes of other processes: each is done once, however often it arrives; rows of tables are
committed once.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import islice
from typing import NamedTuple, TypeVar

from kvstore.base.arguments import is_many
from kvstore.base.span import Span
from kvstore.base.timestamp import TIMESTAMP_MAX, TimeLike, Timestamp
from kvstore.engine import WriteBatch
from kvstore.errors import (
    HistoryGoneError,
    IndeterminateError,
    UsageError,
)
from kvstore.limits import REQUEST_WRITERS_MAX
from kvstore.mvcc import WriteSet
from kvstore.mvcc.lookup import SearchBounds
from kvstore.mvcc.meta import Meta, timestamp_of
from kvstore.timeline.durability import Durability
from kvstore.timeline.expiries import Expires
from kvstore.timeline.parts import Parts
from kvstore.transaction import (
    Conditional,
    Expiry,
    ReadSet,
    Transactions,
    Unchecked,
    Updates,
    counted,
)

# --------------------------------------------------------------------------------------------------
# Requests: writes of other processes, each done once, however often it arrives.
#
# A caller that got no answer sends its request again, perhaps to a server that was killed and
# started anew. So the store keeps a note of the request in the commit that carries it out.
#
#     request/<writer>     := serial, timestamp     the last request of a writer, and its commit
#     requests-forgotten   := timestamp             notes of commits up to here may be gone
#
# A token names a writer and numbers the writer's requests, one after the other. `known` is a time
# at which the writer had not yet sent the request. Notes are bounded: the writer that wrote longest
# ago is forgotten first. A request of an unknown writer is new if it began after the last commit
# whose note is gone; otherwise nobody can tell, and it is refused.
#
# Invariants
# 1. A note and the writes it tells of are in one engine batch: neither is there without the other.
# 2. A request that was done is never done again, and gets its first answer, whatever would refuse
#    it by now. A request that may have been done is refused.
# 3. A request is answered when the commit that did it is durable, even if that was an earlier one.

_PREFIX = "request/"
_FORGOTTEN = "requests-forgotten"

T = TypeVar("T")


class RequestToken(NamedTuple):
    """The name of a request: the writer, its serial number, and a time before it was first sent;
    without the time the request counts as new where the writer is unknown."""

    writer: str
    serial: int = 0
    known: int | None = None


class _Done(NamedTuple):
    serial: int
    timestamp: Timestamp


class _RepeatedError(Exception):
    """Calls off a commit that was done before."""

    def __init__(self, timestamp: Timestamp) -> None:
        super().__init__(timestamp)
        self.timestamp = timestamp


class _TooManyBytesError(Exception):
    """Calls off a read."""


class _Note:
    """The part of a commit that makes it happen once."""

    def __init__(self, requests: Requests, token: RequestToken) -> None:
        self._requests, self._token = requests, token

    def check(self) -> None:
        """Runs under the commit lock, before anything else of the commit."""
        self._requests.require_new(self._token)

    def stage(self, batch: WriteBatch, timestamp: Timestamp) -> Callable[[], None]:
        """Add the note to the batch of the commit."""
        return self._requests.stage(batch, self._token, timestamp)


class Requests:
    """Writes for the callers of a server. Without a token a write is an ordinary one."""

    def __init__(
        self, parts: Parts, meta: Meta, conditional: Conditional, transactions: Transactions
    ) -> None:
        self.parts, self.transactions = parts, transactions
        self._committer, self._reads, self._versions = parts.committer, parts.reads, parts.versions
        self._meta = meta
        self._reserve = parts.reserve
        self._conditional = conditional
        self.updates, self.expiry = Updates(parts), Expiry(parts)
        self._done: dict[str, _Done] | None = None
        self._forgotten = 0

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
        return self._once(partial(self.expiry.persist, key, durability=durability), token, None)

    def is_done(self, token: RequestToken) -> bool:
        """Whether the store has the note of this request: it was done."""
        done = self._notes().get(token.writer)
        return done is not None and done.serial == token.serial

    def done_at(self, token: RequestToken, durability: Durability | None) -> Timestamp | None:
        """The time of the commit that did this request, once it is as durable as the request asks
        for; None if no commit has done it."""
        done = self._notes().get(token.writer)
        if done is None or done.serial != token.serial:
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
        add = partial(self.updates.increment, key, by, due=due, durability=durability)
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
            if as_of is None and self._committer.is_behind():
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

    # -- under the commit lock --------------------------------------------------------------

    def require_new(self, token: RequestToken) -> None:
        """Raise unless the request was surely not done."""
        done = self._notes().get(token.writer)
        if done is not None and token.serial == done.serial:
            raise _RepeatedError(done.timestamp)
        if done is not None and token.serial < done.serial:
            raise UsageError(
                f"request {token.serial} of {token.writer}, which has made request {done.serial}",
                "number requests one after the other, and give each thread a writer of its own",
            )
        if done is None and token.known is not None and token.known < self._forgotten:
            raise IndeterminateError(
                f"request {token.serial} of {token.writer}",
                "the store no longer has the note of its outcome",
            )

    def stage(
        self, batch: WriteBatch, token: RequestToken, timestamp: Timestamp
    ) -> Callable[[], None]:
        """Add the note of a request to its batch; returns the call that publishes it."""
        notes = self._notes()
        self._meta.stage(
            batch, _PREFIX + token.writer, {"serial": token.serial, "timestamp": timestamp}
        )
        dropped: Sequence[str] = ()
        forgotten = self._forgotten
        if token.writer not in notes and len(notes) >= REQUEST_WRITERS_MAX:
            dropped = list(islice(notes, len(notes) + 1 - REQUEST_WRITERS_MAX))
            forgotten = max(forgotten, *(notes[writer].timestamp for writer in dropped))
            self._meta.stage_timestamp(batch, _FORGOTTEN, forgotten)
            for writer in dropped:
                self._meta.stage_delete(batch, _PREFIX + writer)

        def publish() -> None:
            for writer in dropped:
                notes.pop(writer, None)
            notes.pop(token.writer, None)  # notes are in the order of their commits
            notes[token.writer] = _Done(token.serial, timestamp)
            self._forgotten = forgotten

        return publish

    # -- inside -----------------------------------------------------------------------------

    def _once(
        self,
        commit: Callable[..., T],
        token: RequestToken | None,
        durability: Durability | None,
    ) -> T | Timestamp:
        if token is None:
            return commit()
        try:
            return commit(note=_Note(self, token))
        except _RepeatedError as repeated:
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

    def _notes(self) -> dict[str, _Done]:
        """The notes, oldest first. They are read at the first request that has a token."""
        if self._done is None:
            self._forgotten = self._meta.timestamp(_FORGOTTEN)
            found = [
                (writer, _Done(record.integer("serial"), timestamp_of(record)))
                for writer, record in self._meta.records(_PREFIX)
            ]
            self._done = dict(sorted(found, key=lambda note: note[1].timestamp))
        return self._done
