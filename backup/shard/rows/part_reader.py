"""Reading one part piece by piece, everything checked before it is believed.

A `ParquetFile` keeps the bytes that it fetched last, so two threads that read through one of them
take the bytes from one another. Each thread needs its own: see `OpenedPart`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import chain

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from kvstore.backup.shard.remedies import PART
from kvstore.backup.shard.rows.covers import lower_bound
from kvstore.backup.shard.rows.filters import may_have
from kvstore.backup.shard.rows.pages import (
    KeyFilters,
    chunks_of,
    filters_of,
    properties,
    read_footer,
)
from kvstore.backup.shard.rows.part_bytes import FetchedPart, WholePart, part_bytes
from kvstore.backup.shard.rows.part_format import FORMAT_KEY, FORMATS_READ, RULE_KEY, layout
from kvstore.backup.shard.rows.part_writer import whole_bytes_max
from kvstore.backup.shard.rows.rules import (
    OP_DELETE_RANGE,
    ORDER,
    VERSIONS_SCHEMA,
    column_numpy,
    keep,
)
from kvstore.backup.shard.state.state import RULE
from kvstore.backup.shard.state.trace import ShardPart
from kvstore.base.span import Span
from kvstore.errors import CorruptionError, FormatVersionError, KVStoreError
from kvstore.limits import (
    PART_CONTAINER_MAX,
    PART_TEXT_BYTES_MAX,
    ROW_GROUP_BYTES_MAX,
)
from kvstore.storage.contract import Blob

_WITHOUT_TRAILER = FORMATS_READ[:2]


def read_part(
    blob: Blob,
    part: ShardPart,
    *,
    span: Span,
    batch_rows: int,
    batch_bytes: int,
    whole: Span | None = None,
) -> Iterator[pa.RecordBatch]:
    """Yield the rows of `part` in `span`, in order, and range tombstones that reach into it.

    Range tombstones are cut to `whole`, or to `span` where no `whole` is given. Memory is one batch
    of `batch_rows` or about `batch_bytes`, whichever is less, and the bytes of two row groups as
    they are stored. Raises `MissingPartError` if the blob is gone, `CorruptionError` if its bytes
    are not as written.
    """
    if not touches(part, span):
        return
    file = open_part(blob, part)
    groups = [
        i for i in range(file.num_row_groups) if group_touches(file.metadata.row_group(i), span)
    ]
    if not groups:
        return
    metas = [file.metadata.row_group(i) for i in groups]
    batch_rows = min(batch_rows, *(_rows_within(meta, batch_bytes) for meta in metas))
    # Reading a column of nulls would take a sixth of the time.
    has_ranges = any(map(may_have_ranges, metas))
    columns = [n for n in VERSIONS_SCHEMA.names if has_ranges or n != "end_key"]
    # A few at a time: in one call the file would keep the bytes of all of them until the end.
    batches = chain.from_iterable(
        file.iter_batches(batch_size=batch_rows, row_groups=near, columns=columns)
        for near in _together(groups, metas)
    )
    while True:
        with translated(part):
            batch = next(batches, None)
            if batch is None:
                return
            wanted = _whole_rows(batch, VERSIONS_SCHEMA)
            _require_rows(wanted)
        if span != _EVERYTHING:
            wanted = _within(wanted, span, span if whole is None else whole)
        if wanted.num_rows:
            yield wanted


def _together(groups: Sequence[int], metas: Sequence[pq.RowGroupMetaData]) -> Iterator[list[int]]:
    """Row groups to be read in one call, of `ROW_GROUP_BYTES_MAX` together, or one that is larger.

    Each call takes as long as a megabyte.
    """
    held: list[int] = []
    size = 0
    for number, meta in zip(groups, metas, strict=True):
        if held and size + meta.total_byte_size > ROW_GROUP_BYTES_MAX:
            yield held
            held, size = [], 0
        held.append(number)
        size += meta.total_byte_size
    if held:
        yield held


_EVERYTHING = Span()


def touches(part: ShardPart, span: Span) -> bool:
    """True unless the bounds say that no row of `part` concerns `span`."""
    below_end = span.end is None or part.key_min < span.end
    return below_end and (part.key_max is None or part.key_max >= span.start)


def open_part(blob: Blob, part: ShardPart) -> pq.ParquetFile:
    """Open a part for reading piece by piece; raises as `read_part` does.

    No size that the part declares is believed; `pages` lists the checks. A small part is checked at
    once, a large part column by column as it is fetched.
    """
    return _opened(_source(blob, part))[0]


class OpenedPart:
    """A part that is open: its files for two threads, and the filters of its keys.

    With `by_block` the part is read by one thread, which fetches whole row groups.
    """

    def __init__(self, blob: Blob, part: ShardPart, *, by_block: bool = False) -> None:
        """Raises as `read_part` does."""
        self.part = part
        self._source = _source(blob, part, by_block=by_block)
        self.file, self._filters = _opened(self._source)
        with translated(part):
            self.values = self.file if by_block else _parquet_file(self._source, self.file.metadata)

    def may_have(self, group: int, key: bytes) -> bool:
        """False only if row group `group` surely has no row of `key`."""
        if not self._filters or (place := self._filters[group]) is None:
            return True
        with translated(self.part):
            return may_have(self._source.tail_bytes(*place), key)


def _source(blob: Blob, part: ShardPart, *, by_block: bool = False) -> WholePart | FetchedPart:
    if part.size <= whole_bytes_max(by_block=by_block):
        return WholePart(part, part_bytes(blob, part))
    with translated(part):
        return FetchedPart(blob, part, by_block=by_block)


def require_part(blob: Blob, part: ShardPart) -> None:
    """Read all bytes of a part.

    Raises as `read_part` does where the bytes are not as written, or where the part's bounds are
    narrower than its row groups.
    """
    file, _ = _opened(WholePart(part, part_bytes(blob, part)))
    for number in range(file.num_row_groups):
        _require_bounds(file.metadata.row_group(number), part)


def fault_of(blob: Blob, part: ShardPart) -> str | None:
    """Read all bytes of a part; returns its fault, None if its bytes are as written."""
    try:
        require_part(blob, part)
    except CorruptionError as error:
        return f"{error.where}: {error.problem}"
    return None


def _opened(source: WholePart | FetchedPart) -> tuple[pq.ParquetFile, KeyFilters]:
    """The file of a part, and where the filters of its row groups are."""
    part = source.part
    with translated(part):
        footer = read_footer(source.footer())
        schema = _written_schema(properties(footer), part)
        if source.has_trailer is False and properties(footer)[FORMAT_KEY] not in _WITHOUT_TRAILER:
            raise ValueError("its trailer is gone")
        chunks = chunks_of(footer, schema, rows=part.rows, size=part.size)
        filters = filters_of(footer, chunks, size=part.size)
        file = _parquet_file(source, _parquet_file(source, at_end=True).metadata)
        if not file.schema_arrow.equals(schema):
            raise ValueError(f"its columns are {', '.join(file.schema_arrow.names)}")
        source.check(chunks)
    return file, filters


def _parquet_file(
    source: WholePart | FetchedPart,
    metadata: pq.FileMetaData | None = None,
    *,
    at_end: bool = False,
) -> pq.ParquetFile:
    return pq.ParquetFile(
        source.end() if at_end else source.opened(),
        metadata=metadata,
        pre_buffer=True,  # one range for neighbouring columns
        page_checksum_verification=True,
        thrift_string_size_limit=PART_TEXT_BYTES_MAX,
        thrift_container_size_limit=PART_CONTAINER_MAX,
    )


def _written_schema(found: Mapping[bytes, bytes], part: ShardPart) -> pa.Schema:
    """The columns of a part with these properties."""
    version = found.get(FORMAT_KEY)
    if version not in FORMATS_READ:
        raise FormatVersionError(f"part {part.name}", found=version, supported=FORMATS_READ)
    if found.get(RULE_KEY) != RULE.encode():
        raise CorruptionError(f"part {part.name}", f"its rule is {found.get(RULE_KEY)!r}", PART)
    return VERSIONS_SCHEMA if version == FORMATS_READ[0] else layout()[0]


@contextmanager
def translated(part: ShardPart) -> Iterator[None]:
    """Turn the errors of Parquet's reader into `CorruptionError`s that name the part.

    `MemoryError`, which pyarrow raises too, passes: a lack of memory is no damage.
    """
    try:
        yield
    except (MemoryError, pa.ArrowCancelled):
        raise
    except (pa.ArrowException, OSError, ValueError) as error:
        if isinstance(error, KVStoreError):
            raise
        raise _damaged(part, error) from error


def _damaged(part: ShardPart, error: Exception) -> CorruptionError:
    return CorruptionError(f"part {part.name}", str(error).partition("\n")[0], PART)


def group_touches(group: pq.RowGroupMetaData, span: Span) -> bool:
    """True unless the row group's statistics say that none of its rows concerns `span`."""
    columns = {group.column(i).path_in_schema: group.column(i) for i in range(group.num_columns)}
    keys = columns["key"].statistics
    if keys is None or not keys.has_min_max:
        return True
    if span.end is not None and keys.min >= span.end:
        return False
    if keys.max >= span.start:
        return True
    # A range row has its start as key, and may reach into the span from before it.
    return may_have_ranges(group)


