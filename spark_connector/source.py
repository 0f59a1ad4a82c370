"""`spark.read.format("kvstore")`: the state of a store as of a time, or the changes of a window.

Spark plans in a process of its own, never in the caller's, so a store that the caller has open is
out of reach: read a checkpoint of it, or a collection. Planning pins the time and the place, cuts
the key space, and every task reads its piece of the same history.

A reader that has `pushFilters` fails where the session does not allow pushing, and cannot ask
whether it does: so there are two of each, and `register(spark)` switches the setting on.

What is pushed only narrows what is read: Spark applies every filter again.
"""

from __future__ import annotations

from typing import Final

from pyspark.sql import SparkSession
from pyspark.sql.datasource import (
    DataSource,
    DataSourceReader,
    DataSourceStreamReader,
    DataSourceStreamWriter,
    DataSourceWriter,
)
from pyspark.sql.types import StructType

from kvstore.errors import UsageError
from spark_connector.options import (
    column_names,
    honoured,
    read_options,
    reads_changes,
    wants_pushdown,
)
from spark_connector.reading.query import PushdownQueryReader, QueryReader
from spark_connector.reading.schema import offered, require_known
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
        kind = PushdownQueryReader if pushes else QueryReader
        return kind(options, asked, changes=changes)

    def streamReader(self, schema: StructType) -> DataSourceStreamReader:  # noqa: N802
        from spark_connector.reading.stream import RefusedReader, StreamReader

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
        from spark_connector.loading.stage import StagingWriter  # tasks that read do without

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
