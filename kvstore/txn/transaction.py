"""Transactions: optimistic and serialisable.

A transaction reads at one time and buffers its writes. At commit, under the commit lock, its reads
are compared with everything written since that time: keys with keys, keys with spans. If a read was
overwritten, nothing is written (`ConflictError`). Otherwise every read has the same result at the
commit's time, so the transaction might as well have run in that instant.

Invariants
1. Transactions that wrote are equivalent to running one after the other in the order of their
   timestamps. A transaction that only read is equivalent to running right after the commit that it
   read at.
2. A scan counts as a read of its span as far as it came, absent keys included: phantoms conflict.
3. A transaction that only read never fails. Its time stays readable while it is open.
4. Blind writes, which did not read, never conflict.

Source: Kung and Robinson, "On Optimistic Methods for Concurrency Control", 1981 (backward).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from itertools import chain, islice
from types import TracebackType
from typing import TYPE_CHECKING, TypeVar, overload

from kvstore import forks
from kvstore.arguments import key_list, require_limit
from kvstore.changes.entry import OP_DELETE_RANGE, OP_IMPORT, OP_REVERT
from kvstore.columns import row_puts
from kvstore.commit import CommitNote, Durability, Expires
from kvstore.errors import ClosedError, ConflictError, HistoryGoneError
from kvstore.limits import BATCH_BYTES_MAX
from kvstore.mvcc import Fragments, RangeTombstone, WriteSet
from kvstore.parts import Parts
from kvstore.recent import Touched
from kvstore.span import Span, require_key
from kvstore.timestamp import Timestamp
from kvstore.txn.owners import OwnsTransactions
from kvstore.txn.reads import ReadSet
from kvstore.txn.tables import WithTables, table_of
from kvstore.txn.updates import Updating, adding, require_change

if TYPE_CHECKING:
    from kvstore.tables.table import Table

T = TypeVar("T")

_NOTHING_DELETED = Fragments()
_ENDED = WriteSet("the transaction", size_max=-1)


class Transactions(WithTables):
    """Begins and ends the transactions of one store."""

    def __init__(self, parts: Parts) -> None:
        super().__init__(parts)
        self.versions, self._index, self._committer = parts.versions, parts.index, parts.committer
        self._pins, self._imports = parts.pins, parts.imports
        self.write_set, self.narrow = WriteSet, parts.reserve.narrow
        self._abandoned: deque[int] = deque()
        # The look-up of a child would answer from the values that are kept in memory.
        forks.own(self, parts.committer.where, endings=("end", "abandon"))

    def due(self, expires: Expires) -> int:
        """See `Expiries.due`."""
        return self._committer.expiries.due(expires)

    def begin(self, *, durability: Durability | None = None) -> Transaction:
        """A transaction at the newest complete time."""
        committer = self._committer
        # The owner of the pin exists before the pin, so an interrupt between them leaks nothing.
        transaction = Transaction(self, self._pins.new(), durability=durability)
        committer.catch_up()
        committer.give_way()
        with committer.lock:
            committer.catch_up()
            while self._abandoned:
                self._abandoned.pop()
                committer.recent.unwatch()
            transaction.read_at = read_at = Timestamp(committer.upper - 1)
            committer.recent.watch(read_at)
            self._pins.keep_newest(transaction.pin, read_at)
        return transaction

    def end(self, pin: int) -> None:
        """Release the pin of a transaction. Repeatable."""
        with self._committer.lock:
            self._let_go(pin)

    def abandon(self, pin: int) -> None:
        """As `end`, from a finalizer. A finalizer may run anywhere and must not take the lock: it
        removes the pin, and the next transaction that begins does the rest."""
        if self._pins.let_go(pin, None) is not None:
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
        """Commit `writes` if nothing in `reads` was written since `read_at`; end the
        transaction."""
        committer = self._committer

        def check() -> None:
            if committer.upper - 1 != read_at:  # else no commit came meanwhile
                self._require_untouched(reads, read_at, self._since(read_at))
            self._let_go(pin)  # then the writes are noted for the checks of other transactions

        committer.give_way()
        return committer.commit(writes, durability=durability, check=check)

    def commit_reads(
        self,
        writes: WriteSet,
        reads: ReadSet,
        read_at: int,
        *,
        durability: Durability | None,
        note: CommitNote | None = None,
    ) -> Timestamp:
        """Commit `writes` if nothing in `reads` was written since `read_at`, without a transaction
        that was begun here. The change index must be whole above `read_at`."""
        committer = self._committer

        def check() -> None:
            if committer.since > read_at:  # GC may have trimmed the index
                raise HistoryGoneError(as_of=read_at, since=committer.since)
            if committer.upper - 1 != read_at:
                is_watched = committer.recent.watchers > 0  # else the table is empty
                since = self._since if is_watched else self._indexed
                self._require_untouched(reads, read_at, since(read_at))

        committer.give_way()
        return committer.commit(writes, durability=durability, check=check, note=note)

    def _require_untouched(self, reads: ReadSet, read_at: int, commits: Iterator[Touched]) -> None:
        """Raise `ConflictError` for the first commit that wrote a key or span of the reads."""
        for commit in commits:
            where = reads.touched(commit.keys, commit.spans)
            if where is not None:
                self._committer.meters.note_conflict()
                raise ConflictError(read_at=read_at, written_at=commit.timestamp, where=where)

    def _let_go(self, pin: int) -> None:
        if self._pins.let_go(pin, None) is not None:
            self._committer.recent.unwatch()

    def _since(self, read_at: int) -> Iterator[Touched]:
        remembered = self._committer.recent.since(read_at)
        return self._indexed(read_at) if remembered is None else remembered

    def _indexed(self, read_at: int) -> Iterator[Touched]:
        """The keys and spans in the change index above `read_at`, chunk by chunk. Costs what
        changed."""
        for commit in self._index.read(since=read_at, upto=self._committer.upper - 1):
            keys: list[bytes] = []
            spans: list[tuple[bytes, bytes | None]] = []
            for row in commit.entry.rows():
                if row.op == OP_DELETE_RANGE:
                    spans.append((row.key, row.value))
                elif row.op in (OP_IMPORT, OP_REVERT):
                    parts = self._imports.spans_of(row.key)
                    spans.extend((part.start, part.end) for part in parts)
                else:
                    keys.append(row.key)
            yield Touched(Timestamp(commit.timestamp), keys, spans)


class Transaction:
    """Reads at one time, and writes that only it sees until they are committed together.

    Leaving the `with` block commits; an exception drops the writes. The commit sets `timestamp`,
    which stays None for a transaction that only read. One thread at a time may use a transaction. A
    transaction without references is rolled back.
    """

    _is_ended = True  # for the finalizer, if an interrupt came inside `__init__`

    def __init__(
        self,
        owner: OwnsTransactions,
        pin: int,
        *,
        durability: Durability | None,
    ) -> None:
        self._owner = owner
        self._durability = durability
        self.pin = pin
        self._writes = owner.write_set("the transaction", BATCH_BYTES_MAX)
        self._deleted = _NOTHING_DELETED
        self._reads = ReadSet()
        self._passes: list[_Pass] = []
        self.read_at = Timestamp(0)
        """The time of all reads. It is set when the transaction begins."""
        self.timestamp: Timestamp | None = None
        self._is_open = True
        self._is_ended = False
        """Whether the pin was released. If not, the finalizer releases it."""

    # -- reading ----------------------------------------------------------------------------

    @overload
    def get(self, key: bytes) -> bytes | None: ...
    @overload
    def get(self, key: bytes, default: T) -> bytes | T: ...
    def get(self, key: bytes, default: T | None = None) -> bytes | T | None:
        """The value of `key`, own writes included; `default` if the key is absent."""
        self._require_open()
        key = require_key(key)
        points = self._writes.points
        if key in points:
            value = _plain(points[key])
        elif self._deleted and self._deleted.stack(key):
            value = None
        else:
            self._reads.add_key(key)
            value = self._owner.versions.get(key, self.read_at)
        return default if value is None else value

    def get_many(self, keys: Sequence[bytes]) -> list[bytes | None]:
        """The values of `keys`, in the order of `keys`; None for an absent key."""
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
        """Live keys and values of a span, including own writes made before. As `Store.scan`.

        The scan counts as a read of the span up to the last row that the caller took.
        """
        self._require_open()
        require_limit(limit)
        span = self._owner.narrow(Span.of(start, end, prefix))
        scanned = _Pass(span, reverse=reverse)
        self._passes.append(scanned)
        chunks = self._owner.versions.scan(scanned.span, self.read_at, reverse=reverse)
        stored = chain.from_iterable(zip(*chunk, strict=True) for chunk in chunks)
        rows = scanned.follow(self._with_own(stored, scanned.span, reverse=reverse))
        return rows if limit is None else islice(rows, limit)

    # -- writing ----------------------------------------------------------------------------

    def put(self, key: bytes, value: bytes, *, expires: Expires | None = None) -> None:
        """Set `key` to `value`. The last write to a key wins, and decides whether the key expires.
        `expires` is as in `Store.put`."""
        if expires is None:
            self._writes.put(key, value)
        else:
            self._writes.put_expiring(key, value, self._owner.due(expires))

    def put_many(self, rows: object, *, expires: Expires | None = None) -> None:
        """Set many keys: a mapping, pairs of key and value, or Arrow data with the columns `key`
        and `value`. The last value of a key wins. `expires` is as in `Store.put`, for all rows that
        have no time of their own in a column `expires`."""
        due = None if expires is None else self._owner.due(expires)
        for key, value, own in row_puts(rows):
            if due is None and own is None:
                self._writes.put(key, value)
            else:
                at = due if own is None else self._owner.due(Timestamp(own))
                assert at is not None, "one of the two is set"
                self._writes.put_expiring(key, value, at)

    def update(
        self, key: bytes, change: Updating, *, expires: Expires | None = None
    ) -> bytes | None:
        """Set `key` to `change(value)`, and return that; None deletes it. See `Store.update`."""
        new = require_change(change)(self.get(key))
        if new is None:
            self._writes.delete(key)
        else:
            self.put(key, new, expires=expires)
        return None if new is None else bytes(new)

    def increment(self, key: bytes, by: int = 1, *, expires: Expires | None = None) -> int:
        """Add `by` to the counter at `key`, and return the sum. See `Store.increment`."""
        found = self.update(key, adding(key, by), expires=expires)
        assert found is not None, "a counter is never deleted"
        return int(found)

    def delete(self, key: bytes) -> None:
        """Delete `key`, whether or not it exists."""
        self._writes.delete(key)

    def delete_range(self, start: bytes, end: bytes) -> None:
        """Delete `start <= key < end`, including own writes made before."""
        self._writes.delete_range(start, end)
        start, end = self._writes.ranges[-1]
        self._deleted = self._deleted.adding(RangeTombstone(start, end, 1))

    def put_rows(
        self,
        keys: Sequence[bytes],
        values: Sequence[bytes],
        expires: Expires | None = None,
        rows: Sequence[bytes] = (),
    ) -> None:
        """Set keys of a table: see `kvstore.tables`."""
        due = None if expires is None else self._owner.due(expires)
        self._writes.put_rows(keys, values, due, rows)

    def delete_rows(self, keys: Sequence[bytes], spans: Sequence[tuple[bytes, bytes]] = ()) -> None:
        """Delete keys and spans of keys of a table: see `kvstore.tables`."""
        self._writes.delete_rows(keys)
        for start, end in spans:
            self._writes.delete_range_below(start, end)
            self._deleted = self._deleted.adding(RangeTombstone(start, end, 1))

    def table(self, name: str) -> Table:
        """The table `name`, read and written by this transaction."""
        self._require_open()
        return table_of(self, self._owner.catalogue, name)

    # -- ending -----------------------------------------------------------------------------

    def commit(self) -> Timestamp | None:
        """Write everything at one timestamp and return it; None if there is nothing to write.

        Raises `ConflictError`, with nothing written, if another commit has written something that
        the transaction read: run it again.
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
        """Drop the writes and end the transaction. Repeatable; does nothing after `commit`."""
        self._passes.clear()
        self._writes = _ENDED
        if self._is_open:
            self._is_open = False
            self._owner.end(self.pin)
            self._is_ended = True

    def require_unchanged(self, span: Span) -> None:
        """Make the commit fail if another commit writes into `span` before."""
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
        """Stored rows, overlaid with the writes that were made before the call."""
        points = {key: value for key, value in self._writes.points.items() if key in span}
        deleted = self._deleted
        if not points and not deleted:
            return stored
        kept = (
            row
            for row in stored
            if row[0] not in points and not (deleted and deleted.stack(row[0]))
        )
        own = ((key, _plain(points[key])) for key in sorted(points, reverse=reverse))
        return _merged(kept, own, reverse=reverse)

    def _require_open(self) -> None:
        if not self._is_open:
            raise ClosedError("the transaction")


def _plain(value: bytes | None) -> bytes | None:
    """A value of a write set. The value of a key that expires has a type of its own there."""
    return value if value is None or type(value) is bytes else bytes(value)


class _Pass:
    """The part of a span that a scan has passed, and therefore read."""

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
    """Two passes over distinct keys as one pass. Rows of value None, own deletions, are left
    out."""
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
