"""Where Spark reads rows from: a checkpoint or an idle store, a backup collection, or a server."""

from __future__ import annotations

import bisect
import fcntl
import heapq
import secrets
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from datetime import timedelta
from operator import itemgetter
from pathlib import Path
from typing import Any, Final, Literal, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from typing_extensions import Self

from kvstore.backup.chains import covers, gone, instant_of
from kvstore.backup.rows import batches_in_order, range_rows
from kvstore.backup.shard import OP_DELETE, OP_DELETE_RANGE, OP_PUT, UNTIL, ShardBatch, ShardPart
from kvstore.backup.shard.rows.part_format import PART_SCHEMA
from kvstore.backup.shard.rows.part_reader import statistics_of, translated
from kvstore.base.span import Span
from kvstore.base.timestamp import TIMESTAMP_MAX, TimeLike, Timestamp
from kvstore.changes import Change, Revisions
from kvstore.changes.events import Images
from kvstore.changes.index import OP_PUT as CHANGE_PUT
from kvstore.engine import FileSpan
from kvstore.errors import (
    AccessDeniedError,
    IndeterminateError,
    LockedError,
    NotAStoreError,
    NotYetWrittenError,
    RetryableError,
    UsageError,
    storage_errors,
)
from kvstore.limits import READER_TRIES_MAX
from kvstore.mvcc import Cover, Fragments, RangeTombstone
from kvstore.mvcc.expiry_records import EXPIRY
from kvstore.mvcc.parallel_scan import split_span
from kvstore.opening import engine_at, open_read_only
from kvstore.remote.protocol import from_json, to_json
from kvstore.spark.access import Access, require_seen
from kvstore.tables.joins import Direction, Join, OnFuture, OnGone, OnNull, join_up_to
from kvstore.timeline.reserved import CATALOGUE

# --------------------------------------------------------------------------------------------------
# The contract of an origin: something with history that Spark reads rows from.
#
# A task opens the origin anew from its place. All tasks of a read see the same rows, because the
# read pins its times and history never changes.
#
# An origin yields rows with the requested columns of `backup/rows.py`.


class OriginFrontiers(NamedTuple):
    """The readable times, `since <= t < upper`, of the store with this id."""

    since: int
    upper: int
    store_id: str


class HistoryEntry(NamedTuple):
    """A record of an origin's history: an import or a revert at the time `version`, or a backup
    whose last time it is."""

    version: int
    operation: Literal["import", "revert", "backup"]
    id: str | None
    rows: int
    size_bytes: int


class ChangeCount(NamedTuple):
    """A number of changes, or an estimate of it."""

    rows: int
    is_exact: bool


class JoinableRows(Protocol):
    """The rows of a table, which labels are joined to."""

    def join(
        self,
        labels: object,
        on: str | Sequence[str],
        at: str | None,
        known_at: str | TimeLike | None,
        max_age: timedelta | int | None,
        columns: Sequence[str] | None,
        *,
        prefix: str,
        direction: Direction,
        allow_exact: bool,
        on_null: OnNull,
    ) -> pa.RecordBatchReader:
        """The labels with columns of rows; see `Table.join`."""
        ...


class JoinChoice(NamedTuple):
    """The arguments of a join that choose versions, and the time above which none counts."""

    max_age: timedelta | int | None
    direction: Direction
    allow_exact: bool
    on_gone: OnGone
    on_future: OnFuture
    on_null: OnNull
    newest: int

    def join(
        self,
        source: Any,
        labels: pa.RecordBatchReader,
        key: str,
        at: str,
        columns: tuple[str, str],
    ) -> pa.RecordBatchReader:
        """The labels with the values that a store, a collection or a client has."""
        age: Any = self.max_age
        side = Join(
            source, None, age, columns, direction=self.direction, allow_exact=self.allow_exact
        )
        on: dict[str, Any] = {"on_gone": self.on_gone, "on_null": self.on_null}
        on["on_future"] = self.on_future
        return join_up_to(self.newest, labels, [side], key=key, at=at, **on)


