"""`df.write.format("kvstore").mode("append").save(staging)`: stages an import, which the store's
owner adds with `bulk.ingest`.

A writer cannot ask Spark for an order: rows must come range-partitioned and sorted by key, as
`sorted_rows` makes them. Each task writes one part; the manifest is written when all have, and is
the commit.

Invariants
1. `commit` may run twice, and `abort` after it: neither undoes what was sealed.
2. A part that no message names was left by a failed or superseded attempt, and is never added.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import pyarrow as pa
from pyspark.sql.datasource import DataSourceArrowWriter, WriterCommitMessage
from pyspark.sql.types import BinaryType, StringType, StructType

from bulk.part import Part, PartWriter
from bulk.sst import require_compression
from bulk.staged import Import
from bulk.staging import MANIFEST_NAME, discard, read_manifest, seal
from kvstore.errors import UsageError
from spark_connector.worker import freeze_objects

_TYPES = {"key": BinaryType(), "value": BinaryType(), "op": StringType()}


@dataclass(frozen=True)
class PartWritten(WriterCommitMessage):
    """One task's part; None if it had no rows."""

    part: Part | None


class StagingWriter(DataSourceArrowWriter):
    """Builds one import in a staging directory."""

    def __init__(self, path: str, schema: StructType, *, compression: str) -> None:
        _require_columns(schema)
        require_compression(compression)
        self._staging = Path(path).resolve()
        self._import_id = Import.create(self._staging).import_id
        self._compression = compression

    def write(self, iterator: Iterator[pa.RecordBatch]) -> WriterCommitMessage:
        freeze_objects()
        with PartWriter(self._staging, self._import_id, compression=self._compression) as writer:
            for batch in iterator:
                writer.write(batch)
            return PartWritten(writer.finish())

    def commit(self, messages: Sequence[WriterCommitMessage | None]) -> None:
        if (self._staging / MANIFEST_NAME).exists():
            if read_manifest(self._staging).import_id != self._import_id:
                raise UsageError(f"{self._staging} is sealed", "stage into another directory")
            return
        parts = [m.part for m in messages if isinstance(m, PartWritten) and m.part is not None]
        seal(self._staging, self._import_id, parts)

    def abort(self, messages: Sequence[WriterCommitMessage | None]) -> None:
        if not (self._staging / MANIFEST_NAME).exists():
            discard(self._staging)


def _require_columns(schema: StructType) -> None:
    for field in schema.fields:
        if _TYPES.get(field.name) != field.dataType:
            raise UsageError(
                f"column {field.name} {field.dataType.simpleString()} cannot be imported",
                "pass key binary, value binary and, if need be, op string; sorted_rows makes them",
            )
    if not {"key", "value"} <= set(schema.names):
        raise UsageError(f"columns {schema.names}", "pass key and value")
