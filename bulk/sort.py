"""Sorting rows by key in bounded memory, for imports that are built without Spark.

Rows up to `SORT_BYTES_MAX` are sorted in Arrow and handed on. Beyond, each such run goes to disk
as an Arrow file. The runs are then read together, range of keys by range of keys: the keys that
cut them are sampled so that a range has half a run's bytes in all runs together, and a range is
sorted in Arrow again. No row is touched in Python, and none is compared more often than by two
sorts. (Keys that differ much in the size of their values make ranges uneven; rows of one key are
always in one range.)

Invariants
1. Rows of one key stay in the order they came in: both sorts are stable, runs are read in order.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Iterator, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Final, Literal, TypeAlias

import pyarrow as pa
import pyarrow.compute as pc

from kvstore.errors import UsageError
from kvstore.limits import ARROW_ROWS_MAX, SORT_BYTES_MAX

Duplicates: TypeAlias = Literal["error", "last"]

_SAMPLES_PER_RUN: Final = 1024


def sorted_batches(
    batches: Iterable[pa.RecordBatch],
    scratch: Path,
    *,
    duplicates: Duplicates = "error",
    bytes_max: int = SORT_BYTES_MAX,
) -> Iterator[pa.RecordBatch]:
    """The rows of `batches` (binary columns `key` and `value`), ascending by key.

    `duplicates="last"` keeps the last row of each key; with `"error"` they stay side by side, and
    the part writer refuses them. What does not fit in memory goes to `scratch`.
    """
    if duplicates not in ("error", "last"):
        raise UsageError(f"duplicates={duplicates!r}", 'pass "error" or "last"')
    runs: list[Path] = []
    waiting: list[pa.RecordBatch] = []
    size = 0
    for batch in batches:
        if not batch.num_rows:
            continue
        waiting.append(batch)
        size += batch.nbytes
        if size >= bytes_max:
            runs.append(_spill(waiting, scratch / f"run-{len(runs):06d}.arrow"))
            waiting, size = [], 0
    if not runs:
        if waiting:
            yield from _in_order(pa.Table.from_batches(waiting), duplicates)
        return
    if waiting:
        runs.append(_spill(waiting, scratch / f"run-{len(runs):06d}.arrow"))
    opened = [pa.ipc.open_file(pa.memory_map(str(run))).read_all() for run in runs]
    for part in _ranges(opened, bytes_max // 2):
        yield from _in_order(part, duplicates)


def _spill(batches: Sequence[pa.RecordBatch], path: Path) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    table = _sorted(pa.Table.from_batches(batches)).combine_chunks()
    with pa.ipc.new_file(str(path), table.schema) as file:
        file.write_table(table)
    return path


def _sorted(table: pa.Table) -> pa.Table:
    # Arrow's sort of one column is stable, and says so.
    return table.take(pc.array_sort_indices(table.column("key").combine_chunks()))


def _in_order(table: pa.Table, duplicates: Duplicates) -> Iterator[pa.RecordBatch]:
    table = _sorted(table)
    if duplicates == "last" and table.num_rows > 1:
        keys = table.column("key").combine_chunks()
        is_last = pc.not_equal(keys[:-1], keys[1:])
        table = table.filter(pa.concat_arrays([is_last, pa.array([True])]))
    yield from table.to_batches(max_chunksize=ARROW_ROWS_MAX)


def _ranges(runs: Sequence[pa.Table], range_bytes: int) -> Iterator[pa.Table]:
    """What lies between two cuts in all runs, one after the other."""
    keys = [run.column("key").combine_chunks() for run in runs]
    cuts = _cuts(keys, [run.nbytes for run in runs], range_bytes)
    bounds = [[0, *(_position(of_run, cut) for cut in cuts), len(of_run)] for of_run in keys]
    for step in range(len(cuts) + 1):
        slices = [
            run.slice(places[step], places[step + 1] - places[step])
            for run, places in zip(runs, bounds, strict=True)
        ]
        part = pa.concat_tables(slices)
        if part.num_rows:
            yield part


def _cuts(keys: Sequence[pa.Array], sizes: Sequence[int], range_bytes: int) -> list[bytes]:
    """Keys between which the runs have about `range_bytes` together."""
    samples: list[tuple[bytes, float]] = []
    for of_run, run_bytes in zip(keys, sizes, strict=True):
        step = max(1, len(of_run) // _SAMPLES_PER_RUN)
        taken = of_run.take(pa.array(range(0, len(of_run), step))).to_pylist()
        samples += [(key, run_bytes / len(taken)) for key in taken]
    cuts: list[bytes] = []
    passed = 0.0
    for (_, size), (key, _) in pairwise(sorted(samples)):
        passed += size
        if passed >= range_bytes and (not cuts or key > cuts[-1]):
            cuts.append(key)
            passed = 0.0
    return cuts


def _position(keys: pa.Array, cut: bytes) -> int:
    return bisect_left(range(len(keys)), cut, key=lambda index: keys[index].as_py())
