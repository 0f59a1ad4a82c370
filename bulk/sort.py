"""Sorts rows by key in bounded memory (an external sort), in one process or in many.

Memory is filled with rows, which are sorted and written to disk as a run. Rows that all fit into
memory never go to disk. Merging cuts the key space into ranges at sampled keys, so that the rows of
a range take half of the memory. Each range is read from all runs and sorted again. Python touches
no row, and each row is sorted twice at most. Ranges are uneven where values differ much in size;
all rows of one key are in one range. Several processes may write the runs, and several others merge
them, each a span of keys.

Batches whose keys do not cross are sorted apart: the rows of a table, which mostly ascend already,
and the entries of each of its indexes. Batches that ascend are not sorted at all.

    run := blocks, one after the other; a block is an Arrow record batch in IPC's encapsulated form

The `Run` object has the places and checksums of the blocks. It is never on disk.

Invariants
1. Rows of one key keep their order: both sorts are stable, and runs are read in order.
2. A run that nobody names was left by a failed attempt, and is never read.
3. A block is read only if it has the checksum of the bytes that were written.
"""

from __future__ import annotations

import uuid
from bisect import bisect_left
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Final, Literal, NamedTuple, TypeAlias
from zlib import crc32

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from kvstore.base.arguments import word
from kvstore.base.span import Span
from kvstore.errors import CorruptionError, StorageError, UsageError, storage_errors
from kvstore.limits import (
    ARROW_ROWS_MAX,
    LOAD_SORT_BYTES_MAX,
    RUN_BLOCK_BYTES,
    RUN_BYTES_MAX,
    SORT_BYTES_MAX,
)
from kvstore.mvcc.arrow import key_words

Duplicates: TypeAlias = Literal["error", "last"]
DUPLICATES: Final[tuple[Duplicates, ...]] = ("error", "last")

_SAMPLES_PER_RUN: Final = 1024
_BYTES_PER_SAMPLE: Final = 256 << 10
_SAMPLES_PER_RUN_MIN: Final = 100
_WORDS_MAX: Final = 4
"""Numbers of eight bytes by which keys are sorted before they are compared."""
_SAMPLE_BYTES: Final = 1024
"""Bytes of a sampled key that are kept. Longer keys that agree so far stay together."""


class Block(NamedTuple):
    """Rows of a run that are read together: their first key, and their place in the file."""

    first: bytes
    offset: int
    size: int
    crc: int


class Run(NamedTuple):
    """A sorted run on disk. It is small and picklable: a worker sends it to the merging process."""

    path: str
    last: bytes
    size_bytes: int
    sample: list[bytes]
    schema: pa.Schema
    blocks: list[Block]

    @property
    def first(self) -> bytes:
        return self.blocks[0].first


def sorted_batches(
    batches: Iterable[pa.RecordBatch],
    scratch: Path,
    *,
    duplicates: Duplicates = "error",
    bytes_max: int | None = None,
) -> Iterator[pa.RecordBatch]:
    """The rows of `batches` (binary columns `key` and `value`), ascending by key.

    `duplicates="last"` keeps the last row of each key; with `"error"` they stay side by side, and
    the part writer refuses them. Rows beyond the memory go to `scratch`.
    """
    word(*DUPLICATES).check("duplicates", duplicates)
    bytes_max = LOAD_SORT_BYTES_MAX if bytes_max is None else bytes_max
    runs: list[Run] = []
    for rows, is_all in _memory_fulls(batches, bytes_max):
        if is_all:
            yield from _in_order(rows, duplicates)
            return
        runs.append(_spill(rows, scratch))
    yield from merged(runs, Span(), duplicates=duplicates, bytes_max=bytes_max)


