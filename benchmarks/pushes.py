"""Pushes into a store at work: the waits of gets meanwhile, the commit, the revert, and a peer.

The bucket is a directory, so figures have no network in them. A push to the store at work has a
tenth of its rows, with new values. Gets come one after the other with a pause, as requests of users
do. The peers are durable puts by a client, one after the other, and Feast with its sqlite online
store. Feast has a Python environment of its own, because it pins other versions of libraries that
we use.
"""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Final

import pyarrow as pa
import pyarrow.parquet as pq

import kvstore
from benchmarks import server
from benchmarks.data import Data
from benchmarks.ours import Ours
from benchmarks.subject import Stopwatch, Subject, Timed, Work
from kvstore import bulk
from kvstore.bulk.pushes import Pushes
from kvstore.bulk.pushes.pull import Puller

PROMISED_S: Final = 0.010
"""The promised time of the commit of a push, and of its revert."""
FEAST: Final = Path(sys.prefix) / "feast" / "bin" / "python"
"""The Python of Feast's environment, which `make bench` creates."""
_SCRIPT: Final = Path(__file__).parent / "peers" / "feast_script.py"
_PAUSE_S: Final = 0.001
_NAME: Final = "bench"


class Pulled(Ours):
    """A store that takes pushes."""

    name = "kvstore"

    def wait_gets(self, count: int, pushes: bool, step: int) -> Work:
        """The 99th percentile of the waits of gets, alone or while a push is fetched and added."""
        wanted = self.data.lookups(count, step)
        if not pushes:
            return lambda: Timed(1, self._waited(wanted, lambda: True), 0.0)
        root, number = self._pushed(step)

        def work() -> Timed:
            with bulk.pull(self.store, root, name=_NAME, every=60) as puller:

                def is_taken() -> bool:
                    return str(number) in puller.status["pushes"]

                return Timed(1, self._waited(wanted, is_taken), 0.0)

        return work

    def add_push(self, promised: bool, step: int) -> Work:
        """The seconds in which the fetched and checked rows of a push become visible."""
        if promised:
            return lambda: Timed(1, PROMISED_S, 0.0)
        root, number = self._pushed(step)

        def work() -> Timed:
            _drain(Puller(self.store, Pushes(root), name=_NAME))
            [told] = Pushes(root).status(number).stores
            return Timed(1, told.seconds["add"], 0.0)

        return work

    def revert_push(self, promised: bool, step: int) -> Work:
        """The seconds in which a store takes a push back and reports it."""
        if promised:
            return lambda: Timed(1, PROMISED_S, 0.0)
        root, number = self._pushed(step)
        puller = Puller(self.store, Pushes(root), name=_NAME)
        _drain(puller)
        Pushes(root).revert(number)

        def work() -> Timed:
            began = time.perf_counter()
            assert puller.step()
            return Timed(1, time.perf_counter() - began, 0.0)

        return work

    def materialise(self, rows: int) -> Work:
        """Sort and push the rows of a Parquet file, and take them into a new store."""
        source = _written(self.data, rows, self.fresh("rows.parquet"))
        root, target = self.fresh("materialised-root"), self.fresh("materialised")

        def work() -> int:
            table = pq.read_table(source).sort_by("key")
            pushes = Pushes(root)
            with pushes.begin() as building:
                with building.writer() as writer:
                    for batch in table.to_batches():
                        writer.write(batch)
                building.seal()
            with kvstore.open(target) as store:
                _drain(Puller(store, pushes, name=_NAME))
                return store.imports.all()[0].rows

        return work

    def put_over_server(self, count: int) -> Work:
        """Put rows durably by a client of a server, one after the other."""
        keys, _ = self.data.updates(count, 0)
        place = self.fresh("served")

        def work() -> Timed:
            place.mkdir()
            with server.ours(place) as contender:
                watch = Stopwatch()
                with watch:
                    for key in keys:
                        contender.put(key)
                return watch.total(count)

        return work

    def _pushed(self, step: int) -> tuple[Path, int]:
        """A new root with one push of new values."""
        root = self.fresh("root")
        rows = dict(zip(*self.data.updates(self.data.rows // 10, step), strict=True))
        with Pushes(root).begin() as building:
            with building.writer() as writer:
                for key in sorted(rows):
                    writer.put(key, rows[key])
            return root, building.seal().number

    def _waited(self, wanted: list[bytes], is_over: Callable[[], bool]) -> float:
        """Get these keys, and more of them until `is_over()`."""
        get, waits = self.store.get, []
        while True:
            for key in wanted:
                time.sleep(_PAUSE_S)  # until the next request comes
                began = time.perf_counter()
                get(key)
                waits.append(time.perf_counter() - began)
            if is_over():
                return statistics.quantiles(waits, n=100)[98]


class Feast(Subject):
    """Feast materialises a Parquet file into its sqlite online store."""

    name = "Feast, sqlite3"

    def __init__(self, directory: Path, data: Data) -> None:
        super().__init__(directory, data)
        if not FEAST.exists():
            raise ImportError("no environment of Feast: make bench creates it")

    def materialise(self, rows: int) -> Work:
        """Materialise the rows of a Parquet file. Starting Python and Feast is not timed."""
        source = _written(self.data, rows, self.fresh("rows.parquet"))
        home = self.fresh("feast")

        def work() -> Timed:
            command = [str(FEAST), str(_SCRIPT), str(source), str(home)]
            done = subprocess.run(command, capture_output=True, text=True, check=True)
            return Timed(rows, *json.loads(done.stdout.splitlines()[-1]))

        return work


def _written(data: Data, rows: int, target: Path) -> Path:
    """A Parquet file of some rows, in no order."""
    keys, values = data.updates(rows, 0)
    columns = [[key.hex().encode() for key in keys], values]
    pq.write_table(pa.table(columns, names=["key", "value"]), target)
    return target


def _drain(puller: Puller) -> None:
    while puller.step():
        pass
