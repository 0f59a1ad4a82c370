"""`spark.read.format("kvstore")`: the state of a store as of a time, or the changes of a window.

Spark plans in a process of its own, never in the caller's, so a store that the caller has open is
out of reach: read a checkpoint of it, or a collection. Planning pins the time and the place, cuts
the key space, and every task reads its piece of the same history.

A reader that has `pushFilters` fails where the session does not allow pushing, and cannot ask
whether it does: so there are two of each, and `register(spark)` switches the setting on.

Invariants
1. All tasks read at one pinned time from one pinned place.
2. Pieces of the key space are disjoint and complete: each row is read once. A range delete belongs
   to the piece that its start (cut to the whole span) lies in.
3. What is pushed only narrows what is read: Spark applies every filter again.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc
from pyspark.sql import SparkSession
from pyspark.sql.datasource import (
    DataSource,
    DataSourceReader,
    DataSourceStreamReader,
    DataSourceStreamWriter,
    DataSourceWriter,
    Filter,
    InputPartition,
)
from pyspark.sql.types import StructType

from kvstore.commit import require_readable
from kvstore.errors import HistoryGoneError, NotYetWrittenError, UsageError
from kvstore.limits import ARROW_ROWS_MAX
from kvstore.span import Span
from kvstore.splits import split_span
from kvstore.timestamp import Timestamp
from spark_connector import pushdown
from spark_connector.checkpoint import ranges_batch
from spark_connector.images import image_rows
from spark_connector.options import (
    ReadOptions,
    honoured,
    read_options,
    reads_changes,
    wants_pushdown,
)
from spark_connector.origin import Origin, Place, find, open_origin
from spark_connector.schema import (
    arrow_schema,
    offered,
    require_known,
    shaped,
    stored_columns,
)
from spark_connector.worker import spare_the_collector

FORMAT: Final = "kvstore"

BYTES_PER_SPLIT: Final = 128 << 20
"""Bytes that one task reads at most, as Spark has it for files: a Python task costs tens of ms."""

BYTES_WORTH_SPLITTING: Final = 4 << 20
"""From here on every core gets a piece, and as many as every other: no core waits at the end."""

SPLITS_MAX: Final = 10_000


@dataclass(frozen=True)
class Piece(InputPartition):
    """What one task reads. `since` is None for the state."""

    place: Place
    span: Span
    whole: Span
    since: int | None
    upto: int
    latest: bool
    images: bool = False


class KVStoreSource(DataSource):
    """The format without filter pushdown: works in every session."""

    pushes = False

    @classmethod
    def name(cls) -> str:
        return FORMAT

    def schema(self) -> StructType:
        spare_the_collector()
        columns = self.options.get("columns")
        names = None if columns is None else [name.strip() for name in columns.split(",")]
        return offered(changes=reads_changes(self.options), columns=names)

    def reader(self, schema: StructType) -> DataSourceReader:
        spare_the_collector()
        changes = reads_changes(self.options)
        options = read_options(self.options, "changes" if changes else "state")
        asked = require_known(schema, changes=changes, columns=options.columns)
        pushes = wants_pushdown(self.options, default=self.pushes)
        kind = PushingReader if pushes else Reader
        return kind(options, asked, changes=changes)

    def streamReader(self, schema: StructType) -> DataSourceStreamReader:  # noqa: N802
        from spark_connector.stream import RefusedReader, StreamReader

        try:
            options = read_options(self.options, "stream")
            asked = require_known(schema, changes=True, columns=options.columns)
        except UsageError as error:
            return RefusedReader(error)
        return StreamReader(options, asked)

    def streamWriter(  # noqa: N802
        self, schema: StructType, overwrite: bool
    ) -> DataSourceStreamWriter:
        raise UsageError(
            f'writeStream.format("{FORMAT}") is not offered: a store is one process\'s',
            "let that process import: writeStream.foreachBatch(batch_importer(store, ...))",
        )

    def writer(self, schema: StructType, overwrite: bool) -> DataSourceWriter:
        from spark_connector.stage import StagingWriter

        given = honoured(self.options, "write")
        if overwrite:
            raise UsageError('mode("overwrite") is not offered', 'stage with mode("append")')
        return StagingWriter(given["path"], schema, compression=given.get("compression", "lz4"))


class PushingSource(KVStoreSource):
    """The same with filter pushdown, for sessions that allow it."""

    pushes = True


def register(spark: SparkSession) -> None:
    """Make the format known to `spark`, with filters on keys and commits pushed to the source.

    Without it the format is known all the same (`pyspark_kvstore`), and Spark filters alone.
    """
    spark.conf.set("spark.sql.python.filterPushdown.enabled", "true")
    spark.dataSource.register(PushingSource)


class Reader(DataSourceReader):
    """A batch read."""

    def __init__(self, options: ReadOptions, schema: StructType, *, changes: bool) -> None:
        if changes and options.since is None:
            raise UsageError(
                "a read of changes needs a start",
                "pass startingTimestamp (changes after it; 0 is the beginning)",
            )
        self._options = options
        self._schema = arrow_schema(schema)
        self._changes = changes
        self._narrowed: pushdown.Bounds = pushdown.Bounds()

    def partitions(self) -> list[InputPartition]:
        options = self._options
        with open_origin(find(options.access), covering=self._covering()) as origin:
            since, upto = self._window(origin)
            span = options.span.intersect(self._narrowed.start, self._narrowed.end)
            if span is None or (since is not None and since >= upto):
                return [InputPartition(None)]
            place, whole = origin.place, options.span
            return pieces(origin, place, span, since=since, upto=upto, options=options, whole=whole)

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        if not isinstance(partition, Piece):  # Spark makes one of its own where there is none
            return iter(())
        return read_piece(partition, self._options, self._schema)

    def _covering(self) -> list[int]:
        """The times by which a chain of a collection is chosen: without an end, the newest."""
        options = self._options
        end = options.upto if self._changes else options.as_of
        if end is None:
            return []
        from_start = options.since is None or (options.since == 0 and _latest(options))
        return [end] if from_start else [options.since or 0, end]

    def _window(self, origin: Origin) -> tuple[int | None, int]:
        options = self._options
        oldest, upper, _ = origin.frontiers()
        if not self._changes:
            as_of = upper - 1 if options.as_of is None else options.as_of
            require_readable(as_of, since=oldest, upper=upper)
            return None, as_of
        assert options.since is not None, "checked when it was made"
        upto = upper - 1 if options.upto is None else options.upto
        require_window(options.since, upto, oldest=oldest, upper=upper, latest=_latest(options))
        if _latest(options):
            return options.since, upto
        narrowed = self._narrowed
        return max(options.since, narrowed.since), min(upto, narrowed.upto)


class PushingReader(Reader):
    """A batch read that takes bounds on keys and commits from the query's filters."""

    def pushFilters(self, filters: list[Filter]) -> Iterable[Filter]:  # noqa: N802
        for each in filters:
            self._narrowed = pushdown.narrowed(self._narrowed, each)
        return filters