class Sorter:
    """Rows that come batch by batch, and are sorted when all are there. Memory holds
    `RUN_BYTES_MAX` of them; the others lie in `scratch`, which the caller removes."""

    def __init__(self, scratch: Path) -> None:
        self._scratch = scratch
        self._waiting: list[pa.RecordBatch] = []
        self._waiting_bytes = 0
        self._runs: list[Run] = []

    def add(self, batch: pa.RecordBatch) -> None:
        """Add rows in any order."""
        self._waiting.append(batch)
        self._waiting_bytes += batch.nbytes
        if self._waiting_bytes >= RUN_BYTES_MAX:
            self._runs += sorted_runs(self._taken(), self._scratch)

    def sorted(self, duplicates: Duplicates = "error") -> Iterator[pa.RecordBatch]:
        """All rows, ascending by key. `duplicates` is as in `sorted_batches`."""
        if not self._runs:
            return sorted_batches(self._taken(), self._scratch, duplicates=duplicates)
        self._runs += sorted_runs(self._taken(), self._scratch)
        return merged(self._runs, Span(), duplicates=duplicates)

    def _taken(self) -> Iterator[pa.RecordBatch]:
        waiting, self._waiting, self._waiting_bytes = self._waiting, [], 0
        return iter(waiting)


def sorted_runs(
    batches: Iterable[pa.RecordBatch], scratch: Path, *, bytes_max: int | None = None
) -> list[Run]:
    """Write the rows of `batches` to `scratch` as sorted runs, under names of this attempt only."""
    bytes_max = RUN_BYTES_MAX if bytes_max is None else bytes_max
    return [_spill(rows, scratch) for rows, _ in _memory_fulls(batches, bytes_max)]


