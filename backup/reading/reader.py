"""Reads straight from a collection, as of any time that it covers. Nothing is restored.

    reader    leases on all chains, a snapshot of each at its newest instant
    a key     newest batch first: the filters of its parts, then one row group
    a span    the parts that touch it, merged

Bytes that were fetched are kept near the reader (`kvstore.storage.cached_blob`).

Invariants
1. A read answers from the snapshots of one `refresh`, which leases hold against compaction and
   expiry. A read under way keeps the snapshots with which it began.
2. Where a lease has run out and parts are gone, the leases are taken anew and the read is repeated,
   or refused. It is never answered from half of the history.
3. Every byte is checked before it is believed, in the cache too. Where a check fails, the cache
   forgets the part and the read is repeated once, from the storage itself.
4. A read of many rows is repeated while it has given no row. After that it raises the error.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from functools import partial
from itertools import islice
from typing import Any, TypeVar

import numpy as np
import pyarrow as pa
from typing_extensions import Self

from backup.chains import Chains, no_backup
from backup.instants import covers, gone, instant_of, labels_of, time_or_label
from backup.reading.held import Held, hold_chains
from backup.reading.labels import CollectionAnswers
from backup.reading.rows import changes_of, rows_of, versions_of
from backup.reading.sides import ReaderSide
from backup.shard import VERSIONS, ShardPart
from backup.shard.rows.part_bytes import MissingPartError
from backup.shard.rows.part_reader import OpenedPart
from kvstore.arguments import VALUE_COLUMNS, is_many, key_list, require_limit
from kvstore.arrow import rows_schema
from kvstore.changes import Change, Order, Revisions
from kvstore.changes.windows import require_choices
from kvstore.clock import WallClock
from kvstore.errors import (
    ClosedError,
    CorruptionError,
    HistoryGoneError,
    LeaseExpiredError,
    NotYetWrittenError,
    UsageError,
)
from kvstore.forks import own
from kvstore.joins import Join, OnGone, join
from kvstore.joins.side import Asked, Search
from kvstore.limits import READER_KEYS_BY_BLOCK_MAX, READER_PARTS_MAX
from kvstore.mvcc import Version
from kvstore.span import Span, require_key
from kvstore.storage.kept_bytes import KeptBytes
from kvstore.tables import Table
from kvstore.tables.catalogue import Catalogue
from kvstore.tables.collected import CollectedRows
from kvstore.timestamp import TIMESTAMP_MAX, TimeLike, Timestamp, is_oldest

_T = TypeVar("_T")

_EVERYTHING = Search(age_max=TIMESTAMP_MAX, is_gone_null=False, bytes_max=TIMESTAMP_MAX)


class CollectionReader:
    """Reads of a collection. `Collection.open` makes it; it is for one thread, and for a `with`
    statement, which ends its leases."""

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

    def get(
        self, key: bytes, as_of: TimeLike | None = None, default: bytes | None = None
    ) -> bytes | None:
        """The value of `key` at `as_of`; `default` if the key is absent or deleted.

        Costs at most a request for the end of each part that may have the key and was not read
        before, and one for a row group. Raises `HistoryGoneError` in a hole between chains or below
        the oldest instant, `NotYetWrittenError` at or above `upper`.
        """
        found = self.get_many([key], as_of)[0]
        return default if found is None else found

    def get_many(
        self, keys: Sequence[bytes], as_of: TimeLike | Sequence[TimeLike] | None = None
    ) -> list[bytes | None]:
        """The values of `keys`, in their order; None for an absent key. `as_of` is one time for all
        keys, or a list that has a time for each key."""
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

    def scan(
        self,
        start: bytes | None = None,
        end: bytes | None = None,
        prefix: bytes | None = None,
        as_of: TimeLike | None = None,
        *,
        reverse: bool = False,
        limit: int | None = None,
    ) -> Iterator[tuple[bytes, bytes]]:
        """The live rows of a span at `as_of`, as `Store.scan` gives them."""
        batches = self.scan_batches(start, end, prefix, as_of, reverse=reverse)
        pairs = (
            pair
            for batch in batches
            for pair in zip(batch["key"].to_pylist(), batch["value"].to_pylist(), strict=True)
        )
        return islice(pairs, require_limit(limit))

    def scan_batches(
        self,
        start: bytes | None = None,
        end: bytes | None = None,
        prefix: bytes | None = None,
        as_of: TimeLike | None = None,
        *,
        reverse: bool = False,
        limit: int | None = None,
    ) -> pa.RecordBatchReader:
        """The rows of `scan` as Arrow record batches `key`, `value`. Memory is bounded.

        Keys of tables are left out, unless the span begins among them. An error of the storage is
        raised by the batch that meets it.
        """
        span, left = Span.of(start, end, prefix), require_limit(limit)

        def read(held: Held, at: int) -> Iterator[pa.RecordBatch]:
            return rows_of(held.snapshot, held.plain(span), at, reverse=reverse)

        def rows() -> Iterator[pa.RecordBatch]:
            nonlocal left
            for batch in found:
                yield batch if left is None else batch.slice(0, left)
                if left is not None and (left := left - min(left, batch.num_rows)) == 0:
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
        require_choices(revisions, order)
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
        if order == "key":
            return found
        return iter(sorted(found, key=lambda change: (change[0], change.op != "delete_range")))

    # -- joins and tables -------------------------------------------------------------------

    def join(
        self,
        labels: object,
        key: str = "id",
        at: str | None = "ts",
        max_age: timedelta | None = None,
        *,
        columns: tuple[str, str] = VALUE_COLUMNS,
        on_gone: OnGone = "error",
    ) -> pa.RecordBatchReader:
        """As `Store.join`: the labels, each with the value that its key had at its time."""
        source = Join(self, max_age=max_age, columns=columns)
        return join(labels, [source], key=key, at=at, on_gone=on_gone)

    def join_side(self) -> ReaderSide:
        """The side of this reader in a join of several sources: see `kvstore.join`."""
        return ReaderSide(self)

    def table(self, name: str, as_of: TimeLike | None = None) -> Table:
        """The table `name` as it was at `as_of`, with its history up to then. It is only read."""
        snapshot = ReaderSnapshot(self, Timestamp(self._at(as_of)))
        rows = CollectedRows(self, snapshot, Catalogue(self))
        rows.codec(name)
        return Table(name, rows, None)

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
            found = OpenedPart(self._chains.blob, part, VERSIONS, by_block=True)
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


class ReaderSnapshot:
    """The reads of a table, all at one time."""

    def __init__(self, reader: CollectionReader, as_of: Timestamp) -> None:
        self.as_of = as_of
        self._reader = reader

    def get(self, key: bytes) -> bytes | None:
        """See `CollectionReader.get`."""
        return self._reader.get(key, self.as_of)

    def get_many(self, keys: Sequence[bytes]) -> list[bytes | None]:
        """See `CollectionReader.get_many`."""
        return self._reader.get_many(keys, self.as_of)

    def scan(
        self, start: bytes, end: bytes | None, *, reverse: bool
    ) -> Iterator[tuple[bytes, bytes]]:
        """See `CollectionReader.scan`."""
        return self._reader.scan(start, end, as_of=self.as_of, reverse=reverse)

    def scan_batches(
        self,
        start: bytes | None = None,
        end: bytes | None = None,
        *,
        reverse: bool = False,
        limit: int | None = None,
    ) -> pa.RecordBatchReader:
        """See `CollectionReader.scan_batches`."""
        return self._reader.scan_batches(start, end, as_of=self.as_of, reverse=reverse, limit=limit)
