"""Writing one part: sorted record batches become the bytes of a Parquet file."""

from __future__ import annotations

import inspect
import io
from collections.abc import Sequence
from typing import Any, Final

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from kvstore.backup.shard.rows import trailer
from kvstore.backup.shard.rows.part_format import UNTIL, layout
from kvstore.backup.shard.rows.rules import OP_DELETE_RANGE, column_numpy, same_as_previous
from kvstore.backup.shard.state.trace import ShardPart
from kvstore.base.span import prefix_end
from kvstore.limits import (
    BOUND_BYTES_MAX,
    PART_BLOCK_BYTES,
    PART_BLOCK_DECODED_BYTES_MAX,
    PART_BYTES_MAX,
    PART_WHOLE_BYTES_BY_BLOCK_MAX,
    PART_WHOLE_BYTES_MAX,
    ROW_GROUPS_MAX,
)

_LEVEL = 1
"""Level of zstd. JSON of 150 bytes takes 33 bytes a row at 1; at -1 39, in 5 % less time."""
_LEVEL_FAST = -3
"""For data that hardly compresses. The part is as small, and a row takes 126 ns instead of 175."""
_FAST_SIZE_MAX = 1.03
"""The fast level is taken up to this ratio of sizes. Half random rows take 1.02 of the size at it,
rows that compress 1.08 to 1.8."""
_SAMPLE_ROWS = 1024
_SAMPLE_BYTES = 64 << 10
"""The bytes of keys, and of values, that predict the ratio for a megabyte to a hundredth."""
_BLOCK_SAMPLE_ROWS = 256
_BLOCK_SAMPLE_BYTES = 16 << 10
"""The bytes of keys, and of values, that predict how many bytes a row group takes when stored."""
_LEVEL_SMALL = -5
"""10,000 rows of 116 bytes, half of it random, take 1.3 ms and 722 kB; at level 1 2.0 ms
and 672 kB."""
_LARGE = ("key", "value")
"""Columns that are compressed in a small part too. Each compressor costs 0.05 ms, and the other
columns have next to no bytes."""
_FILTER_MISSES = 0.01
"""How often a filter takes a key for one of its row group: ten bits a key."""
_FOOTER_END = 8
"""Bytes behind the footer of a Parquet file: its length, and the magic."""
_HAS_FILTERS: Final = "bloom_filter_options" in inspect.signature(pq.ParquetWriter).parameters
"""Whether pyarrow writes filters. Without them a reader fetches more, and finds the same."""


class PartBuilder:
    """Collects sorted batches into the bytes of one part. Memory: the compressed part.

    `first` is the first batch of the part: a sample of it decides how to compress. `is_small`: the
    part is one of many, which compaction will write again, so it is compressed in a hurry.
    `is_lowest`: no batch lies below the part, so a reader that comes to it looks into it at all
    events, and it gets no filters.
    """

    def __init__(
        self,
        first: pa.RecordBatch,
        *,
        is_small: bool = False,
        is_lowest: bool = False,
    ) -> None:
        # `BytesIO` gives its bytes without a copy, which saves 40 ms for a part of 40 MB. Arrow
        # writes to its own stream without the interpreter: 0.2 ms of a small part's 1.5.
        self._sink: Any = pa.BufferOutputStream() if is_small else io.BytesIO()
        self._until = Until()
        schema, numbers, order = layout()
        is_whole = is_small and first.nbytes <= whole_bytes_max(by_block=True)
        options = {} if is_lowest or is_whole else _filters(first)
        self._writer = pq.ParquetWriter(
            self._sink,
            schema,
            compression=_compression(schema) if is_small else "zstd",
            compression_level=dict.fromkeys(_LARGE, _LEVEL_SMALL) if is_small else _level(first),
            use_dictionary=numbers,
            write_statistics=["key", *numbers],
            write_page_checksum=True,
            sorting_columns=order,
            **options,
        )
        self._key_min: bytes | None = None
        self.last_row: pa.RecordBatch = None
        self._reach: bytes | None = None
        self._times: list[int] = []
        self._ranges = 0
        self.rows = 0
        self.nbytes = 0
        """Bytes of the batches that the part has, or is about to get; the caller counts them."""
        self.groups = 0
        """The row groups of these batches."""

    def add_row_groups(self, batch: pa.RecordBatch, *, size: int, is_distinct: bool) -> None:
        """Append a batch, not empty, that follows the rows added before: `size` rows a row group.

        `is_distinct`: no key is in it twice.
        """
        keys = batch.column("key")
        if self._key_min is None:
            self._key_min = keys[0].as_py()
        self.last_row = batch.slice(batch.num_rows - 1)
        times = column_numpy(batch, "timestamp")
        self._times += [int(times.min()), int(times.max())]
        self._note_ranges(batch)
        batch = batch.append_column(UNTIL, self._until(batch, is_distinct=is_distinct))
        self._writer.write_batch(batch, row_group_size=size)
        self.rows += batch.num_rows

    @property
    def is_full(self) -> bool:
        """Whether the following rows should go to another part."""
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
        is_small = not isinstance(self._sink, io.BytesIO)
        # A view of `BytesIO`: it would copy its bytes before a write if `getvalue` had given them.
        data = self._sink.getvalue() if is_small else self._sink.getbuffer()
        meta = self._writer.writer.metadata
        groups = [meta.row_group(number) for number in range(meta.num_row_groups)]
        starts = [_start(group.column(0)) for group in groups]
        last = groups[-1].column(groups[-1].num_columns - 1)
        footer = len(data) - _FOOTER_END - int.from_bytes(data[-_FOOTER_END:][:4], "little")
        end = trailer.sealed(
            data, starts, _start(last) + int(last.total_compressed_size), footer=footer
        )
        if is_small:
            return bytes(data)[:footer] + end
        data.release()
        self._sink.seek(footer)
        self._sink.write(end)
        found: bytes = self._sink.getvalue()
        return found

    def part(self, name: str, *, size: int, checksum: str) -> ShardPart:
        """The entry, in the state, of the bytes that `finish` gave, stored under `name`."""
        assert self._key_min is not None
        key_last = self.last_row.column("key")[0].as_py()
        return ShardPart(
            name=name,
            rows=self.rows,
            size=size,
            checksum=checksum,
            key_min=self._key_min[:BOUND_BYTES_MAX],
            key_max=_rounded_up(max(key_last, self._reach or b"")),
            time_min=min(self._times),
            time_max=max(self._times),
            ranges=self._ranges,
        )