class Origin(Protocol):
    """Something with history. It is used as a context manager."""

    place: Place
    """Where the origin was found. A collection's place names the chosen chain, a server's place the
    lease."""

    def frontiers(self, reaching: int = 0) -> OriginFrontiers:
        """The readable times. For a checkpoint they never change; otherwise they are the times at
        the call. A live store that is idle completes its time up to `reaching`, if that is past."""
        ...

    def narrow(self, span: Span) -> Span:
        """The span without the keys of tables and of expiries, unless it begins among them. Call it
        before a span is cut: a part that begins among them would ask for them."""
        ...

    def keep(self, since: int) -> None:
        """Keep history from `since` on readable for the tasks of a read that is being planned.

        Take `place` for the tasks afterwards: it names the lease. Checkpoints never lose history,
        and a task that finds its collection expired fails.
        """
        ...

    def events(self) -> list[HistoryEntry]:
        """The imports of a store and their reverts, or the backups of a collection, by time. A
        server tells none. GC forgets small imports."""
        ...

    def files(self, upto: int) -> Sequence[FileSpan]:
        """Key ranges and sizes of the files that a read up to `upto` opens; hints for cutting."""
        ...

    def state(
        self, span: Span, as_of: int, columns: Sequence[str], rows: int
    ) -> Iterator[pa.RecordBatch]:
        """The live rows of `span` at `as_of`, by key."""
        ...

    def points(
        self,
        span: Span,
        *,
        since: int,
        upto: int,
        latest: bool,
        columns: Sequence[str],
        rows: int,
        by_key: bool = False,
    ) -> Iterator[pa.RecordBatch]:
        """The puts and deletes in the window `(since, upto]`. With `by_key` they come by key, those
        of one key oldest first. Memory holds a bounded number of their bytes, also where all are of
        one key."""
        ...

    def ranges(self, span: Span, *, since: int, upto: int, latest: bool) -> list[Change]:
        """The range deletes in the window, cut to `span`, by their start."""
        ...

    def cut(self, span: Span, *, since: int, upto: int, rows: int | None, size: int | None) -> int:
        """The latest time up to which the window holds at most a number of rows or bytes.

        The cut lies between commits, behind at least one. Bytes are an estimate.
        """
        ...

    def count(self, span: Span, *, since: int, upto: int) -> ChangeCount | None:
        """The number of changes in the window, rows of imports included. None if the caller may not
        know it.

        An inexact number may count changes of other keys, and estimates long windows. Costs a
        bounded number of entries of a store, and the times in one batch of a collection.
        """
        ...

    def join(
        self,
        labels: pa.RecordBatchReader,
        *,
        key: str,
        at: str,
        columns: tuple[str, str],
        choice: JoinChoice,
    ) -> pa.RecordBatchReader:
        """The labels with the columns of their values; see `Store.join`."""
        ...

    def rows_of(self, table: str) -> AbstractContextManager[JoinableRows]:
        """The table `table` with its history, for the time of the block. Raises `UsageError` if
        there is none."""
        ...

    def __enter__(self) -> Self: ...

    def __exit__(self, *_: object) -> None: ...


# --------------------------------------------------------------------------------------------------
# An origin over the directory of a store: a checkpoint, or a store that no process has open.


class CheckpointOrigin:
    """An origin over a store opened read-only, whose frontiers never move."""

    def __init__(self, place: Place) -> None:
        self.place = place
        self._store = open_read_only(place.path)

    def frontiers(self, reaching: int = 0) -> OriginFrontiers:
        return OriginFrontiers(self._store.since, self._store.upper, self._store.store_id)

    def keep(self, since: int) -> None:
        pass

    def events(self) -> list[HistoryEntry]:
        found = []
        for record in self._store.imports.all():
            facts = (str(record.import_id), record.rows, record.size_bytes)
            if record.added is not None:
                found.append(HistoryEntry(record.added, "import", *facts))
            if record.reverted is not None:
                found.append(HistoryEntry(record.reverted, "revert", *facts))
        return sorted(found)

    def files(self, upto: int) -> Sequence[FileSpan]:
        return self._store.layout.files()

    def state(
        self, span: Span, as_of: int, columns: Sequence[str], rows: int
    ) -> Iterator[pa.RecordBatch]:
        found = self._store.scan_batches(span.start, span.end, as_of=as_of, batch_rows=rows)
        for batch in found:
            yield batch.select(list(columns))

    def narrow(self, span: Span) -> Span:
        return self._store.requests.narrow(span)

    def points(
        self,
        span: Span,
        *,
        since: int,
        upto: int,
        latest: bool,
        columns: Sequence[str],
        rows: int,
        by_key: bool = False,
    ) -> Iterator[pa.RecordBatch]:
        changes = self._store.changes(
            since, upto, span.start, span.end, revisions="latest" if latest else "all"
        )
        for batch in batches_in_order(each for each in changes if each.op != "delete_range"):
            yield batch.select(list(columns))

    def ranges(self, span: Span, *, since: int, upto: int, latest: bool) -> list[Change]:
        return self._store.replication.range_deletes(
            since, upto, span, "latest" if latest else "all"
        )

    def cut(self, span: Span, *, since: int, upto: int, rows: int | None, size: int | None) -> int:
        passed = current = 0
        reached = since
        changes = self._store.changes(since, upto, span.start, span.end, order="time")
        for count, change in enumerate(changes, start=1):
            if change.timestamp != current:
                reached, current = current or since, change.timestamp
            passed += len(change.key) + len(change.value or b"")
            if (rows is not None and count > rows) or (size is not None and passed > size):
                return reached if reached > since else current
        return upto

    def count(self, span: Span, *, since: int, upto: int) -> ChangeCount:
        found = self._store.browsing.count_changes(Timestamp(since), Timestamp(upto))
        return ChangeCount(found.changes, found.is_exact and span == Span())

    def join(
        self,
        labels: pa.RecordBatchReader,
        *,
        key: str,
        at: str,
        columns: tuple[str, str],
        choice: JoinChoice,
    ) -> pa.RecordBatchReader:
        return choice.join(self._store, labels, key, at, columns)

    def rows_of(self, table: str) -> AbstractContextManager[JoinableRows]:
        return nullcontext(self._store.table(table))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._store.close()


# --------------------------------------------------------------------------------------------------
# Row groups of a collection's parts: their statistics, and reading rows of them.
#
# Statistics may be wider than the rows of a group, never narrower. So skipping a group by its
# statistics loses no row.


