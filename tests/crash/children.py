"""The children that tests kill: each works without end and reports its calls through a pipe.

Each function runs in a process of its own. It sends `("begun", ...)` before each call that writes,
and one acknowledgement after the call has returned.
"""

from __future__ import annotations

import random
import threading
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import kvstore
from kvstore import bulk
from kvstore.backup import Collection
from kvstore.opening import engine_at
from tests.harness.bounds import bounds

ROWS_PER_IMPORT = 300
KEYS_PER_BATCH = 5
THREADS = 3


def open_store(path: Path, **options: Any) -> kvstore.Store:
    """Open a store by the engine that made it."""
    return kvstore.open(path, engine_at(path) or "rocksdb", **options)


def start(
    child: Callable[[Path, Connection, int], None], place: Path, seed: int, said: Connection
) -> None:
    """Do the work of `child`."""
    child(place, said, seed)


def commits(place: Path, acknowledged: Connection, seed: int) -> None:
    """Threads that commit in every durability: puts, batches, one range replaced again."""
    store = open_store(place / "store")
    lock = threading.Lock()

    def tell(what: tuple[Any, ...]) -> None:
        with lock:
            acknowledged.send(what)

    def work(thread: int) -> None:
        rng = random.Random(seed + thread)
        name = b"%d-%d" % (seed, thread)
        for number in range(1 << 30):
            durability: Any = rng.choice(["sync", "group", "async"])
            tell(("begun",))
            if rng.random() < 0.5:
                store.put(b"put/%s/%06d" % (name, number), b"v", durability=durability)
                tell(("put", name, number, durability))
                continue
            with store.batch(durability=durability) as batch:
                if thread == 0:
                    batch.delete_range(b"replaced/", b"replaced0")
                for index in range(KEYS_PER_BATCH):
                    value = b"%06d" % number
                    batch.put(b"batch/%s/%06d/%d" % (name, number, index), b"x" * 300)
                    if thread == 0:
                        batch.put(b"replaced/%d" % index, value)
            tell(("batch", name, number, durability))

    threads = [threading.Thread(target=work, args=(n,), daemon=True) for n in range(THREADS)]
    for running in threads:
        running.start()
    for running in threads:
        running.join()


def pieces(place: Path, acknowledged: Connection, seed: int) -> None:
    """The same, and each commit goes to the engine in pieces."""
    with bounds(COMMIT_PIECE_BYTES=1, COMMIT_PIECE_ROWS=2, CHANGE_CHUNK_BYTES=300):
        commits(place, acknowledged, seed)


def imports(place: Path, acknowledged: Connection, seed: int) -> None:
    """Imports, linked or moved, one after the other, with ordinary writes between them."""
    store = open_store(place / "store")
    rng = random.Random(seed)
    for number in range(1 << 30):
        name = b"%d-%d" % (seed, number)
        acknowledged.send(("begun",))
        made = stage(place / f"staged-{name.decode()}", name, rng.randint(1, 3))
        stamp = bulk.ingest(store, made.staging, move=rng.random() < 0.5)
        acknowledged.send(("import", name, int(stamp)))
        if rng.random() < 0.3:
            acknowledged.send(("begun",))
            store.revert_import(made.import_id)
            acknowledged.send(("revert", name, 0))


def stage(staging: Path, name: bytes, parts: int) -> bulk.Import:
    made = bulk.Import.create(staging)
    rows = ROWS_PER_IMPORT // parts
    for part in range(parts):
        with made.writer() as writer:
            for row in range(part * rows, (part + 1) * rows):
                writer.put(b"import/%s/%06d" % (name, row), b"v" * 40)
    made.seal()
    return made


def backups(place: Path, acknowledged: Connection, seed: int) -> None:
    """Writes and incremental backups."""
    store = open_store(place / "store", durability="async")
    collection = Collection(place / "backups")
    for number in range(1 << 30):
        acknowledged.send(("begun",))
        with store.batch() as batch:
            for index in range(50):
                batch.put(b"%d/%d" % (index, seed), b"%d" % number)
        store.delete_range(b"1", b"2")
        info = collection.backup(store)
        acknowledged.send(("backup", int(info.upper)))


def restores(place: Path, acknowledged: Connection, seed: int) -> None:
    """Restores of one collection to one path after the other."""
    collection = Collection(place / "backups")
    for number in range(1 << 30):
        path = place / f"restored-{seed}-{number}"
        acknowledged.send(("begun", str(path)))
        collection.restore(path, history=number % 2 == 0)
        acknowledged.send(("restored", str(path)))


def births(place: Path, acknowledged: Connection, seed: int) -> None:
    """Make new stores, one after the other."""
    for number in range(1 << 30):
        path = place / f"new-{seed}-{number}"
        acknowledged.send(("begun", str(path)))
        with kvstore.open(path) as store:
            store.put(b"k", b"v")
        acknowledged.send(("born", str(path)))
