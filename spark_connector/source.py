"""`spark.read.format("kvstore")`: the state of a store as of a time, or the changes of a window.

Spark plans in a process of its own, never in the caller's, so a store that the caller has open is
out of reach: read a checkpoint of it, or a collection. Planning pins the time and the place, cuts
the key space, and every task reads its piece of the same history.

A reader that has `pushFilters` fails where the session does not allow pushing, and cannot ask
whether it does: so there are two of each, and `register(spark)` switches the setting on.

What is pushed only narrows what is read: Spark applies every filter again.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Final

import pyarrow as pa
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
from kvstore.errors import UsageError
from spark_connector import pushdown
from spark_connector.options import (
    ReadOptions,
    column_names,
    honoured,
    read_options,
    reads_changes,
    wants_pushdown,
)
from spark_connector.origin import Origin, find, open_origin
from spark_connector.pieces import Piece, pieces, read_piece, require_window
from spark_connector.schema import arrow_schema, offered, require_known
from spark_connector.worker import freeze_objects

FORMAT: Final = "kvstore"


class KVStoreSource(DataSource):
    """The format without filter pushdown: works in every session."""

    pushes = False

    @classmethod
    def name(cls) -> str:
        return FORMAT

    def schema(self) -> StructType:
        freeze_objects()
        columns = column_names(self.options.get("columns"))
        return offered(changes=reads_changes(self.options), columns=columns)

    def reader(self, schema: StructType) -> DataSourceReader:
        freeze_objects()
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
        from spark_connector.stage import StagingWriter  # tasks that read do without

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
            return pieces(origin, span, options, since=since, upto=upto, latest=options.latest)

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
        from_start = options.since is None or (options.since == 0 and options.latest)
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
        require_window(options.since, upto, oldest=oldest, upper=upper, latest=options.latest)
        if options.latest:
            return options.since, upto
        narrowed = self._narrowed
        return max(options.since, narrowed.since), min(upto, narrowed.upto)


class PushingReader(Reader):
    """A batch read that takes bounds on keys and commits from the query's filters."""

    def pushFilters(self, filters: list[Filter]) -> Iterable[Filter]:  # noqa: N802
        for each in filters:
            self._narrowed = pushdown.narrowed(self._narrowed, each)
        return filters
