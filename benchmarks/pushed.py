"""Large pushes of Spark into a store: `python -m benchmarks.pushed [MEGABYTES] [ROUNDS] [FILES]`.

Spark builds a push of rows of 1 KB and ends. Then one thread writes to the store, another one reads
it, and a puller takes the push. The bucket is a directory, so figures have no network in them. Each
round measures the waits of gets twice, without a push and while one is taken. At the end all pushes
are reverted. The store holds as many rows as a push, with the same keys.

    commit    the seconds from the checked files to the visible rows
    waits     the 99th percentile while a push is fetched, checked and added, against without one
"""

from __future__ import annotations

import random
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final, NamedTuple

import kvstore
from kvstore import bulk
from kvstore.bulk.pushes.pull import Puller
from kvstore.spark import push, session

ROW_BYTES: Final = 1_000
_NAME: Final = "store"
_BEFORE_S: Final = 10.0
"""The time for which gets are measured without a push."""
_PAUSE_S: Final = 0.001
"""The time between two requests of a user."""
_DIGESTS: Final = ", ".join(f"sha2(CONCAT({{}}, id, '/{n}'), 512)" for n in range(ROW_BYTES // 128))


class Taken(NamedTuple):
    """The figures of one push, in seconds."""

    take_s: float
    commit_s: float
    alone_s: float
    beside_s: float

    @property
    def ratio(self) -> float:
        """The waits while a push is taken, against the waits without one."""
        return self.beside_s / self.alone_s


def key(number: int) -> bytes:
    return b"k%09d" % number


def built(root: Path, rows: int, pushes: int, files: int) -> None:
    """Push the rows some times with other values, by Spark, in `files` files each."""
    spark = session("pushed", memory="2g")
    for number in range(pushes):
        value = f"CONCAT({_DIGESTS.format(*[number] * (ROW_BYTES // 128))})"
        frame = spark.range(rows).selectExpr("printf('k%09d', id) AS key", f"{value} AS value")
        report = push(frame, root, key="key", value="value", partitions=files)
        print(f"built {report.push.size_bytes / 1e6:,.0f} MB in {report.build_seconds:.0f} s")
    spark.stop()


@contextmanager
def writing(store: kvstore.Store, rows: int) -> Iterator[None]:
    """Live writes while the block runs."""
    over = threading.Event()

    def write() -> None:
        pick = random.Random(1)
        while not over.wait(_PAUSE_S):
            store.put(key(pick.randrange(rows)), b"live")

    writer = threading.Thread(target=write)
    writer.start()
    try:
        yield
    finally:
        over.set()
        writer.join()


def waited(store: kvstore.Store, rows: int, is_over: Callable[[], bool]) -> float:
    """The 99th percentile of the waits of gets until `is_over()`, at least a hundred."""
    pick, waits = random.Random(2), list[float]()
    while len(waits) < 100 or not is_over():
        time.sleep(_PAUSE_S)  # until the next request comes
        wanted = key(pick.randrange(rows))
        began = time.perf_counter()
        store.get(wanted)
        waits.append(time.perf_counter() - began)
    return statistics.quantiles(waits, n=100)[98]


def taken(
    store: kvstore.Store, pushes: bulk.Pushes, puller: Puller, rows: int, number: int
) -> Taken:
    """Take push `number`."""
    until = time.monotonic() + _BEFORE_S
    alone_s = waited(store, rows, lambda: time.monotonic() > until)
    taking = threading.Thread(target=puller.step)
    began = time.perf_counter()
    taking.start()
    beside_s = waited(store, rows, lambda: not taking.is_alive())
    take_s = time.perf_counter() - began
    assert [each.rows for each in store.imports.all()] == [rows] * number
    [told] = pushes.status(number).stores
    assert told.seconds is not None
    return Taken(take_s, told.seconds["add"], alone_s, beside_s)


def reverted(pushes: bulk.Pushes, puller: Puller) -> list[float]:
    """The seconds of the steps that take the pushes back and report it, the newest push first."""
    found = []
    for each in reversed(pushes.list()):
        pushes.revert(each.number)
        began = time.perf_counter()
        assert puller.step()
        found.append(time.perf_counter() - began)
    return found


def main(megabytes: str = "1000", rounds: str = "3", files: str = "8") -> None:
    rows = int(megabytes) * 1_000_000 // ROW_BYTES
    with tempfile.TemporaryDirectory() as text:
        place = Path(text)
        built(place / "root", rows, int(rounds), int(files))
        with kvstore.open(place / "store") as store:
            for first in range(0, rows, 10_000):
                store.put_many({key(n): b"v" * 100 for n in range(first, first + 10_000)})
            pushes = bulk.Pushes(place / "root")
            puller = Puller(store, pushes, name=_NAME)
            with writing(store, rows):
                found = [
                    taken(store, pushes, puller, rows, number)
                    for number in range(1, int(rounds) + 1)
                ]
                reverts_s = reverted(pushes, puller)
    print("| taken | commit | waits of gets | alone | ratio |\n|--:|--:|--:|--:|--:|")
    for each in found:
        print(
            f"| {each.take_s:.1f} s | {each.commit_s * 1e3:.1f} ms | {each.beside_s * 1e3:.2f} ms "
            f"| {each.alone_s * 1e3:.2f} ms | {each.ratio:.2f} |"
        )
    print("reverts:", ", ".join(f"{each * 1e3:.1f} ms" for each in reverts_s))


if __name__ == "__main__":
    main(*sys.argv[1:])
