"""A store and its live readers: reads of a reader, writes beside readers, and opening one.

The reader of `get` is in the subject's own process, whose writer rests. Readers beside writes are
processes of their own, and look at the files every 25 ms.
"""

from __future__ import annotations

import multiprocessing
import time
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import kvstore
from benchmarks.ours import Ours
from benchmarks.subject import Stopwatch, Timed, Work

STALENESS_S = 0.05
_COMMITS_PER_PROBE = 100
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
        """Single commits that nothing waits for, beside `followers` processes."""
        keys, _ = self.data.updates(count, step)

        def work() -> Timed:
            watch = Stopwatch()
            with _Followers(self.store.path, followers), watch:
                for key in keys:
                    self.store.put(key, _VALUE, durability="async")
            return watch.total(count)

        return work

    def staleness(self, count: int, promised: bool, step: int) -> Work:
        """The time until a commit shows in a reader of another process, beside commits without a
        pause; or the promised time."""
        if promised:
            return lambda: Timed(count, count * STALENESS_S, 0.0)
        keys, _ = self.data.updates(count * _COMMITS_PER_PROBE, step)

        def work() -> Timed:
            put_at: list[tuple[int, float]] = []
            with _Followers(self.store.path, 1, _watch) as followers:
                for number, key in enumerate(keys):
                    stamp = self.store.put(key, _VALUE, durability="async")
                    if number % _COMMITS_PER_PROBE == 0:
                        put_at.append((stamp, time.monotonic()))
                seen = followers.told(int(self.store.upper))
            late, at = 0.0, 0
            for stamp, put in put_at:
                while seen[at][0] <= stamp:
                    at += 1
                late += max(seen[at][1] - put, 0.0)
            return Timed(count, late, 0.0)

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

    def __init__(self, path: Path, count: int, run: Callable[..., None] | None = None) -> None:
        self._path = path
        self._count = count
        self._run = run or _follow
        self._started: list[tuple[Any, Connection]] = []

    def __enter__(self) -> _Followers:
        context = multiprocessing.get_context("spawn")
        for _ in range(self._count):
            ours, theirs = context.Pipe()
            process = context.Process(target=self._run, args=(self._path, theirs))
            process.start()
            theirs.close()
            self._started.append((process, ours))
        for _, pipe in self._started:
            pipe.recv()
        return self

    def told(self, upper: int) -> list[tuple[int, float]]:
        """Each `upper` that the only process saw, with the moment, up to this one."""
        ((_, pipe),) = self._started
        pipe.send(upper)
        return pipe.recv()

    def __exit__(self, *_: object) -> None:
        for process, _ in self._started:
            process.kill()
            process.join()


def _follow(path: Path, said: Connection) -> None:
    with kvstore.follow(path):
        said.send("following")
        said.recv()


def _watch(path: Path, said: Connection) -> None:
    """Note each move of `upper`, until it has reached the requested time."""
    seen: list[tuple[int, float]] = []
    with kvstore.follow(path, max_staleness=STALENESS_S) as reader:
        said.send("following")
        last = None
        while last is None or not seen or seen[-1][0] < last:
            upper = int(reader.upper)
            if not seen or upper > seen[-1][0]:
                seen.append((upper, time.monotonic()))
            if last is None and said.poll():
                last = said.recv()
            time.sleep(0.001)
        said.send(seen)
