"""The partitions of a read: one for each task, disjoint and complete.

Invariants
1. All tasks read one place at one time, both fixed when the read is planned.
2. The spans of the partitions are disjoint and cover the spans of the read: each row is read once.
   A range delete is cut to each span that the options name, and belongs to the partition that its
   start then lies in.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from backup.version_rows import row_batches
from kvstore.commit import require_readable
from kvstore.errors import HistoryGoneError, NotYetWrittenError, UsageError
from kvstore.limits import ARROW_ROWS_MAX
from kvstore.span import Span
from kvstore.splits import split_span
from kvstore.timestamp import Timestamp
from spark_connector.interfaces import InputPartition
from spark_connector.options import ReadOptions
from spark_connector.origins.opening import open_origin
from spark_connector.origins.origin import Origin
from spark_connector.origins.place import Place
from spark_connector.reading.images import PREIMAGE, image_rows
from spark_connector.reading.pushdown import common, joined
from spark_connector.reading.schema import shaped, stored_columns
from spark_connector.reading.typed import TypedRows, table_at
from spark_connector.worker import freeze_objects, plain_errors

BYTES_PER_SPLIT: Final = 128 << 20
"""Bytes that one task reads at most. It is Spark's size for files; a task costs tens of ms."""

BYTES_WORTH_SPLITTING: Final = 4 << 20
"""From this size on all cores get equally many partitions, so no core idles at the end."""

SPLITS_MAX: Final = 10_000


@dataclass(frozen=True)
class ReadPartition(InputPartition):
    """The rows that one task reads: their keys lie in `spans`, parts of `span` in order. They are
    rows of `table` if one is given. `wholes` are the spans that the options name. A state has no
    `since`."""

    place: Place
    span: Span
    spans: Sequence[Span]
    wholes: Sequence[Span]
    since: int | None
    upto: int
    latest: bool
    images: bool = False
    table: TypedRows | None = None


def require_window(since: int, upto: int, *, oldest: int, upper: int, latest: bool) -> None:
    """Raise unless the origin has all changes in `(since, upto]`. The caller has put each time
    through `kvstore.timestamp.reached`."""
    if since >= upper:
        raise NotYetWrittenError(as_of=Timestamp(since), upper=upper)
    if since > upto:
        raise UsageError(f"the window ({since}, {upto}] ends before it starts", "swap its ends")
    require_readable(upto, since=oldest, upper=upper)
    if since < oldest and not (latest and since == 0):
        raise HistoryGoneError(
            as_of=since, since=oldest, remedy="read the state, then changes after its time"
        )


def plan_partitions(
    origin: Origin,
    wholes: Sequence[Span],
    wanted: Sequence[Span],
    options: ReadOptions,
    *,
    since: int | None,
    upto: int,
    latest: bool,
    table: TypedRows | None = None,
) -> list[InputPartition]:
    """Cut a read into parts of about equal size. See `whole_spans`.

    The rows of a read lie in `wholes`. Filters leave the keys in `wanted`; a part may read keys
    between two of them. Both are disjoint and in order. A part without a wanted key is left out.
    The history that the parts read is kept for them.
    """
    between = [span for whole in wholes for span in common(wanted, whole)]
    if not between:
        return [InputPartition(None)]
    origin.keep(upto if since is None or (latest and since == 0) else since)
    files = origin.files(upto)
    count = options.partitions or _split_count(sum(file.size_bytes for file in files))
    # The rows of a row group come at once; a store's directory is seeked key by key.
    shared = files if origin.place.is_collection else []
    hull = Span(between[0].start, between[-1].end)
    base = ReadPartition(origin.place, hull, (), (), since, upto, latest, options.images, table)
    planned: list[InputPartition] = []
    for part in split_span(hull, files, count):
        mine = [whole for whole in wholes if whole.intersect(part.start, part.end) is not None]
        spans = [
            span
            for whole in mine
            if (both := whole.intersect(part.start, part.end)) is not None
            for span in joined(common(wanted, both), shared)
        ]
        if spans:
            planned.append(replace(base, span=part, spans=tuple(spans), wholes=tuple(mine)))
    return planned


