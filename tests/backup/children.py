"""Processes that kill themselves at a step of a backup, a compaction, an expiry or a restore.

A step is an effect that outlives the process: a call of the operating system, of the engine or of a
journal that changes files. Child n is killed just before its n-th step. Nothing on disk changes
between two steps, so the children together leave every state that a kill can leave.
"""

from __future__ import annotations

import itertools
import os
import random
import signal
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NamedTuple

import pandas  # noqa: F401  # pyarrow imports it when it first converts: 0.2 s a child
import pyarrow.parquet  # noqa: F401

import kvstore
from kvstore.backup import Collection
from kvstore.bulk.part import SstFile
from kvstore.engine.rocks import RocksEngine
from kvstore.errors import RetryableError
from kvstore.storage.journal import Journal
from tests.backup.histories import change
from tests.harness.bounds import bounds

CALLS = (
    "fsync", "link", "unlink", "remove", "rename", "replace", "mkdir",
    "rmdir", "write", "truncate", "ftruncate",
)  # fmt: skip
"""Calls of the operating system. The list has calls that open a file before calls that write it."""

STEPS = (
    *((os, name) for name in CALLS),
    (Journal, "append"),
    (RocksEngine, "write"),
    (RocksEngine, "sync"),
    (RocksEngine, "ingest"),
    (RocksEngine, "checkpoint"),
    (RocksEngine, "compact"),
    (SstFile, "finish"),
)


class Fuse:
    """Kills this process at step `at`, and counts the steps if the process ends before."""

    def __init__(self, at: int) -> None:
        self.count = 0
        self._at = at

    def lay(self) -> None:
        """Make every step count, and end the process at its number."""
        for owner, name in STEPS:
            self._wrap(owner, name)

    def _wrap(self, owner: Any, name: str) -> None:
        inner = getattr(owner, name)

        def step(*args: Any, **kwargs: Any) -> Any:
            self._burn()
            return inner(*args, **kwargs)

        setattr(owner, name, step)

    def _burn(self) -> None:
        if self.count == self._at:
            os.kill(os.getpid(), signal.SIGKILL)
        self.count += 1


def run(action: str, place: Path, at: int, said: Connection, limits: dict[str, float]) -> None:
    """Do `action` in `place` until step `at`; send the number of steps if the action ends
    before."""
    fuse = Fuse(at)
    with bounds(limits), kvstore.open(place / "store", durability="async") as store:
        fuse.lay()
        ACTIONS[action](Collection(place / "collection"), store, place)
        steps = fuse.count
        fuse.count = -1 << 30  # closing the store is no step of the action
    said.send(steps)


def back_up(collection: Collection, store: kvstore.Store, place: Path) -> None:
    collection.backup(store, token="t")


def begin_again(collection: Collection, store: kvstore.Store, place: Path) -> None:
    collection.backup(store, token="t", full=True)


def compact(collection: Collection, store: kvstore.Store, place: Path) -> None:
    collection.compact()


def expire(collection: Collection, store: kvstore.Store, place: Path) -> None:
    collection.expire(before=expiry(collection))


def thin(collection: Collection, store: kvstore.Store, place: Path) -> None:
    collection.expire(before=collection.upper - 1)


