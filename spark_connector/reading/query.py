"""Batch reads of `format("kvstore")`: planning one read, and reading one of its partitions.

Planning fixes the time and the place and cuts the key space, so all tasks read the same history.

Filters narrow a read to the keys that they leave. The caller applies them again to the rows.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Final

import pyarrow as pa
from pyspark.sql.types import StructType

from kvstore.commit import require_readable
from kvstore.errors import NotYetWrittenError, UsageError
from kvstore.span import Span
from kvstore.timestamp import Timestamp, reached
from spark_connector.interfaces import DataSourceReader, InputPartition
from spark_connector.options import ReadOptions
from spark_connector.origins.opening import open_origin
from spark_connector.origins.origin import Origin
from spark_connector.origins.place import find
from spark_connector.reading.indexed import row_spans
from spark_connector.reading.partitions import (
    ReadPartition,
    plan_partitions,
    read_partition,
    require_window,
    table_of,
    whole_spans,
)
from spark_connector.reading.pushdown import key_spans
from spark_connector.reading.schema import arrow_schema
from spark_connector.reading.typed import TypedRows, table_at
from spark_connector.worker import plain_errors

_COPY_ENDS: Final = (
    "a checkpoint or collection ends at its last commit or backup: leave the time out to read "
    "up to its end, or make a newer copy"
)


def table_schema(options: ReadOptions) -> StructType:
    """The columns of the table that the options name, at the end of the read. Opens the origin.

    Raises `UsageError` if there is no such table, or Spark has no type for a column.
    """
    assert options.table is not None, "the caller looked"
    end = options.upto if options.changes else options.as_of
    with open_origin(find(options.access), covering=[] if end is None else [end]) as origin:
        oldest, upper, _ = origin.frontiers(reaching=end or 0)
        options.require_nanoseconds(upper)
        at = upper - 1 if end is None else reached(end, upper - 1)
        require_readable(at, since=oldest, upper=upper)
        table = table_at(origin, options.table, at)
    return table.offered(changes=options.changes, columns=options.columns)


class QueryReader(DataSourceReader):
    """One batch read: the state as of a time, or the changes of a window."""

    def __init__(self, options: ReadOptions, schema: StructType, *, changes: bool) -> None:
        if changes and options.since is None:
            raise UsageError(
                "a read of changes needs a start",
                "pass startingTimestamp (changes after it; 0 is the beginning)",
            )
        self._options = options
        self._schema = arrow_schema(schema)
        self._changes = changes

    def partitions(self) -> list[InputPartition]:
        with plain_errors():
            return self._planned()

    def _planned(self) -> list[InputPartition]:
        options = self._options
        with open_origin(find(options.access), covering=self._covering()) as origin:
            since, upto = self._window(origin)
            table = table_of(origin, options, self._schema, upto)
            if since is not None and since >= upto:
                return [InputPartition(None)]
            wholes = whole_spans(origin, options, table)
            wanted = self._wanted(origin, table, upto)
            window: Any = {"since": since, "upto": upto, "latest": options.latest}
            return plan_partitions(origin, wholes, wanted, options, **window, table=table)

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        if not isinstance(partition, ReadPartition):  # without partitions of ours Spark plans one
            return iter(())
        return read_partition(partition, self._options, self._schema)

    def _wanted(self, origin: Origin, table: TypedRows | None, upto: int) -> list[Span]:
        """The keys that can have rows of the query, by its filters."""
        filters = self._options.filters
        if filters is None:
            return [Span()]
        if table is None:
            return key_spans(filters)
        # The entries as of the end of a window do not name the rows that changed before.
        indexed = None if self._changes else origin
        return row_spans(indexed, table.codec, filters, upto)

    def _covering(self) -> list[int]:
        """The times that choose the chain of a collection. No time chooses the newest chain."""
        options = self._options
        end = options.upto if self._changes else options.as_of
        if end is None:
            return []
        from_start = options.since is None or (options.since == 0 and options.latest)
        return [end] if from_start else [options.since or 0, end]

    def _window(self, origin: Origin) -> tuple[int | None, int]:
        options = self._options
        end = options.upto if self._changes else options.as_of
        oldest, upper, _ = origin.frontiers(reaching=end or 0)
        options.require_nanoseconds(upper)
        end = None if end is None else Timestamp(reached(end, upper - 1))
        if end is not None and end >= upper and not origin.place.is_server:
            raise NotYetWrittenError(as_of=Timestamp(end), upper=upper, remedy=_COPY_ENDS)
        if not self._changes:
            as_of = upper - 1 if end is None else end
            require_readable(as_of, since=oldest, upper=upper)
            return None, as_of
        assert options.since is not None, "__init__ has checked it"
        since, upto = reached(options.since, upper - 1), upper - 1 if end is None else end
        require_window(since, upto, oldest=oldest, upper=upper, latest=options.latest)
        return since, upto