def require_window(since: int, upto: int, *, oldest: int, upper: int, latest: bool) -> None:
    """Raise unless the changes in `(since, upto]` are all there."""
    if since >= upper:
        raise NotYetWrittenError(as_of=Timestamp(since), upper=upper)
    if since > upto:
        raise UsageError(f"the window ({since}, {upto}] ends before it starts", "swap its ends")
    require_readable(upto, since=oldest, upper=upper)
    if since < oldest and not (latest and since == 0):
        raise HistoryGoneError(
            as_of=since, since=oldest, remedy="read the state, then changes after its time"
        )


def pieces(
    origin: Origin,
    place: Place,
    span: Span,
    *,
    since: int | None,
    upto: int,
    options: ReadOptions,
    whole: Span,
    latest: bool | None = None,
) -> list[InputPartition]:
    """Cut a read into pieces of about equal size. `latest` is as the options say unless given."""
    files = origin.files(upto)
    count = options.partitions or _split_count(sum(file.size_bytes for file in files))
    only_latest = _latest(options) if latest is None else latest
    base = Piece(place, span, whole, since, upto, only_latest, options.images)
    return [replace(base, span=part) for part in split_span(span, files, count)]


def cut_state(
    origin: Origin, span: Span, as_of: int, *, rows: int | None, size: int | None
) -> bytes | None:
    """The key before which the state in `span` has so many rows or bytes; None: it has no more.

    At least one row is before it. Reads these rows, in pieces of bounded memory.
    """
    limit = rows if size is None else size
    assert limit is not None, "one of the two is given"
    files = origin.files(as_of)
    columns = ["key"] if size is None else ["key", "value"]
    passed, is_first = 0, True
    for piece in split_span(span, files, _split_count(sum(file.size_bytes for file in files))):
        for batch in origin.state(piece, as_of, columns, ARROW_ROWS_MAX):
            if not batch.num_rows:
                continue
            weights = np.ones(batch.num_rows, np.int64) if size is None else _row_bytes(batch)
            sums = passed + np.cumsum(weights)
            fitting = max(int(np.searchsorted(sums, limit, side="right")), int(is_first))
            if fitting < batch.num_rows:
                key: bytes = batch.column("key")[fitting].as_py()
                return key
            passed, is_first = int(sums[-1]), False
    return None


def _row_bytes(batch: pa.RecordBatch) -> npt.NDArray[np.int64]:
    keys, values = (pc.binary_length(batch.column(name)) for name in ("key", "value"))
    found: npt.NDArray[np.int64] = pc.add(keys, values).to_numpy().astype(np.int64)
    return found


def read_piece(piece: Piece, options: ReadOptions, schema: pa.Schema) -> Iterator[pa.RecordBatch]:
    """The rows of a piece as Spark wants them, bounded in rows and bytes."""
    spare_the_collector()
    columns = stored_columns(schema.names)
    with open_origin(piece.place) as origin:
        for batch in _stored(origin, piece, columns, options.batch_rows):
            for part in _bounded(batch, options.batch_bytes):
                yield shaped(part, schema)


def _stored(
    origin: Origin, piece: Piece, columns: list[str], rows: int
) -> Iterator[pa.RecordBatch]:
    if piece.since is None:
        yield from origin.state(piece.span, piece.upto, columns, rows)
        return
    window: Any = {"since": piece.since, "upto": piece.upto, "latest": piece.latest}
    if piece.images:
        yield from image_rows(origin, piece.span, **window, rows=rows)
        return
    ours = [each for each in origin.ranges(piece.whole, **window) if each.key in piece.span]
    if ours:
        yield ranges_batch(ours, columns)
    yield from origin.points(piece.span, **window, columns=columns, rows=rows)


def _bounded(batch: pa.RecordBatch, size_max: int) -> Iterator[pa.RecordBatch]:
    """Halve a batch until each piece fits, or is one row."""
    if batch.num_rows <= 1 or batch.nbytes <= size_max:
        if batch.num_rows:
            yield batch
        return
    half = batch.num_rows // 2
    yield from _bounded(batch.slice(0, half), size_max)
    yield from _bounded(batch.slice(half), size_max)


def _split_count(size_bytes: int) -> int:
    if size_bytes < BYTES_WORTH_SPLITTING:
        return 1
    cores = os.cpu_count() or 1
    return min(-(-size_bytes // (BYTES_PER_SPLIT * cores)) * cores, SPLITS_MAX)


def _latest(options: ReadOptions) -> bool:
    return options.revisions == "latest"
