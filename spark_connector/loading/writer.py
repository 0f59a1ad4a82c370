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

from bulk.bucket import BucketUrl
from bulk.building import BucketPlace, BuildingPlace, DirectoryPlace
from bulk.part import Part, PartWriter
from bulk.sst import require_compression
from bulk.staged import Import
from kvstore.errors import UsageError
from spark_connector.executors import require_seen
from spark_connector.interfaces import DataSourceArrowWriter, WriterCommitMessage
from spark_connector.loading.build import sent_part
from spark_connector.worker import freeze_objects, plain_errors

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
    """The writer of one import in a staging directory or an object store."""

    def __init__(self, place: Path | BucketUrl, schema: StructType, *, compression: str) -> None:
        _require_columns(schema)
        require_compression(compression)
        self._place = place
        if isinstance(place, Path):
            made = Import.create(place)
        else:
            made = Import.create(place.url, options=place.options, patience=place.patience_s)
        self._import_id = made.import_id
        self._compression = compression

    def write(self, iterator: Iterator[pa.RecordBatch]) -> WriterCommitMessage:
        freeze_objects()
        place = self._place
        if isinstance(place, BucketUrl):
            [(part, _)] = sent_part(place, self._import_id, iterator, self._compression)
            return PartWritten(part)
        require_seen([place])
        with PartWriter(place, self._import_id, compression=self._compression) as writer:
            for batch in iterator:
                writer.write(batch)
            return PartWritten(writer.finish())

    @plain_errors()
    def commit(self, messages: Sequence[WriterCommitMessage | None]) -> None:
        freeze_objects()
        build = self._build()
        known = build.sealed_id()
        if known is not None:
            if known != self._import_id:
                raise UsageError(f"{self._where()} is sealed", "stage into another place")
            return
        parts = [m.part for m in messages if isinstance(m, PartWritten) and m.part is not None]
        build.seal(self._import_id, parts, ())

    @plain_errors()
    def abort(self, messages: Sequence[WriterCommitMessage | None]) -> None:
        freeze_objects()
        self._build().discard()

    def _build(self) -> BuildingPlace:
        place = self._place
        return DirectoryPlace(place) if isinstance(place, Path) else BucketPlace(place.open())

    def _where(self) -> str:
        return str(self._place) if isinstance(self._place, Path) else self._place.open().where


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
