"""A store that processes share: gets and durable puts of its owner and of a guest, an owner beside
idle guests, and the time until a guest has taken over.

The owner and the guests are processes of their own. Gets are of keys that are read again and again.
"""

from __future__ import annotations

import multiprocessing
import time
from contextlib import ExitStack
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Final

import kvstore
from benchmarks.data import Data
from benchmarks.subject import Subject, Timed, Work

_FILL_ROWS: Final = 10_000
_HOT: Final = 1_000
CLOSED_S: Final = 0.1
KILLED_S: Final = 1.0


class Shared(Subject):
    """A store of several processes. This one is a guest, or owns it behind a take-over."""

    name = "kvstore, shared"

    def __init__(self, directory: Path, data: Data) -> None:
        super().__init__(directory, data)
        self._path = directory / "db"
        self._keys = list(data.lookups(_HOT, 0))
        self._open = ExitStack()

    def fill(self) -> Work:
        """Fill the store, and have a process own it."""

        def work() -> int:
            rows = list(zip(self.data.keys, self.data.values, strict=True))
            with kvstore.open(self.fresh("db")) as store:
                for at in range(0, len(rows), _FILL_ROWS):
                    store.put_many(rows[at : at + _FILL_ROWS], durability="async")
            self._owner = self._open.enter_context(_Member(self._path, self._keys))
            assert self._owner.ask("role") == "owner"
            return len(rows)

        return work

    def gets(self, count: int, by: str, step: int) -> Work:
        """Gets by the owner or by a guest, whose caches have the values."""
        return self._asked("get", count, by)

    def puts(self, count: int, by: str, step: int) -> Work:
        """Durable puts, one after the other, by the owner or by a guest."""
        return self._asked("put", count, by)

    def puts_beside(self, count: int, guests: int, step: int) -> Work:
        """Puts of the owner that nothing waits for, beside idle guests. The processor time is the
        owner's."""

        def work() -> Timed:
            with ExitStack() as stack:
                for _ in range(guests):
                    stack.enter_context(_Member(self._path, self._keys))
                cpu_began = self._owner.ask("cpu")
                seconds = self._owner.ask("put_async", count)
                return Timed(count, seconds, self._owner.ask("cpu") - cpu_began)

        return work

    def take_over(self, way: str, promised: bool, step: int) -> Work:
        """The time from the owner's close, or its death, until the write of a guest is done, the
        opening included; or the promised time."""
        if promised:
            return lambda: Timed(1, CLOSED_S if way == "close" else KILLED_S, 0.0)

        def work() -> Timed:
            with _Member(self._path, self._keys) as guest:
                assert guest.ask("role") == "guest"
                began = self._owner.end(way)
                while guest.ask("role") == "guest":  # the owner may serve a last one
                    guest.ask("put", 1)
                late = time.monotonic() - began
            self._owner = self._open.enter_context(_Member(self._path, self._keys))
            return Timed(1, late, 0.0)

        return work

    def close(self) -> None:
        self._open.close()

    def _asked(self, what: str, count: int, by: str) -> Work:
        def work() -> Timed:
            if by == "owner":
                return Timed(count, self._owner.ask(what, count), 0.0)
            with _Member(self._path, self._keys) as guest:
                assert guest.ask("role") == "guest"
                return Timed(count, guest.ask(what, count), 0.0)

        return work


class _Member:
    """A process that has the store open for the time of the block, and does what it is asked."""

    def __init__(self, path: Path, keys: list[bytes]) -> None:
        spawn = multiprocessing.get_context("spawn")
        self._ours, theirs = spawn.Pipe()
        self._process = spawn.Process(target=_serve, args=(path, keys, theirs))
        self._theirs = theirs

    def __enter__(self) -> _Member:
        self._process.start()
        self._theirs.close()
        assert self._ours.recv() == "open"
        return self

    def ask(self, what: str, count: int = 0) -> Any:
        """The role, the processor time so far, or the seconds that `count` calls took."""
        self._ours.send((what, count))
        return self._ours.recv()

    def end(self, way: str) -> float:
        """Have the process close its store, or kill it; returns when that began."""
        began = time.monotonic()
        if way == "close":
            self._ours.send(("close", 0))
        else:
            self._process.kill()
        return began

    def __exit__(self, *_: object) -> None:
        if self._process.is_alive():
            self._ours.send(("close", 0))
        self._process.join()
        self._ours.close()


def _serve(path: Path, keys: list[bytes], pipe: Connection) -> None:
    store = kvstore.open(path, shared=True)
    calls = {
        "get": store.get,
        "put": partial(_put, store, "group"),
        "put_async": partial(_put, store, "async"),
    }
    pipe.send("open")
    while True:
        what, count = pipe.recv()
        if what == "close":
            store.close()
            return
        if what == "role":
            pipe.send(store.role)
            continue
        if what == "cpu":
            pipe.send(time.process_time())
            continue
        call = calls[what]
        asked = (keys * (count // len(keys) + 1))[:count]
        if what == "get":
            for key in keys:
                call(key)
        began = time.perf_counter()
        for key in asked:
            call(key)
        pipe.send(time.perf_counter() - began)


def _put(store: Any, durability: str, key: bytes) -> None:
    store.put(key, b"half" * 12, durability=durability)
