"""A service with a script beside it: the waits of its callers, alone and during a backup.

A commit is ten puts and a shared fsync. A call on the control socket gets or puts one key. One
comes every few milliseconds, as requests of users do. The figure is the 99th percentile of the
waits. The script is another process, of a lower priority, and leaves one processor to the service:
it backs the store up in full, again and again, each time into a new collection.
"""

from __future__ import annotations

import multiprocessing
import os
import statistics
import time
from collections.abc import Callable
from functools import partial
from itertools import count
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Final

import kvstore
from benchmarks.data import Data
from benchmarks.subject import Subject, Timed, Work
from kvstore import backup

PAUSE_S: Final = 0.004
PUTS: Final = 10
_FILL_ROWS: Final = 10_000


class Service(Subject):
    """A store that another process may back up."""

    name = "kvstore"

    def __init__(self, directory: Path, data: Data) -> None:
        super().__init__(directory, data)
        self.store: kvstore.Store | None = None

    def fill(self) -> Work:
        """Fill the store."""

        def work() -> int:
            self.store = kvstore.open(self.fresh("db"), control=True)
            rows = list(zip(self.data.keys, self.data.values, strict=True))
            for at in range(0, len(rows), _FILL_ROWS):
                with self.store.batch(durability="async") as batch:
                    for key, value in rows[at : at + _FILL_ROWS]:
                        batch.put(key, value)
            self.store.sync()
            return len(rows)

        return work

    def wait(self, commits: int, backups: bool, step: int) -> Work:
        """The 99th percentile of the waits of commits, with backups beside them or without."""
        keys, values = self.data.updates(PUTS, step)

        def commit(_: int) -> None:
            assert self.store is not None, "fill comes first"
            with self.store.batch(durability="group") as batch:
                for key, value in zip(keys, values, strict=True):
                    batch.put(key, value)

        return partial(self._waited, commit, commits, backups)

    def ask(self, calls: int, backups: bool, step: int) -> Work:
        """The 99th percentile of the waits of calls on the control socket, three of four a get,
        with backups beside them or without."""
        keys, values = self.data.updates(calls, step)

        def work() -> Timed:
            with kvstore.connect(self.directory / "db") as client:

                def call(number: int) -> None:
                    if number % 4:
                        client.get(keys[number])
                    else:
                        client.put(keys[number], values[number])

                return self._waited(call, calls, backups)

        return work

    def _waited(self, call: Callable[[int], None], count: int, backups: bool) -> Timed:
        with _Script(self.directory) if backups else _Nobody() as script:
            waits = []
            for number in range(count):
                time.sleep(PAUSE_S)  # until the next request comes
                began = time.perf_counter()
                call(number)
                waits.append(time.perf_counter() - began)
                assert script.is_at_work()
        return Timed(1, statistics.quantiles(waits, n=100)[98], 0.0)

    def close(self) -> None:
        if self.store is not None:
            self.store.close()


class _Nobody:
    def __enter__(self) -> _Nobody:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def is_at_work(self) -> bool:
        return True


class _Script:
    """A process that backs the store up for the time of the block."""

    def __init__(self, directory: Path) -> None:
        self._ours, theirs = multiprocessing.get_context("spawn").Pipe()
        self._process = multiprocessing.get_context("spawn").Process(
            target=_back_up, args=(directory, theirs)
        )

    def __enter__(self) -> _Script:
        self._process.start()
        assert self._ours.recv() == "ready"
        return self

    def __exit__(self, *_: object) -> None:
        self._ours.send("end")
        self._process.join()

    def is_at_work(self) -> bool:
        return self._process.is_alive()


def _back_up(directory: Path, pipe: Connection) -> None:
    os.nice(10)  # as the how-to page has it for a script beside a service, and `taskset`
    processors = sorted(os.sched_getaffinity(0))
    os.sched_setaffinity(0, processors[1:] or processors)
    with kvstore.connect(directory / "db") as client:
        client.get(b"")
        pipe.send("ready")
        for number in count():
            place = directory / f"backup-{os.getpid()}-{number}"
            backup.Collection(str(place)).backup(client)
            for hold in client.call("holds")["holds"]:
                client.call("drop_hold", name=hold["name"])
            if pipe.poll():
                return
