"""Writing a batch: a stream of sorted record batches becomes parts.

The writer checks what every reader relies on: rows are in order, times lie within the bounds, no
version comes twice. It cuts the stream into parts and row groups. Memory is the compressed bytes
of one part and a few row groups: while one is encoded, in a thread, the next is made.
"""

from __future__ import annotations

import inspect
import io
import secrets
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import nullcontext, suppress
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import chain, islice
from types import TracebackType
from typing import Any, Final, TypeAlias

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from kvstore.backup.shard.rows.part_format import (
    PART_SCHEMA,
    SORTING,
    TAIL_BYTES,
    UNTIL,
    sealed,
    whole_bytes_max,
)
from kvstore.backup.shard.rows.rules import (
    OP_DELETE_RANGE,
    ORDER,
    VERSIONS_SCHEMA,
    column_numpy,
    same_as_previous,
)
from kvstore.backup.shard.state.state import require_frontier
from kvstore.backup.shard.state.trace import ShardBatch, ShardPart
from kvstore.base.clock import Clock, WallClock
from kvstore.base.digest import digest
from kvstore.base.span import prefix_end
from kvstore.errors import KeyOrderError, UsageError
from kvstore.limits import (
    BOUND_BYTES_MAX,
    PART_BLOCK_BYTES,
    PART_BLOCK_DECODED_BYTES_MAX,
    PART_BYTES_MAX,
    ROW_GROUP_BYTES_MAX,
    ROW_GROUP_ROWS_MAX,
    ROW_GROUPS_MAX,
)
from kvstore.storage.contract import FAILURES, Blob, put_retrying

OnFull: TypeAlias = "Callable[[ShardPart, pa.RecordBatch], bool]"
"""Called with an uploaded part and its last row. It returns True if the part must stay."""


@dataclass(frozen=True, slots=True)
class BatchDesc:
    """The description of a batch: its bounds, and the caller's notes on it."""

    lower: int
    upper: int
    since: int = 0
    meta: Mapping[str, str] = field(default_factory=dict)


def part_names(shard: str, clock: WallClock | None = None) -> Callable[[], str]:
    """A maker of new names, which carry the time: `<shard>/part/<ns>-<random>.parquet`."""
    time = clock or Clock()
    return lambda: f"{shard}/part/{time.wall_ns():020}-{secrets.token_hex(8)}.parquet"


def write_batch(
    blob: Blob,
    desc: BatchDesc,
    batches: Iterable[pa.RecordBatch],
    *,
    names: Callable[[], str],
    on_full: OnFull | None = None,
    beside: bool = True,
) -> ShardBatch:
    """Upload sorted `batches` as the parts of a new batch, to be appended to a shard.

    Nothing refers to the parts until then; `delete_batch` takes them back. The call needs no shard,
    so any process may make it.

    `beside`: a row group is encoded in a thread while the next is made. Turn it off where several
    processes fill the cores. `on_full` is called with each uploaded part but the last, and with its
    last row. A part for which it returns True is not deleted if the rest of this call fails.

    Raises `KeyOrderError` if rows are out of order or come twice, `UsageError` on a wrong schema or
    a time outside the bounds: no part is left behind then.
    """
    require_frontier(desc.lower, name="lower")
    require_frontier(desc.upper, name="upper")
    parts: list[ShardPart] = []
    doomed: list[str] = []

    def upload(builder: _PartBuilder) -> None:
        name, data = names(), builder.finish()
        part = builder.part(name, size=len(data), checksum=digest(data))
        doomed.append(name)
        put_retrying(blob, name, data)
        parts.append(part)
        if builder.is_full and on_full is not None and on_full(part, builder.last_row):
            doomed.remove(name)

    try:
        _build_parts(batches, _Checks(desc), upload, beside=beside)
    except BaseException:  # an interrupt too
        _delete(blob, doomed)
        raise
    meta = tuple(sorted(desc.meta.items()))
    return ShardBatch(desc.lower, desc.upper, desc.since, tuple(parts), meta)


def concat_batches(batches: Sequence[ShardBatch]) -> ShardBatch:
    """Join batches of the same bounds, which several writers wrote in any order of keys.

    Raises `UsageError` if the bounds differ.
    """
    if len({(batch.lower, batch.upper, batch.since) for batch in batches}) != 1:
        raise UsageError(
            "batches of different bounds cannot become one", "give them the same bounds"
        )
    parts: list[ShardPart] = []
    runs = 0
    for batch in batches:
        parts += [replace(part, run=part.run + runs) for part in batch.parts]
        runs += 1 + max((part.run for part in batch.parts), default=-1)
    return replace(batches[0], parts=tuple(parts))


