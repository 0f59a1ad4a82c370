"""What processes of the tests do with a shared store."""

from __future__ import annotations

import os
import sys
import time
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import kvstore


def put_mine(store: Any) -> tuple[str, bytes]:
    """Write with a handle that came from another process; returns the role and what is read."""
    key = b"pid/%d" % os.getpid()
    store.put(key, b"1")
    assert store.get(key) == b"1"
    return store.role, store.get(b"k")


def put_one(path: Path, number: int) -> str:
    """Join a store, and write one key."""
    with kvstore.open(path, shared=True, patience=60) as store:
        store.put(b"one/%d" % number, b"")
        return store.role


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
