"""The format's name. The source itself is imported when it is first used."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pyspark.sql.datasource import (
    DataSource,
    DataSourceReader,
    DataSourceStreamReader,
    DataSourceStreamWriter,
    DataSourceWriter,
)
from pyspark.sql.types import StructType

from pyspark_kvstore.quiet import end_silently

if TYPE_CHECKING:
    from kvstore.spark.source import KVStoreSource


class DefaultSource(DataSource):
    """A stand-in for `spark_connector.source.KVStoreSource`."""

    @classmethod
    def name(cls) -> str:
        return "kvstore"

    def schema(self) -> StructType:
        return self._source().schema()

    def reader(self, schema: StructType) -> DataSourceReader:
        return self._source().reader(schema)

    def streamReader(self, schema: StructType) -> DataSourceStreamReader:  # noqa: N802
        return self._source().streamReader(schema)

    def writer(self, schema: StructType, overwrite: bool) -> DataSourceWriter:
        return self._source().writer(schema, overwrite)

    def streamWriter(  # noqa: N802
        self, schema: StructType, overwrite: bool
    ) -> DataSourceStreamWriter:
        return self._source().streamWriter(schema, overwrite)

    def _source(self) -> KVStoreSource:
        from kvstore.spark.source import KVStoreSource

        return KVStoreSource(self.options)


end_silently()  # the search for formats imports this module, and calls nothing of it