class Group(NamedTuple):
    """One row group: its place and its statistics, where None is unknown."""

    part: ShardPart
    file: pq.ParquetFile
    number: int
    first: bytes | None
    last: bytes | None
    oldest: int
    newest: int
    op_min: int
    op_max: int
    replaced: int
    """Before this time each version of the group is the newest of its key in the part."""
    rows: int
    size_bytes: int

    def may_hold(self, span: Span) -> bool:
        """Whether a key of `span` can be in it."""
        above = self.last is not None and self.last < span.start
        below = self.first is not None and span.end is not None and self.first >= span.end
        return not above and not below

    def begins_before(self, end: bytes | None) -> bool:
        """Whether a key below `end` may be in it, so that a range delete may reach below `end`."""
        return self.first is None or end is None or self.first < end

    def lies_in(self, span: Span) -> bool:
        """Whether all its keys are known to lie in `span`."""
        if self.first is None or self.last is None:
            return False
        return span.start <= self.first and (span.end is None or self.last < span.end)

    def read(self, columns: Sequence[str]) -> pa.Table:
        """These columns of all rows, in one chunk each.

        Raises `CorruptionError` if their bytes differ from the written ones.
        """
        with translated(self.part):
            found = self.file.read_row_group(self.number, columns=list(columns))
        return found.combine_chunks()

    def times(self, since: int, upto: int) -> npt.NDArray[np.int64]:
        """The times of the rows in the window `(since, upto]`, in no order."""
        found: npt.NDArray[np.int64] = self.read(["timestamp"])["timestamp"].to_numpy()
        return found[(found > since) & (found <= upto)]


def row_group(part: ShardPart, file: pq.ParquetFile, index: int) -> Group:
    """One row group of a part, by its footer."""
    found = file.metadata.row_group(index)
    keys, times, ops = (statistics_of(found, name) for name in ("key", "timestamp", "op"))
    return Group(
        part=part,
        file=file,
        number=index,
        first=None if keys is None else keys.min,
        last=None if keys is None else keys.max,
        oldest=part.time_min if times is None else times.min,
        newest=part.time_max if times is None else times.max,
        op_min=OP_DELETE if ops is None else ops.min,
        op_max=OP_DELETE_RANGE if ops is None else ops.max,
        replaced=_first_replaced(found.column(PART_SCHEMA.get_field_index(UNTIL.name))),
        rows=found.num_rows,
        size_bytes=found.total_byte_size,
    )


def _first_replaced(until: pq.ColumnChunkMetaData) -> int:
    statistics = until.statistics
    if statistics is None:
        return 0
    if statistics.has_min_max:
        return int(statistics.min)
    return TIMESTAMP_MAX + 1 if statistics.null_count == until.num_values else 0


def columns_with(columns: Sequence[str], *more: str) -> list[str]:
    """The columns, and behind them the names of `more` that are new."""
    return [*columns, *(name for name in more if name not in columns)]


def points(group: Group, columns: Sequence[str], span: Span, *, since: int, upto: int) -> pa.Table:
    """The puts and deletes of the window and the span in a row group."""
    table = group.read(columns)
    keys, times = table["key"], table["timestamp"]
    keep = pc.and_(pc.greater(times, since), pc.less_equal(times, upto))
    keep = pc.and_(keep, pc.not_equal(table["op"], OP_DELETE_RANGE))
    if span.start:
        keep = pc.and_(keep, pc.greater_equal(keys, pa.scalar(span.start, pa.binary())))
    if span.end is not None:
        keep = pc.and_(keep, pc.less(keys, pa.scalar(span.end, pa.binary())))
    return table.filter(keep)


def first_of_each_key(table: pa.Table, previous: bytes | None) -> pa.Table:
    """The first row of each key, but none of the key `previous`. Equal keys must lie together."""
    keys = table["key"].combine_chunks()
    if isinstance(keys, pa.ChunkedArray):
        keys = keys.chunk(0) if keys.num_chunks else pa.array([], pa.binary())
    if not len(keys):
        return table
    fresh = np.ones(len(keys), dtype=bool)
    fresh[0] = previous is None or keys[0].as_py() != previous
    fresh[1:] = pc.not_equal(keys[1:], keys[:-1]).to_numpy(zero_copy_only=False)
    return table if fresh.all() else table.filter(pa.array(fresh))


def uncovered(table: pa.Table, cover: Cover) -> pa.Table:
    """The rows that no newer range delete covers. Costs one binary search per row."""
    newest = np.array([0, *cover.newest], dtype=np.int64)
    at = [bisect.bisect_right(cover.starts, key) for key in table["key"].to_pylist()]
    keep = newest[np.array(at, dtype=np.int64)] <= table["timestamp"].to_numpy()
    return table.filter(pa.array(keep))


# --------------------------------------------------------------------------------------------------
# An origin over a backup collection: the state at a time, or the changes of a window.
#
# The rows of a run are sorted by key, and each key's versions newest first
# (`backup/rows.py`). After the rows of several runs are sorted in the same order, the first
# row of each key is its newest version. All of this works on whole columns.
#
# If only one run has rows for a span, as after a full backup, the row groups of this run are read
# one by one without a sort. Otherwise the span is cut so that the rows of each part of it fit into
# memory. Statistics keep a task from opening row groups without a row for it.
#
# Times alone decide which rows are read. So compaction may replace batches between planning and
# reading, or between two tasks, and the rows stay the same.

