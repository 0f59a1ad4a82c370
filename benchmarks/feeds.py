"""Change capture: what the index costs a commit, and what reading changes costs, as ratios.

`python -m benchmarks.feeds [--rows N ...] [directory]`

Shares and ratios are taken between runs that take turns in short rounds, so that the machine's
moods meet both; figures are medians over the rounds. Reading is held against raw rocksdict
iterating over as many rows of as many.

index-share      part of a durable 10,000-row commit that goes to the change index (reach <= 0.12)
arrow            10,000 changes of one commit as record batches, raw rows = 1 (reach >= 5)
changes          the same as `Change`s
events           the same as `Event`s
feed             the same through a feed, its position and one ack included
flat             `arrow` in the largest store, the smallest = 1 (about 1: it costs what changed)
"""

from __future__ import annotations

import argparse
import gc
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from statistics import median

import rocksdict as rocks

import kvstore
from benchmarks.data import Data
from benchmarks.ours import Ours
from benchmarks.subject import Process, Work
from benchmarks.workloads import OURS
from kvstore import Store

ROUNDS = 15
REPEATS = 5
CHANGED = 10_000
COMMITS = 4
"""Commits of one turn."""
ROWS = (100_000, 1_000_000)
LOAD_ROWS = 20_000


@dataclass(frozen=True, slots=True)
class Figure:
    """A ratio, and what it is a ratio of: seconds of ours, and of the yardstick."""

    name: str
    ratio: float
    ours_s: float
    yardstick_s: float


def measure(directory: Path, rows: Sequence[int] = ROWS, *, rounds: int = ROUNDS) -> list[Figure]:
    """All figures, at each number of rows."""
    figures = [measure_index_share(directory / "share", rounds=rounds)]
    arrow: list[Figure] = []
    for count in rows:
        found = measure_reading(directory / str(count), count, rounds=rounds)
        arrow.append(found[0])
        figures += found
    small, large = arrow[0], arrow[-1]
    figures.append(Figure("flat", large.ours_s / small.ours_s, large.ours_s, small.ours_s))
    return figures


def measure_index_share(directory: Path, *, rounds: int = ROUNDS) -> Figure:
    """Durable commits with their index entries, and without, in turns.

    In a process each: memory that one kind of commit took fresh from the system is what the next
    one of the other kind would get for nothing.
    """
    processes = [
        Process(where, directory / name, 10 * CHANGED)
        for name, where in (("with", OURS), ("without", "benchmarks.feeds:Unindexed"))
    ]
    costs: list[list[float]] = [[], []]
    try:
        for process in processes:
            _seconds(process, "fill")
        for step in range(rounds):
            for number in (0, 1) if step % 2 else (1, 0):
                process = processes[number]
                took = _seconds(process, "commit", rows=CHANGED, count=COMMITS, step=step)
                costs[number].append(took / COMMITS)
    finally:
        for process in processes:
            process.close()
    ours, bare = median(costs[0]), median(costs[1])
    return Figure("index-share", median(1 - b / a for a, b in zip(*costs, strict=True)), ours, bare)


class Unindexed(Ours):
    """A store whose commits leave no entry in the change index."""

    name = "kvstore, no index"

    def fill(self) -> Work:
        filled = super().fill()

        def work() -> int:
            rows = filled()
            assert self.store is not None
            self.store._index.stage = lambda *_, **__: None
            return rows

        return work


def _seconds(process: Process, operation: str, **arguments: int) -> float:
    result = process.call(operation, **arguments)
    if result.problem:
        raise ValueError(f"{operation}: {result.problem}")
    return result.seconds


def measure_reading(directory: Path, rows: int, *, rounds: int = ROUNDS) -> list[Figure]:
    """10,000 changes out of `rows`, against iterating over 10,000 raw rows out of as many."""
    data = Data(rows)
    directory.mkdir(parents=True)
    raw = load_raw(directory / "raw", data)
    with closing(raw), kvstore.open(directory / "store", durability="async") as store:
        for at in range(0, rows, LOAD_ROWS):
            commit(store, data.keys[at : at + LOAD_ROWS], data.values[at : at + LOAD_ROWS])
        stamp = commit(store, *data.updates(CHANGED, 0))
        store.feed("benchmark", start=stamp - 1)
        readers: dict[str, Callable[[], int]] = {
            "arrow": lambda: sum(b.num_rows for b in store.changes_batches(stamp - 1, stamp)),
            "changes": lambda: sum(1 for _ in store.changes(stamp - 1, stamp, order="time")),
            "events": lambda: sum(1 for _ in store.events(stamp - 1, stamp)),
            "feed": lambda: through_feed(store, stamp),
        }
        costs: dict[str, list[float]] = {name: [] for name in ("raw", *readers)}
        for _ in range(rounds):
            costs["raw"].append(_best(lambda: iterate(raw)))
            for name, read in readers.items():
                costs[name].append(_best(lambda: require(read())))  # noqa: B023
    return [
        Figure(
            f"{name} of {rows:,}",
            median(a / b for a, b in zip(costs["raw"], costs[name], strict=True)),
            median(costs[name]),
            median(costs["raw"]),
        )
        for name in readers
    ]


def commit(store: Store, keys: list[bytes], values: list[bytes]) -> int:
    """One commit of all rows; returns its timestamp."""
    with store.batch() as batch:
        for key, value in zip(keys, values, strict=True):
            batch.put(key, value)
    assert batch.timestamp is not None
    return batch.timestamp


def through_feed(store: Store, stamp: int) -> int:
    """What a consumer that starts over pays, until it has acked."""
    feed = store.feed("benchmark", start=stamp - 1)
    found = 0
    for batch in feed:
        found += len(batch.events)
    feed.ack(feed.position)
    return found


def load_raw(path: Path, data: Data) -> rocks.Rdict:
    """The same rows in raw rocksdict."""
    database = rocks.Rdict(str(path), rocks.Options(raw_mode=True))
    for at in range(0, data.rows, LOAD_ROWS):
        batch = rocks.WriteBatch(raw_mode=True)
        rows = zip(data.keys[at : at + LOAD_ROWS], data.values[at : at + LOAD_ROWS], strict=True)
        for key, value in rows:
            batch.put(key, value)
        database.write(batch)
    database.flush()
    return database


def iterate(raw: rocks.Rdict) -> None:
    """10,000 rows, one by one."""
    left = CHANGED
    for _ in raw.items():
        left -= 1
        if not left:
            return


def require(found: int) -> None:
    """Stop where a reader did not do the work it is timed for."""
    if found != CHANGED:
        raise ValueError(f"{found} changes were read, {CHANGED} were made")


def _best(action: Callable[[], object]) -> float:
    """The least of a few runs in a row: what is shorter than a time slice is hit by it or not."""
    gc.collect()
    return min(_timed(action) for _ in range(REPEATS))


def _timed(action: Callable[[], object]) -> float:
    begun = time.perf_counter()
    action()
    return time.perf_counter() - begun


def main() -> None:
    """Measure in a temporary directory (below the one given) and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("directory", nargs="?")
    parser.add_argument("--rows", type=int, nargs="+", default=list(ROWS))
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    chosen = parser.parse_args(sys.argv[1:])
    with tempfile.TemporaryDirectory(dir=chosen.directory) as directory:
        for figure in measure(Path(directory), chosen.rows, rounds=chosen.rounds):
            print(
                f"{figure.name:24} ratio {figure.ratio:6.2f}   ours {figure.ours_s * 1e3:8.2f} ms"
                f"   yardstick {figure.yardstick_s * 1e3:8.2f} ms"
            )


if __name__ == "__main__":
    main()
