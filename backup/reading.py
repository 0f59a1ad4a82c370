"""Reads straight from the parts of a collection, as of any time that it covers. Nothing is
restored.

    reader    leases on all chains, a snapshot of each at its newest instant
    a key     newest batch first: the filters of its parts, then one row group
    a span    the parts that touch it, merged

Bytes that were fetched are kept near the reader (`kvstore.storage.wrapped`).

Invariants
1. A read answers from the snapshots of one `refresh`, which leases hold against compaction and
   expiry. A read under way keeps the snapshots with which it began.
2. Where a lease has run out and parts are gone, the leases are taken anew and the read is
   repeated, or refused. It is never answered from half of the history.
3. Every byte is checked before it is believed, in the cache too. Where a check fails, the cache
   forgets the part and the read is repeated once, from the storage itself.
4. A read of many rows is repeated while it has given no row. After that it raises the error.
"""

from __future__ import annotations

import os
import sys
from bisect import bisect_left
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from functools import cached_property, partial
from itertools import chain, groupby
from operator import itemgetter
from typing import Any, Final, NamedTuple, Protocol, TypeVar, overload

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc
from typing_extensions import Self

from kvstore.backup.chains import (
    RETENTION,
    Chains,
    covers,
    gone,
    instant_of,
    labels_of,
    no_backup,
    time_or_label,
)
from kvstore.backup.expiries import has_expiries, with_dues
from kvstore.backup.rows import tables_in
from kvstore.backup.shard import (
    EMPTY,
    OP_DELETE_RANGE,
    OP_PUT,
    AsOf,
    ReadLease,
    Shard,
    ShardPart,
    ShardSnapshot,
    Window,
)
from kvstore.backup.shard.rows.part_reader import MissingPartError, OpenedPart
from kvstore.backup.shard.shard_snapshot import snapshot_unheld
from kvstore.base.arguments import COUNT, LIMIT, NUMBER, is_many, key_list
from kvstore.base.clock import WallClock
from kvstore.base.forks import own
from kvstore.base.paths import require_path
from kvstore.base.span import Span, require_key
from kvstore.base.timestamp import TIMESTAMP_MAX, TimeLike, Timestamp, is_oldest
from kvstore.changes import Change, Order, Revisions
from kvstore.changes.windows import ORDER_CHOICE, REVISIONS_CHOICE
from kvstore.codec.shown import ShownRows
from kvstore.errors import (
    AccessDeniedError,
    ClosedError,
    CorruptionError,
    HistoryGoneError,
    LeaseExpiredError,
    NotYetWrittenError,
    OutOfSpaceError,
    UsageError,
    printable,
)
from kvstore.limits import (
    JOIN_COLUMNS_ROWS_MAX,
    JOIN_VALUE_BYTES_MAX,
    READER_CACHE_BYTES,
    READER_KEYS_BY_BLOCK_MAX,
    READER_PARTS_MAX,
    ROW_GROUP_ROWS_MAX,
)
from kvstore.mvcc import Fragments, RangeTombstone, Version
from kvstore.mvcc.arrow import rows_schema
from kvstore.readable import Readable, ReadableAt
from kvstore.storage.wrapped import InDirectory, InMemory, KeptBytes
from kvstore.tables import Table
from kvstore.tables.catalogue import Catalogue
from kvstore.tables.joins import (
    Asked,
    AskedSpans,
    Numbers,
    OrderedLabels,
    RowsFound,
    Search,
    Side,
    directed,
    in_order,
    placed,
    present,
    reached_times,
    rows_of_keys,
    value_columns,
    within,
)
from kvstore.tables.sources import PastRows
from kvstore.tables.table import Row, table_on

_T = TypeVar("_T")

_EVERYTHING = Search(age_max=TIMESTAMP_MAX, is_gone_null=False, bytes_max=TIMESTAMP_MAX)


