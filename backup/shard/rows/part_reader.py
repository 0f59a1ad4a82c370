"""Reading parts piece by piece, everything checked before it is believed.

A small part is fetched whole and its checksum is compared. Of a large part only the requested
ranges are fetched. Its tail is checked by the digest in it, and the pages of a column when they are
fetched. A reader of single keys asks for whole row groups instead, which are checked by their
digests. `part_format` has the bytes, and the checks of what headers declare.

Invariants
1. Each call of `opened` gives a file with a position of its own.
2. A `ParquetFile` keeps the bytes that it fetched last, so two threads that read through one of
   them would take the bytes from one another. Each thread has its own: see `OpenedPart`.
"""

from __future__ import annotations

import bisect
import io
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from itertools import chain, islice
from typing import Final, TypeVar

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from kvstore.backup.shard.rows.part_format import (
    FORMAT_KEY,
    PART_FORMAT,
    PART_SCHEMA,
    RULE_KEY,
    TAIL_BYTES,
    TRAILER_BYTES,
    Chunk,
    Fields,
    KeyFilters,
    PartBlock,
    Trailer,
    chunks_of,
    filters_of,
    footer_bytes,
    may_have,
    properties,
    read_footer,
    read_trailer,
    require_pages,
    tail_bytes,
    whole_bytes_max,
)
from kvstore.backup.shard.rows.rules import (
    OP_DELETE_RANGE,
    ORDER,
    VERSIONS_SCHEMA,
    column_numpy,
    keep,
    lower_bound,
)
from kvstore.backup.shard.state.state import RULE
from kvstore.backup.shard.state.trace import ShardPart
from kvstore.base.digest import is_digest
from kvstore.base.span import Span
from kvstore.errors import CorruptionError, FormatVersionError, KVStoreError
from kvstore.limits import (
    PART_CONTAINER_MAX,
    PART_TAIL_BYTES,
    PART_TEXT_BYTES_MAX,
    ROW_GROUP_BYTES_MAX,
)
from kvstore.storage.contract import Blob

_T = TypeVar("_T")
_EVERYTHING: Final = Span()
_PLACES: Final = {name: place for place, name in enumerate(VERSIONS_SCHEMA.names)}
"""The places of columns in a part, which begins with those of versions."""
_REMEDY: Final = (
    "instants that need no row of it can be restored; put it back from a copy of the collection, "
    "or begin another chain with `kvstore backup run --full` (full=True)"
)


class MissingPartError(CorruptionError):
    """A part's blob is gone. Only a reader whose lease has expired may meet this without damage."""


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
        i for i in range(file.num_row_groups) if _group_touches(file.metadata.row_group(i), span)
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


def touches(part: ShardPart, span: Span) -> bool:
    """True unless the bounds say that no row of `part` concerns `span`."""
    below_end = span.end is None or part.key_min < span.end
    return below_end and (part.key_max is None or part.key_max >= span.start)


def open_part(blob: Blob, part: ShardPart) -> pq.ParquetFile:
    """Open a part for reading piece by piece; raises as `read_part` does.

    No size that the part declares is believed; `part_format` lists the checks. A small part is
    checked at once, a large part column by column as it is fetched.
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


def require_part(blob: Blob, part: ShardPart) -> None:
    """Read all bytes of a part.

    Raises as `read_part` does where the bytes are not as written, or where the part's bounds are
    narrower than its row groups.
    """
    file, _ = _opened(_WholePart(part, _part_bytes(blob, part)))
    for number in range(file.num_row_groups):
        _require_bounds(file.metadata.row_group(number), part)


def fault_of(blob: Blob, part: ShardPart) -> str | None:
    """Read all bytes of a part; returns its fault, None if its bytes are as written."""
    try:
        require_part(blob, part)
    except CorruptionError as error:
        return f"{error.where}: {error.problem}"
    return None


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


def statistics_of(group: pq.RowGroupMetaData, column: str) -> pq.Statistics | None:
    """The statistics of a column, None where they do not tell its least and greatest value."""
    found = group.column(_PLACES[column]).statistics
    return found if found is not None and found.has_min_max else None


def may_have_ranges(group: pq.RowGroupMetaData) -> bool:
    """True unless the statistics say that the row group has no range rows."""
    ops = statistics_of(group, "op")
    return ops is None or ops.max >= OP_DELETE_RANGE


def ahead(items: Iterator[_T]) -> Iterator[_T]:
    """Yield `items`, each made in a thread while the caller is busy with the one before.

    For work outside the interpreter lock: reading and decoding. One item more is held in memory.
    An error reaches the caller with its next item. Closing waits for the item that is being made.
    """
    pool = ThreadPoolExecutor(1, thread_name_prefix="kvstore-ahead")
    with pool:
        coming = pool.submit(next, items, None)
        while (item := coming.result()) is not None:
            coming = pool.submit(next, items, None)
            yield item


# --------------------------------------------------------------------------------------------------
# The row groups and the rows of a span.


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


def _rows_within(group: pq.RowGroupMetaData, size: int) -> int:
    """The number of rows of this group that stay below `size` bytes."""
    width = max(int(group.total_byte_size) // int(group.num_rows), 1)
    return max(size // width, 1)


def _group_touches(group: pq.RowGroupMetaData, span: Span) -> bool:
    """True unless the row group's statistics say that none of its rows concerns `span`."""
    keys = statistics_of(group, "key")
    if keys is None:
        return True
    if span.end is not None and keys.min >= span.end:
        return False
    if keys.max >= span.start:
        return True
    # A range row has its start as key, and may reach into the span from before it.
    return may_have_ranges(group)