def merged(
    runs: Sequence[Run],
    span: Span,
    *,
    duplicates: Duplicates = "error",
    bytes_max: int | None = None,
) -> Iterator[pa.RecordBatch]:
    """The rows of `runs` in `span`, ascending by key. Holds the rows of a range twice."""
    bytes_max = SORT_BYTES_MAX if bytes_max is None else bytes_max
    read = [
        _read(run, span)
        for run in runs
        if run.last >= span.start and (span.end is None or run.first < span.end)
    ]
    found = [table for table in read if table.num_rows]
    for part in _ranges(found, bytes_max // 2) if found else ():
        yield from _in_order(part.to_batches(), duplicates)


def cuts(runs: Sequence[Run], count: int) -> list[bytes]:
    """Keys that cut the rows of `runs` into at most `count` pieces of about equal size."""
    sample = [(key, run.size_bytes / len(run.sample)) for run in runs for key in run.sample]
    return _cut_keys(sample, sum(run.size_bytes for run in runs) / count)[: count - 1]


def _memory_fulls(
    batches: Iterable[pa.RecordBatch], bytes_max: int
) -> Iterator[tuple[list[pa.RecordBatch], bool]]:
    """The rows of `batches` in portions that fit into memory, each with whether it has all rows."""
    waiting: list[pa.RecordBatch] = []
    size, is_all = 0, True
    for batch in batches:
        if not batch.num_rows:
            continue
        waiting.append(batch)
        size += batch.nbytes
        if size >= bytes_max:
            size, is_all = 0, False
            yield waiting, is_all
            waiting = []
    if waiting:
        yield waiting, is_all


def _cut_keys(sample: Iterable[tuple[bytes, float]], share: float) -> list[bytes]:
    """Keys of a sample that cut it into pieces of about `share` in weight. The empty key is no
    cut. A key that weighs more than a share stays in one piece."""
    cuts: list[bytes] = []
    passed = 0.0
    for key, weight in sorted(sample):
        if passed >= share and key > (cuts[-1] if cuts else b""):
            cuts.append(key)
            passed = 0.0
        passed += weight
    return cuts


def _spill(batches: list[pa.RecordBatch], scratch: Path) -> Run:
    """Write the rows as a run. Empties the list, as `_groups`."""
    path = scratch / f"run-{uuid.uuid4().hex}.arrow"
    schema = batches[0].schema
    table = pa.Table.from_batches(list(_in_order(batches, "error")), schema)
    keys = table.column("key")
    count = max(table.nbytes // _BYTES_PER_SAMPLE, _SAMPLES_PER_RUN_MIN)
    step = max(len(keys) // count, 1)
    sample = [keys[at].as_py()[:_SAMPLE_BYTES] for at in range(0, len(keys), step)]
    with storage_errors(str(path)):
        path.parent.mkdir(exist_ok=True)  # a directory that is gone was given up
        blocks = _write(table, path)
    return Run(str(path), keys[-1].as_py(), table.nbytes, sample, table.schema, blocks)


def _write(table: pa.Table, path: Path) -> list[Block]:
    rows = max(len(table) * RUN_BLOCK_BYTES // max(table.nbytes, 1), 1)
    blocks, offset = [], 0
    with path.open("xb", buffering=0) as file:
        for batch in table.to_batches(max_chunksize=rows):
            data = memoryview(batch.serialize())
            blocks.append(Block(batch.column("key")[0].as_py(), offset, len(data), crc32(data)))
            offset += len(data)
            while data:
                data = data[file.write(data) :]
    return blocks


def _read(run: Run, span: Span) -> pa.Table:
    """The rows of a run in `span`. Raises `CorruptionError`, `StorageError`."""
    firsts = [block.first for block in run.blocks]
    # The block before the first one that begins in the span may reach into it.
    low = max(bisect_left(firsts, span.start) - 1, 0)
    high = len(firsts) if span.end is None else bisect_left(firsts, span.end)
    data = memoryview(_mapped(run))
    batches = [_checked(run, block, data) for block in run.blocks[low:high]]
    table = pa.Table.from_batches(batches, run.schema)
    keys = table.column("key")
    start = _position(keys, span.start)
    return table.slice(start, len(keys) if span.end is None else _position(keys, span.end) - start)


def _mapped(run: Run) -> pa.Buffer:
    try:
        return pa.memory_map(run.path).read_buffer()
    except FileNotFoundError as error:
        what = f"the sorted run {run.path} is gone"
        raise StorageError(what, "its import was given up: begin another") from error
    except OSError as error:
        raise StorageError(f"reading {run.path} failed: {error}", "look at the disk") from error


def _checked(run: Run, block: Block, data: memoryview) -> pa.RecordBatch:
    found = data[block.offset : block.offset + block.size]
    if len(found) != block.size or crc32(found) != block.crc:
        raise CorruptionError(run.path, f"the block at byte {block.offset} fails its checksum")
    try:
        batch = pa.ipc.read_record_batch(pa.py_buffer(found), run.schema)
        batch.validate(full=True)  # offsets out of it would end the process; 1 ns a row
    except (pa.ArrowException, OSError) as error:
        problem = f"the block at byte {block.offset} is no record batch: {error}"
        raise CorruptionError(run.path, problem) from error
    return batch


def _in_order(batches: list[pa.RecordBatch], duplicates: Duplicates) -> Iterator[pa.RecordBatch]:
    """The rows of batches in memory, ascending by key. Empties the list, as `_groups`."""
    for group in _groups(batches):
        if len(group) == 1 and _ascends(group[0]):
            batch = group.pop()
            for first in range(0, batch.num_rows, ARROW_ROWS_MAX):
                yield batch.slice(first, ARROW_ROWS_MAX)
            continue
        table = pa.Table.from_batches(group).combine_chunks()
        group.clear()
        yield from _sorted(table, duplicates)


def _groups(batches: list[pa.RecordBatch]) -> Iterator[list[pa.RecordBatch]]:
    """The batches in groups whose keys do not cross, ascending by key; within a group they keep
    their order. Empties the list: the memory of a group is free as soon as its rows are sorted."""
    rows = [batch for batch in batches if batch.num_rows]
    batches.clear()
    if any(batch.column("key").null_count for batch in rows):
        raise UsageError("column key has nulls", "every row needs a key")
    if rows and rows[0].column("key").type != pa.binary():
        yield rows
        return
    bounds = [tuple(pc.min_max(batch.column("key")).as_py().values()) for batch in rows]
    groups: list[list[int]] = []
    last: bytes | None = None
    for at in sorted(range(len(rows)), key=lambda at: bounds[at][0]):
        least, greatest = bounds[at]
        if last is not None and least <= last:
            groups[-1].append(at)
            last = max(last, greatest)
        else:
            groups.append([at])
            last = greatest
    found = [[rows[at] for at in sorted(group)] for group in groups]
    rows.clear()
    found.reverse()
    while found:
        yield found.pop()


def _ascends(batch: pa.RecordBatch) -> bool:
    keys = batch.column("key")
    return bool(pc.all(pc.less(keys[:-1], keys[1:]), min_count=0).as_py())


def _sorted(table: pa.Table, duplicates: Duplicates) -> Iterator[pa.RecordBatch]:
    order = _order(table)
    if duplicates == "last" and len(order) > 1:
        keys = table.column("key").combine_chunks().take(order)
        is_last = pc.not_equal(keys[:-1], keys[1:])
        order = order.filter(pa.concat_arrays([is_last, pa.array([True])]))
    # Taken batch by batch, so that memory never holds all rows and a sorted copy of them.
    for first in range(0, len(order), ARROW_ROWS_MAX):
        yield from table.take(order.slice(first, ARROW_ROWS_MAX)).combine_chunks().to_batches()


def _order(table: pa.Table) -> pa.Array:
    """The places of the rows in the order of their keys. Rows of equal keys keep their order.

    Eight bytes of each key, from the first byte in which keys differ, sort as one number: 0.1 us a
    row, where comparing keys takes 0.5. Rows with equal numbers are sorted by the next eight bytes
    too, and keys are compared where `_WORDS_MAX` numbers are equal.
    """
    keys = table.column("key").combine_chunks()
    if keys.type != pa.binary():
        return pc.array_sort_indices(keys)
    skip = _common(keys)
    words = key_words(keys, skip=skip)
    order = np.argsort(words)
    same = _equal_to_next(words[order])
    for count in range(2, _WORDS_MAX + 1):
        if not same.any():
            break
        tied = np.append(same, False) | np.append(False, same)
        rows = np.sort(order[tied])  # of equal keys the first stays first
        among = keys.take(pa.array(rows))
        each = [key_words(among, skip=skip + 8 * at) for at in range(count)]
        inner = np.lexsort(each[::-1])
        order[tied] = rows[inner]
        words[tied] = each[-1][inner]
        same &= _equal_to_next(words)
    if same.any():
        tied = np.append(same, False) | np.append(False, same)
        # Arrow documents that its sort of one array is stable.
        rows = np.sort(order[tied])
        order[tied] = rows[pc.array_sort_indices(keys.take(pa.array(rows))).to_numpy()]
    return pa.array(order)


def _common(keys: pa.Array) -> int:
    """The bytes that all keys have in common at their beginning."""
    if not len(keys):
        return 0
    least, greatest = pc.min_max(keys).as_py().values()
    pairs = enumerate(zip(least, greatest, strict=False))
    return next((at for at, (a, b) in pairs if a != b), len(least))


def _equal_to_next(words: npt.NDArray[np.uint64]) -> npt.NDArray[np.bool_]:
    equal: npt.NDArray[np.bool_] = words[1:] == words[:-1]
    return equal


def _ranges(runs: Sequence[pa.Table], range_bytes: int) -> Iterator[pa.Table]:
    """The rows between two cuts, run after run."""
    keys = [run.column("key").combine_chunks() for run in runs]
    borders = _sampled_cuts(keys, [run.nbytes for run in runs], range_bytes)
    bounds = [[0, *(_position(of_run, cut) for cut in borders), len(of_run)] for of_run in keys]
    for step in range(len(borders) + 1):
        slices = [
            run.slice(places[step], places[step + 1] - places[step])
            for run, places in zip(runs, bounds, strict=True)
        ]
        part = pa.concat_tables(slices)
        if part.num_rows:
            yield part


def _sampled_cuts(keys: Sequence[pa.Array], sizes: Sequence[int], range_bytes: int) -> list[bytes]:
    """Keys that cut the runs into ranges of about `range_bytes` in all runs together."""
    samples: list[tuple[bytes, float]] = []
    for of_run, run_bytes in zip(keys, sizes, strict=True):
        step = max(1, len(of_run) // _SAMPLES_PER_RUN)
        taken = of_run.take(pa.array(range(0, len(of_run), step))).to_pylist()
        samples += [(key, run_bytes / len(taken)) for key in taken]
    return _cut_keys(samples, range_bytes)


def _position(keys: pa.Array, cut: bytes) -> int:
    return bisect_left(range(len(keys)), cut, key=lambda index: keys[index].as_py())
