"""What processes of the tests do with a shared store."""

from __future__ import annotations

import multiprocessing
import os
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import kvstore
from kvstore.base.clock import Clock
from kvstore.errors import KVStoreError
from kvstore.remote.client import guest
from kvstore.remote.server import http


def put_mine(store: Any) -> tuple[str, bytes]:
    """Write with a handle that came from another process; returns the role and what is read."""
    key = b"pid/%d" % os.getpid()
    store.put(key, b"1")
    assert store.get(key) == b"1"
    return store.role, store.get(b"k")


def count_runs(store: Any) -> tuple[int, int]:
    """Count a task; returns the total, and the process."""
    return store.increment(b"tasks"), os.getpid()


def put_one(path: Path, number: int) -> str:
    """Join a store, and write one key."""
    with kvstore.open(path, shared=True, patience=60) as store:
        store.put(b"one/%d" % number, b"")
        return store.role


class Member:
    """A process that has the store open, and does what it is asked."""

    def __init__(self, process: Any, pipe: Connection) -> None:
        self.process, self._pipe = process, pipe

    def ask(self, verb: str, *args: Any, **given: Any) -> Any:
        """The answer of a verb, the value of a part, or the error that it raised."""
        self._pipe.send((verb, args, given))
        return self._pipe.recv()

    def kill(self) -> None:
        """End the process without a word."""
        self.process.kill()
        self.process.join()


@contextmanager
def member_of(path: Path, *, clock: Any = None, rules: int = 0, **how: Any) -> Iterator[Member]:
    """A process that has joined the store. Its clock is ahead by the value of `clock`, in
    nanoseconds. With `rules` it is of a release that shares by these. Raises what it raised."""
    fresh = multiprocessing.get_context("forkserver")
    ours, theirs = fresh.Pipe()
    process = fresh.Process(target=_serve, args=(path, theirs, clock, rules, how))
    process.start()
    theirs.close()
    try:
        member = Member(process, ours)
        if (error := ours.recv()) is not None:
            raise error
        yield member
        if process.is_alive():
            member.ask("close")
            ours.send(None)
            process.join()
    finally:
        process.kill()
        process.join()
        ours.close()


def _serve(path: Path, pipe: Connection, clock: Any, rules: int, how: dict[str, Any]) -> None:
    if clock is not None:

        def moved(_: Clock) -> int:
            return time.time_ns() + int(clock.value)

        Clock.wall_ns = moved  # type: ignore[method-assign]
    if rules:
        for module in (guest, http):
            module.SHARING = rules  # type: ignore[misc]
    try:
        store = kvstore.open(path, shared=True, **{"patience": 60, **how})
    except KVStoreError as error:
        pipe.send(error)
        return
    pipe.send(None)
    while (asked := pipe.recv()) is not None:
        verb, args, given = asked
        try:
            found = getattr(store, verb)
            found = found(*args, **given) if callable(found) else found
            pipe.send(found if isinstance(found, str | bytes | int | type(None)) else repr(found))
        except KVStoreError as error:
            pipe.send(error)


def come(path: Path, numbers: range, gate: Any) -> None:
    """Join a store when the gate opens, once for each number: write one key, and read it."""

    def join(number: int) -> None:
        with kvstore.open(path, shared=True, patience=60) as store:
            store.put(b"came/%d" % number, b"1")
            assert store.get(b"came/%d" % number) == b"1"

    with ThreadPoolExecutor(len(numbers)) as threads:
        gate.wait()
        list(threads.map(join, numbers))


def own(path: Path, pipe: Connection) -> None:
    """Own a store until told to close it."""
    with kvstore.open(path, shared=True) as store:
        store.put(b"k", b"v")
        pipe.send((os.getpid(), store.role))
        pipe.recv()


def cron(path: str) -> None:
    """A script as cron runs it."""
    with kvstore.open(path, shared=True) as store:
        sys.stdout.write(f"{store.increment(b'runs')}\n")


def until(condition: Any, seconds: float = 60) -> None:
    """Return once `condition()` is true."""
    ends_at = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < ends_at, "it did not come true"
        time.sleep(0.005)


if __name__ == "__main__":
    cron(sys.argv[1])