def may_have_ranges(group: pq.RowGroupMetaData) -> bool:
    """True unless the statistics say that the row group has no range rows."""
    columns = {group.column(i).path_in_schema: group.column(i) for i in range(group.num_columns)}
    ops = columns["op"].statistics
    return ops is None or not ops.has_min_max or ops.max >= OP_DELETE_RANGE


def _require_bounds(group: pq.RowGroupMetaData, part: ShardPart) -> None:
    """Raise `CorruptionError` where the part's bounds would make a reader miss rows."""
    columns = {group.column(i).path_in_schema: group.column(i) for i in range(group.num_columns)}
    keys, times = columns["key"].statistics, columns["timestamp"].statistics
    is_narrow = False
    if keys is not None and keys.has_min_max:
        is_narrow = keys.min < part.key_min
        is_narrow |= part.key_max is not None and keys.max > part.key_max
    if times is not None and times.has_min_max:
        is_narrow |= not part.time_min <= times.min <= times.max <= part.time_max
    if is_narrow:
        raise CorruptionError(
            f"part {part.name}", "its rows lie outside the bounds noted for it", PART
        )


def _require_rows(batch: pa.RecordBatch) -> None:
    """Raise `ValueError` for rows without a meaning."""
    _, puts, ranges, *others = np.bincount(column_numpy(batch, "op"), minlength=3)
    if others:
        raise ValueError("a row is neither put, delete nor range delete")
    values, ends = (len(batch) - batch.column(name).null_count for name in ("value", "end_key"))
    if values != puts or ends != ranges:
        raise ValueError("a put has no value, a delete one, or a range delete no end")


