"""Reading a store: keys, spans and history as of any time, and what changed."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from itertools import chain, islice
from pathlib import Path
from typing import NamedTuple, TypeVar, overload

import pyarrow as pa

from kvstore.arguments import key_list, require_count, require_limit, require_span
from kvstore.arrow import ROWS_SCHEMA, row_batches
from kvstore.changes import Change, ChangeIndex, Order, Revisions
from kvstore.changes.read import require_choices
from kvstore.clock import WallClock
from kvstore.commit import Committer
from kvstore.engine import Engine, FileSpan
from kvstore.engine.rocks import RocksEngine
from kvstore.errors import UsageError
from kvstore.limits import KEY_BYTES_MAX, SCAN_CHUNK, SCAN_PIECES_MAX, SCAN_WORKERS_MAX
from kvstore.loops import PointRead
from kvstore.mvcc import RangeTombstone, Version, Versions
from kvstore.mvcc.export import VersionColumns
from kvstore.mvcc.scan import first_rows
from kvstore.scanners import ParallelScan, is_worth_workers
from kvstore.snapshot import Snapshot
from kvstore.span import Span, require_key
from kvstore.splits import split_span, user_spans
from kvstore.store.opened import Opened
from kvstore.timestamp import TimeLike, Timestamp, to_timestamp

T = TypeVar("T")


class Export(NamedTuple):
    """A window of history: `changes` where they are few, else `columns` and `tombstones`.

    Those are record batches of `kvstore.changes.columns.VERSION_CHANGES_SCHEMA` in time order.
    """

    whole_since: int
    changes: list[pa.RecordBatch] | None
    columns: Iterator[VersionColumns]
    tombstones: list[RangeTombstone]


class Reading(Opened):
    """Reads at one time, and of windows of time."""

    def __init__(
        self,
        path: Path | None,
        engine: Engine,
        versions: Versions,
        index: ChangeIndex,
        committer: Committer,
        *,
        clock: WallClock,
    ) -> None:
        super().__init__(path, engine, versions, index, committer, clock=clock)
        # Hot: a method of Python that calls the look-up would take 0.3 us of a get's 3.
        if type(self).get is Reading.get:  # not where somebody has put another in its place
            shortcut = PointRead(versions.lookup, committer.frontiers, self.get)
            self.get = shortcut.get  # type: ignore[method-assign]

    @overload
    def get(self, key: bytes, as_of: TimeLike | None = None) -> bytes | None: ...

    @overload
    def get(self, key: bytes, as_of: TimeLike | None, default: T) -> bytes | T: ...

    @overload
    def get(self, key: bytes, as_of: TimeLike | None = None, *, default: T) -> bytes | T: ...

    def get(
        self, key: bytes, as_of: TimeLike | None = None, default: T | None = None
    ) -> bytes | T | None:
        """The value of `key`, `default` where it is absent or deleted. One seek.

        An instance's own `get` is a shortcut to the look-up, which comes here where something is
        in its way: an unusual argument, a time that is not complete, history that goes meanwhile.
        """
        key = require_key(key)
        value = self._read(as_of, Span.of_key(key), partial(self._versions.get, key))
        return default if value is None else value

    def get_many(self, keys: Sequence[bytes], as_of: TimeLike | None = None) -> list[bytes | None]:
        """The values of `keys`, in their order, all at one time; None where there is none."""
        if type(keys) is not list:
            keys = key_list(keys)
        if set(map(type, keys)) != {bytes} or max(map(len, keys)) > KEY_BYTES_MAX:
            keys = [require_key(key) for key in keys]
        read = partial(self._versions.get_many, keys)
        at = self._at(as_of)
        values = read(at)
        if at < self._committer.floor:
            hull = Span(min(keys), max(keys) + b"\x00") if keys else Span()
            return self._read(as_of, hull, read)
        return values

    def scan(
        self,
        start: bytes | None = None,
        end: bytes | None = None,
        prefix: bytes | None = None,
        as_of: TimeLike | None = None,
        reverse: bool = False,
        limit: int | None = None,
    ) -> Iterator[tuple[bytes, bytes]]:
        """Live keys and values of a span, ascending (or descending), at one time.

        `start <= key < end`, or all keys with `prefix`. Memory is bounded; the scan sees the
        same state to its end, whatever is written meanwhile.
        """
        require_limit(limit)
        span = Span.of(start, end, prefix)
        chunks = self._read(as_of, span, partial(self._versions.scan, span, reverse=reverse))
        rows = chain.from_iterable(map(_pairs, chunks))
        return rows if limit is None else islice(rows, limit)

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
        workers: int = 1,
    ) -> pa.RecordBatchReader:
        """The rows of `scan` as Arrow record batches: columns `key` and `value`, both binary.

        A batch has at most `batch_rows` rows, by default as many as a scan passes over at once.

        With `workers` above 1 so many processes, this one among them, read a checkpoint, made now,
        side by side: for scans of a million rows and more. Each such scan costs some 10 ms; the
        others join the first one when they are up, 0.5 s later, and stay until the store is closed.
        Order and rows are the same. A worker that dies raises `StorageError`. To end such a scan
        early, let go of the reader: its own `close` does not reach it. Read by this process alone
        all the same: a store in memory, which has nothing to share, a span of less than
        24 MB, which several would not finish sooner, and scans with `reverse` or `limit`.
        """
        require_limit(limit)
        span = Span.of(start, end, prefix)
        batch_rows = SCAN_CHUNK if batch_rows is None else batch_rows
        require_count(batch_rows, name="batch_rows")
        require_count(workers, name="workers", most=SCAN_WORKERS_MAX)
        engine = self._engine
        self._live()
        whole = limit is None and not reverse
        if (
            workers > 1
            and whole
            and isinstance(engine, RocksEngine)
            and is_worth_workers(engine, span)
        ):

            def scan_beside(at: int) -> ParallelScan:
                # The view first: entries leave the engine before what covers them leaves it.
                view = self._versions.view
                return self._scanners.scan(engine, view, span, at, workers=workers, rows=batch_rows)

            batches = self._read(as_of, span, scan_beside)
            return pa.RecordBatchReader.from_batches(ROWS_SCHEMA, batches)
        chunk = batch_rows if limit is None else max(min(batch_rows, limit), 1)
        scan = partial(self._versions.scan_columns, span, chunk=chunk, reverse=reverse)
        chunks = self._read(as_of, span, scan)
        return row_batches(chunks if limit is None else first_rows(chunks, limit))

    def history(self, key: bytes) -> list[Version]:
        """All versions of `key` that are kept, newest first; a deletion has value None."""
        upto = self._at(None)
        versions = self._versions.history(require_key(key))
        # A commit on its way may have written already what it has not yet shown.
        return [version for version in versions if version.timestamp <= upto]

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
        """What changed in the window `(since, upto]`: chained windows neither skip nor repeat.

        `revisions="latest"` gives each key's last change only. From the beginning of time
        (`since=0`) that is the state at `upto`, without deletions. `order` is `"key"` (each key
        oldest first) or `"time"`. Costs what changed, and for an import in the window a pass over
        the spans of its files. Raises `HistoryGoneError` if `since` is below the store's: take a
        full read instead.
        """
        span = Span.of(start, end, prefix)
        require_choices(revisions, order)
        low, high = to_timestamp(since, name="since"), self._at(upto)
        if low > high and upto is not None:
            raise UsageError(f"since {low} is above upto {high}", "swap them")
        needed = high if low == 0 and revisions == "latest" else low
        self._require_kept(span, needed)
        return self._pinned(
            span,
            needed,
            lambda: self._changes.changes(
                span,
                since=low,
                upto=high,
                revisions=revisions,
                order=order,
                index_floor=max(self._index_floor, self.since),
            ),
        )

    def versions(self, *, since: TimeLike | None, upto: TimeLike) -> Iterator[Change]:
        """All revisions in `(since, upto]` by key, for copies of this store's history.

        `since=None` is everything that is kept, what lies below the store's `since` included:
        of that, what reads at `since` or later can see is complete. One pass over the store then.
        """
        if since is not None:
            return self.changes(since, upto)
        high = self._at(upto)
        return self._changes.changes(
            Span(), since=0, upto=high, revisions="all", order="key", index_floor=high
        )

    def export(self, *, since: TimeLike | None, upto: TimeLike, span: Span | None = None) -> Export:
        """All revisions in `(since, upto]` for a copy of this store's history.

        `since=None` is everything that is kept: whole from `Export.whole_since` on. A window that
        the change index shows to be small comes as changes, others as columns, by key, in one
        pass. A `span` cuts such a pass into pieces: of the columns come those whose key lies in
        it, of the range tombstones those that start there, whole.
        Raises `HistoryGoneError` if `since` lies below what is kept.
        """
        high, whole = self._at(upto), span or Span()
        if since is None:
            columns, tombstones = self._versions.export(whole, since=0, upto=high)
            # The pass shows the entries of this moment: what GC and clears take later stays in it.
            return Export(self.whole_since, None, columns, tombstones)
        low = to_timestamp(since, name="since")
        pin = self._holds.new_pin()
        try:
            # Without a pin, a large value that a clear takes meanwhile would look damaged.
            self._holds.pin(low, pin, kind="export")
            self._clears.require(Span(), low)
            by_index = low >= max(self._index_floor, self.since) and whole == Span()
            few = self._columns.few(since=low, upto=high) if by_index else None
            if few is not None:
                return Export(low, few, iter(()), [])
            return Export(low, None, *self._versions.export(whole, since=low, upto=high))
        finally:
            self._holds.let_go(pin, None)

    def has_commit(self, at: TimeLike) -> bool | None:
        """Whether there was a commit at `at`; None where the change index does not say any more.

        For those who have copied this store's history: a store that was put back from an older copy
        of itself lacks commits that they have. One seek per stream.
        """
        time = to_timestamp(at, name="at")
        if time and any(self._index.headers(since=time - 1, upto=time)):
            return True
        # Looked at last: GC moves `since` before it trims the index.
        return None if time <= max(self._index_floor, self.since) else False

    def range_deletes(
        self, since: TimeLike, upto: TimeLike, span: Span, revisions: Revisions = "all"
    ) -> list[Change]:
        """The range deletes that `changes` gives for `span`, each whole. Reads no row.

        For those who read the rest piece by piece: `changes` of a piece cuts them to it.
        """
        low, high = to_timestamp(since, name="since"), self._at(upto)
        found = self._versions.view.fragments.tombstones(
            span, since=low, upto=high, latest=revisions == "latest"
        )
        if low == 0 and revisions == "latest":
            return []
        return [Change(Timestamp(t), "delete_range", start, end, None) for start, end, t in found]

    def splits(self, count: int, span: Span | None = None) -> list[Span]:
        """Cut `span` (default: all keys) into at most `count` pieces of about equal size.

        From the bounds of the files alone; what is not on file yet does not count.
        """
        require_count(count, name="count", most=SCAN_PIECES_MAX)
        self._live()
        return split_span(require_span(span), self.files(), count)

    def files(self) -> list[FileSpan]:
        """The files that hold versions, by the user keys they lie between."""
        self._live()
        return list(user_spans(self._engine.files()))

    def snapshot(self, as_of: TimeLike | None = None) -> Snapshot:
        """Reads at one time that stays readable until the snapshot is closed."""
        holds = self._holds  # in a forked child, which closes the snapshot, the store has no fields
        with self._live().lock:
            at, pin = Timestamp(self._at(as_of)), holds.new_pin()
            snapshot = Snapshot(self, at, lambda: holds.unpin(pin))
            holds.pin(at, pin, kind="snapshot")
        return snapshot


def _pairs(chunk: tuple[list[bytes], list[bytes]]) -> Iterator[tuple[bytes, bytes]]:
    return zip(*chunk, strict=True)
