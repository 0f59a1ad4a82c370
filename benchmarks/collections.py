"""What backups cost: `python -m benchmarks.collections [FIGURE ...] [--rows N]`.

    full         rows per second of a full backup of N rows, in one process
    incremental  a backup of 10,000 changes, against copying a fresh checkpoint's new files: the
                 ratio of the times, copy over backup. The median round, and all rounds together:
                 now and then RocksDB compacts, and then the new files are many
    cold         the same by a new `Collection` for each backup, as a script that begins has it
    flat         the same backup in a store of `--flat` rows, over that in one of a hundredth
    increments   many small increments are listed, verified and restored: seconds and peak memory
                 per byte of the collection, over those of a quarter as many. Linear is 1.
    scan         rows of a collection as of a time, over delta-rs reading that version

Ratios are taken round by round, the two sides in turn, and their median counts.
"""

from __future__ import annotations

import argparse
import gc
import multiprocessing
import os
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NamedTuple

import pyarrow as pa

import bulk
import kvstore
from backup import Collection
from benchmarks.data import Data
from kvstore import Store
from kvstore.arrow import ROWS_SCHEMA

ROUNDS = 5
LONG_ROUNDS = 30
"""Of what takes milliseconds, and is compacted now and then."""
CHANGES = 10_000
_COMMIT_ROWS = 10_000
_INCREMENT_ROWS = 100


def full_rate(place: Path, rows: int, *, rounds: int = ROUNDS) -> Iterator[float]:
    """Rows per second of full backups of one store, each into a collection of its own."""
    with kvstore.open(place / "store", durability="async") as store:
        _fill(store, Data(rows))
        for number in range(rounds):
            seconds = _timed(partial(Collection(place / f"full-{number}").backup, store))
            yield rows / seconds


def incremental_costs(
    place: Path, rows: int, *, cold: bool = False, rounds: int = LONG_ROUNDS
) -> Iterator[tuple[float, float]]:
    """Seconds of a backup, and of copying what a checkpoint has new, round by round.

    Both sides end durable: the backup with its part, its folder and its consensus fsynced, the
    copy with every new file and its folder. The store's commits are durable before (the default).
    """
    data = Data(rows)
    with kvstore.open(place / "store") as store:
        _fill(store, data)
        collection, copies = Collection(place / "collection"), Copies(store, place / "copies")
        collection.backup(store)
        copies.take()
        for number in range(rounds):
            _update(store, data, step=number)
            if cold:
                collection = Collection(place / "collection")
            sides: list[Callable[[], Any]] = [partial(collection.backup, store), copies.take]
            seconds = {side: _timed(side) for side in sides[:: 1 if number % 2 else -1]}
            yield seconds[sides[0]], seconds[sides[1]]


class Copies:
    """What RocksDB offers: a checkpoint, of which the files not yet copied are copied."""

    def __init__(self, store: Store, place: Path) -> None:
        self._store = store
        self._place = place
        place.mkdir()

    def take(self) -> None:
        """Copy the new files of a fresh checkpoint, durably."""
        checkpoint = self._place / "checkpoint"
        self._store.checkpoint(checkpoint)
        for file in checkpoint.iterdir():
            target = self._place / file.name
            if file.suffix != ".sst" or not target.exists():
                shutil.copyfile(file, target)
                _fsync(target)
        _fsync(self._place)
        shutil.rmtree(checkpoint)


