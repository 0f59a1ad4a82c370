"""Writes that depend on reads: transactions, conditions, updates in place, the versioned undo.

A transaction reads at one time, remembers what it read, and is checked at its commit: a key or span
that another commit wrote meanwhile is a conflict. `transact` runs it again a bounded number of
times.
"""

from __future__ import annotations

import bisect
import random
import time
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import suppress
from enum import Enum
from functools import partial
from itertools import chain, islice
from threading import Lock
from types import TracebackType
from typing import TYPE_CHECKING, Any, Final, Protocol, TypeAlias, TypeVar, overload

from kvstore.base import forks
from kvstore.base.arguments import (
    COUNT,
    INTEGER,
    LIMIT,
    REFUSED,
    ArgumentKind,
    Refused,
    function,
    key_list,
)
from kvstore.base.span import RESERVED, BytesLike, Span, merge_spans, require_key
from kvstore.base.timestamp import Timestamp
from kvstore.changes import Change
from kvstore.changes.index import OP_DELETE_RANGE, OP_IMPORT, OP_REVERT
from kvstore.codec.columns import row_puts
from kvstore.errors import (
    ClosedError,
    ConflictError,
    HistoryGoneError,
    NotACounterError,
    NotYetWrittenError,
    PreconditionError,
    UsageError,
    printable,
)
from kvstore.limits import (
    BATCH_BYTES_MAX,
    REVERT_ATTEMPTS,
    REVERT_ROWS_MAX,
    TRANSACT_ATTEMPTS,
    TRANSACT_WAIT_S_MAX,
    TRANSACT_WAIT_S_MIN,
    TXN_KEYS_MAX,
    TXN_SPANS_MAX,
)
from kvstore.mvcc import Fragments, RangeTombstone, Versions, WriteSet
from kvstore.mvcc.expiry_records import carried_key, dues_at, may_expire, waiting_key
from kvstore.mvcc.write_set import OpenWriteSet
from kvstore.timeline.durability import Durability
from kvstore.timeline.expiries import Expires
from kvstore.timeline.parts import Parts
from kvstore.timeline.recent import Touched
from kvstore.timeline.request_notes import RequestToken

if TYPE_CHECKING:
    from kvstore.tables.catalogue import Catalogue
    from kvstore.tables.table import Row, Table


# --------------------------------------------------------------------------------------------------
# The owners of transactions: a store in this process, or a client of one.


class ReadsVersions(Protocol):
    """The versions that a transaction reads."""

    def get(self, key: bytes, as_of: int) -> bytes | None:
        """The value of `key` at `as_of`."""
        ...

    def get_many(self, keys: list[bytes], as_of: int) -> Sequence[bytes | None]:
        """The values of `keys` at `as_of`."""
        ...

    def scan(
        self, span: Span, as_of: int, *, reverse: bool
    ) -> Iterator[tuple[Sequence[bytes], Sequence[bytes]]]:
        """Live keys and values of a span at `as_of`, chunk by chunk."""
        ...


class OwnsTransactions(Protocol):
    """The store of a transaction: one in this process, or a client of one."""

    @property
    def versions(self) -> ReadsVersions:
        """The versions that are read."""
        ...

    @property
    def write_set(self) -> type[WriteSet]:
        """The kind of write sets that the store takes."""
        ...

    @property
    def catalogue(self) -> Catalogue:
        """The tables of the store."""
        ...

    def due(self, expires: Expires) -> int:
        """The time at which a key expires. Raises `UsageError` for one that does not lie ahead."""
        ...

    def narrow(self, span: Span) -> Span:
        """A span without the reserved keys: see `kvstore.timeline.reserved`."""
        ...

    def commit(
        self,
        writes: WriteSet,
        reads: ReadSet,
        read_at: int,
        pin: int,
        *,
        durability: Durability | None,
    ) -> Timestamp:
        """See `Transactions.commit`."""
        ...

    def end(self, pin: int) -> None:
        """See `Transactions.end`."""
        ...

    def abandon(self, pin: int) -> None:
        """See `Transactions.abandon`."""
        ...


