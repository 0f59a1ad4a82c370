"""What history costs when it goes: `python -m benchmarks.gc [--rows N]`.

    gc             the same churn (1 % of the rows) collected in a store of N rows and in one
                   of N / 10: the ratio of the times. It is to stay below 3.
    delete-range   one range delete over all N rows, durable, against one durable put.
                   The ratio of the times is to stay below 1.5.

Ratios are taken round by round, the two sides in turn, and their median counts.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import kvstore
from benchmarks.data import Data
from kvstore import Store

ROUNDS = 5
_COMMIT_ROWS = 1000


def gc_ratios(place: Path, rows: int, *, rounds: int = ROUNDS) -> Iterator[float]:
    """Time to collect a churn of `rows / 100` updates: store of `rows` over one of a tenth."""
    with ExitStack() as stack:
        sizes = {"large": rows, "small": rows // 10}
        stores = {}
        for name, count in sizes.items():
            store = stack.enter_context(kvstore.open(place / name, durability="async"))
            stores[name] = _filled(store, Data(count)), Data(count)
        for number in range(rounds):
            seconds = {}
            for name in list(sizes)[:: 1 if number % 2 else -1]:
                store, data = stores[name]
                _update(store, data, rows // 100, step=number)
                report = store.gc(before=store.now())
                assert report.versions == rows // 100
                seconds[name] = report.seconds
            yield seconds["large"] / seconds["small"]


def delete_range_ratios(place: Path, rows: int, *, rounds: int = ROUNDS) -> Iterator[float]:
    """Time of one durable delete of all rows over that of one durable put."""
    with kvstore.open(place / "deleted", durability="sync") as store:
        keys = Data(rows).keys
        _filled(store, Data(rows))
        store.sync()
        for number in range(rounds):
            put = min(_timed(lambda: store.put(keys[0], b"v")) for _ in range(10))
            delete = min(
                _timed(lambda: store.delete_range(keys[0], keys[-1] + b"\x00")) for _ in range(10)
            )
            assert next(store.scan(), None) is None, number
            yield delete / put


def _filled(store: Store, data: Data) -> Store:
    for at in range(0, data.rows, 10_000):
        with store.batch(durability="async") as batch:
            for key, value in zip(
                data.keys[at : at + 10_000], data.values[at : at + 10_000], strict=True
            ):
                batch.put(key, value)
    store.gc(before=store.now(), compact=True)
    return store


def _update(store: Store, data: Data, count: int, *, step: int) -> None:
    keys, values = data.updates(count, step)
    for at in range(0, count, _COMMIT_ROWS):
        with store.batch() as batch:
            for key, value in zip(
                keys[at : at + _COMMIT_ROWS], values[at : at + _COMMIT_ROWS], strict=True
            ):
                batch.put(key, value)


def _timed(action: Callable[[], object]) -> float:
    started = time.perf_counter()
    action()
    return time.perf_counter() - started


def main() -> None:
    """Print both ratios: median, least and largest of the rounds."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gc", description=__doc__)
    parser.add_argument("--rows", type=int, default=1_000_000)
    rows = parser.parse_args().rows
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as scratch:
        for name, ratios, limit in (
            ("gc", gc_ratios(Path(scratch), rows), 3.0),
            ("delete-range", delete_range_ratios(Path(scratch), rows), 1.5),
        ):
            found = sorted(ratios)
            median = statistics.median(found)
            verdict = "ok" if median <= limit else "misses its limit"
            print(
                f"{name}: {median:.2f} ({found[0]:.2f} to {found[-1]:.2f}), "
                f"limit {limit}: {verdict}",
                flush=True,
            )


if __name__ == "__main__":
    main()
