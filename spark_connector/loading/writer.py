"""`df.write.format("kvstore").mode("append").save(staging)`: a write that stages an import.

The process that has the store open adds the import by `bulk.ingest`.

A writer cannot ask Spark for an order. So the rows must be partitioned and sorted by key, as
`sorted_rows` makes them. Each task writes one part. When all tasks have ended, the driver writes
the manifest, which commits the import.

Invariants
1. `commit` may run twice, and `abort` after it. Neither undoes a sealed import.
2. Failed and repeated tasks leave parts that no message names. Such a part is never added.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import pyarrow as pa
from pyspark.sql.types import BinaryType, DataType, LongType, StringType, StructType, TimestampType

from bulk.part import Part, PartWriter
from bulk.sst import require_compression
from bulk.staged import Import
from bulk.staging import MANIFEST_NAME, discard, read_manifest, seal
from kvstore.arguments import is_there
from kvstore.errors import UsageError
from spark_connector.executors import require_seen
from spark_connector.interfaces import DataSourceArrowWriter, WriterCommitMessage
from spark_connector.worker import freeze_objects

_TYPES: Final[dict[str, list[DataType]]] = {
    "key": [BinaryType()],
    "value": [BinaryType()],
    "op": [StringType()],
    "expires": [TimestampType(), LongType()],
}


@dataclass(frozen=True)
class PartWritten(WriterCommitMessage):
    """The part that one task has written. None if the task had no rows."""

    part: Part | None


class StagingWriter(DataSourceArrowWriter):
    """The writer of one import in a staging directory."""

    def __init__(self, staging: Path, schema: StructType, *, compression: str) -> None:
        _require_columns(schema)
        require_compression(compression)
        self._staging = staging
        self._import_id = Import.create(self._staging).import_id
        self._compression = compression

    def write(self, iterator: Iterator[pa.RecordBatch]) -> WriterCommitMessage:
        freeze_objects()
        require_seen([self._staging])
        with PartWriter(self._staging, self._import_id, compression=self._compression) as writer:
            for batch in iterator:
                writer.write(batch)
            return PartWritten(writer.finish())

    def commit(self, messages: Sequence[WriterCommitMessage | None]) -> None:
        if is_there(self._staging / MANIFEST_NAME):
            if read_manifest(self._staging).import_id != self._import_id:
                raise UsageError(f"{self._staging} is sealed", "stage into another directory")
            return
        parts = [m.part for m in messages if isinstance(m, PartWritten) and m.part is not None]
        seal(self._staging, self._import_id, parts)

    def abort(self, messages: Sequence[WriterCommitMessage | None]) -> None:
        if not is_there(self._staging / MANIFEST_NAME):
            discard(self._staging)


def _require_columns(schema: StructType) -> None:
    for field in schema.fields:
        if field.dataType not in _TYPES.get(field.name, []):
            raise UsageError(
                f"column {field.name} {field.dataType.simpleString()} cannot be imported",
                "pass key binary, value binary and, if need be, op string and expires timestamp; "
                "sorted_rows makes them",
            )
    if not {"key", "value"} <= set(schema.names):
        raise UsageError(f"columns {schema.names}", "pass key and value")