def _whole_rows(batch: pa.RecordBatch, schema: pa.Schema) -> pa.RecordBatch:
    """`batch`, with nulls in the columns that were not read."""
    if batch.num_columns == len(schema):
        return batch
    read = set(batch.schema.names)
    columns = [
        batch.column(f.name) if f.name in read else pa.nulls(batch.num_rows, f.type) for f in schema
    ]
    return pa.RecordBatch.from_arrays(columns, schema=schema)


def _rows_within(group: pq.RowGroupMetaData, size: int) -> int:
    """The number of rows of this group that stay below `size` bytes."""
    width = max(int(group.total_byte_size) // int(group.num_rows), 1)
    return max(size // width, 1)


def _within(batch: pa.RecordBatch, span: Span, whole: Span) -> pa.RecordBatch:
    """The rows with a key in `span`, and the range rows over `span`, cut to `whole`; in order."""
    keys = batch.column("key")
    low = lower_bound(keys, span.start)
    high = len(keys) if span.end is None else lower_bound(keys, span.end)
    inside = batch.slice(low, max(high - low, 0))
    before = _reaching_in(batch.slice(0, low), span.start, whole.start)
    if not _has_ranges(inside) and before is None:
        return inside
    found = [rows for rows in (before, inside) if rows is not None]
    return _cut_ends(pa.concat_batches(found), whole.end)


def _has_ranges(batch: pa.RecordBatch) -> bool:
    return bool((column_numpy(batch, "op") == OP_DELETE_RANGE).any())


def _reaching_in(batch: pa.RecordBatch, start: bytes, least: bytes) -> pa.RecordBatch | None:
    """Range rows that begin before `start` and end behind it, cut to begin at `least`."""
    ranges = keep(batch, column_numpy(batch, "op") == OP_DELETE_RANGE)
    ranges = ranges.filter(pc.greater(ranges.column("end_key"), pa.scalar(start, pa.binary())))
    if ranges.num_rows == 0:
        return None
    keys, first = ranges.column("key"), pa.scalar(least, pa.binary())
    starts = pc.if_else(pc.less(keys, first), first, keys)
    return ranges.set_column(0, batch.schema.field(0), starts)


def _cut_ends(batch: pa.RecordBatch, end: bytes | None) -> pa.RecordBatch:
    if end is not None:
        ends = batch.column("end_key")
        limit = pa.scalar(end, pa.binary())
        cut = pc.if_else(pc.greater(ends, limit), limit, ends)
        place = batch.schema.get_field_index("end_key")
        batch = batch.set_column(place, batch.schema.field(place), cut)
    return batch.take(pc.sort_indices(batch, sort_keys=list(ORDER)))