class CollectionReader(Readable):
    """Reads of a collection, as `Store` has them. `Collection.open` makes it; it is for one thread,
    and for a `with` statement, which ends its leases."""

    def __init__(
        self, chains: Chains, kept: KeptBytes, clock: WallClock, as_of: TimeLike | None
    ) -> None:
        """`chains` keep the bytes of parts in `kept`. Raises as `Collection.open` does."""
        self._chains, self._kept, self._clock = chains, kept, clock
        self._opened: OrderedDict[str, OpenedPart] = OrderedDict()
        self._held: list[Held] = []
        self._pinned: int | None = None
        self._is_open = True
        own(self, f"a reader of {chains.where}")
        try:
            self.refresh()
            self._newest().shard.require_newest()
            if as_of is not None:
                at = self._time(as_of, "as_of")
                self._covering(at)
                self._pinned = at
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __repr__(self) -> str:
        name = f"kvstore.backup.CollectionReader {self._chains.where}"
        if not self._held:
            return f"<{name}, closed>"
        return f"<{name} as of {self.as_of}, since {self.since}, upper {self.upper}>"

    def close(self) -> None:
        """End the leases. Closing twice does nothing more."""
        self._is_open = False
        self._opened.clear()
        while self._held:
            self._held.pop().leave()

    # -- times ------------------------------------------------------------------------------

    @property
    def since(self) -> Timestamp:
        """The oldest instant of the newest chain that can be read."""
        return Timestamp(self._newest().since)

    @property
    def upper(self) -> Timestamp:
        """The first instant that cannot be read yet, as of the last `refresh`."""
        return Timestamp(self._newest().upper)

    @property
    def as_of(self) -> Timestamp:
        """The time of reads that give none: the time of `open`, or the newest instant."""
        return Timestamp(self._newest().upper - 1 if self._pinned is None else self._pinned)

    def refresh(self) -> Timestamp:
        """See the backups that were made since; returns the new `upper`.

        Costs two requests and one for each chain, and no write, unless a backup, an expiry or a
        compaction came between. Reads that have begun keep the backups that they began with.
        """
        if not self._is_open:
            raise ClosedError("the reader")
        hold_chains(self._chains, self._held)
        return self.upper

    # -- keys -------------------------------------------------------------------------------

    def get_many(
        self, keys: Sequence[bytes], as_of: TimeLike | Sequence[TimeLike] | None = None
    ) -> list[bytes | None]:
        """The values of `keys`, in their order; None for an absent key. `as_of` is one time for all
        keys, or a list that has a time for each key.

        A key costs at most a request for the end of each part that may have it and was not read
        before, and one for a row group. Raises `HistoryGoneError` in a hole between chains or below
        the oldest instant, `NotYetWrittenError` at or above `upper`.
        """
        wanted = [require_key(key) for key in key_list(keys)]
        times = None
        if is_many(as_of):
            times = [self._time(at, "as_of") for at in as_of]
            if len(times) != len(wanted):
                raise UsageError(f"{len(wanted)} keys and {len(times)} times", "pass one per key")
        elif as_of is not None:
            times = [self._time(as_of, "as_of")] * len(wanted)
        if not wanted:
            return []
        by_block = len(wanted) <= READER_KEYS_BY_BLOCK_MAX

        def answer() -> list[bytes | None]:
            at = [int(self.as_of)] * len(wanted) if times is None else times
            for time in set(at):
                self._covering(time)
            asked = Asked(pa.array(wanted, pa.binary()), np.array(at, np.int64), 0)
            answers = CollectionAnswers(self.held(), self._open_part if by_block else None)
            found = answers.answer(asked, _EVERYTHING)
            assert found is not None, "no bound was given"
            values: list[bytes | None] = found[0].to_pylist()
            return values

        return self._repeated(answer)

    def history(self, key: bytes) -> list[Version]:
        """The versions of `key` up to `as_of`, newest first, of the chain that covers it."""
        at, span = self._at(None), Span.of_key(require_key(key))
        return self._repeated(lambda: versions_of(self._covering(at).snapshot, span, at))

    # -- spans ------------------------------------------------------------------------------

    def scan_batches(
        self,
        start: bytes | None = None,
        end: bytes | None = None,
        prefix: bytes | None = None,
        as_of: TimeLike | None = None,
        reverse: bool = False,
        limit: int | None = None,
        *,
        batch_rows: int | None = None,
    ) -> pa.RecordBatchReader:
        """The rows of `scan` as Arrow record batches `key`, `value`. Memory is bounded.

        Keys of tables are left out, unless the span begins among them. An error of the storage is
        raised by the batch that meets it.
        """
        span, left = Span.of(start, end, prefix), LIMIT.check("limit", limit)
        most = sys.maxsize if batch_rows is None else COUNT.check("batch_rows", batch_rows)

        def read(held: Held, at: int) -> Iterator[pa.RecordBatch]:
            return rows_of(held.snapshot, held.plain(span), at, reverse=reverse)

        def rows() -> Iterator[pa.RecordBatch]:
            nonlocal left
            for batch in found:
                rest = batch if left is None else batch.slice(0, left)
                left = None if left is None else left - rest.num_rows
                while rest.num_rows:
                    yield rest.slice(0, most)
                    rest = rest.slice(most)
                if left == 0:
                    return

        found = self._streamed(as_of, read)
        return pa.RecordBatchReader.from_batches(rows_schema(), iter(()) if left == 0 else rows())

    def changes(
        self,
        since: TimeLike,
        upto: TimeLike | None = None,
        start: bytes | None = None,
        end: bytes | None = None,
        revisions: Revisions = "all",
        order: Order = "key",
        *,
        prefix: bytes | None = None,
    ) -> Iterator[Change]:
        """The changes of the window `(since, upto]`, as `Store.changes` gives them.

        In time order the changes of one commit come by key, range deletes first; this order takes
        memory for all changes. Raises `HistoryGoneError` unless one chain has the whole window.
        """
        REVISIONS_CHOICE.check("revisions", revisions)
        ORDER_CHOICE.check("order", order)
        high = self._at(upto)
        low = int(self._covering(high).since) if is_oldest(since) else self._time(since, "since")
        if low > high and upto is not None:
            raise UsageError(f"{Timestamp(low)} is above upto {Timestamp(high)}", "swap them")
        is_latest, span = revisions == "latest", Span.of(start, end, prefix)

        def require(held: Held) -> None:
            is_whole = is_latest and (low == 0 or covers(held, low))  # a state, or two whole states
            if not is_whole and low < held.since:
                raise HistoryGoneError(as_of=Timestamp(low), since=Timestamp(held.since))

        def read(held: Held, at: int) -> Iterator[Change]:
            require(held)
            how: Any = {"since": low, "upto": at, "latest": is_latest}
            return changes_of(held.snapshot, held.plain(span), opened=self._open_part, **how)

        require(self._covering(high, low))
        found = self._streamed(upto, read, low)
        if order == "time":
            by_time = sorted(found, key=lambda change: (change[0], change.op != "delete_range"))
            found = iter(by_time)
        return ShownRows("changes", Change._fields, found)

    # -- joins and tables -------------------------------------------------------------------

    def join_side(self) -> Side:
        """The side of this reader in a join of several sources: see `kvstore.join`. No label may
        ask for a time at or above `upper`."""
        return Side(partial(reader_answers, self))

    @overload
    def table(self, name: str, as_of: TimeLike | None = None, *, row: type[Row]) -> Table[Row]: ...

    @overload
    def table(self, name: str, as_of: TimeLike | None = None) -> Table: ...

    def table(
        self, name: str, as_of: TimeLike | None = None, *, row: type[Any] | None = None
    ) -> Table[Any]:
        """The table `name` as it was at `as_of`, with its history up to then. It is only read."""
        snapshot = ReaderSnapshot(self, Timestamp(self._at(as_of)))
        return table_on(name, PastRows(self, snapshot, Catalogue(self)), row)

    # -- inside -----------------------------------------------------------------------------

    def held(self) -> Sequence[Held]:
        """The chains that are held, oldest first."""
        if not self._is_open:
            raise ClosedError("the reader")
        if not self._held:
            raise no_backup(self._chains.where)
        return self._held

    def _newest(self) -> Held:
        return self.held()[-1]

    def _time(self, time: TimeLike, name: str) -> int:
        labels = partial(labels_of, self._held)
        at = time_or_label(time, labels, name=name, now=self._clock.wall_ns)
        return instant_of(self._held, at)

    def _at(self, as_of: TimeLike | None) -> int:
        return int(self.as_of) if as_of is None else self._time(as_of, "as_of")

    def _covering(self, at: int, since: int = -1) -> Held:
        """The newest chain that covers a time, with the history after `since` if one has it."""
        newest = self._newest()
        if at >= newest.upper:
            raise NotYetWrittenError(as_of=Timestamp(at), upper=Timestamp(newest.upper))
        found = [held for held in self._held if covers(held, at)]
        if not found:
            raise gone(self._held, at)
        return next((held for held in reversed(found) if held.since <= since), found[-1])

    @contextmanager
    def using(self, held: Held) -> Iterator[None]:
        """Keep a snapshot open while rows of it are taken."""
        held.users += 1
        try:
            yield
        except CorruptionError as error:
            self._forget(error)
            raise
        finally:
            held.users -= 1
            held.close_if_left()

    def _open_part(self, part: ShardPart) -> OpenedPart:
        """A part, opened by blocks; the last ones stay open."""
        found = self._opened.get(part.name)
        if found is None or found.part != part:
            found = OpenedPart(self._chains.blob, part, by_block=True)
            self._opened[part.name] = found
            if len(self._opened) > READER_PARTS_MAX:
                self._opened.popitem(last=False)
        self._opened.move_to_end(part.name)
        return found

    def _repeated(self, read: Callable[[], _T]) -> _T:
        """The result of `read`, which is repeated once after a lease that ran out, or damage that
        may be in the cache alone."""
        try:
            return read()
        except (LeaseExpiredError, CorruptionError) as error:
            self._mend(error)
        return read()

    def _streamed(
        self, as_of: TimeLike | None, read: Callable[[Held, int], Iterator[_T]], since: int = -1
    ) -> Iterator[_T]:
        """The items of `read` at `as_of`; before the first one it is repeated as by `_repeated`."""
        at = self._at(as_of)
        held = self._covering(at, since)

        def items() -> Iterator[_T]:
            nonlocal at, held
            for is_last in (False, True):
                with self.using(held):
                    try:
                        found = read(held, at)
                        first = next(found, None)
                    except (LeaseExpiredError, CorruptionError) as error:
                        if is_last:
                            raise
                        self._mend(error)
                        at = self._at(as_of)
                        held = self._covering(at, since)
                        continue
                    if first is not None:
                        yield first
                        yield from found
                    return

        return items()

    def _mend(self, error: LeaseExpiredError | CorruptionError) -> None:
        self._forget(error) if isinstance(error, CorruptionError) else self.take_anew()

    def take_anew(self) -> None:
        """Take the leases anew: one has run out, because nothing was read for a long time."""
        old, self._held = self._held, []
        try:
            self.refresh()
        except BaseException:  # the next read tries again
            old, self._held = self._held, old
            raise
        finally:
            for each in old:
                each.leave()

    def _forget(self, error: CorruptionError) -> None:
        """Have the bytes of the damaged part fetched anew."""
        for held in self._held:
            for part in (part for batch in held.snapshot.batches for part in batch.parts):
                if part.name in error.where and not isinstance(error, MissingPartError):
                    self._kept.forget(part.name)
                    self._opened.pop(part.name, None)


