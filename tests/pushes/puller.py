"""Processes that pull until they are killed: by the test at any moment, or by themselves at a named
stage of a push or of a revert."""

from __future__ import annotations

import os
import random
import signal
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from datetime import timedelta
from importlib import import_module
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Final, NamedTuple

import kvstore
from kvstore.bulk.bucket import Bucket
from kvstore.bulk.pushes import Pushes
from kvstore.bulk.pushes.pull import AmendedPush, Puller
from kvstore.bulk.pushes.push_log import PushLog
from kvstore.engine.rocks import RocksEngine
from kvstore.store import Store
from kvstore.timeline.imports import Imports
from tests.harness.bounds import bounds

CALLS: Final[Mapping[str, tuple[Any, str]]] = {
    "look at the log": (PushLog, "event"),
    "read the manifest": (Bucket, "manifest"),
    "fetch": (import_module("kvstore.bulk.ingest"), "fetch"),
    "compare": (AmendedPush, "begin"),
    "find the rows of a revert": (import_module("kvstore.bulk.pushes.pull"), "_written"),
    "prepare": (Imports, "prepare"),
    "link": (Imports, "link"),
    "look again under the lock": (AmendedPush, "_at_commit"),
    "add": (Imports, "add"),
    "revert by the record": (Imports, "revert"),
    "abort": (Imports, "abort"),
    "write": (RocksEngine, "write"),
    "sync": (RocksEngine, "sync"),
    "sweep": (Puller, "_sweep"),
    "report": (Puller, "_report"),
}
"""The calls that a look at the log makes, in about their order."""


class Stage(NamedTuple):
    """A moment of a look at the log: before or after its call number `count` of one kind."""

    name: str
    is_after: bool
    count: int = 1


class Wrote(NamedTuple):
    """A write of the service, which was committed at a time."""

    at: int
    effect: dict[bytes, bytes | None]


class Taken(NamedTuple):
    """A look at the log has ended, and the store has taken so many events."""

    events: int


class Reached(NamedTuple):
    """The process kills itself now."""

    stage: Stage


def pull_on(path: str, url: str, said: Connection) -> None:
    """Look at the pushes at `url` again and again. `said` gets "begun" before each look, and
    afterwards "taken" or "idle"."""
    with pulling(path, url) as (_, puller):
        while True:
            said.send("begun")
            said.send("taken" if puller.step() else "idle")


def pull_until(
    path: str, url: str, stage: Stage, keys: list[bytes], seed: int, said: Connection
) -> None:
    """Look at the pushes at `url`, and die at `stage`. `said` gets `Taken` after each look,
    "idle" where nothing is left, `Wrote` for the writes of a service of `keys`, and `Reached`. The
    service writes when the store is between its pass over a push and the commit."""
    pick = random.Random(seed)
    with pulling(path, url) as (store, puller):
        link, is_serving = store.imports.link, False

        def write_first(files: list[Path]) -> None:
            nonlocal is_serving
            is_serving = True
            for wrote in service(store, keys, pick):
                said.send(wrote)
            is_serving = False
            link(files)

        store.imports.link = write_first  # type: ignore[method-assign,assignment]
        left = stage.count

        def at(is_after: bool) -> None:
            nonlocal left
            if not is_serving and is_after == stage.is_after:
                left -= 1
                if not left:
                    said.send(Reached(stage))
                    os.kill(os.getpid(), signal.SIGKILL)

        owner, name = CALLS[stage.name]
        plain = getattr(owner, name)

        def watched(*arguments: Any, **named: Any) -> Any:
            at(False)
            found = plain(*arguments, **named)
            at(True)
            return found

        if stage.name == "link":
            link = watched_link(link, at)
        else:
            setattr(owner, name, watched)
        while puller.step():
            said.send(Taken(puller.status["log"]))
        said.send("idle")
        signal.pause()  # the test kills it


def watched_link(link: Callable[[Any], None], at: Callable[[bool], None]) -> Callable[[Any], None]:
    def watched(files: Any) -> None:
        at(False)
        link(files)
        at(True)

    return watched


def service(store: Store, keys: list[bytes], pick: random.Random) -> Iterator[Wrote]:
    """Random writes: puts, deletes, and keys that expire."""
    for key in pick.sample(keys, pick.randint(0, 2)):
        kind = pick.choice(["put", "delete", "expire"])
        if kind == "put":
            value = b"beside %d" % pick.getrandbits(20)
            yield Wrote(int(store.put(key, value)), {key: value})
        elif kind == "delete":
            yield Wrote(int(store.delete(key)), {key: None})
        else:
            for at, short in expired(store, key):
                yield Wrote(at, {key: short})


def expired(store: Store, key: bytes) -> list[tuple[int, bytes | None]]:
    """Put a key that expires at once, and wait until it has. Returns the times of both changes, and
    the value from each of them on."""
    put = store.put(key, b"short", expires=timedelta(milliseconds=2))
    while store.get(key) is not None:
        pass
    gone = store.history(key)[0]
    assert gone.value is None
    return [(int(put), b"short"), (int(gone.timestamp), None)]


@contextmanager
def pulling(path: str, url: str) -> Iterator[tuple[Store, Puller]]:
    """The store at `path`, and a worker that pulls into it."""
    with bounds(OBJECT_PIECE_BYTES=256, OBJECT_PIECES_AT_ONCE=2), kvstore.open(path) as store:
        yield store, Puller(store, Pushes(url), name="killed")
