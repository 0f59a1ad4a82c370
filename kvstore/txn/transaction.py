"""Transactions: optimistic and serialisable.

A transaction reads at one time and keeps its writes to itself. At commit, under the commit lock,
everything it read is compared with everything written since: keys with keys, keys with spans.
If something was, none of it is written (`ConflictError`). If nothing was, all its reads are as true
at the commit's time as they were at its own: it might as well have run in that instant.

Invariants
1. Transactions that wrote are equivalent to running one after the other in the order of
   their timestamps; one that only read, to running right after the commit it read at.
2. A span that was scanned counts as read up to where the scan came, with the keys that were not
   there: phantoms conflict.
3. One that only read never fails. Its time stays readable while it is open.
4. Writes that did not read (blind writes) never conflict.

Source: backward validation after Kung and Robinson, "On Optimistic Methods for Concurrency
Control" (1981).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import suppress
from itertools import chain, islice
from types import TracebackType
from typing import TypeVar, overload

from kvstore.arguments import key_list, require_limit
from kvstore.changes.entry import OP_DELETE_RANGE, OP_IMPORT, OP_REVERT
from kvstore.commit import Durability
from kvstore.errors import ClosedError, ConflictError, ForkedError
from kvstore.limits import BATCH_BYTES_MAX
from kvstore.mvcc import Fragments, RangeTombstone, WriteSet
from kvstore.parts import Parts
from kvstore.recent import Touched
from kvstore.span import Span, require_key
from kvstore.timestamp import Timestamp
from kvstore.txn.reads import ReadSet

T = TypeVar("T")

_NOTHING_DELETED = Fragments()
_ENDED = WriteSet("the transaction", size_max=-1)


class Transactions:
    """Begins and ends the transactions of one store."""

    def __init__(self, parts: Parts) -> None:
        self.versions, self._index, self._committer = parts.versions, parts.index, parts.committer
        self._holds, self._imports = parts.holds, parts.imports
        self._abandoned: deque[int] = deque()

    def begin(self, *, durability: Durability | None = None) -> Transaction:
        """A transaction at the newest complete time."""
        committer = self._committer
        # First there is who lets go of the pin, then the pin: whatever comes between.
        transaction = Transaction(self, self._holds.new_pin(), durability=durability)
        committer.give_way()
        with committer.lock:
            committer.require_healthy()
            while self._abandoned:
                self._abandoned.pop()
                committer.recent.unwatch()
            transaction.read_at = read_at = Timestamp(committer.upper - 1)
            committer.recent.watch(read_at)
            self._holds.pin_transaction(transaction.pin, read_at)
        return transaction

    def end(self, pin: int) -> None:
        """Let go of what an open transaction keeps. Repeatable; in a forked child, which keeps
        nothing, it does nothing."""
        with suppress(ForkedError), self._committer.lock:
            self._let_go(pin)

    def abandon(self, pin: int) -> None:
        """As `end`, from a finalizer: that may run anywhere, so what the lock guards is left to
        the next that begins."""
        if self._holds.unpin(pin):
            self._abandoned.append(pin)

    def commit(
        self,
        writes: WriteSet,
        reads: ReadSet,
        read_at: int,
        pin: int,
        *,
        durability: Durability | None,
    ) -> Timestamp:
        """Commit `writes` if nothing in `reads` was written since `read_at`, and end it."""
        committer = self._committer

        def check() -> None:
            if committer.upper - 1 != read_at:  # else nothing was committed meanwhile
                for commit in self._since(read_at):
                    where = reads.touched(commit.keys, commit.spans)
                    if where is not None:
                        raise ConflictError(
                            read_at=read_at, written_at=commit.timestamp, where=where
                        )
            # What it read was looked at for the last time: its own writes are noted for others.
            self._let_go(pin)

        committer.give_way()
        return committer.commit(writes, durability=durability, check=check)

    def _let_go(self, pin: int) -> None:
        if self._holds.unpin(pin):
            self._committer.recent.unwatch()

    def _since(self, read_at: int) -> Iterator[Touched]:
        remembered = self._committer.recent.since(read_at)
        return self._indexed(read_at) if remembered is None else remembered

    def _indexed(self, read_at: int) -> Iterator[Touched]:
        """What the change index has above `read_at`, chunk by chunk. Costs what changed."""
        for commit in self._index.read(since=read_at, upto=self._committer.upper - 1):
            keys: list[bytes] = []
            spans: list[tuple[bytes, bytes | None]] = []
            for row in commit.entry.rows():
                if row.op == OP_DELETE_RANGE:
                    spans.append((row.key, row.value))
                elif row.op in (OP_IMPORT, OP_REVERT):
                    _, parts = self._imports.spans_of(row.key)
                    spans.extend((part.start, part.end) for part in parts)
                else:
                    keys.append(row.key)
            yield Touched(commit.timestamp, keys, spans)


class Transaction:
    """Reads at one time, and writes that only it sees until they are committed together.

    Leaving the `with` block commits; an exception drops the writes. `timestamp` is set once
    committed; None for one that only read. One thread at a time. One that nobody has any more is
    rolled back.
    """

    _is_ended = True  # for the finalizer of one whose making was interrupted

    def __init__(
        self,
        owner: Transactions,
        pin: int,
        *,
        durability: Durability | None,
    ) -> None:
        self._owner = owner
        self._durability = durability
        self.pin = pin
        self._writes = WriteSet("the transaction", BATCH_BYTES_MAX)
        self._deleted = _NOTHING_DELETED
        self._reads = ReadSet()
        self._passes: list[_Pass] = []
        self.read_at = Timestamp(0)
        """The time of its reads, set as it begins."""
        self.timestamp: Timestamp | None = None
        self._is_open = True
        self._is_ended = False
        """Whether its pin was let go: if not, the finalizer does it."""

    # -- reading ----------------------------------------------------------------------------

    @overload
    def get(self, key: bytes) -> bytes | None: ...
    @overload
    def get(self, key: bytes, default: T) -> bytes | T: ...
    def get(self, key: bytes, default: T | None = None) -> bytes | T | None:
        """The value of `key`, own writes included; `default` where there is none."""
        self._require_open()
        key = require_key(key)
        points = self._writes.points
        if key in points:
            value = points[key]
        elif self._deleted and self._deleted.stack(key):
            value = None
        else:
            self._reads.add_key(key)
            value = self._owner.versions.get(key, self.read_at)
        return default if value is None else value

    def get_many(self, keys: Sequence[bytes]) -> list[bytes | None]:
        """The values of `keys`, in their order; None where there is none."""
        return [self.get(key) for key in key_list(keys)]

    def scan(
        self,
        start: bytes | None = None,
        end: bytes | None = None,
        prefix: bytes | None = None,
        *,
        reverse: bool = False,
        limit: int | None = None,
    ) -> Iterator[tuple[bytes, bytes]]:
        """Live keys and values of a span, with the own writes made so far. As `Store.scan`.

        Counts as having read the span as far as the rows were taken.
        """
        self._require_open()
        require_limit(limit)
        scanned = _Pass(Span.of(start, end, prefix), reverse=reverse)
        self._passes.append(scanned)
        chunks = self._owner.versions.scan(scanned.span, self.read_at, reverse=reverse)
        stored = chain.from_iterable(zip(*chunk, strict=True) for chunk in chunks)
        rows = scanned.follow(self._with_own(stored, scanned.span, reverse=reverse))
        return rows if limit is None else islice(rows, limit)

    # -- writing ----------------------------------------------------------------------------

    def put(self, key: bytes, value: bytes) -> None:
        """Set `key` to `value`. The last write to a key wins."""
        self._writes.put(key, value)

    def delete(self, key: bytes) -> None:
        """Delete `key`, whether or not it is there."""
        self._writes.delete(key)

    def delete_range(self, start: bytes, end: bytes) -> None:
        """Delete `start <= key < end`, own writes so far included."""
        self._writes.delete_range(start, end)
        self._deleted = self._deleted.adding(RangeTombstone(start, end, 1))

    # -- ending -----------------------------------------------------------------------------

    def commit(self) -> Timestamp | None:
        """Write everything at one timestamp, which it returns; None if there is nothing to write.

        Raises `ConflictError`, with nothing written, if something that was read has been
        written since: run the transaction again.
        """
        writes = self._writes
        writes.require_open()
        try:
            if writes:
                for scanned in self._passes:
                    scanned.note(self._reads)
                self.timestamp = self._owner.commit(
                    writes, self._reads, self.read_at, self.pin, durability=self._durability
                )
                self._is_open, self._is_ended = False, True  # the commit has ended it
            return self.timestamp
        finally:
            self.rollback()

    def rollback(self) -> None:
        """Drop the writes and end. Repeatable; after `commit` it does nothing."""
        self._passes.clear()
        self._writes = _ENDED
        if self._is_open:
            self._is_open = False
            self._owner.end(self.pin)
            self._is_ended = True

    def require_unchanged(self, span: Span) -> None:
        """Have the commit fail if anything in `span` is written by others before it."""
        self._require_open()
        self._reads.add_span(span)

    def __enter__(self) -> Transaction:
        self._require_open()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None
    ) -> None:
        if error is None and self._is_open:
            self.commit()
        else:
            self.rollback()

    def __del__(self) -> None:
        if not self._is_ended:
            self._owner.abandon(self.pin)

    # -- inside -----------------------------------------------------------------------------

    def _with_own(
        self, stored: Iterator[tuple[bytes, bytes]], span: Span, *, reverse: bool
    ) -> Iterator[tuple[bytes, bytes]]:
        """Stored rows with the own writes of this moment laid over them."""
        points = {key: value for key, value in self._writes.points.items() if key in span}
        deleted = self._deleted
        if not points and not deleted:
            return stored
        kept = (
            row
            for row in stored
            if row[0] not in points and not (deleted and deleted.stack(row[0]))
        )
        own = ((key, points[key]) for key in sorted(points, reverse=reverse))
        return _merged(kept, own, reverse=reverse)

    def _require_open(self) -> None:
        if not self._is_open:
            raise ClosedError("the transaction")


class _Pass:
    """How far a scan came: that is what it read."""

    __slots__ = ("_ended", "_reached", "_reverse", "span")

    def __init__(self, span: Span, *, reverse: bool) -> None:
        self.span = span
        self._reverse = reverse
        self._reached: bytes | None = None
        self._ended = False

    def follow(self, rows: Iterator[tuple[bytes, bytes]]) -> Iterator[tuple[bytes, bytes]]:
        for row in rows:
            self._reached = row[0]
            yield row
        self._ended = True

    def note(self, reads: ReadSet) -> None:
        if self._ended:
            reads.add_span(self.span)
        elif self._reached is not None and self._reverse:
            reads.add_span(Span(self._reached, self.span.end))
        elif self._reached is not None:
            reads.add_span(Span(self.span.start, self._reached + b"\x00"))


def _merged(
    stored: Iterator[tuple[bytes, bytes]],
    own: Iterator[tuple[bytes, bytes | None]],
    *,
    reverse: bool,
) -> Iterator[tuple[bytes, bytes]]:
    """Two passes of distinct keys as one; own deletions (value None) are left out."""
    waiting = next(own, None)
    for row in stored:
        while waiting is not None and (waiting[0] < row[0]) is not reverse:
            if waiting[1] is not None:
                yield waiting[0], waiting[1]
            waiting = next(own, None)
        yield row
    while waiting is not None:
        if waiting[1] is not None:
            yield waiting[0], waiting[1]
        waiting = next(own, None)