def delete_batch(blob: Blob, batch: ShardBatch) -> None:
    """Delete the parts of a batch. The caller is sure that no shard names them."""
    _delete(blob, batch.names())


def _delete(blob: Blob, names: Iterable[str]) -> None:
    for name in names:
        # An orphan costs space until a scrub; the caller's error matters more.
        with suppress(*FAILURES):
            blob.delete(name)


def _build_parts(
    batches: Iterable[pa.RecordBatch],
    checks: _Checks,
    upload: Callable[[_PartBuilder], None],
    *,
    beside: bool,
) -> None:
    """Check, encode and upload row groups.

    With `beside`, in a thread while the next groups are made: 1.4 M rows/s instead of 1.0.
    """
    groups = _row_groups(map(checks.require_schema, batches))
    head = list(islice(groups, 2))
    is_small = len(head) == 1
    with _Beside() if beside and not is_small else nullcontext(_at_once) as run:
        builder = None
        for group in chain(head, groups):
            if builder is None:
                builder = _PartBuilder(group, is_small=is_small, is_lowest=not checks.lower)
            builder.nbytes += group.nbytes
            size = block_rows(group)
            builder.groups += -(-group.num_rows // size)
            run(partial(_add, builder, checks, group, size))
            if builder.is_full:
                run(partial(upload, builder))
                builder = None
        if builder is not None:
            run(partial(upload, builder))


def _add(builder: _PartBuilder, checks: _Checks, group: pa.RecordBatch, size: int) -> None:
    builder.add_row_groups(group, size=size, is_distinct=checks.require(group))


def _at_once(call: Callable[[], None]) -> None:
    call()


class _Beside:
    """Carries out calls in a thread beside the caller, one after the other: `with _Beside() as run:
    run(call)`. One at most is unfinished. An error reaches the caller with its next call, or at the
    end, and no later call runs. Leaving waits for the last call."""

    def __init__(self) -> None:
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="kvstore-beside")
        self._running: Future[None] | None = None

    def __enter__(self) -> Callable[[Callable[[], None]], None]:
        return self._run

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._pool.shutdown()
        if error is None and self._running is not None:
            self._running.result()

    def _run(self, call: Callable[[], None]) -> None:
        if self._running is not None:
            self._running.result()
        self._running = self._pool.submit(call)


