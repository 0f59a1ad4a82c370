"""Pushes that tests make, and stores that take them."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

from kvstore import bulk
from kvstore.bulk.pushes import Pushes
from kvstore.bulk.pushes.pull import Puller
from kvstore.storage.memory_storage import MemoryBlob
from kvstore.store import Store


class CountingBlob(MemoryBlob):
    """Counts the reads of the log."""

    reads = 0

    def get_range(self, name: str, *, start: int, length: int) -> bytes | None:
        self.reads += name.startswith("log/")
        return super().get_range(name, start=start, length=length)

    def size(self, name: str) -> int | None:
        self.reads += name.startswith("log/")
        return super().size(name)


def push(pushes: Pushes, rows: Mapping[bytes, bytes], *, shards: int = 1, **mode: Any) -> bulk.Push:
    """Push `rows`. `mode` are further arguments of `Pushes.begin`."""
    with pushes.begin(shards, **mode) as building:
        for shard in range(shards):
            with building.writer(shard) as writer:
                for key in sorted(rows):
                    if bulk.shard_of(key, shards) == shard:
                        writer.put(key, rows[key])
        return building.seal()


def drain(puller: Puller) -> None:
    while puller.step():
        pass


def build_time(*stores: Store) -> int:
    """A time above each write so far to the stores, and below each later one."""
    newest = max(int(store.upper) for store in stores)
    while time.time_ns() <= newest:
        pass
    return time.time_ns()