class ReaderSnapshot(ReadableAt):
    """The reads of a table, all at one time."""

    def __init__(self, reader: CollectionReader, as_of: Timestamp) -> None:
        self.as_of = as_of
        self._reader = reader

    def join_side(self) -> Side:
        """The side of the reader in a join, up to the time of the snapshot."""
        return Side(partial(reader_answers, self._open(), self.as_of))

    def _open(self) -> CollectionReader:
        self._reader.held()
        return self._reader


# --------------------------------------------------------------------------------------------------
# Chains that a long reader holds: a lease on each, and a snapshot at its newest instant.
#
# Invariants
# 1. A snapshot that is in use stays open, also after the reader has moved on.
# 2. A lease is moved up to the time that expiry has set, when the reader moves on. So a reader that
#    refreshes does not hold expiry back for long.
# 3. A storage that takes no writes takes no lease. Then a part that is gone raises an error.


class Held:
    """One chain, which covers `[since, upper)`."""

    def __init__(self, shard: Shard, lease: ReadLease | None = None) -> None:
        """Takes a lease unless one is given."""
        self.shard = shard
        self._lease = lease or _leased(shard)
        state = shard.refresh()
        self.upper = state.upper
        self.since = state.since if self._lease is None else self._lease.since
        self.kept = state.kept
        newest = self.upper - 1
        if self._lease is None:
            self.snapshot = snapshot_unheld(shard.log, newest)
        else:
            self.snapshot = self._lease.snapshot(newest)
        self.users = 0
        self._is_left = self._is_replaced = False
        self._is_mixed: bool | None = None

    def moved(self) -> Held | None:
        """The chain as it is now: this object if nothing has changed, None if it has expired."""
        state = self.shard.refresh()
        lease = self._lease
        if state.since == EMPTY or (lease is not None and lease.name not in state.leased):
            self.leave()
            return None if state.since == EMPTY else Held(self.shard)
        if lease is not None:
            self.snapshot.renew()
            retention = state.critical.get(RETENTION)
            if retention is not None and lease.since < retention.since < EMPTY:
                lease.downgrade_since(retention.since)
                self.since = lease.since
        if state.upper == self.upper and state.batches == self.snapshot.batches:
            self.kept = state.kept
            return self
        fresh = Held(self.shard, lease)
        self._is_replaced = True
        self.close_if_left()
        return fresh

    def plain(self, span: Span) -> Span:
        """`span` without the keys of tables and expiries, unless it begins among them."""
        if span.plain() == span:
            return span
        if self._is_mixed is None:
            self._is_mixed = plain_span(self.snapshot, Span()) != Span()
        return span.plain() if self._is_mixed else span

    def leave(self) -> None:
        """End the lease, once no snapshot of it is in use here."""
        self._is_left = True
        self.close_if_left()

    def close_if_left(self) -> None:
        """Close the snapshot if it is no longer wanted and not in use."""
        if self.users or not (self._is_left or self._is_replaced):
            return
        self.snapshot.close()
        if self._is_left and self._lease is not None:
            self._lease.leave()


