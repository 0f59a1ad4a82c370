"""`spark.readStream.format("kvstore")`: changes as they reach a collection or a new checkpoint.

    offset := {"timestamp": t, "store": id, "state": bool}      everything up to t was read

A micro-batch is the window between two offsets, and history never changes: whatever is read again
after a crash is what was read before. With a start given, a stream begins after it. Without one
its first micro-batch is the state (as puts) at a time, and the next begins after that time.

`maxRowsPerTrigger` cuts windows between commits; one commit larger than that comes whole, as does
the first state. An offset ends where the origin ended, so an idle origin gives no micro-batches.

Invariants
1. What a micro-batch holds follows from its two offsets alone.
2. Offsets only grow, and stay below the origin's `upper`.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pyarrow as pa
from pyspark.sql.datasource import DataSourceStreamReader, InputPartition
from pyspark.sql.streaming.datasource import (
    ReadAllAvailable,
    ReadLimit,
    ReadMaxBytes,
    ReadMaxRows,
    SupportsTriggerAvailableNow,
)
from pyspark.sql.types import StructType

from kvstore.errors import HistoryGoneError, UsageError
from spark_connector.options import ReadOptions
from spark_connector.origin import Frontiers, find, open_origin
from spark_connector.schema import arrow_schema
from spark_connector.source import Piece, pieces, read_piece, require_window


class StreamReader(DataSourceStreamReader, SupportsTriggerAvailableNow):
    """A stream of changes. Keeps nothing that a restart would miss."""

    def __init__(self, options: ReadOptions, schema: StructType) -> None:
        self._options = options
        self._schema = arrow_schema(schema)
        self._target: int | None = None

    def initialOffset(self) -> dict[str, Any]:  # noqa: N802
        frontiers = self._frontiers()
        since = self._options.since
        return _offset(since or 0, frontiers.store_id, state=since is None)

    def getDefaultReadLimit(self) -> ReadLimit:  # noqa: N802
        if self._options.rows_per_trigger is not None:
            return ReadMaxRows(self._options.rows_per_trigger)
        if self._options.bytes_per_trigger is not None:
            return ReadMaxBytes(self._options.bytes_per_trigger)
        return ReadAllAvailable()

    def prepareForTriggerAvailableNow(self) -> None:  # noqa: N802
        self._target = self._frontiers().upper - 1

    def latestOffset(self, start: dict[str, Any], limit: ReadLimit) -> dict[str, Any]:  # noqa: N802
        with open_origin(find(self._options.path)) as origin:
            frontiers = origin.frontiers()
            since = self._readable(start, frontiers)
            target = frontiers.upper - 1 if self._target is None else self._target
            if since >= target and not start["state"]:
                return start
            rows = limit.max_rows if isinstance(limit, ReadMaxRows) else None
            size = limit.max_bytes if isinstance(limit, ReadMaxBytes) else None
            if not start["state"] and (rows is not None or size is not None):
                target = origin.cut(
                    self._options.span, since=since, upto=target, rows=rows, size=size
                )
        return _offset(target, frontiers.store_id)

    def partitions(self, start: dict[str, Any], end: dict[str, Any]) -> list[InputPartition]:
        place = find(self._options.path)
        upto = int(end["timestamp"])
        with open_origin(place) as origin:
            frontiers = origin.frontiers()
            since = self._readable(start, frontiers)
            _require_same_store(end, frontiers, self._options.path)
            if since >= upto:
                return [InputPartition(None)]
            # The first state is each key's latest change since the beginning of time.
            latest = start["state"] or self._options.revisions == "latest"
            oldest, upper = frontiers.since, frontiers.upper
            require_window(since, upto, oldest=oldest, upper=upper, latest=latest)
            span, options = self._options.span, self._options
            return pieces(
                origin,
                place,
                span,
                since=since,
                upto=upto,
                options=options,
                whole=span,
                latest=latest,
            )

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        if not isinstance(partition, Piece):
            return iter(())
        return read_piece(partition, self._options, self._schema)

    def _frontiers(self) -> Frontiers:
        with open_origin(find(self._options.path)) as origin:
            return origin.frontiers()

    def _readable(self, start: dict[str, Any], frontiers: Frontiers) -> int:
        """Where the next window begins: at the offset, or where history begins if it may."""
        _require_same_store(start, frontiers, self._options.path)
        since = int(start["timestamp"])
        if since >= frontiers.since or start["state"]:
            return since
        if self._options.fail_on_data_loss:
            raise HistoryGoneError(
                as_of=since,
                since=frontiers.since,
                remedy="changes were lost: start over from the state with a new checkpoint "
                'location, or set failOnDataLoss to "false" to go on without them',
            )
        return frontiers.since


def _offset(timestamp: int, store_id: str, *, state: bool = False) -> dict[str, Any]:
    return {"timestamp": int(timestamp), "store": store_id, "state": state}


def _require_same_store(offset: dict[str, Any], frontiers: Frontiers, path: str) -> None:
    if offset["store"] != frontiers.store_id:
        raise UsageError(
            f"the stream has read store {offset['store']}, {path} holds {frontiers.store_id}",
            "give each store's stream a checkpoint location of its own",
        )