def flat_ratios(place: Path, rows: int, *, rounds: int = LONG_ROUNDS) -> Iterator[float]:
    """Time of an incremental backup in a store of `rows`, over that in one of a hundredth."""
    sizes = {"large": Data(rows), "small": Data(rows // 100)}
    stores = {name: kvstore.open(place / name, durability="async") for name in sizes}
    try:
        collections = {name: Collection(place / f"{name}-backups") for name in sizes}
        for name, store in stores.items():
            _load(store, sizes[name], place / f"{name}-staged")
            collections[name].backup(store)
        for number in range(rounds):
            seconds = {}
            for name in list(sizes)[:: 1 if number % 2 else -1]:
                _update(stores[name], sizes[name], step=number)
                seconds[name] = _timed(partial(collections[name].backup, stores[name]))
            yield seconds["large"] / seconds["small"]
    finally:
        for store in stores.values():
            store.close()


class Cost(NamedTuple):
    """Seconds and peak memory of one call in a process of its own."""

    seconds: float
    peak_bytes: int


def increment_ratios(place: Path, increments: int) -> Iterator[tuple[str, float, float]]:
    """What is done to all increments, over the same with a quarter of them: time, memory per byte.

    Memory is the growth of the process over what it was before the call.
    """
    costs: dict[int, dict[str, Cost]] = {}
    sizes = {}
    data = Data(increments * _INCREMENT_ROWS)
    for count in (increments // 4, increments):
        home = place / str(count)
        with kvstore.open(home / "store", durability="async") as store:
            collection = Collection(home / "collection")
            for number in range(count):
                _put(store, data, number * _INCREMENT_ROWS, _INCREMENT_ROWS)
                collection.backup(store)
            sizes[count] = collection.show().bytes
        costs[count] = {name: _alone(name, home) for name in ("list", "verify", "restore")}
    grown = sizes[increments] / sizes[increments // 4]
    for name, cost in costs[increments].items():
        before = costs[increments // 4][name]
        yield (
            name,
            cost.seconds / before.seconds / grown,
            cost.peak_bytes / before.peak_bytes / grown,
        )


def _alone(action: str, home: Path) -> Cost:
    context = multiprocessing.get_context("spawn")
    near, far = context.Pipe()
    process = context.Process(target=_measure, args=(action, home, far))
    process.start()
    cost: Cost = near.recv()
    process.join()
    return cost


def _measure(action: str, home: Path, said: Connection) -> None:
    collection = Collection(home / "collection")
    collection.show()
    actions: dict[str, Callable[[], object]] = {
        "list": collection.list,
        "verify": collection.verify,
        "restore": partial(collection.restore, home / "restored"),
    }
    gc.collect()
    before = _peak_kilobytes()
    seconds = _timed(actions[action])
    grown = _peak_kilobytes() - before
    said.send(Cost(seconds, max(grown, 1024) * 1024))


def _peak_kilobytes() -> int:
    """Of this process alone: `ru_maxrss` begins with what the parent had when it forked."""
    status = Path("/proc/self/status").read_text()
    return int(status.partition("VmHWM:")[2].split()[0])


def scan_ratios(place: Path, rows: int, *, rounds: int = ROUNDS) -> Iterator[float]:
    """Rows per second of a collection as of its first backup, over delta-rs at that version."""
    from deltalake import DeltaTable, write_deltalake

    data, table = Data(rows), str(place / "delta")
    with kvstore.open(place / "store", durability="async") as store:
        _fill(store, data)
        collection = Collection(place / "collection")
        at = kvstore.Timestamp(collection.backup(store).upper - 1)
        write_deltalake(table, pa.table({"key": data.keys, "value": data.values}))
        _update(store, data, step=0)
        collection.backup(store)
        keys, values = data.updates(CHANGES, 0)
        write_deltalake(table, pa.table({"key": keys, "value": values}), mode="append")

    def ours() -> None:
        assert sum(len(batch) for batch in collection.scan_batches(as_of=at)) == rows

    def theirs() -> None:
        assert DeltaTable(table, version=0).to_pyarrow_table().num_rows == rows

    for number in range(rounds):
        sides = [ours, theirs]
        seconds = {side: _timed(side) for side in sides[:: 1 if number % 2 else -1]}
        yield seconds[theirs] / seconds[ours]


def _fill(store: Store, data: Data) -> None:
    for at in range(0, data.rows, _COMMIT_ROWS):
        _put(store, data, at, _COMMIT_ROWS)
    store.sync()


def _load(store: Store, data: Data, staging: Path) -> None:
    """All rows as one import: ten million commits' worth in half a minute."""
    staged = bulk.Import.create(staging)
    with staged.writer() as writer:
        for at in range(0, data.rows, 10 * _COMMIT_ROWS):
            keys = data.keys[at : at + 10 * _COMMIT_ROWS]
            writer.write(pa.record_batch([keys, data.first_values(at, len(keys))], ROWS_SCHEMA))
    staged.seal()
    bulk.ingest(store, staging, move=True)


def _put(store: Store, data: Data, at: int, count: int) -> None:
    with store.batch(durability="async") as batch:
        keys = data.keys[at : at + count]
        values = data.first_values(at, len(keys))
        for key, value in zip(keys, values, strict=True):
            batch.put(key, value)


def _update(store: Store, data: Data, *, step: int) -> None:
    with store.batch() as batch:
        for key, value in zip(*data.updates(CHANGES, step), strict=True):
            batch.put(key, value)


def _timed(action: Callable[[], object]) -> float:
    started = time.perf_counter()
    action()
    return time.perf_counter() - started


def _fsync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def main() -> None:
    """Print each figure: its median, and the least and the largest of the rounds."""
    figures: dict[str, Callable[[argparse.Namespace], None]] = {
        "full": lambda options: _show("full, rows/s", full_rate, options.rows),
        "incremental": lambda options: _show_incremental("incremental", options.rows, cold=False),
        "cold": lambda options: _show_incremental("cold incremental", options.rows, cold=True),
        "flat": lambda options: _show("flat, N over N / 100", flat_ratios, options.flat),
        "scan": lambda options: _show("scan, over delta-rs", scan_ratios, options.rows),
        "increments": lambda options: _show_increments(options.increments),
    }
    parser = argparse.ArgumentParser(description="what backups cost")
    parser.add_argument("figures", nargs="*", choices=[*figures, []], default=list(figures))
    parser.add_argument("--rows", type=int, default=1_000_000)
    parser.add_argument("--flat", type=int, default=10_000_000)
    parser.add_argument("--increments", type=int, default=400)
    options = parser.parse_args()
    for name in options.figures:
        figures[name](options)


def _show(name: str, measure: Callable[[Path, int], Iterator[float]], rows: int) -> None:
    with tempfile.TemporaryDirectory(dir=".") as place:
        _print(name, list(measure(Path(place), rows)))


def _show_incremental(name: str, rows: int, *, cold: bool) -> None:
    with tempfile.TemporaryDirectory(dir=".") as place:
        costs = list(incremental_costs(Path(place), rows, cold=cold))
    ours, copies = zip(*costs, strict=True)
    _print(f"{name}, ms", [1000 * seconds for seconds in ours])
    _print(f"{name}, copy over backup", [copy / backup for backup, copy in costs])
    _print(f"{name}, the same in total", [sum(copies) / sum(ours)])


def _show_increments(increments: int) -> None:
    with tempfile.TemporaryDirectory(dir=".") as place:
        for name, seconds, memory in increment_ratios(Path(place), increments):
            print(f"{increments} increments, {name:10} time {seconds:.2f} memory {memory:.2f}")


def _print(name: str, found: list[float]) -> None:
    low, high = min(found), max(found)
    print(f"{name:40} {statistics.median(found):12.2f} {low:12.2f} .. {high:.2f}", flush=True)


if __name__ == "__main__":
    main()
