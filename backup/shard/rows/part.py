"""Parts: sorted Parquet files that anything can read, and this project can read in pieces.

File:

    columns    as the rule's schema says, sorted by its order (recorded as sorting columns);
               of versions also `until` (see `until.py`), from format 2 on
    row group  up to `ROW_GROUP_ROWS_MAX` rows, with min/max statistics of key, time and op
    pages      zstd at any level, each with a checksum; in a small part only those of keys and
               values are compressed
    metadata   kvstore.part = "2" (format version), kvstore.rule = name of the rule

Invariants
1. A part is written once, under a name that is never used again, so retrying its upload is safe.
2. Bounds (`key_min`, `key_max`, times) hold for every row; they may be wider, never narrower.
   A reader skips parts and row groups by them, so too narrow a bound would be a wrong answer.
3. What is read is checked: a small part by its checksum, a large one page by page.
"""

from __future__ import annotations

import io
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import cache
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from backup.shard.rows.pages import chunks_of, properties, read_footer
from backup.shard.rows.part_bytes import FetchedPart, WholePart, part_bytes
from backup.shard.rows.rules import OP_DELETE_RANGE, RULES, Rule, column_numpy, keep, lower_bound
from backup.shard.rows.until import UNTIL, Until
from backup.shard.state.state import Part
from backup.shard.storage.contract import Blob
from kvstore.errors import CorruptionError, FormatVersionError, KVStoreError
from kvstore.limits import (
    BOUND_BYTES_MAX,
    PART_BYTES_MAX,
    PART_CONTAINER_MAX,
    PART_TEXT_BYTES_MAX,
    PART_WHOLE_BYTES_MAX,
    ROW_GROUPS_MAX,
)
from kvstore.span import Span, prefix_end

PART_FORMAT = b"2"
_FORMATS_READ = (b"1", PART_FORMAT)
_FORMAT_KEY = b"kvstore.part"
_RULE_KEY = b"kvstore.rule"
_LEVEL = 1
"""Of zstd. JSON of 150 bytes takes 33 bytes a row at 1, and at -1 39 for a twentieth less time."""
_LEVEL_FAST = -3
"""Data that hardly compresses is as small by it: a row takes 126 ns instead of 175."""
_FAST_SIZE_MAX = 1.03
"""As small: half random rows take 1.02 of the size, those that compress 1.08 to 1.8."""
_SAMPLE_ROWS = 1024
_SAMPLE_BYTES = 64 << 10
"""Of keys and of values: what tells the sizes of a megabyte apart to a hundredth."""
_LEVEL_SMALL = -5
"""10,000 rows of 116 bytes, half of it random, take 1.3 ms and 722 kB; at level 1 2.0 ms
and 672 kB."""
_LARGE = ("key", "value")
"""Columns that are compressed in a small part too: a compressor more costs 0.05 ms, whatever it is
given, and the others are next to nothing."""