SORTED_BYTES_MAX: Final = 32 << 20
"""Uncompressed bytes of several runs that are sorted in memory at once."""

_RANGE_COLUMNS: Final = ["key", "timestamp", "op", "end_key"]
_NEWEST_FIRST: Final = [("key", "ascending"), ("timestamp", "descending")]
_OLDEST_FIRST: Final = [("key", "ascending"), ("timestamp", "ascending")]


class CollectionOrigin:
    """An origin over one chain of a collection."""

    def __init__(self, place: Place, covering: Sequence[int] = ()) -> None:
        assert place.access is not None, "the place is a collection"
        self._collection = place.access.open()
        chain = self._collection.chain(place.chain, covering=covering)
        if chain is None:
            what = "no backup" if place.chain is None else f"no chain {place.chain} any more"
            raise UsageError(f"{place.path} holds {what}", "run a backup first, and read again")
        self.place = place._replace(chain=chain.name)
        self._chain = chain
        self._since = int(chain.since)
        if len(covering) == 1 and covering[0] < chain.since and chain.kept:
            kept = instant_of([chain], covering[0])
            if not covers(chain, kept):
                raise gone([chain], covering[0])
            self._since = kept  # a kept instant
        self._opened: dict[str, list[Group]] = {}

    def frontiers(self, reaching: int = 0) -> OriginFrontiers:
        source = self._collection.source
        assert source is not None, "a collection with a chain has a source"
        return OriginFrontiers(self._since, self._chain.upper, source)

    def narrow(self, span: Span) -> Span:
        if span.plain() == span:
            return span
        every: Any = {"since": -1, "upto": self._chain.upper - 1, "columns": ["key"]}
        for hidden in (Span.of_prefix(EXPIRY), Span.of_prefix(CATALOGUE)):
            if any(table.num_rows for table in self._all(hidden, **every)):
                return span.plain()
        return span

    def keep(self, since: int) -> None:
        pass

    def events(self) -> list[HistoryEntry]:
        return [
            HistoryEntry(batch.upper - 1, "backup", None, batch.rows, batch.size)
            for batch in self._chain.batches
        ]

    def files(self, upto: int) -> Sequence[FileSpan]:
        return _file_spans(self._groups(since=-1, upto=upto))

    def state(
        self, span: Span, as_of: int, columns: Sequence[str], rows: int
    ) -> Iterator[pa.RecordBatch]:
        for table in self._newest(span, since=-1, upto=as_of, columns=columns, state=True):
            yield from table.select(list(columns)).to_batches(max_chunksize=rows)

    def points(
        self,
        span: Span,
        *,
        since: int,
        upto: int,
        latest: bool,
        columns: Sequence[str],
        rows: int,
        by_key: bool = False,
    ) -> Iterator[pa.RecordBatch]:
        if latest:
            # From the beginning of time the latest changes are the state, without deletions.
            found = self._newest(
                span, since=since or -1, upto=upto, columns=columns, state=since == 0
            )
        elif by_key:
            found = self._oldest_first(span, since=since, upto=upto, columns=columns)
        else:
            found = self._all(span, since=since, upto=upto, columns=columns)
        for table in found:
            yield from table.select(list(columns)).to_batches(max_chunksize=rows)

    @property
    def batches(self) -> Sequence[ShardBatch]:
        """The batches of the chain, oldest first."""
        return self._chain.batches

    def cover(self, span: Span, as_of: int) -> Cover:
        """The range deletes that hide rows of the state."""
        return self._fragments(span, since=-1, upto=as_of).cover(span, as_of)

    def groups(self, part: ShardPart) -> list[Group]:
        """The row groups of a part."""
        groups = self._opened.get(part.name)
        if groups is None:
            file = self._collection.open_part(part)
            groups = [row_group(part, file, index) for index in range(file.num_row_groups)]
            self._opened[part.name] = groups
        return groups

    def ranges(self, span: Span, *, since: int, upto: int, latest: bool) -> list[Change]:
        if latest and since == 0:
            return []
        found = self._fragments(span, since=since, upto=upto).tombstones(
            span, since=since, upto=upto, latest=latest
        )
        return [Change(Timestamp(t), "delete_range", start, end, None) for start, end, t in found]

    def cut(self, span: Span, *, since: int, upto: int, rows: int | None, size: int | None) -> int:
        limit = rows if size is None else size
        assert limit is not None, "one of the two is given"
        passed, reached = 0.0, None
        for batch in self.batches:  # the batches follow each other in time
            groups = self._groups_in(batch, span, since=since, upto=upto)
            if not groups:
                continue
            row_bytes = sum(g.size_bytes for g in groups) / max(sum(g.rows for g in groups), 1)
            # Rows of other keys in the same row groups count too, so a window may hold fewer.
            found = np.concatenate([group.times(since, upto) for group in groups])
            commits, counts = np.unique(found, return_counts=True)
            sums = passed + np.cumsum(counts) * (1 if size is None else row_bytes)
            fitting = int(np.searchsorted(sums, limit, side="right"))
            if fitting < len(commits):
                return int(commits[fitting - 1]) if fitting else reached or int(commits[0])
            if fitting:
                passed, reached = float(sums[-1]), int(commits[-1])
        return upto

    def count(self, span: Span, *, since: int, upto: int) -> ChangeCount:
        rows, is_exact = 0, True
        for batch in self.batches:
            whole = since < batch.lower and batch.upper <= upto + 1
            if whole and span == Span():
                rows += batch.rows
                continue
            for group in self._groups_in(batch, span, since=since, upto=upto):
                rows += len(group.times(since, upto))
                is_exact &= span == Span() or group.lies_in(span)
        return ChangeCount(rows, is_exact)

    def join(
        self,
        labels: pa.RecordBatchReader,
        *,
        key: str,
        at: str,
        columns: tuple[str, str],
        choice: JoinChoice,
    ) -> pa.RecordBatchReader:
        return choice.join(self._collection, labels, key, at, columns)

    @contextmanager
    def rows_of(self, table: str) -> Iterator[JoinableRows]:
        with self._collection.open() as reader:
            yield reader.table(table)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        for groups in self._opened.values():
            groups[0].file.close()

    # -- rows -------------------------------------------------------------------------------

    def _all(
        self, span: Span, *, since: int, upto: int, columns: Sequence[str]
    ) -> Iterator[pa.Table]:
        needed = columns_with(columns, "key", "timestamp", "op")
        for groups in self._groups(since=since, upto=upto):
            for group in groups:
                if group.may_hold(span):
                    yield points(group, needed, span, since=since, upto=upto)

    def _oldest_first(
        self, span: Span, *, since: int, upto: int, columns: Sequence[str]
    ) -> Iterator[pa.Table]:
        """All versions of the window by key, oldest first."""
        needed = columns_with(columns, "key", "timestamp", "op")
        runs = [
            wanted
            for groups in self._groups(since=since, upto=upto)
            if (wanted := [group for group in groups if group.may_hold(span)])
        ]
        for part in _sortable_spans(runs, span):
            yield from _sorted(runs, part, needed, since, upto)

    def _newest(
        self, span: Span, *, since: int, upto: int, columns: Sequence[str], state: bool
    ) -> Iterator[pa.Table]:
        """The newest version of each key in the window, unless a range delete covers it."""
        cover = self._fragments(span, since=since, upto=upto).cover(span, upto)
        runs = [
            wanted
            for groups in self._groups(since=since, upto=upto)
            if (wanted := [group for group in groups if group.may_hold(span)])
        ]
        if len(runs) == 1:
            tables = self._of_one_run(runs[0], span, since, upto, columns, cover)
        else:
            tables = (
                table
                for part in _sortable_spans(runs, span)
                for table in self._of_several(runs, part, since, upto, columns)
            )
        for table in tables:
            alive = uncovered(table, cover) if cover.starts else table
            if state and "op" in alive.column_names:
                alive = alive.filter(pc.equal(alive["op"], OP_PUT))
            yield alive

    def _of_one_run(
        self,
        groups: Sequence[Group],
        span: Span,
        since: int,
        upto: int,
        columns: Sequence[str],
        cover: Cover,
    ) -> Iterator[pa.Table]:
        previous: bytes | None = None
        for group in groups:
            plain = (
                group.op_min == group.op_max == OP_PUT
                and since < group.oldest
                and group.newest <= upto
                and not cover.starts
            )
            if plain and group.lies_in(span):
                table = group.read(columns_with(columns, "key"))
            else:
                needed = columns_with(columns, "key", "timestamp", "op")
                table = points(group, needed, span, since=since, upto=upto)
            if table.num_rows:
                last = table["key"][-1].as_py()
                yield first_of_each_key(table, previous)
                previous = last

    def _of_several(
        self,
        runs: Sequence[Sequence[Group]],
        span: Span,
        since: int,
        upto: int,
        columns: Sequence[str],
    ) -> Iterator[pa.Table]:
        needed = columns_with(columns, "key", "timestamp", "op")
        groups = [group for run in runs for group in run if group.may_hold(span)]
        if not groups:
            return
        window: Any = {"since": since, "upto": upto}
        if sum(group.size_bytes for group in groups) > 4 * SORTED_BYTES_MAX:
            yield _newest_rows(groups, needed, span, **window)
            return
        table = pa.concat_tables([points(group, needed, span, **window) for group in groups])
        order = pc.sort_indices(table, _NEWEST_FIRST)
        yield first_of_each_key(table.take(order).combine_chunks(), None)

    # -- row groups ---------------------------------------------------------------------

    def _fragments(self, span: Span, *, since: int, upto: int) -> Fragments:
        """The range deletes of the window that reach into `span`."""
        found = []
        for groups in self._groups(since=since, upto=upto):
            for group in groups:
                if group.op_max < OP_DELETE_RANGE or not group.begins_before(span.end):
                    continue
                for batch in group.read(_RANGE_COLUMNS).to_batches():
                    found += [
                        RangeTombstone(*row)
                        for row in range_rows(batch)
                        if row[1] > span.start and since < row[2] <= upto
                    ]
        return Fragments.of(found)

    def _groups(self, *, since: int, upto: int) -> Iterator[list[Group]]:
        """The row groups of each run that may hold rows of `(since, upto]`, oldest batch first."""
        for batch in self.batches:
            yield from self._runs(batch, since=since, upto=upto)

    def _runs(self, batch: ShardBatch, *, since: int, upto: int) -> Iterator[list[Group]]:
        runs: dict[int, list[Group]] = {}
        for part in batch.parts:
            if part.time_max > since and part.time_min <= upto:
                runs.setdefault(part.run, []).extend(self.groups(part))
        for groups in runs.values():
            yield [group for group in groups if group.newest > since and group.oldest <= upto]

    def _groups_in(self, batch: ShardBatch, span: Span, *, since: int, upto: int) -> list[Group]:
        """The row groups of a batch that may hold rows of the window and the span."""
        runs = self._runs(batch, since=since, upto=upto)
        return [group for groups in runs for group in groups if group.may_hold(span)]