def hold_chains(chains: Chains, held: list[Held]) -> None:
    """Move `held`, the chains that a reader holds, on to the chains of now, oldest first. After a
    failure each chain is held as it was, or as it is now."""
    record = chains.read()
    names = () if record is None else record.chains
    now = {each.shard.name: each for each in held}
    for name in names:
        found = _hold_chain(chains, name, now.get(name))
        if found is None:
            now.pop(name, None)
        else:
            now[name] = found
        held[:] = now.values()
    for name in now.keys() - set(names):
        now.pop(name).leave()
    held[:] = now.values()


def _hold_chain(chains: Chains, name: str, held: Held | None) -> Held | None:
    """Hold the chain `name`, which is `held` already if that is given. None if it has no backup,
    or has just expired."""
    if held is not None:
        with suppress(LeaseExpiredError):  # another process has just ended the lease
            return held.moved()
        held.leave()
    shard = chains.find(name)
    if shard is None or not shard.upper or shard.since == EMPTY:
        return None
    with suppress(HistoryGoneError):
        return Held(shard)
    return None


def _leased(shard: Shard) -> ReadLease | None:
    try:
        return shard.reader()
    except (AccessDeniedError, OutOfSpaceError):
        return None


# --------------------------------------------------------------------------------------------------
# The cache of a reader, as its owner asks for it.


def keeping(
    directory: str | os.PathLike[str] | None, bytes_max: int | None
) -> InDirectory | InMemory:
    """Keeps `bytes_max` bytes in a directory, or in memory where none is given.

    Raises `UsageError` for a number below 0 and for a URL, another `KVStoreError` where the
    directory cannot be made.
    """
    size = READER_CACHE_BYTES if bytes_max is None else bytes_max
    NUMBER.check("cache_bytes", size)
    if directory is None:
        return InMemory(size)
    return InDirectory(require_path(directory, name="cache"), size)


# --------------------------------------------------------------------------------------------------
# Rows of a snapshot in the forms that a store gives: live rows, versions of a key, changes.

_KEY = itemgetter(0)