# --------------------------------------------------------------------------------------------------
# The read set of a transaction: keys and spans that no other commit may write before it commits.
#
# Invariants
# 1. The set covers everything that was read. If there is too much to remember, neighbours are
#    joined into spans that cover more. A needless conflict is possible then, a missed one never.
# 2. The set holds at most `TXN_KEYS_MAX` keys and `TXN_SPANS_MAX` spans.


class ReadSet:
    """Keys and spans that were read."""

    __slots__ = ("_keys", "_keys_max", "_spans", "_spans_max")

    def __init__(self, *, keys_max: int | None = None, spans_max: int | None = None) -> None:
        self._keys: set[bytes] = set()
        self._spans: list[Span] = []
        self._keys_max = TXN_KEYS_MAX if keys_max is None else keys_max
        self._spans_max = TXN_SPANS_MAX if spans_max is None else spans_max

    def add_key(self, key: bytes) -> None:
        """Note a read of `key`, which may be absent."""
        self._keys.add(key)
        if len(self._keys) > self._keys_max:
            ordered = sorted(self._keys)
            width = -(-len(ordered) // max(1, self._spans_max // 2))
            groups = (ordered[i : i + width] for i in range(0, len(ordered), width))
            self._keys = set()
            for group in groups:
                self.add_span(Span(group[0], group[-1] + b"\x00"))

    def add_span(self, span: Span) -> None:
        """Note a read of all keys in `span`, including absent ones."""
        self._spans.append(span)
        if len(self._spans) > self._spans_max:
            self._spans = merge_spans(self._spans)
        if len(self._spans) > self._spans_max:
            firsts, lasts = self._spans[::2], [*self._spans[1::2], self._spans[-1]]
            pairs = zip(firsts, lasts, strict=False)
            self._spans = [Span(first.start, last.end) for first, last in pairs]

    def touched(
        self, keys: Collection[bytes], spans: Sequence[tuple[bytes, bytes | None]]
    ) -> str | None:
        """The first of `keys` and `spans` that was read, as text; None if none was.

        O(n log r) for n keys and spans against r reads, and O(r log r) once.
        """
        if not self._keys.isdisjoint(keys):
            return f"key {printable(min(self._keys.intersection(keys)))}"
        if self._spans:
            self._spans = merge_spans(self._spans)
            starts = [span.start for span in self._spans]
            for key in keys:
                if self._span_with(key, starts) is not None:
                    return f"key {printable(key)}"
        for start, end in spans:
            if self._meets(start, end):
                above = "the end" if end is None else printable(end)
                return f"[{printable(start)}, {above})"
        return None

    def points(self) -> Iterable[bytes]:
        """The keys that were read one by one, in no order."""
        return tuple(self._keys)

    def spans(self) -> Iterable[Span]:
        """The spans that cover the scans."""
        return tuple(self._spans)

    def _span_with(self, key: bytes, starts: list[bytes]) -> Span | None:
        index = bisect.bisect_right(starts, key) - 1
        return self._spans[index] if index >= 0 and key in self._spans[index] else None

    def _meets(self, start: bytes, end: bytes | None) -> bool:
        if any(span.intersect(start, end) is not None for span in self._spans):
            return True
        return any(start <= key and (end is None or key < end) for key in self._keys)


# --------------------------------------------------------------------------------------------------
# The tables of a transaction, imported at their first use: a process without tables needs no Arrow.


def table_of(transaction: Any, catalogue: Catalogue, name: str, row: type | None) -> Table[Any]:
    """The table `name`, read and written by a transaction."""
    from kvstore.tables.sources import TransactionRows
    from kvstore.tables.table import table_on

    return table_on(name, TransactionRows(transaction, catalogue), row)


# --------------------------------------------------------------------------------------------------
# Transactions: optimistic and serialisable.
#
# A transaction reads at one time and buffers its writes. At commit, under the commit lock, its
# reads are compared with everything written since that time: keys with keys, keys with spans. If a
# read was overwritten, nothing is written (`ConflictError`). Otherwise every read has the same
# result at the commit's time, so the transaction might as well have run in that instant.
#
# Invariants
# 1. Transactions that wrote are equivalent to running one after the other in the order of their
#    timestamps. A transaction that only read is equivalent to running right after the commit that
#    it read at.
# 2. A scan counts as a read of its span as far as it came, absent keys included: phantoms conflict.
# 3. A transaction that only read never fails. Its time stays readable while it is open.
# 4. Blind writes, which did not read, never conflict.
#
# Source: Kung and Robinson, "On Optimistic Methods for Concurrency Control", 1981 (backward).

T = TypeVar("T")

_NOTHING_DELETED = Fragments()
_ENDED = WriteSet("the transaction", size_max=-1)


class Transactions:
    """Begins and ends the transactions of one store."""

    def __init__(self, parts: Parts) -> None:
        self._parts = parts
        self._catalogue: Catalogue | None = None
        self._making = Lock()
        self.versions, self._index, self._committer = parts.versions, parts.index, parts.committer
        self._pins, self._imports = parts.pins, parts.imports
        self.write_set, self.narrow = WriteSet, parts.reserve.narrow
        self._abandoned: deque[int] = deque()
        # The look-up of a child would answer from the values that are kept in memory.
        forks.own(self, parts.committer.where, endings=("end", "abandon"))

    @property
    def catalogue(self) -> Catalogue:
        """The tables of the store, made when they are first asked for."""
        if self._catalogue is None:
            from kvstore.tables.catalogue import Catalogue, StoreDefinitions

            with self._making:
                if self._catalogue is None:
                    moves = self._parts.committer.is_following
                    self._catalogue = Catalogue(StoreDefinitions(self._parts), moves=moves)
        return self._catalogue

    def due(self, expires: Expires) -> int:
        """See `Expiries.due`."""
        return self._committer.expiries.due(expires)

    def begin(self, *, durability: Durability | None = None) -> Transaction:
        """A transaction at the newest complete time."""
        committer = self._committer
        # The owner of the pin exists before the pin, so an interrupt between them leaks nothing.
        transaction = Transaction(self, self._pins.new(), durability=durability)
        frontiers = committer.frontiers
        if not frontiers.is_healthy:
            committer.catch_up()
        if committer.is_committing:
            committer.give_way()
        with committer.lock:
            if not frontiers.is_healthy:  # the lock was waited for
                committer.catch_up()
            while self._abandoned:
                self._abandoned.pop()
                committer.recent.unwatch()
            transaction.read_at = read_at = Timestamp(frontiers.upper - 1)
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
            if committer.frontiers.upper - 1 != read_at:  # else no commit came meanwhile
                self._require_untouched(reads, read_at, self._since(read_at))
            self._let_go(pin)  # then the writes are noted for the checks of other transactions

        if committer.is_committing:
            committer.give_way()
        return committer.commit(writes, durability=durability, check=check)

    def commit_reads(
        self,
        writes: WriteSet,
        reads: ReadSet,
        read_at: int,
        *,
        durability: Durability | None,
        token: RequestToken | None = None,
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
        return committer.commit(writes, durability=durability, check=check, token=token)

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
        if not self._is_open:
            self._require_open()
        key = require_key(key)
        points, deleted = self._writes.points, self._deleted
        if key in points:
            value = _plain(points[key])
        elif deleted is not _NOTHING_DELETED and deleted.stack(key):
            value = None
        else:
            self._reads.add_key(key)
            value = self._owner.versions.get(key, self.read_at)
        return default if value is None else value

    def get_many(self, keys: Sequence[bytes]) -> list[bytes | None]:
        """The values of `keys`, in the order of `keys`; None for an absent key."""
        self._require_open()
        wanted = [require_key(key) for key in key_list(keys)]
        points, found = self._writes.points, dict[bytes, bytes | None]()
        for key in wanted:
            if key in points:
                found[key] = _plain(points[key])
            elif self._deleted and self._deleted.stack(key):
                found[key] = None
            else:
                self._reads.add_key(key)
        stored = [key for key in dict.fromkeys(wanted) if key not in found]
        if stored:
            values = self._owner.versions.get_many(stored, self.read_at)
            found.update(zip(stored, values, strict=True))
        return [found[key] for key in wanted]

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
        LIMIT.check("limit", limit)
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
        new = CHANGE.check("change", change)(self.get(key))
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

    def delete_range(
        self, start: bytes | None = None, end: bytes | None = None, prefix: bytes | None = None
    ) -> None:
        """Delete `start <= key < end`, or all keys with `prefix`, including own writes made
        before."""
        self._writes.delete_range(start, end, prefix)
        self._deleted = self._deleted.adding(RangeTombstone(*self._writes.ranges[-1], 1))

    def put_rows(
        self,
        keys: Sequence[bytes],
        values: Sequence[bytes],
        expires: Expires | list[int | None] | None = None,
        rows: Sequence[bytes] = (),
    ) -> None:
        """Set keys of a table: see `kvstore.tables`. A list has the due time of each key."""
        if expires is not None and not isinstance(expires, list):
            expires = self._owner.due(expires)
        self._writes.put_rows(keys, values, expires, rows)

    def delete_rows(self, keys: Sequence[bytes], spans: Sequence[tuple[bytes, bytes]] = ()) -> None:
        """Delete keys and spans of keys of a table: see `kvstore.tables`."""
        for start, end in spans:
            self._writes.delete_row_range(start, end)
            self._deleted = self._deleted.adding(RangeTombstone(start, end, 1))
        self._writes.delete_rows(keys)

    @overload
    def table(self, name: str, *, row: type[Row]) -> Table[Row]: ...

    @overload
    def table(self, name: str) -> Table: ...

    def table(self, name: str, *, row: type[Any] | None = None) -> Table[Any]:
        """The table `name`, read and written by this transaction."""
        self._require_open()
        return table_of(self, self._owner.catalogue, name, row)

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

    def __repr__(self) -> str:
        if self.timestamp is not None:
            return f"<kvstore.Transaction, committed at {self.timestamp}>"
        if not self._is_open:
            return "<kvstore.Transaction, ended without a commit>"
        return f"<kvstore.Transaction at {self.read_at}, {self._writes.told()}>"

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


# --------------------------------------------------------------------------------------------------
# Running a transaction again until it commits, a bounded number of times.
#
# The bound of the waits doubles, and each wait is drawn at random below its bound ("full jitter"),
# so that transactions that collided once do not collide again in step.


def transact(
    begin: Callable[[], Transaction],
    body: Callable[[Transaction], T],
    *,
    attempts: int | None = None,
    wait: Callable[[float], None] = time.sleep,
    draw: Callable[[], float] = random.random,
) -> T:
    """Run `body` in a transaction and commit it, again after each conflict; returns its result.

    `body` may run several times, so it should change nothing but the transaction. `wait` takes
    seconds, and `draw` returns a number in 0..1. Raises the last `ConflictError` after `attempts`.
    """
    function("pass a function that takes the transaction").check("body", body)
    attempts = TRANSACT_ATTEMPTS if attempts is None else attempts
    COUNT.check("attempts", attempts)
    for attempt in range(attempts - 1):
        with suppress(ConflictError):
            return _once(begin, body)
        wait(draw() * min(TRANSACT_WAIT_S_MAX, TRANSACT_WAIT_S_MIN * 2**attempt))
    return _once(begin, body)


def _once(begin: Callable[[], Transaction], body: Callable[[Transaction], T]) -> T:
    with begin() as transaction:
        return body(transaction)


# --------------------------------------------------------------------------------------------------
# Conditional writes: they happen only if a key or span has the state that the caller expects.
#
# The condition is checked under the commit lock, right before the write, so no other commit comes
# between check and write. A value under a tombstone of either kind counts as absent.
#
# Invariants
# 1. A write whose condition does not hold takes no timestamp and writes nothing.
# 2. The check compares the value before the time. If both differ, the error names the value.


class Unchecked(Enum):
    """The type of `UNCHECKED`: None, as an expected value, means that the key is absent."""

    UNCHECKED = "unchecked"


UNCHECKED: Final = Unchecked.UNCHECKED


def _read_expected(given: object) -> bytes | Unchecked | Refused | None:
    if isinstance(given, bytearray | memoryview):
        return bytes(given)
    return given if given is None or isinstance(given, bytes | Unchecked) else REFUSED


_EXPECTED: Final = ArgumentKind(_read_expected, "pass bytes, or None for an absent key")
"""A text would never equal a value."""


class _CalledOffError(Exception):
    """Stops a commit that has nothing to write."""


class Conditional:
    """Conditional commits of one store."""

    def __init__(self, parts: Parts) -> None:
        self._versions, self._committer = parts.versions, parts.committer
        self._reads = parts.reads

    def write_if(
        self,
        writes: WriteSet,
        key: bytes,
        *,
        expected: BytesLike | Unchecked | None,
        unchanged_since: int | None,
        durability: Durability | None,
        token: RequestToken | None = None,
    ) -> Timestamp:
        """Commit `writes` if `key` has the value `expected` (None: absent) and no version newer
        than `unchanged_since`. One look-up each.

        Raises `PreconditionError` if the condition does not hold, `HistoryGoneError` if history
        that would decide it is gone.
        """
        key, expected = require_key(key), _EXPECTED.check("expected", expected)
        if expected is UNCHECKED and unchanged_since is None:
            raise UsageError(
                "a conditional write without a condition", "pass expected or unchanged_since"
            )
        if unchanged_since is not None and unchanged_since >= self._committer.upper:
            # Complete the time now: the check must not, because its commit may have taken a time.
            with suppress(HistoryGoneError, NotYetWrittenError):  # which the check raises
                self._committer.readable(unchanged_since)

        def check() -> None:
            if unchanged_since is not None:
                self._reads.require_kept(Span.of_key(key), unchanged_since)
            if expected is not UNCHECKED:
                found = self._newest(key)
                if found != expected:
                    raise PreconditionError(key, expected=expected, found=found)
            if unchanged_since is not None:
                self._require_unchanged(key, unchanged_since)

        return self._committer.commit(writes, durability=durability, check=check, token=token)

    def pop(
        self, key: bytes, *, durability: Durability | None, token: RequestToken | None = None
    ) -> bytes | None:
        """Delete `key` and return its value; None, with nothing written, if the key is absent."""
        writes = WriteSet()
        writes.delete(key)
        found: bytes | None = None

        def check() -> None:
            nonlocal found
            found = self._newest(key)
            if found is None:
                raise _CalledOffError

        self._commit_unless_called_off(writes, check, durability, token)
        return found

    def delete_live_range(
        self,
        writes: WriteSet,
        span: Span,
        *,
        durability: Durability | None,
        token: RequestToken | None = None,
    ) -> Timestamp | None:
        """Commit a range delete of `span` if a key in it is alive; else return None.

        The search for the first live key passes over dead keys, so it runs outside the lock. Under
        the lock one look-up of that key is enough.
        """
        alive = self._first_live(span)
        if alive is None and token is None:
            return None

        def check() -> None:
            if (alive is None or self._newest(alive) is None) and self._first_live(span) is None:
                raise _CalledOffError

        return self._commit_unless_called_off(writes, check, durability, token)

    # -- inside -----------------------------------------------------------------------------

    def _commit_unless_called_off(
        self,
        writes: WriteSet,
        check: Callable[[], None],
        durability: Durability | None,
        token: RequestToken | None = None,
    ) -> Timestamp | None:
        try:
            return self._committer.commit(writes, durability=durability, check=check, token=token)
        except _CalledOffError:
            return None

    def _newest(self, key: bytes) -> bytes | None:
        return self._versions.get(require_key(key), self._committer.upper - 1)

    def _first_live(self, span: Span) -> bytes | None:
        at = self._committer.upper - 1
        keys, _ = next(self._versions.scan(span, at), ((), ()))
        if at < self._committer.frontiers.floor:
            # GC or a clear may have removed the key meanwhile: look again, under the lock. A loop
            # might not end, because a clear that fails leaves the floor raised.
            with self._committer.lock:
                keys, _ = next(self._versions.scan(span, self._committer.upper - 1), ((), ()))
        return keys[0] if keys else None

    def _require_unchanged(self, key: bytes, since: int) -> None:
        newest = self._versions.revisions(key)[:1]
        if newest and newest[0][0] > since:
            raise PreconditionError(
                key,
                expected=f"nothing written since {since}",
                found=f"a version at {Timestamp(newest[0][0])}",
            )


# --------------------------------------------------------------------------------------------------
# Updates in place: the value of a key is read and written in one commit.
#
# The function of the caller runs under the commit lock. So no commit comes between its read and its
# write, an update never conflicts, and the change feed has the new value.
#
# Invariants
# 1. The function gets the newest value of the key, and runs once.
# 2. If the function raises, or commits to the store itself, the update writes nothing.
#
# A counter is decimal text, which a person and every other reader of the store can read:
#
#     counter := "-"? digit+         an integer of 64 bits; an absent key counts as 0

Updating: TypeAlias = "Callable[[bytes | None], bytes | None]"
"""From the value of a key, None where it is absent, to its new value; None deletes the key."""
CHANGE: Final = function("pass a function that takes the value")

COUNTER_MAX: Final = (1 << 63) - 1
_DIGITS_MAX: Final = 19


class _UnchangedError(Exception):
    """Calls off the commit of an update that leaves an absent key absent."""


class Updates:
    """Updates in place of one store."""

    def __init__(self, parts: Parts) -> None:
        self._versions, self._committer = parts.versions, parts.committer

    def update(
        self,
        key: bytes,
        change: Updating,
        *,
        due: int | None = None,
        durability: Durability | None,
        token: RequestToken | None = None,
    ) -> bytes | None:
        """See `Store.update`. The new value expires at `due`."""
        key, change = require_key(key), CHANGE.check("change", change)
        writes = WriteSet()
        if key >= RESERVED:
            writes.delete(key)  # refuses a key that no put could have
        committer, frontiers = self._committer, self._committer.frontiers
        new: bytes | None = None

        def check() -> None:
            nonlocal new
            upper = frontiers.upper
            old = self._versions.get(key, upper - 1)
            new = change(old)
            if frontiers.upper != upper:
                raise UsageError(
                    f"the function that updates {printable(key)} has committed to the store",
                    "use a transaction to write several keys",
                )
            if new is None:
                if old is None:
                    raise _UnchangedError
                writes.delete(key)
                return
            if due is None:
                writes.put(key, new)
            else:
                writes.put_expiring(key, new, due)
            if type(new) is not bytes:
                new = bytes(new)

        try:
            committer.commit(writes, durability=durability, check=check, token=token)
        except _UnchangedError:
            return None
        return new

    def increment(
        self,
        key: bytes,
        by: int,
        *,
        due: int | None = None,
        durability: Durability | None,
        token: RequestToken | None = None,
    ) -> int:
        """See `Store.increment`."""
        found = self.update(key, adding(key, by), due=due, durability=durability, token=token)
        assert found is not None, "a counter is never deleted"
        return int(found)


def adding(key: bytes, by: int) -> Updating:
    """The change that adds `by` to the counter at `key`."""
    return partial(_added, key, INTEGER.check("by", by))


def counted(key: bytes, value: bytes | None) -> int:
    """The number of the counter at `key`. Raises `NotACounterError`."""
    if value is None:
        return 0
    digits = value[1:] if value[:1] == b"-" else value
    if not digits.isdigit() or len(digits) > _DIGITS_MAX:
        raise NotACounterError(
            f"the value of {printable(key)} is no counter: {printable(value)}",
            "counters are integers in decimal text; use update for other values",
        )
    return int(value)


def _added(key: bytes, by: int, value: bytes | None) -> bytes:
    total = counted(key, value) + by
    if not -COUNTER_MAX - 1 <= total <= COUNTER_MAX:
        raise NotACounterError(
            f"the counter {printable(key)} would be {total}, which needs more than 64 bits",
            "count in several keys",
        )
    return b"%d" % total


# --------------------------------------------------------------------------------------------------
# The expiry of one key: how long until it comes, and its cancellation.
#
# Invariant: `persist` looks and writes under the commit lock. So either the key expires before it,
# and nothing is written, or the key stays.


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
        self, key: bytes, *, durability: Durability | None, token: RequestToken | None = None
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
            return committer.commit(writes, durability=durability, check=check, token=token)
        except _NothingExpiresError:
            return None


# --------------------------------------------------------------------------------------------------
# The versioned undo of a span: new versions that restore the state at an earlier time.
#
# A revert removes no history: readers of history see one more commit. It finds the changes since
# then through the change index, or by a pass over the span where that costs less. It is one commit
# and therefore bounded: at most `REVERT_ROWS_MAX` keys and `BATCH_BYTES_MAX` bytes.


def revert_range(
    begin: Callable[[], Transaction],
    changed: Callable[[int], Iterator[Change]],
    versions: Versions,
    span: Span,
    to: int,
) -> Timestamp | None:
    """Restore the state of `span` at `to`, at one new timestamp; None if the state is the same.

    `changed(upto)` gives the latest changes of the span in `(to, upto]`. The revert starts again if
    another commit writes into the span meanwhile, and raises `ConflictError` if that happens too
    often.
    """

    def once() -> Timestamp | None:
        with begin() as transaction:
            if to < transaction.read_at:
                transaction.require_unchanged(span)
                restore_keys(transaction, changed(transaction.read_at), versions, to)
        return transaction.timestamp

    for _ in range(REVERT_ATTEMPTS - 1):
        with suppress(ConflictError):
            return once()
    return once()


def restore_keys(
    transaction: Transaction, changes: Iterator[Change], versions: Versions, to: int
) -> None:
    """Write, in `transaction`, the value that each changed key had at `to`.

    Raises `UsageError` for more than `REVERT_ROWS_MAX` keys. Costs two look-ups for each changed
    key.
    """
    rows = 0
    for key in _candidates(changes, versions, to):
        old, new = versions.get(key, to), versions.get(key, transaction.read_at)
        if old == new:
            continue
        if old is None:
            transaction.delete(key)
        else:
            transaction.put(key, old)
        rows += 1
        if rows > REVERT_ROWS_MAX:
            raise UsageError(
                f"more than {REVERT_ROWS_MAX} keys changed since {to}",
                "revert smaller spans, one after the other",
            )


def _candidates(changes: Iterator[Change], versions: Versions, to: int) -> Iterator[bytes]:
    """Keys that may differ from their state at `to`: written keys, and keys under range deletes."""
    for change in changes:
        if change.op != "delete_range":
            yield change.key
            continue
        for keys, _ in versions.scan(Span(change.key, change.end_key), to):
            yield from keys
