"""Streams of `format("kvstore")`: changes as they reach a collection, a new checkpoint or a server.

    offset := {"timestamp": t, "store": id, "state": false}             all changes up to t are read
              {"timestamp": t, "store": id, "state": true, "key": hex}  the keys of the state at t
                                                                        below `key` are read;
                                                                        without `key`, none is

A micro-batch is the window between two offsets. History never changes, so a micro-batch that is
read again after a crash has the same rows. With a start given, a stream begins after it. Without
one it begins with the state (as puts) at one time, and continues with the changes after that time.

`maxRowsPerTrigger` cuts windows between commits, so a larger commit comes whole, and cuts the first
state between keys. The last offset is the end of the origin, so an idle origin gives no
micro-batches.

The progress of a query names the end of the origin as `latestOffset`, with the lag of the stream
behind its micro-batch:

    lag_seconds   from the end of the micro-batch to the end of the origin
    lag_rows      the changes between the two; absent while the first state is read, and where a
                  token may not know it
    lag_is_exact  false where `lag_rows` is an estimate, or counts other keys too

Invariants
1. The two offsets of a micro-batch alone decide its rows, as long as no history is lost.
2. Offsets only grow, and stay below the origin's `upper`.
"""

from __future__ import annotations

import secrets
from collections.abc import Iterator
from typing import Any

import pyarrow as pa
from pyspark.sql.types import StructType

from kvstore.errors import HistoryGoneError, UsageError
from kvstore.span import Span
from kvstore.timestamp import NS_PER_SECOND, Timestamp, reached
from spark_connector.interfaces import (
    DataSourceStreamReader,
    InputPartition,
    ReadAllAvailable,
    ReadLimit,
    ReadMaxBytes,
    ReadMaxRows,
    SupportsTriggerAvailableNow,
)
from spark_connector.options import ReadOptions
from spark_connector.origins.opening import open_origin
from spark_connector.origins.origin import ChangeCount, Origin, OriginFrontiers
from spark_connector.origins.place import find
from spark_connector.reading.partitions import (
    ReadPartition,
    cut_state,
    plan_partitions,
    read_partition,
    require_window,
    table_of,
    whole_spans,
)
from spark_connector.reading.schema import arrow_schema
from spark_connector.reading.typed import TypedRows
from spark_connector.worker import plain_errors


