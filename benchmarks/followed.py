"""A store and its live readers: reads of a reader, writes beside readers, and opening one.

The reader of `get` lies in the subject's own process, whose writer rests. Those beside the writes
are processes of their own, and look at its files every 25 ms.
"""

from __future__ import annotations

import multiprocessing
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import kvstore
from benchmarks.ours import Ours
from benchmarks.subject import Stopwatch, Timed, Work

_VALUE = b"half" * 12 + b"\x00" * 52


class Followed(Ours):
    """A store that is followed."""

    name = "kvstore, followed"

    def get_live(self, count: int, step: int) -> Work:
        """As `get`, by a live reader with everything in its own cache."""
        wanted = self.data.lookups(count, step)
        reader = kvstore.follow(self.store.path)
        for _ in reader.scan():
            pass

        def work() -> Timed:
            watch = Stopwatch()
            with reader, watch:
                get = reader.get
                found = sum(get(key) is not None for key in wanted)
            return watch.total(found)

        return work

    def puts(self, count: int, followers: int, step: int) -> Work:
        """Single commits that nothing waits for, beside so many processes that follow."""
        keys, _ = self.data.updates(count, step)

        def work() -> Timed:
            watch = Stopwatch()
            with _Followers(self.store.path, followers), watch:
                for key in keys:
                    self.store.put(key, _VALUE, durability="async")
            return watch.total(count)

        return work

    def open_reader(self, count: int, live: bool, step: int) -> Work:
        """Open readers, one after the other, beside a log of some MB."""
        for key in self.data.updates(10_000, step)[0]:
            self.store.put(key, _VALUE, durability="async")
        opened: Any = kvstore.follow if live else kvstore.open_read_only

        def work() -> int:
            for _ in range(count):
                opened(self.store.path).close()
            return count

        return work


class _Followers:
    """Processes that follow a store for the time of the block."""

    def __init__(self, path: Path, count: int) -> None:
        self._path = path
        self._count = count
        self._started: list[tuple[Any, Connection]] = []

    def __enter__(self) -> None:
        context = multiprocessing.get_context("spawn")
        for _ in range(self._count):
            ours, theirs = context.Pipe()
            process = context.Process(target=_follow, args=(self._path, theirs))
            process.start()
            theirs.close()
            self._started.append((process, ours))
        for _, pipe in self._started:
            pipe.recv()

    def __exit__(self, *_: object) -> None:
        for process, _ in self._started:
            process.kill()
            process.join()


def _follow(path: Path, said: Connection) -> None:
    with kvstore.follow(path):
        said.send("following")
        said.recv()