class Until:
    """Makes the column `until` of one part, row group by row group."""

    def __init__(self) -> None:
        self._key: bytes | None = None
        self._timestamp = 0

    def __call__(self, group: pa.RecordBatch, *, is_distinct: bool) -> pa.Array:
        """The column of `group`, the next row group. O(rows) in Arrow, without code per row.

        `is_distinct`: no key is in the group twice.
        """
        points = np.flatnonzero(column_numpy(group, "op") != OP_DELETE_RANGE)
        if not len(points):
            return pa.nulls(group.num_rows, pa.int64())
        keys = group.column("key")
        if len(points) < group.num_rows:
            keys = keys.take(pa.array(points))
        times = column_numpy(group, "timestamp")[points]
        older = np.zeros(len(points), np.bool_) if is_distinct else same_as_previous(keys)
        older[0] = keys[0].as_py() == self._key
        newer = np.concatenate([[self._timestamp], times[:-1]])
        self._key, self._timestamp = keys[-1].as_py(), int(times[-1])
        if not older.any():
            return pa.nulls(group.num_rows, pa.int64())
        until = np.zeros(group.num_rows, np.int64)
        until[points[older]] = newer[older]
        return pa.array(until, mask=until == 0)


def block_rows(batch: pa.RecordBatch) -> int:
    """The rows of each row group of `batch`, so that one takes about `PART_BLOCK_BYTES`, stored.

    Each row group costs a writer and a reader of all rows 0.3 ms. So rows that compress share
    larger ones, up to `PART_BLOCK_DECODED_BYTES_MAX`. Costs 0.1 ms.
    """
    rows, size = int(batch.num_rows), int(batch.nbytes)
    if size <= PART_BLOCK_BYTES:
        return rows
    samples = _samples(batch, _BLOCK_SAMPLE_ROWS, _BLOCK_SAMPLE_BYTES)
    raw = sum(map(len, samples))
    stored = _stored_bytes(samples, _LEVEL_FAST)
    share = min(stored / raw, 1.0) if raw else 1.0
    block = min(int(PART_BLOCK_BYTES / max(share, 0.01)), PART_BLOCK_DECODED_BYTES_MAX)
    return max(-(-rows // -(-size // block)), 1)


def _filters(batch: pa.RecordBatch) -> dict[str, Any]:
    """The options for filters of keys, for row groups as `batch` becomes."""
    if not _HAS_FILTERS:
        return {}
    return {"bloom_filter_options": {"key": {"ndv": block_rows(batch), "fpp": _FILTER_MISSES}}}


def _start(chunk: pq.ColumnChunkMetaData) -> int:
    """Where a column chunk begins."""
    first = chunk.dictionary_page_offset if chunk.has_dictionary_page else None
    return int(chunk.data_page_offset if first is None else first)


def _level(batch: pa.RecordBatch) -> int:
    """The level of zstd for data like `batch`. Costs half a millisecond."""
    samples = _samples(batch, _SAMPLE_ROWS, _SAMPLE_BYTES)
    size, fast = (_stored_bytes(samples, level) for level in (_LEVEL, _LEVEL_FAST))
    return _LEVEL_FAST if fast <= size * _FAST_SIZE_MAX else _LEVEL


def _samples(batch: pa.RecordBatch, rows: int, size: int) -> list[bytes]:
    """Some keys of `batch`, and some values: at most `size` bytes of each."""
    return [b"".join(batch.column(name)[:rows].drop_null().to_pylist())[:size] for name in _LARGE]


def _stored_bytes(samples: Sequence[bytes], level: int) -> int:
    codec = pa.Codec("zstd", compression_level=level)
    return sum(codec.compress(data).size for data in samples)


def _compression(schema: pa.Schema) -> dict[str, str]:
    return {name: "zstd" if name in _LARGE else "none" for name in schema.names}


def _rounded_up(key: bytes) -> bytes | None:
    """A short key at or above `key`; None where no short key is."""
    return key if len(key) <= BOUND_BYTES_MAX else prefix_end(key[:BOUND_BYTES_MAX])


def whole_bytes_max(*, by_block: bool) -> int:
    """The size up to which a part is fetched whole: by a reader of single keys if `by_block`."""
    if by_block:
        return min(PART_WHOLE_BYTES_BY_BLOCK_MAX, PART_WHOLE_BYTES_MAX)
    return PART_WHOLE_BYTES_MAX