def _newest_rows(
    groups: Sequence[Group], columns: Sequence[str], span: Span, *, since: int, upto: int
) -> pa.Table:
    """The newest version of each key of a span. The versions are found by keys and times, and the
    other columns are read of one row group at a time: older versions, which may be many and large,
    are never in memory together."""
    found = []
    for number, group in enumerate(groups):
        table = points(group, ["key", "timestamp", "op"], span, since=since, upto=upto)
        table = table.append_column("group", pa.array(np.full(table.num_rows, number)))
        found.append(table.append_column("row", pa.array(np.arange(table.num_rows))))
    table = pa.concat_tables(found)
    found.clear()
    order = pc.sort_indices(table, _NEWEST_FIRST)
    newest = first_of_each_key(table.take(order).combine_chunks(), None)
    rows = []
    for number in newest["group"].unique().to_pylist():
        wanted = newest.filter(pc.equal(newest["group"], number))["row"]
        table = points(groups[number], columns, span, since=since, upto=upto)
        rows.append(table.take(wanted))
    table = pa.concat_tables(rows) if rows else points(groups[0], columns, span, since=0, upto=0)
    return table.take(pc.sort_indices(table, _NEWEST_FIRST[:1])).combine_chunks()


def _sorted(
    runs: Sequence[Sequence[Group]], span: Span, columns: Sequence[str], since: int, upto: int
) -> Iterator[pa.Table]:
    """The versions of a span by key, oldest first. A span whose rows are too many to be sorted at
    once is cut at the key in its middle, and reads its row groups again."""
    groups = [group for run in runs for group in run if group.may_hold(span)]
    tables: list[pa.Table] = []
    for group in groups:
        tables.append(points(group, columns, span, since=since, upto=upto))
        if sum(table.nbytes for table in tables) > SORTED_BYTES_MAX:
            break
    else:
        if tables:
            table = pa.concat_tables(tables)
            yield table.take(pc.sort_indices(table, _OLDEST_FIRST)).combine_chunks()
        return
    tables.clear()
    only = ["key", "timestamp", "op"]
    each = (points(group, only, span, since=since, upto=upto)["key"].unique() for group in groups)
    keys = pc.unique(pa.chunked_array(each, pa.binary()))
    keys = keys.take(pc.sort_indices(keys))
    if len(keys) > 1:
        middle = keys[len(keys) // 2].as_py()
        for half in (Span(span.start, middle), Span(middle, span.end)):
            yield from _sorted(runs, half, columns, since, upto)
    else:
        yield from _of_one_key(runs, span, columns, since, upto)


def _of_one_key(
    runs: Sequence[Sequence[Group]], span: Span, columns: Sequence[str], since: int, upto: int
) -> Iterator[pa.Table]:
    """The versions of the one key of a span, oldest first. Holds a row group of each run."""

    def versions(groups: Sequence[Group]) -> Iterator[tuple[int, pa.Table]]:
        for group in reversed(groups):
            if group.may_hold(span):
                table = points(group, columns, span, since=since, upto=upto)
                for row in reversed(range(table.num_rows)):
                    yield table["timestamp"][row].as_py(), table.slice(row, 1)

    for _, table in heapq.merge(*map(versions, runs), key=itemgetter(0)):
        yield table


def _file_spans(runs: Iterable[Sequence[Group]]) -> list[FileSpan]:
    return [
        FileSpan(group.first, group.last, group.size_bytes)
        for groups in runs
        for group in groups
        if group.first is not None and group.last is not None
    ]


def _sortable_spans(runs: Sequence[Sequence[Group]], span: Span) -> list[Span]:
    """Cut a span so that the runs have at most `SORTED_BYTES_MAX` in each part of it."""
    size = sum(group.size_bytes for groups in runs for group in groups)
    return split_span(span, _file_spans(runs), max(-(-size // SORTED_BYTES_MAX), 1))


# --------------------------------------------------------------------------------------------------
# An origin over a live store that a server owns: rows stream from it, and no file is shared.
#
# The planner takes a lease on the time that it reads at, so that garbage collection leaves it alone
# while tasks are under way. The tasks take the lease again as they read. Spark does not tell a
# source when a query is over, so a lease ends by itself, some time after the last task.
#
# Invariants
# 1. A stream that breaks off, because the server was started anew or the task was slow, continues
#    behind its last row. Times are pinned, so the rows are the same.
# 2. A lease that has ended is no wrong answer: a task takes it anew, or fails with
#    `HistoryGoneError` where the history is gone.

_RENEWALS: Final = 3
"""Times that a task takes its lease again while the lease would last."""

_PASSING: Final = (RetryableError, IndeterminateError)

_Rows = Callable[[Span], pa.RecordBatchReader]


class ServerOrigin:
    """An origin over the store behind a server."""

    def __init__(self, place: Place) -> None:
        assert place.access is not None, "the place is a server"
        self.place = place
        self._seconds = place.access.lease_seconds
        self._client = place.access.connect()
        self._renewed_at: float | None = None

    def frontiers(self, reaching: int = 0) -> OriginFrontiers:
        found = self._client.call("times")
        if reaching >= found["upper"]:
            with suppress(NotYetWrittenError):
                self._client.call("resolve", as_of=str(Timestamp(reaching)))
                found = self._client.call("times")
        return OriginFrontiers(found["since"], found["upper"], found["store_id"])

    def events(self) -> list[HistoryEntry]:
        return []

    def files(self, upto: int) -> Sequence[FileSpan]:
        return [
            FileSpan(
                from_json(each["first"], name="first"),
                from_json(each["last"], name="last"),
                int(each["size_bytes"]),
            )
            for each in self._client.call("files")["files"]
        ]

    def narrow(self, span: Span) -> Span:
        if span.plain() == span:
            return span
        found = self._client.call("files", start=to_json(span.start), end=to_json(span.end))
        return span.plain() if found["hides_reserved"] else span

    def keep(self, since: int) -> None:
        if self.place.lease is None:
            self.place = self.place._replace(lease=secrets.token_hex(12))
        self._renew(since)

    def state(
        self, span: Span, as_of: int, columns: Sequence[str], rows: int
    ) -> Iterator[pa.RecordBatch]:
        def scan(rest: Span) -> pa.RecordBatchReader:
            return self._client.scan_batches(
                rest.start, rest.end, as_of=Timestamp(as_of), batch_rows=rows
            )

        for batch in self._unbroken(scan, span, needed=as_of):
            yield batch.select(list(columns))

    def points(
        self,
        span: Span,
        *,
        since: int,
        upto: int,
        latest: bool,
        columns: Sequence[str],
        rows: int,
        by_key: bool = False,
    ) -> Iterator[pa.RecordBatch]:
        def changed(rest: Span) -> pa.RecordBatchReader:
            return self._client.versions_batches(
                Timestamp(since), Timestamp(upto), span=rest, revisions=_revisions(latest)
            )

        needed = upto if latest and since == 0 else since
        for batch in self._unbroken(changed, span, needed=needed):
            coded = _with_codes_of_parts(batch)
            for start in range(0, coded.num_rows, rows):
                yield coded.slice(start, rows).select(list(columns))

    def ranges(self, span: Span, *, since: int, upto: int, latest: bool) -> list[Change]:
        with self._client.versions_batches(
            Timestamp(since), Timestamp(upto), span=span, revisions=_revisions(latest), ranges=True
        ) as reader:
            found = reader.read_all().to_pylist()
        return [
            Change(Timestamp(each["timestamp"]), "delete_range", each["key"], each["end_key"], None)
            for each in found
        ]

    def cut(self, span: Span, *, since: int, upto: int, rows: int | None, size: int | None) -> int:
        passed = count = current = 0
        reached = since
        images: Images = "none" if size is None else "delta"
        with self._client.changes_batches(
            Timestamp(since), Timestamp(upto), span=span, images=images
        ) as reader:
            for batch in reader:
                times = batch.column("timestamp").to_pylist()
                sizes = [0] * len(times) if size is None else _row_bytes(batch)
                for each, weight in zip(times, sizes, strict=True):
                    if each != current:
                        reached, current = current or since, each
                    count, passed = count + 1, passed + weight
                    if (rows is not None and count > rows) or (size is not None and passed > size):
                        return reached if reached > since else current
        return upto

    def count(self, span: Span, *, since: int, upto: int) -> ChangeCount | None:
        try:
            found = self._client.call(
                "count_changes", since=str(Timestamp(since)), upto=str(Timestamp(upto))
            )
        except AccessDeniedError:  # the token is for the keys of a prefix
            return None
        return ChangeCount(found["changes"], found["is_exact"] and span == Span())

    def join(
        self,
        labels: pa.RecordBatchReader,
        *,
        key: str,
        at: str,
        columns: tuple[str, str],
        choice: JoinChoice,
    ) -> pa.RecordBatchReader:
        return choice.join(self._client, labels, key, at, columns)

    def rows_of(self, table: str) -> AbstractContextManager[JoinableRows]:
        return nullcontext(self._client.table(table))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._client.close()

    # -- inside -----------------------------------------------------------------------------

    def _unbroken(self, rows_of: _Rows, span: Span, *, needed: int) -> Iterator[pa.RecordBatch]:
        """The rows of a span by key, over streams that break. `needed` is the oldest time that is
        read."""
        last, given, tries = span.start, 0, 0  # rows of the key `last` that were given already
        while True:
            self._renew(needed)
            passed = 0
            try:
                with rows_of(Span(last, span.end)) as reader:
                    for batch in reader:
                        skipped = min(given - passed, batch.num_rows)
                        passed += skipped
                        fresh = batch.slice(skipped)
                        if not fresh.num_rows:
                            continue
                        yield fresh
                        tries = 0
                        last, given = _behind(fresh, last, given)
                        passed = given
                        self._renew_in_time(needed)
                return
            except _PASSING:
                tries += 1
                if tries > READER_TRIES_MAX:
                    raise

    def _renew(self, since: int) -> None:
        if self.place.lease is not None:
            self._client.lease(self.place.lease, Timestamp(since), seconds=self._seconds)
            self._renewed_at = time.monotonic()

    def _renew_in_time(self, since: int) -> None:
        renewed_at = self._renewed_at
        if renewed_at is not None and time.monotonic() - renewed_at > self._seconds / _RENEWALS:
            self._renew(since)


def _with_codes_of_parts(batch: pa.RecordBatch) -> pa.RecordBatch:
    """The batch with the operations of backup/rows.py; the server has the change index's
    codes."""
    is_put = pc.equal(batch.column("op"), CHANGE_PUT)
    ops = pc.if_else(is_put, pa.scalar(OP_PUT, pa.uint8()), pa.scalar(OP_DELETE, pa.uint8()))
    return batch.set_column(batch.schema.get_field_index("op"), "op", ops)


def _behind(batch: pa.RecordBatch, last: bytes, given: int) -> tuple[bytes, int]:
    """The last key of a batch, and how many rows of this key there were up to its end."""
    keys = batch.column("key")
    key: bytes = keys[-1].as_py()
    if batch.num_rows == 1 or keys[-2].as_py() != key:
        same = 1
    else:
        same = pc.sum(pc.equal(keys, keys[-1])).as_py()
    return key, same + (given if key == last and same == batch.num_rows else 0)


def _row_bytes(batch: pa.RecordBatch) -> list[int]:
    keys, values = (pc.binary_length(batch.column(name)) for name in ("key", "value"))
    found: list[int] = pc.add(keys, pc.fill_null(values, 0)).to_pylist()
    return found


def _revisions(latest: bool) -> Revisions:
    return "latest" if latest else "all"


# --------------------------------------------------------------------------------------------------
# Finding the origin at a path or URL: a store, checkpoints, a backup collection, or a server.


class Place(NamedTuple):
    """The picklable address of an origin: a store, a checkpoint, one chain of a collection, or the
    store behind a server."""

    path: str
    access: Access | None = None
    """How to open the collection, or to call the server. None for the files of a store."""
    chain: str | None = None
    lease: str | None = None
    """The name of the lease that keeps the history of a live store while tasks read it."""

    @property
    def is_server(self) -> bool:
        return self.access is not None and self.access.is_server

    @property
    def is_collection(self) -> bool:
        return self.access is not None and not self.access.is_server


def find(access: Access | str) -> Place:
    """The place at a path or URL. In a directory of checkpoints it is the newest that is not open.

    Raises `LockedError` if another process has the store open, `NotAStoreError` if nothing readable
    lies there, and `UsageError` if a store lies there but options tell how to open a collection.
    """
    access = Access(access) if isinstance(access, str) else access
    with storage_errors(access.url):
        return _found(access)


def _found(access: Access) -> Place:
    path = access.url
    root = Path(path)
    if "://" in path or (root / "consensus").is_dir():
        return Place(path, access)
    if access != Access(path):
        options = ", ".join(access.as_options())
        raise UsageError(
            f"{path} is no collection; {options} are for collections and servers", "remove them"
        )
    found = [root] if engine_at(root) is not None else _checkpoints(root)
    free = next((each for each in found if not _is_open_to_write(each)), None)
    if free is not None:
        return Place(str(free))
    if found:
        raise LockedError(
            str(found[0]),
            "a process that writes; read a checkpoint of the store, or a collection",
        )
    what = "neither a store, a checkpoint nor a collection"
    raise NotAStoreError(path, what, "check the path, and that all machines see it")


def _checkpoints(directory: Path) -> list[Path]:
    """The stores in a directory, newest first. An unfinished one is hidden or ends in `.tmp`."""
    if not directory.is_dir():
        return []
    found = {
        each: made
        for each in directory.iterdir()
        if not each.name.startswith(".") and not each.name.endswith(".tmp")
        if (made := _made_at(each)) is not None
    }
    return sorted(found, key=found.__getitem__, reverse=True)


def _made_at(store: Path) -> int | None:
    """When a store was made, in nanoseconds. None if no store is there, or none any more."""
    current = store / "CURRENT"  # only RocksDB has it
    try:
        if engine_at(store) is None:
            return None
        return (current if current.exists() else store).stat().st_mtime_ns
    except FileNotFoundError:
        return None


def _is_open_to_write(store: Path) -> bool:
    """Whether another process has the store open.

    Call it only in a process that has no store open: closing the lock file would drop its own lock.
    It asks for a lock of either kind: RocksDB locks by `lockf`, and the memory engine by `flock`.
    Both locks are shared, because other readers may ask at the same time.
    """
    try:
        with (store / "LOCK").open("rb") as lock:
            fcntl.lockf(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
            fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:  # a checkpoint has no lock file, and a writer needs one
        return False
    return False


# --------------------------------------------------------------------------------------------------
# Opening the origin that a place names.


def open_origin(place: Place, *, covering: Sequence[int] = ()) -> Origin:
    """Open the origin at a place. Of a collection, take the chain that covers the times, if any.

    Raises `UsageError` if this machine does not see its directory.
    """
    if "://" not in place.path:
        require_seen([place.path])
    # A task opens one of the kinds, and need not pay for importing the others.
    if place.is_server:
        return ServerOrigin(place)
    if place.is_collection:
        return CollectionOrigin(place, covering)

    return CheckpointOrigin(place)