def _require_bounds(group: pq.RowGroupMetaData, part: ShardPart) -> None:
    """Raise `CorruptionError` where the part's bounds would make a reader miss rows."""
    keys, times = statistics_of(group, "key"), statistics_of(group, "timestamp")
    is_narrow = False
    if keys is not None:
        is_narrow = keys.min < part.key_min
        is_narrow |= part.key_max is not None and keys.max > part.key_max
    if times is not None:
        is_narrow |= not part.time_min <= times.min <= times.max <= part.time_max
    if is_narrow:
        raise CorruptionError(
            f"part {part.name}", "its rows lie outside the bounds noted for it", _REMEDY
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


# --------------------------------------------------------------------------------------------------
# The bytes of a part, as Parquet's reader fetches them.


def _source(blob: Blob, part: ShardPart, *, by_block: bool = False) -> _WholePart | _FetchedPart:
    if part.size <= whole_bytes_max(by_block=by_block):
        return _WholePart(part, _part_bytes(blob, part))
    with translated(part):
        return _FetchedPart(blob, part, by_block=by_block)


def _opened(source: _WholePart | _FetchedPart) -> tuple[pq.ParquetFile, KeyFilters]:
    """The file of a part, and where the filters of its row groups are."""
    part = source.part
    with translated(part):
        footer = read_footer(source.footer())
        _require_format(footer, part)
        chunks = chunks_of(footer, PART_SCHEMA, rows=part.rows, size=part.size)
        filters = filters_of(footer, chunks, size=part.size)
        file = _parquet_file(source, _parquet_file(source, at_end=True).metadata)
        if not file.schema_arrow.equals(PART_SCHEMA):
            raise ValueError(f"its columns are {', '.join(file.schema_arrow.names)}")
        source.check(chunks)
    return file, filters


def _parquet_file(
    source: _WholePart | _FetchedPart,
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


def _require_format(footer: Fields, part: ShardPart) -> None:
    """Raise unless the footer says that the part is of our format and rule."""
    found = properties(footer)
    version = found.get(FORMAT_KEY)
    if version != PART_FORMAT:
        raise FormatVersionError(f"part {part.name}", found=version, supported=PART_FORMAT)
    if found.get(RULE_KEY) != RULE.encode():
        raise CorruptionError(f"part {part.name}", f"its rule is {found.get(RULE_KEY)!r}", _REMEDY)


def _damaged(part: ShardPart, error: Exception) -> CorruptionError:
    return CorruptionError(f"part {part.name}", str(error).partition("\n")[0], _REMEDY)


def _part_bytes(blob: Blob, part: ShardPart) -> bytes:
    """All bytes of a part, checked. Raises `MissingPartError` or `CorruptionError`."""
    data = blob.patience.over(lambda: blob.get(part.name))
    if data is None:
        raise MissingPartError(f"part {part.name}", "its blob is gone", _REMEDY)
    if len(data) != part.size or not is_digest(part.checksum, data):
        problem = f"its {len(data)} bytes fail the checksum"
        raise CorruptionError(f"part {part.name}", problem, _REMEDY)
    return data


class _WholePart:
    """All bytes of a part."""

    def __init__(self, part: ShardPart, data: bytes) -> None:
        self.part = part
        self._data = data

    def opened(self) -> pa.NativeFile:
        """A file to hand to Parquet's reader."""
        return pa.BufferReader(self._data)

    def end(self) -> pa.NativeFile:
        """A file with the last bytes of the part, the footer among them."""
        return self.opened()

    def footer(self) -> bytes:
        """Its footer. Raises `ValueError` where it cannot be one."""
        length = footer_bytes(self._data[-TAIL_BYTES:], size=len(self._data))
        return self._data[-length - TAIL_BYTES : -TAIL_BYTES]

    def check(self, chunks: Sequence[Chunk]) -> None:
        """Raise `ValueError` unless the pages are as large as the footer says."""
        _require_chunks(chunks, memoryview(self._data), 0)

    def tail_bytes(self, start: int, length: int) -> bytes:
        """Bytes behind the row groups."""
        return self._data[start : start + length]


def _require_chunks(chunks: Sequence[Chunk], data: memoryview, start: int) -> None:
    """Check the chunks in `data`, which begins at `start` in the part. A chunk that begins before
    `data` or ends behind it is refused: Parquet's reader asks for whole chunks."""
    end = start + len(data)
    first = bisect.bisect_left(chunks, start, key=lambda chunk: chunk.start + chunk.size - 1)
    for chunk in islice(chunks, first, None):
        if chunk.start >= end:
            return
        if chunk.start < start or chunk.start + chunk.size > end:
            raise ValueError(f"column {chunk.column} is not where its footer says")
        require_pages(chunk, data[chunk.start - start :][: chunk.size])


class _FetchedPart:
    """A blob that is fetched range by range. A column is checked when it is fetched.

    With `by_block` whole row groups are fetched, each by one request, and checked by their digests.
    The last one is kept.
    """

    def __init__(self, blob: Blob, part: ShardPart, *, by_block: bool = False) -> None:
        """Fetches the tail. Raises `ValueError` if it is damaged."""
        self.part = part
        self._blob = blob
        self._chunks: Sequence[Chunk] = ()
        self._tail = b""
        self._tail_at = max(part.size - PART_TAIL_BYTES, 0)
        self._tail = self._fetched(self._tail_at, part.size - self._tail_at)
        self._trailer = self._checked_tail()
        self._by_block = by_block
        self._block: tuple[PartBlock, bytes] | None = None

    def _checked_tail(self) -> Trailer:
        size = self.part.size
        least = footer_bytes(self._tail[-TAIL_BYTES:], size=size) + TAIL_BYTES + TRAILER_BYTES
        self._reach_back(min(least, size))
        length = tail_bytes(self._tail, size=size)
        if length is None:
            # A part of another format may end otherwise, and is not damaged.
            _require_format(read_footer(self.footer()), self.part)
            raise ValueError("its trailer is gone")
        self._reach_back(length)
        return read_trailer(self._tail[-length:], size=size)

    def _reach_back(self, length: int) -> None:
        """Have the last `length` bytes of the part."""
        at = self.part.size - length
        if at < self._tail_at:
            self._tail = self._fetched(at, self._tail_at - at) + self._tail
            self._tail_at = at

    def opened(self) -> pa.NativeFile:
        """A file to hand to Parquet's reader."""
        return pa.PythonFile(_FetchedFile(self), mode="r")

    def end(self) -> pa.NativeFile:
        """A file with the last bytes of the part, the footer among them."""
        return pa.BufferReader(self._tail)

    def footer(self) -> bytes:
        """Its footer. Raises `ValueError` where it cannot be one."""
        size = self.part.size
        length = footer_bytes(self._tail[-TAIL_BYTES:], size=size)
        return self._fetched(size - length - TAIL_BYTES, length)

    def check(self, chunks: Sequence[Chunk]) -> None:
        """From now on raise `ValueError` unless pages are as large as the footer says."""
        self._chunks = chunks

    def checked(self, at: int, length: int) -> bytes:
        """The bytes from `at` on. Raises `ValueError` where `check` says so."""
        if self._by_block and (block := self._block_with(at, length)) is not None:
            return self._block_bytes(block)[at - block.start :][:length]
        data = self._fetched(at, length)
        if self._chunks:
            _require_chunks(self._chunks, memoryview(data), at)
        return data

    def tail_bytes(self, start: int, length: int) -> bytes:
        """Bytes behind the row groups."""
        return self._fetched(start, length)

    def _block_with(self, at: int, length: int) -> PartBlock | None:
        """The block that has all of these bytes."""
        blocks = self._trailer.blocks
        found = blocks[bisect.bisect_right(blocks, at, key=lambda block: block.start) - 1]
        return found if found.start <= at and at + length <= found.end else None

    def _block_bytes(self, block: PartBlock) -> bytes:
        if self._block is None or self._block[0] != block:
            data = self._fetched(block.start, block.end - block.start)
            if not block.is_intact(data):
                raise ValueError(f"the row group at byte {block.start} fails the checksum")
            if self._chunks:
                _require_chunks(self._chunks, memoryview(data), block.start)
            self._block = block, data
        return self._block[1]

    def _fetched(self, at: int, length: int) -> bytes:
        if self._tail and at >= self._tail_at:
            return self._tail[at - self._tail_at :][:length]
        name = self.part.name
        data = self._blob.patience.over(lambda: self._blob.get_range(name, start=at, length=length))
        if data is None:
            raise MissingPartError(f"part {name}", "its blob is gone", _REMEDY)
        return data


class _FetchedFile(io.RawIOBase):
    """A fetched part as a seekable file."""

    def __init__(self, source: _FetchedPart) -> None:
        self._source = source
        self._at = 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        size = self._source.part.size
        base = {io.SEEK_SET: 0, io.SEEK_CUR: self._at, io.SEEK_END: size}[whence]
        self._at = base + offset
        return self._at

    def tell(self) -> int:
        return self._at

    def read(self, size: int = -1) -> bytes:
        length = max(self._source.part.size - self._at, 0) if size < 0 else size
        data = self._source.checked(self._at, length)
        self._at += len(data)
        return data