def table_of(origin: Origin, options: ReadOptions, schema: pa.Schema, at: int) -> TypedRows | None:
    """The table that the options name, as it is at a time; None if they name none. Raises
    `UsageError` if the origin has no such table, or the table lacks a column of the schema."""
    if options.table is None:
        return None
    table = table_at(origin, options.table, at)
    table.require_known(schema, changes=options.changes)
    return table


def whole_spans(origin: Origin, options: ReadOptions, table: TypedRows | None) -> list[Span]:
    """The keys that the options name, as disjoint spans in order: the rows of a table, or keys of
    no table and no expiry."""
    if table is None:
        return [origin.narrow(span) for span in options.spans]
    return [Span.of_prefix(table.codec.key.prefix)]


def cut_state(
    origin: Origin, span: Span, as_of: int, *, rows: int | None, size: int | None
) -> bytes | None:
    """The key before which the state in `span` has a number of rows or bytes. None if it has fewer.

    At least one row lies before the key. Reads the rows before it, in bounded memory.
    """
    limit = rows if size is None else size
    assert limit is not None, "one of the two is given"
    files = origin.files(as_of)
    columns = ["key"] if size is None else ["key", "value"]
    passed, is_first = 0, True
    for part in split_span(span, files, _split_count(sum(file.size_bytes for file in files))):
        for batch in origin.state(part, as_of, columns, ARROW_ROWS_MAX):
            if not batch.num_rows:
                continue
            weights = np.ones(batch.num_rows, np.int64) if size is None else _row_bytes(batch)
            sums = passed + np.cumsum(weights)
            fitting = max(int(np.searchsorted(sums, limit, side="right")), int(is_first))
            if fitting < batch.num_rows:
                key: bytes = batch.column("key")[fitting].as_py()
                return key
            passed, is_first = int(sums[-1]), False
    return None


def _row_bytes(batch: pa.RecordBatch) -> npt.NDArray[np.int64]:
    keys, values = (pc.binary_length(batch.column(name)) for name in ("key", "value"))
    found: npt.NDArray[np.int64] = pc.add(keys, values).to_numpy().astype(np.int64)
    return found


def read_partition(
    partition: ReadPartition, options: ReadOptions, schema: pa.Schema
) -> Iterator[pa.RecordBatch]:
    """The rows of a partition as batches of the asked schema, bounded in rows and bytes."""
    freeze_objects()
    table = partition.table
    changes = partition.since is not None
    if table is None:
        columns = stored_columns(schema.names)
    else:
        columns = table.stored_columns(schema.names, changes=changes)
    with plain_errors(), open_origin(partition.place) as origin:
        for batch in _stored(origin, partition, columns, options.batch_rows):
            for part in _bounded(batch, options.batch_bytes):
                if table is None:
                    yield shaped(part, schema)
                else:
                    yield table.shaped(part, schema, changes=changes)


def _stored(
    origin: Origin, partition: ReadPartition, columns: list[str], rows: int
) -> Iterator[pa.RecordBatch]:
    if partition.since is None:
        for span in partition.spans:
            yield from origin.state(span, partition.upto, columns, rows)
        return
    window: Any = {"since": partition.since, "upto": partition.upto, "latest": partition.latest}
    if partition.images or partition.table is not None:
        for span in partition.spans:
            for batch in image_rows(origin, span, **window, rows=rows):
                is_wanted = pc.not_equal(batch.column("op"), PREIMAGE)
                yield batch if partition.images else batch.filter(is_wanted)
        return
    ours = [
        each
        for whole in partition.wholes
        for each in origin.ranges(whole, **window)
        if each.key in partition.span
    ]
    for batch in row_batches(ours):
        yield batch.select(columns)
    for span in partition.spans:
        yield from origin.points(span, **window, columns=columns, rows=rows)


def _bounded(batch: pa.RecordBatch, size_max: int) -> Iterator[pa.RecordBatch]:
    """Halve a batch until each half fits, or has one row."""
    if batch.num_rows <= 1 or batch.nbytes <= size_max:
        if batch.num_rows:
            yield batch
        return
    half = batch.num_rows // 2
    yield from _bounded(batch.slice(0, half), size_max)
    yield from _bounded(batch.slice(half), size_max)


def _split_count(size_bytes: int) -> int:
    if size_bytes < BYTES_WORTH_SPLITTING:
        return 1
    cores = os.cpu_count() or 1
    return min(-(-size_bytes // (BYTES_PER_SPLIT * cores)) * cores, SPLITS_MAX)
