"""Sorting rows by key in bounded memory.

Rows up to `SORT_BYTES_MAX` are sorted and handed on. Beyond, each such run goes to disk as an Arrow
file. The runs are then read together, range of keys by range of keys: the keys that cut them are
sampled so that a range has half a run's bytes in all runs together, and a range is sorted again.
No row is touched in Python, and none is compared more often than by two sorts. (Keys that differ
much in the size of their values make ranges uneven; rows of one key are always in one range.)

Invariants
1. Rows of one key stay in the order they came in: both sorts are stable, runs are read in order.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Iterator, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Final, Literal, TypeAlias

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from kvstore.errors import UsageError
from kvstore.limits import ARROW_ROWS_MAX, SORT_BYTES_MAX

Duplicates: TypeAlias = Literal["error", "last"]

_SAMPLES_PER_RUN: Final = 1024
_FIRST_BYTES: Final = np.array([(1 << 64) - (1 << 8 * (8 - n)) for n in range(9)], np.uint64)
"""Masks of the first n bytes of eight."""


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
            runs.append(_spill(_let_go(waiting), scratch / f"run-{len(runs):06d}.arrow"))
            size = 0
    if not runs:
        if waiting:
            yield from _in_order(_let_go(waiting), duplicates)
        return
    if waiting:
        runs.append(_spill(_let_go(waiting), scratch / f"run-{len(runs):06d}.arrow"))
    opened = [pa.ipc.open_file(pa.memory_map(str(run))).read_all() for run in runs]
    for part in _ranges(opened, bytes_max // 2):
        yield from _in_order(part.combine_chunks(), duplicates)


def _let_go(waiting: list[pa.RecordBatch]) -> pa.Table:
    """The batches as one table of one chunk; the list is empty then, and its memory free."""
    table = pa.Table.from_batches(waiting).combine_chunks()
    waiting.clear()
    return table


def _spill(table: pa.Table, path: Path) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    with pa.ipc.new_file(str(path), table.schema) as file:
        file.write_table(table.take(_order(table)).combine_chunks())
    return path


def _in_order(table: pa.Table, duplicates: Duplicates) -> Iterator[pa.RecordBatch]:
    order = _order(table)
    if duplicates == "last" and len(order) > 1:
        keys = table.column("key").combine_chunks().take(order)
        is_last = pc.not_equal(keys[:-1], keys[1:])
        order = order.filter(pa.concat_arrays([is_last, pa.array([True])]))
    # Taken batch by batch: rows and a sorted copy of all of them are never there together.
    for first in range(0, len(order), ARROW_ROWS_MAX):
        yield from table.take(order.slice(first, ARROW_ROWS_MAX)).combine_chunks().to_batches()


def _order(table: pa.Table) -> pa.Array:
    """The places of the rows by key, those of equal keys as they are.

    Eight bytes of each key, from where keys begin to differ, sort as one number: 0.1 us per row,
    where comparing keys costs 0.5. Only rows in which these are equal are compared further.
    """
    keys = table.column("key").combine_chunks()
    if keys.null_count or keys.type != pa.binary():
        return pc.array_sort_indices(keys)
    words = _words(keys)
    order = np.argsort(words)
    ascending = words[order]
    same = ascending[1:] == ascending[:-1]
    if same.any():
        tied = np.append(same, False) | np.append(False, same)
        # In order of arrival, for Arrow's sort of one array is stable, and says so.
        rows = np.sort(order[tied])
        order[tied] = rows[pc.array_sort_indices(keys.take(pa.array(rows))).to_numpy()]
    return pa.array(order)


def _words(keys: pa.Array) -> npt.NDArray[np.uint64]:
    """Of each key the eight bytes behind what all have in common, as numbers that sort alike.

    Shorter keys are filled with zeros: those may tie with others, and are never out of order.
    """
    if not len(keys):
        return np.empty(0, np.uint64)
    least, greatest = pc.min_max(keys).as_py().values()
    pairs = enumerate(zip(least, greatest, strict=False))
    common = next((at for at, (a, b) in pairs if a != b), len(least))
    _, offsets, data = keys.buffers()
    places = np.frombuffer(offsets, np.int32)[keys.offset : keys.offset + len(keys) + 1]
    padded = (data.to_pybytes() if data else b"") + bytes(8)
    at_every_byte = np.ndarray((len(padded) - 7,), ">u8", padded, strides=(1,))
    starts = places[:-1] + common
    lengths = np.minimum(places[1:] - starts, 8)
    words: npt.NDArray[np.uint64] = at_every_byte[starts].astype(np.uint64) & _FIRST_BYTES[lengths]
    return words


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
