"""A store and its live readers: reads of a reader, writes beside readers, and opening one.

The reader of `get` is in the subject's own process, whose writer rests. Readers beside writes are
processes of their own, and look at the files every 25 ms.
"""

from __future__ import annotations

import multiprocessing
import random
import threading
import time
from collections.abc import Callable
from contextlib import nullcontext
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import kvstore
from benchmarks.ours import Ours
from benchmarks.subject import Stopwatch, Timed, Work
from kvstore.remote.server import ListenAddress, app, serving

STALENESS_S = 0.05
BESIDE_BATCH_S = 0.02
_PAUSE_S = 0.0005
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

    def gets_beside(self, count: int, reader: str, promised: bool, step: int) -> Work:
        """The 99th percentile of gets, one each half millisecond, beside one `put_many` of `count`
        rows: of this process, of a live reader's process, or by HTTP from this process to another
        one; or the promised time."""
        if promised:
            return lambda: Timed(1, BESIDE_BATCH_S, 0.0)
        rng = random.Random(step)
        rows = [(b"beside/%d/%08d" % (step, at), rng.randbytes(100)) for at in range(count)]
        rng.shuffle(rows)
        store = self.store
        assert store is not None

        def work() -> Timed:
            if reader == "here":
                late: list[float] = []
                is_over = threading.Event()
                looking = threading.Thread(target=_get_on, args=(store, late, is_over.is_set))
                looking.start()
                store.put_many(rows, durability="async")
                is_over.set()
                looking.join()
                return Timed(1, _percentile(late), 0.0)
            address = ListenAddress("127.0.0.1", 0)
            with serving(app(store), address) if reader == "http" else nullcontext() as server:
                where = self.store.path if server is None else server.url
                with _Followers(where, 1, _look) as others:
                    store.put_many(rows, durability="async")
                    return Timed(1, _percentile(others.told(0)), 0.0)

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


def _get_on(store: Any, late: list[float], is_over: Callable[[], bool]) -> None:
    """Get one key again and again, and note how late each value came."""
    while not is_over():
        began = time.monotonic()
        time.sleep(_PAUSE_S)
        store.get(b"beside/")
        late.append(time.monotonic() - began - _PAUSE_S)


def _look(where: Any, said: Connection) -> None:
    """As `_get_on`, in a process of its own, until it is asked for what it has noted."""
    late: list[float] = []
    with kvstore.connect(where) if isinstance(where, str) else kvstore.follow(where) as reader:
        said.send("looking")
        _get_on(reader, late, said.poll)
        said.recv()
        said.send(late)


def _percentile(late: list[float]) -> float:
    return sorted(late)[int(len(late) * 0.99)]


class _Followers:
    """Processes that follow a store for the time of the block."""

    def __init__(self, path: Any, count: int, run: Callable[..., None] | None = None) -> None:
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

    def told(self, upper: int) -> list[Any]:
        """What the only process has noted: each `upper`, with its moment, up to this one; or the
        delays of its gets."""
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