def _row_groups(batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    """Regroup batches. All but the last are full, by rows or by bytes: a merge takes them so."""
    held: list[pa.RecordBatch] = []
    rows = size = 0
    for batch in chain.from_iterable(_small_slices(batch) for batch in batches if batch.num_rows):
        nbytes = batch.nbytes  # 10 us a look
        if held and (
            rows + batch.num_rows > ROW_GROUP_ROWS_MAX or size + nbytes > ROW_GROUP_BYTES_MAX
        ):
            yield _joined(held)
            held, rows, size = [], 0, 0
        held.append(batch)
        rows += batch.num_rows
        size += nbytes
    if held:
        yield _joined(held)


def _joined(batches: list[pa.RecordBatch]) -> pa.RecordBatch:
    return batches[0] if len(batches) == 1 else pa.concat_batches(batches)


def _small_slices(batch: pa.RecordBatch) -> Iterator[pa.RecordBatch]:
    """Cut a batch that is too large for one row group; most batches pass uncut."""
    count = max(-(-batch.num_rows // ROW_GROUP_ROWS_MAX), -(-batch.nbytes // ROW_GROUP_BYTES_MAX))
    step = -(-batch.num_rows // max(count, 1))
    for first in range(0, batch.num_rows, max(step, 1)):
        yield batch.slice(first, step)


class _Checks:
    """Checks the rows of a batch, row group by row group. O(rows) in Arrow."""

    def __init__(self, desc: BatchDesc) -> None:
        self._desc = desc
        self.lower = desc.lower
        self._previous: pa.RecordBatch | None = None

    def require_schema(self, batch: pa.RecordBatch) -> pa.RecordBatch:
        """Return `batch` if it has the columns of versions; raise `UsageError` otherwise."""
        if batch.num_rows and not batch.schema.equals(VERSIONS_SCHEMA):
            raise UsageError(
                f"a batch of versions has the schema {batch.schema.to_string()}",
                f"give it the columns {VERSIONS_SCHEMA.to_string()}",
            )
        return batch

    def require(self, group: pa.RecordBatch) -> bool:
        """Raise unless times lie within the bounds and rows follow the last group in order.

        Returns whether no key is in the group twice.
        """
        _require_times(group, self._desc)
        if self._previous is not None:
            _require_order(pa.concat_batches([self._previous, group.slice(0, 1)]))
        self._previous = group.slice(group.num_rows - 1)
        return _require_order(group)


def _require_times(batch: pa.RecordBatch, desc: BatchDesc) -> None:
    times = column_numpy(batch, "timestamp")
    low, high = int(times.min()), int(times.max())
    if low < desc.lower or high >= desc.upper:
        raise UsageError(
            f"times {low} to {high} are outside the batch's bounds [{desc.lower}, {desc.upper})",
            "widen the bounds, or leave the rows out",
        )


def _require_order(batch: pa.RecordBatch) -> bool:
    """Raise unless rows are in order. Returns whether no key comes twice."""
    rows = batch.num_rows - 1
    undecided = np.ones(rows, dtype=np.bool_)
    for name, way in ORDER:
        before, after = batch.column(name).slice(0, rows), batch.column(name).slice(1)
        if name == "op":  # key and time are equal: only a range row may share them
            twice = undecided & (column_numpy(batch, "op")[:-1] != OP_DELETE_RANGE)
            if twice.any():
                raise _order_error(batch, int(np.flatnonzero(twice)[0]), "key")
        right = pc.less(before, after) if way == "ascending" else pc.greater(before, after)
        undecided &= ~right.to_numpy(zero_copy_only=False)
        if not undecided.any():  # after one comparison, where no key has two versions
            return name == "key"
        same = pc.equal(before, after).to_numpy(zero_copy_only=False)
        bad = np.flatnonzero(undecided & ~same)
        if len(bad):
            raise _order_error(batch, int(bad[0]), name)
    return False


def _order_error(batch: pa.RecordBatch, row: int, column: str) -> KeyOrderError:
    keys = batch.column("key")
    where = "write_batch" if column == "key" else f"write_batch, {column}s of one key"
    return KeyOrderError(where, previous=keys[row].as_py(), key=keys[row + 1].as_py())


# --------------------------------------------------------------------------------------------------
# One part: sorted record batches become the bytes of a Parquet file.

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
_HAS_FILTERS: Final = "bloom_filter_options" in inspect.signature(pq.ParquetWriter).parameters
"""Whether pyarrow writes filters. Without them a reader fetches more, and finds the same."""


class _PartBuilder:
    """Collects sorted batches into the bytes of one part. Memory: the compressed part.

    `first` is the first batch of the part: a sample of it decides how to compress. `is_small` marks
    one of many parts, which compaction will write again: it is compressed fast rather than well.
    `is_lowest` marks a part below which no batch lies. A reader that comes to such a part always
    looks into it, so it gets no filters.
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
        numbers = [field.name for field in PART_SCHEMA if not pa.types.is_binary(field.type)]
        is_whole = is_small and first.nbytes <= whole_bytes_max(by_block=True)
        options = {} if is_lowest or is_whole else _filters(first)
        self._writer = pq.ParquetWriter(
            self._sink,
            PART_SCHEMA,
            compression=_compression() if is_small else "zstd",
            compression_level=dict.fromkeys(_LARGE, _LEVEL_SMALL) if is_small else _level(first),
            use_dictionary=numbers,
            write_statistics=["key", *numbers],
            write_page_checksum=True,
            sorting_columns=SORTING,
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
        footer = len(data) - TAIL_BYTES - int.from_bytes(data[-TAIL_BYTES:][:4], "little")
        end = sealed(data, starts, _start(last) + int(last.total_compressed_size), footer=footer)
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


def _compression() -> dict[str, str]:
    return {name: "zstd" if name in _LARGE else "none" for name in PART_SCHEMA.names}


def _rounded_up(key: bytes) -> bytes | None:
    """A short key at or above `key`; None where no short key is."""
    return key if len(key) <= BOUND_BYTES_MAX else prefix_end(key[:BOUND_BYTES_MAX])
