"""An origin over a backup collection: the state at a time, or the changes of a window.

The rows of a run are sorted by key, and each key's versions newest first
(`backup/version_rows.py`). After the rows of several runs are sorted in the same order, the first
row of each key is its newest version. All of this works on whole columns.

If only one run has rows for a span, as after a full backup, the row groups of this run are read
one by one without a sort. Otherwise the span is cut so that the rows of each part of it fit into
memory. Statistics keep a task from opening row groups without a row for it.

Times alone decide which rows are read. So compaction may replace batches between planning and
reading, or between two tasks, and the rows stay the same.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from operator import itemgetter
from typing import Any, Final

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from typing_extensions import Self

from backup.instants import covers, gone, instant_of
from backup.shard import OP_DELETE_RANGE, OP_PUT, ShardBatch, ShardPart
from backup.version_rows import range_rows
from kvstore.changes import Change
from kvstore.engine import FileSpan
from kvstore.errors import UsageError
from kvstore.joins import OnGone
from kvstore.mvcc import Cover, Fragments, RangeTombstone
from kvstore.mvcc.expiry import EXPIRY
from kvstore.reserve import CATALOGUE
from kvstore.span import Span
from kvstore.splits import split_span
from kvstore.timestamp import Timestamp
from spark_connector.origins.origin import ChangeCount, HistoryEntry, JoinableRows, OriginFrontiers
from spark_connector.origins.place import Place
from spark_connector.origins.row_groups import (
    Group,
    columns_with,
    first_of_each_key,
    points,
    row_group,
    uncovered,
)

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
            if whole and span == Span() and not any(part.drop_below for part in batch.parts):
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
        max_age: timedelta | None,
        columns: tuple[str, str],
        on_gone: OnGone,
    ) -> pa.RecordBatchReader:
        return self._collection.join(labels, key, at, max_age, columns=columns, on_gone=on_gone)

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
                and max(since, group.drop_below - 1) < group.oldest
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
                        if row[2] >= group.drop_below
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