def expiry(collection: Collection) -> kvstore.Timestamp:
    """An instant in the middle of the newest chain, at which all older chains have ended."""
    batches = collection.batches()
    return kvstore.Timestamp(batches[len(batches) // 2].upper - 1)


def restore(collection: Collection, store: kvstore.Store, place: Path) -> None:
    # otherwise an earlier child was killed after its last step
    if not (place / "restored").exists():
        collection.restore(place / "restored")


def restore_into(collection: Collection, store: kvstore.Store, place: Path) -> None:
    with kvstore.open(place / "target") as target:
        collection.restore_into(target)


ACTIONS: dict[str, Callable[[Collection, kvstore.Store, Path], None]] = {
    "back_up": back_up,
    "begin_again": begin_again,
    "compact": compact,
    "expire": expire,
    "thin": thin,
    "restore": restore,
    "restore_into": restore_into,
}


def resume(
    url: str, options: dict[str, Any], place: Path, at: int, said: Connection, limits: Any
) -> None:
    """Restore from an object store, or continue that, until step `at`; send the number of steps if
    the restore ends before."""
    fuse = Fuse(at)
    with bounds(limits):
        collection = Collection(url, options=options)
        fuse.lay()
        collection.restore(place, resume=True)
        said.send(fuse.count)
        fuse.count = -1 << 30


def prepare(place: Path, seed: int, *, backups: int, chains: int, changes: int) -> None:
    """A store with `chains` chains of `backups` backups each, and more changes after the last
    one."""
    pick = random.Random(seed)
    with kvstore.open(place / "store", durability="async") as store:
        collection = Collection(place / "collection")
        for number in range(backups * chains):
            change(store, pick, changes)
            collection.backup(store, full=number > 0 and number % backups == 0)
            if number == 0 and chains == 1:
                collection.label("kept")
        change(store, pick, changes)


class FollowerSays(NamedTuple):
    """The state of a store and its follower, the resident bytes of their process, and the changes
    that it has made."""

    changes: int
    upper: int
    windows: int
    failures: int
    since: int
    behind_seconds: float
    resident_bytes: int


SMALL = kvstore.Options(cache_bytes=32 << 20, write_buffer_bytes=4 << 20, open_files=64)
"""The options that `docs/how-to/memory-and-containers.md` advises."""

SMALL_MERGES = {"MERGE_ROWS_MAX": 1 << 16, "MERGE_BYTES_MAX": 32 << 20}
"""An eighth of the rows and bytes that a merge of backups buffers."""


def follow_bucket(
    url: str, options: dict[str, Any], place: Path, seed: int, said: Connection
) -> None:
    """Write to a store at full speed beside a follower, with GC behind both, and tell how they
    stand, until killed. `seed` draws the changes."""
    pick = random.Random(seed)
    collection = None
    while collection is None:  # as a supervisor does that starts the process again
        with suppress(RetryableError):
            collection = Collection(url, options=options, patience=0.5)
    with (
        bounds(FOLLOW_PAUSE_S=0.01, FOLLOW_PAUSE_S_MAX=0.1, **SMALL_MERGES),
        kvstore.open(place, durability="async", options=SMALL) as store,
        collection.follow(store, every=timedelta(milliseconds=1)) as follower,
    ):
        for number in itertools.count(1):
            for _ in range(20):
                change(store, pick, 10)
                follower.require()
            store.gc(before=store.upper)
            status = follower.status()
            pages = int(Path("/proc/self/statm").read_text().split()[1])
            resident = pages * os.sysconf("SC_PAGE_SIZE")
            said.send(
                FollowerSays(
                    200 * number,
                    int(status.upper),
                    status.windows,
                    status.failures,
                    int(store.since),
                    status.behind_seconds,
                    resident,
                )
            )


def follow_until_killed(place: Path, seed: int, pipe: Connection) -> None:
    """Write while a follower backs up. The writer stays few commits ahead, however slow windows
    are, so that the history stays short."""
    pick = random.Random(seed)
    collection = Collection(place / "collection")
    with (
        kvstore.open(place / "store") as store,
        collection.follow(
            store, every=timedelta(milliseconds=1), progress=lambda info: pipe.send(int(info.upper))
        ) as follower,
    ):
        while True:
            behind = store.upper - 1
            change(store, pick, 10)
            follower.wait_until(behind)


def publish_until_killed(place: str, step: int) -> None:
    """Publish a table as Delta, and die by SIGKILL at one of the steps that `progress` tells."""
    steps = iter(range(1000))

    def count(rows: int) -> None:
        if next(steps) == step:
            os.kill(os.getpid(), signal.SIGKILL)

    collection = Collection(f"{place}/collection")
    collection.publish("trips", f"{place}/delta", "delta", progress=count)
