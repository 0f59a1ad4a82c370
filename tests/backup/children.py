"""Processes that kill themselves at a step of a backup, a compaction, an expiry or a restore.

A step is a call that changes storage (blob, consensus, engine, files): the n-th kills the process
just before it is made, or just after.
"""

from __future__ import annotations

import os
import random
import signal
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import kvstore
from backup import Collection
from backup.shard import FileBlob, FileConsensus, batch, part
from bulk.sst import SstFile
from kvstore.engine.rocks import RocksEngine
from tests.backup.histories import change

STEPS = (
    (FileBlob, "put"),
    (FileBlob, "delete"),
    (FileConsensus, "compare_and_set"),
    (FileConsensus, "truncate"),
    (RocksEngine, "write"),
    (RocksEngine, "sync"),
    (RocksEngine, "ingest"),
    (SstFile, "finish"),
    (os, "rename"),
)


def small_parts() -> None:
    """Have a backup of a few hundred rows fill several parts."""
    part.PART_BYTES_MAX = 4_000
    batch.ROW_GROUP_ROWS_MAX = 20


class Fuse:
    """Kills this process at step `at`; counts the steps if that is never reached."""

    def __init__(self, at: int) -> None:
        self.count = 0
        self._at = at

    def lay(self) -> None:
        """Have every step burn it."""
        for owner, name in STEPS:
            self._wrap(owner, name)

    def _wrap(self, owner: Any, name: str) -> None:
        inner = getattr(owner, name)

        def step(*args: Any, **kwargs: Any) -> Any:
            self._burn()
            result = inner(*args, **kwargs)
            self._burn()
            return result

        setattr(owner, name, step)

    def _burn(self) -> None:
        if self.count == self._at:
            os.kill(os.getpid(), signal.SIGKILL)
        self.count += 1


def run(action: str, place: Path, at: int, said: Connection) -> None:
    """Do `action` in `place` until step `at`; say how many steps there were if it ends."""
    small_parts()
    with kvstore.open(place / "store", durability="async") as store:
        collection = Collection(place / "collection")
        fuse = Fuse(at)
        fuse.lay()
        ACTIONS[action](collection, store, place)
        said.send(fuse.count)


def back_up(collection: Collection, store: kvstore.Store, place: Path) -> None:
    collection.backup(store, token="t")


def compact(collection: Collection, store: kvstore.Store, place: Path) -> None:
    collection.compact()


def expire(collection: Collection, store: kvstore.Store, place: Path) -> None:
    collection.expire(before=expiry(collection))


def expiry(collection: Collection) -> kvstore.Timestamp:
    """An instant in the middle of the collection."""
    backups = collection.list()
    return kvstore.Timestamp(backups[len(backups) // 2].upper - 1)


def restore(collection: Collection, store: kvstore.Store, place: Path) -> None:
    collection.restore(place / "restored")


def restore_into(collection: Collection, store: kvstore.Store, place: Path) -> None:
    with kvstore.open(place / "target") as target:
        collection.restore_into(target)


ACTIONS: dict[str, Callable[[Collection, kvstore.Store, Path], None]] = {
    "back_up": back_up,
    "compact": compact,
    "expire": expire,
    "restore": restore,
    "restore_into": restore_into,
}


def prepare(place: Path, seed: int, *, backups: int) -> None:
    """A store and some backups of it, each but the last of several parts; then more changes."""
    small_parts()
    pick = random.Random(seed)
    with kvstore.open(place / "store", durability="async") as store:
        collection = Collection(place / "collection")
        for _ in range(backups):
            change(store, pick, 60)
            collection.backup(store)
        change(store, pick, 150)