def rows_of(
    snapshot: ShardSnapshot, span: Span, at: int, *, reverse: bool
) -> Iterator[pa.RecordBatch]:
    """The rows of `span` that are alive at `at`. In reverse, the span is read piece by piece."""
    if not reverse:
        for batch in snapshot.view(AsOf(at), span):
            yield _pairs(batch)
        return
    rows = sum(batch.rows for batch in snapshot.batches)
    for split in reversed(snapshot.splits(rows // ROW_GROUP_ROWS_MAX + 1, span)):
        for batch in reversed(list(snapshot.view(AsOf(at), split.span))):
            yield _pairs(batch).take(pa.array(range(batch.num_rows - 1, -1, -1)))


def plain_span(snapshot: ShardSnapshot, span: Span) -> Span:
    """`span` without the keys of tables and expiries, unless it begins among them."""
    if span.plain() == span or tables_in(snapshot, span) or has_expiries(snapshot, span):
        return span.plain()
    return span


def state_of(
    held: AbstractContextManager[tuple[Shard, ShardSnapshot]], span: Span
) -> pa.RecordBatchReader:
    """The rows that are alive at the time of a snapshot, which is taken by this call and held until
    they are read to their end or dropped."""

    def rows() -> Iterator[pa.RecordBatch]:
        with held as (_, snapshot):
            # An empty batch first: taking it begins the snapshot, within the call.
            yield pa.RecordBatch.from_pylist([], schema=rows_schema())
            span_read = plain_span(snapshot, span)
            yield from rows_of(snapshot, span_read, snapshot.as_of, reverse=False)

    batches = rows()
    next(batches)
    return pa.RecordBatchReader.from_batches(rows_schema(), batches)


def versions_of(snapshot: ShardSnapshot, key: Span, at: int) -> list[Version]:
    """The versions of the one key in a span, newest first, up to `at`."""
    found: dict[int, bytes | None] = {}
    deleted: list[int] = []
    for batch in snapshot.view(Window(-1, at), key):
        columns = (batch.column(name).to_pylist() for name in ("timestamp", "op", "value"))
        for timestamp, op, value in zip(*columns, strict=True):
            if op == OP_DELETE_RANGE:
                deleted.append(timestamp)
            else:
                found[timestamp] = value
    for timestamp in deleted:
        found.setdefault(timestamp, None)  # of one commit, a write counts more than a range delete
    return [Version(key.start, Timestamp(t), found[t]) for t in sorted(found, reverse=True)]


def changes_of(
    snapshot: ShardSnapshot,
    span: Span,
    *,
    since: int,
    upto: int,
    latest: bool,
    opened: Callable[[ShardPart], OpenedPart],
) -> Iterator[Change]:
    """The changes of `(since, upto]` by key, as `kvstore.mvcc.passes` defines them, with the
    times at which their values expire."""
    if since >= upto:
        return iter(())
    # A window from 0 begins before all time: a store may have been given commits at 0 and below 1.
    window = Window(since or -1, upto)
    found = _changes_of(snapshot, span, window, latest=latest, opened=opened)
    if not has_expiries(snapshot):
        return found
    return with_dues(snapshot, found, AsOf(upto) if latest else window, span)


def _changes_of(
    snapshot: ShardSnapshot,
    span: Span,
    window: Window,
    *,
    latest: bool,
    opened: Callable[[ShardPart], OpenedPart],
) -> Iterator[Change]:
    since, upto = max(window.since, 0), window.upto
    fragments = Fragments.of(
        (start, end, time)
        for start, end, time in snapshot.range_tombstones(window, span, opened=opened)
    )
    is_state = latest and since == 0
    ranges: list[RangeTombstone] = []
    if not is_state:
        ranges = fragments.tombstones(span, since=since, upto=upto, latest=latest)
    waiting = iter(ranges)
    tombstone = next(waiting, None)
    for key, rows in groupby(_points(snapshot, window, span), key=_KEY):
        while tombstone is not None and tombstone.start <= key:
            yield _range_change(tombstone)
            tombstone = next(waiting, None)
        if not latest:
            for row in reversed(list(rows)):
                yield _point_change(row)
            continue
        newest = next(rows)
        hidden = fragments and fragments.newest(key, upto) > newest[1]
        if not hidden and (newest[2] == OP_PUT or not is_state):
            yield _point_change(newest)
    while tombstone is not None:
        yield _range_change(tombstone)
        tombstone = next(waiting, None)


def _points(snapshot: ShardSnapshot, window: Window, span: Span) -> Iterator[Any]:
    """Key, time, operation and value of the puts and deletes of a window, newest first."""
    return chain.from_iterable(
        zip(*(points.column(name).to_pylist() for name in _POINT), strict=True)
        for batch in snapshot.view(window, span)
        if (points := batch.filter(pc.not_equal(batch.column("op"), OP_DELETE_RANGE))).num_rows
    )


_POINT = ("key", "timestamp", "op", "value")


def _point_change(row: Any) -> Change:
    key, timestamp, op, value = row
    return Change(Timestamp(timestamp), "put" if op == OP_PUT else "delete", key, None, value)


def _range_change(found: RangeTombstone) -> Change:
    return Change(Timestamp(found.timestamp), "delete_range", found.start, found.end, None)


def _pairs(batch: pa.RecordBatch) -> pa.RecordBatch:
    columns = [batch.column("key"), batch.column("value")]
    return pa.RecordBatch.from_arrays(columns, schema=rows_schema())


# --------------------------------------------------------------------------------------------------
# The first live row of spans, each at a time of its own, found in one pass over the versions.
#
# Labels are taken in the order of their keys. Versions are read from the first label on, and anew
# from a label that lies behind the batch which answered the labels before it. So neighbouring
# labels share what is read, and the rows between distant ones are not read.
#
# Invariants
# 1. A row is live for a label if the newest version of its key at or below the label's time is a
#    put, and no range delete is newer. Of one commit, a put counts more than a range delete.
# 2. Memory is one batch of versions, and the rows that labels have found.

_ROWS_AT_ONCE: Final = 256
"""A label compares the times of this many versions at once. Its row is mostly among the first
few."""


class SpanLabels(NamedTuple):
    """Labels in the order of `starts`. `ends` ascend with them."""

    starts: Sequence[bytes]
    ends: Sequence[bytes | None]
    times: Numbers


class RowFound(NamedTuple):
    """The row that a label has found."""

    key: bytes
    value: bytes
    timestamp: int


def first_rows(
    versions: Callable[[Span], Iterator[pa.RecordBatch]],
    cleared: Fragments,
    labels: SpanLabels,
    *,
    bytes_max: int,
) -> list[RowFound | None] | None:
    """The first live row of each label; None where values of several labels have more than
    `bytes_max` bytes. `versions` gives the versions of a span by key, newest first, and `cleared`
    has the range deletes over them.

    Costs a read of the versions between each label and its row.
    """
    found: list[RowFound | None] = [None] * len(labels.starts)
    waiting: list[_Label] = []
    next_at = size = 0
    while next_at < len(found):  # no label waits here
        span = Span(labels.starts[next_at], labels.ends[-1])
        for batch in versions(span):
            if not batch.num_rows:
                continue
            keys = batch.column("key")
            last = keys[len(keys) - 1].as_py()
            while next_at < len(found) and labels.starts[next_at] <= last:
                start, end = labels.starts[next_at], labels.ends[next_at]
                waiting.append(_Label(next_at, start, end, int(labels.times[next_at])))
                next_at += 1
            rows = _Rows(batch, cleared)
            asked, waiting = waiting, []
            for label in asked:
                if not _is_answered(label, rows, found):
                    waiting.append(label)
                elif (row := found[label.at]) is not None:
                    size += len(row.value)
            if size > bytes_max and len(found) > 1:
                return None
            if not waiting:
                break
        else:
            return found  # no version is left
    return found


class _Label:
    """A label that has no row yet. `dead` is the last key that it has looked at."""

    __slots__ = ("at", "dead", "end", "start", "time")

    def __init__(self, at: int, start: bytes, end: bytes | None, time: int) -> None:
        self.at, self.start, self.end, self.time = at, start, end, time
        self.dead: bytes | None = None


class _Rows:
    """The rows of a batch of versions. `is_point` tells them from range deletes."""

    def __init__(self, batch: pa.RecordBatch, cleared: Fragments) -> None:
        self.keys, self.values = batch.column("key"), batch.column("value")
        self.times = batch.column("timestamp").to_numpy()
        self.ops = batch.column("op").to_numpy()
        self.is_point = self.ops != OP_DELETE_RANGE
        self.cleared = cleared

    def key(self, row: int) -> bytes:
        found: bytes = self.keys[row].as_py()
        return found


def _is_answered(label: _Label, rows: _Rows, found: list[RowFound | None]) -> bool:
    """Whether a label has its row after these rows, or can have none."""
    count = len(rows.keys)
    row = bisect_left(range(count), label.start, key=rows.key)
    while row < count:
        some = slice(row, row + _ROWS_AT_ONCE)
        seen = np.flatnonzero((rows.times[some] <= label.time) & rows.is_point[some])
        for at in (seen + row).tolist():
            key = rows.key(at)
            if label.end is not None and key >= label.end:
                return True
            if key == label.dead:
                continue
            cleared = rows.cleared.newest(key, label.time)
            if rows.ops[at] == OP_PUT and rows.times[at] >= cleared:
                value = rows.values[at].as_py()
                found[label.at] = RowFound(key, value, int(rows.times[at]))
                return True
            label.dead = key
        row += _ROWS_AT_ONCE
    last = rows.key(count - 1)
    return label.end is not None and last >= label.end


class _LastLabel:
    """A label that asks for the last live key of a span. `found` is the last one so far, and `seen`
    the last key of which a version was seen: its newest version has decided it."""

    __slots__ = ("end", "found", "seen", "start", "time")

    def __init__(self, start: bytes, end: bytes | None, time: int) -> None:
        self.start, self.end, self.time = start, end, time
        self.found: bytes | None = None
        self.seen: bytes | None = None

    def has_passed(self, rows: _Rows) -> bool:
        """Whether no later row is in the span. Costs a step for each dead key at its end."""
        every = range(len(rows.keys))
        first = bisect_left(every, self.start, key=rows.key)
        last = len(every) if self.end is None else bisect_left(every, self.end, key=rows.key)
        some = slice(first, max(first, last))
        seen = np.flatnonzero((rows.times[some] <= self.time) & rows.is_point[some]) + first
        at = len(seen) - 1
        while at >= 0:
            key = rows.key(int(seen[at]))
            while at and rows.key(int(seen[at - 1])) == key:
                at -= 1
            if key == self.seen:
                break
            row = int(seen[at])
            is_put = rows.ops[row] == OP_PUT
            if is_put and rows.times[row] >= rows.cleared.newest(key, self.time):
                self.found = key
                break
            at -= 1
        if len(seen):
            self.seen = rows.key(int(seen[-1]))
        return self.end is not None and last < len(every)


def last_keys(
    versions: Callable[[Span], Iterator[pa.RecordBatch]], cleared: Fragments, labels: SpanLabels
) -> list[bytes | None]:
    """The last live key of the span of each label, whose ends need not ascend. The parameters and
    the cost are as in `first_rows`; all versions of the span of a label are read."""
    given = zip(labels.starts, labels.ends, labels.times.tolist(), strict=True)
    asked = [_LastLabel(*each) for each in given]
    ends = [end for end in labels.ends if end is not None]
    end = max(ends) if ends and len(ends) == len(asked) else None
    waiting: list[_LastLabel] = []
    next_at = 0
    while next_at < len(asked):  # no label waits here
        for batch in versions(Span(asked[next_at].start, end)):
            if not batch.num_rows:
                continue
            rows = _Rows(batch, cleared)
            last = rows.key(len(rows.keys) - 1)
            while next_at < len(asked) and asked[next_at].start <= last:
                waiting.append(asked[next_at])
                next_at += 1
            waiting = [label for label in waiting if not label.has_passed(rows)]
            if not waiting:
                break
        else:
            break  # no version is left
    return [label.found for label in asked]


# --------------------------------------------------------------------------------------------------
# The next version of keys, each from a time of its own on, found in a pass over the versions.


def next_versions(
    versions: Callable[[Span], Iterator[pa.RecordBatch]],
    cleared: Fragments,
    labels: OrderedLabels,
    upto: int,
) -> Numbers:
    """The time of the oldest version at or above the time of each label, and at or below `upto`;
    -1 where there is none. The parameters are as in `first_rows`.

    Costs a read of the versions between neighbouring keys, and 16 bytes for each version of a key.
    """
    keys = labels.keys.to_pylist()
    places: list[Numbers] = []
    times: list[Numbers] = []
    at = 0
    while at < len(keys):
        for batch in versions(Span(keys[at], keys[-1] + b"\0")):
            if not batch.num_rows:
                continue
            found = pc.index_in(batch.column("key"), value_set=labels.keys).fill_null(-1).to_numpy()
            is_asked = found >= 0
            is_point = batch.column("op").to_numpy() != OP_DELETE_RANGE
            written = batch.column("timestamp").to_numpy()
            chosen = is_asked & is_point & (written <= upto)
            places.append(found[chosen].astype(np.int64))
            times.append(written[chosen])
            last = batch.column("key")[batch.num_rows - 1].as_py()
            at = bisect_left(keys, last)
            # Labels far behind are sought for; those in the next batch are not.
            if at == len(keys) or (keys[at] > last and not is_asked.any()):
                break
        else:
            break  # no version is left
    if cleared:
        for place, key in enumerate(keys):
            deleted = np.array([time for time in cleared.stack(key) if time <= upto], np.int64)
            places.append(np.full(len(deleted), place, np.int64))
            times.append(deleted)
    none = np.empty(0, np.int64)
    which, when = np.concatenate([none, *places]), np.concatenate([none, *times])
    by_key = np.lexsort((when, which))
    which, when = which[by_key], when[by_key]
    bounds = np.searchsorted(which, np.arange(len(keys) + 1))
    answers = np.full(len(labels.times), -1, np.int64)
    for place in range(len(keys)):
        known = when[bounds[place] : bounds[place + 1]]
        asked = slice(labels.starts[place], labels.starts[place + 1])
        behind = np.searchsorted(known, labels.times[asked])
        is_there = behind < len(known)
        answers[asked][is_there] = known[behind[is_there]]
    return answers


# --------------------------------------------------------------------------------------------------
# The side of a join that a collection answers: labels against the rows of its parts.
#
# Each label is asked of the newest chain that covers its time. A chain finds its versions in its
# parts (`backup.shard.rows.search`); nothing is restored.
#
# Invariants
# 1. All chains are held at their newest instant from the call of the join until its end, so that
#    compaction and expiry take no part away.
# 2. No label is answered outside the windows of the chains.

_DECODED = 8
"""Bytes of values that a byte of a part may stand for, in a first guess."""


class HeldChain(Protocol):
    """A chain that covers `[since, upper)`, held at its newest instant."""

    @property
    def shard(self) -> Shard: ...

    @property
    def since(self) -> int: ...

    @property
    def upper(self) -> int: ...

    @property
    def snapshot(self) -> ShardSnapshot: ...

    @property
    def kept(self) -> Mapping[int, tuple[str, ...]]: ...


class _Held(NamedTuple):
    """See `HeldChain`."""

    shard: Shard
    since: int
    upper: int
    snapshot: ShardSnapshot
    kept: Mapping[int, tuple[str, ...]]


@contextmanager
def collection_answers(chains: Chains) -> Iterator[CollectionAnswers]:
    """Hold all chains. Raises `UsageError` for a collection without a backup."""
    with chains.snapshots() as held:
        if not held:
            raise no_backup(chains.where)
        # The window of a chain is read after its lease was taken, which keeps it.
        every = [
            _Held(shard, shard.since, shard.upper, found, shard.kept)
            for shard, found in held.items()
        ]
        yield CollectionAnswers(every)


class CollectionAnswers:
    """See `kvstore.tables.joins.RowAnswers`."""

    def __init__(
        self,
        held: Sequence[HeldChain],
        opened: Callable[[ShardPart], OpenedPart] | None = None,
        upto: int | None = None,
    ) -> None:
        """`held` has the chains, oldest first. `opened` opens a part, if it is given. No label may
        ask for a time above `upto`."""
        self._held = held
        self._opened = opened
        self._upto = upto
        self.rows_max = self.spans_max = JOIN_COLUMNS_ROWS_MAX
        parts = [part for each in held for b in each.snapshot.batches for part in b.parts]
        width = _DECODED * sum(p.size for p in parts) // max(sum(p.rows for p in parts), 1)
        self.rows_first = max(JOIN_VALUE_BYTES_MAX // max(width, 1), 1)

    @cached_property
    def newest(self) -> int:
        """The newest instant. Raises `StatesLostError` if a newer one has existed."""
        self._held[-1].shard.require_newest()
        return self._held[-1].upper - 1

    def answer(self, labels: Asked, search: Search) -> list[pa.Array] | None:
        """The values of the labels and the timestamps of their versions."""
        if not search.is_plain:
            return directed(self, labels, search)
        labels = self._written(labels)
        values: list[pa.Array] = []
        places: list[Numbers] = []
        count = len(labels.times)
        times = np.full(count, -1, np.int64)
        covered, lost = self._covered(labels.times)
        for held, asked in covered:
            keys = labels.keys if len(asked) == count else labels.keys.take(pa.array(asked))
            ordered = in_order(keys, labels.times[asked])
            found = held.snapshot.find(
                ordered,
                age_max=search.age_max,
                bytes_max=search.bytes_max,
                opened=self._opened,
            )
            if found is None:
                return None
            values.append(found.values)
            places.append(asked[ordered.places])
            times[places[-1]] = found.times
        if lost.any() and not search.is_gone_null:
            raise self._gone(labels, int(np.argmax(lost)))
        if not values:
            return value_columns(pa.nulls(count, pa.binary()), times)
        every = placed(pa.concat_arrays(values), np.concatenate(places), count)
        return value_columns(every, times)

    def following(self, labels: Asked, search: Search) -> Numbers:
        """See `StoredVersions`. Costs as `next_versions`, for each chain. A version that may lie in
        history that no chain keeps is gone as that history is."""
        asked, is_future = present(labels, search, self.newest)
        asked = self._written(asked)
        upto = self.newest if search.newest is None else min(search.newest, self.newest)
        covered, lost = self._covered(asked.times)
        starts = asked.times + (0 if search.allows_exact else 1)
        times = np.full(len(starts), -1, np.int64)
        for held, places in covered:
            is_whole = asked.times[places] >= held.since
            lost[places[~is_whole]] = True  # an instant of thinned history
            left, reached = places[is_whole], held.since
            for each in self._held[self._held.index(held) :]:
                if not len(left):
                    break
                if each.since > reached:
                    lost[left] = True
                    break
                keys = asked.keys.take(pa.array(left))
                ordered = in_order(keys, starts[left])
                found = np.empty(len(left), np.int64)
                found[ordered.places] = self._next(each, ordered, upto)
                times[left] = found
                left, reached = left[found < 0], each.upper
        lost &= ~is_future
        if lost.any() and not search.is_gone_null:
            raise self._gone(asked, int(np.argmax(lost)))
        return np.where(lost | is_future, -1, times)

    def _next(self, held: HeldChain, labels: OrderedLabels, upto: int) -> Numbers:
        window = Window(max(int(labels.times.min()) - 1, -1), upto)
        span = Span(labels.keys[0].as_py(), labels.keys[len(labels.keys) - 1].as_py() + b"\0")
        cleared = Fragments.of(held.snapshot.range_tombstones(window, span, opened=self._opened))
        return next_versions(partial(held.snapshot.view, window), cleared, labels, upto)

    def first_alive(self, labels: AskedSpans, search: Search) -> RowsFound | None:
        """The first live row of each span, or the last one, at the time of its label. Costs as
        `first_rows`, for each chain."""
        starts, ends = labels.spans()
        asked = Asked(pa.array(starts, pa.binary()), labels.times, labels.first)
        asked = self._written(asked)
        covered, lost = self._covered(asked.times)
        if lost.any():
            raise self._gone(asked, int(np.argmax(lost)))
        rows: list[RowFound | None] = [None] * len(starts)
        last: list[bytes | None] = [None] * len(starts)
        for held, places in covered:
            ordered = sorted(places.tolist(), key=starts.__getitem__)
            question = SpanLabels(
                [starts[at] for at in ordered],
                [ends[at] for at in ordered],
                asked.times[ordered],
            )
            window = Window(-1, int(question.times.max()))
            end = None if None in question.ends else max(end for end in question.ends if end)
            cleared = Fragments.of(
                held.snapshot.range_tombstones(
                    window, Span(question.starts[0], end), opened=self._opened
                )
            )
            versions = partial(held.snapshot.view, window)
            if labels.is_reverse:
                for at, key in zip(ordered, last_keys(versions, cleared, question), strict=True):
                    last[at] = key
                continue
            found = first_rows(versions, cleared, question, bytes_max=search.bytes_max)
            if found is None:
                return None
            for at, row in zip(ordered, found, strict=True):
                rows[at] = row
        if labels.is_reverse:
            return rows_of_keys(self, last, asked.times, labels.first, search)
        keys, values = ([row and row[field] for row in rows] for field in (0, 1))
        times = np.array([-1 if row is None else row.timestamp for row in rows], np.int64)
        return RowsFound(pa.array(keys, pa.binary()), pa.array(values, pa.binary()), times)

    def _covered(
        self, times: Numbers
    ) -> tuple[list[tuple[HeldChain, Numbers]], npt.NDArray[np.bool_]]:
        """The places of the times that each chain answers, the newest chain first, and which times
        no chain covers."""
        lost: npt.NDArray[np.bool_] = np.ones(len(times), np.bool_)
        found: list[tuple[HeldChain, Numbers]] = []
        for held in reversed(self._held):
            is_covered = times >= held.since
            if held.kept:
                is_covered |= np.isin(times, list(held.kept))
            places = np.flatnonzero(lost & is_covered & (times < held.upper))
            if len(places):
                lost[places] = False
                found.append((held, places))
        return found, lost

    def _written(self, labels: Asked) -> Asked:
        """The labels, if the newest window has all of them. Raises `NotYetWrittenError`."""
        labels = within(labels, self._upto)
        upper, times = self._held[-1].upper, reached_times(labels.times, self._held[-1].upper - 1)
        for instant in {instant for held in self._held for instant in held.kept}:
            # Where history goes back below the instant, its microsecond is a time of its own.
            if not any(held.since <= instant < held.upper for held in self._held):
                times = reached_times(times, instant)
        labels = labels._replace(times=times)
        late = np.flatnonzero(labels.times >= upper)
        if len(late):
            at = int(late[0])
            raise NotYetWrittenError(
                as_of=Timestamp(labels.times[at]),
                upper=Timestamp(upper),
                remedy=f"{_named(labels, at)}, asks for it: give a time below {Timestamp(upper)}, "
                "or back up first",
            )
        return labels

    def _gone(self, labels: Asked, at: int) -> HistoryGoneError:
        since = Timestamp(self._held[-1].since)
        nearest = gone(self._held, int(labels.times[at])).nearest
        instants = f"one of the nearest kept instants, {' and '.join(map(str, nearest))}, "
        return HistoryGoneError(
            as_of=Timestamp(labels.times[at]),
            since=since,
            remedy=f"{_named(labels, at)}, asks for it: give a time from {since} on, "
            f"{instants if nearest else ''}or pass on_gone='null'",
            nearest=nearest,
        )


def _named(labels: Asked, at: int) -> str:
    return f"row {labels.first + at}, key {printable(labels.keys[at].as_py())}"


# --------------------------------------------------------------------------------------------------
# The side of a join that a reader of a collection answers.
#
# Invariant: the snapshots of the reader stay open from the opening of the side until its end. Where
# a lease has run out and parts are gone, the leases are taken anew, and the labels are asked again.


@contextmanager
def reader_answers(reader: CollectionReader, upto: int | None = None) -> Iterator[ReaderAnswers]:
    """Keep the snapshots of this moment open. With `upto` no label may ask for a later time."""
    with ExitStack() as using:
        yield ReaderAnswers(reader, using, upto)


class ReaderAnswers(CollectionAnswers):
    """See `kvstore.tables.joins.RowAnswers`."""

    def __init__(self, reader: CollectionReader, using: ExitStack, upto: int | None) -> None:
        """`using` keeps snapshots open until the end of the side."""
        self._reader, self._using = reader, using
        self._newest = int(reader.as_of) if upto is None else upto
        super().__init__(self._taken(), upto=upto)

    @property
    def newest(self) -> int:
        """The time of the snapshot, or of the reader."""
        return self._newest

    def answer(self, labels: Asked, search: Search) -> list[pa.Array] | None:
        """See `CollectionAnswers.answer`."""
        return self._repeated(lambda: super(ReaderAnswers, self).answer(labels, search))

    def following(self, labels: Asked, search: Search) -> Numbers:
        """See `CollectionAnswers.following`."""
        return self._repeated(lambda: super(ReaderAnswers, self).following(labels, search))

    def first_alive(self, labels: AskedSpans, search: Search) -> RowsFound | None:
        """See `CollectionAnswers.first_alive`."""
        return self._repeated(lambda: super(ReaderAnswers, self).first_alive(labels, search))

    def _repeated(self, ask: Callable[[], _T]) -> _T:
        try:
            return ask()
        except LeaseExpiredError:
            self._reader.take_anew()
            self._held = self._taken()
            return ask()

    def _taken(self) -> Sequence[Held]:
        held = list(self._reader.held())
        for each in held:
            self._using.enter_context(self._reader.using(each))
        return held