class PartBuilder:
    """Collects sorted batches into the bytes of one part. Memory: the compressed part.

    `first` is the batch that it is to begin with: it says how to compress. `is_small`: it is one of
    many, which compaction will write again; it is compressed in a hurry.
    """

    def __init__(self, rule: Rule, first: pa.RecordBatch, *, is_small: bool = False) -> None:
        self._rule = rule
        # The one gives its bytes without a copy, 40 ms of a part of 40 MB; the other is written
        # to without the interpreter, 0.2 ms of a small part's 1.5.
        self._sink: Any = pa.BufferOutputStream() if is_small else io.BytesIO()
        self._until = Until() if "op" in rule.schema.names else None
        schema, numbers, order = _layout(rule.name)
        self._writer = pq.ParquetWriter(
            self._sink,
            schema,
            compression=_compression(schema) if is_small else "zstd",
            compression_level=dict.fromkeys(_LARGE, _LEVEL_SMALL) if is_small else _level(first),
            use_dictionary=numbers,
            write_statistics=["key", *numbers],
            write_page_checksum=True,
            sorting_columns=order,
        )
        self._key_min: bytes | None = None
        self.last_row: pa.RecordBatch = None
        self._reach: bytes | None = None
        self._times: list[int] = []
        self._ranges = 0
        self._diff_sum: int | None = 0 if rule.name == "diffs" else None
        self.rows = 0
        self.nbytes = 0
        """Of the batches that it has, or is about to get: its user counts."""
        self.groups = 0
        """How many batches these are."""

    def add_row_group(self, batch: pa.RecordBatch, *, is_distinct: bool) -> None:
        """Append `batch`, not empty, which follows what was added before. `is_distinct`: no key is
        in it twice."""
        keys = batch.column("key")
        if self._key_min is None:
            self._key_min = keys[0].as_py()
        self.last_row = batch.slice(batch.num_rows - 1)
        times = column_numpy(batch, self._rule.time_column)
        self._times += [int(times.min()), int(times.max())]
        if "op" in batch.schema.names:
            self._note_ranges(batch)
        if self._diff_sum is not None:
            self._diff_sum += sum(column_numpy(batch, "diff").tolist())
        if self._until is not None:
            batch = batch.append_column(UNTIL, self._until(batch, is_distinct=is_distinct))
        self._writer.write_batch(batch, row_group_size=batch.num_rows)
        self.rows += batch.num_rows

    @property
    def is_full(self) -> bool:
        """Whether another part should take what follows."""
        return self.nbytes >= PART_BYTES_MAX or self.groups >= ROW_GROUPS_MAX

    def _note_ranges(self, batch: pa.RecordBatch) -> None:
        rows = np.flatnonzero(column_numpy(batch, "op") == OP_DELETE_RANGE)
        if len(rows):
            self._ranges += len(rows)
            reach = pc.max(batch.column("end_key").take(pa.array(rows))).as_py()
            self._reach = reach if self._reach is None else max(reach, self._reach)

    def finish(self) -> bytes:
        """The part's bytes. Nothing more can be added."""
        self._writer.close()
        found = self._sink.getvalue()
        return found if isinstance(found, bytes) else bytes(found)

    def part(self, name: str, *, size: int, checksum: str) -> Part:
        """The entry of what `finish` gave, which lies under `name`."""
        assert self._key_min is not None
        key_last = self.last_row.column("key")[0].as_py()
        return Part(
            name=name,
            rows=self.rows,
            size=size,
            checksum=checksum,
            key_min=self._key_min[:BOUND_BYTES_MAX],
            key_max=_rounded_up(max(key_last, self._reach or b"")),
            time_min=min(self._times),
            time_max=max(self._times),
            ranges=self._ranges,
            diff_sum=self._diff_sum,
        )


def _level(batch: pa.RecordBatch) -> int:
    """The level of zstd for data like this. Costs half a millisecond."""
    samples = [
        b"".join(batch.column(name)[:_SAMPLE_ROWS].drop_null().to_pylist())[:_SAMPLE_BYTES]
        for name in _LARGE
    ]
    size, fast = (
        sum(pa.Codec("zstd", compression_level=level).compress(data).size for data in samples)
        for level in (_LEVEL, _LEVEL_FAST)
    )
    return _LEVEL_FAST if fast <= size * _FAST_SIZE_MAX else _LEVEL


def _compression(schema: pa.Schema) -> dict[str, str]:
    return {name: "zstd" if name in _LARGE else "none" for name in schema.names}


@cache
def _layout(rule_name: str) -> tuple[pa.Schema, list[str], list[pq.SortingColumn]]:
    """The schema of a part, its columns of numbers, and how rows are sorted."""
    rule = RULES[rule_name]
    metadata = {_FORMAT_KEY: PART_FORMAT, _RULE_KEY: rule.name.encode()}
    schema = rule.schema.append(UNTIL) if "op" in rule.schema.names else rule.schema
    schema = schema.with_metadata(metadata)
    numbers = [f.name for f in schema if not pa.types.is_binary(f.type)]
    order = [
        pq.SortingColumn(schema.get_field_index(name), descending=way == "descending")
        for name, way in rule.order
    ]
    return schema, numbers, order


def read_part(
    blob: Blob,
    part: Part,
    rule: Rule,
    *,
    span: Span,
    batch_rows: int,
    batch_bytes: int,
    whole: Span | None = None,
) -> Iterator[pa.RecordBatch]:
    """Yield the rows of `part` in `span`, in order, and the range tombstones that reach into it.

    Those are cut to `whole`, or to `span` where none is given.
    Memory is a batch of `batch_rows` or about `batch_bytes`, whatever is less, and what Parquet
    decodes for it. Raises `MissingPartError` if its blob is gone, `CorruptionError` if it is not
    what was written.
    """
    if not touches(part, span):
        return
    file = open_part(blob, part, rule)
    groups = [
        i for i in range(file.num_row_groups) if _group_touches(file.metadata.row_group(i), span)
    ]
    if not groups:
        return
    metas = [file.metadata.row_group(i) for i in groups]
    batch_rows = min(batch_rows, *(_rows_within(meta, batch_bytes) for meta in metas))
    # A column of nothing but nulls costs a sixth of the time.
    has_ranges = any(map(_may_have_ranges, metas))
    columns = [n for n in rule.schema.names if has_ranges or n != "end_key"]
    batches = file.iter_batches(batch_size=batch_rows, row_groups=groups, columns=columns)
    while True:
        with translated(part):
            batch = next(batches, None)
            if batch is None:
                return
            wanted = _whole_rows(batch, rule.schema)
            _require_rows(wanted, rule)
        wanted = _from(wanted, part.drop_below, rule)
        if span != _EVERYTHING:
            wanted = _within(wanted, span, span if whole is None else whole, rule)
        if wanted.num_rows:
            yield wanted


