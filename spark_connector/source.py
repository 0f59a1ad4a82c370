"""The data source `kvstore`: `spark.read.format("kvstore")`, its streams and its writes.

Spark plans a read in a process of its own, never in the caller's. So a read cannot use a store that
the caller has open: it reads a checkpoint of the store, a collection, or the store through its
server.
"""

from __future__ import annotations

from typing import Final

from pyspark.errors import AnalysisException
from pyspark.sql import SparkSession
from pyspark.sql.types import StructType

from kvstore.errors import UsageError
from kvstore.spark.access import freeze_objects, plain_errors
from kvstore.spark.format_options import (
    ReadOptions,
    asked_table,
    column_names,
    honoured,
    read_options,
    reads_changes,
    require_readable_options,
    staging_of,
)
from kvstore.spark.interfaces import (
    DataSource,
    DataSourceReader,
    DataSourceStreamReader,
    DataSourceStreamWriter,
    DataSourceWriter,
)
from kvstore.spark.read import QueryReader, offered, require_known, require_same, table_schema
from kvstore.spark.releases import LIMITS, SOURCES, require

FORMAT: Final = "kvstore"


class KVStoreSource(DataSource):
    """The format, whose name `pyspark_kvstore` tells to Spark."""

    @classmethod
    def name(cls) -> str:
        return FORMAT

    @plain_errors()
    def schema(self) -> StructType:
        freeze_objects()
        require_readable_options(self.options)
        table = asked_table(self.options)
        if table is not None:
            return table_schema(table)
        columns = column_names(self.options.get("columns"))
        return offered(changes=reads_changes(self.options), columns=columns)

    @plain_errors()
    def reader(self, schema: StructType) -> DataSourceReader:
        freeze_objects()
        changes = reads_changes(self.options)
        options = read_options(self.options, "changes" if changes else "state")
        asked = _require_known(schema, options)
        return QueryReader(options, asked, changes=changes)

    def streamReader(self, schema: StructType) -> DataSourceStreamReader:  # noqa: N802
        from kvstore.spark.read import RefusedReader, StreamReader

        freeze_objects()
        try:
            options = read_options(self.options, "stream")
            if options.rows_per_trigger is not None or options.bytes_per_trigger is not None:
                require(LIMITS)
            asked = _require_known(schema, options)
        except UsageError as error:
            return RefusedReader(error)
        return StreamReader(options, asked)

    def streamWriter(  # noqa: N802
        self, schema: StructType, overwrite: bool
    ) -> DataSourceStreamWriter:
        raise UsageError(
            f'writeStream.format("{FORMAT}") is not offered: one process alone has a store open',
            "let that process import: writeStream.foreachBatch(batch_importer(store, ...))",
        )

    @plain_errors()
    def writer(self, schema: StructType, overwrite: bool) -> DataSourceWriter:
        from kvstore.spark.streaming import StagingWriter  # readers need no import of it

        freeze_objects()
        given = honoured(self.options, "write")
        if overwrite:
            raise UsageError('mode("overwrite") is not offered', 'stage with mode("append")')
        return StagingWriter(staging_of(given), schema, compression=given.get("compression", "lz4"))


def _require_known(schema: StructType, options: ReadOptions) -> StructType:
    """The schema that Spark asks for. The columns of a table are checked as the read is planned."""
    if options.table is None:
        return require_known(schema, changes=options.changes, columns=options.columns)
    if options.columns is not None:
        require_same(schema, options.columns)
    return schema


def register(spark: SparkSession) -> None:
    """Tell `spark` the name of the format.

    A session needs the call only where it does not find the name by itself: where the Python of its
    driver lacks the package `pyspark_kvstore`, or has it from an editable install whose finder of
    imports lists no names. Raises `UsageError` before PySpark 4.0.
    """
    require(SOURCES)
    try:
        spark.dataSource.register(KVStoreSource)
    except AnalysisException as error:  # PySpark 4.0 refuses a name that it has found by itself
        if "DATA_SOURCE_ALREADY_EXISTS" not in str(error):
            raise
