"""Large commits with an act between their pieces: what the tests do, and what their children do."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Final

import kvstore
from kvstore.opening import engine_at
from kvstore.store import Store
from kvstore.timeline.request_notes import RequestToken
from tests.harness.bounds import bounds
from tests.harness.parts import parts_of

LIMITS: Final = {
    "COMMIT_PIECE_BYTES": 200,
    "COMMIT_PIECE_ROWS": 5,
    "CHANGE_CHUNK_BYTES": 150,
    "THIN_FROM_BYTES": 60,
    "INLINE_VALUE_BYTES": 40,
}
TIME: Final = 10**18
TOKEN: Final = RequestToken("writer", 1)


def open_store(place: Path, engine: str = "") -> Store:
    """The store of the tests, whose clock stands: each opening begins at the same time."""
    path = place / "store"
    found = engine or engine_at(path) or "rocksdb"
    clock = kvstore.ManualClock(TIME)
    return kvstore.open(path, found, durability="async", clock=clock)


def begin(store: Store, streams: int = 1) -> None:
    """What is there before the large commit."""
    store.put_many({b"k%02d" % number: b"old" for number in range(0, 20, 2)})
    store.put(b"gone/1", b"old")
    if streams > 1:
        store.reshard(streams)
    store.sync()


def write_large(store: Store, token: RequestToken | None = TOKEN) -> kvstore.Timestamp:
    """A commit of puts, large and small, deletes, a range delete and keys that expire."""
    writes = store.requests.write_set()
    writes.delete_range(b"gone/", b"gone0")
    writes.put(b"gone/2", b"new")
    for number in range(19, -1, -1):
        if number % 7 == 3:
            writes.delete(b"k%02d" % number)
        else:
            writes.put(b"k%02d" % number, b"new%d" % number * (20 if number % 5 == 0 else 2))
    writes.put_expiring(b"brief", b"v", TIME + int(timedelta(days=9).total_seconds() * 10**9))
    return store.requests.commit(writes, token, None)


def state_after(state: dict[bytes, bytes]) -> dict[bytes, bytes]:
    """The state behind `write_large`."""
    with (
        bounds(COMMIT_PIECE_BYTES=1 << 40),
        kvstore.open(None, "memory", clock=kvstore.ManualClock(TIME)) as model,
    ):
        model.put_many(state)
        write_large(model)
        return dict(model.scan())


@contextmanager
def acting(store: Store, act: Callable[[int], None]) -> Iterator[list[int]]:
    """Within the block `act` is called behind each write of the engine, with its number. The list
    has one item for each."""
    engine: Any = parts_of(store).engine
    write, numbers = engine.write, list[int]()

    def writing(*given: Any, **how: Any) -> None:
        write(*given, **how)
        numbers.append(len(numbers))
        act(numbers[-1])

    engine.write = writing
    try:
        yield numbers
    finally:
        engine.write = write


def die_between(place: Path, stage: int, said: Connection) -> None:
    """Commit, and kill this process behind the write number `stage` of the engine."""

    def die(number: int) -> None:
        if number == stage:
            os.kill(os.getpid(), signal.SIGKILL)

    with bounds(LIMITS):
        store = open_store(place)
        with acting(store, die):
            said.send(("begun", int(store.upper)))
            at = write_large(store)
            said.send(("done", int(at)))
        store.close()