_EVERYTHING = Span()


def touches(part: Part, span: Span) -> bool:
    """True unless the bounds say that no row of `part` concerns `span`."""
    below_end = span.end is None or part.key_min < span.end
    return below_end and (part.key_max is None or part.key_max >= span.start)


def open_part(blob: Blob, part: Part, rule: Rule) -> pq.ParquetFile:
    """Open for reading in pieces; raises as `read_part` does.

    No size that the part declares of itself is believed: `pages` says what is checked, at once in
    a small part, and in a large one as its columns are fetched.
    """
    if part.inline is not None or part.size <= PART_WHOLE_BYTES_MAX:
        return _opened(WholePart(part, part_bytes(blob, part)), rule)
    return _opened(FetchedPart(blob, part), rule)


def require_part(blob: Blob, part: Part, rule: Rule) -> None:
    """Read all bytes of a part. Raises as `read_part` does where they are not what was written,
    or the part's bounds are narrower than its row groups say."""
    file = _opened(WholePart(part, part_bytes(blob, part)), rule)
    for number in range(file.num_row_groups):
        _require_bounds(file.metadata.row_group(number), part, rule)


def _opened(source: WholePart | FetchedPart, rule: Rule) -> pq.ParquetFile:
    part = source.part
    with translated(part):
        footer = read_footer(source.footer())
        schema = _written_schema(properties(footer), part, rule)
        chunks = chunks_of(footer, schema, rows=part.rows, size=part.size)
        file = pq.ParquetFile(
            source.opened(),
            page_checksum_verification=True,
            thrift_string_size_limit=PART_TEXT_BYTES_MAX,
            thrift_container_size_limit=PART_CONTAINER_MAX,
        )
        if not file.schema_arrow.equals(schema):
            raise ValueError(f"its columns are {', '.join(file.schema_arrow.names)}")
        source.check(chunks)
    return file


def _written_schema(found: Mapping[bytes, bytes], part: Part, rule: Rule) -> pa.Schema:
    """The columns of a part with these properties."""
    version = found.get(_FORMAT_KEY)
    if version not in _FORMATS_READ:
        raise FormatVersionError(f"part {part.name}", found=version, supported=_FORMATS_READ)
    if found.get(_RULE_KEY) != rule.name.encode():
        raise CorruptionError(f"part {part.name}", f"its rule is {found.get(_RULE_KEY)!r}")
    return _layout(rule.name)[0] if version == PART_FORMAT else rule.schema


@contextmanager
def translated(part: Part) -> Iterator[None]:
    """Name the part in the errors of its reader. No memory is no damage: `MemoryError` passes, as
    pyarrow raises it too."""
    try:
        yield
    except (MemoryError, pa.ArrowCancelled):
        raise
    except (pa.ArrowException, OSError, ValueError) as error:
        if isinstance(error, KVStoreError):
            raise
        raise _damaged(part, error) from error


def _damaged(part: Part, error: Exception) -> CorruptionError:
    return CorruptionError(f"part {part.name}", str(error).partition("\n")[0])


def _rounded_up(key: bytes) -> bytes | None:
    """A short key at or above `key`; None where there is none."""
    return key if len(key) <= BOUND_BYTES_MAX else prefix_end(key[:BOUND_BYTES_MAX])


def _group_touches(group: pq.RowGroupMetaData, span: Span) -> bool:
    """True unless the row group's statistics say that none of its rows concerns `span`."""
    columns = {group.column(i).path_in_schema: group.column(i) for i in range(group.num_columns)}
    keys = columns["key"].statistics
    if keys is None or not keys.has_min_max:
        return True
    if span.end is not None and keys.min >= span.end:
        return False
    if keys.max >= span.start:
        return True
    # A range row stands at its start, and may reach into the span from before it.
    return _may_have_ranges(group)