class StreamReader(DataSourceStreamReader, SupportsTriggerAvailableNow):
    """A stream of changes. All its state is in the offsets."""

    def __init__(self, options: ReadOptions, schema: StructType) -> None:
        self._options = options
        self._schema = arrow_schema(schema)
        self._target: int | None = None
        self._newest: dict[str, Any] | None = None
        self._lease = secrets.token_hex(12)
        """One lease for the whole stream: each micro-batch moves it."""

    @plain_errors()
    def initialOffset(self) -> dict[str, Any]:  # noqa: N802
        frontiers = self._frontiers()
        self._options.require_nanoseconds(frontiers.upper)
        since = self._options.since
        if since is not None:  # later commits of the same microsecond are not skipped
            since = Timestamp(reached(since, frontiers.upper - 1))
        return _offset(since or 0, frontiers.store_id, state=since is None)

    def getDefaultReadLimit(self) -> ReadLimit:  # noqa: N802
        if self._options.rows_per_trigger is not None:
            return ReadMaxRows(self._options.rows_per_trigger)
        if self._options.bytes_per_trigger is not None:
            return ReadMaxBytes(self._options.bytes_per_trigger)
        return ReadAllAvailable()

    @plain_errors()
    def prepareForTriggerAvailableNow(self) -> None:  # noqa: N802
        self._target = self._frontiers().upper - 1

    @plain_errors()
    def latestOffset(  # noqa: N802
        self, start: dict[str, Any] | None = None, limit: ReadLimit | None = None
    ) -> dict[str, Any]:
        if start is None:  # a release without bounds of micro-batches asks for the end
            frontiers = self._frontiers()
            return _offset(frontiers.upper - 1, frontiers.store_id)
        with self._open(start) as origin:
            frontiers = origin.frontiers()
            end = self._end(origin, frontiers, start, limit)
            newest = _offset(frontiers.upper - 1, frontiers.store_id)
            self._newest = {**newest, **self._lag(origin, end, int(frontiers.upper) - 1)}
        return end

    def reportLatestOffset(self) -> dict[str, Any] | None:  # noqa: N802
        """The end of the origin at the last look, with the lag of the stream, for the progress of
        the query. It is no offset of a micro-batch."""
        return self._newest

    @plain_errors()
    def partitions(self, start: dict[str, Any], end: dict[str, Any]) -> list[InputPartition]:
        upto = int(end["timestamp"])
        is_state = start["state"]
        with self._open(start, upto) as origin:
            frontiers = origin.frontiers()
            # The first state is each key's latest change since the beginning of time.
            since = 0 if is_state else self._readable(start, frontiers)
            _require_same_store(end, frontiers, self._options.access.url)
            if is_state:
                upto = self._kept(upto, frontiers)
            whole, table = self._whole(origin, upto)
            span = _left(whole, start, end) if is_state else whole
            if since >= upto or span is None:
                return [InputPartition(None)]
            latest = is_state or self._options.latest
            oldest, upper = frontiers.since, frontiers.upper
            require_window(since, upto, oldest=oldest, upper=upper, latest=latest)
            window: Any = {"since": since, "upto": upto, "latest": latest}
            return plan_partitions(origin, [whole], [span], self._options, **window, table=table)

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        if not isinstance(partition, ReadPartition):
            return iter(())
        return read_partition(partition, self._options, self._schema)

    def _end(
        self,
        origin: Origin,
        frontiers: OriginFrontiers,
        start: dict[str, Any],
        limit: ReadLimit | None,
    ) -> dict[str, Any]:
        """The end of the micro-batch that begins at `start`."""
        rows = limit.max_rows if isinstance(limit, ReadMaxRows) else None
        size = limit.max_bytes if isinstance(limit, ReadMaxBytes) else None
        is_limited = rows is not None or size is not None
        since = self._readable(start, frontiers)
        target = frontiers.upper - 1
        if self._target is not None:
            target = min(target, self._target)
        if start["state"]:
            at, key = (since if "key" in start else target), None
            span = _left(self._whole(origin, at)[0], start) if is_limited else None
            if span is not None:
                key = cut_state(origin, span, at, rows=rows, size=size)
            return _offset(at, frontiers.store_id, state=key is not None, key=key)
        if since >= target:
            return start
        if is_limited:
            whole, _ = self._whole(origin, target)
            target = origin.cut(whole, since=since, upto=target, rows=rows, size=size)
        return _offset(target, frontiers.store_id)

    def _lag(self, origin: Origin, end: dict[str, Any], newest: int) -> dict[str, Any]:
        """How far a stream that has read up to `end` is behind the time `newest`. The rows that are
        left of a first state are not counted: that costs a pass over them."""
        at = int(end["timestamp"])
        lag: dict[str, Any] = {"lag_seconds": max(newest - at, 0) / NS_PER_SECOND}
        if not end["state"]:
            count: ChangeCount | None = ChangeCount(0, is_exact=True)
            if at < newest:
                count = origin.count(self._whole(origin, at)[0], since=at, upto=newest)
            if count is not None:
                lag |= {"lag_rows": count.rows, "lag_is_exact": count.is_exact}
        return lag

    def _frontiers(self) -> OriginFrontiers:
        with open_origin(find(self._options.access)) as origin:
            return origin.frontiers()

    def _open(self, start: dict[str, Any], *ends: int) -> Origin:
        """Open the origin; of a collection the chain that holds the times of the offsets."""
        began = [] if _is_fresh(start) else [int(start["timestamp"])]
        times = list(ends) if start["state"] and ends else [*began, *ends]
        place = find(self._options.access)._replace(lease=self._lease)
        return open_origin(place, covering=times)

    def _whole(self, origin: Origin, at: int) -> tuple[Span, TypedRows | None]:
        """The keys that the stream reads up to a time, and the table whose rows they are."""
        table = table_of(origin, self._options, self._schema, at)
        [whole] = whole_spans(origin, self._options, table)  # a stream takes no ranges
        return whole, table

    def _readable(self, start: dict[str, Any], frontiers: OriginFrontiers) -> int:
        """The start of the next window: the offset's time, or a later time that `_kept` allows."""
        _require_same_store(start, frontiers, self._options.access.url)
        since = int(start["timestamp"])
        return since if _is_fresh(start) else self._kept(since, frontiers)

    def _kept(self, time: int, frontiers: OriginFrontiers) -> int:
        """The time of an offset. If the history after it is lost: the oldest kept time, or an
        error."""
        if time >= frontiers.since:
            return time
        if self._options.fail_on_data_loss:
            raise HistoryGoneError(
                as_of=Timestamp(time),
                since=frontiers.since,
                remedy="changes are lost: start over from the state with a new checkpoint "
                'location, or set failOnDataLoss to "false" to continue without them',
            )
        return frontiers.since


class RefusedReader(DataSourceStreamReader):
    """A stream that cannot be read: each method raises the error of the failed constructor.

    If making a reader raises, Spark's runner of streams fails with an UnboundLocalError, which then
    is the last line that the user sees.
    """

    def __init__(self, error: UsageError) -> None:
        self._error = error

    @plain_errors()
    def getDefaultReadLimit(self) -> ReadLimit:  # noqa: N802
        raise self._error

    @plain_errors()
    def initialOffset(self) -> dict[str, Any]:  # noqa: N802
        raise self._error

    def latestOffset(self, *_: Any) -> dict[str, Any]:  # noqa: N802
        raise self._error

    def partitions(self, start: dict[str, Any], end: dict[str, Any]) -> list[InputPartition]:
        raise self._error

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        raise self._error


def _offset(
    timestamp: int, store_id: str, *, state: bool = False, key: bytes | None = None
) -> dict[str, Any]:
    offset = {"timestamp": int(timestamp), "store": store_id, "state": state}
    return offset if key is None else {**offset, "key": key.hex()}


def _left(whole: Span, start: dict[str, Any], end: dict[str, Any] | None = None) -> Span | None:
    """The part of the span of the first state from `start` to `end`. None if it is empty."""
    low = bytes.fromhex(start.get("key", ""))
    high = bytes.fromhex(end["key"]) if end is not None and "key" in end else None
    return whole.intersect(low, high)


def _is_fresh(offset: dict[str, Any]) -> bool:
    """Whether the stream has read nothing yet, so that it may begin with the state of any time."""
    return bool(offset["state"]) and "key" not in offset


def _require_same_store(offset: dict[str, Any], frontiers: OriginFrontiers, path: str) -> None:
    if offset["store"] != frontiers.store_id:
        raise UsageError(
            f"the stream has read store {offset['store']}; {path} holds {frontiers.store_id}",
            "give each store's stream a checkpoint location of its own",
        )