def _may_have_ranges(group: pq.RowGroupMetaData) -> bool:
    """True unless the statistics say that the row group has no range rows."""
    columns = {group.column(i).path_in_schema: group.column(i) for i in range(group.num_columns)}
    ops = columns["op"].statistics if "op" in columns else None
    return "op" in columns and (ops is None or not ops.has_min_max or ops.max >= OP_DELETE_RANGE)


def _require_bounds(group: pq.RowGroupMetaData, part: Part, rule: Rule) -> None:
    """Raise `CorruptionError` where a reader that goes by the part's bounds would miss rows."""
    columns = {group.column(i).path_in_schema: group.column(i) for i in range(group.num_columns)}
    keys, times = columns["key"].statistics, columns[rule.time_column].statistics
    is_narrow = False
    if keys is not None and keys.has_min_max:
        is_narrow = keys.min < part.key_min
        is_narrow |= part.key_max is not None and keys.max > part.key_max
    if times is not None and times.has_min_max:
        is_narrow |= not part.time_min <= times.min <= times.max <= part.time_max
    if is_narrow:
        raise CorruptionError(f"part {part.name}", "its rows lie outside the bounds noted for it")


def _require_rows(batch: pa.RecordBatch, rule: Rule) -> None:
    """Raise `ValueError` for rows of versions that mean nothing."""
    if "op" not in rule.schema.names:
        return
    _, puts, ranges, *others = np.bincount(column_numpy(batch, "op"), minlength=3)
    if others:
        raise ValueError("a row is neither put, delete nor range delete")
    values, ends = (len(batch) - batch.column(name).null_count for name in ("value", "end_key"))
    if values != puts or ends != ranges:
        raise ValueError("a put has no value, a delete one, or a range delete no end")


def _whole_rows(batch: pa.RecordBatch, schema: pa.Schema) -> pa.RecordBatch:
    """`batch` with nulls for each column that was not read."""
    if batch.num_columns == len(schema):
        return batch
    read = set(batch.schema.names)
    columns = [
        batch.column(f.name) if f.name in read else pa.nulls(batch.num_rows, f.type) for f in schema
    ]
    return pa.RecordBatch.from_arrays(columns, schema=schema)


def _rows_within(group: pq.RowGroupMetaData, size: int) -> int:
    """Rows of this group that stay below `size` bytes even if they came from several groups."""
    width = max(int(group.total_byte_size) // int(group.num_rows), 1)
    return max(size // width, 1)


def _from(batch: pa.RecordBatch, drop_below: int, rule: Rule) -> pa.RecordBatch:
    if not drop_below:
        return batch
    return keep(batch, column_numpy(batch, rule.time_column) >= drop_below)


def _within(batch: pa.RecordBatch, span: Span, whole: Span, rule: Rule) -> pa.RecordBatch:
    """The rows whose key lies in `span`, and range rows over it, cut to `whole`, in order."""
    keys = batch.column("key")
    low = lower_bound(keys, span.start)
    high = len(keys) if span.end is None else lower_bound(keys, span.end)
    inside = batch.slice(low, max(high - low, 0))
    if "op" not in batch.schema.names:
        return inside
    before = _reaching_in(batch.slice(0, low), span.start, whole.start)
    if not _has_ranges(inside) and before is None:
        return inside
    pieces = [piece for piece in (before, inside) if piece is not None]
    return _cut_ends(pa.concat_batches(pieces), whole.end, rule)


def _has_ranges(batch: pa.RecordBatch) -> bool:
    return bool((column_numpy(batch, "op") == OP_DELETE_RANGE).any())


def _reaching_in(batch: pa.RecordBatch, start: bytes, least: bytes) -> pa.RecordBatch | None:
    """Range rows that begin before `start` and end behind it, none beginning below `least`."""
    ranges = keep(batch, column_numpy(batch, "op") == OP_DELETE_RANGE)
    ranges = ranges.filter(pc.greater(ranges.column("end_key"), pa.scalar(start, pa.binary())))
    if ranges.num_rows == 0:
        return None
    keys, first = ranges.column("key"), pa.scalar(least, pa.binary())
    starts = pc.if_else(pc.less(keys, first), first, keys)
    return ranges.set_column(0, batch.schema.field(0), starts)


def _cut_ends(batch: pa.RecordBatch, end: bytes | None, rule: Rule) -> pa.RecordBatch:
    if end is not None:
        ends = batch.column("end_key")
        limit = pa.scalar(end, pa.binary())
        cut = pc.if_else(pc.greater(ends, limit), limit, ends)
        place = batch.schema.get_field_index("end_key")
        batch = batch.set_column(place, batch.schema.field(place), cut)
    return batch.take(pc.sort_indices(batch, sort_keys=list(rule.order)))
